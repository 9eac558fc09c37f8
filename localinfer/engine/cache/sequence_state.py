"""The recurrent states of one sequence: the slots that hold them, the steps that advance them, and their snapshots.

States are those at one position, followed by the rows of a log, of which any suffix can be dropped. A step reads both
and writes other slots, so the states before it stay whole: a step that is interrupted, or whose tokens are rejected, is
undone by going back to them.

A recurrent layer keeps one state per sequence, so a text can only be continued from positions whose states were kept as
snapshots: where texts are likely to part (ends of prompts, of turns and of replies, somewhat before prompts end, where
texts parted before), and a sparse grid, for edits anywhere else.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from localinfer.engine.cache.block_pool import PagePool
from localinfer.errors import OutOfMemoryError
from localinfer.kernels.kv_layout import LOG_ROWS
from localinfer.kernels.program import StateStep
from localinfer.types import Record


class SnapshotPolicy(Record):
    """Number of states that are kept."""

    grid_tokens: int = 512
    """Distance of positions on the grid."""
    grid_share: float = 0.15
    """Largest share of all bytes that the cache holds for snapshots of the grid; of those that it may hold, for a model
    whose texts take nothing else."""
    near_tokens: int = 16
    """Distance after another snapshot below which one saves less than a step costs."""

    def before_end(self, length: int, page_tokens: int) -> int:
        """The first end of a page that is no further before the end of a prompt than a step of the grid; 0 for none.

        Prompts with a common beginning often part shortly before their ends, such as examples before a question.
        """
        return max(0, -(-(length - self.grid_tokens) // page_tokens) * page_tokens)

    def most_of_grid(self, num_bytes: int, state_bytes: int) -> int:
        """Number of snapshots of the grid that may be in a cache of so many bytes and one state more."""
        return int(self.grid_share * (num_bytes + state_bytes)) // state_bytes


DEFAULT_POLICY = SnapshotPolicy()


def tokens_saved(before: int, position: int, after: int) -> int:
    """Tokens that a snapshot saves between those before and after it, over edits at every position."""
    return (position - before) * (after - position)


@dataclass(eq=False, slots=True)
class Snapshot:
    """States that the prefix tree holds: their slot, and when they were made or last continued from."""

    slot: int
    last_used: int


NO_SLOT = -1

Settle = Callable[[StateStep], None]
"""`StatefulProgram.settle`."""


class StatePlace(NamedTuple):
    """States at `position`, in a slot, or none where a sequence begins; and so many rows of a log after it, if any."""

    slot: int = NO_SLOT
    position: int = 0
    log: int = NO_SLOT
    num_logged: int = 0

    @property
    def length(self) -> int:
        """Positions that the states and the rows of the log stand for."""
        return self.position + self.num_logged

    def at(self, length: int) -> "StatePlace":
        """The same with fewer rows of the log, as many as reach to `length`, which is not before the states."""
        num_logged = min(self.num_logged, length - self.position)
        return self._replace(log=self.log if num_logged else NO_SLOT, num_logged=num_logged)


BEGINNING = StatePlace()


class _PlannedStep(NamedTuple):
    """A step that was not committed yet. snapshots: positions and slots that it writes besides."""

    end: int
    is_logged: bool
    snapshots: tuple[tuple[int, int], ...] = ()


class SequenceState:
    """Slots of one sequence's states; a `SequenceCache` keeps it in step with its pages.

    now: the states after the sequence's last position; before: those before the last step, as long as they are kept.
    next_state, next_log: slots that the next step may write. taken: slots of snapshots by position, not in the prefix
    tree yet.
    """

    def __init__(self, pool: PagePool, policy: SnapshotPolicy | None = None) -> None:
        self.now = BEGINNING
        self.before: StatePlace | None = None
        self.taken: dict[int, int] = {}
        self._pool = pool
        self._policy = policy or DEFAULT_POLICY
        self._kept: StatePlace | None = None
        self.next_state = self.next_log = NO_SLOT
        self._planned = _PlannedStep(0, False)
        self._takes_snapshots = False
        self._places: frozenset[int] = frozenset()
        self._needed = -1
        self._parting = 0
        self._wanted = self._places
        self._last_snapshot = 0

    def want_snapshots(self, places: Sequence[int], parting: int | None = None, needed: int | None = None) -> None:
        """Take snapshots at these positions too, once they are computed, and on the grid.

        parting: where the text parts from others, in place of where it did before. needed: where a text continues in
        any case, so that a snapshot is worth its memory however near another one is.
        """
        self._needed = self._needed if needed is None else needed
        self._takes_snapshots = True
        self._places |= frozenset(places) | ({self._needed} - {-1})
        self._parting = self._parting if parting is None else parting
        self._wanted = self._places | {self._parting}

    def fork_from(self, other: "SequenceState") -> None:
        """Begin where another sequence is, and share its slots until either continues."""
        self.retain(other.now)
        self.now = other.now
        self._takes_snapshots = other._takes_snapshots
        self._places, self._parting, self._wanted = other._places, other._parting, other._wanted
        self._needed = other._needed
        self._last_snapshot = other._last_snapshot

    def share_snapshot(self, slot: int, position: int, *, is_inside_page: bool) -> None:
        """Note a snapshot of the prefix tree that this sequence resumes from.

        Texts that part inside a page have a node each, so the tree gets it once more for this one.
        """
        if is_inside_page and position not in self.taken:
            self._pool.states.retain(slot)
            self._note_taken(position, slot)
        self._last_snapshot = max(self._last_snapshot, position)

    def slots(self) -> set[int]:
        """Slots of states that are held."""
        places = (self.now, self.before, self._kept)
        slots = {place.slot for place in places if place is not None} | {self.next_state, *self.taken.values()}
        return slots - {NO_SLOT}

    def logs(self) -> set[int]:
        """Slots of logs that are held."""
        places = (self.now, self.before, self._kept)
        return ({place.log for place in places if place is not None} | {self.next_log}) - {NO_SLOT}

    def reserve(self, *, is_logged: bool) -> None:
        """Allocate what the next step writes; nothing can go back to before the last step from now on.

        is_logged: its rows go to a log. Raises: OutOfMemoryError.
        """
        before, self.before = self.before, None
        if before is not None:
            self._release(before)
        if self.next_state == NO_SLOT and (not is_logged or self.now.num_logged):
            self.next_state = self._pool.take_slot(self._pool.states)
        if self.next_log == NO_SLOT and is_logged:
            self.next_log = self._pool.take_slot(self._pool.logs)

    def step(self, num_rows: int, *, is_logged: bool) -> StateStep:
        """Plan how a reserved step of so many rows advances the states."""
        assert not is_logged or num_rows <= LOG_ROWS, "more rows than a log holds"
        pool, now = self._pool, self.now
        self._drop_planned()
        source = pool.states.address(now.slot) if now.slot != NO_SLOT else 0
        log = pool.logs.address(now.log) if now.num_logged else 0
        targets: list[tuple[int, int]] = []
        new_log = 0
        first = now.length
        if is_logged:
            self._planned = _PlannedStep(first + num_rows, True)
            new_log = pool.logs.address(self.next_log)
            if now.num_logged:
                targets.append((0, pool.states.address(self.next_state)))
        else:
            self._planned = _PlannedStep(first + num_rows, False)
            self._plan_snapshots(first, num_rows)
            targets += [(place - first, pool.states.address(slot)) for place, slot in self._planned.snapshots]
            targets.append((num_rows, pool.states.address(self.next_state)))
        return StateStep(source, targets, log, now.num_logged, new_log)

    def after_step(self, length: int) -> tuple[StatePlace, StatePlace | None, int, int]:
        """Slots that `now`, `before`, `next_state` and `next_log` become with the planned step; changes nothing."""
        now, logged = self.now, length - self.now.length
        assert length == self._planned.end, "what was planned is committed"
        if not self._planned.is_logged:
            return StatePlace(self.next_state, length), now, NO_SLOT, self.next_log
        if now.num_logged:
            return StatePlace(self.next_state, now.length, self.next_log, logged), now, NO_SLOT, NO_SLOT
        return now._replace(log=self.next_log, num_logged=logged), None, self.next_state, NO_SLOT

    def finish_step(self) -> None:
        """Take over what a committed step has written besides."""
        planned, self._planned = self._planned, _PlannedStep(0, False)
        for place, slot in planned.snapshots:
            self._note_taken(place, slot)
        if planned.is_logged:
            # The log goes back to where it began, further than the former state.
            before, self.before = self.before, None
            if before is not None:
                self._release(before)
        if self._takes_snapshots:
            self._take_present()

    def place_at(self, length: int, can_go_to: Callable[[int], bool]) -> StatePlace:
        """The deepest state at or before `length` that the sequence can go back to."""
        places = [place for place in (self.now, self.before, self._kept) if place is not None]
        places += [StatePlace(slot, position) for position, slot in self.taken.items()]
        reachable = [place.at(length) for place in places if place.position <= length]
        return max(
            (place for place in reachable if can_go_to(place.length)), key=lambda place: place.length, default=BEGINNING
        )

    def retain(self, place: StatePlace) -> None:
        """Add references to the slots of a state."""
        if place.slot != NO_SLOT:
            self._pool.states.retain(place.slot)
        if place.log != NO_SLOT:
            self._pool.logs.retain(place.log)

    def forget_after(self, end: int) -> None:
        """Release snapshots and a kept state after a position, before the sequence goes back to it.

        Before, because Ctrl-C may come between the two: what is left of another text must not outlast the way back.
        """
        self._last_snapshot = min(self._last_snapshot, end)
        for position in [position for position in self.taken if position > end]:
            self._pool.release_state(self.taken.pop(position))
        kept = self._kept
        if kept is not None and kept.length > end:
            self._kept = None
            self._release(kept)

    def release(self, *places: StatePlace | None) -> None:
        """Release former states."""
        for place in places:
            if place is not None:
                self._release(place)

    def keep_present(self) -> None:
        """Let `truncate` come back to the present state, instead of the one kept before."""
        former, now = self._kept, self.now
        self.retain(now)
        self._kept = now
        if former is not None:
            self._release(former)

    def take_end(self, settle: Settle | None) -> None:
        """Take a snapshot at the end of the sequence, if it takes any, or where its log begins for want of memory."""
        now = self.now
        if not self._takes_snapshots or now.length - self._last_snapshot < self._policy.near_tokens:
            return
        if now.num_logged and settle is not None:
            with suppress(OutOfMemoryError):
                slot = self._pool.take_slot(self._pool.states)
                try:
                    source = self._pool.states.address(now.slot) if now.slot != NO_SLOT else 0
                    targets = ((0, self._pool.states.address(slot)),)
                    settle(StateStep(source, targets, self._pool.logs.address(now.log), now.num_logged))
                except BaseException:
                    self._pool.release_state(slot)
                    raise
                self._note_taken(now.length, slot)
                return
        if now.slot != NO_SLOT and now.position - self._last_snapshot >= self._policy.near_tokens:
            self._pool.states.retain(now.slot)
            self._note_taken(now.position, now.slot)

    def forget_taken(self, positions: Sequence[int]) -> None:
        """Release snapshots that the prefix tree has now."""
        for position in positions:
            self._pool.release_state(self.taken.pop(position))

    def release_reserved(self) -> None:
        """Release what was allocated for a next step."""
        self._drop_planned()
        state, self.next_state = self.next_state, NO_SLOT
        log, self.next_log = self.next_log, NO_SLOT
        self._release(StatePlace(state, 0, log))

    def _plan_snapshots(self, first: int, num_rows: int) -> None:
        """Allocate slots for the snapshots that a step of rows from `first` takes before its last row."""
        if not self._takes_snapshots or num_rows < 2:
            return
        policy, end, last = self._policy, first + num_rows, self._last_snapshot
        grid = policy.grid_tokens
        places = {place for place in self._wanted if first < place < end}
        places |= set(range(first + grid - first % grid, end, grid))
        for place in sorted(places):
            if place - last < policy.near_tokens and place != self._needed:
                continue
            is_grid = place not in self._wanted
            # A wanted position soon after makes up for one on the grid.
            if is_grid and any(place < other < place + policy.near_tokens for other in places):
                continue
            if is_grid and not self._has_grid_room(last, place):
                continue
            try:
                slot = self._pool.take_slot(self._pool.states)
            except OutOfMemoryError:
                break
            # One by one: Ctrl-C may come at the next.
            self._planned = self._planned._replace(snapshots=(*self._planned.snapshots, (place, slot)))
            if is_grid:
                self._pool.grid.add(slot)
            last = place

    def _take_present(self) -> None:
        """Keep the states just computed, if they are wanted, or the grid has a position since the last."""
        now, policy, last = self.now, self._policy, self._last_snapshot
        position = now.position
        is_near = position - last < policy.near_tokens and position != self._needed
        if is_near or now.slot in self.taken.values():
            return
        is_grid = position not in self._wanted
        if is_grid and (position // policy.grid_tokens == last // policy.grid_tokens or not self._crosses(position)):
            return
        if is_grid:
            if not self._has_grid_room(last, position):
                return
            self._pool.grid.add(now.slot)
        self._pool.states.retain(now.slot)
        self._note_taken(position, now.slot)

    def _crosses(self, position: int) -> bool:
        """True if the last step came to a position of the grid, or passed it."""
        begin = position - LOG_ROWS if self.before is None else self.before.position
        return position // self._policy.grid_tokens > begin // self._policy.grid_tokens

    def _has_grid_room(self, before: int, position: int) -> bool:
        make = self._pool.make_grid_room
        # As if the text continued as far again, unless there will be a snapshot before.
        after = min((place for place in self._wanted if place > position), default=2 * position - before)
        saved = tokens_saved(before, position, min(after, 2 * position - before))
        return make is not None and make(saved)

    def _note_taken(self, position: int, slot: int) -> None:
        former = self.taken.get(position)
        self.taken[position] = slot
        self._last_snapshot = max(self._last_snapshot, position)
        if former is not None:
            self._pool.release_state(former)

    def _drop_planned(self) -> None:
        planned, self._planned = self._planned, _PlannedStep(0, False)
        for _, slot in planned.snapshots:
            self._pool.release_state(slot)

    def _release(self, place: StatePlace) -> None:
        if place.slot != NO_SLOT:
            self._pool.release_state(place.slot)
        if place.log != NO_SLOT:
            self._pool.release_log(place.log)

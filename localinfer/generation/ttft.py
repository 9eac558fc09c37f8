"""Prediction of the time to the first token of a new request: simulates the scheduler.

Running and waiting requests are copied: rows of prompts that are neither computed nor cached, tokens that streams are
likely to have still, priorities. Steps are then taken as the scheduler takes them, each of the length that recent steps
had (`step_costs`), until the new request has its token. Later requests are not known, and neither is when streams end;
so predictions are compared with real times, and their mean error corrects the next.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from localinfer.engine.admission import AdmissionControl, TtftStats, may_run
from localinfer.engine.cache.block_hashes import common_length
from localinfer.engine.cache.prefix_cache import PrefixCache
from localinfer.engine.request import Request
from localinfer.engine.runner import StepFit
from localinfer.errors import OverloadedError

_MOST_STEPS, _MOST_SECONDS = 4000, 600.0
"""Time beyond which a prediction stops, with the value it has reached."""
_MEMORY = 0.9
_LARGEST_CORRECTION = 4.0
_NUM_KEPT = 512
_OWN_SHARE = 1.5

_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 60.0

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class TtftPrediction:
    """seconds: until the first token. alone_seconds: what they would be if nothing else ran or waited."""

    seconds: float
    alone_seconds: float

    def limit(self, objective: float) -> float:
        """Longest acceptable prediction: the objective, or half as long again as a longer prompt takes alone."""
        return objective if self.alone_seconds <= objective else _OWN_SHARE * self.alone_seconds


@dataclass(eq=False, slots=True)
class _Work:
    """A simulated request."""

    priority: int
    owner: Hashable
    rows: float
    """Rows of its prompt that are left."""
    tokens: float
    """Tokens that are likely still to come."""
    held: int
    """Positions in memory at the end of its prompt."""
    order: int
    """Position in the order of arrival."""
    last_chunk: int = 0


class TtftPredictor:
    """The `AdmissionPolicy` of objectives: predicts for one engine, and observes the real times.

    Any thread may predict, during a step too.

    fit: costs of steps. chunk_rows: rows of prompts that a step has beside so many streams, for so many prompts.
    """

    def __init__(
        self, cache: PrefixCache, fit: StepFit, chunk_rows: Callable[[int, int], int], admission: AdmissionControl
    ) -> None:
        self.num_predicted = self.num_refused = 0
        self._cache = cache
        self._fit = fit
        self._chunk_rows = chunk_rows
        self._admission = admission
        self._max_running = admission.limits.max_running
        self._predicted_mean = self._real_mean = 0.0
        self._ratios: deque[float] = deque(maxlen=_NUM_KEPT)
        self._errors: deque[float] = deque(maxlen=_NUM_KEPT)

    @property
    def stats(self) -> TtftStats:
        """Accuracy of the predictions so far."""
        ratios, errors = list(self._ratios), list(self._errors)
        return TtftStats(self.num_predicted, self.num_refused, _quantiles(ratios), _quantiles(errors))

    def observe(self, predicted: float, seconds: float) -> None:
        """A request got its first token after so many seconds."""
        self._ratios.append(seconds / max(predicted, 1e-9))
        self._errors.append(abs(seconds - predicted))
        # The sums are compared, so that long times, which objectives are about, count more than short ones.
        raw = predicted / self._correction
        self._predicted_mean = _MEMORY * self._predicted_mean + raw
        self._real_mean = _MEMORY * self._real_mean + seconds

    def check(
        self, new: Request, objective: float, present: Sequence[Request], last_chunks: Mapping[Hashable, int]
    ) -> float | None:
        """Return what is predicted for a request, in seconds, if it is no more than is wanted. See `predict`.

        One that is alone is never refused: nothing would be won by coming back. Raises: OverloadedError.
        """
        found = self.predict(new, present, last_chunks)
        if found is None or not present or found.seconds <= found.limit(objective):
            return None if found is None else found.seconds
        self.num_refused += 1
        seconds = min(max(found.seconds - found.limit(objective), _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
        wanted = f"wanted within {objective:g}"
        if found.alone_seconds > objective:
            wanted = f"{found.alone_seconds:.2g} if nothing else ran; it is {wanted}"
        raise OverloadedError(
            f"the first token of this request is predicted in {found.seconds:.2g} seconds, and {wanted}; try again in "
            f"{seconds:.0f} seconds",
            seconds,
            predicted_ttft_seconds=found.seconds,
        )

    def predict(
        self, new: Request, present: Sequence[Request], last_chunks: Mapping[Hashable, int]
    ) -> TtftPrediction | None:
        """Predict the time to a request's first token; None while the costs of steps are unknown.

        present: the others that have not ended. last_chunks: the step of each owner's last chunk.
        """
        if not self._fit.is_known:
            return None
        rows = self._rows(new)
        one_step = self._chunk_rows(0, 1)
        alone = rows / one_step * self._fit.seconds(0, one_step) if rows > one_step else self._fit.seconds(0, rows)
        streams, prompts, waiting = self._copy(present, last_chunks)
        mine = _Work(new.priority, new.owner, rows, 1.0, new.head.size, len(present), last_chunks.get(new.owner, 0))
        waiting.append(mine)
        found = self._until_first_token(mine, streams, prompts, waiting)
        correction = self._correction
        self.num_predicted += 1
        return TtftPrediction(correction * found, correction * alone)

    @property
    def _correction(self) -> float:
        if not self._predicted_mean:
            return 1.0
        return min(max(self._real_mean / self._predicted_mean, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)

    def _rows(self, request: Request) -> float:
        """Rows of a prompt that waits which are not cached; looked up once, as it takes some microseconds a page."""
        if request.expected_rows is None:
            request.expected_rows = max(1, request.head.size - self._cached_length(request))
        return request.expected_rows

    def _cached_length(self, request: Request) -> int:
        """Length of a prompt's cached prefix, read without a lock while a step may change it: an estimate."""
        wanted, length = request.head[:-1], 0
        node = self._cache.tree.roots.find(request.hints.salt)
        while length < wanted.size:
            first, best, common = wanted[length], None, 0
            for child in tuple(node.children):
                if child.token_ids.size and child.token_ids[0] == first:
                    shared = common_length(child.token_ids, wanted[length:])
                    if shared > common:
                        best, common = child, shared
            if best is None:
                break
            node, length = best, length + common
            if common < best.token_ids.size:
                break
        return length

    def _copy(
        self, present: Sequence[Request], last_chunks: Mapping[Hashable, int]
    ) -> tuple[list[_Work], list[_Work], list[_Work]]:
        """Copies of the requests that decode, of those whose prompts are computed, and of those that wait."""
        streams, prompts, waiting = [], [], []
        ordered = sorted(present, key=lambda request: request.began)
        for order, request in enumerate(ordered):
            if not request.can_proceed:
                continue
            sequence, made = request.sequence, request.position - request.prompt_length
            work = _Work(
                request.priority,
                request.owner,
                0.0,
                self._tokens_left(made, request.last - request.position + 1),
                request.length,
                order,
                last_chunks.get(request.owner, 0),
            )
            if sequence is None:
                work.rows = self._rows(request)
                waiting.append(work)
            elif request.position > request.base:
                streams.append(work)
            else:
                work.rows = max(1, request.head.size - sequence.length)
                prompts.append(work)
        return streams, prompts, waiting

    def _tokens_left(self, made: int, most: int) -> float:
        """Number of tokens that a text is likely to have yet: up to the mean length, or half of that length more."""
        mean = self._admission.mean_tokens
        return float(most) if mean is None else max(1.0, min(float(most), max(mean - made, mean / 2)))

    def _until_first_token(
        self, mine: _Work, streams: list[_Work], prompts: list[_Work], waiting: list[_Work]
    ) -> float:
        """Take steps until the new request has its token; return the seconds that they take."""
        seconds = 0.5 * self._fit.seconds(len(streams), 0) if streams or prompts else 0.0
        room = self._room() - sum(work.rows for work in prompts)
        tick = max((work.last_chunk for work in prompts), default=0) + 1
        for _ in range(_MOST_STEPS):
            room = self._admit(streams, prompts, waiting, room)
            rows = self._chunk_rows(len(streams), len(prompts)) if prompts else 0
            count, done = 1, 0.0
            if prompts:
                head: _Work | None = min(prompts, key=_turn)
                if head is not None and len(prompts) == 1:
                    ending = min((work.tokens for work in streams), default=math.inf)
                    count = max(1, int(min(head.rows // rows, ending)))
                left = float(rows * count)
                while head is not None and left > 0:
                    taken = min(left, head.rows)
                    head.rows -= taken
                    left -= taken
                    done += taken
                    for work in prompts:
                        if work.owner == head.owner:
                            work.last_chunk = tick
                    head = min(
                        (work for work in prompts if work.rows > 0 and work.last_chunk < tick),
                        key=_turn,
                        default=None,
                    )
                tick += 1
            elif streams:
                count = max(1, int(min(work.tokens for work in streams)))
            else:
                break
            seconds += count * self._fit.seconds(len(streams), done / count)
            if (mine in prompts and mine.rows <= 0) or seconds > _MOST_SECONDS:
                break
            for work in streams:
                work.tokens -= count
                room += work.held if work.tokens <= 0 else 0
            streams[:] = [work for work in streams if work.tokens > 0]
            streams += [work for work in prompts if work.rows <= 0]
            prompts[:] = [work for work in prompts if work.rows > 0]
        return seconds

    def _admit(self, streams: list[_Work], prompts: list[_Work], waiting: list[_Work], room: float) -> float:
        """Admit requests while slots and memory last, as `admission` does; return the room that is left."""
        while waiting:
            owners = Counter(work.owner for work in (*streams, *prompts))
            allowed = [work for work in waiting if may_run(work.owner, owners[work.owner])]
            if not allowed:
                return room
            first = min(allowed, key=lambda work: (work.priority, owners[work.owner] > 0, work.order))
            active = len(streams) + len(prompts)
            if active and (active >= self._max_running or room < first.held):
                victim = _giver(first, (*streams, *prompts), owners)
                if victim is None:
                    return room
                (streams if victim in streams else prompts).remove(victim)
                room += victim.held
                continue
            waiting.remove(first)
            prompts.append(first)
            room -= first.held
        return room

    def _room(self) -> float:
        """Positions that there is memory for beside what running texts hold, were no page shared."""
        pool = self._cache.pool
        page_bytes = pool.num_bytes(1, 0)
        if pool.max_bytes is None or not page_bytes:
            return math.inf
        held = [sequence.pages for sequence in tuple(pool.sequences)]
        pages = np.unique(np.concatenate(held)).size if held else 0
        return (pool.max_bytes / page_bytes - pages) * pool.page_tokens


def _giver(first: _Work, running: Sequence[_Work], owners: Mapping[Hashable, int]) -> _Work | None:
    """Request that gives way to another: the least urgent, or the newest of the owner that has most, to the only one of
    its owner. owners: number of running ones of each."""
    least_urgent = max(running, key=lambda work: (work.priority, work.order))
    if least_urgent.priority > first.priority:
        return least_urgent
    if owners[first.owner]:
        return None
    several = [work for work in running if work.priority == first.priority and owners[work.owner] > 1]
    return max(several, key=lambda work: (owners[work.owner], work.order), default=None)


def _turn(work: _Work) -> tuple[int, int, int]:
    """Sort key of prompts: the rows of the least are computed first."""
    return work.priority, work.last_chunk, work.order


def _quantiles(values: Sequence[float]) -> dict[float, float]:
    return {} if not values else {share: float(np.quantile(values, share)) for share in QUANTILES}

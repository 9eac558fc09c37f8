"""What is looked at while a step is taken: each choice of a token, each end of a text, each eviction."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from localinfer.engine.admission import Owner
from localinfer.engine.cache.prefix_tree import PrefixNode, PrefixTree, SnapshotPlace
from localinfer.engine.request import Request
from localinfer.engine.runner import ScheduledSequence
from tests.proof.simulation.checks import require
from tests.proof.simulation.faults import Violation

if TYPE_CHECKING:
    from tests.proof.simulation.world import World

MOST_STEPS = 400
"""Steps in one read; more, and nothing goes on."""


def watch_choices(world: "World") -> None:
    """Compare each row of logits that a token is chosen from."""
    sampler = world.engine._runner.sampler
    choose, plans = sampler.choose, world.plans

    def watched(logits: Any, plan: Any, position: int, history: Any) -> int:
        world.faults.at("before a choice")
        caller = plans.get(plan)
        if caller is not None:
            caller.note_row(logits, position)
        return choose(logits, plan, position, history)

    sampler.choose = watched  # type: ignore[method-assign]


def watch_ends(world: "World") -> None:
    """Look for what a request has computed, once it is left to the cache."""
    runner, tree = world.engine._runner, world.cache.tree
    retire = runner.retire

    def watched(request: Request) -> None:
        computed = None if request.sequence is None else request.context_ids()[: request.length]
        evicted = tree.evicted_tokens
        retire(request)
        if computed is not None and tree.evicted_tokens == evicted:
            found = tree.match(computed, request.hints.salt).length
            if request.media is not None and request.media.cached_length is not None:
                computed = computed[: request.media.cached_length]
                found = min(found, computed.size)
            require(found == computed.size, f"of {computed.size} tokens of a text that ended {found} are found")

    runner.retire = watched  # type: ignore[method-assign]


def watch_steps(world: "World") -> None:
    """End a read that goes round in circles."""
    scheduler = world.engine.scheduler
    step: Callable[[], None] = scheduler._step

    def watched() -> None:
        world.num_steps += 1
        if world.num_steps > MOST_STEPS:
            raise Violation(f"{MOST_STEPS} steps were taken and the reader has no token")
        step()

    scheduler._step = watched  # type: ignore[method-assign]


def watch_priorities(world: "World") -> None:
    """Require of what is admitted, computed and preempted that nobody less urgent was better off."""
    scheduler = world.engine.scheduler
    admission, chunks_of = scheduler.admission, scheduler._chunks
    admit, preempt = admission.admit, admission._preempt

    def priority(request: Request) -> int:
        # The one that has waited too long is as urgent as any.
        ready = [request, *(one for one in scheduler.running if one.can_proceed)]
        is_elder = request is admission.priority_order._elder
        return min(one.priority for one in ready) if is_elder else request.priority

    def watched_admit(ready: list[Request], running: list[Request]) -> None:
        waited = [request for request in ready if request.sequence is None]
        active = [request for request in running if request.sequence is not None]
        admit(ready, running)
        left = [request for request in waited if request.sequence is None and not request.is_over]
        # Where its owner has as many texts as it may have, others come before it.
        left = [request for request in left if not isinstance(request.owner, Owner)]
        admitted = [request for request in waited if request.sequence is not None]
        lost = [request for request in active if request.sequence is None and not request.is_over]
        # An owner whose only text has given way to a more urgent one of its own has none beside that.
        had = Counter(request.owner for request in active if request.can_proceed and request not in lost)
        for loser in lost:
            keeps = any(one.owner == loser.owner and one.sequence is not None for one in running)
            is_fair = keeps and any(not had[one.owner] and priority(one) <= priority(loser) for one in admitted)
            is_for_equals = not admitted or priority(loser) <= min(map(priority, admitted))
            require(is_fair or not is_for_equals, "a request takes the place of another that is as urgent")
        _require_shares(left)
        if left and admitted and admission.priority_order._elder not in left:
            require(
                max(map(priority, admitted)) <= min(map(priority, left)), "a request waits behind a less urgent one"
            )

    def _require_shares(left: list[Request]) -> None:
        """Require that nobody waits for a place while another has several that it could give."""
        holding = [one for one in scheduler.running if one.sequence is not None and one.can_proceed]
        owners = Counter(one.owner for one in holding)
        without = [one for one in left if not owners[one.owner]]
        if len(holding) < admission.limits.max_running or any(one.gave_way_to for one in without):
            return
        for one in without:
            elder = admission.priority_order._elder
            rich = [
                other
                for other in holding
                if owners[other.owner] > 1 and other is not elder and priority(other) >= priority(one)
            ]
            has_room = bool(rich) and all(admission._has_room(one, [other]) for other in rich)
            require(not has_room, "a request waits for a place while an owner of several holds all")

    def watched_preempt(request: Request) -> None:
        others = [other for other in scheduler.running if other.sequence is not None and other.can_proceed]
        is_least = all(priority(other) <= priority(request) for other in others)
        require(is_least or not request.can_proceed, "a request gives way that is not the least urgent")
        preempt(request)

    def watched_chunks(prompts: list[Request], num_decoding: int) -> list[ScheduledSequence]:
        chunks = chunks_of(prompts, num_decoding)
        urgency = min(one.priority for one in prompts)
        wanted = [one.head.size - one.cache.length for one in prompts if one.priority == urgency]
        if chunks and max(wanted) > 1 and admission.priority_order._elder not in prompts:
            served = min(part.request.priority for part in chunks)
            require(served == urgency, "a prompt is computed and none of more urgent ones")
        return chunks

    admission.admit, admission._preempt = watched_admit, watched_preempt  # type: ignore[method-assign]
    scheduler._chunks = watched_chunks  # type: ignore[method-assign]


def watch_eviction(tree: PrefixTree) -> None:
    """Require of each text that is evicted for want of memory that it is the one that should be."""
    evict, trim, drop = tree.evict, tree._trim, tree._drop_snapshot
    pool = tree._pool
    is_evicting = False

    def watched_evict(count: int, num_bytes: int = 0) -> int:
        nonlocal is_evicting
        is_evicting = True
        try:
            return evict(count, num_bytes)
        finally:
            is_evicting = False

    def order(leaf: PrefixNode) -> tuple[int, int, int]:
        return int(leaf.priority), leaf.eviction_score, leaf.last_used

    def watched_trim(leaf: PrefixNode, count: int) -> int:
        # Without pages to free, what is trimmed has lost its last snapshot.
        if is_evicting and count:
            idle = [other for other in tree.roots.leaves() if pool.counts[other.pages[-1]] <= 1]
            require(order(leaf) == min(map(order, idle)), "a text is evicted before another that is worth less")
        pages = leaf.pages
        freed = trim(leaf, count)
        require(not pool.counts[pages[pages.size - freed :]].any(), "a page is evicted that a text holds")
        return freed

    def watched_drop(place: SnapshotPlace) -> None:
        if is_evicting:
            least = min(other.node.priority for other in tree._idle_places())
            require(place.node.priority == least, "a state is evicted before another of lower priority")
        drop(place)

    tree.evict = pool.reclaim = watched_evict  # type: ignore[method-assign]
    tree._trim = watched_trim  # type: ignore[method-assign]
    tree._drop_snapshot = watched_drop  # type: ignore[method-assign]

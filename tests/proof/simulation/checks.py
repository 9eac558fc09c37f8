"""What must hold between any two operations: every reference explained, every budget held, every byte that of a cold
run."""

import ctypes
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_pool import PagePool, SlabAllocator
from localinfer.engine.cache.prefix_cache import PrefixCache
from localinfer.engine.cache.prefix_tree import PrefixNode
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.cache.sequence_state import NO_SLOT
from localinfer.engine.request import Request
from tests.proof.simulation.cold import Oracle
from tests.proof.simulation.faults import Violation
from tests.proof.simulation.universe import TokenIds

_POISON = 0x35
"""Twice a byte of a small number that no text has: what is free must not be read."""


def require(condition: bool, message: str) -> None:
    """Raise Violation unless a condition holds."""
    if not condition:
        raise Violation(message)


class Accounts:
    """Who holds what: references by page, sliding-window block, state and log.

    lost: references that Ctrl-C at an unlucky line leaves behind, of which nothing but memory is lost.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.lost_pages: Counter[int] = Counter()
        self.lost_windowed: Counter[int] = Counter()
        self.lost_states: Counter[int] = Counter()
        self.lost_logs: Counter[int] = Counter()

    @property
    def has_lost(self) -> bool:
        """Whether anything was."""
        return bool(self.lost_pages or self.lost_windowed or self.lost_states or self.lost_logs)

    def check(self, cache: PrefixCache, sequences: Iterable[SequenceCache], *, may_lose: bool = False) -> None:
        """Compare what is held with who holds it. may_lose: note what nobody holds any more, once."""
        pool = self._pool
        pages, windowed = np.zeros((2, pool.counts.size), np.int64)
        states: Counter[int] = Counter()
        logs: Counter[int] = Counter()
        for sequence in sequences:
            pages[sequence.pages] += 1
            windowed[sequence.pages[sequence.windowed]] += 1
            pages[sequence._aside] += 1
            windowed[sequence._aside] += 1
            _count_states(sequence, states, logs)
        num_pages = 0
        slots: Counter[int] = Counter()
        for node in nodes_of(cache):
            pages[node.pages] += 1
            windowed[node.pages[node.windowed]] += 1
            num_pages += node.pages.size
            for snapshot in node.snapshots.values():
                slots[snapshot.slot] += 1
            _check_node(node, pool)
        require(num_pages == cache.tree.num_pages or may_lose or self.has_lost, "the tree miscounts its pages")
        states += slots
        found = {slot: pool.states.num_references(slot) for slot in pool.states.held}
        found_logs = {slot: pool.logs.num_references(slot) for slot in pool.logs.held}
        if not pool.sliding.tokens:
            windowed[:] = 0
        if may_lose:
            self._note(self.lost_pages, _surplus(pool.counts, pages))
            self._note(self.lost_windowed, _surplus(pool.windowed_counts, windowed))
            self._note(self.lost_states, Counter(found) - states)
            self._note(self.lost_logs, Counter(found_logs) - logs)
        for page, count in self.lost_pages.items():
            pages[page] += count
        for page, count in self.lost_windowed.items():
            windowed[page] += count
        _compare("page", pool.counts, pages)
        _compare("sliding-window block", pool.windowed_counts, windowed)
        _compare_slots("state", found, states + self.lost_states)
        _compare_slots("log", found_logs, logs + self.lost_logs)
        held = np.flatnonzero(pool.counts).tolist()
        _check_slots("pages", pool._memory, set(held))
        if pool.sliding.tokens:
            blocks = pool._windowed_slots[np.flatnonzero(pool.windowed_counts)].tolist()
            require(len(set(blocks)) == len(blocks), "two pages share a sliding-window block")
            _check_slots("sliding-window blocks", pool._windowed, set(blocks))
        _check_slots("states", pool.states.memory, set(found))
        _check_slots("logs", pool.logs.memory, set(found_logs))
        require(
            pool.max_bytes is None or pool.allocated_bytes <= pool.max_bytes,
            f"{pool.allocated_bytes} bytes are allocated where {pool.max_bytes} may be",
        )

    @staticmethod
    def _note(lost: Counter[int], surplus: Counter[int]) -> None:
        lost.clear()
        lost.update(surplus)


def check_contents(cache: PrefixCache, sequences: Iterable[tuple[SequenceCache, TokenIds]], oracle: Oracle) -> None:
    """Compare every byte that is cached, or held by sequences of known ids, with those of a cold run."""
    pool = cache.pool
    for sequence, token_ids in sequences:
        if sequence.length and sequence.is_exact:
            whole = sequence.length - sequence.length % pool.page_tokens
            known = oracle.pages(token_ids[:whole]) if whole else []
            _compare_pages(pool, sequence.pages, sequence.windowed, known, token_ids[:whole], oracle, "a sequence's")
    pending = [(node, np.zeros(0, np.int32)) for root in cache.tree.roots for node in root.children]
    while pending:
        node, before = pending.pop()
        token_ids = np.concatenate((before, node.token_ids))
        pending += [(child, token_ids) for child in node.children]
        first = before.size // pool.page_tokens
        known = oracle.pages(token_ids)[first:]
        _compare_pages(pool, node.pages, node.windowed, known, node.token_ids, oracle, "a cached")
        for offset, snapshot in node.snapshots.items():
            found = oracle.state_digest(pool, snapshot.slot)
            wanted = oracle.state(token_ids[: before.size + offset])
            require(found == wanted, f"a snapshot at position {before.size + offset} is not that of a cold run")


def check_salts(cache: PrefixCache, requests: Iterable[Request]) -> None:
    """Texts of different salts share no page and no state."""
    users = {
        (kind, number): node.salt
        for node in nodes_of(cache)
        for kind, numbers in (("page", node.pages.tolist()), ("state", [one.slot for one in node.snapshots.values()]))
        for number in numbers
    }
    for request in requests:
        sequence = request.sequence
        if sequence is None:
            continue
        for kind, numbers in (("page", sequence.pages.tolist()), ("state", sequence.state_slots)):
            for number in numbers:
                salt = users.setdefault((kind, number), request.hints.salt)
                require(salt == request.hints.salt, f"{kind} {number} is of texts of two salts")


def poison(pool: PagePool) -> None:
    """Write into all free memory what no text has."""
    for slabs in pool._kinds:
        if slabs.slot_bytes:
            for slot in slabs.free:
                ctypes.memset(int(slabs.addresses[slot]), _POISON, slabs.slot_bytes)


def nodes_of(cache: PrefixCache) -> list[PrefixNode]:
    """Every node of the tree."""
    found: list[PrefixNode] = []
    pending = [node for root in cache.tree.roots for node in root.children]
    while pending:
        node = pending.pop()
        found.append(node)
        require(node.parent is not None and node.parent.salt == node.salt, "a node has another salt than its parent")
        for child in node.children:
            require(child.parent is node, "a node of the tree has another parent")
        pending += node.children
    return found


def _check_node(node: PrefixNode, pool: PagePool) -> None:
    size = node.token_ids.size
    require(node.pages.size == pool.num_pages_for(size) == node.windowed.size > 0, "a node has not as many pages")
    require(not node.children or size % pool.page_tokens == 0, "a node that others follow ends inside a page")
    require(all(0 < offset <= size for offset in node.snapshots), "a snapshot lies outside of its node")


def _count_states(sequence: SequenceCache, states: Counter[int], logs: Counter[int]) -> None:
    state = sequence._state
    for place in (state.now, state.before, state._kept):
        if place is not None:
            states[place.slot] += place.slot != NO_SLOT
            logs[place.log] += place.log != NO_SLOT
    states[state.next_state] += state.next_state != NO_SLOT
    logs[state.next_log] += state.next_log != NO_SLOT
    for slot in state.taken.values():
        states[slot] += 1
    for _, slot in state._planned.snapshots:
        states[slot] += 1
    for counter in (states, logs):
        del counter[NO_SLOT]


def _surplus(found: NDArray[np.int32], expected: NDArray[np.int64]) -> Counter[int]:
    more = found - expected
    return Counter({int(index): int(more[index]) for index in np.flatnonzero(more > 0)})


def _compare(what: str, found: NDArray[np.int32], expected: NDArray[np.int64]) -> None:
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        first = int(wrong[0])
        raise Violation(
            f"{what} {first} has {int(found[first])} references and {int(expected[first])} holders "
            f"({wrong.size} such in all)"
        )


def _compare_slots(what: str, found: dict[int, int], expected: Counter[int]) -> None:
    for slot in sorted(found.keys() | expected.keys()):
        if found.get(slot, 0) != expected[slot]:
            raise Violation(f"{what} {slot} has {found.get(slot, 0)} references and {expected[slot]} holders")


def _check_slots(what: str, slabs: SlabAllocator, held: set[int]) -> None:
    free = set(slabs.free)
    require(len(free) == len(slabs.free), f"of {what} one is free twice")
    require(not free & held, f"of {what} one is free and held")
    require(len(free) + len(held) == slabs.num_slots, f"of {what} one is lost: neither free nor held")


def _compare_pages(
    pool: PagePool,
    pages: NDArray[np.int64],
    windowed: NDArray[np.bool_],
    known: list[tuple[int, int]],
    token_ids: TokenIds,
    oracle: Oracle,
    whose: str,
) -> None:
    """Compare as many pages as the ids take; the first of them begins one."""
    for index, start in enumerate(range(0, token_ids.size, pool.page_tokens)):
        page, count = int(pages[index]), min(pool.page_tokens, token_ids.size - start)
        if pool.page_bytes and oracle.page_digest(pool, page, count) != known[index][0]:
            raise Violation(f"{whose} page {page} of {count} positions is not that of a cold run")
        if pool.windowed_bytes and windowed[index] and oracle.windowed_digest(pool, page, count) != known[index][1]:
            raise Violation(f"{whose} sliding-window block of page {page} is not that of a cold run")

"""The prefix tree: a radix tree of what is cached, of which something is evicted when memory ends.

Leaves are evicted from their ends: those of the lowest priority first, of those what was continued least, and of equals
the least recently used. Snapshots of recurrent states are evicted before leaves that were used later, first those that
save least for their age. Eviction weighs texts of all salts together, but none explains a miss to another.
"""

from collections.abc import Callable, Iterator

import numpy as np

from localinfer.engine.cache.block_pool import STATES_OF_SEQUENCE, PagePool
from localinfer.engine.cache.cache_observer import tell_removed
from localinfer.engine.cache.prefix_node import (
    CachedPath,
    EvictedTexts,
    PrefixNode,
    Priority,
    SnapshotPlace,
    places_of_snapshots,
)
from localinfer.engine.cache.radix_tree import RadixTree
from localinfer.engine.cache.salt import NO_SALT
from localinfer.engine.cache.snapshots import DEFAULT_POLICY, Snapshot, SnapshotPolicy
from localinfer.types import TokenIds

_EVICTION_SHARE = 64
"""When memory ends, at least this part of all pages is freed at once, so that the next page does not evict again."""


class PrefixTree(RadixTree):
    """The cached prefixes of one pool, whose `reclaim` it becomes. One thread at a time; see `RadixTree` for Ctrl-C.

    on_evict: if set, called with a path and the length that will be left of it, before pages are freed.
    """

    def __init__(self, pool: PagePool, policy: SnapshotPolicy = DEFAULT_POLICY) -> None:
        super().__init__(pool)
        self._policy = policy
        self._evicted = EvictedTexts()
        self.evicted_tokens = 0
        self.evicted_bytes = 0
        self.evicted_snapshots = 0
        self.on_evict: Callable[[CachedPath, int], None] | None = None
        pool.reclaim = self.evict
        if pool.has_states:
            pool.make_grid_room = self._make_grid_room

    def evict(self, count: int, num_bytes: int = 0) -> int:
        """Free at least `count` pages if that many are not in use: leaves first, from their ends; return how many.

        With recurrent layers, snapshots and pages that take as many bytes, and `num_bytes` more.
        """
        if self._pool.has_states and (self._pool.page_bytes or num_bytes):
            return self._evict_bytes(count, num_bytes)
        wanted = max(count, self.num_pages // _EVICTION_SHARE)
        freed = 0
        while freed < wanted:
            leaf = self._oldest_leaf()
            if leaf is None or (freed >= count and leaf.priority > Priority.ORDINARY):
                break
            self._age = max(self._age, leaf.worth)
            freed += self._trim(leaf, wanted - freed)
        return freed

    def clear(self) -> None:
        """Evict everything that is not in use."""
        while (leaf := self._oldest_leaf()) is not None:
            self._trim(leaf, leaf.pages.size)
        while (place := self._least_place(None)) is not None:
            self._drop_snapshot(place)
        self._evicted.clear()

    def forget(self, token_ids: TokenIds, salt: bytes = NO_SALT) -> int:
        """Evict the end of a text that no other text has and that is not in use; return how many ids that was."""
        before = self.evicted_tokens
        match = self.match(token_ids, salt)
        node = match.node
        # Where the text ends inside of a node, another one goes on there.
        while (
            node.parent is not None
            and not node.children
            and (node is not match.node or match.offset == node.token_ids.size)
        ):
            parent = node.parent
            self._trim(node, node.pages.size)
            if node in parent.children:
                break
            node = parent
        return self.evicted_tokens - before

    def evicted_length(self, token_ids: TokenIds, salt: bytes = NO_SALT) -> int:
        """The longest prefix that was evicted, as far as evicted texts are kept."""
        return self._evicted.shared_length(token_ids, salt)

    def _evict_bytes(self, count: int, num_bytes: int) -> int:
        pool, before = self._pool, self.num_pages
        needed = num_bytes + pool.num_bytes(count, count)
        held = pool.held_bytes
        wanted = max(needed, pool.num_bytes(self.num_pages // _EVICTION_SHARE, 0))
        while (freed := held - pool.held_bytes) < wanted:
            leaf = self._oldest_leaf()
            place = self._least_place(leaf)
            if place is not None:
                if freed >= needed and place.node.priority > Priority.ORDINARY:
                    break
                self._drop_snapshot(place)
            elif leaf is not None:
                if freed >= needed and leaf.priority > Priority.ORDINARY:
                    break
                of_page = pool.num_bytes(1, 1)
                self._trim(leaf, -(-(wanted - freed) // of_page) if of_page else 1)
            else:
                break
        return before - self.num_pages

    def _make_grid_room(self, worth: int) -> bool:
        """Whether there may be one more snapshot on the grid, those worth no more being dropped: `tokens_saved`.

        Texts of recurrent layers alone hold nothing but states, so their share is one of the memory allowed.
        """
        pool = self._pool
        while True:
            num_bytes = self._lasting_bytes if pool.num_bytes(1, 1) or pool.max_bytes is None else pool.max_bytes
            if len(pool.grid) < self._policy.most_of_grid(num_bytes, pool.states.slot_bytes):
                return True
            places = [place for place in self._idle_places() if place.snapshot.slot in pool.grid]
            least = min(places, key=lambda place: (place.tokens_saved, place.snapshot.last_used), default=None)
            if least is None or least.tokens_saved > worth:
                return False
            self._drop_snapshot(least)

    @property
    def _lasting_bytes(self) -> int:
        """Bytes that are held, without what running sequences release at their ends: logs, and one of their two states;
        the other is a snapshot then."""
        pool = self._pool
        num_passing = -(-(pool.states.num_held - self.num_snapshots) // STATES_OF_SEQUENCE)
        return pool.held_bytes - pool.num_bytes(0, 0, num_passing, pool.logs.num_held)

    def _oldest_leaf(self) -> PrefixNode | None:
        """Of the leaves whose last page is not in use, the first to evict."""
        idle = [leaf for leaf in self._leaves() if self._pool.counts[leaf.pages[-1]] <= 1]
        return min(idle, key=lambda leaf: leaf.eviction_order, default=None)

    def _least_place(self, leaf: PrefixNode | None) -> SnapshotPlace | None:
        """Of the snapshots that are not in use and were used before this leaf, the first to evict.

        It is the one that saves least between those before and after it, by how long ago it was used: so those that
        stay of a long chat lie the further apart, the further back they are, and an edit anywhere goes on from one.
        """

        def worth(place: SnapshotPlace) -> tuple[Priority, float]:
            return place.node.priority, place.tokens_saved / (1 + self._clock - place.last_used)

        places = self._idle_places()
        if leaf is not None:
            last = (leaf.priority, leaf.last_used)
            places = (place for place in places if (place.node.priority, place.last_used) < last)
        return min(places, key=worth, default=None)

    def _idle_places(self) -> Iterator[SnapshotPlace]:
        return (place for place in places_of_snapshots(self.roots) if self._is_idle(place.snapshot))

    def _drop_snapshot(self, place: SnapshotPlace) -> None:
        """Drop a snapshot, and pages that no sequence could continue from without it."""
        node, offset = place.node, place.offset
        self._forget_snapshot(node, offset)
        if not node.children and max(node.snapshots, default=0) < offset and node.parent is not None:
            self._trim(node, 0)

    def _is_idle(self, snapshot: Snapshot) -> bool:
        """Whether no sequence uses it."""
        return self._pool.states.num_references(snapshot.slot) <= self._nodes_of_slot[snapshot.slot]

    def _forget_snapshot(self, node: PrefixNode, offset: int) -> None:
        slot = node.snapshots.pop(offset).slot
        self._nodes_of_slot[slot] -= 1
        if not self._nodes_of_slot[slot]:
            del self._nodes_of_slot[slot]
            self.evicted_snapshots += 1
        self._pool.release_state(slot)

    def _trim(self, leaf: PrefixNode, count: int) -> int:
        """Free up to `count` pages at the end of a leaf that are not in use; return how many.

        Pages that no sequence could continue from, for want of sliding-window blocks or states, are freed with them.
        """
        in_use = np.flatnonzero(self._pool.counts[leaf.pages] > 1)
        first_idle = int(in_use[-1]) + 1 if in_use.size else 0
        path, page_tokens = CachedPath.of(leaf), self._pool.page_tokens
        left = path.pages.size - min(count, leaf.pages.size)
        usable = self._usable_length(path.windowed[:left], min(path.token_ids.size, left * page_tokens), path.snapshots)
        kept = max(first_idle, self._pool.num_pages_for(usable) - (path.pages.size - leaf.pages.size))
        lost = max(0, leaf.token_ids.size - kept * page_tokens)
        if kept >= leaf.pages.size:
            return 0
        if self.on_evict is not None:
            self.on_evict(path, path.token_ids.size - lost)
        if self.observer is not None:
            tell_removed(self.observer, leaf, kept, page_tokens)
        self._evicted.add(path.token_ids, path.salt)
        surplus, surplus_windowed = leaf.pages[kept:], leaf.windowed[kept:]
        num_pages = self.num_pages - surplus.size
        if kept:
            ids = leaf.token_ids[: kept * page_tokens].copy()
            pages, windowed = leaf.pages[:kept].copy(), leaf.windowed[:kept].copy()
            leaf.token_ids, leaf.pages, leaf.windowed, self.num_pages = ids, pages, windowed, num_pages
        else:
            assert leaf.parent is not None, "the root is no leaf"
            leaf.parent.drop_index()
            leaf.parent.children.remove(leaf)
            self.roots.drop_if_empty(leaf.parent)
            self.num_pages = num_pages
        for offset in [offset for offset in leaf.snapshots if offset > kept * page_tokens]:
            self._forget_snapshot(leaf, offset)
        self._pool.release(surplus, surplus_windowed)
        self.evicted_tokens += lost
        self.evicted_bytes += self._pool.num_bytes(surplus.size, int(surplus_windowed.sum()))
        return surplus.size

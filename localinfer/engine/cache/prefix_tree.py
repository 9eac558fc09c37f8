"""The prefix tree: a radix tree from token ids to the pages that hold them, one for each salt, with eviction.

Every node stands for a run of token ids that begins at a multiple of the page size; only a leaf may end inside a page.
So a page belongs to one node, and texts that part inside a page each have a page of their own for it. The tree holds
one reference to each of its pages; a page with more is in use and stays.

With sliding-window layers, it holds only the sliding-window blocks that the sequence which computed a text last held:
before its end, and before positions that other texts are likely to continue from. With recurrent layers, nodes hold
snapshots of their states at some positions, and a sequence can continue from those only.

Leaves are evicted from their ends: those of the lowest priority first, of those the ones continued least, and of equals
the least recently used. Snapshots of recurrent states are evicted before leaves that were used later, first those that
save least for their age. Texts of different salts share no page: eviction weighs them together, but none explains a
miss to another.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from localinfer.engine.cache.block_hashes import NO_SALT, CacheObserver, common_length, tell_removed, tell_stored
from localinfer.engine.cache.block_pool import STATES_OF_SEQUENCE, BoolArray, PageNumbers, PagePool
from localinfer.engine.cache.sequence_state import DEFAULT_POLICY, NO_SLOT, Snapshot, SnapshotPolicy, tokens_saved
from localinfer.engine.cache.stats import EvictedTexts
from localinfer.types import TokenIds

_EVICTION_SHARE = 64
"""Least share of all pages that is freed at once when memory ends, so that the next page does not evict again."""
_MOST_TURNS = 32
"""More turns of a conversation are worth no more."""


class Priority(IntEnum):
    """The lower is evicted first; within a priority what was continued least, and of equals the least recently used."""

    ORDINARY = 0
    SYSTEM = 1
    PINNED = 2


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A run of token ids after the parent's, and its pages."""

    token_ids: TokenIds
    pages: PageNumbers
    windowed: BoolArray
    """bool[pages], the pages that have a sliding-window block."""
    parent: "PrefixNode | None"
    priority: Priority
    last_used: int
    children: list["PrefixNode"] = field(default_factory=list)
    heads: TokenIds | None = None
    """int32[children, page_tokens], the first page of ids of each child, -1 where it is shorter."""
    by_first_page: dict[bytes, "PrefixNode"] | None = None
    """Children that have a whole page of ids, by its bytes; like `heads` made on demand, until the children change."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """Snapshots of recurrent states, by the number of this node's ids before them, at least one."""
    num_turns: int = 0
    """Number of times that the text which ends here was continued."""
    eviction_score: int = 0
    """Eviction score, by `num_turns` and the last use; see `use`."""
    salt: bytes = NO_SALT
    """Salt of all texts that it is part of."""
    block_hashes: tuple[int, ...] = ()
    """Hashes of its first pages, as far as they were reported to an observer."""

    @classmethod
    def root(cls, salt: bytes) -> "PrefixNode":
        """A node that stands for no ids, whose children begin the texts of a salt."""
        nothing = np.zeros(0, np.int64)
        ids, windowed = nothing.astype(np.int32), nothing.astype(np.bool_)
        return cls(ids, nothing, windowed, None, Priority.ORDINARY, 0, salt=salt)

    @property
    def eviction_order(self) -> tuple[Priority, int, int]:
        """The least is evicted first."""
        return self.priority, self.eviction_score, self.last_used

    def use(self, clock: int, age: int) -> None:
        """Mark this node and all before it as used now. age: eviction score of the last text that was evicted.

        The sum of both is how GreedyDual-Frequency (Arlitt et al., 2000) weighs uses against age: a conversation of
        many turns outlives texts that are not continued and shorter conversations, unless so many are evicted that its
        turns count no more.
        """
        score = age + min(self.num_turns, _MOST_TURNS)
        for step in self.ancestry():
            step.last_used, step.eviction_score = clock, max(step.eviction_score, score)

    def ancestry(self) -> Iterator["PrefixNode"]:
        """This node, its parent and so on, up to the root."""
        node: PrefixNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def drop_index(self) -> None:
        """Note that the children, or their first pages, have changed."""
        self.heads = self.by_first_page = None

    def path(self) -> list[tuple["PrefixNode", int]]:
        """The nodes from the root to this one, each with how many ids come before it."""
        nodes, start = [], 0
        for node in list(self.ancestry())[::-1]:
            nodes.append((node, start))
            start += node.token_ids.size
        return nodes


class SnapshotPlace(NamedTuple):
    """A snapshot in the tree, its node and its offset there.

    before, position, after: of the snapshot before it, or 0; its own; and of the next. end: of the text. Of several
    texts that continue from there, the furthest; after the last snapshot, as if the text were twice as long.
    """

    snapshot: Snapshot
    node: PrefixNode
    offset: int
    before: int
    position: int
    after: int
    end: int

    @property
    def tokens_saved(self) -> int:
        """Its eviction score."""
        return tokens_saved(self.before, self.position, self.after)

    @property
    def last_used(self) -> int:
        """Time of its use: just before its text's, where the one before it is as far away as the text's end.

        Of a long chat these are few, the further apart the further back. The first of them is as good as its text,
        which without it would be lost as a whole with its end.
        """
        if self.position - self.before < self.end - self.position:
            return self.snapshot.last_used
        return max(self.snapshot.last_used, self.node.last_used - (self.before > 0))


class Roots:
    """The roots of a tree, one for each salt that there are texts of. unsalted: the one that is always there."""

    def __init__(self) -> None:
        self.unsalted = PrefixNode.root(NO_SALT)
        self._of_salt = {NO_SALT: self.unsalted}

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._of_salt.values())

    def find(self, salt: bytes) -> PrefixNode:
        """The root of a salt; without texts it is a new one, which is not kept."""
        return self._of_salt.get(salt) or PrefixNode.root(salt)

    def keep(self, node: PrefixNode) -> None:
        """Keep a node that is about to get a text, if it is a root."""
        if node.parent is None:
            self._of_salt[node.salt] = node

    def drop_if_empty(self, node: PrefixNode) -> None:
        """Forget a root that has no texts any more: clients may choose any number of salts."""
        if node.parent is None and not node.children and node is not self.unsalted:
            self._of_salt.pop(node.salt, None)

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node but the roots."""
        pending = [child for root in self for child in root.children]
        while pending:
            node = pending.pop()
            pending += node.children
            yield node

    def leaves(self) -> Iterator[PrefixNode]:
        """Every node that ends a text."""
        return (node for node in self.nodes() if not node.children)


def places_of_snapshots(roots: Iterable[PrefixNode]) -> Iterator[SnapshotPlace]:
    """Every snapshot under some roots."""
    pending, nodes = [(root, 0, 0) for root in roots], []
    while pending:
        node, start, before = pending.pop()
        nodes.append((node, start, before))
        last = start + max(node.snapshots, default=before - start)
        pending += [(child, start + node.token_ids.size, last) for child in node.children]
    ends: dict[int, int] = {}
    for node, start, before in reversed(nodes):
        size = node.token_ids.size
        ends[id(node)] = end = max((ends[id(child)] for child in node.children), default=start + size)
        furthest = max((min(child.snapshots, default=child.token_ids.size) for child in node.children), default=0)
        offsets = sorted(node.snapshots)
        for offset, following in pairwise([*offsets, size + furthest]):
            position, after = start + offset, start + following
            if not node.children and offset == offsets[-1]:
                after = max(after, 2 * position - before)
            yield SnapshotPlace(node.snapshots[offset], node, offset, before, position, after, end)
            before = position


class Match(NamedTuple):
    """The longest cached prefix of some token ids."""

    length: int
    pages: PageNumbers
    """One per started page of `length`; the last may be valid for more than `length` demands."""
    node: PrefixNode
    """Node where the match ends, after `offset` of its ids."""
    offset: int
    windowed: BoolArray
    """bool[pages], the pages that have their sliding-window block."""
    usable: int
    """The longest prefix that a sequence can continue from; `length`, for a model with neither sliding windows nor
    recurrent layers."""
    snapshots: Mapping[int, int]
    """Slots of recurrent states by position."""

    @property
    def num_turns(self) -> int:
        """Turns of a text that continues from here: one more than the text that ends here, or almost here."""
        node, rest = self.node, self.node.token_ids.size - self.offset
        if node.children:
            # Somewhere in the midst of texts, of which another begins.
            return node.num_turns
        return node.num_turns + 1 if self.length and rest <= self.length // 8 else 0

    @property
    def state(self) -> int:
        """Slot of the recurrent states at `usable`; NO_SLOT for a model without."""
        return self.snapshots.get(self.usable, NO_SLOT)


class CachedPath(NamedTuple):
    """All that is cached from the root to one leaf: token_ids int32[n], one page per started page of n, and which of
    them have their sliding-window block; positions of snapshots; the texts' salt."""

    token_ids: TokenIds
    pages: PageNumbers
    windowed: BoolArray
    priority: Priority
    last_used: int
    snapshots: Mapping[int, int]
    salt: bytes = NO_SALT

    @classmethod
    def of(cls, leaf: PrefixNode) -> "CachedPath":
        """The path to a leaf."""
        nodes = list(leaf.ancestry())[::-1]
        return cls(
            np.concatenate([node.token_ids for node in nodes]),
            np.concatenate([node.pages for node in nodes]),
            np.concatenate([node.windowed for node in nodes]),
            leaf.priority,
            leaf.last_used,
            snapshots_of(leaf, sum(node.token_ids.size for node in nodes)),
            leaf.salt,
        )


def snapshots_of(node: PrefixNode, length: int) -> dict[int, int]:
    """Slots of the snapshots from the root to a node, by position, up to `length`."""
    return {
        start + offset: snapshot.slot
        for step, start in node.path()
        for offset, snapshot in step.snapshots.items()
        if start + offset <= length
    }


class PrefixTree:
    """The cached prefixes of one pool, whose `reclaim` it becomes. One thread at a time.

    Ctrl-C may end any change between two of its lines: each first retains pages, then links them, and releases last
    what is no longer linked, so that the worst an interrupt leaves is an unused page that is not freed.

    roots: stand for no ids; their children begin texts. root: of those without a salt. observer: gets whole pages, if
    there is one. on_evict: if set, called with a path and the length that will be left of it, before pages are freed.
    """

    def __init__(self, pool: PagePool, policy: SnapshotPolicy = DEFAULT_POLICY) -> None:
        self._pool = pool
        self.roots = Roots()
        self.root = self.roots.unsalted
        self._clock = 0
        # Eviction score of the last text that was evicted.
        self._age = 0
        self.num_pages = 0
        self.taken_snapshots = 0
        self._nodes_of_slot: Counter[int] = Counter()
        self.observer: CacheObserver | None = None
        self._policy = policy
        self._evicted = EvictedTexts()
        self.evicted_tokens = 0
        self.evicted_bytes = 0
        self.evicted_snapshots = 0
        self.on_evict: Callable[[CachedPath, int], None] | None = None
        pool.reclaim = self.evict
        if pool.has_states:
            pool.make_grid_room = self._make_grid_room

    def is_empty(self, salt: bytes = NO_SALT) -> bool:
        """True if nothing is cached of a salt."""
        return not self.roots.find(salt).children

    def match(self, token_ids: TokenIds, salt: bytes = NO_SALT) -> Match:
        """Find the longest cached prefix of the same salt; changes nothing."""
        node, offset, length = self.roots.find(salt), 0, 0
        pages, windowed = [node.pages], [node.windowed]
        while length < token_ids.size:
            child, common = self._best_child(node, token_ids[length:])
            if child is None:
                break
            node, offset = child, common
            length += common
            num_pages = self._pool.num_pages_for(common)
            pages.append(child.pages[:num_pages])
            windowed.append(child.windowed[:num_pages])
            if common < child.token_ids.size or common % self._pool.page_tokens:
                break
        has_part = np.concatenate(windowed)
        snapshots = snapshots_of(node, length) if self._pool.has_states else {}
        usable = self._usable_length(has_part, length, snapshots)
        return Match(length, np.concatenate(pages), node, offset, has_part, usable, snapshots)

    def within(self, match: Match, length: int) -> Match:
        """The same match, of which a sequence is to continue from within `length` positions."""
        windowed = match.windowed[: self._pool.num_pages_for(length)]
        return match._replace(usable=self._usable_length(windowed, length, match.snapshots))

    def touch(self, node: PrefixNode, position: int = 0, offset: int | None = None) -> None:
        """Mark a node and all before it as used just now, and the snapshot at a position, if there is one.

        offset: how many of the node's ids were of use, if not all; below half, the node itself was of none.
        """
        self._clock += 1
        is_used = offset is None or 2 * offset >= node.token_ids.size or node.parent is None
        (node if is_used else node.parent or node).use(self._clock, self._age)
        if position and self._pool.has_states:
            for step, start in node.path():
                snapshot = step.snapshots.get(position - start)
                if snapshot is not None:
                    snapshot.last_used = self._clock

    def insert(
        self,
        token_ids: TokenIds,
        pages: PageNumbers,
        windowed: BoolArray | None = None,
        *,
        snapshots: Mapping[int, int] | None = None,
        system_tokens: int = 0,
        is_pinned: bool = False,
        num_turns: int = 0,
        salt: bytes = NO_SALT,
    ) -> None:
        """Link token ids whose keys and values lie in `pages`, one per started page; retain what is new.

        Where ids are cached already, their pages stay, unless they lack the sliding-window block that a new one has.
        windowed: bool[pages], which of them the caller holds with that part; None for all. snapshots: slots of
        recurrent states by position; what is new is retained. system_tokens: how many ids at the start, rounded down to
        whole pages, are a system prefix. is_pinned: all of it is evicted last. num_turns: of the text's conversation.
        """
        page_tokens = self._pool.page_tokens
        assert self._pool.num_pages_for(token_ids.size) == pages.size, "as many pages as the token ids take"
        windowed = np.ones(pages.size, np.bool_) if windowed is None else windowed
        system = min(system_tokens, token_ids.size) // page_tokens
        if system:
            self._insert(token_ids[: system * page_tokens], pages[:system], windowed[:system], Priority.SYSTEM, salt)
        self._insert(token_ids, pages, windowed, Priority.PINNED if is_pinned else Priority.ORDINARY, salt, num_turns)
        if snapshots:
            self._add_snapshots(token_ids, snapshots, salt)

    @property
    def num_snapshots(self) -> int:
        """Snapshots of recurrent states that are cached."""
        return len(self._nodes_of_slot)

    def paths(self) -> Iterator[CachedPath]:
        """Every cached path, one per leaf."""
        for leaf in self.roots.leaves():
            yield CachedPath.of(leaf)

    def continuation(self, match: Match, count: int) -> TokenIds:
        """Up to `count` cached ids that follow a match, along its most recently used continuation."""
        node = match.node
        ids = node.token_ids[match.offset : match.offset + count]
        while ids.size < count and node.children:
            node = max(node.children, key=lambda child: child.last_used)
            ids = np.concatenate((ids, node.token_ids[: count - ids.size]))
        return ids

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
            self._age = max(self._age, leaf.eviction_score)
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
        # Where the text ends inside of a node, another one continues there.
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

    def _usable_length(self, windowed: BoolArray, length: int, snapshots: Mapping[int, int]) -> int:
        """The longest prefix of `length` positions that a sequence can continue from."""
        sliding = self._pool.sliding
        if not self._pool.has_states:
            return sliding.usable_length(windowed, length)
        for position in sorted(snapshots, reverse=True):
            held = windowed[: self._pool.num_pages_for(position)]
            if position <= length and sliding.usable_length(held, position) == position:
                return position
        return 0

    def _add_snapshots(self, token_ids: TokenIds, snapshots: Mapping[int, int], salt: bytes) -> None:
        """Keep snapshots of ids that are cached, where there are none yet."""
        match = self.match(token_ids, salt)
        assert match.length == token_ids.size, "what was inserted is there"
        path = match.node.path()
        for position, slot in snapshots.items():
            for node, start in path:
                if start < position <= start + node.token_ids.size:
                    known = node.snapshots.get(position - start)
                    if known is not None:
                        known.last_used = self._clock
                        continue
                    self._pool.states.retain(slot)
                    self.taken_snapshots += slot not in self._nodes_of_slot
                    self._nodes_of_slot[slot] += 1
                    node.snapshots[position - start] = Snapshot(slot, self._clock)

    def _insert(
        self,
        token_ids: TokenIds,
        pages: PageNumbers,
        windowed: BoolArray,
        priority: Priority,
        salt: bytes,
        num_turns: int = 0,
    ) -> None:
        page_tokens = self._pool.page_tokens
        node, start = self.roots.find(salt), 0
        while start < token_ids.size:
            first = start // page_tokens
            rest, rest_pages, rest_windowed = token_ids[start:], pages[first:], windowed[first:]
            child, common = self._best_child(node, rest)
            whole = common - common % page_tokens
            if child is None or (common < min(rest.size, child.token_ids.size) and not whole):
                node = self._add_leaf(node, rest, rest_pages, rest_windowed, priority)
                break
            if common < child.token_ids.size and whole and (common < rest.size or priority > child.priority):
                child = self._split(child, whole)
                common = whole
            # The last page of ids that end inside one holds as many only where the cached ids end there too.
            is_whole = common == child.token_ids.size == rest.size
            num_same = self._pool.num_pages_for(common) if is_whole else common // page_tokens
            self._take_windowed(child, rest_pages[:num_same], rest_windowed[:num_same])
            if common == child.token_ids.size and common < rest.size and self._extends(child, priority):
                self._extend(child, rest, rest_pages, rest_windowed)
                common = rest.size
            child.priority = max(child.priority, priority)
            node, start = child, start + common
        node.num_turns = max(node.num_turns, num_turns)
        self.touch(node)
        if self.observer is not None:
            tell_stored(self.observer, node, page_tokens)

    def _extends(self, leaf: PrefixNode, priority: Priority) -> bool:
        """True if a longer text replaces this node: always where it ends inside a page, else where they are alike."""
        ends_inside_page = leaf.token_ids.size % self._pool.page_tokens != 0
        return ends_inside_page or (not leaf.children and leaf.priority == priority)

    def _extend(self, leaf: PrefixNode, token_ids: TokenIds, pages: PageNumbers, windowed: BoolArray) -> None:
        whole = leaf.token_ids.size // self._pool.page_tokens
        fresh, replaced, replaced_windowed = pages[whole:], leaf.pages[whole:], leaf.windowed[whole:]
        kept, kept_windowed = leaf.pages[:whole], leaf.windowed[:whole] & windowed[:whole]
        unseen = kept[leaf.windowed[:whole] & ~kept_windowed]
        assert leaf.parent is not None, "the root is never extended"
        leaf.parent.drop_index()
        self._pool.retain(fresh, windowed[whole:])
        longer, longer_pages = token_ids.copy(), np.concatenate((kept, fresh))
        longer_windowed = np.concatenate((kept_windowed, windowed[whole:]))
        num_pages = self.num_pages + fresh.size - replaced.size
        # In one line, which Ctrl-C cannot part; so below.
        leaf.token_ids, leaf.pages, leaf.windowed, self.num_pages = longer, longer_pages, longer_windowed, num_pages
        self._pool.release(replaced, replaced_windowed)
        self._pool.release_windowed(unseen)

    def _take_windowed(self, node: PrefixNode, pages: PageNumbers, windowed: BoolArray) -> None:
        """Replace first pages of a node that lack a sliding-window block by the same pages computed again with one."""
        lacking = np.flatnonzero(windowed & ~node.windowed[: pages.size])
        if not lacking.size:
            return
        now, has_part, replaced = node.pages.copy(), node.windowed.copy(), node.pages[lacking]
        now[lacking], has_part[lacking] = pages[lacking], True
        self._pool.retain(pages[lacking])
        node.pages, node.windowed = now, has_part
        self._pool.release(replaced, np.zeros(replaced.size, np.bool_))

    def _add_leaf(
        self, parent: PrefixNode, token_ids: TokenIds, pages: PageNumbers, windowed: BoolArray, priority: Priority
    ) -> PrefixNode:
        self._pool.retain(pages, windowed)
        self.num_pages += pages.size
        ids, salt = token_ids.copy(), parent.salt
        leaf = PrefixNode(ids, pages.copy(), windowed.copy(), parent, priority, self._clock, salt=salt)
        self.roots.keep(parent)
        parent.drop_index()
        parent.children.append(leaf)
        return leaf

    def _split(self, node: PrefixNode, length: int) -> PrefixNode:
        """Split a node in two, the first with `length` ids, whole pages; return the first."""
        parent = node.parent
        assert parent is not None and length % self._pool.page_tokens == 0, "nodes part between pages"
        num_pages = length // self._pool.page_tokens
        ids, pages, windowed = node.token_ids, node.pages, node.windowed
        above, below = ids[:length], ids[length:]
        upper = PrefixNode(above, pages[:num_pages], windowed[:num_pages], parent, node.priority, node.last_used)
        lower = PrefixNode(below, pages[num_pages:], windowed[num_pages:], upper, node.priority, node.last_used)
        upper.salt = lower.salt = node.salt
        upper.block_hashes, lower.block_hashes = node.block_hashes[:num_pages], node.block_hashes[num_pages:]
        snapshots = node.snapshots.items()
        upper.snapshots = {offset: snapshot for offset, snapshot in snapshots if offset <= length}
        lower.snapshots = {offset - length: snapshot for offset, snapshot in snapshots if offset > length}
        upper.num_turns, upper.eviction_score = lower.num_turns, lower.eviction_score = (
            node.num_turns,
            node.eviction_score,
        )
        upper.children, lower.children = [lower], node.children
        for child in node.children:
            child.parent = lower
        parent.drop_index()
        parent.children[parent.children.index(node)] = upper
        return upper

    def _best_child(self, node: PrefixNode, token_ids: TokenIds) -> tuple[PrefixNode | None, int]:
        """The child that shares most ids with the start of `token_ids`, and how many; of equals the shortest, unless
        another can be continued from further on."""
        page_tokens = self._pool.page_tokens
        if token_ids.size >= page_tokens and node.children:
            if node.by_first_page is None:
                whole = (child for child in node.children if child.token_ids.size >= page_tokens)
                node.by_first_page = {child.token_ids[:page_tokens].tobytes(): child for child in whole}
            child = node.by_first_page.get(token_ids[:page_tokens].tobytes())
            if child is not None:
                return child, common_length(child.token_ids, token_ids)
        return self._best_partial_child(node, token_ids[:page_tokens])

    def _best_partial_child(self, node: PrefixNode, token_ids: TokenIds) -> tuple[PrefixNode | None, int]:
        """Do as `_best_child`, where no child begins with the whole page of ids."""
        if not node.children:
            return None, 0
        if node.heads is None:
            node.heads = np.full((len(node.children), self._pool.page_tokens), -1, np.int32)
            for row, child in zip(node.heads, node.children, strict=True):
                ids = child.token_ids[: row.size]
                row[: ids.size] = ids
        size = token_ids.size
        differs = np.ones((len(node.children), size + 1), np.bool_)
        np.not_equal(node.heads[:, :size], token_ids, out=differs[:, :size])
        shared = differs.argmax(axis=1)
        common = int(shared.max())
        if not common:
            return None, 0
        equals = [node.children[index] for index in np.flatnonzero(shared == common)]

        def preference(child: PrefixNode) -> tuple[int, int]:
            deepest = max((offset for offset in child.snapshots if offset <= common), default=0)
            return -deepest, child.token_ids.size

        return min(equals, key=preference), common

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

    def _make_grid_room(self, tokens_saved: int) -> bool:
        """Drop snapshots of the grid that save no more tokens; return whether there is room for one more.

        Texts of recurrent layers alone hold nothing but states, so their share is one of the memory allowed.
        """
        pool = self._pool
        while True:
            num_bytes = self._lasting_bytes if pool.num_bytes(1, 1) or pool.max_bytes is None else pool.max_bytes
            if len(pool.grid) < self._policy.most_of_grid(num_bytes, pool.states.slot_bytes):
                return True
            places = [place for place in self._idle_places() if place.snapshot.slot in pool.grid]
            least = min(places, key=lambda place: (place.tokens_saved, place.snapshot.last_used), default=None)
            if least is None or least.tokens_saved > tokens_saved:
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
        """First leaf to evict of those whose last page is not in use."""
        idle = [leaf for leaf in self.roots.leaves() if self._pool.counts[leaf.pages[-1]] <= 1]
        return min(idle, key=lambda leaf: leaf.eviction_order, default=None)

    def _least_place(self, leaf: PrefixNode | None) -> SnapshotPlace | None:
        """First snapshot to evict of those that are not in use and were used before this leaf.

        It is the one that saves least between those before and after it, by how long ago it was used: so those that
        stay of a long chat lie the further apart, the further back they are, and an edit anywhere resumes from one.
        """

        def score(place: SnapshotPlace) -> tuple[Priority, float]:
            return place.node.priority, place.tokens_saved / (1 + self._clock - place.last_used)

        places = self._idle_places()
        if leaf is not None:
            last = (leaf.priority, leaf.last_used)
            places = (place for place in places if (place.node.priority, place.last_used) < last)
        return min(places, key=score, default=None)

    def _idle_places(self) -> Iterator[SnapshotPlace]:
        return (place for place in places_of_snapshots(self.roots) if self._is_idle(place.snapshot))

    def _drop_snapshot(self, place: SnapshotPlace) -> None:
        """Drop a snapshot, and pages that no sequence could continue from without it."""
        node, offset = place.node, place.offset
        self._forget_snapshot(node, offset)
        if not node.children and max(node.snapshots, default=0) < offset and node.parent is not None:
            self._trim(node, 0)

    def _is_idle(self, snapshot: Snapshot) -> bool:
        """True if no sequence uses it."""
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

"""Nodes of the prefix tree with their pages and snapshots, the results of a search, and notifications of changes.

Only whole pages of the tree are reported to a `CacheObserver`: they are what another prompt can begin with. A page that
moves within the tree, is shared, or is computed again with its sliding-window block is reported once. Nodes remember
the hashes of reported pages. Ctrl-C may come between any two lines, so pages are reported before that is noted, and
notes are dropped before pages are reported as removed: an observer may be notified of a page twice, or for a while not
know of one, but never know of a page that is not there.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from localinfer.engine.cache.block_hashes import NO_SALT, chained_hashes
from localinfer.engine.cache.block_pool import PageNumbers
from localinfer.engine.cache.sequence_state import NO_SLOT, Snapshot, tokens_saved
from localinfer.engine.cache.windows import BoolArray
from localinfer.types import TokenIds

_MOST_EVICTED_TEXTS = 256
_MOST_EVICTED_TOKENS = 1 << 20
"""Evicted texts, and token ids of them, that are kept."""
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
    texts that go on from there, the furthest; after the last snapshot, as if the text went on as far again.
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


class EvictedTexts:
    """Token ids of the texts that were evicted last, to explain later misses."""

    def __init__(self) -> None:
        # Each with its salt and its first id, which tells most of them apart.
        self._texts: deque[tuple[bytes, int, TokenIds]] = deque()
        self._num_tokens = 0

    def add(self, token_ids: TokenIds, salt: bytes) -> None:
        """Keep an evicted text, unless a longer one that begins so is kept already."""
        if self.shared_length(token_ids, salt) == token_ids.size:
            return
        self._texts.append((salt, int(token_ids[0]), token_ids))
        self._num_tokens += token_ids.size
        while len(self._texts) > _MOST_EVICTED_TEXTS or (
            len(self._texts) > 1 and self._num_tokens > _MOST_EVICTED_TOKENS
        ):
            self._num_tokens -= self._texts.popleft()[2].size

    def shared_length(self, token_ids: TokenIds, salt: bytes) -> int:
        """Number of ids that a text and an evicted one of the same salt share at their start."""
        if not token_ids.size:
            return 0
        first = int(token_ids[0])
        alike = (ids for own, begin, ids in self._texts if begin == first and own == salt)
        return max((common_length(ids, token_ids) for ids in alike), default=0)

    def clear(self) -> None:
        """Forget them."""
        self._texts.clear()
        self._num_tokens = 0


def common_length(a: TokenIds, b: TokenIds) -> int:
    """Number of ids that two arrays share at their start."""
    size = min(a.size, b.size)
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


class CacheObserver(Protocol):
    """Observer of a prefix cache, called under the step lock: it must not wait for anything, nor raise."""

    def stored(self, block_hashes: Sequence[int], parent_hash: int | None, token_ids: TokenIds, salt: bytes) -> None:
        """Whole pages are in the tree, each after the one before it, the first after `parent_hash`.

        parent_hash: None where a text begins. token_ids: theirs, int32, never written again.
        """

    def removed(self, block_hashes: Sequence[int]) -> None:
        """These are no longer in memory; what follows a block is named before it."""

    def cleared(self) -> None:
        """The tree is empty; the pages that were in it were reported as removed before."""

    def close(self) -> None:
        """The cache has ended."""


def tell_stored(observer: CacheObserver, node: PrefixNode, page_tokens: int) -> None:
    """Report the pages of a node, and of those before it, that were not reported yet."""
    parent: int | None = None
    for step, _ in node.path():
        known, whole = step.block_hashes, step.token_ids.size // page_tokens
        if len(known) < whole:
            before = known[-1] if known else parent
            fresh_ids = step.token_ids[len(known) * page_tokens : whole * page_tokens]
            fresh = chained_hashes(fresh_ids, page_tokens, step.salt, before)
            observer.stored(fresh, before, fresh_ids, step.salt)
            step.block_hashes = known = (*known, *fresh)
        parent = known[-1] if known else parent


def tell_removed(observer: CacheObserver, leaf: PrefixNode, kept: int, page_tokens: int) -> None:
    """Tell of the pages of a leaf that it is about to lose, all but the first `kept`."""
    lost = _hashes_of(leaf, page_tokens)[kept:]
    if lost:
        leaf.block_hashes = leaf.block_hashes[:kept]
        observer.removed(lost[::-1])


def tell_cleared(observer: CacheObserver, roots: Roots, page_tokens: int) -> None:
    """Tell that a tree is empty, or about to be dropped whole: of its pages first, for callers that count them."""
    left = [block for node in roots.nodes() for block in _hashes_of(node, page_tokens)]
    if left:
        observer.removed(left[::-1])
    observer.cleared()


def _hashes_of(node: PrefixNode, page_tokens: int) -> tuple[int, ...]:
    """The hashes of all whole pages of a node, which are noted unless Ctrl-C came in between."""
    known, whole = node.block_hashes, node.token_ids.size // page_tokens
    if len(known) == whole:
        return known
    before = np.concatenate([step.token_ids for step, _ in node.path()])
    return tuple(chained_hashes(before, page_tokens, node.salt)[-whole:])

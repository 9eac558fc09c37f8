"""A radix tree from token ids to the pages that hold them, for each salt one of its own: what is found, what is added.

Every node stands for a run of token ids that begins at a multiple of the page size; only a leaf may end inside a page.
So a page belongs to one node, and texts that part inside a page each have a page of their own for it. The tree holds
one reference to each of its pages; a page with more is in use and stays.

With sliding-window layers, it holds only the sliding-window blocks that the sequence which computed a text last held:
before its end, and before the places that others are likely to continue from.

With recurrent layers, nodes hold snapshots of their states at some positions, and only from those can a sequence go on.

Texts of different salts share no page. What is evicted, `prefix_tree.py` decides.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from localinfer.engine.cache.block_pool import PageNumbers, PagePool
from localinfer.engine.cache.cache_observer import CacheObserver, tell_stored
from localinfer.engine.cache.prefix_node import (
    CachedPath,
    Match,
    PrefixNode,
    Priority,
    Roots,
    common_length,
    snapshots_of,
)
from localinfer.engine.cache.salt import NO_SALT
from localinfer.engine.cache.sliding_window import BoolArray
from localinfer.engine.cache.snapshots import Snapshot
from localinfer.types import TokenIds


class RadixTree:
    """The cached prefixes of one pool, to which texts are added. One thread at a time.

    Ctrl-C may end any change between two of its lines: each first retains pages, then links them, and releases last
    what is no longer linked, so that the worst an interrupt leaves is an unused page that is not freed.

    roots: stand for no ids; their children begin texts. root: of those without a salt. observer: told of whole pages,
    if there is one.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.roots = Roots()
        self.root = self.roots.unsalted
        self._clock = 0
        # What the last text that was evicted was worth.
        self._age = 0
        self.num_pages = 0
        self.taken_snapshots = 0
        self._nodes_of_slot: Counter[int] = Counter()
        self.observer: CacheObserver | None = None

    def is_empty(self, salt: bytes = NO_SALT) -> bool:
        """Whether nothing is cached of a salt."""
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
        for leaf in self._leaves():
            yield CachedPath.of(leaf)

    def continuation(self, match: Match, count: int) -> TokenIds:
        """Up to `count` cached ids that follow a match, along its most recently used continuation."""
        node = match.node
        ids = node.token_ids[match.offset : match.offset + count]
        while ids.size < count and node.children:
            node = max(node.children, key=lambda child: child.last_used)
            ids = np.concatenate((ids, node.token_ids[: count - ids.size]))
        return ids

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
        """Whether a longer text replaces this node: always where it ends inside a page, else where they are alike."""
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
        upper.num_turns, upper.worth = lower.num_turns, lower.worth = node.num_turns, node.worth
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
        """As `_best_child`, where no child begins with the whole page of ids."""
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

    def _leaves(self) -> Iterator[PrefixNode]:
        return self.roots.leaves()

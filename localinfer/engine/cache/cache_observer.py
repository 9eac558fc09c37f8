"""Who is told of the pages that enter and leave a prefix tree, and how the tree tells it.

Only whole pages of the tree count: they are what another prompt can begin with. A page that moves within the tree, is
shared, or is computed again with its sliding-window block is told of once. Nodes remember the hashes of pages that were
told of. Ctrl-C may come between any two lines, so pages are told of before that is noted, and notes are dropped before
pages are told of as removed, noted or not: an observer may be told of a page twice, or for a while not know of one, but
never know of what is not there.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from localinfer.engine.cache.block_hashes import chained_hashes
from localinfer.engine.cache.prefix_node import PrefixNode, Roots
from localinfer.types import TokenIds


class CacheObserver(Protocol):
    """Is told of a prefix cache, under the step lock: it must not wait for anything, nor raise."""

    def stored(self, block_hashes: Sequence[int], parent_hash: int | None, token_ids: TokenIds, salt: bytes) -> None:
        """Whole pages are in the tree, each after the one before it, the first after `parent_hash`.

        parent_hash: None where a text begins. token_ids: theirs, int32, never written again.
        """
        ...

    def removed(self, block_hashes: Sequence[int]) -> None:
        """These are no longer in memory; what follows a block is named before it."""
        ...

    def cleared(self) -> None:
        """The tree is empty; pages that were in it were told of as removed before."""
        ...

    def close(self) -> None:
        """The cache has ended."""
        ...


def tell_stored(observer: CacheObserver, node: PrefixNode, page_tokens: int) -> None:
    """Tell of the pages of a node, and of those before it, that were not told of yet."""
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
    """Tell that a tree is empty, or about to be dropped whole: of its pages first, for those who count them."""
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

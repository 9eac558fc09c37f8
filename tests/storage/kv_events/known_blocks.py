"""A router's model of one cache, by events alone."""

from collections.abc import Sequence

from localinfer.engine.cache.prefix_cache import PrefixCache
from localinfer.types import TokenIds
from tests.proof.simulation.checks import require

Block = tuple[bytes, tuple[int, ...]]
"""A salt, and all token ids up to the end of a block."""


class KnownBlocks:
    """The text up to the end of each block, by the block's hash; raises what no router could follow.

    may_lack: Ctrl-C came within a change of the cache, so that some blocks may not be told of, or twice.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.blocks: dict[int, Block] = {}
        self.is_closed = self.may_lack = False
        self.num_stored = self.num_removed = self.num_cleared = 0

    def stored(self, block_hashes: Sequence[int], parent_hash: int | None, token_ids: TokenIds, salt: bytes) -> None:
        require(len(block_hashes) * self._page_tokens == token_ids.size, "a block is not of as many tokens as a page")
        before: tuple[int, ...] = ()
        if parent_hash is not None:
            if self.may_lack and parent_hash not in self.blocks:
                return
            require(parent_hash in self.blocks, "a block follows one that was not stored")
            known_salt, before = self.blocks[parent_hash]
            require(known_salt == salt, "a block has another salt than the one before it")
        for index, block in enumerate(block_hashes):
            before += tuple(token_ids[index * self._page_tokens : (index + 1) * self._page_tokens].tolist())
            require(self.blocks.get(block, (salt, before)) == (salt, before), "two blocks have one hash")
            require(self.may_lack or block not in self.blocks, "a block is stored twice")
            self.blocks[block] = salt, before
        self.num_stored += len(block_hashes)

    def removed(self, block_hashes: Sequence[int]) -> None:
        for block in block_hashes:
            if self.may_lack and block not in self.blocks:
                continue
            require(block in self.blocks, "a block is removed that was not stored")
            salt, text = self.blocks.pop(block)
            follows = (other[: len(text)] == text for known, other in self.blocks.values() if known == salt)
            require(not any(follows), "a block is removed before one that follows it")
        self.num_removed += len(block_hashes)

    def cleared(self) -> None:
        require(not self.blocks, "blocks are left that were not removed")
        self.num_cleared += 1

    def close(self) -> None:
        self.is_closed = True


def blocks_of(cache: PrefixCache) -> set[Block]:
    """What the tree really holds: every whole page, by its salt and all ids up to its end."""
    page_tokens = cache.pool.page_tokens
    found = set()
    for path in cache.tree.paths():
        ids = tuple(path.token_ids.tolist())
        found |= {(path.salt, ids[:end]) for end in range(page_tokens, len(ids) + 1, page_tokens)}
    return found

"""KV cache events as bytes: what vLLM publishes, and Dynamo, llm-d and others read.

A batch is [timestamp, events, data parallel rank] in MessagePack. An event is a map with its name as `type`, as of vLLM
0.24, or before that an array of its name and its values in order, without those at its end that say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from localinfer.engine.cache.salt import NO_SALT
from localinfer.storage.kv_events.config import Encoding

if TYPE_CHECKING:
    from localinfer.types import TokenIds

MEDIUM = "GPU"
"""Of blocks that the model computes from, in vLLM's words, whatever memory it is: routers prefer it to others."""
SALT_KEY = "dynamo-cache-salt:"
"""Before a text's salt, an extra key of its first block, by which routers that make hashes of their own from token ids
tell the text from others. Dynamo knows a salt by this word; llm-d counts any key as something that the block holds."""
_DATA_PARALLEL_RANK = 0
_GROUP = 0
_KIND = "full_attention"
"""Pages hold all layers together, so they are one group of blocks; routers count those of this kind."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class BlockStored(NamedTuple):
    """Blocks that follow each other are in memory, the first after `parent_block_hash`, None where a text begins."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: TokenIds
    salt: bytes = NO_SALT

    def fields(self) -> dict[str, object]:
        """The members in vLLM's order."""
        extra_keys = None
        if self.salt and self.parent_block_hash is None:
            extra_keys = [[SALT_KEY + self.salt.hex()], *[None] * (len(self.block_hashes) - 1)]
        return {
            "block_hashes": self.block_hashes,
            "parent_block_hash": self.parent_block_hash,
            "token_ids": self.token_ids.tolist(),
            "block_size": self.token_ids.size // len(self.block_hashes),
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
            "extra_keys": extra_keys,
            "group_idx": _GROUP,
            "kv_cache_spec_kind": _KIND,
        }


class BlockRemoved(NamedTuple):
    """Blocks are no longer in memory."""

    block_hashes: Sequence[int]

    def fields(self) -> dict[str, object]:
        """The members in vLLM's order."""
        return {"block_hashes": self.block_hashes, "medium": MEDIUM, "group_idx": _GROUP}


class AllBlocksCleared(NamedTuple):
    """There are no blocks any more."""

    def fields(self) -> Mapping[str, object]:
        """None."""
        return {}


Event = BlockStored | BlockRemoved | AllBlocksCleared


def encode_batch(timestamp: float, events: Sequence[Event], encoding: Encoding = "map") -> bytes:
    """The payload of a message; timestamp: seconds since 1970."""
    import msgspec

    written = [_as_map(event) if encoding == "map" else _as_array(event) for event in events]
    return msgspec.msgpack.encode([timestamp, written, _DATA_PARALLEL_RANK])


def sequence_bytes(number: int) -> bytes:
    """The second part of a message: the batch's number, from 0 on."""
    return number.to_bytes(8, "big")


def _as_map(event: Event) -> dict[str, object]:
    fields = {name: value for name, value in event.fields().items() if name != "extra_keys" or value is not None}
    return {"type": type(event).__name__, **fields}


def _as_array(event: Event) -> list[object]:
    return [type(event).__name__, *event.fields().values()]

"""The bytes of KV cache events are those that vLLM's documented types decode, in both of its encodings."""

from typing import Any

import msgspec
import numpy as np
import pytest

from localinfer.engine.cache.block_hashes import salt_of
from localinfer.storage.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Encoding, encode_batch

pytest.importorskip("zmq", reason="subscribers need pyzmq")

from tests.storage.kv_events.subscribers import ArrayBatch, MapBatch  # noqa: E402

IDS = np.arange(100, 164, dtype=np.int32)
LARGEST = (1 << 64) - 1
EVENTS = [
    BlockStored([7, LARGEST], None, IDS),
    BlockStored([8], LARGEST, IDS[:32]),
    BlockStored([9, 10], None, IDS, salt_of("team")),
    BlockStored([11], 10, IDS[:32], salt_of("team")),
    BlockRemoved((8, LARGEST)),
    AllBlocksCleared(),
]


@pytest.mark.parametrize(("encoding", "batch_type"), [("map", MapBatch), ("array", ArrayBatch)])
def test_batch_is_what_documented_types_decode(encoding: Encoding, batch_type: Any) -> None:
    batch = msgspec.msgpack.decode(encode_batch(12.5, EVENTS, encoding), type=batch_type)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    first, second, salted, after, removed, cleared = batch.events
    assert (first.block_hashes, first.parent_block_hash, first.block_size) == ([7, LARGEST], None, 32)
    assert first.token_ids == IDS.tolist() and first.extra_keys is None
    assert (first.medium, first.group_idx, first.kv_cache_spec_kind) == ("GPU", 0, "full_attention")
    assert first.lora_id is first.lora_name is first.kv_cache_spec_sliding_window is None
    assert (second.block_hashes, second.parent_block_hash, len(second.token_ids)) == ([8], LARGEST, 32)
    # Where the salt's texts begin, and nowhere else.
    assert salted.extra_keys == [(f"dynamo-cache-salt:{salt_of('team').hex()}",), None]
    assert after.extra_keys is None
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([8, LARGEST], "GPU", 0)
    assert type(cleared).__name__.endswith("Cleared")


def test_encodings_are_maps_with_names_and_arrays_in_order() -> None:
    ids = IDS[:32].tolist()
    stored = {
        "type": "BlockStored",
        "block_hashes": [8],
        "parent_block_hash": 7,
        "token_ids": ids,
        "block_size": 32,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    removed = {"type": "BlockRemoved", "block_hashes": [8], "medium": "GPU", "group_idx": 0}
    events = [BlockStored([8], 7, IDS[:32]), BlockRemoved([8]), AllBlocksCleared()]
    assert msgspec.msgpack.decode(encode_batch(1.0, events, "map")) == [
        1.0,
        [stored, removed, {"type": "AllBlocksCleared"}],
        0,
    ]
    assert msgspec.msgpack.decode(encode_batch(1.0, events, "array")) == [
        1.0,
        [
            ["BlockStored", [8], 7, ids, 32, None, "GPU", None, None, 0, "full_attention"],
            ["BlockRemoved", [8], "GPU", 0],
            ["AllBlocksCleared"],
        ],
        0,
    ]

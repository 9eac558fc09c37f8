"""A subscriber as a router is one: events decoded by the types that vLLM documents, and a model of the cache.

The types are declared as vLLM publishes them since 0.24 (maps) and did before (arrays); they decode what we send, and
share nothing with what encodes it.
"""

from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import zmq

from tests.storage.kv_events.known_blocks import KnownBlocks
from tests.support.limits import seconds

SALT_KEY = "dynamo-cache-salt:"
END = b"\xff" * 8


class Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class MapStored(Stored):
    locality: str | None = None


class MapRemoved(Removed):
    locality: str | None = None


class ArrayStored(Stored, array_like=True):
    pass


class ArrayRemoved(Removed, array_like=True):
    pass


class ArrayCleared(Cleared, array_like=True):
    pass


class MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[MapStored | MapRemoved | Cleared]
    data_parallel_rank: int | None = None


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Reads batches and follows them in order; those after one that it missed it leaves until they are sent again.

    batches: those that it followed. last: the number of the last batch that came, -1 before the first.
    """

    def __init__(
        self, endpoint: str, topic: str = "", *, batch: type = MapBatch, block_size: int = 32, **options: int
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(batch)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        for name, value in options.items():
            setattr(self._socket, name, value)
        self._socket.subscribe(topic.encode())
        self._socket.connect(endpoint)
        self.known = KnownBlocks(block_size)
        self.batches: list[Any] = []
        self.last = -1

    def close(self) -> None:
        self._context.destroy(linger=0)

    @property
    def missing(self) -> int | None:
        """The first batch that did not come, if one after it did."""
        return len(self.batches) if self.last >= len(self.batches) else None

    def next(self, nominal_seconds: float = 15.0) -> int | None:
        """Read one batch; its number, None if none comes."""
        if not self._socket.poll(int(1000 * seconds(nominal_seconds))):
            return None
        self.topic, number, payload = self._socket.recv_multipart()
        assert len(number) == 8
        self.last = int.from_bytes(number, "big")
        self._take(self.last, payload)
        return self.last

    def read_to(self, number: int) -> None:
        """Read until a batch has come."""
        while self.last < number:
            assert self.next() is not None, f"batch {number} does not come after {self.last}"

    def replay(self, endpoint: str, start: int, topic: bytes = b"") -> list[int]:
        """Ask for the batches from one on, and follow those that are new; the numbers that came."""
        asking = self._context.socket(zmq.DEALER)
        asking.rcvhwm = 0
        asking.connect(endpoint)
        asking.send_multipart([b"", start.to_bytes(8, "big")])
        came: list[int] = []
        while True:
            assert asking.poll(int(1000 * seconds(15))), "the replay does not end"
            empty, named, number, payload = asking.recv_multipart()
            assert empty == b""
            if number == END:
                assert named == payload == b""
                asking.close(0)
                return came
            assert named == topic
            came.append(int.from_bytes(number, "big"))
            self._take(came[-1], payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number == len(self.batches):
            batch = self._decoder.decode(payload)
            assert batch.data_parallel_rank == 0
            self.batches.append(batch)
            for event in batch.events:
                self._follow(event)

    def _follow(self, event: Any) -> None:
        name = type(event).__struct_config__.tag
        if name == "AllBlocksCleared":
            self.known.cleared()
            return
        assert event.medium == "GPU" and event.group_idx == 0
        if name == "BlockRemoved":
            self.known.removed(event.block_hashes)
            return
        assert event.block_size * len(event.block_hashes) == len(event.token_ids)
        assert event.kv_cache_spec_kind == "full_attention"
        salt = b""
        if event.parent_block_hash is not None:
            with suppress(KeyError):
                salt, _ = self.known.blocks[event.parent_block_hash]
        elif event.extra_keys is not None:
            assert len(event.extra_keys) == len(event.block_hashes)
            ((key,),) = [keys for keys in event.extra_keys if keys is not None]
            assert key.startswith(SALT_KEY)
            salt = bytes.fromhex(key.removeprefix(SALT_KEY))
        self.known.stored(event.block_hashes, event.parent_block_hash, np.array(event.token_ids, np.int32), salt)

"""CUDA attention on the emulator, over pages that the CPU wrote: against the oracle, and its bits in any batch."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import AttentionShape, Buffer, Rows
from localinfer.kernels.program import Segment
from localinfer.types import FloatArray
from tests.kernels.cpu.attention_cases import PLAIN, cache_of, inputs_of, oracle
from tests.kernels.cpu.tape_runs import RowProgram, assert_same_bits, relative_error

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda.attention import AttentionLaunches, FreshRows, HeadRotation, store_steps
from localinfer.kernels.cuda.gemm import Shape
from localinfer.kernels.cuda.media import MediaShape
from localinfer.kernels.cuda.memory import DeviceMemory
from tests.kernels.cuda.device import EmulatedDevice

NO_ROPE = HeadRotation(0, 0, 0, 0, 0)


def write_cache(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
    tape.store_kv(1, inputs[1], inputs[2])
    return inputs[0]


class Cache:
    """One sequence's pages as the CPU fills them, in the emulator's memory."""

    def __init__(self, pool: ThreadPool, shape: AttentionShape, kv_type: str, inputs: Sequence[FloatArray]) -> None:
        self.layout = cache_of(shape, kv_type)
        self.shape, self.inputs = shape, inputs
        rows = len(inputs[0])
        program = RowProgram(pool, inputs, write_cache, rows, self.layout)
        addresses = program.pages(rows)
        program.run(range(rows), [Segment(0, rows, addresses)])
        self.pages: NDArray[np.uint8] = np.concatenate(program._pages[: addresses.size])

    def attend(
        self,
        runs: Sequence[range],
        capability: tuple[int, int] = (9, 0),
        ranges: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> tuple[FloatArray, list[str]]:
        """Attention of runs of positions, one segment each, and the kernels it took.

        ranges: of every position the first that it sees, the one after the last, and the one from which on no window
        bounds it.
        """
        device = EmulatedDevice()
        device.capability = capability
        shape = self.shape
        positions = np.array([position for run in runs for position in run], np.int64)
        rows = len(positions)
        pages = put(device, self.pages)
        count = len(self.pages) // self.layout.page_bytes
        table = put(device, pages + np.arange(count, dtype=np.int64) * self.layout.page_bytes)
        tables = put(device, np.full(rows, table, np.int64))
        memory = DeviceMemory(device, {Rows.BATCH: rows, Rows.OUTPUT: rows}, ())
        queries = (put(device, self.inputs[0][positions]), 4 * shape.num_heads * shape.key_size)
        width = 4 * shape.num_heads * shape.value_size
        out = (device.allocate(rows * width), width)
        slopes = memory.constant(shape.alibi_slopes)
        sinks = memory.constant(shape.sinks)
        chunks = int(positions.max()) // 128 + 1
        sizes = tuple(len(run) for run in runs)
        ends = put(device, np.repeat([run[-1] for run in runs], sizes).astype(np.int64))
        media = None
        if ranges is not None:
            starts, ends_of_ranges, windows = (put(device, one[positions]) for one in ranges)
            media = MediaShape(key_starts=starts, key_ends=ends_of_ranges, window_starts=windows)
        batch = Shape(rows, rows, chunks, 0, put(device, positions), tables, 0, sizes, last_positions=ends, media=media)
        attention = AttentionLaunches(
            memory, self.layout, 1, shape, queries, out, slopes, sinks, NO_ROPE, takes_ranges=ranges is not None
        )
        device.run(list(attention.steps(batch, None)))
        found = np.empty((rows, width // 4), np.float32)
        device.read(out[0], found)
        return found, device.kernels

    def wanted(self, runs: Sequence[range], kv_type: str, *, exact_queries: bool) -> NDArray[np.float64]:
        everything = oracle(list(self.inputs), self.shape, kv_type, exact_queries=exact_queries)
        return everything[[position for run in runs for position in run]]


def put(device: EmulatedDevice, array: NDArray[np.generic]) -> int:
    address = device.allocate(array.nbytes)
    device.write(address, array)
    return address


ALL = np.array([0.5, -1.0, 2.0, 0.0, 1.0, 0.25], np.float32)
FEW = {
    "codes": ("q8_0", replace(PLAIN, key_size=80, value_size=72)),
    "codes of keys, one query per key": ("q8_0/f16", replace(PLAIN, num_heads=2, key_size=20, softcap=2.0)),
    "codes of values": ("f32/q8_0", replace(PLAIN, num_heads=3, num_kv_heads=1, value_size=37, window=20)),
    "half bytes": ("q4_0", replace(PLAIN, key_size=80, value_size=72)),
    "half bytes of keys, an odd word": ("q4_0/f16", replace(PLAIN, num_heads=2, key_size=20, softcap=2.0)),
    "half bytes of values": ("f32/q4_0", replace(PLAIN, num_heads=3, num_kv_heads=1, value_size=37, window=20)),
    "half bytes beside codes": ("q8_0/q4_0", replace(PLAIN, num_kv_heads=1, key_size=64, value_size=136, chunk=50)),
    "whole words of half bytes": ("q4_0/q8_0", replace(PLAIN, key_size=128, value_size=16, alibi_slopes=ALL[:4])),
    "codes with sinks": ("q8_0", replace(PLAIN, key_size=16, value_size=16, sinks=np.ones(4, np.float32))),
}


@pytest.mark.parametrize("name", FEW)
def test_attention_over_codes_is_the_oracles(name: str, pool: ThreadPool) -> None:
    kv_type, shape = FEW[name]
    cache = Cache(pool, shape, kv_type, inputs_of(shape, 140, seed=1))
    runs = [range(1), range(133, 134)]
    found, kernels = cache.attend(runs)
    assert relative_error(found, cache.wanted(runs, kv_type, exact_queries=False)) <= 2e-6
    assert kernels == ["attention.attend_chunks"]


def test_many_chunks_are_merged(pool: ThreadPool) -> None:
    # More chunks than a warp has lanes, one of them alone, and two that begin behind the first.
    for shape, runs in (
        (replace(PLAIN, num_heads=2, num_kv_heads=1, key_size=4, value_size=4), [range(4300, 4301), range(5, 6)]),
        (replace(PLAIN, num_heads=1, num_kv_heads=1, key_size=4, value_size=4, window=200), [range(4300, 4301)]),
    ):
        queries, keys, values = inputs_of(shape, 4301, seed=9)
        found, _ = Cache(pool, shape, "f32", [queries, keys, values]).attend(runs)
        for row, position in zip(found, [run[0] for run in runs], strict=True):
            first = max(0, position + 1 - shape.window) if shape.window else 0
            scores = shape.scale * queries[position].reshape(-1, 4).astype(np.float64) @ keys[first : position + 1].T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            wanted = weights @ values[first : position + 1] / weights.sum(axis=1, keepdims=True)
            assert relative_error(row, wanted.reshape(-1)) <= 2e-6


MANY = {
    "halves": ("f16", PLAIN),
    "odd sizes, all masks": (
        "f16",
        replace(PLAIN, num_heads=6, key_size=20, value_size=37, window=33, softcap=3.0, sinks=ALL, alibi_slopes=ALL),
    ),
    "local chunks, wide values": ("f16", replace(PLAIN, num_heads=1, num_kv_heads=1, value_size=136, chunk=50)),
    "codes": ("q8_0", replace(PLAIN, num_heads=3, num_kv_heads=1, key_size=80, value_size=72)),
    "codes of keys": ("q8_0/f16", replace(PLAIN, num_heads=2, num_kv_heads=1, key_size=18)),
    "codes of values": ("f16/q8_0", replace(PLAIN, num_heads=2, num_kv_heads=1, value_size=21)),
    "half bytes": ("q4_0", replace(PLAIN, num_heads=3, num_kv_heads=1, key_size=80, value_size=72)),
    "half bytes of keys": ("q4_0/f16", replace(PLAIN, num_heads=2, num_kv_heads=1, key_size=18)),
    "half bytes of values": ("q8_0/q4_0", replace(PLAIN, num_heads=2, num_kv_heads=1, value_size=141)),
}


@pytest.mark.parametrize("name", MANY)
def test_tiles_of_many_rows_are_the_oracles(name: str, pool: ThreadPool) -> None:
    kv_type, shape = MANY[name]
    cache = Cache(pool, shape, kv_type, inputs_of(shape, 72, seed=2))
    runs = [range(48, 71)]
    found, kernels = cache.attend(runs)
    # Queries and weights are rounded to float16, and codes times their scale.
    assert relative_error(found, cache.wanted(runs, kv_type, exact_queries=True)) <= 8e-4
    assert "attention.attend_chunks" not in kernels and "attention_tiles.attend_tiles" in kernels
    assert np.isfinite(found).all()


def test_a_row_has_the_same_bits_wherever_tiles_were_cut(pool: ThreadPool) -> None:
    shape = replace(PLAIN, num_heads=5, num_kv_heads=1, key_size=16, value_size=16, window=40)
    cache = Cache(pool, shape, "f16", inputs_of(shape, 80, seed=3))
    together, _ = cache.attend([range(50, 76)])
    apart, kernels = cache.attend([range(50, 59), range(59, 61), range(61, 76)])
    assert_same_bits(np.concatenate([apart[:9], apart[11:]]), np.concatenate([together[:9], together[11:]]))
    assert relative_error(apart[9:11], cache.wanted([range(59, 61)], "f16", exact_queries=True)) <= 2e-6
    assert kernels == [
        "attention_tiles.attend_tiles",
        "attention.attend_chunks",
        "attention_tiles.attend_tiles",
    ]


def test_what_tiles_cannot_do_is_done_by_chunks(pool: ThreadPool) -> None:
    shape = replace(PLAIN, num_heads=1, num_kv_heads=1, key_size=8, value_size=8)
    for kv_type, capability in (("f32", (9, 0)), ("f16", (7, 5))):
        cache = Cache(pool, shape, kv_type, inputs_of(shape, 20, seed=4))
        found, kernels = cache.attend([range(2, 19)], capability)
        assert relative_error(found, cache.wanted([range(2, 19)], kv_type, exact_queries=True)) <= 2e-6
        assert kernels == ["attention.attend_chunks"]


@pytest.mark.parametrize("sizes", [(72, 18), (20, 141)])
@pytest.mark.parametrize("kv_type", ["q8_0", "q8_0/f32", "f16/q8_0", "q4_0", "q4_0/f16", "q8_0/q4_0", "f32/q4_0"])
def test_what_enters_the_cache_is_the_cpus_to_the_bit(kv_type: str, sizes: tuple[int, int], pool: ThreadPool) -> None:
    shape = replace(PLAIN, num_heads=1, num_kv_heads=1, key_size=sizes[0], value_size=sizes[1])
    inputs = inputs_of(shape, 6, seed=5)
    for rows in inputs[1:]:
        # A head of zeros, blocks of one sign, and of numbers whose scale float16 hardly has.
        rows[1], rows[2], rows[3] = 0, np.abs(rows[2]), -np.abs(rows[3])
        rows[4] *= 1e-6
    cache = Cache(pool, shape, kv_type, inputs)
    layout = cache.layout
    device = EmulatedDevice()
    page = put(device, np.full(layout.page_bytes, 255, np.uint8))
    tables = put(device, np.full(6, put(device, np.array([page], np.int64)), np.int64))
    batch = Shape(6, 6, 1, 0, put(device, np.arange(6)), tables, 0)
    places = [(put(device, values), 4 * values.shape[1]) for values in cache.inputs[1:]]
    device.run(list(store_steps(layout, 1, places[0], places[1], NO_ROPE)(batch)))
    found = np.empty(layout.page_bytes, np.uint8)
    device.read(page, found)
    assert_same_cache(layout, found, cache.pages)


STORED = {
    "f16": ("f16", replace(PLAIN, num_heads=3, num_kv_heads=1, key_size=20, value_size=10)),
    "f32": ("f32", replace(PLAIN, key_size=16, value_size=24, window=5)),
    "codes": ("q8_0", replace(PLAIN, num_heads=2, key_size=72, value_size=80)),
    "codes of keys": ("q8_0/f16", replace(PLAIN, num_heads=8, num_kv_heads=1, key_size=32, value_size=18)),
    "codes of values": ("f16/q8_0", replace(PLAIN, num_heads=2, key_size=18, value_size=96, chunk=50)),
    "half bytes": ("q4_0", replace(PLAIN, num_heads=2, key_size=72, value_size=80)),
    "half bytes of keys": ("q4_0/f16", replace(PLAIN, num_heads=8, num_kv_heads=1, key_size=20, value_size=18)),
    "half bytes of values": ("f32/q4_0", replace(PLAIN, num_heads=2, key_size=18, value_size=37, chunk=50)),
}


@pytest.mark.parametrize("position", [0, 31, 130])
@pytest.mark.parametrize("name", STORED)
def test_a_row_stored_by_its_attention_has_the_bits_of_one_stored_before(
    name: str, position: int, pool: ThreadPool
) -> None:
    kv_type, shape = STORED[name]
    cache = Cache(pool, shape, kv_type, inputs_of(shape, position + 1, seed=6))
    # The cache holds other keys and values at this position, as of a draft that was rejected.
    rows = [values[-1:] for values in inputs_of(shape, position + 1, seed=7)]
    rotation = np.random.default_rng(8).standard_normal((1, shape.key_size // 4, 2)).astype(np.float32)

    def attend(*, stores: bool) -> list[NDArray[np.uint8]]:
        device = EmulatedDevice()
        memory = DeviceMemory(device, {Rows.BATCH: 1, Rows.OUTPUT: 1}, ())
        pages = put(device, cache.pages)
        count = len(cache.pages) // cache.layout.page_bytes
        table = put(device, pages + np.arange(count, dtype=np.int64) * cache.layout.page_bytes)
        places = [(put(device, values), 4 * values.shape[1]) for values in rows]
        angles = put(device, rotation)
        rope = HeadRotation(angles, shape.key_size // 4, int(name == "f16"), shape.key_size, 2)
        fresh = FreshRows(1, *places[1:], rope)
        out = (device.allocate(4 * shape.num_heads * shape.value_size), 4 * shape.num_heads * shape.value_size)
        batch = Shape(1, 1, 2, 0, put(device, np.array([position])), put(device, np.array([table])), 0)
        attention = AttentionLaunches(
            memory, cache.layout, 1, shape, places[0], out, 0, 0, NO_ROPE, fresh if stores else None
        )
        assert attention.can_store
        if not stores:
            device.run(list(store_steps(cache.layout, 1, *places[1:], rope)(batch)))
        device.run(list(attention.steps(batch, None)))
        assert ("kv_store.store_rows" in device.kernels or "kv_store.store_codes" in device.kernels) != stores
        found = [np.empty(cache.pages.size, np.uint8), np.empty(out[1], np.uint8)]
        for address, array in zip((pages, out[0]), found, strict=True):
            device.read(address, array)
        return found

    found, wanted = attend(stores=True), attend(stores=False)
    assert (wanted[0] != cache.pages).any(), "another row was stored"
    np.testing.assert_array_equal(found[0], wanted[0])
    assert_same_bits(found[1].view(np.float32), wanted[1].view(np.float32))


def test_a_row_that_many_query_heads_share_is_stored_before(pool: ThreadPool) -> None:
    shape = replace(PLAIN, num_heads=9, num_kv_heads=1, key_size=8, value_size=8)
    layout = cache_of(shape, "f16")
    memory = DeviceMemory(EmulatedDevice(), {Rows.BATCH: 1, Rows.OUTPUT: 1}, ())
    assert not AttentionLaunches(memory, layout, 1, shape, (0, 0), (0, 0), 0, 0, NO_ROPE).can_store


def assert_same_cache(layout: KVLayout, found: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> None:
    """Equal but for codes of columns that only fill up a vector, which the CPU sets to zero, and a GPU where they share
    bytes with others."""
    differs = np.flatnonzero(found != wanted)
    assert (found[differs] == 255).all(), "what was written is what the CPU writes"
    assert np.isin(wanted[differs], (0, 128)).all(), "what was not written is padding"
    shape, head = layout.layers[1], layout.head(1)
    padding = (head.key_columns - shape.key_size) * (layout.key_type == "q8_0")
    padding += (head.value_columns - shape.value_size) * {"q8_0": 1, "f16": 2, "f32": 4}.get(layout.value_type, 0)
    assert differs.size <= 6 * padding and (found != 255).any()

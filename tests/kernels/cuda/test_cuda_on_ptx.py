"""A few launches on the compiled PTX, with warps in either order; `ptx_executor.py` takes all tests there.

Between shuffles and barriers the order of lanes and warps is open, so what depends on it is a race.
"""

from dataclasses import replace

import numpy as np
import pytest

from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import AttentionShape, KVLayerShape, Rows
from tests.kernels.random_weights import random_weights

pytest.importorskip("numba_cuda", reason="CUDA kernels are compiled by numba-cuda, which is not installed")

from localinfer.kernels.cuda.attention import AttentionLaunches, FreshRows, HeadRotation
from localinfer.kernels.cuda.gemm import Shape, Slot, quantize_launch, quantized_place, scalar_gemm
from localinfer.kernels.cuda.memory import DeviceMemory
from localinfer.kernels.cuda.self_check import check_device
from localinfer.kernels.cuda.weights import upload
from tests.kernels.cuda import ptx_executor, test_cuda_attention, test_cuda_page_sums, test_cuda_tape
from tests.kernels.cuda.device import EmulatedDevice
from tests.kernels.cuda.emulation import Emulator

pytestmark = pytest.mark.skipif(ptx_executor.missing() is not None, reason=f"{ptx_executor.missing()}")


@pytest.fixture(params=ptx_executor.ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Launch on PTX, in an order of warps."""
    monkeypatch.setattr(Emulator, "launch", ptx_executor.ptx_launch(request.param))
    return int(request.param)


def test_a_product_and_an_attention_are_right(order: int) -> None:
    check_device(EmulatedDevice())
    names = {name for name, _ in ptx_executor.launched}
    assert {"matmul.matmul", "matmul_tiles.matmul_tiles", "attention.attend_chunks", "kv_store.store_rows"} <= names


def test_what_the_last_block_makes_is_the_sources(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are merged, and their codes; a row that its attention stores; codes of a gated product."""
    random = np.random.default_rng(2)
    layout = KVLayout("q8_0", [KVLayerShape(1, 128, 128)])
    shape = AttentionShape(3, 1, 128, 128, 0.2)
    page = random.integers(0, 256, layout.page_bytes, np.uint8)
    page.view(np.uint16)[:] = page.view(np.uint16) & 0x83FF | 0x3000
    queries, keys, values = (random.standard_normal(width).astype(np.float32) for width in (384, 128, 128))
    inputs = random.standard_normal(64).astype(np.float32)
    weights = [random_weights(Layout.Q4_0, (64, 64), seed) for seed in (1, 2)]

    def last_blocks() -> list[np.ndarray]:
        device = EmulatedDevice()
        memory = DeviceMemory(device, {Rows.BATCH: 1, Rows.OUTPUT: 1}, ())

        def put(array: np.ndarray) -> int:
            device.write(address := device.allocate(array.nbytes), array)
            return address

        pages = [put(page) for _ in range(9)]
        table = put(np.array(pages, np.int64))
        run = Shape(1, 1, 4, 0, put(np.array([270])), put(np.array([table], np.int64)), 0)
        rope = HeadRotation(0, 0, 0, 128, 0)
        fresh = FreshRows(0, (put(keys), 512), (put(values), 512), rope)
        out, into = (device.allocate(1536), 1536), quantized_place(memory, "out", 384, 1)
        attention = AttentionLaunches(memory, layout, 0, shape, (put(queries), 1536), out, 0, 0, rope, fresh)
        device.run(list(attention.steps(run, into)))
        given, joined = quantized_place(memory, "inputs", 64, 1), quantized_place(memory, "gated", 64, 1)
        joined = replace(joined, counters=memory.counters(2))
        device.run([quantize_launch(put(inputs), 256, given, 64, 1)])
        both = [Slot(upload(device, Layout.Q4_0, data, 1, 64, 64), out[0], 1536) for data in weights]
        attended = device.memory.view(*out).copy()
        device.run(list(scalar_gemm((0, 0), given, both, 1, 0, joined, prefetches=True)))
        sizes = [(pages[8], page.size), (into.codes, 384), (into.records, 96), (joined.codes, 64), (joined.records, 16)]
        return [attended, *(device.memory.view(place, size).copy() for place, size in sizes)]

    found = last_blocks()
    monkeypatch.undo()
    for ours, wanted in zip(found, last_blocks(), strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_a_norm_and_its_codes_are_the_sources(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).standard_normal(1024).astype(np.float32)

    def normed() -> list[np.ndarray]:
        device = EmulatedDevice()
        x, out, codes, records = (device.allocate(size) for size in (4096, 4096, 1024, 256))
        device.write(x, values)
        given = (x, 0, out, 0, 0, 0, 0, 0, 1024, codes, 0, records, 0, 1e-5)
        device.emulator.launch("rows.norm", (0, 8, 1, 4, 1), (4, 1, 1), 256, given)
        return [device.memory.view(place, size).copy() for place, size in ((out, 4096), (codes, 1024), (records, 256))]

    found = normed()
    monkeypatch.undo()
    for ours, wanted in zip(found, normed(), strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_heads_of_codes_are_stored_as_by_the_cpu(order: int, pool: ThreadPool) -> None:
    test_cuda_attention.test_what_enters_the_cache_is_the_cpus_to_the_bit("q8_0/q4_0", (20, 141), pool)


def test_attention_over_half_bytes_is_the_oracles(order: int, pool: ThreadPool) -> None:
    test_cuda_attention.test_attention_over_codes_is_the_oracles("half bytes", pool)
    test_cuda_attention.test_tiles_of_many_rows_are_the_oracles("half bytes", pool)


def test_means_of_texts_are_the_cpus(order: int) -> None:
    test_cuda_tape.test_means_are_of_the_text_of_each_output_row()


# Of half bytes and of halves, whose attention the tests above compile as well.
def test_attention_is_summed_by_page_as_by_the_oracle(order: int, pool: ThreadPool) -> None:
    test_cuda_page_sums.test_sums_of_pages_are_their_share_of_the_softmax_of_the_last_rows("sinks", 3, pool)


def test_rows_see_what_is_left_when_pages_are_dropped(order: int, pool: ThreadPool) -> None:
    test_cuda_page_sums.test_rows_see_what_is_left_when_pages_are_dropped("f16", pool)

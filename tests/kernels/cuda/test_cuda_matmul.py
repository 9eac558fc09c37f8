"""The CUDA products, lane by lane on the emulator, against the oracle: every layout, odd sizes, small batches."""

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import ShapeError
from localinfer.kernels.cuda.weights import array_row_bytes, to_arrays
from localinfer.kernels.layouts import CUDA_LAYOUTS, SIZES, Layout, is_float
from tests.kernels.random_weights import decoded, quantized_activations, random_weights

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda.compiled import matmul
from tests.kernels.cuda.emulation import EmulatedMemory, Emulator
from tests.support.samples import one_of_each

NO_WEIGHT = (*[0] * 10, 0.0)
QUANTIZED = [layout for layout in CUDA_LAYOUTS if not is_float(layout)]


class Bench:
    """Arrays in emulated memory."""

    def __init__(self) -> None:
        self.memory = EmulatedMemory()
        self.emulator = Emulator(self.memory)

    def put(self, array: NDArray[np.generic]) -> int:
        address = self.memory.allocate(max(16, array.nbytes))
        self.memory.view(address, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return address

    def weight(self, layout: Layout, data: NDArray[np.uint8], shape: tuple[int, int], out: int) -> tuple[float, ...]:
        planes = [self.put(plane) for plane in to_arrays(layout, data, *shape)]
        return (*planes, shape[0], out, 4 * shape[0], 0, 0, 0, 1.0)

    def activations(self, x: NDArray[np.float32], layout: Layout) -> tuple[int, int, int, int, int]:
        """Where x is, as products of this layout want it: the first five parameters."""
        rows, columns = x.shape
        place = self.put(x)
        if is_float(layout):
            return place, 4 * columns, 0, 0, columns
        codes, records = self.memory.allocate(rows * columns), self.memory.allocate(rows * columns // 4)
        words = (place, 4 * columns, codes, columns, records, columns // 4, columns)
        self.emulator.launch("quantize.quantize_rows", (), (-(-columns // 128), rows, 1), 128, words)
        return codes, columns, records, columns // 4, columns

    def floats(self, address: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return self.memory.view(address, 4 * int(np.prod(shape))).view(np.float32).reshape(shape)


def product(layout: Layout, x: NDArray[np.float32], num_rows: int, split: int, weight_rows: int) -> NDArray[np.float32]:
    """By `matmul`, or by `matmul_tiles` if weight_rows is 0."""
    bench = Bench()
    columns = x.shape[1]
    out = bench.memory.allocate(4 * len(x) * num_rows)
    data = random_weights(layout, (num_rows, columns), seed=7)
    weight = bench.weight(layout, data, (num_rows, columns), out)
    values = (*bench.activations(x, layout), 0, *weight, *NO_WEIGHT, *NO_WEIGHT)
    values = (*values, *array_row_bytes(layout, columns))
    if weight_rows:
        constants = (layout, len(x), weight_rows, split, matmul.PLAIN)
        groups = -(-num_rows // weight_rows)
        grid = (-(-groups * split // 4), 1, 1)
        bench.emulator.launch("matmul.matmul", constants, grid, 128, (*values, 0, 0, 1, 0))
    else:
        constants = (layout, len(x), 1, split, matmul.PLAIN)
        grid = (-(-num_rows // 16), 1, 1)
        bench.emulator.launch("matmul_tiles.matmul_tiles", constants, grid, 256, values)
    return bench.floats(out, (len(x), num_rows))


@pytest.mark.parametrize("layout", CUDA_LAYOUTS, ids=[layout.name for layout in CUDA_LAYOUTS])
def test_product_of_every_layout_is_the_oracles(layout: Layout) -> None:
    columns = 103 if is_float(layout) else 1280 if SIZES[layout].unit == 32 else 512
    x = np.random.default_rng(3).standard_normal((2, columns)).astype(np.float32)
    found = product(layout, x, 5, split=2, weight_rows=2)
    inputs = x.astype(np.float64) if is_float(layout) else quantized_activations(x)
    wanted = inputs @ decoded(layout, random_weights(layout, (5, columns), seed=7), (5, columns)).T
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("split", [1, 4])
def test_a_rows_product_has_the_same_bits_in_every_batch(split: int) -> None:
    x = np.random.default_rng(4).standard_normal((16, 256)).astype(np.float32)
    together = product(Layout.Q4_K, x, 3, split, weight_rows=1)
    for row in (0, 5, 15):
        np.testing.assert_array_equal(product(Layout.Q4_K, x[row : row + 1], 3, split, weight_rows=2)[0], together[row])


@pytest.mark.parametrize("layout", QUANTIZED, ids=[layout.name for layout in QUANTIZED])
def test_tiles_give_the_bits_of_single_rows(layout: Layout) -> None:
    # Units that fill no warp's four, and parts of the last of which there is little.
    columns = {Layout.Q4_0: 2144, Layout.Q8_0: 1120, Layout.INT8_32: 544}.get(layout, 1056)
    columns = -(-columns // SIZES[layout].unit) * SIZES[layout].unit
    x = np.random.default_rng(5).standard_normal((3, columns)).astype(np.float32)
    tiled = product(layout, x, 5, split=2, weight_rows=0)
    np.testing.assert_array_equal(tiled, product(layout, x, 5, split=2, weight_rows=1))


def test_tiles_of_sixteen_rows_and_of_gate_and_up_are_the_scalar_kernels() -> None:
    x = np.random.default_rng(6).standard_normal((16, 64)).astype(np.float32)
    np.testing.assert_array_equal(product(Layout.Q5_1, x, 20, 1, 0), product(Layout.Q5_1, x, 20, 1, 4))


@pytest.mark.parametrize("layout", CUDA_LAYOUTS, ids=[layout.name for layout in CUDA_LAYOUTS])
def test_planes_take_no_more_bytes_than_the_file_and_lose_none(layout: Layout) -> None:
    columns = 1024
    data = random_weights(layout, (3, columns), seed=1)
    planes = to_arrays(layout, data, 3, columns)
    assert sum(plane.nbytes for plane in planes) == data.nbytes
    with pytest.raises(ShapeError, match="pass the tensor's own bytes"):
        to_arrays(layout, data[:-1], 3, columns)


def test_columns_that_do_not_fill_a_unit_are_padded_with_zeros() -> None:
    planes = to_arrays(Layout.F16, random_weights(Layout.F16, (3, 5), seed=1), 3, 5)
    assert planes[0].shape == (3, 16)
    assert not planes[0][:, 10:].any()
    with pytest.raises(ShapeError, match="multiple of 32"):
        array_row_bytes(Layout.Q4_0, 40)


GATED = one_of_each(
    [(layout, 3, 0) if layout in QUANTIZED[::2] else (layout, 1, 1) for layout in CUDA_LAYOUTS],
    lambda case: (is_float(case[0]), SIZES[case[0]].unit, case[2]),
)


@pytest.mark.parametrize(
    ("layout", "rows", "split"), [*GATED, (Layout.Q8_0, 1, 1), (Layout.Q4_0, 2, 2), (Layout.Q4_K, 1, 4)]
)
def test_codes_of_a_gated_product_are_those_of_quantizing_it(layout: Layout, rows: int, split: int) -> None:
    """By `matmul` with a row split among warps, or by `matmul_tiles` if split is 0, for some layouts of each size.

    What is done with a sum is the same for all of them.
    """
    columns, width = SIZES[layout].unit if not is_float(layout) else 40, 64
    x = np.random.default_rng(7).standard_normal((rows, columns)).astype(np.float32)
    # A block of zeros has no scale.
    is_zero = np.repeat([False, True], width // 2)

    def quantized(kind: int) -> tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.uint8]]:
        bench = Bench()
        out, codes, records = (bench.memory.allocate(rows * size) for size in (4 * width, width, width // 4))
        counters = bench.put(np.zeros(width // 32, np.uint32))
        gate, up = (
            bench.weight(layout, random_weights(layout, (width, columns), seed), (width, columns), out)
            for seed in (8, 9)
        )
        bias = bench.put(np.where(is_zero, -1e30, 0.0).astype(np.float32))
        gate = (*gate[:7], bias, *gate[8:])
        into = (codes, width, records, width // 4, 0, counters, *NO_WEIGHT[6:])
        silu = 0
        values = (*bench.activations(x, layout), silu, *gate, *up, *(into if kind == matmul.GATED_CODES else NO_WEIGHT))
        values = (*values, *array_row_bytes(layout, columns))
        # The counters of the first launch are those of the second.
        for _ in range(2 if kind == matmul.GATED_CODES else 1):
            if split:
                constants = (layout, rows, 2, split, kind)
                grid = (width // 2 * split // 4, 1, 1)
                bench.emulator.launch("matmul.matmul", constants, grid, 128, (*values, 0, 0, 1, 0))
            else:
                constants = (layout, rows, 1, 2, kind)
                bench.emulator.launch("matmul_tiles.matmul_tiles", constants, (width // 8, 1, 1), 256, values)
            assert not bench.memory.view(counters, width // 8).any(), "counters are left as they were found"
        if kind == matmul.GATED:
            words = (out, 4 * width, codes, width, records, width // 4, width)
            bench.emulator.launch("quantize.quantize_rows", (), (1, rows, 1), 128, words)
        found = bench.floats(out, (rows, width))
        return found, bench.memory.view(codes, rows * width), bench.memory.view(records, rows * width // 4)

    joined, apart = quantized(matmul.GATED_CODES), quantized(matmul.GATED)
    for found, wanted in zip(joined, apart, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert not joined[0][:, is_zero].any() and joined[0][:, ~is_zero].any() and joined[1].any()

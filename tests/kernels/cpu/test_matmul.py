"""Matrix products in every layout: their error, and their bits however a batch is cut."""

import numpy as np
import pytest

from localinfer.errors import ShapeError
from localinfer.kernels.cpu.compiled.unpacked import COLUMNS, LEAST_ROWS, MOST_ROWS
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.layouts import LARGEST_STEP, SIZES, Layout, is_float
from localinfer.kernels.ops import Buffer, LinearWeight, Projection
from localinfer.quant.formats.types import TensorType, block_dtype
from localinfer.types import FloatArray
from tests.kernels.cpu.tape_runs import (
    RowProgram,
    Write,
    assert_same_bits,
    linear,
    random_rows,
    relative_error,
    run_rows,
)
from tests.kernels.random_weights import decoded, group_dtype, quantized_activations, random_weights

# Relative L2 error against float64 on the same weights and the raw, normally distributed activations. For integer
# layouts it is the rounding of activations to int8 (0.0048 is expected); kernels/README.md repeats this table.
ERROR_BUDGET = {
    Layout.F32: 1e-6,
    Layout.F16: 1e-6,
    Layout.BF16: 1e-6,
    Layout.Q8_0: 6e-3,
    Layout.Q4_0: 6e-3,
    Layout.Q4_1: 6e-3,
    Layout.Q5_0: 6e-3,
    Layout.Q5_1: 6e-3,
    Layout.Q4_K: 6e-3,
    Layout.Q5_K: 6e-3,
    Layout.Q6_K: 6e-3,
    Layout.INT4_32: 6e-3,
    Layout.INT4_64: 6e-3,
    Layout.INT4_128: 6e-3,
    Layout.INT8_32: 6e-3,
    Layout.MXFP4: 6e-3,
    Layout.NVFP4: 6e-3,
    Layout.IQ4_NL: 6e-3,
    Layout.IQ4_XS: 6e-3,
    Layout.Q2_K: 6e-3,
    Layout.Q3_K: 6e-3,
    Layout.TQ2_0: 6e-3,
    Layout.IQ2_XXS: 6e-3,
    Layout.IQ2_XS: 6e-3,
    Layout.IQ2_S: 6e-3,
    Layout.IQ3_XXS: 6e-3,
    Layout.IQ3_S: 6e-3,
    Layout.Q1_0: 6e-3,
    Layout.Q2_0: 6e-3,
}
ARITHMETIC_BUDGET = 1e-6
"""The same against the activations as they are after rounding: what the kernel itself adds."""

ROWS = 23
LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.name)


def sizes(layout: Layout) -> list[tuple[int, int]]:
    """Weight shapes: whole and partial tiles, one column unit, an odd number of them, and many."""
    unit = SIZES[layout].unit
    if is_float(layout):
        return [(48, 64), (37, 771), (5, 1), (1, 37), (16, 5)]
    return [(48, 2 * unit), (37, 3 * unit), (5, unit), (1, 11 * unit)]


def product(*weights: LinearWeight, chosen: int = 0) -> Write:
    """Write one matmul by all weights; the result is that of the chosen one."""

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        outs = [tape.buffer(f"out {index}", weight.num_rows) for index, weight in enumerate(weights)]
        tape.matmul(inputs[0], [Projection(weight, out) for weight, out in zip(weights, outs, strict=True)])
        return outs[chosen]

    return write


@LAYOUTS
def test_matmul_of_raw_activations_stays_inside_the_error_budget(layout: Layout, pool: ThreadPool) -> None:
    shape = (61, 2816)
    data, x = random_weights(layout, shape, 1), random_rows(ROWS, shape[1], 2)
    found = run_rows(pool, [x], product(linear(pool, layout, data, shape)))
    assert relative_error(found, x.astype(np.float64) @ decoded(layout, data, shape).T) <= ERROR_BUDGET[layout]


@LAYOUTS
def test_matmul_adds_little_to_the_rounding_of_activations(layout: Layout, pool: ThreadPool) -> None:
    for seed, shape in enumerate(sizes(layout)):
        data, x = random_weights(layout, shape, seed), random_rows(ROWS, shape[1], seed + 100)
        found = run_rows(pool, [x], product(linear(pool, layout, data, shape)))
        rounded = x.astype(np.float64) if is_float(layout) else quantized_activations(x)
        assert relative_error(found, rounded @ decoded(layout, data, shape).T) <= ARITHMETIC_BUDGET, shape


@LAYOUTS
def test_matmul_gives_a_row_the_same_bits_in_any_batch(
    layout: Layout, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    shape = sizes(layout)[1]
    weight = linear(pool, layout, random_weights(layout, shape, 7), shape)
    x = random_rows(ROWS, shape[1], 8)
    wanted = run_rows(pool, [x], product(weight))
    for splits in ([1] * ROWS, [7, 7, 7, 2], [4, 8, 3, 2, 6]):
        assert_same_bits(run_rows(pool, [x], product(weight), splits), wanted)
        assert_same_bits(run_rows(two_threads, [x], product(weight), splits), wanted)
    assert_same_bits(run_rows(two_threads, [x], product(weight)), wanted)


@pytest.mark.parametrize("layout", [Layout.F16, Layout.Q4_0, Layout.Q6_K], ids=lambda layout: layout.name)
def test_matmul_gives_the_same_bits_when_activations_exceed_a_block_of_rows(
    layout: Layout, pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = sizes(layout)[1]
    weight = linear(pool, layout, random_weights(layout, shape, 17), shape)
    x = random_rows(ROWS, shape[1], 18)
    wanted = run_rows(pool, [x], product(weight))
    monkeypatch.setattr("localinfer.kernels.cpu.lower.matmul.ACTIVATION_BYTES_PER_BLOCK", 1)
    assert_same_bits(run_rows(pool, [x], product(weight)), wanted)


@pytest.mark.parametrize("layout", LEAST_ROWS, ids=lambda layout: layout.name)
def test_matmul_gives_a_row_the_same_bits_among_so_many_that_codes_are_unpacked_first(
    layout: Layout, pool: ThreadPool, two_threads: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localinfer.kernels.cpu.lower.matmul.ACTIVATION_BYTES_PER_BLOCK", 1 << 20)
    shape, few = (37, 512 + max(COLUMNS, SIZES[layout].unit)), min(LEAST_ROWS.values()) - 1
    weight = linear(pool, layout, random_weights(layout, shape, 27), shape)
    x = random_rows(MOST_ROWS + LEAST_ROWS[layout] + 3, shape[1], 28)
    counts = [min(few, len(x) - first) for first in range(0, len(x), few)]
    wanted = run_rows(pool, [x], product(weight), counts)
    assert_same_bits(run_rows(pool, [x], product(weight)), wanted)
    assert_same_bits(run_rows(two_threads, [x], product(weight)), wanted)


@pytest.mark.parametrize("layout", [Layout.BF16, Layout.Q8_0, Layout.Q4_K], ids=lambda layout: layout.name)
def test_matmul_adds_bias_scale_and_residual(layout: Layout, pool: ThreadPool) -> None:
    shape = sizes(layout)[1]
    data, x = random_weights(layout, shape, 9), random_rows(ROWS, shape[1], 10)
    weight, bias = linear(pool, layout, data, shape), random_rows(1, shape[0], 11)[0]
    residual = random_rows(ROWS, shape[0], 12)
    plain = run_rows(pool, [x], product(weight))

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.matmul(inputs[0], [Projection(weight, inputs[1], bias, inputs[1], 0.375)])
        return inputs[1]

    found = run_rows(pool, [x, residual], write, [9, 14])
    assert_same_bits(found, residual + (plain + bias) * np.float32(0.375))


def test_matmul_of_several_weights_equals_each_alone(pool: ThreadPool, two_threads: ThreadPool) -> None:
    layouts = [Layout.Q4_0, Layout.Q6_K, Layout.Q4_0, Layout.F16, Layout.Q8_0]
    shapes = [(37, 256), (16, 256), (5, 256), (20, 256), (48, 256)]
    weights = [
        linear(pool, layout, random_weights(layout, shape, seed), shape)
        for seed, (layout, shape) in enumerate(zip(layouts, shapes, strict=True))
    ]
    x = random_rows(9, 256, 13)
    for index, weight in enumerate(weights):
        alone = run_rows(pool, [x], product(weight))
        assert_same_bits(run_rows(pool, [x], product(*weights, chosen=index)), alone)
        assert_same_bits(run_rows(two_threads, [x], product(*weights, chosen=index)), alone)


@pytest.mark.parametrize("num_threads", [65, 200])
def test_matmul_gives_the_same_bits_with_more_threads_than_a_word_has_bits(num_threads: int, pool: ThreadPool) -> None:
    shape = (4000, 64)
    data, x = random_weights(Layout.Q8_0, shape, 1), random_rows(3, shape[1], 2)
    many = ThreadPool(num_threads)
    try:
        one, *others = (
            run_rows(which, [x], product(linear(which, Layout.Q8_0, data, shape))) for which in (pool, many, many)
        )
    finally:
        many.close()
    for other in others:
        np.testing.assert_array_equal(other, one)


def test_matmul_quantizes_again_after_its_input_changed(pool: ThreadPool) -> None:
    shape = (16, 64)
    weight = linear(pool, Layout.Q8_0, random_weights(Layout.Q8_0, shape, 14), shape)
    x = random_rows(3, 64, 15)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        first, second = tape.buffer("first", 16), tape.buffer("second", 16)
        tape.matmul(inputs[0], [Projection(weight, first)])
        tape.scale(inputs[0], 2.0)
        tape.matmul(inputs[0], [Projection(weight, second)])
        return second

    assert_same_bits(run_rows(pool, [x], write), run_rows(pool, [2 * x], product(weight)))


@LAYOUTS
def test_matmul_of_zeros_is_zero(layout: Layout, pool: ThreadPool) -> None:
    shape = sizes(layout)[0]
    weight = linear(pool, layout, random_weights(layout, shape, 16), shape)
    found = run_rows(pool, [np.zeros((3, shape[1]), np.float32)], product(weight))
    assert not found.any()


@pytest.mark.parametrize(
    ("layout", "field", "codes"),
    [(Layout.MXFP4, "e", [0, 1, 2, 3, 64, 128, 190, 200]), (Layout.NVFP4, "d", [0, 1, 7, 8, 126, 127, 128, 255])],
    ids=["MXFP4", "NVFP4"],
)
def test_matmul_takes_scale_bytes_of_any_value(layout: Layout, field: str, codes: list[int], pool: ThreadPool) -> None:
    """The smallest are subnormal as float32; of NVFP4 one is not a number and read as zero."""
    shape = (len(codes), 2 * SIZES[layout].unit)
    data = random_weights(layout, shape, 30)
    blocks = data.view(block_dtype(TensorType[layout.name])).reshape(len(codes), -1)
    for row, code in zip(blocks, codes, strict=True):
        row[field] = code
    x = random_rows(3, shape[1], 31)
    found = run_rows(pool, [x], product(linear(pool, layout, data, shape)))
    wanted = quantized_activations(x) @ decoded(layout, data, shape).T
    for column in range(len(codes)):
        # Products below float32's normal numbers lose bits.
        np.testing.assert_allclose(found[:, column], wanted[:, column], rtol=2e-5, atol=1e-41)


@pytest.mark.parametrize("layout", [layout for layout in Layout if layout.name.startswith("INT")])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_sums_of_the_largest_steps_are_exact(layout: Layout, rows: int, pool: ThreadPool) -> None:
    shape = (16, SIZES[layout].unit)
    data = np.zeros(shape[0] * shape[1] // SIZES[layout].unit, group_dtype(layout))
    top = 255 if layout is Layout.INT8_32 else 15
    data["d"] = 1
    data["codes"][::2], data["zero"][::2] = 0, LARGEST_STEP
    data["codes"][1::2], data["zero"][1::2] = 255, top - LARGEST_STEP
    x = np.full((rows, shape[1]), 127, np.float32)
    x[1::2] = -127
    steps = np.where(np.arange(16) % 2, LARGEST_STEP, -LARGEST_STEP)
    found = run_rows(pool, [x], product(linear(pool, layout, data.view(np.uint8), shape)))
    np.testing.assert_array_equal(found, np.outer(x[:, 0], steps) * np.float32(shape[1]))
    assert 32 * 127 * LARGEST_STEP < 1 << 22 <= 32 * 127 * (LARGEST_STEP + 1)


@pytest.mark.parametrize(
    "layout",
    [layout for layout in Layout if not is_float(layout) and not layout.name.startswith(("INT", "IQ2", "IQ3"))],
    ids=lambda layout: layout.name,
)
def test_sums_of_the_largest_codes_fit(layout: Layout, pool: ThreadPool) -> None:
    """Of whole blocks of largest codes, of either sign, and largest activations: AVX2 adds products in 16 bits."""
    shape = (16, 2 * SIZES[layout].unit)
    data = random_weights(layout, shape, 33)
    blocks = data.view(block_dtype(TensorType[layout.name]))
    for name in {"qs", "qh", "ql", "hmask"} & {*(blocks.dtype.names or ())}:
        codes = blocks[name]
        for start, byte in enumerate((0x77, 0xFF)):
            codes[start::2] = np.frombuffer(bytes([byte]) * codes.itemsize, codes.dtype)[0]
    x = np.full((19, shape[1]), 127, np.float32)
    x[1::2], x[2::4, ::2] = -127, -127
    found = run_rows(pool, [x], product(linear(pool, layout, data, shape)))
    assert relative_error(found, x.astype(np.float64) @ decoded(layout, data, shape).T) <= ARITHMETIC_BUDGET


def test_infinite_scales_reach_their_own_rows_only(pool: ThreadPool) -> None:
    shape = (16, 64)
    data = random_weights(Layout.MXFP4, shape, 32)
    data.view(block_dtype(TensorType.MXFP4)).reshape(16, 2)["e"][5] = 255
    x = random_rows(2, 64, 33) * np.float32(1e3)
    found = run_rows(pool, [x], product(linear(pool, Layout.MXFP4, data, shape)))
    assert not np.isfinite(found[:, 5]).any()
    assert np.isfinite(np.delete(found, 5, axis=1)).all()


def test_matmul_keeps_rows_apart_when_one_is_not_a_number(pool: ThreadPool) -> None:
    shape = (16, 64)
    weight = linear(pool, Layout.Q4_0, random_weights(Layout.Q4_0, shape, 19), shape)
    x = random_rows(8, 64, 20)
    wanted = run_rows(pool, [x], product(weight))
    broken = x.copy()
    broken[3, 40] = np.nan
    found = run_rows(pool, [broken], product(weight))
    others = [0, 1, 2, 4, 5, 6, 7]
    assert_same_bits(found[others], wanted[others])


@pytest.mark.parametrize("layout", [Layout.F32, Layout.Q4_0], ids=lambda layout: layout.name)
def test_head_matmul_multiplies_each_head_by_its_own_matrix(
    layout: Layout, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    heads, rows, columns = 3, 20, 64
    data = random_weights(layout, (heads, rows, columns), 21)
    weight = linear(pool, layout, data, (heads, rows, columns))
    x, start = random_rows(7, heads * 80, 22), random_rows(7, heads * 24, 23)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        tape.head_matmul(inputs[1], inputs[0], weight, out_head_size=24, x_head_size=80, out_offset=4, x_offset=16)
        return inputs[1]

    found = run_rows(pool, [x, start], write)
    taken: FloatArray = np.ascontiguousarray(x.reshape(7, heads, 80)[:, :, 16:])
    exact = taken if is_float(layout) else quantized_activations(taken.reshape(7, -1)).reshape(taken.shape)
    wanted = start.astype(np.float64).reshape(7, heads, 24).copy()
    wanted[:, :, 4:] = np.einsum("hoi,rhi->rho", decoded(layout, data, (heads, rows, columns)), exact)
    assert relative_error(found, wanted.reshape(7, -1)) <= ARITHMETIC_BUDGET
    assert_same_bits(run_rows(two_threads, [x, start], write, [1, 6]), found)


def test_matmul_refuses_shapes_that_do_not_meet(pool: ThreadPool) -> None:
    weight = linear(pool, Layout.Q8_0, random_weights(Layout.Q8_0, (16, 64), 24), (16, 64))
    with pytest.raises(ShapeError, match="64 columns"):
        RowProgram(pool, [random_rows(1, 96, 25)], product(weight), 1)

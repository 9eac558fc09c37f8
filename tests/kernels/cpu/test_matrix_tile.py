"""Products by AMX on its emulated registers: every layout's have the bits of the selected instruction set.

The code that is emitted is run but for its instructions, which `emulated_matrices.py` computes as the manual says.
Where the CPU has AMX whole kernels are compared as well, with the instructions themselves.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llvmlite import binding as llvm
from numba import types

from localinfer.kernels.cpu.compiled import blocks, emit, matmul
from localinfer.kernels.cpu.compiled.unpacked import FEW_MATRIX_ROWS as FEW_ROWS, MATRIX_BYTES, group_columns
from localinfer.kernels.cpu.kernel_abi import activation_row_bytes
from localinfer.kernels.cpu.lower import matmul as matrix_rows
from localinfer.kernels.cpu.memory import Arena, address
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.jit import isa, numba, object_cache
from localinfer.kernels.jit.host import is_arm64, target_cpu, target_features
from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.layouts import SIZES, TILE_ROWS, Layout, is_float
from localinfer.kernels.ops import Buffer, LinearWeight, Projection
from localinfer.types import FloatArray
from tests.kernels.cpu import run_pieces
from tests.kernels.cpu.emit_assembly import PIECES, made
from tests.kernels.cpu.emulated_matrices import Registers, emulate
from tests.kernels.cpu.tape_runs import linear, random_rows, run_rows
from tests.kernels.random_weights import random_weights
from tests.support.samples import one_of_each

LAYOUTS = one_of_each(
    (layout for layout in Layout if not is_float(layout)),
    lambda layout: (blocks.BODIES[layout].__name__, group_columns(layout), SIZES[layout].unit == 256),
)
"""One of each body, since compiling one takes 2 s; `CASES=all` tries all 26."""
ROWS = 2 * FEW_ROWS + FEW_ROWS
"""A product of sixteen rows, and one of eight."""
needs_x86 = pytest.mark.skipif(is_arm64(), reason="tiles lie otherwise on arm64")


def _columns(layout: Layout) -> int:
    """More than a chunk of 256, and of short units no whole number of pairs of blocks: 288, 320, 384 or 512."""
    unit = SIZES[layout].unit
    return 512 if unit == 256 else 256 + unit


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(1)
    yield pool
    pool.close()


def _product(pool: ThreadPool, weight: LinearWeight, x: FloatArray, outputs: int) -> FloatArray:
    """The product as kernels compute it, with a bias, a residual and a scale."""
    residual = random_rows(len(x), outputs, 4)
    bias = random_rows(1, outputs, 3)[0]

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", outputs)
        tape.matmul(inputs[0], [Projection(weight, out, bias, inputs[1], 0.75)])
        return out

    return run_rows(pool, [x, residual], write)


def _piece(monkeypatch: pytest.MonkeyPatch, intrinsic: Any, argument_types: list[Any]) -> run_pieces.Piece:
    monkeypatch.setattr(isa, "SELECTED", isa.SELECTED)
    target = isa.SELECTED, llvm.get_process_triple(), target_cpu(), target_features()
    machine, module = made(target, intrinsic, argument_types)
    # As kernels are: LLVM's code generator takes half a minute for a Q6_K as it is emitted.
    return run_pieces.linked(str(machine.emit_assembly(numba.optimised(module, machine))), argument_types)


@needs_x86
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_emulated_products_of_every_layout_have_the_same_bits(
    pool: ThreadPool, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, columns = np.random.SeedSequence().entropy, _columns(layout)
    generator = np.random.default_rng(seed)
    shape, x = (TILE_ROWS, columns), generator.standard_normal((ROWS, columns), np.float32)
    weight = linear(pool, layout, random_weights(layout, shape, int(generator.integers(1 << 30))), shape)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", TILE_ROWS)
        tape.matmul(inputs[0], [Projection(weight, out)])
        return out

    wanted = run_rows(pool, [x], write)
    quantized = run_pieces._quantized(x, _piece(monkeypatch, *PIECES["quantize"]))
    registers = Registers()
    monkeypatch.setattr(emit, "Emitter", emulate(registers))
    product = _piece(monkeypatch, matmul.matrix_product, [types.literal(int(layout)), *[types.int64] * 7])
    memory = Arena(0).take(MATRIX_BYTES + 64 * ROWS)
    places = address(weight.packed.data), columns, address(quantized[0]), activation_row_bytes(columns)
    for count in (ROWS, FEW_ROWS):
        memory[:] = 255
        product(*places, count, address(memory), address(memory) + MATRIX_BYTES)
        assert registers.faults == []
        found = memory[MATRIX_BYTES:].view(np.float32).reshape(ROWS, TILE_ROWS)
        assert np.array_equal(found[:count], wanted[:count]), f"seed {seed}"
        assert np.isnan(found[count:]).all(), "nothing is written behind the totals"
    assert registers.num_products == 3 * columns // group_columns(layout)
    assert not registers.is_configured, "registers are released"


@needs_x86
def test_a_whole_kernel_takes_rows_by_eight_and_leaves_the_others(
    pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """21 rows of 37 outputs: sixteen rows by AMX, five by dot products, and a tile that is not full."""
    layout, name, outputs = Layout.Q8_0, "matmul_q8_0", 37
    shape = (outputs, _columns(layout))
    weight = linear(pool, layout, random_weights(layout, shape, 1), shape)
    x = random_rows(21, shape[1], 2)
    wanted = _product(pool, weight, x, outputs)
    registers = Registers()
    with monkeypatch.context() as changed:
        changed.setattr(emit, "Emitter", emulate(registers))
        changed.setitem(matmul.KERNELS, name, numba.stamp(matmul._matrix_matmul, int(layout)))
        code = numba.compile_kernel(f"matmul.{name}")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), object_cache.target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    place = engine.get_function_address(object_cache.symbol(f"matmul.{name}"))
    monkeypatch.setitem(object_cache._addresses, f"matmul.{name}", place)
    assert np.array_equal(_product(pool, weight, x, outputs), wanted)
    assert registers.faults == []
    assert registers.num_products == 3 * shape[1] // 32


@pytest.mark.skipif(isa.SELECTED is not ISA.AMX, reason="this process has no AMX")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_products_by_amx_have_the_same_bits(pool: ThreadPool, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (37, _columns(layout))
    weight = linear(pool, layout, random_weights(layout, shape, 1), shape)
    x, found = random_rows(75, shape[1], 2), []
    for rows in (matrix_rows.NEVER, FEW_ROWS):
        monkeypatch.setattr(matrix_rows, "least_matrix_rows", lambda _, rows=rows: rows)
        found.append(_product(pool, weight, x, 37))
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({8: 0.5, 16: 0.5, 32: 0.5, 64: 0.5}, 8),
        ({8: 1.5, 16: 0.9, 32: 0.5, 64: 0.5}, 16),
        ({8: 0.5, 16: 1.1, 32: 0.5, 64: 0.5}, 32),
        ({8: 0.5, 16: 0.5, 32: 0.5, 64: 0.99}, matrix_rows.NEVER),
    ],
)
def test_amx_is_taken_from_the_fewest_rows_on_from_which_it_is_always_faster(
    seconds: dict[int, float], wanted: int
) -> None:
    assert matrix_rows.fewest_faster(lambda rows: 1.0, seconds.__getitem__) == wanted


@needs_x86
def test_both_ways_of_a_product_are_timed() -> None:
    """A kernel that has one way only takes the same number, and no way is faster by itself."""
    pool = ThreadPool(1)
    timed = matrix_rows._Timed(pool, Layout.Q8_0)
    assert timed.seconds(8, 8) > 0 < timed.seconds(8, matrix_rows.NEVER)
    pool.close()

"""From a graph of ops to a tape for the CPU: each op becomes a kernel's address and a parameter block.

`LOWER` has one function per op, and a module for each family of `kernels/ops`. `GraphBuilder` proved the shapes; proven
here is what else a kernel will believe: that packed weights are what their handles say, and what only these kernels
cannot do. The program keeps all that the blocks point to alive.
"""

from collections.abc import Callable
from typing import Any

from localinfer.kernels import ops
from localinfer.kernels.cpu.lower import attention, elementwise, matmul, recurrent
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.jit.compile_ahead import compile_ahead, link
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import OpGraph
from localinfer.types import ProgressCallback

MAX_BATCH_ROWS = 512
"""Rows of a batch by default."""


def lower_to_cpu(
    graph: OpGraph,
    pool: ThreadPool,
    kv_layout: KVLayout,
    *,
    max_batch_rows: int = MAX_BATCH_ROWS,
    max_output_rows: int = 64,
    max_summed_tokens: int = 0,
    progress: ProgressCallback | None = None,
) -> CpuProgram:
    """Compile a graph for a thread pool: `max_batch_rows` tokens per run, `max_output_rows` of them with logits.

    kv_layout: of the graph's own layers.
    max_summed_tokens: where it is not 0, every page's share of attention is measured, and no sequence may hold more
    positions than that.
    Raises: ShapeError for what no kernel computes.
    """
    is_kept = graph.kv_layers == tuple(kv_layout.layers) and graph.states in ((), tuple(kv_layout.states))
    assert is_kept, "a graph reads and writes the cache that it was written for"
    tape = CpuTape(graph, pool, kv_layout, max_batch_rows, min(max_output_rows, max_batch_rows), max_summed_tokens)
    _lower(tape, graph)
    kernels = _kernels_of(tape)
    compile_ahead(kernels, progress)
    link(kernels, progress)
    for block, index, called in tape.calls:
        block[index] = called.address
    matmul.choose_matrix_rows(tape)
    return CpuProgram(tape)


def kernels_of_graph(graph: OpGraph, pool: ThreadPool, kv_layout: KVLayout, max_summed_tokens: int = 0) -> list[Kernel]:
    """The kernels of the program that `lower_to_cpu` makes of a graph, for batches of any size."""
    tape = CpuTape(graph, pool, kv_layout, 1, 1, max_summed_tokens)
    _lower(tape, graph)
    return _kernels_of(tape)


def _lower(tape: CpuTape, graph: OpGraph) -> None:
    for number, op in enumerate(graph.ops):
        first, quantized = len(tape.kernels), tape.quantized_source
        LOWER[type(op)](tape, op)
        if number in graph.typed_ops:
            tape.typed_kernels.update(range(first, len(tape.kernels)))
            # What these have quantized is not there where they are left out.
            tape.quantized_source = quantized if tape.quantized_source == quantized else None


def _kernels_of(tape: CpuTape) -> list[Kernel]:
    called = [kernel for _, _, kernel in tape.calls]
    return list(dict.fromkeys([*tape.kernels, *tape.ranged_kernels.values(), *called]))


def _stage_boundary(tape: CpuTape, op: ops.StageBoundary) -> None:
    tape.stage_starts.append(len(tape.kernels))
    for buffer in op.uploads:
        tape.forget_copies(buffer)


LOWER: dict[type, Callable[[CpuTape, Any], None]] = {
    ops.StageBoundary: _stage_boundary,
    **elementwise.LOWER,
    **matmul.LOWER,
    **attention.LOWER,
    **recurrent.LOWER,
}

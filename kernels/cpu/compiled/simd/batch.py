"""Reading the batch header from a kernel, and the loop by which threads share out the rows of most ops."""

from collections.abc import Callable
from typing import Any

from localinfer.kernels.cpu.compiled.simd.pool import take_units
from localinfer.kernels.cpu.kernel_abi import SCRATCH_BYTES
from localinfer.kernels.cpu.parameters import BATCH, Block
from localinfer.kernels.jit.numba import Source, compose, inline, op


@inline
def num_rows(batch: int, is_output: int) -> int:
    """Rows of the batch, or of its output."""
    return BATCH.num_output_rows(batch) if is_output != 0 else BATCH.num_rows(batch)


@inline
def scratch(batch: int, thread: int) -> int:
    """Address of this thread's own scratch memory, 64-byte aligned."""
    return BATCH.scratch(batch) + thread * SCRATCH_BYTES


@inline
def rows_at_once(left: int) -> int:
    """How many of the `left` rows the next call of an innermost product takes: 8, 4, 2 or 1, as registers hold."""
    if left >= 8:
        return 8
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1


def row_op(
    block: Block, parts: Callable[[Any], int] = lambda p: 1, *, of_output: bool = False, in_runs: bool = False
) -> Callable[[Callable[..., None]], Source]:
    """Make a tape op of a function of (p, batch, thread, row, part), called once for every part of every row.

    p: the words of the block. parts: how many a row has, a function of p. The rows are those of the batch, or where the
    block has a word `is_output` or with of_output, those with logits. Threads claim parts as they get free: one at a
    time, or several in a run where one is little work.
    """
    has_word = "is_output" in block.fields
    parts_of = inline(parts)

    def decorate(function: Callable[..., None]) -> Source:
        body = compose(function)

        @op
        def kernel(parameters: int, batch: int, thread: int, num_threads: int) -> None:
            p = block.load(parameters)
            control = BATCH.control(batch)
            count = parts_of(p)
            rows = num_rows(batch, p.is_output) if has_word else num_rows(batch, of_output)
            units, claim = rows * count, 1
            if in_runs:
                claim = max(1, units // (4 * num_threads))
            while True:
                start = take_units(control, claim)
                if start >= units:
                    return
                for unit in range(start, min(start + claim, units)):
                    body(p, batch, thread, unit // count, unit % count)

        return kernel

    return decorate

"""Reading the batch header from a kernel."""

from localinfer.kernels.cpu.compiled.simd.memory import load_i64
from localinfer.kernels.cpu.kernel_abi import NUM_OUTPUT_ROWS, NUM_ROWS, SCRATCH, SCRATCH_BYTES
from localinfer.kernels.jit.numba import inline


@inline
def num_rows(batch: int, is_output: int) -> int:
    """Rows of the batch, or of its output."""
    return load_i64(batch + NUM_OUTPUT_ROWS) if is_output != 0 else load_i64(batch + NUM_ROWS)


@inline
def scratch(batch: int, thread: int) -> int:
    """Address of this thread's own scratch memory, 64-byte aligned."""
    return load_i64(batch + SCRATCH) + thread * SCRATCH_BYTES


@inline
def rows_at_once(left: int) -> int:
    """How many of the `left` rows the next call of an innermost product takes: 8, 4, 2 or 1, as registers hold."""
    if left >= 8:
        return 8
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1

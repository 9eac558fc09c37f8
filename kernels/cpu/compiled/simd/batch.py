"""Reading the batch header from a kernel."""

from localinfer.kernels.cpu.kernel_abi import SCRATCH_BYTES
from localinfer.kernels.cpu.parameters import BATCH
from localinfer.kernels.jit.numba import inline


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

"""The batch header: what every op can learn about the rows it works on, as int64 words at one address."""

from localinfer.kernels.cpu.memory import load_i64
from localinfer.kernels.jit import inline

NUM_ROWS = 0
NUM_OUTPUT_ROWS = 8
CONTROL = 16
TOKEN_IDS = 24
"""Address of int64[rows]."""
POSITIONS = 32
"""Address of int64[rows]."""
PAGE_TABLES = 40
"""Address of int64[rows]: per row, the address of its sequence's page addresses."""
OUTPUT_ROWS = 48
"""Address of int64[output rows]."""
SCRATCH = 56
"""Address of SCRATCH_BYTES per thread."""
SEGMENTS = 64
"""Address of int64[segments][4]: first row, number of rows, first position, page table."""
NUM_SEGMENTS = 72
WORDS = 10

SCRATCH_BYTES = 1 << 17


@inline
def num_rows(batch: int, is_output: int) -> int:
    """Rows of the batch, or of its output."""
    return load_i64(batch + NUM_OUTPUT_ROWS) if is_output != 0 else load_i64(batch + NUM_ROWS)


@inline
def scratch(batch: int, thread: int) -> int:
    """Address of this thread's own scratch memory, 64-byte aligned."""
    return load_i64(batch + SCRATCH) + thread * SCRATCH_BYTES

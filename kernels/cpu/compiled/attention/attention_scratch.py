"""Where attention keeps what it works with in a thread's scratch memory: offsets in bytes."""

from localinfer.kernels.cpu.compiled.attention.attention_codes import WEIGH_BYTES
from localinfer.kernels.cpu.compiled.attention.attention_tiles import PAGES_PER_CHUNK, SCORE_STRIDE
from localinfer.kernels.cpu.kernel_abi import MAX_QUERIES_PER_UNIT, MAX_VALUE_SIZE, SCRATCH_BYTES

QUERY_TABLE = 0
"""Addresses of up to eight queries."""
PAGES = 64
"""Addresses of this head's part in the chunk's pages, then in the next chunk's."""
TARGETS = PAGES + 2 * 8 * PAGES_PER_CHUNK
"""Addresses where up to eight results grow."""
COUNT = TARGETS + 64
"""Queries that the pieces compute at once: 1, 2, 4 or 8."""
CHUNK_VALUES = COUNT + 8
"""Address of a chunk's result, rows of float32 per query."""

# The unit of work: position and addresses of its first row, its KV head, page table and rows.
POSITION = CHUNK_VALUES + 8
QUERY_ROW = POSITION + 8
OUT_ROW = QUERY_ROW + 8
KV_HEAD = OUT_ROW + 8
PAGE_TABLE = KV_HEAD + 8
ROWS = PAGE_TABLE + 8

SCORES = COUNT + 64
WORK = SCORES + 8 * SCORE_STRIDE
CHUNK = WORK + WEIGH_BYTES
"""What up to eight queries have of a chunk: 16 maxima, 16 sums, 8 rows of values, all float32."""
ROW = CHUNK + 128 + 8 * 4 * MAX_VALUE_SIZE
"""One head's row."""
CODES = ROW + 4 * MAX_VALUE_SIZE
MAXIMA = CODES + MAX_VALUE_SIZE
TOTALS = MAXIMA + 4 * (MAX_QUERIES_PER_UNIT + 16)
"""Of all chunks so far: float32 per query of the unit; sixteen may be read from any."""

assert TOTALS + 4 * (MAX_QUERIES_PER_UNIT + 16) <= SCRATCH_BYTES, "attention needs more scratch memory"

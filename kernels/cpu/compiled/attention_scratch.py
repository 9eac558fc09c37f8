"""Layout of a thread's scratch memory in attention: offsets in bytes."""

from localinfer.kernels.cpu.kernel_abi import CHUNK as CHUNK_TOKENS, MAX_QUERIES_PER_UNIT, MAX_VALUE_SIZE, SCRATCH_BYTES
from localinfer.kernels.kv_layout import PAGE_TOKENS

PAGES_PER_CHUNK = CHUNK_TOKENS // PAGE_TOKENS
SCORE_STRIDE = 4 * CHUNK_TOKENS
"""Bytes from one query's scores of a chunk to the next one's."""
CODE_STRIDE = 2 * CHUNK_TOKENS
"""Bytes from one query's int16 weights of a chunk to the next one's."""
WEIGH_BYTES = SCORE_STRIDE + 8 * CODE_STRIDE + 64
"""Memory that `weigh_codes` works in: scaled weights, int16 weights, then per query a scale and a start."""

QUERY_TABLE = 0
"""Addresses of up to eight queries."""
PAGES = 64
"""Addresses of this head in the chunk's pages, then in the next chunk's."""
TARGETS = PAGES + 2 * 8 * PAGES_PER_CHUNK
"""Addresses of up to eight results."""
COUNT = TARGETS + 64
"""Queries that are computed at once: 1, 2, 4 or 8."""
CHUNK_VALUES = COUNT + 8
"""Address of a chunk's result, rows of float32 per query."""

# The unit of work: position and addresses of its first row, its KV head, page table and rows.
POSITION = CHUNK_VALUES + 8
QUERY_ROW = POSITION + 8
OUT_ROW = QUERY_ROW + 8
KV_HEAD = OUT_ROW + 8
PAGE_TABLE = KV_HEAD + 8
ROWS = PAGE_TABLE + 8
CHOSEN = ROWS + 8
"""Address of the list of blocks that its only row attends to, where they are chosen."""
GATHERED = CHOSEN + 8
"""Address of a thread's pages for positions that are brought together."""
END = GATHERED + 8
"""The position after the last row of the unit's segment."""
ROW_BIAS = END + 8
"""Address of the biases by distance of the unit's first row."""
KEY_BIAS = ROW_BIAS + 8
"""Address of those of the keys, from position 0 on."""
KEY_STARTS = KEY_BIAS + 8
KEY_ENDS = KEY_STARTS + 8
WINDOW_STARTS = KEY_ENDS + 8
"""Addresses of int64 per row of the unit: the positions that it sees, where the batch gives them."""

SCORES = COUNT + 128
WORK = SCORES + 8 * SCORE_STRIDE
CHUNK = WORK + WEIGH_BYTES
"""Results of up to eight queries of a chunk: 16 maxima, 16 sums, 8 rows of values, all float32."""
ROW = CHUNK + 128 + 8 * 4 * MAX_VALUE_SIZE
"""One head's row."""
CODES = ROW + 4 * MAX_VALUE_SIZE
MAXIMA = CODES + MAX_VALUE_SIZE
TOTALS = MAXIMA + 4 * (MAX_QUERIES_PER_UNIT + 16)
"""Merged chunks: float32 per query of the unit; sixteen may be read from any."""

assert TOTALS + 4 * (MAX_QUERIES_PER_UNIT + 16) <= SCRATCH_BYTES, "attention needs more scratch memory"

"""Layout shared by Python and the compiled kernels besides parameter blocks: control block, codes and sizes."""

from localinfer.kernels.jit import isa

SCRATCH_BYTES = 1 << 17
"""Memory of each thread, for the op that it is in."""

# Control block of a thread pool: offsets in bytes, a line apart where threads contend.
LINE_BYTES = 128
"""A cache line of Apple's CPUs, and two of others, which fetch lines in pairs."""
STATE = 0 * LINE_BYTES
"""State of the run, one word that threads change by compare-and-swap: from the low bits the number of threads in the op
(ACTIVE), a bit that closes the op to other threads (CLOSED), the threads of the run (from THREADS_SHIFT on) and the
number of the op (from SEQUENCE_SHIFT on), which grows by one with every op of every run. Closed between runs."""
ACTIVE = 511
CLOSED = 512
THREADS_SHIFT = 10
SEQUENCE_SHIFT = 19
LAST_FIRST_SEQUENCE = (1 << 43) - 1
"""A run whose first op would have a greater number begins at 0: half of the numbers are left for its ops."""
NEXT_UNIT = 1 * LINE_BYTES
FIRST_TAKEN = NEXT_UNIT + 8
"""Of the op: the next unit that no thread has claimed, and a bit per thread whose first stretch is claimed, in
seven words that fill the half of a line with it."""
CLAIM_SHIFT = 6
"""Such a word has two to the power of this many bits."""
MAX_THREADS = 7 << CLAIM_SHIFT
SLEEPERS = 2 * LINE_BYTES
"""Number of threads that are marked as sleeping."""
OPS = 3 * LINE_BYTES
NUM_OPS = OPS + 8
BATCH = OPS + 16
NUM_THREADS = OPS + 24
FIRST_SEQUENCE = OPS + 32
"""Number of the run's first op."""
STOPPING = 4 * LINE_BYTES
IDLE_SPINS = STOPPING + 8
BARRIER_SPINS = STOPPING + 16
"""Number of polls for the next run before a thread sleeps; and in a run, for the next op before it sleeps or, where it
cannot, offers the processor to other threads."""
IDLE_NANOSECONDS = STOPPING + 24
BARRIER_NANOSECONDS = STOPPING + 32
"""The same as times, for CPUs whose hint to a waiting loop takes no known time."""
NUM_RUNS = 5 * LINE_BYTES
RUNS = 6 * LINE_BYTES
RUN_BYTES = 64
LAST_RUNS = 16
"""Runs that are remembered, RUN words each; how many there were so far says which is the next."""
SLEEPING = RUNS + RUN_BYTES * LAST_RUNS
"""One line per thread follows: 1 in the first 32 bits while that thread sleeps."""
CURRENT_OP = 8
THREAD_ID = 16
MUST_WAKE = 24
"""In a thread's line: the address of the entry of the tape that it executes, 0 between ops; which thread it is, as
`threading.get_ident` says; and 1 if Python must wake it for the run that was started last."""

# Quantized activations: per row int8[K], then one record per block of 32.
RECORD_BYTES = 20
"""Scale f32, scale * sum f32, -8 * sum i32, and the same of each half i32, i32."""
PAIR_BYTES = 128
"""Of a block of two rows, where rows are in pairs (`isa.pairs_rows`): eight columns of each by turns, then records.

A record's floats stand twice: those of both rows, and once more; its integers once. 8 bytes are left over. A row's
address is that of its first column: the second row's is 8 more than the first's.
"""
PAIR_BIAS = 1 << 15
"""Added to the integers of such records, so that they are not negative: two of them are changed as one number."""
PAIR_CODES = 64
"""Bytes of such a block before the records."""

# Attention.
CHUNK = 128
"""Positions per chunk; a multiple of the page size."""
ROWS_PER_UNIT = 16
"""Rows of one sequence that share a unit of work, so that a chunk is read from memory once for all of them."""
SUMMED_ROWS = 8
"""Rows at the end of a sequence's part of a batch whose attention is summed by page."""
KIND_F32, KIND_F16, KIND_Q8_0, KIND_Q4_0 = range(4)
"""Types of the keys and values that are stored."""
MAX_VALUE_SIZE = 1024
MOST_LANE_COLUMNS = 512
"""Of a head's keys, and of its values, where sixteen queries are computed side by side."""
MAX_QUERIES_PER_UNIT = 4096
SPLIT_ROWS = 8
"""Batches of up to this many rows are also split by chunks, so that few KV heads keep many threads busy."""
MAX_SPLIT_HEADS = 512
PARTIAL_COUNTER_BYTES = 8 * SPLIT_ROWS * MAX_SPLIT_HEADS
"""A counter of finished parts for each sequence and KV head."""

# Recurrent ops.
CONVOLUTION_CHANNELS = 256
"""Channels of a unit of work."""
PANEL_COLUMNS = 32
"""Columns of a head's state in a unit of work, two vectors; the last panel of a head may be one."""
MAX_KEY_SIZE = 512
"""Key channels of a head: a panel of so many is in half of a thread's scratch memory."""
MAX_TAPS = SCRATCH_BYTES // (8 * CONVOLUTION_CHANNELS)
"""Of a convolution: twice as many rows of a unit are in a thread's scratch memory."""

# Measuring the machine.
MULTIPLICATIONS_PER_ROUND = 12 * 64
"""Of `multiply_bytes`: independent chains of vectors of 64 bytes."""

# Sampling.
SAMPLING_BLOCK = 64
"""Logits per block maximum."""
NEGATIVE_INFINITY_KEY = ~0x7F800000
"""Key of a token that is never chosen."""
NOT_FINITE = -1
"""Instead of a token id: the row holds a NaN or +inf."""
NOTHING_LEFT = -2
"""Instead of a token id: every logit is -inf."""

# History of tokens: int32 of each entry of its tables.
STATE_WORDS, EDGE_WORDS, NODE_WORDS = 6, 4, 3
LONG_MATCH = 8
"""Tokens of a match that is taken for a copy in progress."""

# Encoding weights.
ROWS_PER_ENCODER_UNIT = 16
ENCODER_MEMORY_BYTES = 64 << 10
ENCODER_STATUS = ENCODER_MEMORY_BYTES - 64
"""Offset of the status in a thread's encoder memory: 0 or one of these."""
STATUS_NOT_FINITE = 1
STATUS_TOO_LARGE = 2
SOURCE_F32, SOURCE_F16, SOURCE_BF16 = 0, 1, 2
"""Element type of the rows to encode."""


def activation_row_bytes(num_columns: int) -> int:
    """Bytes of one row of quantized activations, whole cache lines; of one row of a pair where rows are in pairs."""
    if isa.pairs_rows():
        return num_columns // 32 * PAIR_BYTES // 2
    return (num_columns + num_columns // 32 * RECORD_BYTES + 63) // 64 * 64


IN_PAIRS = 16
"""Added to a TILE_FIELD's kind where two vectors after each other, with the columns c and c + 4 of sixteen rows, become
one with both columns of rows 0 to 7, and one of rows 8 to 15."""
FIVE_BITS, SIX_BITS, BYTE_PLANES, IN_SHARED_BYTES = 13, 14, 15, 32
"""Kinds without items, behind all other fields, that rearrange Q5_K, Q6_K and IQ4_XS; added to a kind where a byte gets
codes of two rows after that (`packing.py`)."""

CHECKSUM_LANES = 32
"""Words that a checksum is folded into: as many as four registers of eight hold, to hide how long a product takes."""
CHECKSUM_MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, with bits spread evenly: 2^64 divided by the golden ratio."""

# Cutting long texts into words.
CHARACTER_SYMBOL, CHARACTER_LETTER, CHARACTER_DIGIT, CHARACTER_SPACE, CHARACTER_NEWLINE = range(1, 6)
"""Kinds of characters, uint8 each: everything else, letter and digit as Unicode has them, white space, CR and LF."""
SCAN_SYMBOLS = 24
"""Words of up to so many symbols are merged by looking through them."""

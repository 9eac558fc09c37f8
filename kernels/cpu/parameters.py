"""Parameter blocks: the int64 words at one address that a kernel reads, with one declaration for both sides.

Python packs a block by its names. A kernel loads all of it with `p = BLOCK.load(address)`, whose words are `p.name`, or
one word with `BLOCK.name(address)`; both are compiled by `compiled/memory.py`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]


class Block:
    """A block's words in order, by name; `floats` are those of its words that hold the bits of a float32."""

    def __init__(self, fields: str, floats: str = "") -> None:
        self.fields = tuple(fields.split())
        self.floats = frozenset(floats.split())
        assert len(set(self.fields)) == len(self.fields) and self.floats <= set(self.fields), "each name once"
        self.num_bytes = 8 * len(self.fields)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]:
            """In a kernel: one word of the block at an address; set_NAME(address, value) writes it."""

        def load(self, address: int) -> Any:
            """In a kernel: all of its words."""

    def offset(self, name: str) -> int:
        """Offset of a word from the block's address, in bytes."""
        return 8 * self.fields.index(name)

    def pack(self, **values: float) -> Words:
        """The block of these values, int64[words]; every word must be given, floats as floats."""
        missing = set(self.fields) ^ set(values)
        assert not missing, f"a block of {', '.join(self.fields)} needs each of them once, not {', '.join(missing)}"
        words = [_bits(values[name]) if name in self.floats else values[name] for name in self.fields]
        return np.array(words, np.int64)

    def write(self, words: Words, **values: int | Words) -> None:
        """Change words of a block by name, none of them a float; of int64[words, blocks] a word of each."""
        for name, value in values.items():
            words[self.fields.index(name)] = value


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


# What every op gets besides its own block: the batch, and a sequence of it.

BATCH = Block(
    "num_rows num_output_rows control token_ids positions page_tables output_rows scratch segments num_segments "
    "partials partials_bytes windowed_tables token_types media axes key_starts key_ends "
    "window_starts"
)
"""token_ids, positions, output_rows, token_types: addresses of int64 per row. page_tables, windowed_tables: per row,
the address of its sequence's page addresses, and of those of its windowed layers. scratch: SCRATCH_BYTES per thread.
segments: address of SEGMENT blocks. partials: memory that all threads share: counters int64, zero between ops, and
results of single chunks. media: address of int64 per row, the address of its float32 embedding or 0; 0 where all rows
are of words. axes: address of int64[rows][3], a row's positions in time, rows and columns; 0 where they are equal.
key_starts, key_ends, window_starts: addresses of int64 per row, the first position that it sees, the one after the
last, and the one from which on it sees what its window no longer holds, in batches that say so."""
SEGMENT = Block(
    "first_row num_rows position page_table windowed_table state log num_logged new_log targets num_targets carried "
    "next_carried"
)
"""From `state` on: see `program.StateStep`. targets: address of pairs int64[num_targets][2] of rows and address."""
RUN = Block("ops num_ops num_threads num_rows num_output_rows num_segments")
"""The run in progress, for reports of crashes."""

# Ops on rows. A stride is in bytes, from one row to the next; is_output says which rows of the batch.

EMBED = Block("out out_stride table row_bytes columns scale indices adds", floats="scale")
"""indices: offset in BATCH of the word with the address of the indices. adds: whether the rows are added to `out`."""
EMBED_MEDIA = Block("x x_stride offset columns adds is_output")
"""offset: bytes of an embedding before its part."""
NORM = Block("out out_stride x x_stride weight bias weight_stride groups size epsilon is_output", floats="epsilon")
"""weight_stride: bytes from one group's weights to the next one's."""
ELEMENTWISE = Block("out out_stride a a_stride b b_stride scalar columns is_output", floats="scalar")
GATE_PARTS = Block("out out_stride x x_stride gate gate_stride parts size is_output")
"""size: columns of a part, which one gate multiplies."""
XIELU = Block(
    "out out_stride x x_stride columns is_output positive negative beta epsilon",
    floats="positive negative beta epsilon",
)
MAGNITUDE = Block("out out_stride x x_stride columns is_output")
MIX_SLOTS = Block(
    "out out_stride x x_stride weights weights_stride residual residual_stride slots columns num_out first is_output"
)
"""weights, residual: 0 for none. columns: of a slot. num_out: slots of out, of which those before `first` are the
residual's."""
SCALE_BY_POSITION = Block("x x_stride columns period slope first_position", floats="slope")
ROPE_ANGLES = Block("out out_stride frequencies count magnitude", floats="magnitude")
"""frequencies: address of the inverse frequencies, float64[count]."""
ROPE_ANGLES_BY_AXIS = Block("out out_stride frequencies count magnitude axes", floats="magnitude")
"""axes: address of int64[count], the axis of each pair."""
ROPE = Block("x x_stride angles angles_stride heads head_size pairs is_halves")
"""x: at its first rotated column."""
PREVIOUS_ROW = Block("out out_stride x x_stride columns")
"""x: 0 where segments have one row each."""
SELECT_OUTPUT = Block("out out_stride x x_stride columns")
COPY_HEADS = Block("out out_stride x x_stride heads width out_head_bytes x_head_bytes is_output")
GATHER = Block("out out_stride x x_stride offsets columns is_output")
"""offsets: address of int64 per column, in bytes."""

# Products.

QUANTIZE = Block("source source_stride target target_stride columns is_output slots slot_stride")
MATMUL = Block("x x_stride columns is_output projections rows_per_block")
"""PROJECTION blocks follow it."""
PROJECTION = Block(
    "weights tile_bytes tiles rows out out_stride residual residual_stride bias bias_stride scale matrix_rows",
    floats="scale",
)
"""matrix_rows: rows from which on they are multiplied by AMX, see `lower/matmul.py`; read with AMX only."""
EXPERT_MATMUL = Block(
    "x x_stride slot_stride columns experts selected groups weights expert_bytes tile_bytes tiles rows out out_stride "
    "bias bias_stride zeros"
)
"""slot_stride: bytes from one slot of x to the next. groups: what GROUP_BY_EXPERT wrote. bias_stride: per expert."""
PACK_TILES = Block("control target source tiles rows units file_bytes unit_bytes fields num_fields")
READ_FILE = Block("control pread descriptor offset target bytes failed")
"""pread: address of the C library's function. failed: address of an int64 that becomes 1 if bytes are missing."""
TILE_FIELD = Block("width file_offset items tile_offset kind file_step tile_step")

# Mixture of experts.

ROUTE = Block(
    "ids ids_stride weights weights_stride logits logits_stride experts selected gating normalise scale bias groups "
    "kept_groups group_values margin output_scales is_output",
    floats="scale margin",
)
"""gating: 0 softmax, 1 sigmoid, 2 softmax of the selected, 3 sparse mixer."""
GROUP_BY_EXPERT = Block("ids ids_stride experts selected starts is_output")
"""starts: address of int64[experts + 2], then int64[rows * selected] of row * selected + slot."""
EXPERT_SUM = Block(
    "out out_stride x x_stride weights weights_stride residual residual_stride selected columns is_output"
)
"""residual: 0 for none."""
EXPERT_SCALE = Block("x x_stride weights weights_stride selected columns is_output")
EXPERT_FACTORS = Block("x x_stride ids ids_stride factors selected columns is_output")

# Recurrent ops. state, log: where an op's part begins in a block of states, and in a log.

SELECTIVE_SCAN = Block(
    "out out_stride x x_stride dt dt_stride b b_stride c c_stride rates skip heads head_size groups states state log"
)
"""x, b, c: at their first columns. rates, skip: addresses of decay rates, and of weights of the skip connection."""
SHORT_CONVOLUTION = Block("out out_stride x x_stride weight bias channels taps row_bytes state log")
"""weight: float32[taps][channels]. row_bytes: of a row of weights, of the state and of the log: whole vectors."""

DELTA_RULE_GATES = Block(
    "decays decays_stride betas betas_stride x x_stride y y_stride factor bias lower_bound columns heads",
    floats="lower_bound",
)
"""x: what `columns` decays are made of, y: what the betas of `heads` heads are."""
DELTA_RULE = Block(
    "out out_stride queries queries_stride keys keys_stride values values_stride decays decays_stride betas "
    "betas_stride heads key_heads key_size value_size is_tiled scale state log log_values log_decays row_bytes",
    floats="scale",
)
"""log_values, log_decays: where updates and decays begin in a logged row, after the keys. row_bytes: of such a row."""

WKV = Block(
    "out out_stride bonus bonus_stride receptance receptance_stride decay decay_stride keys keys_stride values "
    "values_stride rate rate_stride key_scale rate_scale bonus_scale heads head_size width_bytes state log"
)
"""width_bytes: of one of the five parts of a logged row."""

# Attention.

ATTENTION = Block(
    "queries queries_stride query_head_bytes out out_stride group kv_heads layer_offset head_bytes key_columns "
    "key_scales values value_scales value_size value_columns value_row_bytes value_step scale softcap window after "
    "local_chunk sinks slopes rows_per_unit rotation score_keys weigh_values table own chosen chosen_stride "
    "chosen_lists chosen_count chosen_block gathered key_bytes key_steps key_blocks value_share value_blocks "
    "buckets reach table_bias row_bias row_bias_stride key_bias key_bias_stride num_buckets",
    floats="scale softcap",
)
"""queries: float32 rows, or what QUANTIZE_QUERIES made of them. group: query heads per KV head. window, after:
positions up to a row's own that it sees, 0 for all, and positions after it. value_row_bytes: of
unquantized values. value_step: bytes of values to fetch while one vector of keys is computed. rotation: size of the
rotation to undo in every head of the result, 1 for none. score_keys, weigh_values: addresses of the kernels for this
cache's types. table: offset in SEGMENT of the table of this layer's pages. own: 1 where a row sees its own position,
else 0. chosen: lists of blocks of `chosen_block` positions, `chosen_count` in each of `chosen_lists` lists of a row; 0
where all are attended to. gathered: pages of one head, a chunk's for each thread. key_bytes, key_steps, key_blocks: of
a position's keys, bytes that lie together, how many times, and scales. value_share: positions among whose codes those
of one lie, 1 for rows of their own; value_blocks: scales of a position's values. buckets: address of
int64[2 * reach + 1], four times the bucket of each distance, 0 without biases by distance; table_bias, row_bias,
key_bias: see `ops.Relative`, 0 for none."""
CHOOSE_BLOCKS = Block(
    f"{' '.join(ATTENTION.fields)} head_weights head_weights_stride num_local cell num_cells scores",
    floats="scale softcap",
)
"""It begins as an ATTENTION of keys alone, all of whose heads meet one KV head; its result, `out`, are lists.
head_weights: 0 for none. cell: positions that get one score, a chunk's or fewer. scores: float32[slots][lists]
[num_cells], a slot for each of few rows or for each thread."""
ATTENTION_SUMS = Block(f"{' '.join(ATTENTION.fields)} sums sums_heads sums_pages work", floats="scale softcap")
"""sums: address of float32[segments][heads][pages]. work: memory per thread: eight queries' maxima and sums, float32
per page."""
QUANTIZE_QUERIES = Block(
    "queries queries_stride target target_stride target_head_bytes num_heads size columns code_bias scale rotation",
    floats="scale",
)
"""code_bias: by how much the stored codes of keys exceed what they mean."""
_PART_WORDS = "source stride kind size columns first scales rotation".split()
STORE_KV = Block(
    " ".join(["heads head_bytes", *(f"{part}_{word}" for part in ("keys", "values") for word in _PART_WORDS), "tables"])
)
"""Of keys and of values, first: offset of the first head's in a page. scales: from them to their scales.
tables: offset in BATCH of the tables of this layer's pages."""

# Weights to blocks of a quantized type.

ENCODE = Block("control source kind stride target target_stride rows columns importance memory")
ROUND_COLUMNS = Block(
    "first end vectors stride wanted given errors levels decoded weights weights_stride groups places scales minimums "
    "lowest highest"
)

# Long texts to tokens.

SPLIT = Block("kinds codes count ends is_end leads_with_symbols digits digits_first symbol_lines lines any_case")
"""kinds, codes: addresses of uint8[count] and int32[count] code points. ends: int64[count] for the ends of words.
is_end: 0 where more text follows. The others: see `text_merging.WordShape`."""
MERGE = Block(
    "symbols ends num_words keys values mask following preceding heap out places whole_table whole_mask whole_starts "
    "whole_symbols"
)
"""symbols, ends: int32 symbols and int64 ends of words. keys, values: a hash table of pairs, int64 keys, -1 where free.
following, preceding, heap: scratch, int32[longest word] twice, int64[2 * longest word]. out, places: what is left.
whole_table: tokens that a whole word becomes without merging, an int32 hash table or 0 for none; whole_starts,
whole_symbols: the symbols of all tokens."""

# Token history: records that its kernels also write.

HISTORY = Block("num_states num_edges num_nodes states edges nodes table state_room edge_room node_room table_size")
"""Entries in use, addresses of the tables, and entries they have room for; the hash table's size is a power of two."""
CURSOR = Block("state node match match_length aligned lost")
"""State and node of a text's last token; the node that its longest earlier suffix ended at, or -1, and the tokens of
that suffix; where the last long match was left, or -1, and how many tokens ago."""

# Measuring the machine.

READ_MEMORY = Block("start unit_bytes units sink")
MULTIPLY = Block("rounds sink")

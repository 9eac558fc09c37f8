"""The op set: what a model may ask of a device, as plain records.

A decoder (package `models`) writes these ops once, in order, on a `GraphBuilder` (`graph_builder.py`), which checks the
shapes of each; a device turns the finished `OpGraph` into a `Program` that runs any batch (`cpu/lower.py`,
`cuda/lower.py`). The NumPy oracle in `tests/support/oracle.py` runs the same records.

Shapes: a buffer holds `rows x width` float32, one row per token of the batch (`Rows.BATCH`) or per row whose logits
were asked for (`Rows.OUTPUT`). Every op works row by row, so the value of a row depends on nothing but its own prefix.
`out` may be the same buffer as an input wherever shapes agree, except in products and attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Protocol, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from localinfer.types import FloatArray

MAX_EXPERTS = 4096
"""Of a router: kernels have scratch memory for so many scores."""


class Rows(Enum):
    """Which rows of a batch a buffer holds."""

    BATCH = "batch"
    OUTPUT = "output"


class Pairing(Enum):
    """Which two elements of a head RoPE rotates together (RoFormer, arXiv 2104.09864, section 3.2)."""

    ADJACENT = "adjacent"
    """(2i, 2i + 1): llama and its kin as stored in GGUF."""
    HALVES = "halves"
    """(i, i + rotary_size / 2): GPT-NeoX, Qwen, Phi, Gemma."""


class Activation(Enum):
    """Elementwise functions between the two feed-forward matrices."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU_ERF = "gelu_erf"
    GELU_QUICK = "gelu_quick"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    SWIGLU_CLAMPED = "swiglu_clamped"
    """gpt-oss: g = min(gate, 7), u = clamp(up, -7, 7), g * sigmoid(1.702 g) * (u + 1). Gated only."""
    SOFTPLUS = "softplus"
    SIGMOID = "sigmoid"
    TANH = "tanh"


class Gating(Enum):
    """How router logits become expert weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_SELECTED = "softmax_selected"
    """Softmax over the selected experts only."""
    SPARSE_MIXER = "sparse_mixer"
    """Of each expert chosen, its share in a softmax over those left that are within a margin of it (SparseMixer-v2,
    arXiv 2409.12136)."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Handle of `rows x width` float32 values of a graph."""

    index: int
    name: str
    width: int
    rows: Rows

    @property
    def is_output(self) -> bool:
        """Whether its rows are those with logits."""
        return self.rows is Rows.OUTPUT


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight matrix (or a stack of them, one per expert) as a device holds it.

    `packed` is the device's own record and is opaque to everything else, equality included. `num_experts` is 1 for an
    ordinary matrix.
    """

    name: str
    num_rows: int
    num_columns: int
    packed: Any = field(compare=False)
    num_experts: int = 1


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """A table of `num_rows` vectors of `width`; `packed` is the device's own record."""

    name: str
    num_rows: int
    width: int
    packed: Any = field(compare=False)


@dataclass_transform(frozen_default=True)
class Record:
    """Plain data: every subclass is a frozen dataclass, and equals another one with equal numbers in its arrays."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False)(cls)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return False
        return all(_are_equal(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))

    __hash__ = None  # type: ignore[assignment]


def _are_equal(first: object, second: object) -> bool:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    return not isinstance(second, np.ndarray) and first == second


class Projection(Record):
    """One product of a `Matmul`: out = residual + scale * (x @ weight.T + bias).

    `residual` may be `out` itself. `bias` is float32[num_rows] of the weight.
    """

    weight: LinearWeight
    out: Buffer
    bias: FloatArray | None = None
    residual: Buffer | None = None
    scale: float = 1.0


class RopeTable(Record):
    """What RoPE needs besides positions.

    inverse_frequencies: float64[rotary_size / 2], every scaling (linear, YaRN, Llama 3, LongRoPE) already in it.
    magnitude: factor on sine and cosine (YaRN's attention factor); 1 for the rest.
    """

    inverse_frequencies: NDArray[np.float64]
    pairing: Pairing
    magnitude: float = 1.0


_MORE_THAN_ANY_TEXT = 1 << 40


class AttentionShape(Record):
    """One layer's attention: sizes, mask and score transform.

    scale multiplies q.k; softcap > 0 replaces a score s by softcap * tanh(s / softcap); window > 0 lets a position see
    itself and the window - 1 before it; chunk > 0 lets it see only its own chunk of positions; sinks float32[num_heads]
    add exp(sink) to the softmax's denominator; alibi_slopes float32[num_heads] subtract slope * |key position - query
    position|. excludes_own: a row sees the positions before its own only, of which there must be one.
    bidirectional: a position sees those after it as well, up to the last row of its segment in the batch, so a text is
    computed in one batch; a window then lets it see those at most window // 2 away on either side.
    """

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    chunk: int = 0
    sinks: FloatArray | None = None
    alibi_slopes: FloatArray | None = None
    excludes_own: bool = False
    bidirectional: bool = False

    @property
    def reach(self) -> tuple[int, int]:
        """How many positions up to its own a row sees, 0 for all of them, and how many after it."""
        if not self.bidirectional:
            return self.window, 0
        return (self.window // 2 + 1, self.window // 2) if self.window else (0, _MORE_THAN_ANY_TEXT)


class Chosen(Record):
    """Which positions rows attend to: blocks of `block_size`, by their numbers from position 0 on.

    blocks: per row one list for all KV heads, or one for each, of `count` rising whole numbers, -1 after the last.
    """

    blocks: Buffer
    count: int
    block_size: int = 1

    @property
    def num_lists(self) -> int:
        """How many lists a row has."""
        return self.blocks.width // self.count


class Relative(Record):
    """What attention adds to a score by how far the key is from the row: of each head, one number for each bucket.

    buckets: whole numbers int64[2 * reach + 1], the bucket of every distance key position - row position from -reach
    on; what is further away is in the bucket of the furthest. table: float32[num_heads, num_buckets] is added as it is
    (T5, arXiv 1910.10683, section 2.1); by_row, by_key: num_buckets values of each head, of the row that attends and
    of the key's, are multiplied by the scale of scores first (DeBERTa, arXiv 2006.03654, section 3.1).
    """

    buckets: NDArray[np.int64]
    num_buckets: int
    table: FloatArray | None = None
    by_row: Buffer | None = None
    by_key: Buffer | None = None


class Routing(Record):
    """How `Route` picks experts: the best `num_selected` by gating value (plus `selection_bias`, which does not weigh).

    Of equal values the lower expert wins, and slots are in order of falling value. SOFTMAX_SELECTED and
    SPARSE_MIXER pick by logits; the margin of the latter is of (best - logit) / max(|logit|, best).
    normalise divides the chosen weights by their sum; scale multiplies them afterwards, and so does each expert's own
    number in output_scales float32[num_experts]. num_groups > 1 first keeps the `num_selected_groups` groups of experts
    with the largest sum of their `num_group_values` best values: two in DeepSeek-V3, one in DeepSeek-V2.
    """

    num_experts: int
    num_selected: int
    gating: Gating
    normalise: bool = False
    scale: float = 1.0
    selection_bias: FloatArray | None = None
    num_groups: int = 1
    num_selected_groups: int = 1
    num_group_values: int = 2
    margin: float = 0.0
    output_scales: FloatArray | None = None


@dataclass(frozen=True)
class KVLayerShape:
    """What one layer keeps per position. window: how many positions it sees, where its part of a page lies apart, so
    that it can be given back once no row will see it; 0 for a layer that lies with the others."""

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int = 0


@dataclass(frozen=True)
class StateShape:
    """What one recurrent op keeps per sequence, whatever its length: num_values float32.

    log_values: float32 per row from which the op can repeat a row's update of the state without its inputs.
    """

    num_values: int
    log_values: int


class RecurrentOp(Record):
    """An op that carries the graph's state number `state`, one per sequence, from row to row (`recurrent_ops.py`)."""

    state: int

    @property
    def state_shape(self) -> StateShape:
        """What that state and a row of its log hold."""
        raise NotImplementedError


class FurtherOp(Record):
    """An op of `further_ops.py`, and how many positions a sequence may have for it."""

    num_positions: ClassVar[int] = 1 << 62


class Embed(Record):
    """out[r] = scale * table[token_ids[r]]."""

    out: Buffer
    table: EmbeddingTable
    scale: float = 1.0


class EmbedPositions(Record):
    """out[r] += table[position of r] (learned absolute positions)."""

    out: Buffer
    table: EmbeddingTable


class EmbedTypes(Record):
    """out[r] += table[token type of r]: which text of a pair a row belongs to (BERT, arXiv 1810.04805, section 3)."""

    out: Buffer
    table: EmbeddingTable


class Exchange(Record):
    """The program stops here: programs of other devices read `gives`, and write `takes` before the next op.

    Only in graphs that were cut for several devices; what lies between two of these ops is a stage.
    """

    gives: Sequence[Buffer]
    takes: Sequence[Buffer]


class RmsNorm(Record):
    """Root-mean-square norm (arXiv 1910.07467) over each row, or over each `group_size` elements of it.

    weight: float32[group_size] shared by all groups, or float32[width], or None for 1.
    """

    out: Buffer
    x: Buffer
    weight: FloatArray | None
    epsilon: float
    group_size: int = 0


class LayerNorm(Record):
    """Layer norm (arXiv 1607.06450), shapes as in `RmsNorm`."""

    out: Buffer
    x: Buffer
    weight: FloatArray | None
    bias: FloatArray | None
    epsilon: float
    group_size: int = 0


class Matmul(Record):
    """Multiply one input by one or several weights; all `out` hold the same rows as x."""

    x: Buffer
    projections: Sequence[Projection]


class Rope(Record):
    """Rotate, in place, elements offset .. offset + rotary_size of every head of x by the row's position."""

    x: Buffer
    table: RopeTable
    head_size: int
    offset: int = 0


class StoreKV(Record):
    """Write the rows' keys and values into the cache pages of `layer`; no values where it keeps keys alone."""

    layer: int
    keys: Buffer
    values: Buffer | None


class Attention(Record):
    """Attention of every row over its sequence's cache, in chunks of absolute positions merged in order.

    Rows see positions up to their own, or up to the last of their segment (`AttentionShape.bidirectional`); of these
    all, or those chosen. relative: of bidirectional attention, whose segments are whole texts.
    """

    out: Buffer
    queries: Buffer
    layer: int
    shape: AttentionShape
    chosen: Chosen | None = None
    relative: Relative | None = None


class Activate(Record):
    """out = kind(x)."""

    out: Buffer
    x: Buffer
    kind: Activation


class GatedActivate(Record):
    """out = kind(gate) * up; gate and up may be two halves of one width only if given as separate buffers.

    limit > 0, of SILU only: out = min(silu(gate), limit) * clamp(up, -limit, limit) (Step 3.5).
    """

    out: Buffer
    gate: Buffer
    up: Buffer
    kind: Activation
    limit: float = 0.0


class Add(Record):
    """out = a + scale * b."""

    out: Buffer
    a: Buffer
    b: Buffer
    scale: float = 1.0


class Scale(Record):
    """x *= factor, in place."""

    x: Buffer
    factor: float


class HeadMatmul(Record):
    """For every head h: out[h][out_offset:] = weight[h] @ x[h][x_offset:], num_rows from num_columns elements.

    weight is a stack of one matrix per head; the rest of out stays (latent attention, arXiv 2405.04434).
    """

    out: Buffer
    x: Buffer
    weight: LinearWeight
    out_head_size: int
    x_head_size: int
    out_offset: int = 0
    x_offset: int = 0


class SelectOutput(Record):
    """Copy the rows that want logits; `out` has Rows.OUTPUT."""

    out: Buffer
    x: Buffer


class Route(Record):
    """Choose experts per row; ids are stored as float32 whole numbers. Both outputs are num_selected wide."""

    expert_ids: Buffer
    expert_weights: Buffer
    logits: Buffer
    routing: Routing


class ExpertMatmul(Record):
    """For each row and each selected expert e: out[row, slot] = x[row or row, slot] @ weight[e].T + bias[e].

    out is num_selected * num_rows(weight) wide; x is num_columns wide, num_selected times that if input_per_slot.
    bias float32[num_experts, num_rows].
    """

    out: Buffer
    x: Buffer
    weight: LinearWeight
    expert_ids: Buffer
    bias: FloatArray | None = None
    input_per_slot: bool = False


class ExpertSum(Record):
    """out = residual + sum over slots, in slot order, of expert_weights[slot] * x[slot]."""

    out: Buffer
    x: Buffer
    expert_weights: Buffer
    residual: Buffer | None = None


Op = (
    Embed | EmbedPositions | EmbedTypes | Exchange | RmsNorm | LayerNorm | Matmul | Rope | StoreKV | Attention
    | Activate | GatedActivate | Add | Scale | HeadMatmul | SelectOutput | Route | ExpertMatmul
    | ExpertSum | FurtherOp | RecurrentOp
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpGraph:
    """A model as data: its buffers by index, its ops in the order they run, and the buffer a program returns.

    hidden: a buffer that a program also shows.

    kv_layers: what each layer of the cache that it reads and writes keeps; states: what each recurrent op does.
    """

    kv_layers: tuple[KVLayerShape, ...]
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    output: Buffer
    states: tuple[StateShape, ...] = ()
    hidden: Buffer | None = None

    @property
    def num_tokens(self) -> int:
        """Token ids that may be looked up; practically all where nothing looks them up."""
        return min((op.table.num_rows for op in self.ops if isinstance(op, Embed)), default=1 << 62)

    @property
    def num_token_types(self) -> int:
        """Token types that may be looked up; 1 where none is."""
        return min((op.table.num_rows for op in self.ops if isinstance(op, EmbedTypes)), default=1)

    @property
    def needs_whole_texts(self) -> bool:
        """Whether segments begin with the first position: keys' rows are looked up in the batch."""
        return any(isinstance(op, Attention) and op.relative is not None for op in self.ops)

    @property
    def num_positions(self) -> int:
        """Positions that may be looked up or chosen from."""
        tables = [op.table.num_rows for op in self.ops if isinstance(op, EmbedPositions)]
        return min([*tables, *(op.num_positions for op in self.ops if isinstance(op, FurtherOp))], default=1 << 62)


class WeightSource(Protocol):
    """Where a decoder gets its weights: the loader, for a device, from a file."""

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """A matrix [rows, columns] or a stack [experts, rows, columns], optionally only some rows (of every expert).

        A vector [columns] counts as one row.
        """

    def embedding(self, name: str) -> EmbeddingTable:
        """A table for `Embed`, `EmbedPositions` and `EmbedTypes`."""

    def vector(self, name: str) -> FloatArray:
        """A small tensor as float32, whatever its type in the file, in its own shape."""

"""The op set: everything a model may ask of a device, and the records those requests are made of.

A decoder (floor `models`) writes these ops once, in order, on a `Tape`; the device turns them into a `Program` that
runs any batch. The CPU tape is `kernels/cpu/lower.py`; the NumPy oracle in `tests/oracle.py` implements the same
protocol.

Shapes: a buffer holds `rows x width` float32, one row per token of the batch (`Rows.BATCH`) or per row whose logits
were asked for (`Rows.OUTPUT`). Every op works row by row, so the value of a row depends on nothing but its own prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from localinfer.kernels.program import Program

FloatArray = NDArray[np.float32]


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


class Gating(Enum):
    """How router logits become expert weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_SELECTED = "softmax_selected"
    """Softmax over the selected experts only."""


@dataclass(frozen=True)
class Buffer:
    """Handle of `rows x width` float32 values owned by a tape."""

    index: int
    name: str
    width: int
    rows: Rows


@dataclass(frozen=True)
class LinearWeight:
    """A weight matrix (or a stack of them, one per expert) as a device holds it.

    `packed` is the device's own record and is opaque to everybody else. `num_experts` is 1 for an ordinary matrix.
    """

    name: str
    num_rows: int
    num_columns: int
    packed: Any
    num_experts: int = 1


@dataclass(frozen=True)
class EmbeddingTable:
    """A table of `num_rows` vectors of `width`; `packed` is the device's own record."""

    name: str
    num_rows: int
    width: int
    packed: Any


@dataclass(frozen=True)
class Projection:
    """One product of a `matmul`: out = residual + scale * (x @ weight.T + bias).

    `residual` may be `out` itself. `bias` is float32[num_rows] of the weight.
    """

    weight: LinearWeight
    out: Buffer
    bias: FloatArray | None = None
    residual: Buffer | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class RopeTable:
    """What RoPE needs besides positions.

    inverse_frequencies: float64[rotary_size / 2], every scaling (linear, YaRN, Llama 3, LongRoPE) already in it.
    magnitude: factor on sine and cosine (YaRN's attention factor); 1 for the rest.
    """

    inverse_frequencies: NDArray[np.float64]
    pairing: Pairing
    magnitude: float = 1.0


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention: sizes, mask and score transform.

    scale multiplies q.k; softcap > 0 replaces a score s by softcap * tanh(s / softcap); window > 0 lets a position see
    itself and the window - 1 before it; chunk > 0 lets it see only its own chunk of positions; sinks float32[num_heads]
    add exp(sink) to the softmax's denominator; alibi_slopes float32[num_heads] add slope * (key position - query
    position).
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


@dataclass(frozen=True)
class Routing:
    """How `route` picks experts: the best `num_selected` by gating value (plus `selection_bias`, which does not weigh).

    Of equal values the lower expert wins, and slots are in order of falling value. SOFTMAX_SELECTED picks by logits.
    normalise divides the chosen weights by their sum; scale multiplies them afterwards. num_groups > 1 first keeps the
    `num_selected_groups` groups of experts with the largest sum of their two best values (DeepSeek-V3).
    """

    num_experts: int
    num_selected: int
    gating: Gating
    normalise: bool = False
    scale: float = 1.0
    selection_bias: FloatArray | None = None
    num_groups: int = 1
    num_selected_groups: int = 1


@dataclass(frozen=True)
class KVLayerShape:
    """What one layer keeps per position. window: how many positions it sees, where its part of a page lies apart, so
    that it can be given back once no row will see it; 0 for a layer that lies with the others."""

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int = 0


class Tape(Protocol):
    """Records ops in order. `out` may be the same buffer as an input wherever shapes agree, except in `matmul`."""

    def buffer(self, name: str, width: int, rows: Rows = Rows.BATCH) -> Buffer:
        """Reserve a buffer."""
        ...

    def embed(self, out: Buffer, table: EmbeddingTable, scale: float = 1.0) -> None:
        """out[r] = scale * table[token_ids[r]]."""
        ...

    def embed_positions(self, out: Buffer, table: EmbeddingTable) -> None:
        """out[r] += table[position of r] (learned absolute positions)."""
        ...

    def rms_norm(self, out: Buffer, x: Buffer, weight: FloatArray | None, epsilon: float, group_size: int = 0) -> None:
        """Root-mean-square norm (arXiv 1910.07467) over each row, or over each `group_size` elements of it.

        weight: float32[group_size] shared by all groups, or float32[width], or None for 1.
        """
        ...

    def layer_norm(
        self,
        out: Buffer,
        x: Buffer,
        weight: FloatArray | None,
        bias: FloatArray | None,
        epsilon: float,
        group_size: int = 0,
    ) -> None:
        """Layer norm (arXiv 1607.06450), shapes as in `rms_norm`."""
        ...

    def matmul(self, x: Buffer, projections: Sequence[Projection]) -> None:
        """Multiply one input by one or several weights; all `out` rows kinds equal x's."""
        ...

    def rope(self, x: Buffer, table: RopeTable, head_size: int, offset: int = 0) -> None:
        """Rotate, in place, elements offset .. offset + rotary_size of every head of x by the row's position."""
        ...

    def store_kv(self, layer: int, keys: Buffer, values: Buffer) -> None:
        """Write the rows' keys and values into the cache pages of `layer`."""
        ...

    def attention(self, out: Buffer, queries: Buffer, layer: int, shape: AttentionShape) -> None:
        """Causal attention of every row over its sequence's cache, in chunks of absolute positions merged in order."""
        ...

    def activation(self, out: Buffer, x: Buffer, kind: Activation) -> None:
        """out = kind(x)."""
        ...

    def gated_activation(self, out: Buffer, gate: Buffer, up: Buffer, kind: Activation) -> None:
        """out = kind(gate) * up; gate and up may be two halves of one width only if given as separate buffers."""
        ...

    def add(self, out: Buffer, a: Buffer, b: Buffer, scale: float = 1.0) -> None:
        """out = a + scale * b."""
        ...

    def multiply_sigmoid(self, out: Buffer, x: Buffer, gate: Buffer) -> None:
        """out = x * sigmoid(gate); gate is as wide as x, or one value per row."""
        ...

    def scale(self, x: Buffer, factor: float) -> None:
        """x *= factor, in place."""
        ...

    def scale_by_position(self, x: Buffer, period: int, slope: float, offset: int = 0) -> None:
        """x *= 1 + slope * ln(1 + floor((position of the row + offset) / period)), in place (Llama 4, Ministral 3)."""
        ...

    def softcap(self, x: Buffer, cap: float) -> None:
        """x = cap * tanh(x / cap), in place."""
        ...

    def copy_heads(
        self,
        out: Buffer,
        x: Buffer,
        num_heads: int,
        width: int,
        out_head_size: int,
        x_head_size: int,
        out_offset: int = 0,
        x_offset: int = 0,
    ) -> None:
        """Copy `width` elements of every head of x, from x_offset in it to out_offset in out's head; the rest stays."""
        ...

    def head_matmul(
        self,
        out: Buffer,
        x: Buffer,
        weight: LinearWeight,
        out_head_size: int,
        x_head_size: int,
        out_offset: int = 0,
        x_offset: int = 0,
    ) -> None:
        """For every head h: out[h][out_offset:] = weight[h] @ x[h][x_offset:], num_rows from num_columns elements.

        weight is a stack of one matrix per head; the rest of out stays (latent attention, arXiv 2405.04434).
        """
        ...

    def select_output(self, out: Buffer, x: Buffer) -> None:
        """Copy the rows that want logits; `out` has Rows.OUTPUT."""
        ...

    def route(self, expert_ids: Buffer, expert_weights: Buffer, logits: Buffer, routing: Routing) -> None:
        """Choose experts per row; ids are stored as float32 whole numbers. Both outputs are num_selected wide."""
        ...

    def expert_matmul(
        self,
        out: Buffer,
        x: Buffer,
        weight: LinearWeight,
        expert_ids: Buffer,
        bias: FloatArray | None = None,
        input_per_slot: bool = False,
    ) -> None:
        """For each row and each selected expert e: out[row, slot] = x[row or row, slot] @ weight[e].T + bias[e].

        out is num_selected * num_rows(weight) wide; x is num_columns wide, num_selected times that if input_per_slot.
        bias float32[num_experts, num_rows].
        """
        ...

    def expert_sum(self, out: Buffer, x: Buffer, expert_weights: Buffer, residual: Buffer | None = None) -> None:
        """out = residual + sum over slots, in slot order, of expert_weights[slot] * x[slot]."""
        ...

    def expert_scale(self, x: Buffer, expert_weights: Buffer) -> None:
        """x[slot] *= expert_weights[slot], in place (models that weigh the input of the down projection)."""
        ...

    def finish(self, logits: Buffer) -> "Program":
        """Close the tape; `logits` is the buffer `Program.run` returns."""
        ...


class WeightSource(Protocol):
    """Where a decoder gets its weights: the loader, for a device, from a file."""

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        ...

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """A matrix [rows, columns] or a stack [experts, rows, columns], optionally only some rows (of every expert).

        A vector [columns] counts as one row.
        """
        ...

    def embedding(self, name: str) -> EmbeddingTable:
        """A table for `Tape.embed`."""
        ...

    def vector(self, name: str) -> FloatArray:
        """A small tensor as float32, whatever its type in the file, in its own shape."""
        ...

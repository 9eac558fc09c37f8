"""A model as data (`OpGraph`), the union of all ops, and the weights that a decoder writes it with."""

from collections.abc import Sequence
from typing import Protocol

from localinfer.kernels.ops.attention import Attention, ChooseBlocks, KVLayerShape, Rope, RotateByRow, StoreKV
from localinfer.kernels.ops.elementwise import (
    Activate,
    Add,
    AddVector,
    Bound,
    Clamp,
    CopyHeads,
    Embed,
    EmbedMedia,
    EmbedPositions,
    EmbedTypes,
    GatedActivate,
    GaussianTopK,
    LayerNorm,
    Magnitude,
    MeanRows,
    MixSlots,
    Multiply,
    MultiplySigmoid,
    RmsNorm,
    Scale,
    ScaleByPosition,
    SelectOutput,
    Softcap,
    Softmax,
    Xielu,
)
from localinfer.kernels.ops.matmul import ExpertFactors, ExpertMatmul, ExpertScale, ExpertSum, HeadMatmul, Matmul, Route
from localinfer.kernels.ops.records import Buffer, EmbeddingTable, LinearWeight, OpRecord
from localinfer.kernels.ops.recurrent import CentredConvolution, PreviousRow, RecurrentOp, StateShape
from localinfer.types import FloatArray, Record


class StageBoundary(OpRecord):
    """The program stops here, for programs of other devices to run, or for the host to fill buffers.

    The ops between two of these are a stage.
    """

    downloads: Sequence[Buffer]
    """Buffers that others read."""
    uploads: Sequence[Buffer]
    """Buffers that others fill before the next op."""


Op = (
    Activate | Add | AddVector | Attention | Bound | CentredConvolution | ChooseBlocks | Clamp | CopyHeads | Embed
    | EmbedMedia | EmbedPositions | EmbedTypes | ExpertFactors | ExpertMatmul | ExpertScale | ExpertSum | GatedActivate
    | GaussianTopK | HeadMatmul | LayerNorm | Magnitude | Matmul | MeanRows | MixSlots | Multiply | MultiplySigmoid
    | PreviousRow | RecurrentOp | RmsNorm | Rope | RotateByRow | Route | Scale | ScaleByPosition | SelectOutput
    | Softcap | Softmax | StageBoundary | StoreKV | Xielu
)  # fmt: skip


class OpGraph(Record):
    """A model as data."""

    kv_layers: tuple[KVLayerShape, ...]
    """Layers of the cache that its ops read and write."""
    buffers: tuple[Buffer, ...]
    """By index."""
    ops: tuple[Op, ...]
    """In the order they run."""
    output: Buffer
    """The buffer that a program returns."""
    states: tuple[StateShape, ...] = ()
    """Of the recurrent ops."""
    hidden: Buffer | None = None
    """A buffer that a program also shows."""
    media_width: int = 0
    """Columns of the embeddings that a batch's rows may have in place of a token's; 0 where only tokens are looked up.
    Of a part of a model this and the next two are the model's, as every part gets the same batches."""
    takes_ranges: bool = False
    """True if segments may say which positions their rows see."""
    num_token_types: int = 1
    """Token types that may be looked up; 1 where none is."""
    typed_ops: frozenset[int] = frozenset()
    """Numbers of ops that change no result where all rows are of type 0, so that programs may leave them out."""

    @property
    def num_tokens(self) -> int:
        """Token ids that may be looked up; practically all where nothing looks them up."""
        return min((op.table.num_rows for op in self.ops if isinstance(op, Embed)), default=1 << 62)

    @property
    def needs_whole_texts(self) -> bool:
        """True if segments begin with the first position: keys' rows are looked up in the batch."""
        return any(isinstance(op, Attention) and op.relative is not None for op in self.ops)

    @property
    def num_positions(self) -> int:
        """Positions that may be looked up or chosen from."""
        tables = [op.table.num_rows for op in self.ops if isinstance(op, EmbedPositions)]
        scored = [op.max_positions for op in self.ops if isinstance(op, ChooseBlocks)]
        return min([*tables, *scored], default=1 << 62)


class WeightSource(Protocol):
    """Tensors of a file for a decoder, as one device holds them."""

    def has(self, name: str) -> bool:
        """True if the file holds this tensor."""

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

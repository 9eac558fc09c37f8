"""What the ops of a CPU tape read and multiply, recorded as they are written."""

from collections.abc import Sequence

from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import AttentionShape, EmbeddingTable, LinearWeight, Rows
from localinfer.kernels.program import Operation


def matmul_cost(kernel: str, weights: Sequence[LinearWeight], rows: Rows) -> Operation:
    """Products with whole matrices."""
    return Operation(
        kernel,
        rows,
        weights=tuple(weight.name for weight in weights),
        weight_bytes=sum(weight.packed.data.size for weight in weights),
        row_weight_bytes=sum(weight.packed.data.size for weight in weights),
        multiply_adds=sum(weight.num_rows * weight.num_columns * weight.num_experts for weight in weights),
    )


def head_cost(kernel: str, weight: LinearWeight, rows: Rows) -> Operation:
    """The product of one head with its own matrix of a stack."""
    num_bytes = weight.packed.expert_bytes
    multiply_adds = weight.num_rows * weight.num_columns
    return Operation(
        kernel,
        rows,
        weights=(weight.name,),
        weight_bytes=num_bytes,
        row_weight_bytes=num_bytes,
        multiply_adds=multiply_adds,
    )


def expert_cost(kernel: str, weight: LinearWeight, num_selected: int, rows: Rows) -> Operation:
    """Products with the experts that each row chose."""
    return Operation(
        kernel,
        rows,
        weights=(weight.name,),
        weight_bytes=weight.packed.data.size,
        row_weight_bytes=weight.packed.expert_bytes * num_selected,
        multiply_adds=weight.num_rows * weight.num_columns * num_selected,
    )


def embedding_cost(kernel: str, table: EmbeddingTable) -> Operation:
    """One vector per row."""
    num_bytes = table.packed.data.size
    return Operation(
        kernel,
        Rows.BATCH,
        weights=(table.name,),
        weight_bytes=num_bytes,
        row_weight_bytes=num_bytes // table.num_rows,
    )


def attention_cost(kernel: str, layout: KVLayout, layer: int, shape: AttentionShape) -> Operation:
    """Keys and values of the positions that a row attends to."""
    return Operation(
        kernel,
        Rows.BATCH,
        kv_bytes=shape.num_kv_heads * layout.head(layer).num_bytes // layout.page_tokens,
        kv_multiply_adds=shape.num_heads * (shape.key_size + shape.value_size),
        window=shape.window or shape.chunk,
    )

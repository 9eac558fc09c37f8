"""Transformer blocks of encoders: attention without a mask and a feed-forward layer, written from a record.

Vision transformers (arXiv 2010.11929) differ in norms, activations, gates, what is normalised or scaled beside, how
heads are rotated and which rows they see. The tensors of a file say most of it; a `BlockShape` says the rest.
"""

from dataclasses import dataclass

from localinfer.kernels.ops import Activation, AttentionShape, Buffer, KVLayerShape, LinearWeight, Pairing, Projection
from localinfer.models.media.row_graph import RowWriter

ACTIVATIONS = {
    "gelu": Activation.GELU_TANH,
    "erf": Activation.GELU_ERF,
    "silu": Activation.SILU,
    "quick": Activation.GELU_QUICK,
}
"""By the name in `PictureConfig.activation`."""


@dataclass(frozen=True)
class BlockShape:
    """Properties that the blocks of an encoder have in common."""

    hidden_size: int
    """Width of a row."""
    intermediate_size: int
    """Width inside the feed-forward layer."""
    num_heads: int
    """Heads of queries."""
    num_kv_heads: int
    """Heads of keys and values."""
    head_size: int
    """Columns of a head."""
    norm_epsilon: float
    """Of all norms."""
    activation: Activation
    """Of the feed-forward layer."""
    has_rms_norms: bool = False
    """True for norms without a mean."""
    has_rms_query_norms: bool = False
    """True if norms of queries and keys are without a mean, whatever the others are."""
    scale: float = 0.0
    """Factor on scores; 0 for one over the root of the head size."""
    normalises_values: bool = False
    """True if heads of values are normalised, without a weight."""
    pairing: Pairing = Pairing.HALVES
    """Elements of a head that are rotated together, where rows have angles."""
    may_swap_ffn: bool = False
    """True if old files have `ffn_up` and `ffn_down` under each other's name."""
    swiglu_clamp: float = 0.0
    """Limit on both sides of a gated product; 0 for none."""

    @property
    def keys(self) -> KVLayerShape:
        """Keys and values of a row."""
        return KVLayerShape(self.num_kv_heads, self.head_size, self.head_size)

    @property
    def attention(self) -> AttentionShape:
        """Attention of every row to all of them."""
        scale = self.scale or self.head_size**-0.5
        sizes = (self.num_heads, self.num_kv_heads, self.head_size, self.head_size)
        return AttentionShape(*sizes, scale, bidirectional=True)


def norm(writer: RowWriter, shape: BlockShape, x: Buffer, name: str, out: str, group_size: int = 0) -> Buffer:
    """The family's kind of norm."""
    write = writer.rms_norm if shape.has_rms_norms else writer.layer_norm
    return write(x, name, out, shape.norm_epsilon, group_size)


def optional_norm(writer: RowWriter, shape: BlockShape, x: Buffer, name: str) -> None:
    """The same in place, if the file has its weight."""
    if writer.weights.has(f"{name}.weight"):
        norm(writer, shape, x, name, x.name)


def write_block(
    writer: RowWriter, shape: BlockShape, x: Buffer, name: str, angles: list[Buffer], *, is_windowed: bool = False
) -> None:
    """One block over x, in place. name: of its tensors, up to the dot. is_windowed: rows see what the run says."""
    normed = norm(writer, shape, x, f"{name}.ln1", "normed")
    attended = write_attention(writer, shape, normed, name, angles, is_windowed=is_windowed)
    _add_branch(writer, shape, x, attended, f"{name}.attn_out", f"{name}.ls1", f"{name}.attn_post_norm")
    _write_feed_forward(writer, shape, x, name)


def write_attention(
    writer: RowWriter, shape: BlockShape, x: Buffer, name: str, angles: list[Buffer], *, is_windowed: bool = False
) -> Buffer:
    """Queries, keys and values of normalised rows, and what their heads attend to."""
    builder = writer.builder
    widths = [heads * shape.head_size for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    outs = ["queries", "keys", "values"]
    if writer.weights.has(f"{name}.attn_qkv.weight"):
        queries, keys, values = _fused(writer, x, f"{name}.attn_qkv", outs, widths)
    else:
        queries, keys, values = writer.linears(x, [f"{name}.attn_{part}" for part in "qkv"], outs, widths)
    for part, buffer in (("q", queries), ("k", keys)):
        tensor = f"{name}.attn_{part}_norm"
        if writer.weights.has(f"{tensor}.weight"):
            is_by_head = writer.weights.shape(f"{tensor}.weight") == (shape.head_size,)
            write = writer.rms_norm if shape.has_rms_query_norms or shape.has_rms_norms else writer.layer_norm
            write(buffer, tensor, buffer.name, shape.norm_epsilon, shape.head_size if is_by_head else 0)
    if shape.normalises_values:
        writer.rms_norm(values, "", values.name, shape.norm_epsilon, shape.head_size)
    for index, part_angles in enumerate(angles):
        for buffer in (queries, keys):
            builder.rotate_by_row(
                buffer, part_angles, shape.head_size, shape.pairing, index * shape.head_size // len(angles)
            )
    builder.store_kv(0, keys, values)
    # What was normalised has been read by then.
    out = writer.buffer("normed", widths[0])
    builder.attention(out, queries, 0, shape.attention, takes_ranges=is_windowed)
    return out


def _fused(writer: RowWriter, x: Buffer, name: str, outs: list[str], widths: list[int]) -> list[Buffer]:
    """The thirds of one matrix."""
    weights, total = writer.weights, sum(widths)
    bias = weights.optional(f"{name}.bias", total)
    projections, first = [], 0
    for out, width in zip(outs, widths, strict=True):
        rows = slice(first, first + width)
        weight: LinearWeight = weights.linear(f"{name}.weight", total, x.width, rows)
        part = None if bias is None else bias[rows]
        projections.append(Projection(weight, writer.buffer(out, width), part))
        first += width
    writer.builder.matmul(x, projections)
    return [projection.out for projection in projections]


def _write_feed_forward(writer: RowWriter, shape: BlockShape, x: Buffer, name: str) -> None:
    y = norm(writer, shape, x, f"{name}.ln2", "normed")
    up, down = f"{name}.ffn_up", f"{name}.ffn_down"
    if shape.may_swap_ffn and writer.weights.shape(f"{down}.weight")[-1] == shape.hidden_size:
        up, down = down, up
    width, gate = shape.intermediate_size, f"{name}.ffn_gate"
    if writer.weights.has(f"{gate}.weight"):
        gates, ups = writer.linears(y, [gate, up], ["gates", "inner"], [width, width])
        inner = writer.gated(y, gates, ups, shape.activation, shape.swiglu_clamp)
    else:
        inner = writer.activation(writer.linear(y, up, "inner", width), shape.activation)
    _add_branch(writer, shape, x, inner, down, f"{name}.ls2", f"{name}.ffn_post_norm")


def _add_branch(
    writer: RowWriter, shape: BlockShape, x: Buffer, inner: Buffer, name: str, scale: str, post_norm: str
) -> None:
    """Add what comes out of a branch to the rows, scaled and normalised where the file has weights for it."""
    builder, weights = writer.builder, writer.weights
    factors = weights.optional(f"{scale}.weight", x.width)
    if factors is None and not weights.has(f"{post_norm}.weight"):
        _add_product(writer, x, inner, name)
        return
    out = writer.linear(inner, name, "branch", x.width)
    # Files have one of the two; the order is llama.cpp's, which differs between the branches.
    is_scaled_first = name.endswith("attn_out")
    if factors is not None and is_scaled_first:
        builder.multiply(out, out, factors)
    optional_norm(writer, shape, out, post_norm)
    if factors is not None and not is_scaled_first:
        builder.multiply(out, out, factors)
    builder.add(x, x, out)


def _add_product(writer: RowWriter, x: Buffer, inner: Buffer, name: str) -> None:
    """x += a product."""
    weight = writer.weights.linear(f"{name}.weight", x.width, inner.width)
    if any(writer.weights.has(f"{name}.{side}_{end}") for side in ("input", "output") for end in ("min", "max")):
        writer.builder.add(x, x, writer.linear(inner, name, "branch", x.width))
        return
    bias = writer.weights.optional(f"{name}.bias", x.width)
    writer.builder.matmul(inner, [Projection(weight, x, bias, x)])

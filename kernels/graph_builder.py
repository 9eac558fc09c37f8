"""What a decoder writes on: ops in order, the shapes of each checked once for every device.

What is checked here is what an op means. What only one device cannot do (a layout, a size) its own `lower.py` refuses.
"""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from localinfer.errors import ShapeError
from localinfer.kernels import ops
from localinfer.kernels.ops import MAX_EXPERTS, Activation, Buffer, KVLayerShape, LinearWeight, Op, OpGraph, Rows
from localinfer.types import FloatArray

Fields = ParamSpec("Fields")


def check(is_right: bool, message: str) -> None:
    """Raise ShapeError unless what an op asks for is right."""
    if not is_right:
        raise ShapeError(message)


def packed_weight(weight: LinearWeight, *, may_gather: bool = False) -> Any:
    """The device's own record of a weight. Raises: ShapeError if it is not what its handle says.

    may_gather: whether its columns may be in another order than its input's.
    """
    packed = weight.packed
    found = (packed.num_experts, packed.num_rows, packed.num_columns)
    wanted = (weight.num_experts, weight.num_rows, weight.num_columns)
    check(found == wanted, f"{weight.name} is {wanted} (matrices, rows, columns), and packed as {found}")
    check(may_gather or packed.columns is None, f"{weight.name} has its columns in another order; only matmul gathers")
    return packed


def _same_shape(*buffers: Buffer) -> None:
    first = buffers[0]
    for other in buffers[1:]:
        check(
            (first.width, first.rows) == (other.width, other.rows),
            f"{other.name} is {other.rows.value} x {other.width}, {first.name} {first.rows.value} x {first.width}",
        )


def _same_rows(*buffers: Buffer) -> None:
    names = ", ".join(buffer.name for buffer in buffers)
    check(len({buffer.rows for buffer in buffers}) == 1, f"{names} do not hold the same rows")


def _has_values(values: FloatArray | None, count: int, name: str) -> None:
    if values is not None:
        check(values.size == count, f"{name} has {values.size} values; {count} are needed")


def _check_embed(op: ops.Embed | ops.EmbedPositions) -> None:
    out, table = op.out, op.table
    check(out.width == table.width, f"{out.name} is {out.width} wide, {table.name} {table.width}")
    check(out.rows is Rows.BATCH, f"{out.name} holds output rows; embeddings are of batch rows")


def _check_receive(op: ops.Receive) -> None:
    check(op.out.rows is Rows.BATCH, f"{op.out.name} holds output rows; batch rows are handed over")


def _check_norm(op: ops.RmsNorm | ops.LayerNorm) -> None:
    _same_shape(op.out, op.x)
    size = op.group_size or op.x.width
    check(op.x.width % size == 0, f"{op.x.name} is {op.x.width} wide, not a multiple of groups of {size}")
    is_per_group = op.weight is not None and op.weight.size == op.x.width
    for values in (op.weight, op.bias if isinstance(op, ops.LayerNorm) else None):
        _has_values(values, op.x.width if is_per_group else size, f"norm weight for {op.x.name}")


def _check_matmul(op: ops.Matmul) -> None:
    x = op.x
    for projection in op.projections:
        weight, out = projection.weight, projection.out
        check(weight.num_experts == 1, f"{weight.name} is a stack of experts; use expert_matmul")
        check(weight.num_columns == x.width, f"{weight.name} has {weight.num_columns} columns, {x.name} {x.width}")
        check(weight.num_rows == out.width, f"{weight.name} has {weight.num_rows} rows, {out.name} {out.width}")
        check(x.rows is out.rows and x.index != out.index, f"{out.name} cannot take the product of {x.name}")
        _has_values(projection.bias, out.width, f"bias of {weight.name}")
        if projection.residual is not None:
            _same_shape(out, projection.residual)


def _check_rope(op: ops.Rope) -> None:
    x, rotated = op.x, 2 * op.table.inverse_frequencies.size
    check(x.rows is Rows.BATCH and x.width % op.head_size == 0, f"{x.name} does not hold heads of {op.head_size}")
    check(op.offset >= 0 and op.offset + rotated <= op.head_size, f"{rotated} rotated columns exceed {op.head_size}")


def _check_store_kv(op: ops.StoreKV, kept: KVLayerShape) -> None:
    layer, keys, values = op.layer, op.keys, op.values
    check(keys.width == kept.num_kv_heads * kept.key_size, f"{keys.name} does not hold layer {layer}'s keys")
    check(values.width == kept.num_kv_heads * kept.value_size, f"{values.name} does not hold layer {layer}'s values")
    check(keys.rows is Rows.BATCH and values.rows is Rows.BATCH, "only batch rows enter the cache")


def _check_attention(op: ops.Attention, kept: KVLayerShape) -> None:
    out, queries, shape = op.out, op.queries, op.shape
    check(
        (kept.num_kv_heads, kept.key_size, kept.value_size) == (shape.num_kv_heads, shape.key_size, shape.value_size),
        f"layer {op.layer} caches {kept}, attention wants {shape}",
    )
    check(shape.num_heads % shape.num_kv_heads == 0, f"{shape.num_heads} heads over {shape.num_kv_heads}")
    check(not (shape.bidirectional and shape.chunk), "attention to later positions has no chunks")
    check(not (shape.bidirectional and kept.window), f"layer {op.layer} drops positions that later ones still see")
    seen = min((limit for limit in (shape.window, shape.chunk) if limit > 0), default=0)
    # What lies before a windowed layer's window may be freed, so it must never be looked at.
    check(
        not kept.window or 0 < seen <= kept.window,
        f"layer {op.layer} keeps {kept.window} positions, and attention sees {seen or 'all'} of them",
    )
    check(queries.width == shape.num_heads * shape.key_size, f"{queries.name} is {queries.width} wide")
    check(out.width == shape.num_heads * shape.value_size, f"{out.name} is {out.width} wide")
    check(queries.rows is Rows.BATCH and out.rows is Rows.BATCH, "attention is of batch rows")
    check(out.index != queries.index, f"{out.name} cannot take the attention of itself")
    _has_values(shape.sinks, shape.num_heads, "attention sinks")
    _has_values(shape.alibi_slopes, shape.num_heads, "ALiBi slopes")


def _check_activate(op: ops.Activate) -> None:
    check(op.kind is not Activation.SWIGLU_CLAMPED, f"{op.kind.value} exists only gated")
    _same_shape(op.out, op.x)


def _check_multiply_sigmoid(op: ops.MultiplySigmoid) -> None:
    if op.is_by_row:
        _same_shape(op.out, op.x)
        check(op.gate.rows is op.x.rows, f"{op.gate.name} and {op.x.name} hold different rows")
    else:
        _same_shape(op.out, op.x, op.gate)


def _check_scale_by_position(op: ops.ScaleByPosition) -> None:
    is_right = op.x.rows is Rows.BATCH and 0 < op.period < 1 << 31
    check(is_right, f"{op.x.name} cannot be scaled by position over {op.period}")


def _check_heads(op: ops.CopyHeads | ops.HeadMatmul, num_heads: int, out_width: int, x_width: int, what: str) -> None:
    """So many heads of out and x, each with room for what is written and read."""
    for buffer, head_size, end in (
        (op.out, op.out_head_size, op.out_offset + out_width),
        (op.x, op.x_head_size, op.x_offset + x_width),
    ):
        is_right = buffer.width == num_heads * head_size and end <= head_size
        check(is_right, f"{buffer.name} does not hold {num_heads} heads of {head_size} columns for {what}")
    _same_rows(op.out, op.x)


def _check_copy_heads(op: ops.CopyHeads) -> None:
    _check_heads(op, op.num_heads, op.width, op.width, f"copies of {op.width}")


def _check_head_matmul(op: ops.HeadMatmul) -> None:
    weight = op.weight
    _check_heads(op, weight.num_experts, weight.num_rows, weight.num_columns, weight.name)
    check(op.out.index != op.x.index, f"{op.out.name} cannot take the product of itself")


def _check_select_output(op: ops.SelectOutput | ops.MeanRows) -> None:
    out, x = op.out, op.x
    check(out.width == x.width and out.rows is Rows.OUTPUT and x.rows is Rows.BATCH, f"{out.name} from {x.name}")


def _check_route(op: ops.Route) -> None:
    routing = op.routing
    count, selected, groups = routing.num_experts, routing.num_selected, routing.num_groups
    check(0 < selected <= count <= MAX_EXPERTS, f"{selected} of {count} experts cannot be chosen")
    check(count % groups == 0, f"{count} experts do not split into {groups} groups")
    kept = count // groups * routing.num_selected_groups
    check(groups == 1 or selected <= kept, f"{selected} experts do not fit the {kept} of the kept groups")
    widths = (op.logits.width, op.expert_ids.width, op.expert_weights.width)
    check(widths == (count, selected, selected), "router buffers differ")
    _same_rows(op.expert_ids, op.expert_weights, op.logits)
    _has_values(routing.selection_bias, count, "expert selection bias")


def _check_expert_matmul(op: ops.ExpertMatmul) -> None:
    out, x, weight, selected = op.out, op.x, op.weight, op.expert_ids.width
    slots = selected if op.input_per_slot else 1
    check(x.width == slots * weight.num_columns, f"{x.name} is {x.width} wide for {slots} x {weight.num_columns}")
    check(out.width == selected * weight.num_rows, f"{out.name} is {out.width} wide for {weight.name}")
    _same_rows(out, x, op.expert_ids)
    check(out.index != x.index, f"{out.name} cannot take the product of itself")
    if op.bias is not None:
        shape = (weight.num_experts, weight.num_rows)
        check(op.bias.shape == shape, f"bias of {weight.name} is {op.bias.shape}; {shape} is needed")


def _check_expert_sum(op: ops.ExpertSum) -> None:
    out, x, selected = op.out, op.x, op.expert_weights.width
    check(x.width == selected * out.width, f"{x.name} is {x.width} wide for {selected} slots of {out.width}")
    _same_rows(out, x, op.expert_weights)
    if op.residual is not None:
        _same_shape(out, op.residual)


def _check_expert_scale(op: ops.ExpertScale) -> None:
    x, selected = op.x, op.expert_weights.width
    check(x.width % selected == 0, f"{x.name} is {x.width} wide for {selected} slots")
    _same_rows(x, op.expert_weights)


CHECKS: dict[Any, Callable[..., None]] = {}
"""What proves the shapes of each op; of one on a layer of the cache, given what that keeps. Raises: ShapeError."""


def _writer(
    record: Callable[Fields, Op], check: Callable[..., None] = lambda op: None
) -> Callable[Concatenate["GraphBuilder", Fields], None]:
    """A method that adds an op and takes its fields, and the op's check."""
    CHECKS[record] = check

    def write(self: "GraphBuilder", /, *args: Fields.args, **kwargs: Fields.kwargs) -> None:
        self.append(record(*args, **kwargs))

    return write


class GraphBuilder:
    """Buffers and ops of a model being written. kv_layers: what each layer of the cache keeps per position."""

    def __init__(self, kv_layers: Sequence[KVLayerShape] = ()) -> None:
        self.kv_layers = tuple(kv_layers)
        self.buffers: list[Buffer] = []
        self.ops: list[Op] = []

    def buffer(self, name: str, width: int, rows: Rows = Rows.BATCH) -> Buffer:
        """A new buffer. Raises: ShapeError."""
        check(width > 0, f"buffer {name} is {width} wide; a buffer has at least one column")
        self.buffers.append(Buffer(len(self.buffers), name, width, rows))
        return self.buffers[-1]

    def append(self, op: Op) -> None:
        """Check an op and write it after the others. Raises: ShapeError."""
        if isinstance(op, ops.StoreKV | ops.Attention):
            check(0 <= op.layer < len(self.kv_layers), f"there is no cache of layer {op.layer}")
            CHECKS[type(op)](op, self.kv_layers[op.layer])
        else:
            CHECKS[type(op)](op)
        self.ops.append(op)

    def finish(self, output: Buffer) -> OpGraph:
        """The finished graph; `output` is the buffer `Program.run` returns. Raises: ShapeError."""
        check(output.rows is Rows.OUTPUT, f"{output.name} holds batch rows; logits are of output rows")
        return OpGraph(self.kv_layers, tuple(self.buffers), tuple(self.ops), output)

    # `builder.rope(x, table, 64)` is `builder.append(Rope(x, table, 64))`.
    embed = _writer(ops.Embed, _check_embed)
    embed_positions = _writer(ops.EmbedPositions, _check_embed)
    receive = _writer(ops.Receive, _check_receive)
    rms_norm = _writer(ops.RmsNorm, _check_norm)
    layer_norm = _writer(ops.LayerNorm, _check_norm)
    matmul = _writer(ops.Matmul, _check_matmul)
    rope = _writer(ops.Rope, _check_rope)
    store_kv = _writer(ops.StoreKV, _check_store_kv)
    attention = _writer(ops.Attention, _check_attention)
    activation = _writer(ops.Activate, _check_activate)
    gated_activation = _writer(ops.GatedActivate, lambda op: _same_shape(op.out, op.gate, op.up))
    add = _writer(ops.Add, lambda op: _same_shape(op.out, op.a, op.b))
    add_vector = _writer(ops.AddVector, lambda op: _has_values(op.vector, op.x.width, f"the vector for {op.x.name}"))
    multiply_sigmoid = _writer(ops.MultiplySigmoid, _check_multiply_sigmoid)
    scale = _writer(ops.Scale)
    scale_by_position = _writer(ops.ScaleByPosition, _check_scale_by_position)
    softcap = _writer(ops.Softcap)
    copy_heads = _writer(ops.CopyHeads, _check_copy_heads)
    head_matmul = _writer(ops.HeadMatmul, _check_head_matmul)
    select_output = _writer(ops.SelectOutput, _check_select_output)
    mean_rows = _writer(ops.MeanRows, _check_select_output)
    route = _writer(ops.Route, _check_route)
    expert_matmul = _writer(ops.ExpertMatmul, _check_expert_matmul)
    expert_sum = _writer(ops.ExpertSum, _check_expert_sum)
    expert_scale = _writer(ops.ExpertScale, _check_expert_scale)

"""Builder of a decoder's graph: ops in order, the shapes of each checked once for every device.

Checks here are of an op's meaning. The limits of one device (a layout, a size) are checked by its own `lower.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from localinfer.errors import ShapeError
from localinfer.kernels import ops
from localinfer.kernels.ops import (
    MAX_EXPERTS,
    NUM_AXES,
    Activation,
    Buffer,
    KVLayerShape,
    LinearWeight,
    Op,
    OpGraph,
    Rows,
    StateShape,
)
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


def _check_embed(op: ops.Embed | ops.EmbedPositions | ops.EmbedTypes) -> None:
    out, table = op.out, op.table
    check(out.width == table.width, f"{out.name} is {out.width} wide, {table.name} {table.width}")
    check(out.rows is Rows.BATCH, f"{out.name} holds output rows; embeddings are of batch rows")


def _check_embed_media(op: ops.EmbedMedia) -> None:
    check(op.part >= 0, f"{op.x.name} takes part {op.part} of embeddings")


def _check_previous_row(op: ops.PreviousRow) -> None:
    check(op.out.rows is Rows.BATCH, f"{op.out.name} holds output rows; rows before others are of the batch")
    if op.x is not None:
        _same_shape(op.out, op.x)
        check(op.out.index != op.x.index, f"{op.out.name} cannot take the rows before its own")


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
    axes = op.table.axes
    is_right = axes is None or (2 * axes.size == rotated and int(axes.min()) >= 0 and int(axes.max()) < NUM_AXES)
    check(is_right, f"the axes of {op.x.name} are not one of {NUM_AXES} for each of {rotated // 2} pairs")


def _check_rotate_by_row(op: ops.RotateByRow) -> None:
    x, rotated = op.x, op.angles.width
    check(x.width % op.head_size == 0 and rotated % 2 == 0, f"{x.name} does not hold heads of {op.head_size}")
    check(op.offset >= 0 and op.offset + rotated <= op.head_size, f"{rotated} rotated columns exceed {op.head_size}")
    check(x.rows is Rows.BATCH and op.angles.rows is Rows.BATCH, f"{x.name} and {op.angles.name} are not of batch rows")


def _check_store_kv(op: ops.StoreKV, kept: KVLayerShape) -> None:
    layer, keys, values = op.layer, op.keys, op.values
    check(keys.width == kept.num_kv_heads * kept.key_size, f"{keys.name} does not hold layer {layer}'s keys")
    name, width = ("nothing", 0) if values is None else (values.name, values.width)
    check(width == kept.num_kv_heads * kept.value_size, f"{name} does not hold layer {layer}'s values")
    check(keys.rows is Rows.BATCH and (values or keys).rows is Rows.BATCH, "only batch rows enter the cache")


def _check_attention(op: ops.Attention, kept: KVLayerShape) -> None:
    out, queries, shape = op.out, op.queries, op.shape
    check(
        (kept.num_kv_heads, kept.key_size, kept.value_size) == (shape.num_kv_heads, shape.key_size, shape.value_size),
        f"layer {op.layer} caches {kept}, attention wants {shape}",
    )
    check(shape.num_heads % shape.num_kv_heads == 0, f"{shape.num_heads} heads over {shape.num_kv_heads}")
    check(not (shape.bidirectional and shape.chunk), "attention to later positions has no chunks")
    check(not (shape.bidirectional and shape.excludes_own), "attention to later positions includes a row's own")
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
    if op.chosen is not None:
        _check_chosen(op.chosen)
        check(op.chosen.num_lists in (1, shape.num_kv_heads), f"{op.chosen.blocks.name} is not for {shape}")
        is_plain = (
            not (shape.window or shape.chunk or shape.excludes_own or shape.bidirectional)
            and shape.alibi_slopes is None
        )
        check(is_plain, f"{shape} cannot attend to chosen positions")
    if op.relative is not None:
        check(shape.bidirectional and op.chosen is None, "biases by distance are for texts that are computed whole")
        _check_relative(op.relative, shape.num_heads)
    if op.takes_ranges:
        check(op.chosen is None and not shape.excludes_own, "rows with ranges attend to all of them, their own among")
    _has_values(shape.sinks, shape.num_heads, "attention sinks")
    _has_values(shape.alibi_slopes, shape.num_heads, "ALiBi slopes")


def _check_relative(relative: ops.Relative, num_heads: int) -> None:
    buckets, count = relative.buckets, relative.num_buckets
    check(
        buckets.ndim == 1 and buckets.size % 2 == 1, f"buckets of distances are {buckets.shape}; an odd number wanted"
    )
    check(int(buckets.min()) >= 0 and int(buckets.max()) < count, f"distances lie outside the {count} buckets")
    if relative.table is not None:
        check(relative.table.shape == (num_heads, count), f"biases by distance are {relative.table.shape}")
    for buffer in (relative.by_row, relative.by_key):
        if buffer is not None:
            check(buffer.width == num_heads * count, f"{buffer.name} is {buffer.width} wide, not {num_heads} x {count}")
            check(buffer.rows is Rows.BATCH, "attention is of batch rows")


def _check_chosen(chosen: ops.SparseSelection) -> None:
    blocks, count = chosen.blocks, chosen.count
    is_right = count > 0 and chosen.block_size > 0 and blocks.width % count == 0 and blocks.rows is Rows.BATCH
    check(is_right, f"{blocks.name} does not hold lists of {count} blocks")


def _check_choose_blocks(op: ops.ChooseBlocks, kept: KVLayerShape) -> None:
    chosen, queries, weights = op.chosen, op.queries, op.weights
    _check_chosen(chosen)
    wanted = KVLayerShape(1, op.key_size, 0)
    check(kept == wanted, f"layer {op.layer} caches {kept}, choosing wants {wanted}")
    check(queries.width == op.num_heads * op.key_size, f"{queries.name} is {queries.width} wide")
    check(chosen.num_lists == (op.num_heads if weights is None else 1), f"{chosen.blocks.name} has other lists")
    check(weights is None or weights.width == op.num_heads, f"there are not {op.num_heads} weights of heads")
    check(queries.rows is Rows.BATCH and (weights or queries).rows is Rows.BATCH, "batch rows choose")
    # Numbers of blocks are float32.
    check(0 < op.max_positions <= chosen.block_size << 24, f"{op.max_positions} positions are too many to choose from")
    check(op.num_local >= 0, f"{op.num_local} blocks cannot come first")


def _check_activate(op: ops.Activate) -> None:
    check(op.kind is not Activation.SWIGLU_CLAMPED, f"{op.kind.value} exists only gated")
    _same_shape(op.out, op.x)


def _check_gated_activate(op: ops.GatedActivate) -> None:
    _same_shape(op.out, op.gate, op.up)
    check(op.limit == 0.0 or op.kind is Activation.SILU, f"{op.kind.value} has no limit")


def _check_multiply(op: ops.Multiply) -> None:
    _same_shape(op.out, op.x)
    if not isinstance(op.factor, Buffer):
        _has_values(op.factor, op.x.width, f"factor of {op.x.name}")
    else:
        _has_parts(op.x, op.factor)


def _check_magnitude(op: ops.Magnitude) -> None:
    check(op.out.width == 1, f"{op.out.name} is {op.out.width} wide; a magnitude is one value")
    _same_rows(op.out, op.x)


def _check_mix_slots(op: ops.MixSlots) -> None:
    out, x, count = op.out, op.x, op.num_slots
    check(count > 0 and x.width % count == 0, f"{x.name} is {x.width} wide, which is not {count} slots")
    size = x.width // count
    check(out.width % size == 0, f"{out.name} is {out.width} wide, and the slots of {x.name} are {size}")
    check(out.index != x.index, f"{out.name} cannot take a mixture of itself")
    _same_rows(out, x)
    if op.residual is not None:
        _same_shape(out, op.residual)
    if op.weights is not None:
        wanted = count * out.width // size
        check(op.weights.width == wanted, f"{op.weights.name} is {op.weights.width} wide; {wanted} weights are needed")
        _same_rows(out, op.weights)
    is_whole = op.first_slot == 0
    is_part = 0 < op.first_slot < out.width // size and op.weights is None and op.residual is not None
    check(is_whole or is_part, f"the slots of {out.name} from {op.first_slot} on cannot be mixed")


def _check_multiply_sigmoid(op: ops.MultiplySigmoid) -> None:
    _same_shape(op.out, op.x)
    _has_parts(op.x, op.gate)


def _has_parts(x: Buffer, values: Buffer) -> None:
    """Check that there is a value for each of equal parts of x."""
    _same_rows(values, x)
    is_whole = x.width % values.width == 0
    check(is_whole, f"{x.name} is {x.width} wide, {values.name} {values.width}: not equal parts of it")


def _check_limit(op: ops.Clamp) -> None:
    check(op.limit > 0.0, f"{op.x.name} cannot be clamped to {op.limit}")


def _check_bound(op: ops.Bound) -> None:
    _same_shape(op.out, op.x)
    check(op.lowest <= op.highest, f"{op.x.name} cannot be kept between {op.lowest} and {op.highest}")


def _check_scale_by_position(op: ops.ScaleByPosition) -> None:
    is_right = op.x.rows is Rows.BATCH and 0 < op.period < 1 << 31
    check(is_right, f"{op.x.name} cannot be scaled by position over {op.period}")


def _check_heads(op: ops.CopyHeads | ops.HeadMatmul, num_heads: int, out_width: int, x_width: int, what: str) -> None:
    """So many heads of out and x, each with room for what is written and read; x may be one head for all of out's."""
    is_shared = isinstance(op, ops.CopyHeads) and op.x_head_size == 0
    for buffer, count, head_size, end in (
        (op.out, num_heads, op.out_head_size, op.out_offset + out_width),
        (op.x, 1, op.x.width, op.x_offset + x_width)
        if is_shared
        else (op.x, num_heads, op.x_head_size, op.x_offset + x_width),
    ):
        is_right = buffer.width == count * head_size and end <= head_size
        check(is_right, f"{buffer.name} does not hold {count} heads of {head_size} columns for {what}")
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
    check(routing.num_group_values in (1, 2), f"{routing.num_group_values} values of a group are summed")
    kept = count // groups * routing.num_selected_groups
    check(groups == 1 or selected <= kept, f"{selected} experts do not fit the {kept} of the kept groups")
    widths = (op.logits.width, op.expert_ids.width, op.expert_weights.width)
    check(widths == (count, selected, selected), "router buffers differ")
    _same_rows(op.expert_ids, op.expert_weights, op.logits)
    _has_values(routing.selection_bias, count, "expert selection bias")
    _has_values(routing.output_scales, count, "scales of experts")


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


def _check_expert_factors(op: ops.ExpertFactors) -> None:
    x, selected = op.x, op.expert_ids.width
    check(x.width % selected == 0, f"{x.name} is {x.width} wide for {selected} slots")
    check(op.factors.ndim == 1, f"factors of {x.name} are {op.factors.shape}; one for each expert is needed")
    _same_rows(x, op.expert_ids)


def _check_convolution(op: ops.ShortConvolution | ops.CentredConvolution) -> None:
    out, x, weight = op.out, op.x, op.weight
    _same_shape(out, x)
    check(x.rows is Rows.BATCH and out.index != x.index, f"{out.name} cannot take the convolution of {x.name}")
    is_right = weight.ndim == 2 and weight.shape[0] == x.width and weight.shape[1] > 1
    check(is_right, f"a convolution of {x.name}, {x.width} wide, has weights {weight.shape}")
    if isinstance(op, ops.CentredConvolution):
        check(weight.shape[1] % 2 == 1, f"a convolution around rows of {x.name} is over {weight.shape[1]} of them")
    else:
        _has_values(op.bias, x.width, "bias of a convolution")


def _check_delta_rule(op: ops.GatedDeltaRule) -> None:
    heads, key_heads = op.num_heads, op.num_key_heads
    check(key_heads > 0 and heads % key_heads == 0, f"{heads} heads of values over {key_heads} of keys")
    check(op.keys.width % key_heads == 0, f"{op.keys.name} does not hold {key_heads} heads")
    check(op.values.width % heads == 0, f"{op.values.name} does not hold {heads} heads")
    _same_shape(op.queries, op.keys)
    _same_shape(op.out, op.values)
    _same_rows(op.out, op.queries, op.keys, op.decay, op.beta)
    check(op.out.rows is Rows.BATCH, "the delta rule goes over batch rows")
    is_input = op.out.index in {one.index for one in (op.queries, op.keys, op.values, op.decay, op.beta)}
    check(not is_input, f"{op.out.name} is also an input of the delta rule")
    widths = (heads, heads * op.key_size)
    check(
        op.decay.width in widths, f"{op.decay.name} is {op.decay.width} wide for {' or '.join(map(str, widths))} decays"
    )
    check(op.factor.size in (heads, op.decay.width), f"{op.factor.size} factors for {op.decay.width} decays")
    _has_values(op.bias, op.decay.width, f"bias of {op.decay.name}")
    check(op.lower_bound <= 0.0, f"a lower bound of {op.lower_bound} for logarithms of decays")


def _check_selective_scan(op: ops.SelectiveScan) -> None:
    heads, size, states, groups = op.num_heads, op.head_size, op.num_states, op.num_groups
    check(min(heads, size, states, groups) > 0 and heads % groups == 0, f"{heads} heads do not form {groups} groups")
    channels = heads * size
    check(op.out.width == channels, f"{op.out.name} is {op.out.width} wide for {channels} channels")
    parts = ((op.x, op.x_offset, channels), (op.b, op.b_offset, groups * states), (op.c, op.c_offset, groups * states))
    for buffer, offset, width in parts:
        is_inside = offset >= 0 and offset + width <= buffer.width
        check(is_inside, f"{buffer.name} is {buffer.width} wide; {width} columns from {offset} on are needed")
    inputs = [op.x, op.b, op.c, *([] if op.dt is None else [op.dt])]
    check(op.out.index not in [one.index for one in inputs], f"{op.out.name} is also an input")
    check(op.out.rows is Rows.BATCH, "a recurrence goes over batch rows")
    _same_rows(op.out, *inputs)
    check(not op.is_by_channel or heads == 1, f"{heads} heads with step sizes of their own per channel")
    steps = channels if op.is_by_channel else heads
    if op.dt is not None:
        check(op.dt.width == steps, f"{op.dt.name} is {op.dt.width} wide for {steps} step sizes")
    check(op.a.shape == ((steps, states) if op.is_by_channel else (steps,)), f"rates of decay are {op.a.shape}")
    _has_values(op.d, steps, "what passes by the state")


def _check_wkv(op: ops.Wkv) -> None:
    inputs = (op.receptance, op.decay, op.keys, op.values, op.rate)
    _same_shape(op.out, op.bonus, *inputs)
    check(op.out.rows is Rows.BATCH, "a recurrence goes over batch rows")
    check(op.out.width % op.head_size == 0, f"{op.out.name} is {op.out.width} wide, not of heads of {op.head_size}")
    written = {op.out.index, op.bonus.index}
    is_apart = len(written) == 2 and written.isdisjoint(one.index for one in inputs)
    check(is_apart, f"{op.out.name} or {op.bonus.name} is also an input of the recurrence")
    for values in (op.key_scale, op.rate_scale, op.bonus_scale):
        _has_values(values, op.out.width, f"scale of {op.keys.name}")


CHECKS: dict[Any, Callable[..., None]] = {}
"""Check of the shapes of each op; of one on a layer of the cache, given what that keeps. Raises: ShapeError."""


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
        self.states: list[StateShape] = []
        self.typed_ops: set[int] = set()

    def buffer(self, name: str, width: int, rows: Rows = Rows.BATCH) -> Buffer:
        """A new buffer. Raises: ShapeError."""
        check(width > 0, f"buffer {name} is {width} wide; a buffer has at least one column")
        self.buffers.append(Buffer(len(self.buffers), name, width, rows))
        return self.buffers[-1]

    def state(self, num_values: int, log_values: int) -> int:
        """Number of a new recurrent state, for an op that keeps so many values per sequence, and per row of a log."""
        check(num_values > 0 and log_values > 0, f"a state of {num_values} values, {log_values} per logged row")
        self.states.append(StateShape(num_values, log_values))
        return len(self.states) - 1

    def add_state(self, shape: StateShape) -> int:
        """`state` of a shape."""
        return self.state(shape.num_values, shape.log_values)

    def append(self, op: Op) -> None:
        """Check an op and write it after the others. Raises: ShapeError."""
        if isinstance(op, ops.StoreKV | ops.Attention | ops.ChooseBlocks):
            check(0 <= op.layer < len(self.kv_layers), f"there is no cache of layer {op.layer}")
            CHECKS[type(op)](op, self.kv_layers[op.layer])
        elif isinstance(op, ops.RecurrentOp):
            CHECKS[type(op)](op)
            self._check_state(op)
        else:
            CHECKS[type(op)](op)
        self.ops.append(op)

    def _check_state(self, op: ops.RecurrentOp) -> None:
        """Each state belongs to one op, and holds what that op keeps."""
        check(0 <= op.state < len(self.states), f"there is no state {op.state}")
        found, wanted = self.states[op.state], op.state_shape
        check(found == wanted, f"state {op.state} is {found}; {type(op).__name__} keeps {wanted}")
        is_taken = any(isinstance(other, ops.RecurrentOp) and other.state == op.state for other in self.ops)
        check(not is_taken, f"state {op.state} already belongs to another op")

    def finish(self, output: Buffer, hidden: Buffer | None = None) -> OpGraph:
        """The finished graph; `output` is the buffer `Program.run` returns, `hidden` one it shows.

        Raises: ShapeError.
        """
        for buffer in (output, hidden or output):
            check(buffer.rows is Rows.OUTPUT, f"{buffer.name} holds batch rows; results are of output rows")
        embedded = [(op.part + 1) * op.x.width for op in self.ops if isinstance(op, ops.EmbedMedia)]
        has_ranges = any(isinstance(op, ops.Attention) and op.takes_ranges for op in self.ops)
        parts = (self.kv_layers, tuple(self.buffers), tuple(self.ops), output, tuple(self.states), hidden)
        return OpGraph(
            *parts,
            media_width=max(embedded, default=0),
            takes_ranges=has_ranges,
            num_token_types=min((op.table.num_rows for op in self.ops if isinstance(op, ops.EmbedTypes)), default=1),
            typed_ops=frozenset(self.typed_ops),
        )

    # `builder.rope(x, table, 64)` is `builder.append(Rope(x, table, 64))`.
    embed = _writer(ops.Embed, _check_embed)
    embed_positions = _writer(ops.EmbedPositions, _check_embed)
    embed_types = _writer(ops.EmbedTypes, _check_embed)
    embed_media = _writer(ops.EmbedMedia, _check_embed_media)
    previous_row = _writer(ops.PreviousRow, _check_previous_row)
    rms_norm = _writer(ops.RmsNorm, _check_norm)
    layer_norm = _writer(ops.LayerNorm, _check_norm)
    matmul = _writer(ops.Matmul, _check_matmul)
    rope = _writer(ops.Rope, _check_rope)
    rotate_by_row = _writer(ops.RotateByRow, _check_rotate_by_row)
    store_kv = _writer(ops.StoreKV, _check_store_kv)
    attention = _writer(ops.Attention, _check_attention)
    choose_blocks = _writer(ops.ChooseBlocks, _check_choose_blocks)
    activation = _writer(ops.Activate, _check_activate)
    gated_activation = _writer(ops.GatedActivate, _check_gated_activate)
    xielu = _writer(ops.Xielu, lambda op: _same_shape(op.out, op.x))
    add = _writer(ops.Add, lambda op: _same_shape(op.out, op.a, op.b))
    multiply = _writer(ops.Multiply, _check_multiply)
    magnitude = _writer(ops.Magnitude, _check_magnitude)
    mix_slots = _writer(ops.MixSlots, _check_mix_slots)
    gaussian_top_k = _writer(ops.GaussianTopK, lambda op: _same_shape(op.out, op.x))
    multiply_sigmoid = _writer(ops.MultiplySigmoid, _check_multiply_sigmoid)
    add_vector = _writer(ops.AddVector, lambda op: _has_values(op.vector, op.x.width, f"the vector for {op.x.name}"))
    scale = _writer(ops.Scale)
    clamp = _writer(ops.Clamp, _check_limit)
    bound = _writer(ops.Bound, _check_bound)
    scale_by_position = _writer(ops.ScaleByPosition, _check_scale_by_position)
    softmax = _writer(ops.Softmax, lambda op: _same_shape(op.out, op.x))
    softcap = _writer(ops.Softcap)
    copy_heads = _writer(ops.CopyHeads, _check_copy_heads)
    head_matmul = _writer(ops.HeadMatmul, _check_head_matmul)
    select_output = _writer(ops.SelectOutput, _check_select_output)
    mean_rows = _writer(ops.MeanRows, _check_select_output)
    route = _writer(ops.Route, _check_route)
    expert_matmul = _writer(ops.ExpertMatmul, _check_expert_matmul)
    expert_sum = _writer(ops.ExpertSum, _check_expert_sum)
    expert_scale = _writer(ops.ExpertScale, _check_expert_scale)
    expert_factors = _writer(ops.ExpertFactors, _check_expert_factors)
    gated_delta_rule = _writer(ops.GatedDeltaRule, _check_delta_rule)
    wkv = _writer(ops.Wkv, _check_wkv)
    stage_boundary = _writer(ops.StageBoundary)
    short_convolution = _writer(ops.ShortConvolution, _check_convolution)
    centred_convolution = _writer(ops.CentredConvolution, _check_convolution)
    selective_scan = _writer(ops.SelectiveScan, _check_selective_scan)

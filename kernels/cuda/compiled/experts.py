"""Routing, and sums of experts' outputs. The GEMMs are `matmul.matmul` of kind EXPERTS."""

from numba import float32, int64

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.activations import exponential, sigmoid
from localinfer.kernels.cuda.compiled.reductions import beats, warp_max, warp_sum
from localinfer.kernels.cuda.jit import inline, kernel, template

THREADS = 128
SOFTMAX, SIGMOID, SOFTMAX_SELECTED, SPARSE_MIXER = 0, 1, 2, 3
_LOWEST = float("-inf")
_NONE = 1 << 30


@inline
def best_of_lanes(values, count):
    """The largest of float32[count] and its index, of equal ones the lowest; all lanes of a warp get them."""
    lane = ptx.thread() % 32
    best = float32(_LOWEST)
    index = int64(_NONE)
    other = lane
    while other < count:
        value = ptx.load_f32(values + 4 * other)
        if value > best:
            best = value
            index = int64(other)
        other = other + 32
    for distance in (16, 8, 4, 2, 1):
        value = ptx.shuffle(best, distance)
        found = ptx.shuffle_int(index, distance)
        if beats(value, found, best, index):
            best = value
            index = found
    # Where every value is NaN, some expert must be taken.
    return min(index, count - 1)


@inline
def exclude(values, index):
    """Exclude this one from further searches."""
    ptx.syncthreads()
    if ptx.thread() == 0:
        ptx.store_f32(values + 4 * index, float32(_LOWEST))
    ptx.syncthreads()


@template(floats="scale margin")
def route(gating):
    """Choose experts of every row, a warp each, of [1, rows]; scratch: float32[rows][2 * count + groups]."""
    is_sigmoid = gating == SIGMOID
    is_softmax = gating == SOFTMAX
    is_selected = gating == SOFTMAX_SELECTED
    is_mixed = gating == SPARSE_MIXER

    def kernel(
        logits, logits_stride, ids, ids_stride, weights, weights_stride, count, num_selected, bias, scratch,
        num_groups, num_kept_groups, num_group_values, normalises, output_scales, scale, margin,
    ):  # fmt: skip
        lane = ptx.thread()
        row = ptx.block_y()
        logits = logits + row * logits_stride
        ids = ids + row * ids_stride
        weights = weights + row * weights_stride
        values = scratch + row * (2 * count + num_groups) * 4
        scores = values + 4 * count
        group_scores = scores + 4 * count
        largest = float32(_LOWEST)
        expert = lane
        while expert < count:
            largest = ptx.maximum(largest, ptx.load_f32(logits + 4 * expert))
            expert = expert + 32
        largest = warp_max(largest)
        total = float32(0.0)
        if is_softmax:
            expert = lane
            while expert < count:
                total = total + exponential(ptx.load_f32(logits + 4 * expert) - largest)
                expert = expert + 32
            total = warp_sum(total)
        expert = lane
        while expert < count:
            value = ptx.load_f32(logits + 4 * expert)
            if is_sigmoid:
                value = sigmoid(value)
            if is_softmax:
                value = ptx.divide(exponential(value - largest), total)
            ptx.store_f32(values + 4 * expert, value)
            if bias != 0:
                value = value + ptx.load_f32(bias + 4 * expert)
            ptx.store_f32(scores + 4 * expert, value)
            expert = expert + 32
        ptx.syncthreads()

        if num_groups > 1:
            group_size = count // num_groups
            group = lane
            while group < num_groups:
                first = float32(_LOWEST)
                second = float32(_LOWEST)
                expert = group * group_size
                while expert < group * group_size + group_size:
                    value = ptx.load_f32(scores + 4 * expert)
                    if value > first:
                        second = first
                        first = value
                    elif value > second:
                        second = value
                    expert = expert + 1
                if num_group_values > 1:
                    first = first + second
                ptx.store_f32(group_scores + 4 * group, first)
                group = group + 32
            ptx.syncthreads()
            kept = 0
            while kept < num_kept_groups:
                exclude(group_scores, best_of_lanes(group_scores, num_groups))
                kept = kept + 1
            expert = lane
            while expert < count:
                # The excluded groups are those that were kept.
                if ptx.load_f32(group_scores + 4 * (expert // group_size)) > float32(_LOWEST):
                    ptx.store_f32(scores + 4 * expert, float32(_LOWEST))
                expert = expert + 32
            ptx.syncthreads()

        slot = 0
        while slot < num_selected:
            chosen = best_of_lanes(scores, count)
            weight = ptx.load_f32(values + 4 * chosen)
            if is_mixed:
                best = weight
                total = float32(0.0)
                expert = lane
                while expert < count:
                    score = ptx.load_f32(scores + 4 * expert)
                    # abs() of a float calls a library that PTX alone does not hold.
                    furthest = margin * ptx.maximum(ptx.maximum(score, -score), best)
                    if score > float32(_LOWEST) and best - score <= furthest:
                        total = total + exponential(score - best)
                    expert = expert + 32
                weight = ptx.divide(float32(1.0), warp_sum(total))
            if lane == 0:
                ptx.store_f32(ids + 4 * slot, ptx.to_float(chosen))
                ptx.store_f32(weights + 4 * slot, weight)
            exclude(scores, chosen)
            slot = slot + 1
        if lane == 0:
            total = float32(0.0)
            largest = float32(_LOWEST)
            slot = 0
            while slot < num_selected:
                largest = ptx.maximum(largest, ptx.load_f32(weights + 4 * slot))
                slot = slot + 1
            slot = 0
            while slot < num_selected:
                value = ptx.load_f32(weights + 4 * slot)
                if is_selected:
                    value = exponential(value - largest)
                    ptx.store_f32(weights + 4 * slot, value)
                total = total + value
                slot = slot + 1
            if not (is_selected or normalises != 0):
                total = float32(1.0)
            slot = 0
            while slot < num_selected:
                value = scale * ptx.divide(ptx.load_f32(weights + 4 * slot), total)
                if output_scales != 0:
                    value = value * ptx.load_f32(output_scales + 4 * ptx.to_int(ptx.load_f32(ids + 4 * slot)))
                ptx.store_f32(weights + 4 * slot, value)
                slot = slot + 1

    return kernel


@kernel()
def expert_sum(
    out, out_stride, x, x_stride, weights, weights_stride, residual, residual_stride, num_selected, num_columns
):
    """out = residual + the sum over slots, in order, of weight * x, of [columns / 128, rows]."""
    column = ptx.block_x() * THREADS + ptx.thread()
    if column < num_columns:
        row = ptx.block_y()
        total = float32(0.0)
        if residual != 0:
            total = ptx.load_f32(residual + row * residual_stride + 4 * column)
        slot = 0
        while slot < num_selected:
            weight = ptx.load_f32(weights + row * weights_stride + 4 * slot)
            total = total + weight * ptx.load_f32(x + row * x_stride + 4 * (slot * num_columns + column))
            slot = slot + 1
        ptx.store_f32(out + row * out_stride + 4 * column, total)


@kernel()
def expert_scale(x, x_stride, weights, weights_stride, num_selected, num_columns):
    """x of every slot times its weight, of [slots * columns / 128, rows]."""
    index = ptx.block_x() * THREADS + ptx.thread()
    if index < num_selected * num_columns:
        row = ptx.block_y()
        place = x + row * x_stride + 4 * index
        ptx.store_f32(
            place, ptx.load_f32(place) * ptx.load_f32(weights + row * weights_stride + 4 * (index // num_columns))
        )


@kernel()
def expert_factors(x, x_stride, ids, ids_stride, factors, num_selected, num_columns):
    """x of every slot times its expert's number, of [slots * columns / 128, rows]."""
    index = ptx.block_x() * THREADS + ptx.thread()
    if index < num_selected * num_columns:
        row = ptx.block_y()
        place = x + row * x_stride + 4 * index
        expert = ptx.to_int(ptx.load_f32(ids + row * ids_stride + 4 * (index // num_columns)))
        ptx.store_f32(place, ptx.load_f32(place) * ptx.load_f32(factors + 4 * expert))

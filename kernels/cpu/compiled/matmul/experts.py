"""Mixture of experts: choosing experts per row, grouping rows by expert, and summing what the experts gave.

An expert's product runs over all rows that chose it, so its weights are read once per batch; what a row gets is the
same as if it were alone, since every row's slots are summed in slot order.
"""

import numpy as np

from localinfer.kernels.cpu.compiled.matmul.rows import add_scaled_row, exp_of, scale_row, sigmoid_of
from localinfer.kernels.cpu.compiled.simd.batch import num_rows, scratch
from localinfer.kernels.cpu.compiled.simd.memory import float_bits, load_f32, load_i64, store_f32, store_i64
from localinfer.kernels.cpu.compiled.simd.pool import take_units
from localinfer.kernels.cpu.kernel_abi import CONTROL
from localinfer.kernels.jit.numba import inline, op
from localinfer.kernels.ops import MAX_EXPERTS


@inline
def _softmax(values: int, count: int) -> None:
    """In place, left to right."""
    largest = load_f32(values)
    for i in range(1, count):
        largest = max(largest, load_f32(values + 4 * i))
    total = np.float32(0)
    for i in range(count):
        value = exp_of(load_f32(values + 4 * i) - largest)
        store_f32(values + 4 * i, value)
        total += value
    for i in range(count):
        store_f32(values + 4 * i, load_f32(values + 4 * i) / total)


@inline
def _drop_groups(scores: int, experts: int, groups: int, kept: int) -> None:
    """Give -inf to the experts of all but the `kept` groups with the largest sum of their two best scores."""
    size = experts // groups
    totals = scores + 4 * experts
    for group in range(groups):
        best, second = np.float32(-np.inf), np.float32(-np.inf)
        for i in range(size):
            value = load_f32(scores + 4 * (group * size + i))
            if value > best:
                best, second = value, best
            elif value > second:
                second = value
        store_f32(totals + 4 * group, best + second if size > 1 else best)
    for _ in range(groups - kept):
        worst = -1
        for group in range(groups):
            value = load_f32(totals + 4 * group)
            if value < np.float32(np.inf) and (worst < 0 or value <= load_f32(totals + 4 * worst)):
                worst = group
        store_f32(totals + 4 * worst, np.float32(np.inf))
        for i in range(size):
            store_f32(scores + 4 * (worst * size + i), np.float32(-np.inf))


@op
def route(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Choose experts per row.

    Parameters: ids, ids stride, weights, weights stride, logits, logits stride, experts, selected, gating (0 softmax, 1
    sigmoid, 2 softmax of the selected), normalise, scale bits, selection bias, groups, selected groups,
    is output.
    """
    p = parameters
    ids, ids_stride, weights, weights_stride = load_i64(p), load_i64(p + 8), load_i64(p + 16), load_i64(p + 24)
    logits, logits_stride, experts, selected = load_i64(p + 32), load_i64(p + 40), load_i64(p + 48), load_i64(p + 56)
    gating, normalise, scale, bias = (
        load_i64(p + 64),
        load_i64(p + 72),
        float_bits(load_i64(p + 80)),
        load_i64(p + 88),
    )
    groups, kept_groups = load_i64(p + 96), load_i64(p + 104)
    control = load_i64(batch + CONTROL)
    values = scratch(batch, thread)
    scores = values + 4 * MAX_EXPERTS
    rows = num_rows(batch, load_i64(p + 112))
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        source, row_ids, row_weights = (
            logits + row * logits_stride,
            ids + row * ids_stride,
            weights + row * weights_stride,
        )
        for i in range(experts):
            value = load_f32(source + 4 * i)
            store_f32(values + 4 * i, sigmoid_of(value) if gating == 1 else value)
        if gating == 0:
            _softmax(values, experts)
        for i in range(experts):
            extra = np.float32(0) if bias == 0 else load_f32(bias + 4 * i)
            store_f32(scores + 4 * i, load_f32(values + 4 * i) + extra)
        if groups > 1:
            _drop_groups(scores, experts, groups, kept_groups)
        total = np.float32(0)
        for slot in range(selected):
            best = 0
            for i in range(1, experts):
                if load_f32(scores + 4 * i) > load_f32(scores + 4 * best):
                    best = i
            value = load_f32(values + 4 * best)
            store_f32(scores + 4 * best, np.float32(-np.inf))
            store_f32(row_ids + 4 * slot, np.float32(best))
            store_f32(row_weights + 4 * slot, value)
            total += value
        if gating == 2:
            _softmax(row_weights, selected)
            total = np.float32(1)
        for slot in range(selected):
            value = load_f32(row_weights + 4 * slot)
            if normalise == 1:
                value = value / max(total, np.float32(6.103515625e-05))
            store_f32(row_weights + 4 * slot, value * scale)


@op
def group_by_expert(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Sort (row, slot) pairs by expert, stably.

    Parameters: ids, ids stride, experts, selected, out: int64[experts + 2] starts, then int64[rows * selected] of
    row * selected + slot; is output.
    """
    p = parameters
    ids, ids_stride, experts, selected = load_i64(p), load_i64(p + 8), load_i64(p + 16), load_i64(p + 24)
    starts = load_i64(p + 32)
    if thread != 0:
        return
    entries = starts + 8 * (experts + 2)
    rows = num_rows(batch, load_i64(p + 40))
    for i in range(experts + 2):
        store_i64(starts + 8 * i, 0)
    # Counts stand two places up, so that after summing, word e + 1 is where expert e begins; filling then moves it to
    # where expert e + 1 begins, which is what word e + 1 shall hold in the end.
    for row in range(rows):
        for slot in range(selected):
            place = starts + 8 * (2 + np.int64(load_f32(ids + row * ids_stride + 4 * slot)))
            store_i64(place, load_i64(place) + 1)
    for i in range(experts + 1):
        store_i64(starts + 8 * (i + 1), load_i64(starts + 8 * (i + 1)) + load_i64(starts + 8 * i))
    for row in range(rows):
        for slot in range(selected):
            place = starts + 8 * (1 + np.int64(load_f32(ids + row * ids_stride + 4 * slot)))
            store_i64(entries + 8 * load_i64(place), row * selected + slot)
            store_i64(place, load_i64(place) + 1)


@op
def expert_sum(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = residual + sum over slots of weight * x[slot].

    Parameters: out, out stride, x, x stride, weights, weights stride, residual (0 for none), residual stride, selected,
    columns, is output.
    """
    p = parameters
    out, out_stride, x, x_stride = load_i64(p), load_i64(p + 8), load_i64(p + 16), load_i64(p + 24)
    weights, weights_stride = load_i64(p + 32), load_i64(p + 40)
    residual, residual_stride = load_i64(p + 48), load_i64(p + 56)
    selected, columns = load_i64(p + 64), load_i64(p + 72)
    control = load_i64(batch + CONTROL)
    rows = num_rows(batch, load_i64(p + 80))
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        target, source, row_weights = out + row * out_stride, x + row * x_stride, weights + row * weights_stride
        if residual == 0:
            scale_row(target, source, source, load_f32(row_weights), columns)
        else:
            add_scaled_row(target, residual + row * residual_stride, source, load_f32(row_weights), columns)
        for slot in range(1, selected):
            add_scaled_row(target, target, source + 4 * columns * slot, load_f32(row_weights + 4 * slot), columns)


@op
def expert_scale(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """x[slot] *= weight: x, x stride, weights, weights stride, selected, columns, is output."""
    p = parameters
    x, x_stride, weights, weights_stride = load_i64(p), load_i64(p + 8), load_i64(p + 16), load_i64(p + 24)
    selected, columns = load_i64(p + 32), load_i64(p + 40)
    control = load_i64(batch + CONTROL)
    units = num_rows(batch, load_i64(p + 48)) * selected
    while True:
        unit = take_units(control, 1)
        if unit >= units:
            return
        row, slot = unit // selected, unit % selected
        place = x + row * x_stride + 4 * columns * slot
        scale_row(place, place, place, load_f32(weights + row * weights_stride + 4 * slot), columns)

"""Mixture of experts: routing, grouping rows by expert, and summing the experts' outputs.

An expert's GEMM runs over all rows routed to it, so its weights are read once per batch; every row's slots are summed
in slot order, so its result does not depend on the other rows.
"""

from typing import Any

import numpy as np

from localinfer.kernels.cpu.compiled.elementwise import add_scaled_row, exp_of, scale_row, sigmoid_of
from localinfer.kernels.cpu.compiled.memory import load_f32, load_i64, store_f32, store_i64
from localinfer.kernels.cpu.compiled.pool import num_rows, row_op, scratch, take_units
from localinfer.kernels.cpu.parameters import BATCH, EXPERT_FACTORS, EXPERT_SCALE, EXPERT_SUM, GROUP_BY_EXPERT, ROUTE
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
def _drop_groups(scores: int, experts: int, groups: int, kept: int, num_values: int) -> None:
    """Give -inf to the experts of all but the `kept` groups with the largest sum of their one or two best scores."""
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
        store_f32(totals + 4 * group, best + second if min(size, num_values) > 1 else best)
    for _ in range(groups - kept):
        worst = -1
        for group in range(groups):
            value = load_f32(totals + 4 * group)
            if value < np.float32(np.inf) and (worst < 0 or value <= load_f32(totals + 4 * worst)):
                worst = group
        store_f32(totals + 4 * worst, np.float32(np.inf))
        for i in range(size):
            store_f32(scores + 4 * (worst * size + i), np.float32(-np.inf))


@inline
def _share_within(scores: int, experts: int, best: np.float32, margin: np.float32) -> np.float32:
    """The share of the best score in a softmax over those left that are within a margin of it."""
    total = np.float32(0)
    for i in range(experts):
        score = load_f32(scores + 4 * i)
        if score > np.float32(-np.inf) and not best - score > margin * max(abs(score), best):
            total += exp_of(score - best)
    return np.float32(1) / total


@row_op(ROUTE)
def route(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """Choose experts of a row."""
    values = scratch(batch, thread)
    scores = values + 4 * MAX_EXPERTS
    source = p.logits + row * p.logits_stride
    row_ids, row_weights = p.ids + row * p.ids_stride, p.weights + row * p.weights_stride
    for i in range(p.experts):
        value = load_f32(source + 4 * i)
        store_f32(values + 4 * i, sigmoid_of(value) if p.gating == 1 else value)
    if p.gating == 0:
        _softmax(values, p.experts)
    for i in range(p.experts):
        extra = np.float32(0) if p.bias == 0 else load_f32(p.bias + 4 * i)
        store_f32(scores + 4 * i, load_f32(values + 4 * i) + extra)
    if p.groups > 1:
        _drop_groups(scores, p.experts, p.groups, p.kept_groups, p.group_values)
    total = np.float32(0)
    for slot in range(p.selected):
        best = 0
        for i in range(1, p.experts):
            if load_f32(scores + 4 * i) > load_f32(scores + 4 * best):
                best = i
        value = load_f32(values + 4 * best)
        if p.gating == 3:
            value = _share_within(scores, p.experts, value, p.margin)
        store_f32(scores + 4 * best, np.float32(-np.inf))
        store_f32(row_ids + 4 * slot, np.float32(best))
        store_f32(row_weights + 4 * slot, value)
        total += value
    if p.gating == 2:
        _softmax(row_weights, p.selected)
        total = np.float32(1)
    for slot in range(p.selected):
        value = load_f32(row_weights + 4 * slot)
        if p.normalise == 1:
            value = value / max(total, np.float32(6.103515625e-05))
        value = value * p.scale
        if p.output_scales != 0:
            value = value * load_f32(p.output_scales + 4 * np.int64(load_f32(row_ids + 4 * slot)))
        store_f32(row_weights + 4 * slot, value)


@op
def group_by_expert(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Sort (row, slot) pairs by expert, stably."""
    p = GROUP_BY_EXPERT.load(parameters)
    if take_units(BATCH.control(batch), 1) != 0:
        return
    entries = p.starts + 8 * (p.experts + 2)
    rows = num_rows(batch, p.is_output)
    for i in range(p.experts + 2):
        store_i64(p.starts + 8 * i, 0)
    # Counts are stored two entries up, so that after the prefix sum entry e + 1 is the start of expert e; filling then
    # advances it to the start of expert e + 1.
    for row in range(rows):
        for slot in range(p.selected):
            place = p.starts + 8 * (2 + np.int64(load_f32(p.ids + row * p.ids_stride + 4 * slot)))
            store_i64(place, load_i64(place) + 1)
    for i in range(p.experts + 1):
        store_i64(p.starts + 8 * (i + 1), load_i64(p.starts + 8 * (i + 1)) + load_i64(p.starts + 8 * i))
    for row in range(rows):
        for slot in range(p.selected):
            place = p.starts + 8 * (1 + np.int64(load_f32(p.ids + row * p.ids_stride + 4 * slot)))
            store_i64(entries + 8 * load_i64(place), row * p.selected + slot)
            store_i64(place, load_i64(place) + 1)


@row_op(EXPERT_SUM)
def expert_sum(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """out = residual + sum over slots of weight * x[slot]."""
    target, source = p.out + row * p.out_stride, p.x + row * p.x_stride
    row_weights = p.weights + row * p.weights_stride
    if p.residual == 0:
        scale_row(target, source, load_f32(row_weights), p.columns)
    else:
        add_scaled_row(target, p.residual + row * p.residual_stride, source, load_f32(row_weights), p.columns)
    for slot in range(1, p.selected):
        add_scaled_row(target, target, source + 4 * p.columns * slot, load_f32(row_weights + 4 * slot), p.columns)


@row_op(EXPERT_SCALE, lambda p: p.selected)
def expert_scale(p: Any, batch: int, thread: int, row: int, slot: int) -> None:
    """x[slot] *= weight."""
    place = p.x + row * p.x_stride + 4 * p.columns * slot
    scale_row(place, place, load_f32(p.weights + row * p.weights_stride + 4 * slot), p.columns)


@row_op(EXPERT_FACTORS, lambda p: p.selected)
def expert_factors(p: Any, batch: int, thread: int, row: int, slot: int) -> None:
    """x[slot] *= its expert's number."""
    place = p.x + row * p.x_stride + 4 * p.columns * slot
    expert = np.int64(load_f32(p.ids + row * p.ids_stride + 4 * slot))
    scale_row(place, place, load_f32(p.factors + 4 * expert), p.columns)

"""Attention's two innermost steps for every type of keys and of values, called by `attention.attention` by address.

Each is compiled by itself, and only for the types in use. Arguments: parameters of the op, scratch memory, first and
last: blocks of sixteen positions of a chunk for codes and keys, positions for unquantized values.
"""

from localinfer.kernels.cpu.attention import (
    KEY_COLUMNS,
    KEY_SCALES,
    SCALE,
    VALUE_COLUMNS,
    VALUE_ROW_BYTES,
    VALUE_SCALES,
    VALUE_STEP,
    VALUES,
)
from localinfer.kernels.cpu.compiled.attention import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention.attention_codes import Q4_0, Q8_0, score_codes, weigh_codes
from localinfer.kernels.cpu.compiled.attention.attention_tiles import F16_CACHE, F32_CACHE, score_keys, weigh_values
from localinfer.kernels.cpu.compiled.simd.memory import float_bits, load_i64
from localinfer.kernels.jit.numba import compose, op


@compose
def _score_keys(kind: int, p: int, memory: int, first: int, last: int) -> None:
    table, pages, out = memory + scratch.QUERY_TABLE, memory + scratch.PAGES, memory + scratch.SCORES
    columns, scale = load_i64(p + KEY_COLUMNS), float_bits(load_i64(p + SCALE))
    count, values, step = load_i64(memory + scratch.COUNT), load_i64(p + VALUES), load_i64(p + VALUE_STEP)
    score_keys(kind, count, table, pages, first, last, columns, scale, values, step, out)


@compose
def _score_codes(kind: int, p: int, memory: int, first: int, last: int) -> None:
    table, pages, out = memory + scratch.QUERY_TABLE, memory + scratch.PAGES, memory + scratch.SCORES
    columns, scales = load_i64(p + KEY_COLUMNS), load_i64(p + KEY_SCALES)
    count, values, step = load_i64(memory + scratch.COUNT), load_i64(p + VALUES), load_i64(p + VALUE_STEP)
    score_codes(kind, count, table, pages, first, last, columns, scales, values, step, out)


@compose
def _weigh_values(kind: int, p: int, memory: int, first: int, last: int) -> None:
    weights, pages = memory + scratch.SCORES, memory + scratch.PAGES
    count, out = load_i64(memory + scratch.COUNT), load_i64(memory + scratch.CHUNK_VALUES)
    row_bytes, vectors = load_i64(p + VALUE_ROW_BYTES), load_i64(p + VALUE_COLUMNS) // 16
    weigh_values(kind, count, weights, pages, first, last, load_i64(p + VALUES), row_bytes, vectors, out)


@compose
def _weigh_codes(kind: int, p: int, memory: int, first: int, last: int) -> None:
    weights, pages, work = memory + scratch.SCORES, memory + scratch.PAGES, memory + scratch.WORK
    count, out = load_i64(memory + scratch.COUNT), load_i64(memory + scratch.CHUNK_VALUES)
    values, columns, scales = load_i64(p + VALUES), load_i64(p + VALUE_COLUMNS), load_i64(p + VALUE_SCALES)
    first, last = first // 16, (last + 15) // 16
    weigh_codes(kind, count, weights, pages, first, last, values, columns, scales, out, work)


@op
def score_keys_f32(parameters: int, memory: int, first: int, last: int) -> None:
    """Scores of float32 keys."""
    _score_keys(F32_CACHE, parameters, memory, first, last)


@op
def score_keys_f16(parameters: int, memory: int, first: int, last: int) -> None:
    """Scores of float16 keys."""
    _score_keys(F16_CACHE, parameters, memory, first, last)


@op
def score_keys_q8_0(parameters: int, memory: int, first: int, last: int) -> None:
    """Scores of keys in Q8_0, of quantized queries."""
    _score_codes(Q8_0, parameters, memory, first, last)


@op
def score_keys_q4_0(parameters: int, memory: int, first: int, last: int) -> None:
    """Scores of keys in Q4_0, of quantized queries."""
    _score_codes(Q4_0, parameters, memory, first, last)


@op
def weigh_values_f32(parameters: int, memory: int, first: int, last: int) -> None:
    """Weighted sums of float32 values."""
    _weigh_values(F32_CACHE, parameters, memory, first, last)


@op
def weigh_values_f16(parameters: int, memory: int, first: int, last: int) -> None:
    """Weighted sums of float16 values."""
    _weigh_values(F16_CACHE, parameters, memory, first, last)


@op
def weigh_values_q8_0(parameters: int, memory: int, first: int, last: int) -> None:
    """Weighted sums of values in Q8_0."""
    _weigh_codes(Q8_0, parameters, memory, first, last)


@op
def weigh_values_q4_0(parameters: int, memory: int, first: int, last: int) -> None:
    """Weighted sums of values in Q4_0."""
    _weigh_codes(Q4_0, parameters, memory, first, last)

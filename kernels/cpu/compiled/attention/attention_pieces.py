"""Attention's two innermost steps for every type of keys and of values, called by `attention.attention` by address.

Each is compiled by itself, and only for the types in use. Arguments: parameters of the op, scratch memory, first and
last: blocks of sixteen positions of a chunk for codes and keys, positions for unquantized values.
"""

from localinfer.kernels.cpu.compiled.attention import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention.attention_codes import Q4_0, Q8_0, score_codes, weigh_codes
from localinfer.kernels.cpu.compiled.attention.attention_tiles import F16_CACHE, F32_CACHE, score_keys, weigh_values
from localinfer.kernels.cpu.compiled.simd.memory import load_i64
from localinfer.kernels.cpu.parameters import ATTENTION
from localinfer.kernels.jit.numba import compose, stamp


@compose
def _score_keys(kind: int, p: int, memory: int, first: int, last: int) -> None:
    table, pages, out = memory + scratch.QUERY_TABLE, memory + scratch.PAGES, memory + scratch.SCORES
    columns, scale = ATTENTION.key_columns(p), ATTENTION.scale(p)
    count, values, step = load_i64(memory + scratch.COUNT), ATTENTION.values(p), ATTENTION.value_step(p)
    score_keys(kind, count, table, pages, first, last, columns, scale, values, step, out)


@compose
def _score_codes(kind: int, p: int, memory: int, first: int, last: int) -> None:
    table, pages, out = memory + scratch.QUERY_TABLE, memory + scratch.PAGES, memory + scratch.SCORES
    columns, scales = ATTENTION.key_columns(p), ATTENTION.key_scales(p)
    count, values, step = load_i64(memory + scratch.COUNT), ATTENTION.values(p), ATTENTION.value_step(p)
    score_codes(kind, count, table, pages, first, last, columns, scales, values, step, out)


@compose
def _weigh_values(kind: int, p: int, memory: int, first: int, last: int) -> None:
    weights, pages = memory + scratch.SCORES, memory + scratch.PAGES
    count, out = load_i64(memory + scratch.COUNT), load_i64(memory + scratch.CHUNK_VALUES)
    row_bytes, vectors = ATTENTION.value_row_bytes(p), ATTENTION.value_columns(p) // 16
    weigh_values(kind, count, weights, pages, first, last, ATTENTION.values(p), row_bytes, vectors, out)


@compose
def _weigh_codes(kind: int, p: int, memory: int, first: int, last: int) -> None:
    weights, pages, work = memory + scratch.SCORES, memory + scratch.PAGES, memory + scratch.WORK
    count, out = load_i64(memory + scratch.COUNT), load_i64(memory + scratch.CHUNK_VALUES)
    values, columns, scales = ATTENTION.values(p), ATTENTION.value_columns(p), ATTENTION.value_scales(p)
    first, last = first // 16, (last + 15) // 16
    weigh_codes(kind, count, weights, pages, first, last, values, columns, scales, out, work)


KERNELS = {
    "score_keys_f32": stamp(_score_keys, F32_CACHE),
    "score_keys_f16": stamp(_score_keys, F16_CACHE),
    "score_keys_q8_0": stamp(_score_codes, Q8_0),
    "score_keys_q4_0": stamp(_score_codes, Q4_0),
    "weigh_values_f32": stamp(_weigh_values, F32_CACHE),
    "weigh_values_f16": stamp(_weigh_values, F16_CACHE),
    "weigh_values_q8_0": stamp(_weigh_codes, Q8_0),
    "weigh_values_q4_0": stamp(_weigh_codes, Q4_0),
}

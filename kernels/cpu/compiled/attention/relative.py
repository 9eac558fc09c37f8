"""Biases of attention by the distance of key and query, added to the scores of a chunk."""

from localinfer.kernels.cpu.compiled.attention import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.simd.memory import load_f32, load_i64, store_f32
from localinfer.kernels.cpu.parameters import ATTENTION
from localinfer.kernels.jit.numba import inline


@inline
def add_relative(
    p: int, memory: int, scores: int, head: int, row: int, start: int, offset: int, first: int, last: int
) -> None:
    """Add to the scores of one query, of positions first to last of a chunk, what its head has for each distance.

    p, memory: addresses of the op's parameters and of the thread's scratch memory. scores: float32, of the chunk's
    positions. row: of the unit's rows, the query's. start: position of the chunk's first key; offset: the same minus
    the query's. A key's bucket is that of its distance, or of the furthest that there is one for.
    """
    reach, size, scale = ATTENTION.reach(p), 4 * ATTENTION.num_buckets(p), ATTENTION.scale(p)
    middle = ATTENTION.buckets(p) + 8 * reach
    table, row_bias, key_bias = ATTENTION.table_bias(p), ATTENTION.row_bias(p), ATTENTION.key_bias(p)
    of_head = table + size * head
    of_row = load_i64(memory + scratch.ROW_BIAS) + row * ATTENTION.row_bias_stride(p) + size * head
    key_stride = ATTENTION.key_bias_stride(p)
    of_key = load_i64(memory + scratch.KEY_BIAS) + start * key_stride + size * head
    for place in range(first, last):
        bucket = load_i64(middle + 8 * min(max(place + offset, -reach), reach))
        score = load_f32(scores + 4 * place)
        if table != 0:
            score += load_f32(of_head + bucket)
        if row_bias != 0:
            score += scale * load_f32(of_row + bucket)
        if key_bias != 0:
            score += scale * load_f32(of_key + place * key_stride + bucket)
        store_f32(scores + 4 * place, score)

"""Hashes of what whole kernels compute on fixed inputs, to be compared between instruction sets.

One of each family: what each layout's product has of its own is compared by `run_pieces`, without the rest of a kernel.
"""

import hashlib

import numpy as np

from localinfer.kernels.cpu.encoding import encode_rows
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.sampling import RowSampler
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import SIZES, Layout
from localinfer.kernels.ops import Activation, AttentionShape, Buffer, KVLayerShape, LinearWeight, Projection
from localinfer.types import FloatArray
from tests.kernels.cpu.recurrent_runs import RecurrentProgram
from tests.kernels.cpu.tape_runs import assert_same_bits, linear, random_rows, run_rows
from tests.kernels.random_weights import random_weights
from tests.kernels.recurrent_cases import CASES

ROWS = 7


def products() -> str:
    """A matrix product, its weights packed and its activations quantized."""
    pool, shape = ThreadPool(1), (21, 2 * SIZES[Layout.Q8_0].unit)
    weight: LinearWeight = linear(pool, Layout.Q8_0, random_weights(Layout.Q8_0, shape, 1), shape)

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        out = tape.buffer("out", 21)
        tape.matmul(inputs[0], [Projection(weight, out)])
        return out

    return hashlib.sha256(run_rows(pool, [random_rows(ROWS, shape[1], 2)], write).tobytes()).hexdigest()


def cached() -> str:
    """Attention over cached numbers, over codes, and of an encoder, with a norm and activations."""
    pool, result = ThreadPool(1), hashlib.sha256()
    shape, both_ways = (
        AttentionShape(3, 1, 80, 40, 0.3, softcap=3.0),
        AttentionShape(3, 3, 20, 37, 0.3, bidirectional=True),
    )
    for one, kv_type in ((shape, "f16"), (shape, "q8_0/q4_0"), (both_ways, "f32")):
        found = _attention(pool, one, kv_type)
        assert_same_bits(found, found)
        result.update(found.tobytes())
    return result.hexdigest()


def _attention(pool: ThreadPool, shape: AttentionShape, kv_type: str) -> FloatArray:
    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        queries, keys, values = inputs
        out = tape.buffer("out", shape.num_heads * shape.value_size)
        tape.rms_norm(queries, queries, None, 1e-5, shape.key_size)
        tape.store_kv(0, keys, values)
        tape.attention(out, queries, 0, shape)
        tape.activation(out, out, Activation.SILU)
        tape.xielu(out, out, 0.75, 1.375, 0.5, -1e-6)
        tape.gated_activation(out, out, out, Activation.SILU, 0.5)
        return out

    kv_heads, sizes = shape.num_kv_heads, (shape.key_size, shape.value_size)
    widths = [shape.num_heads * shape.key_size, *(kv_heads * size for size in sizes)]
    inputs = [random_rows(150, width, seed) for seed, width in enumerate(widths)]
    return run_rows(pool, inputs, write, kv_layout=KVLayout(kv_type, [KVLayerShape(kv_heads, *sizes)]))


def recurrent() -> str:
    """States carried from row to row, with their gates."""
    pool, result = ThreadPool(1), hashlib.sha256()
    for name in ("convolution", "delta rule by channel"):
        program = RecurrentProgram(pool, CASES[name], CASES[name].inputs(9, 2), 9)
        found, place = program.in_chunks([4, 5])
        result.update(found.tobytes())
        result.update(program.states(place).tobytes())
    return result.hexdigest()


def encoded() -> str:
    """A searching encoder, whose choices between grids the smallest difference would change."""
    rows, importance = random_rows(21, 320, 3), np.abs(random_rows(1, 320, 4))[0]
    target = np.zeros((21, 10 * 24), np.uint8)
    encode_rows(ThreadPool(1), "Q5_1", rows, importance, target)
    return hashlib.sha256(target.tobytes()).hexdigest()


def chosen() -> str:
    """Tokens drawn from rows of logits, whose noise and sums are vector code."""
    generator, result = np.random.default_rng(3), []
    sampler = RowSampler(10_007)
    for position in range(20):
        row = generator.normal(0, 2, 10_007).astype(np.float32)
        for filters in ((1.0, 0, 1.0, 0.0), (1.0, 40, 0.95, 0.05), (2.0, 0, 0.9, 0.0), (0.7, 0, 0.99, 0.001)):
            result.append(sampler.choose(row, *filters, np.uint64(5), position))
    return hashlib.sha256(np.array(result).tobytes()).hexdigest()

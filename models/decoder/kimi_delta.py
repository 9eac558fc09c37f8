"""Kimi delta attention: the gated delta rule with a decay for every key channel (Kimi Linear, arXiv 2510.26692)."""

import math

import numpy as np

from localinfer.kernels.ops import Buffer, Projection, StateShape
from localinfer.kernels.recurrent_ops import delta_rule_state, short_convolution_state
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.delta_net import convolve
from localinfer.models.decoder.graph import Graph
from localinfer.models.decoder.recurrent_config import RecurrentConfig


def kimi_delta_states(config: ModelConfig) -> list[StateShape]:
    """The states of one layer: the convolutions of queries, keys and values, and the delta rule's."""
    sizes = _sizes(config)
    convolution = short_convolution_state(sizes.inner_size, sizes.kernel_size)
    rule = delta_rule_state(sizes.num_heads, sizes.num_heads, sizes.head_dim, sizes.head_dim, sizes.inner_size)
    return [convolution] * 3 + [rule]


def write_kimi_delta(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's delta attention over x, normed and gated; the result still needs its output projection."""
    tape, weights, sizes, block = graph.tape, graph.weights, _sizes(graph.config), f"blk.{layer}"
    width = sizes.inner_size
    convolved = []
    for letter, name in (("q", "queries"), ("k", "keys"), ("v", "values")):
        weight = weights.linear(f"{block}.attn_{letter}.weight", width, x.width)
        kernel = weights.squeezed_vector(f"{block}.ssm_conv1d_{letter}.weight", width, sizes.kernel_size)
        source = graph.buffer(f"{name}_in", width, x.rows)
        tape.matmul(x, [Projection(weight, source)])
        convolved.append(convolve(graph, source, name, kernel))
    queries, keys, values = convolved
    for buffer in (queries, keys):
        graph.unit_length(buffer, sizes.head_dim, graph.config.norm_epsilon)
    decay = _low_rank(graph, f"{block}.ssm_f", x, graph.buffer("decay", width, x.rows))
    beta = graph.buffer("beta", sizes.num_heads, x.rows)
    tape.matmul(x, [Projection(weights.linear(f"{block}.ssm_beta.weight", sizes.num_heads, x.width), beta)])
    factor = np.repeat(weights.squeezed_vector(f"{block}.ssm_a", sizes.num_heads), sizes.head_dim)
    bias = weights.vector(f"{block}.ssm_dt.bias", (width,))
    mixed = graph.buffer("mixed", width, x.rows)
    state = tape.add_state(kimi_delta_states(graph.config)[-1])
    tape.gated_delta_rule(
        state, mixed, queries, keys, values, decay, beta, factor, bias, sizes.num_heads,
        scale=1.0 / math.sqrt(sizes.head_dim), lower_bound=sizes.gate_lower_bound,
    )  # fmt: skip
    graph.norm(mixed, mixed, f"{block}.ssm_norm", sizes.head_dim)
    gate = _low_rank(graph, f"{block}.ssm_g", x, graph.buffer("output_gate", width, x.rows))
    tape.multiply_sigmoid(mixed, mixed, gate)
    return mixed


def _low_rank(graph: Graph, name: str, x: Buffer, out: Buffer) -> Buffer:
    """Project x to out by one matrix, or by two with fewer channels between them."""
    first, second = f"{name}_a.weight", f"{name}_b.weight"
    if not graph.weights.has(second):
        graph.tape.matmul(x, [Projection(graph.weights.linear(first, out.width, x.width), out)])
        return out
    rank = graph.weights.shape(first)[0]
    between = graph.buffer(f"{out.name}_rank", rank, x.rows)
    graph.tape.matmul(x, [Projection(graph.weights.linear(first, rank, x.width), between)])
    graph.tape.matmul(between, [Projection(graph.weights.linear(second, out.width, rank), out)])
    return out


def _sizes(config: ModelConfig) -> RecurrentConfig:
    assert config.recurrent is not None, "the model has recurrent layers"
    return config.recurrent

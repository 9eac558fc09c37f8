"""Kimi delta attention: the gated delta rule with a decay for every key channel (Kimi Linear, arXiv 2510.26692)."""

import math

from localinfer.kernels.ops import Buffer, Projection, StateShape, delta_rule_state, short_convolution_state
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.delta_net import convolve
from localinfer.models.decoder.graph import Graph
from localinfer.models.decoder.recurrent_config import RecurrentConfig

_LOW_RANK = (("f", "decay"), ("g", "output_gate"))
"""Gates that may come through fewer channels: a letter of their matrices, and a name."""


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
    names = (("q", "queries"), ("k", "keys"), ("v", "values"))
    kernels = [
        weights.squeezed_vector(f"{block}.ssm_conv1d_{letter}.weight", width, sizes.kernel_size) for letter, _ in names
    ]
    sources = [graph.buffer(f"{name}_in", width, x.rows) for _, name in names]
    projections = [
        graph.projection(f"{block}.attn_{letter}", source, x.width)
        for (letter, _), source in zip(names, sources, strict=True)
    ]
    beta = graph.buffer("beta", sizes.num_heads, x.rows)
    projections.append(graph.projection(f"{block}.ssm_beta", beta, x.width))
    decay_in, gate_in = (_low_rank_input(graph, f"{block}.ssm_{part}", name, x) for part, name in _LOW_RANK)
    tape.matmul(x, [*projections, *(projection for _, projection in (decay_in, gate_in))])
    decay, gate = (
        _low_rank_output(graph, f"{block}.ssm_{part}", name, between)
        for (part, name), (between, _) in zip(_LOW_RANK, (decay_in, gate_in), strict=True)
    )
    queries, keys, values = (
        convolve(graph, source, name, kernel) for source, (_, name), kernel in zip(sources, names, kernels, strict=True)
    )
    for buffer in (queries, keys):
        graph.unit_length(buffer, sizes.head_dim, sizes.length_epsilon)
    factor = weights.squeezed_vector(f"{block}.ssm_a", sizes.num_heads)
    bias = weights.vector(f"{block}.ssm_dt.bias", (width,))
    mixed = graph.buffer("mixed", width, x.rows)
    state = tape.add_state(kimi_delta_states(graph.config)[-1])
    tape.gated_delta_rule(
        state, mixed, queries, keys, values, decay, beta, factor, bias, sizes.num_heads,
        scale=1.0 / math.sqrt(sizes.head_dim), lower_bound=sizes.gate_lower_bound,
    )  # fmt: skip
    graph.norm(mixed, mixed, f"{block}.ssm_norm", sizes.head_dim)
    tape.multiply_sigmoid(mixed, mixed, gate)
    return mixed


def _low_rank_input(graph: Graph, name: str, out_name: str, x: Buffer) -> tuple[Buffer, Projection]:
    """The first of the one or two matrices from x to a gate: where its product goes, and the product."""
    width, has_second = _sizes(graph.config).inner_size, graph.weights.has(f"{name}_b.weight")
    rank = graph.weights.shape(f"{name}_a.weight")[0] if has_second else width
    out = graph.buffer(f"{out_name}_rank" if has_second else out_name, rank, x.rows)
    return out, graph.projection(f"{name}_a", out, x.width)


def _low_rank_output(graph: Graph, name: str, out_name: str, x: Buffer) -> Buffer:
    """The product with the second matrix, or x itself without one."""
    if not graph.weights.has(f"{name}_b.weight"):
        return x
    out = graph.buffer(out_name, _sizes(graph.config).inner_size, x.rows)
    graph.tape.matmul(x, [graph.projection(f"{name}_b", out, x.width)])
    return out


def _sizes(config: ModelConfig) -> RecurrentConfig:
    assert config.recurrent is not None, "the model has recurrent layers"
    return config.recurrent

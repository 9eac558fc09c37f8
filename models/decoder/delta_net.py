"""Delta nets: the gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid, and Kimi's with a decay per key channel.

Sources: Gated Delta Networks (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692), and the published models' code.
"""

import math

import numpy as np

from localinfer.kernels.ops import Activation, Buffer, Projection, StateShape, delta_rule_state, short_convolution_state
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.graph import Graph, refuse
from localinfer.models.decoder.recurrent_config import RecurrentConfig
from localinfer.types import FloatArray


def delta_net_states(config: ModelConfig) -> list[StateShape]:
    """The states of one layer: the convolutions of queries, keys and values, and the delta rule's."""
    sizes = _sizes(config)
    keys, values = sizes.num_key_heads * sizes.head_dim, sizes.inner_size
    rule = delta_rule_state(sizes.num_heads, sizes.num_key_heads, sizes.head_dim, sizes.value_size, sizes.num_heads)
    return [*(short_convolution_state(width, sizes.kernel_size) for width in (keys, keys, values)), rule]


def write_delta_net(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's delta net over x, normed and gated; the result still needs its output projection."""
    tape, sizes, block = graph.tape, _sizes(graph.config), f"blk.{layer}"
    key_width, value_width = sizes.num_key_heads * sizes.head_dim, sizes.inner_size
    weight = _taps(graph, block, 2 * key_width + value_width, sizes.kernel_size)
    queries, keys = (graph.buffer(f"{name}_in", key_width, x.rows) for name in ("queries", "keys"))
    values, gate = (graph.buffer(name, value_width, x.rows) for name in ("values_in", "output_gate"))
    decay, beta = (graph.buffer(name, sizes.num_heads, x.rows) for name in ("decay", "beta"))
    if graph.weights.has(f"{block}.attn_q.weight"):
        names = zip(("attn_q", "attn_k", "attn_v", "attn_gate"), (queries, keys, values, gate), strict=True)
        tape.matmul(x, [graph.projection(f"{block}.{name}", out, x.width) for name, out in names])
    elif not graph.weights.has(f"{block}.attn_qkv.weight"):
        _project_by_head(graph, f"{block}.ssm_in", x, queries, keys, values, gate)
    else:
        _project(graph, block, x, queries, keys, values, gate)
    _project_gates(graph, block, x, decay, beta)

    queries = convolve(graph, queries, "queries", weight[:key_width])
    keys = convolve(graph, keys, "keys", weight[key_width : 2 * key_width])
    values = convolve(graph, values, "values", weight[2 * key_width :])
    # With keys longer by a factor f, states are 1/f of what they were, and what is added to them has a factor f^2.
    key_length = math.sqrt(sizes.beta_scale)
    graph.unit_length(queries, sizes.head_dim, sizes.length_epsilon)
    graph.unit_length(keys, sizes.head_dim, sizes.length_epsilon, key_length)
    factor = graph.weights.vector(f"{block}.ssm_a", (sizes.num_heads,))
    bias = graph.weights.vector(f"{block}.ssm_dt.bias", (sizes.num_heads,))
    mixed = graph.buffer("mixed", value_width, x.rows)
    state = tape.add_state(delta_net_states(graph.config)[-1])
    tape.gated_delta_rule(
        state, mixed, queries, keys, values, decay, beta, factor, bias, sizes.num_key_heads,
        scale=key_length / math.sqrt(sizes.head_dim), is_tiled=graph.architecture.tiles_value_heads,
    )  # fmt: skip
    epsilon = graph.architecture.mixer_norm_epsilon
    graph.norm(mixed, mixed, f"{block}.ssm_norm", sizes.value_size, epsilon=epsilon)
    tape.gated_activation(mixed, gate, mixed, Activation.SILU)
    return mixed


def _taps(graph: Graph, block: str, num_channels: int, kernel_size: int) -> FloatArray:
    """The convolutions of queries, keys and values, float32[channels, kernel_size]: one tensor, or three.

    Writers part the three by other sizes than the heads', so they mean something only together.
    """
    weights = graph.weights
    if not weights.has(f"{block}.ssm_conv1d_q.weight"):
        return weights.vector(f"{block}.ssm_conv1d.weight", (num_channels, kernel_size))
    names = [f"{block}.ssm_conv1d_{letter}.weight" for letter in "qkv"]
    counts = [weights.shape(name)[0] for name in names]
    if sum(counts) != num_channels:
        raise refuse(graph.config, f"has convolutions of {sum(counts)} channels for {num_channels}")
    parts = [weights.vector(name, (count, kernel_size)) for name, count in zip(names, counts, strict=True)]
    return np.concatenate(parts)


def convolve(graph: Graph, source: Buffer, name: str, weight: FloatArray) -> Buffer:
    """Write a short convolution of a buffer into another one."""
    out = graph.buffer(name, source.width, source.rows)
    graph.short_convolution(out, source, weight)
    return out


def _sizes(config: ModelConfig) -> RecurrentConfig:
    assert config.recurrent is not None, "the model has recurrent layers"
    return config.recurrent


def _project(graph: Graph, block: str, x: Buffer, *outs: Buffer) -> None:
    """Queries, keys and values of one matrix, the output gate of another."""
    *mixed, gate = outs
    num_rows, first, projections = sum(out.width for out in mixed), 0, []
    for out in mixed:
        projections.append(graph.projection(f"{block}.attn_qkv", out, x.width, rows=(first, num_rows)))
        first += out.width
    graph.tape.matmul(x, [*projections, graph.projection(f"{block}.attn_gate", gate, x.width)])


def _project_by_head(graph: Graph, name: str, x: Buffer, *outs: Buffer) -> None:
    """The same of early files: one matrix, which has for each head of keys its query, key, values and gate."""
    num_heads, width = _sizes(graph.config).num_key_heads, sum(out.width for out in outs)
    together = graph.buffer("projected", width, x.rows)
    graph.tape.matmul(x, [graph.projection(name, together, x.width)])
    offset = 0
    for out in outs:
        size = out.width // num_heads
        graph.tape.copy_heads(out, together, num_heads, size, size, width // num_heads, x_offset=offset)
        offset += size


def _project_gates(graph: Graph, block: str, x: Buffer, decay: Buffer, beta: Buffer) -> None:
    """What decays and betas are made of: two matrices, or one that has for each head of keys betas, then decays."""
    if not graph.weights.has(f"{block}.ssm_ba.weight"):
        names = ((f"{block}.ssm_alpha", decay), (f"{block}.ssm_beta", beta))
        graph.tape.matmul(x, [graph.projection(name, out, x.width) for name, out in names])
        return
    num_heads = _sizes(graph.config).num_key_heads
    together = graph.buffer("betas_and_decays", 2 * beta.width, x.rows)
    graph.tape.matmul(x, [graph.projection(f"{block}.ssm_ba", together, x.width)])
    size = beta.width // num_heads
    graph.tape.copy_heads(beta, together, num_heads, size, size, 2 * size)
    graph.tape.copy_heads(decay, together, num_heads, size, size, 2 * size, x_offset=size)


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

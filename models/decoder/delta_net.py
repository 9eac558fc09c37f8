"""The gated delta net of Qwen3-Next, Qwen3.5 and OLMo Hybrid: convolutions and the gated delta rule.

Source: Gated Delta Networks (arXiv 2412.06464), and the published models' code.
"""

import math

import numpy as np

from localinfer.kernels.ops import Activation, Buffer, StateShape, delta_rule_state, short_convolution_state
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

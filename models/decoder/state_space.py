"""The blocks around a selective scan: Mamba 1 and 2 with a short convolution before it, and lightning attention.

Sources: Mamba (arXiv 2312.00752), section 3; Mamba-2 (arXiv 2405.21060), section 7; MiniMax-01 (arXiv 2501.08313),
section 2.2.
"""

from dataclasses import replace

import numpy as np

from localinfer.kernels.ops import (
    Activation,
    Buffer,
    Projection,
    StateShape,
    selective_scan_state,
    short_convolution_state,
)
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.graph import Graph, divided
from localinfer.models.decoder.recurrent_config import RecurrentConfig
from localinfer.types import FloatArray

_LIGHTNING_EPSILON = 1e-6
"""Of the norm behind lightning attention, whatever the model's is."""
_LIGHTNING_SHARE = 1e-5
"""What keeps the last layer's rates from 0, and a single layer's from a division by 0."""


def mamba_states(config: ModelConfig) -> list[StateShape]:
    """The states of one layer of Mamba 1: the convolution's and the scan's."""
    sizes = _sizes(config)
    scan = selective_scan_state(1, sizes.inner_size, sizes.num_states, 1, is_by_channel=True)
    return [short_convolution_state(sizes.inner_size, sizes.kernel_size), scan]


def write_mamba(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's Mamba 1 over x; the result still needs its output projection."""
    tape, sizes, block = graph.tape, _sizes(graph.config), f"blk.{layer}"
    inner, states, rank = sizes.inner_size, sizes.num_states, sizes.time_step_rank
    mixed, gate = (graph.buffer(name, inner, x.rows) for name in ("channels_in", "output_gate"))
    tape.matmul(x, _split(graph, f"{block}.ssm_in", x, mixed, gate))
    channels = _convolve(graph, block, mixed)

    dt_in, b, c = (graph.buffer(name, width, x.rows) for name, width in (("dt_in", rank), ("b", states), ("c", states)))
    tape.matmul(channels, _split(graph, f"{block}.ssm_x", channels, dt_in, b, c))
    for name, buffer in (("dt", dt_in), ("b", b), ("c", c)):
        if graph.weights.has(f"{block}.ssm_{name}_norm.weight"):
            graph.norm(buffer, buffer, f"{block}.ssm_{name}_norm")
        elif sizes.norms_inputs:
            epsilon = graph.config.norm_epsilon if sizes.inputs_epsilon is None else sizes.inputs_epsilon
            tape.rms_norm(buffer, buffer, None, epsilon)
    dt = graph.buffer("dt", inner, x.rows)
    tape.matmul(dt_in, [graph.projection(f"{block}.ssm_dt", dt, rank)])
    tape.activation(dt, dt, Activation.SOFTPLUS)

    rates = graph.weights.vector(f"{block}.ssm_a", (inner, states))
    skip = graph.weights.vector(f"{block}.ssm_d", (inner,))
    out = graph.buffer("scanned", inner, x.rows)
    state = tape.add_state(mamba_states(graph.config)[-1])
    tape.selective_scan(state, out, channels, dt, b, c, rates, skip, 1, inner, states)
    tape.gated_activation(out, gate, out, Activation.SILU)
    return out


def mamba2_states(config: ModelConfig) -> list[StateShape]:
    """The states of one layer of Mamba 2: the convolution's and the scan's."""
    sizes = _sizes(config)
    heads, groups, states = sizes.num_heads, sizes.num_groups, sizes.num_states
    scan = selective_scan_state(heads, sizes.inner_size // heads, states, groups, is_by_channel=False)
    return [short_convolution_state(sizes.inner_size + 2 * groups * states, sizes.kernel_size), scan]


def write_mamba2(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's Mamba 2 over x; the result still needs its output projection."""
    tape, sizes, block = graph.tape, _sizes(graph.config), f"blk.{layer}"
    inner, heads, states, groups = sizes.inner_size, sizes.num_heads, sizes.num_states, sizes.num_groups
    gate = graph.buffer("output_gate", inner, x.rows)
    mixed = graph.buffer("channels_in", inner + 2 * groups * states, x.rows)
    dt = graph.buffer("dt", heads, x.rows)
    *parts, steps = _split(graph, f"{block}.ssm_in", x, gate, mixed, dt)
    bias: FloatArray = graph.weights.vector(f"{block}.ssm_dt.bias", (heads,))
    if steps.bias is None:
        steps = replace(steps, bias=divided(bias, steps.scale))
    else:
        steps = replace(steps, bias=steps.bias + bias / np.float32(steps.scale))
    tape.matmul(x, [*parts, steps])
    # The channels, then b and c of every group.
    channels = _convolve(graph, block, mixed)
    tape.activation(dt, dt, Activation.SOFTPLUS)
    if sizes.least_step:
        least = np.full(heads, sizes.least_step, np.float32)
        tape.add_vector(dt, -least)
        tape.activation(dt, dt, Activation.RELU)
        tape.add_vector(dt, least)

    rates, skip = (graph.weights.vector(f"{block}.ssm_{name}", (heads, 1), (heads,)).reshape(-1) for name in "ad")
    out = graph.buffer("scanned", inner, x.rows)
    state = tape.add_state(mamba2_states(graph.config)[-1])
    tape.selective_scan(
        state, out, channels, dt, channels, channels, rates, skip, heads, inner // heads, states, groups,
        b_offset=inner, c_offset=inner + groups * states,
    )  # fmt: skip
    if not sizes.norms_before_gate:
        tape.gated_activation(out, gate, out, Activation.SILU)
    if graph.weights.has(f"{block}.ssm_norm.weight"):
        graph.norm(out, out, f"{block}.ssm_norm", inner // groups)
    if sizes.norms_before_gate:
        tape.gated_activation(out, gate, out, Activation.SILU)
    return out


def plamo_mamba_states(config: ModelConfig) -> list[StateShape]:
    """The states of one layer of PLaMo 2: the convolution's, of channels alone, and the scan's."""
    sizes = _sizes(config)
    scan = selective_scan_state(
        sizes.num_heads, sizes.inner_size // sizes.num_heads, sizes.num_states, 1, is_by_channel=False
    )
    return [short_convolution_state(sizes.inner_size, sizes.kernel_size), scan]


def write_plamo_mamba(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer of PLaMo 2 over x: Mamba 2's heads, whose steps, b and c are made of what was convolved, as in
    Mamba 1, and normed. The result still needs its output projection."""
    tape, sizes, block = graph.tape, _sizes(graph.config), f"blk.{layer}"
    inner, heads, states = sizes.inner_size, sizes.num_heads, sizes.num_states
    size = inner // heads
    together = graph.buffer("gates_and_channels", 2 * inner, x.rows)
    gate, mixed = (graph.buffer(name, inner, x.rows) for name in ("output_gate", "channels_in"))
    tape.matmul(x, [graph.projection(f"{block}.ssm_in", together, x.width)])
    # A head's gates lie before its channels.
    for index, part in enumerate((gate, mixed)):
        tape.copy_heads(part, together, heads, size, size, 2 * size, x_offset=index * size)
    channels = _convolve(graph, block, mixed)

    rank = graph.weights.shape(f"{block}.ssm_dt.weight")[-1]
    b, c, dt_in = (graph.buffer(name, width, x.rows) for name, width in (("b", states), ("c", states), ("dt_in", rank)))
    tape.matmul(channels, _split(graph, f"{block}.ssm_x", channels, b, c, dt_in))
    for name, buffer in (("b", b), ("c", c), ("dt", dt_in)):
        graph.norm(buffer, buffer, f"{block}.ssm_{name}_norm")
    dt = graph.buffer("dt", heads, x.rows)
    tape.matmul(dt_in, [graph.projection(f"{block}.ssm_dt", dt, rank)])
    tape.activation(dt, dt, Activation.SOFTPLUS)

    rates, skip = (graph.weights.vector(f"{block}.ssm_{name}", (heads, 1), (heads,)).reshape(-1) for name in "ad")
    out = graph.buffer("scanned", inner, x.rows)
    state = tape.add_state(plamo_mamba_states(graph.config)[-1])
    tape.selective_scan(state, out, channels, dt, b, c, rates, skip, heads, size, states)
    tape.gated_activation(out, gate, out, Activation.SILU)
    return out


def lightning_states(config: ModelConfig) -> list[StateShape]:
    """The state of one layer of lightning attention: keys times values of every head."""
    heads, size = _sizes(config).num_heads, _sizes(config).head_dim
    return [selective_scan_state(heads, size, size, heads, is_by_channel=False)]


def write_lightning(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's lightning attention over x, normed and gated; the result still needs its output projection.

    S = e^-rate S + k v^T; out = S^T q, with a rate for every head that falls from layer to layer.
    """
    tape, sizes, block = graph.tape, _sizes(graph.config), f"blk.{layer}"
    heads, size, width = sizes.num_heads, sizes.head_dim, sizes.inner_size
    together = graph.buffer("queries_keys_values", 3 * width, x.rows)
    gate = graph.buffer("output_gate", width, x.rows)
    tape.matmul(
        x,
        [
            graph.projection(f"{block}.{name}", out, x.width)
            for name, out in (("attn_qkv", together), ("attn_gate", gate))
        ],
    )
    tape.activation(together, together, Activation.SILU)
    # A head's query, key and value lie side by side.
    queries, keys, values = (graph.buffer(name, width, x.rows) for name in ("queries", "keys", "values"))
    for index, part in enumerate((queries, keys, values)):
        tape.copy_heads(part, together, heads, size, size, 3 * size, x_offset=index * size)
    mixed = graph.buffer("mixed", width, x.rows)
    tape.selective_scan(
        tape.add_state(lightning_states(graph.config)[0]), mixed, values, None, keys, queries,
        -_lightning_rates(graph.config, layer), np.zeros(heads, np.float32), heads, size, size, heads,
    )  # fmt: skip
    graph.norm(mixed, mixed, f"{block}.attn_norm_2", epsilon=_LIGHTNING_EPSILON)
    tape.multiply_sigmoid(mixed, mixed, gate)
    return mixed


def _lightning_rates(config: ModelConfig, layer: int) -> FloatArray:
    """Rates of decay of a layer's heads: ALiBi's slopes, by a share that falls to almost 0 in the last layer."""
    heads, last = _sizes(config).num_heads, config.num_layers - 1
    share = 1.0 - layer / (last + _LIGHTNING_SHARE) + _LIGHTNING_SHARE
    return (2.0 ** (-8.0 / heads * (np.arange(heads) + 1)) * share).astype(np.float32)


def _sizes(config: ModelConfig) -> RecurrentConfig:
    assert config.recurrent is not None, "the model has recurrent layers"
    return config.recurrent


def _split(graph: Graph, name: str, x: Buffer, *outs: Buffer) -> list[Projection]:
    """One matrix whose rows are those of several results."""
    num_rows = sum(out.width for out in outs)
    firsts = [sum(out.width for out in outs[:index]) for index in range(len(outs))]
    return [
        graph.projection(name, out, x.width, rows=(first, num_rows)) for out, first in zip(outs, firsts, strict=True)
    ]


def _convolve(graph: Graph, block: str, source: Buffer) -> Buffer:
    out = graph.buffer("channels", source.width, source.rows)
    weight = graph.weights.vector(f"{block}.ssm_conv1d.weight", (source.width, _sizes(graph.config).kernel_size))
    graph.short_convolution(out, source, weight, graph.bias(f"{block}.ssm_conv1d", source.width))
    return out

"""The blocks of Mamba 1 and 2: a short convolution and a selective scan, gated.

Sources: Mamba (arXiv 2312.00752), section 3; Mamba-2 (arXiv 2405.21060), section 7.
"""

from dataclasses import replace

import numpy as np

from localinfer.kernels.ops import Activation, Buffer, Projection, StateShape
from localinfer.kernels.recurrent_ops import selective_scan_state, short_convolution_state
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.graph import Graph, divided
from localinfer.models.decoder.recurrent_config import RecurrentConfig
from localinfer.types import FloatArray


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
            tape.rms_norm(buffer, buffer, None, graph.config.norm_epsilon)
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

    rates, skip = (graph.weights.vector(f"{block}.ssm_{name}", (heads, 1), (heads,)).reshape(-1) for name in "ad")
    out = graph.buffer("scanned", inner, x.rows)
    state = tape.add_state(mamba2_states(graph.config)[-1])
    tape.selective_scan(
        state, out, channels, dt, channels, channels, rates, skip, heads, inner // heads, states, groups,
        b_offset=inner, c_offset=inner + groups * states,
    )  # fmt: skip
    tape.gated_activation(out, gate, out, Activation.SILU)
    if graph.weights.has(f"{block}.ssm_norm.weight"):
        graph.norm(out, out, f"{block}.ssm_norm", inner // groups)
    return out


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

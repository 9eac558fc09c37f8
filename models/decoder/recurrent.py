"""Recurrent blocks in place of attention, and the layers of RWKV and Zamba 2.

Delta nets: the gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid (arXiv 2412.06464), and Kimi's with a decay per
key channel (arXiv 2510.26692). Selective scans: Mamba 1 and 2 (arXiv 2312.00752, section 3; 2405.21060, section 7), and
lightning attention (MiniMax-01, arXiv 2501.08313, section 2.2). Short convolutions of LFM2 (arXiv 2511.23404). RWKV-7
(arXiv 2503.14456). Details that no paper has follow the published models' code.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from localinfer.kernels.ops import (
    Activation,
    Buffer,
    Projection,
    StateShape,
    delta_rule_state,
    selective_scan_state,
    short_convolution_state,
    wkv_state,
)
from localinfer.models.decoder.architecture import Mixer
from localinfer.models.decoder.attention import attention_shape, write_mixer_output
from localinfer.models.decoder.block_config import RecurrentConfig
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.graph import Graph, divided, refuse
from localinfer.models.decoder.positions import RopeTables, powers
from localinfer.types import FloatArray

_LIGHTNING_EPSILON = 1e-6
"""Epsilon of the norm behind lightning attention, whatever the model's is."""
_LIGHTNING_SHARE = 1e-5
"""Keeps the last layer's rates from 0, and a single layer's from a division by 0."""
_LOW_RANK = (("f", "decay"), ("g", "output_gate"))
"""Gates of Kimi's delta attention that may come through fewer channels: a letter of their matrices, and a name."""
_MIXES = ("receptance", "decay", "keys", "values", "rate", "gate")
"""Uses of RWKV's shifted rows, in the order of `time_mix_lerp_fused`."""
_HEAD_NORM_EPSILON = 64e-5


def _sizes(config: ModelConfig) -> RecurrentConfig:
    assert config.recurrent is not None, "the model has recurrent layers"
    return config.recurrent


def _buffers(graph: Graph, x: Buffer, width: int, *names: str) -> list[Buffer]:
    return [graph.buffer(name, width, x.rows) for name in names]


def _convolve(graph: Graph, source: Buffer, name: str, weight: FloatArray, bias: FloatArray | None = None) -> Buffer:
    """Write a short convolution of a buffer into another one."""
    out = graph.buffer(name, source.width, source.rows)
    graph.short_convolution(out, source, weight, bias)
    return out


def _delta_net_states(config: ModelConfig) -> list[StateShape]:
    sizes = _sizes(config)
    keys, values = sizes.num_key_heads * sizes.head_dim, sizes.inner_size
    rule = delta_rule_state(sizes.num_heads, sizes.num_key_heads, sizes.head_dim, sizes.value_size, sizes.num_heads)
    return [*(short_convolution_state(width, sizes.kernel_size) for width in (keys, keys, values)), rule]


def _write_delta_net(graph: Graph, layer: int, x: Buffer) -> Buffer:
    tape, sizes, block = graph.tape, _sizes(graph.config), f"blk.{layer}"
    key_width, value_width = sizes.num_key_heads * sizes.head_dim, sizes.inner_size
    weight = _taps(graph, block, 2 * key_width + value_width, sizes.kernel_size)
    queries, keys = _buffers(graph, x, key_width, "queries_in", "keys_in")
    values, gate = _buffers(graph, x, value_width, "values_in", "output_gate")
    decay, beta = _buffers(graph, x, sizes.num_heads, "decay", "beta")
    if graph.weights.has(f"{block}.attn_q.weight"):
        names = zip(("attn_q", "attn_k", "attn_v", "attn_gate"), (queries, keys, values, gate), strict=True)
        tape.matmul(x, [graph.projection(f"{block}.{name}", out, x.width) for name, out in names])
    elif graph.weights.has(f"{block}.attn_qkv.weight"):
        mixed = graph.row_parts(f"{block}.attn_qkv", x, queries, keys, values)
        tape.matmul(x, [*mixed, graph.projection(f"{block}.attn_gate", gate, x.width)])
    else:
        # Early files have one matrix, with the query, key, values and gate of each head of keys.
        together = graph.product(f"{block}.ssm_in", x, "projected", 2 * (key_width + value_width))
        graph.cut_heads(together, sizes.num_key_heads, queries, keys, values, gate)
    if graph.weights.has(f"{block}.ssm_ba.weight"):
        together = graph.product(f"{block}.ssm_ba", x, "betas_and_decays", 2 * beta.width)
        graph.cut_heads(together, sizes.num_key_heads, beta, decay)
    else:
        gates = (("ssm_alpha", decay), ("ssm_beta", beta))
        tape.matmul(x, [graph.projection(f"{block}.{name}", out, x.width) for name, out in gates])

    queries = _convolve(graph, queries, "queries", weight[:key_width])
    keys = _convolve(graph, keys, "keys", weight[key_width : 2 * key_width])
    values = _convolve(graph, values, "values", weight[2 * key_width :])
    # With keys longer by a factor f, states are 1/f of what they were, and what is added to them has a factor f^2.
    key_length = math.sqrt(sizes.beta_scale)
    graph.unit_length(queries, sizes.head_dim, sizes.length_epsilon)
    graph.unit_length(keys, sizes.head_dim, sizes.length_epsilon, key_length)
    factor = graph.weights.vector(f"{block}.ssm_a", (sizes.num_heads,))
    bias = graph.weights.vector(f"{block}.ssm_dt.bias", (sizes.num_heads,))
    result = graph.buffer("mixed", value_width, x.rows)
    state = tape.add_state(_delta_net_states(graph.config)[-1])
    tape.gated_delta_rule(
        state, result, queries, keys, values, decay, beta, factor, bias, sizes.num_key_heads,
        scale=key_length / math.sqrt(sizes.head_dim), is_tiled=graph.architecture.tiles_value_heads,
    )  # fmt: skip
    epsilon = graph.architecture.mixer_norm_epsilon
    graph.norm(result, result, f"{block}.ssm_norm", sizes.value_size, epsilon=epsilon)
    tape.gated_activation(result, gate, result, Activation.SILU)
    return result


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


def _kimi_delta_states(config: ModelConfig) -> list[StateShape]:
    sizes = _sizes(config)
    convolution = short_convolution_state(sizes.inner_size, sizes.kernel_size)
    rule = delta_rule_state(sizes.num_heads, sizes.num_heads, sizes.head_dim, sizes.head_dim, sizes.inner_size)
    return [convolution] * 3 + [rule]


def _write_kimi_delta(graph: Graph, layer: int, x: Buffer) -> Buffer:
    tape, weights, sizes, block = graph.tape, graph.weights, _sizes(graph.config), f"blk.{layer}"
    width, names = sizes.inner_size, ("queries", "keys", "values")
    kernels = [
        weights.squeezed_vector(f"{block}.ssm_conv1d_{letter}.weight", width, sizes.kernel_size) for letter in "qkv"
    ]
    sources = _buffers(graph, x, width, *(f"{name}_in" for name in names))
    projections = [
        graph.projection(f"{block}.attn_{letter}", source, x.width)
        for letter, source in zip("qkv", sources, strict=True)
    ]
    beta = graph.buffer("beta", sizes.num_heads, x.rows)
    projections.append(graph.projection(f"{block}.ssm_beta", beta, x.width))
    decay_in, gate_in = (_gate_input(graph, f"{block}.ssm_{part}", name, x) for part, name in _LOW_RANK)
    tape.matmul(x, [*projections, decay_in, gate_in])
    decay, gate = (
        graph.product(f"{block}.ssm_{part}_b", between.out, name, width)
        if weights.has(f"{block}.ssm_{part}_b.weight")
        else between.out
        for (part, name), between in zip(_LOW_RANK, (decay_in, gate_in), strict=True)
    )
    queries, keys, values = (
        _convolve(graph, source, name, kernel) for source, name, kernel in zip(sources, names, kernels, strict=True)
    )
    for buffer in (queries, keys):
        graph.unit_length(buffer, sizes.head_dim, sizes.length_epsilon)
    factor = weights.squeezed_vector(f"{block}.ssm_a", sizes.num_heads)
    bias = weights.vector(f"{block}.ssm_dt.bias", (width,))
    mixed = graph.buffer("mixed", width, x.rows)
    state = tape.add_state(_kimi_delta_states(graph.config)[-1])
    tape.gated_delta_rule(
        state, mixed, queries, keys, values, decay, beta, factor, bias, sizes.num_heads,
        scale=1.0 / math.sqrt(sizes.head_dim), lower_bound=sizes.gate_lower_bound,
    )  # fmt: skip
    graph.norm(mixed, mixed, f"{block}.ssm_norm", sizes.head_dim)
    tape.multiply_sigmoid(mixed, mixed, gate)
    return mixed


def _gate_input(graph: Graph, name: str, out_name: str, x: Buffer) -> Projection:
    """The product with the first of the one or two matrices from x to a gate."""
    has_second = graph.weights.has(f"{name}_b.weight")
    width = graph.weights.shape(f"{name}_a.weight")[0] if has_second else _sizes(graph.config).inner_size
    out = graph.buffer(f"{out_name}_rank" if has_second else out_name, width, x.rows)
    return graph.projection(f"{name}_a", out, x.width)


def _mamba_states(config: ModelConfig) -> list[StateShape]:
    sizes = _sizes(config)
    scan = selective_scan_state(1, sizes.inner_size, sizes.num_states, 1, is_by_channel=True)
    return [short_convolution_state(sizes.inner_size, sizes.kernel_size), scan]


def _write_mamba(graph: Graph, layer: int, x: Buffer) -> Buffer:
    tape, sizes, block = graph.tape, _sizes(graph.config), f"blk.{layer}"
    inner, states, rank = sizes.inner_size, sizes.num_states, sizes.time_step_rank
    mixed, gate = _buffers(graph, x, inner, "channels_in", "output_gate")
    tape.matmul(x, graph.row_parts(f"{block}.ssm_in", x, mixed, gate))
    channels = _mamba_channels(graph, block, mixed)

    dt_in, b, c = (graph.buffer(name, width, x.rows) for name, width in (("dt_in", rank), ("b", states), ("c", states)))
    tape.matmul(channels, graph.row_parts(f"{block}.ssm_x", channels, dt_in, b, c))
    for name, buffer in (("dt", dt_in), ("b", b), ("c", c)):
        if graph.weights.has(f"{block}.ssm_{name}_norm.weight"):
            graph.norm(buffer, buffer, f"{block}.ssm_{name}_norm")
        elif sizes.norms_inputs:
            epsilon = graph.config.norm_epsilon if sizes.inputs_epsilon is None else sizes.inputs_epsilon
            tape.rms_norm(buffer, buffer, None, epsilon)
    dt = graph.product(f"{block}.ssm_dt", dt_in, "dt", inner)
    tape.activation(dt, dt, Activation.SOFTPLUS)

    rates = graph.weights.vector(f"{block}.ssm_a", (inner, states))
    skip = graph.weights.vector(f"{block}.ssm_d", (inner,))
    out = graph.buffer("scanned", inner, x.rows)
    state = tape.add_state(_mamba_states(graph.config)[-1])
    tape.selective_scan(state, out, channels, dt, b, c, rates, skip, 1, inner, states)
    tape.gated_activation(out, gate, out, Activation.SILU)
    return out


def _mamba_channels(graph: Graph, block: str, source: Buffer) -> Buffer:
    weight = graph.weights.vector(f"{block}.ssm_conv1d.weight", (source.width, _sizes(graph.config).kernel_size))
    return _convolve(graph, source, "channels", weight, graph.bias(f"{block}.ssm_conv1d", source.width))


def _mamba2_rates(graph: Graph, block: str) -> list[FloatArray]:
    """Decay rates and skip factors of heads, float32[heads] each."""
    heads = _sizes(graph.config).num_heads
    return [graph.weights.vector(f"{block}.ssm_{name}", (heads, 1), (heads,)).reshape(-1) for name in "ad"]


def _mamba2_states(config: ModelConfig) -> list[StateShape]:
    sizes = _sizes(config)
    heads, groups, states = sizes.num_heads, sizes.num_groups, sizes.num_states
    scan = selective_scan_state(heads, sizes.inner_size // heads, states, groups, is_by_channel=False)
    return [short_convolution_state(sizes.inner_size + 2 * groups * states, sizes.kernel_size), scan]


def _write_mamba2(graph: Graph, layer: int, x: Buffer) -> Buffer:
    tape, sizes, block = graph.tape, _sizes(graph.config), f"blk.{layer}"
    inner, heads, states, groups = sizes.inner_size, sizes.num_heads, sizes.num_states, sizes.num_groups
    gate = graph.buffer("output_gate", inner, x.rows)
    mixed = graph.buffer("channels_in", inner + 2 * groups * states, x.rows)
    dt = graph.buffer("dt", heads, x.rows)
    *parts, steps = graph.row_parts(f"{block}.ssm_in", x, gate, mixed, dt)
    bias: FloatArray = graph.weights.vector(f"{block}.ssm_dt.bias", (heads,))
    if steps.bias is None:
        steps = replace(steps, bias=divided(bias, steps.scale))
    else:
        steps = replace(steps, bias=steps.bias + bias / np.float32(steps.scale))
    tape.matmul(x, [*parts, steps])
    # The channels, then b and c of every group.
    channels = _mamba_channels(graph, block, mixed)
    tape.activation(dt, dt, Activation.SOFTPLUS)
    if sizes.least_step:
        least = np.full(heads, sizes.least_step, np.float32)
        tape.add_vector(dt, -least)
        tape.activation(dt, dt, Activation.RELU)
        tape.add_vector(dt, least)

    rates, skip = _mamba2_rates(graph, block)
    out = graph.buffer("scanned", inner, x.rows)
    state = tape.add_state(_mamba2_states(graph.config)[-1])
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


def _plamo_mamba_states(config: ModelConfig) -> list[StateShape]:
    sizes = _sizes(config)
    heads = sizes.num_heads
    scan = selective_scan_state(heads, sizes.inner_size // heads, sizes.num_states, 1, is_by_channel=False)
    return [short_convolution_state(sizes.inner_size, sizes.kernel_size), scan]


def _write_plamo_mamba(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer of PLaMo 2 over x: Mamba 2's heads, whose steps, b and c are made of what was convolved, as in
    Mamba 1, and normed."""
    tape, sizes, block = graph.tape, _sizes(graph.config), f"blk.{layer}"
    inner, heads, states = sizes.inner_size, sizes.num_heads, sizes.num_states
    together = graph.buffer("gates_and_channels", 2 * inner, x.rows)
    gate, mixed = _buffers(graph, x, inner, "output_gate", "channels_in")
    tape.matmul(x, [graph.projection(f"{block}.ssm_in", together, x.width)])
    graph.cut_heads(together, heads, gate, mixed)
    channels = _mamba_channels(graph, block, mixed)

    rank = graph.weights.shape(f"{block}.ssm_dt.weight")[-1]
    b, c, dt_in = (graph.buffer(name, width, x.rows) for name, width in (("b", states), ("c", states), ("dt_in", rank)))
    tape.matmul(channels, graph.row_parts(f"{block}.ssm_x", channels, b, c, dt_in))
    for name, buffer in (("b", b), ("c", c), ("dt", dt_in)):
        graph.norm(buffer, buffer, f"{block}.ssm_{name}_norm")
    dt = graph.product(f"{block}.ssm_dt", dt_in, "dt", heads)
    tape.activation(dt, dt, Activation.SOFTPLUS)

    rates, skip = _mamba2_rates(graph, block)
    out = graph.buffer("scanned", inner, x.rows)
    state = tape.add_state(_plamo_mamba_states(graph.config)[-1])
    tape.selective_scan(state, out, channels, dt, b, c, rates, skip, heads, inner // heads, states)
    tape.gated_activation(out, gate, out, Activation.SILU)
    return out


def _lightning_states(config: ModelConfig) -> list[StateShape]:
    heads, size = _sizes(config).num_heads, _sizes(config).head_dim
    return [selective_scan_state(heads, size, size, heads, is_by_channel=False)]


def _write_lightning(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's lightning attention over x, normed and gated.

    S = e^-rate S + k v^T; out = S^T q, with a rate for every head that falls from layer to layer.
    """
    tape, sizes, block = graph.tape, _sizes(graph.config), f"blk.{layer}"
    heads, size, width = sizes.num_heads, sizes.head_dim, sizes.inner_size
    together = graph.buffer("queries_keys_values", 3 * width, x.rows)
    gate = graph.buffer("output_gate", width, x.rows)
    projections = [
        graph.projection(f"{block}.{name}", out, x.width) for name, out in (("attn_qkv", together), ("attn_gate", gate))
    ]
    tape.matmul(x, projections)
    tape.activation(together, together, Activation.SILU)
    queries, keys, values = _buffers(graph, x, width, "queries", "keys", "values")
    graph.cut_heads(together, heads, queries, keys, values)
    mixed = graph.buffer("mixed", width, x.rows)
    tape.selective_scan(
        tape.add_state(_lightning_states(graph.config)[0]), mixed, values, None, keys, queries,
        -_lightning_rates(graph.config, layer), np.zeros(heads, np.float32), heads, size, size, heads,
    )  # fmt: skip
    graph.norm(mixed, mixed, f"{block}.attn_norm_2", epsilon=_LIGHTNING_EPSILON)
    tape.multiply_sigmoid(mixed, mixed, gate)
    return mixed


def _lightning_rates(config: ModelConfig, layer: int) -> FloatArray:
    """Rates of decay of a layer's heads: ALiBi's slopes, by a share that falls to almost 0 in the last layer."""
    heads, last = _sizes(config).num_heads, config.num_layers - 1
    share = 1.0 - layer / (last + _LIGHTNING_SHARE) + _LIGHTNING_SHARE
    return (powers(2.0, [-8.0 / heads * (head + 1) for head in range(heads)]) * share).astype(np.float32)


def _short_convolution_states(config: ModelConfig) -> list[StateShape]:
    return [short_convolution_state(config.hidden_size, _sizes(config).kernel_size)]


def _write_short_convolution(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's c * convolution(b * y) over x; b, c and y are the thirds of one projection."""
    config, tape = graph.config, graph.tape
    shape = config.hidden_size, _sizes(config).kernel_size
    weight = graph.weights.vector(f"blk.{layer}.shortconv.conv.weight", shape)
    before, behind, values = _buffers(
        graph, x, shape[0], *(f"convolution_{part}" for part in ("gate", "out_gate", "x"))
    )
    tape.matmul(x, graph.row_parts(f"blk.{layer}.shortconv.in_proj", x, before, behind, values))
    tape.multiply(values, before, values)
    convolved = graph.buffer("convolved", values.width, x.rows)
    if config.is_encoder:
        tape.centred_convolution(convolved, values, weight)
    else:
        graph.short_convolution(convolved, values, weight, has_silu=False)
    tape.multiply(convolved, behind, convolved)
    return convolved


def _rwkv_states(config: ModelConfig) -> list[StateShape]:
    """The last row before each mix, one for each use, and the recurrence's state."""
    shift = short_convolution_state(config.hidden_size, 2)
    return [shift] * len(_MIXES) + [wkv_state(config.hidden_size, _sizes(config).head_dim), shift]


def write_rwkv_layer(graph: Graph, layer: int, hidden: Buffer, *, is_last: bool) -> Buffer:
    """Write one layer; returns `hidden`, or in the last layer its output rows only."""
    block = f"blk.{layer}"
    x = graph.block_norm(layer, "attn_norm", hidden, "time_mix_input")
    mixed = _write_time_mix(graph, layer, x)
    graph.add_branch(hidden, mixed, f"{block}.time_mix_output", None)
    x = graph.block_norm(layer, "attn_norm_2", hidden, "channel_mix_input")
    lerp = graph.weights.squeezed_vector(f"{block}.channel_mix_lerp_k.weight", hidden.width)
    shifted = _shifted(graph, x, lerp, "shifted_keys")
    if is_last:
        hidden, shifted = graph.select_output(hidden), graph.select_output(shifted)
    size = graph.weights.shape(f"{block}.channel_mix_key.weight")[0]
    keys = graph.product(f"{block}.channel_mix_key", shifted, "channel_mix_keys", size)
    graph.tape.activation(keys, keys, Activation.RELU_SQUARED)
    graph.add_branch(hidden, keys, f"{block}.channel_mix_value", None)
    return hidden


def _write_time_mix(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's recurrence over x, gated."""
    tape, weights, sizes = graph.tape, graph.weights, _sizes(graph.config)
    name, width = f"blk.{layer}.time_mix", x.width
    lerps = weights.squeezed_vector(f"{name}_lerp_fused.weight", len(_MIXES), width)
    shifted = {use: _shifted(graph, x, lerp, f"shifted_{use}") for use, lerp in zip(_MIXES, lerps, strict=True)}
    receptance = graph.product(f"{name}_receptance", shifted["receptance"], "receptance", width)
    keys = graph.product(f"{name}_key", shifted["keys"], "keys", width)
    # The first layer's values are mixed into those of all others.
    values = graph.product(f"{name}_value", shifted["values"], "values" if layer else "first_values", width)
    if not layer:
        graph.carried.append(values)
    decay = _low_rank(graph, name, "w", shifted["decay"], "decay", Activation.TANH)
    rate = _low_rank(graph, name, "a", shifted["rate"], "rate", None)
    gate = _low_rank(graph, name, "g", shifted["gate"], "output_gate", Activation.SIGMOID)
    if layer:
        share = _low_rank(graph, name, "v", shifted["values"], "value_share", None)
        difference = graph.buffer("value_difference", width, x.rows)
        tape.add(difference, graph.buffer("first_values", width, x.rows), values, -1.0)
        tape.multiply_sigmoid(difference, difference, share)
        tape.add(values, values, difference)
    mixed, bonus = _buffers(graph, x, width, "mixed", "bonus")
    key_scale, rate_scale, bonus_scale = (
        weights.squeezed_vector(f"{name}_{part}.weight", width) for part in ("k_k", "k_a", "r_k")
    )
    state = tape.add_state(wkv_state(width, sizes.head_dim))
    tape.wkv(
        state, mixed, bonus, receptance, decay, keys, values, rate, key_scale, rate_scale, bonus_scale, sizes.head_dim
    )
    norm, bias = (weights.squeezed_vector(f"{name}_ln.{part}", width) for part in ("weight", "bias"))
    tape.layer_norm(mixed, mixed, norm, bias, _HEAD_NORM_EPSILON, sizes.head_dim)
    tape.add(mixed, mixed, bonus)
    tape.multiply(mixed, mixed, gate)
    return mixed


def _shifted(graph: Graph, x: Buffer, share: FloatArray, name: str) -> Buffer:
    """(1 - share) of every row and share of the one before, which is 0 before the first."""
    out = graph.buffer(name, x.width, x.rows)
    graph.short_convolution(out, x, np.stack([share, np.float32(1) - share], axis=1), has_silu=False)
    return out


def _low_rank(graph: Graph, name: str, letter: str, x: Buffer, out_name: str, activation: Activation | None) -> Buffer:
    """A projection of x through few channels, with an activation between, and a bias if there is one."""
    rank = graph.weights.shape(f"{name}_{letter}1.weight")[0]
    between = graph.product(f"{name}_{letter}1", x, f"{out_name}_rank", rank)
    if activation is not None:
        graph.tape.activation(between, between, activation)
    out = graph.buffer(out_name, x.width, x.rows)
    weight = graph.weights.linear(f"{name}_{letter}2.weight", out.width, rank)
    bias = None
    if graph.weights.has(f"{name}_{letter}0.weight"):
        bias = graph.weights.squeezed_vector(f"{name}_{letter}0.weight", out.width)
    graph.tape.matmul(between, [Projection(weight, out, bias)])
    return out


@dataclass(frozen=True)
class RecurrentMixer:
    """A kind of recurrent block."""

    write: Callable[[Graph, int, Buffer], Buffer]
    """Writes a layer's block over its input, and returns what still needs the output projection."""
    states: Callable[[ModelConfig], Sequence[StateShape]]
    """States that its ops keep per sequence in one layer, in their order."""


RECURRENT_MIXERS = {
    Mixer.WKV: RecurrentMixer(_write_time_mix, _rwkv_states),
    Mixer.KIMI_DELTA: RecurrentMixer(_write_kimi_delta, _kimi_delta_states),
    Mixer.DELTA_NET: RecurrentMixer(_write_delta_net, _delta_net_states),
    Mixer.MAMBA: RecurrentMixer(_write_mamba, _mamba_states),
    Mixer.MAMBA2: RecurrentMixer(_write_mamba2, _mamba2_states),
    Mixer.PLAMO_MAMBA: RecurrentMixer(_write_plamo_mamba, _plamo_mamba_states),
    Mixer.LIGHTNING: RecurrentMixer(_write_lightning, _lightning_states),
    Mixer.SHORT_CONVOLUTION: RecurrentMixer(_write_short_convolution, _short_convolution_states),
    Mixer.CENTRED_CONVOLUTION: RecurrentMixer(_write_short_convolution, lambda config: []),
}


def write_embedding_pair(graph: Graph, hidden: Buffer) -> None:
    """Write the half of what Zamba 2's shared blocks read that is the same in all layers."""
    pair = _zamba_pair(graph, hidden)
    graph.tape.copy_heads(pair, hidden, 1, hidden.width, pair.width, hidden.width, out_offset=hidden.width)
    graph.carried.append(pair)


def write_zamba2_layer(graph: Graph, layer: int, hidden: Buffer, tables: RopeTables, *, selects_output: bool) -> Buffer:
    """Write one layer of Zamba 2: Mamba 2, and before it in some layers a block of attention and feed-forward that
    layers share. Returns `hidden` itself, or with selects_output the output rows only.

    A shared block reads the residual stream beside the embedding. The layers that use it have low-rank additions to its
    matrices of their own, whose tensors have the use's number among all uses, and a matrix for its result, which is
    added to what Mamba reads and not to the stream (arXiv 2411.15242, and the published model's code).
    """
    x = hidden
    if graph.config.num_kv_heads[layer]:
        x = graph.buffer("mamba_input", hidden.width, hidden.rows)
        shared = _write_shared_block(graph, layer, hidden, tables)
        graph.tape.matmul(shared, [graph.projection(f"blk.{layer}.shared_out", x, shared.width, residual=hidden)])
    x = graph.block_norm(layer, "attn_norm", x, "mixer_input")
    mixed = _write_mamba2(graph, layer, x)
    if selects_output:
        hidden, mixed = graph.select_output(hidden), graph.select_output(mixed)
    write_mixer_output(graph, layer, hidden, mixed, Mixer.MAMBA2)
    return hidden


def _block_of_layer(graph: Graph, layer: int) -> tuple[int, int]:
    """The number of a layer's use of a shared block, and the layer that has the block's tensors: the first that uses
    it, or each in a model that shares nothing (without tied embeddings)."""
    num_blocks = _sizes(graph.config).num_shared_blocks
    layers = [index for index, count in enumerate(graph.config.num_kv_heads) if count]
    use = layers.index(layer)
    is_own = not num_blocks or graph.weights.has(f"blk.{layer}.shared_attn_q.weight")
    return use, layer if is_own else layers[use % num_blocks]


def _write_shared_block(graph: Graph, layer: int, hidden: Buffer, tables: RopeTables) -> Buffer:
    """Write a shared block over the residual stream and the embedding; the result has no residual connection."""
    config, tape = graph.config, graph.tape
    use, owner = _block_of_layer(graph, layer)
    block, width = f"blk.{owner}.shared", hidden.width
    pair = _zamba_pair(graph, hidden)
    tape.copy_heads(pair, hidden, 1, width, pair.width, width)
    x = graph.buffer("attention_input", pair.width, hidden.rows)
    graph.norm(x, pair, f"{block}_attn_norm")
    queries = graph.buffer("queries", config.num_heads[layer] * config.head_dim, x.rows)
    keys, values = _buffers(graph, x, config.num_kv_heads[layer] * config.head_dim, "keys", "values")
    for letter, out in (("q", queries), ("k", keys), ("v", values)):
        _project_adapted(graph, f"{block}_attn_{letter}", use, x, out)
    if config.rope.is_used:
        for buffer in (queries, keys):
            tape.rope(buffer, tables.for_layer(windowed=False), config.head_dim)
    tape.store_kv(layer, keys, values)
    attended = graph.buffer("attended", queries.width, x.rows)
    tape.attention(attended, queries, layer, attention_shape(graph, layer, 0, 0), None)
    branch = graph.product(f"{block}_attn_output", attended, "branch", width)
    graph.norm(branch, branch, f"{block}_ffn_norm")

    size = graph.weights.shape(f"{block}_ffn_down.weight")[-1]
    together, gate, up = (graph.buffer(name, n * size, x.rows) for name, n in (("gate_up", 2), ("gate", 1), ("up", 1)))
    _project_adapted(graph, f"{block}_ffn_gate_up", use, branch, together)
    graph.cut_heads(together, 1, gate, up)
    tape.gated_activation(up, gate, up, Activation.GELU_ERF)
    return graph.product(f"{block}_ffn_down", up, "shared_result", width)


def _project_adapted(graph: Graph, name: str, use: int, x: Buffer, out: Buffer) -> None:
    """The product with a matrix of a shared block, and with the low-rank addition that a use of it may have."""
    graph.tape.matmul(x, [graph.projection(name, out, x.width)])
    first, second = f"{name}_adapter_a.{use}", f"{name}_adapter_b.{use}"
    if graph.weights.has(f"{first}.weight"):
        between = graph.product(first, x, "adapter", graph.weights.shape(f"{first}.weight")[0])
        graph.tape.matmul(between, [graph.projection(second, out, between.width, residual=out)])


def _zamba_pair(graph: Graph, hidden: Buffer) -> Buffer:
    """The residual stream and the embedding, side by side."""
    return graph.buffer("stream_and_embedding", 2 * hidden.width, hidden.rows)

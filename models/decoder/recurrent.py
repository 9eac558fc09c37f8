"""Recurrent blocks in place of attention: LFM2's short convolution, RWKV's, and the table of all kinds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from localinfer.kernels.ops import Activation, Buffer, Projection, StateShape, short_convolution_state, wkv_state
from localinfer.models.decoder.architecture import Mixer
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.delta_net import delta_net_states, kimi_delta_states, write_delta_net, write_kimi_delta
from localinfer.models.decoder.graph import Graph
from localinfer.models.decoder.state_space import (
    lightning_states,
    mamba2_states,
    mamba_states,
    plamo_mamba_states,
    write_lightning,
    write_mamba,
    write_mamba2,
    write_plamo_mamba,
)
from localinfer.types import FloatArray


def short_convolution_states(config: ModelConfig) -> list[StateShape]:
    """The states of one layer."""
    assert config.recurrent is not None, "the model has recurrent layers"
    return [short_convolution_state(config.hidden_size, config.recurrent.kernel_size)]


def write_short_convolution(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's c * convolution(b * y) over x, which still needs its output projection.

    b, c and y are the thirds of one projection. Source: LFM2 (arXiv 2511.23404), section 2.
    """
    config, tape = graph.config, graph.tape
    assert config.recurrent is not None, "the model has recurrent layers"
    width, name = config.hidden_size, f"blk.{layer}.shortconv.in_proj"
    weight = graph.weights.vector(f"blk.{layer}.shortconv.conv.weight", (width, config.recurrent.kernel_size))
    before, behind, values = (graph.buffer(f"convolution_{part}", width, x.rows) for part in ("gate", "out_gate", "x"))
    thirds = [
        graph.projection(name, out, x.width, rows=(index * width, 3 * width))
        for index, out in enumerate((before, behind, values))
    ]
    tape.matmul(x, thirds)
    tape.multiply(values, before, values)
    convolved = graph.buffer("convolved", width, x.rows)
    graph.short_convolution(convolved, values, weight, has_silu=False)
    tape.multiply(convolved, behind, convolved)
    return convolved


_MIXES = ("receptance", "decay", "keys", "values", "rate", "gate")
"""What the shifted rows of time mix are for, in the order of `time_mix_lerp_fused`."""
_HEAD_NORM_EPSILON = 64e-5


def rwkv_states(config: ModelConfig) -> list[StateShape]:
    """The states of one layer: the last row before each mix, one for each use, and the recurrence's."""
    assert config.recurrent is not None, "the model has recurrent layers"
    shift = short_convolution_state(config.hidden_size, 2)
    return [shift] * len(_MIXES) + [wkv_state(config.hidden_size, config.recurrent.head_dim), shift]


def write_rwkv_layer(graph: Graph, layer: int, hidden: Buffer, *, is_last: bool) -> Buffer:
    """Write one layer; returns `hidden`, or in the last layer its output rows only."""
    block, tape = f"blk.{layer}", graph.tape
    x = graph.block_norm(layer, "attn_norm", hidden, "time_mix_input")
    mixed = write_time_mix(graph, layer, x)
    graph.add_branch(hidden, mixed, f"{block}.time_mix_output", None)
    x = graph.block_norm(layer, "attn_norm_2", hidden, "channel_mix_input")
    lerp = graph.weights.squeezed_vector(f"{block}.channel_mix_lerp_k.weight", hidden.width)
    shifted = _shifted(graph, x, lerp, "shifted_keys")
    if is_last:
        hidden, shifted = graph.select_output(hidden), graph.select_output(shifted)
    size = graph.weights.shape(f"{block}.channel_mix_key.weight")[0]
    keys = graph.buffer("channel_mix_keys", size, hidden.rows)
    tape.matmul(shifted, [graph.projection(f"{block}.channel_mix_key", keys, shifted.width)])
    tape.activation(keys, keys, Activation.RELU_SQUARED)
    graph.add_branch(hidden, keys, f"{block}.channel_mix_value", None)
    return hidden


def write_time_mix(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """Write one layer's recurrence over x, gated; the result still needs its output projection."""
    tape, weights, sizes = graph.tape, graph.weights, graph.config.recurrent
    assert sizes is not None, "the model has recurrent layers"
    name, width = f"blk.{layer}.time_mix", x.width
    lerps = weights.squeezed_vector(f"{name}_lerp_fused.weight", len(_MIXES), width)
    shifted = {use: _shifted(graph, x, lerp, f"shifted_{use}") for use, lerp in zip(_MIXES, lerps, strict=True)}
    receptance = _projected(graph, f"{name}_receptance", shifted["receptance"], "receptance")
    keys = _projected(graph, f"{name}_key", shifted["keys"], "keys")
    # The first layer's values are mixed into those of all others.
    values = _projected(graph, f"{name}_value", shifted["values"], "values" if layer else "first_values")
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
    mixed, bonus = graph.buffer("mixed", width, x.rows), graph.buffer("bonus", width, x.rows)
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


def _projected(graph: Graph, weight_name: str, x: Buffer, name: str) -> Buffer:
    out = graph.buffer(name, x.width, x.rows)
    graph.tape.matmul(x, [graph.projection(weight_name, out, x.width)])
    return out


def _low_rank(graph: Graph, name: str, letter: str, x: Buffer, out_name: str, activation: Activation | None) -> Buffer:
    """A projection of x through few channels, with an activation between, and a bias if there is one."""
    rank = graph.weights.shape(f"{name}_{letter}1.weight")[0]
    between = graph.buffer(f"{out_name}_rank", rank, x.rows)
    graph.tape.matmul(x, [graph.projection(f"{name}_{letter}1", between, x.width)])
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
    """A kind of recurrent block.

    write: writes one layer's over its input, and returns what still needs the output projection. states: what its ops
    keep per sequence in one layer, in their order.
    """

    write: Callable[[Graph, int, Buffer], Buffer]
    states: Callable[[ModelConfig], Sequence[StateShape]]


RECURRENT_MIXERS = {
    Mixer.WKV: RecurrentMixer(write_time_mix, rwkv_states),
    Mixer.KIMI_DELTA: RecurrentMixer(write_kimi_delta, kimi_delta_states),
    Mixer.DELTA_NET: RecurrentMixer(write_delta_net, delta_net_states),
    Mixer.MAMBA: RecurrentMixer(write_mamba, mamba_states),
    Mixer.MAMBA2: RecurrentMixer(write_mamba2, mamba2_states),
    Mixer.PLAMO_MAMBA: RecurrentMixer(write_plamo_mamba, plamo_mamba_states),
    Mixer.LIGHTNING: RecurrentMixer(write_lightning, lightning_states),
    Mixer.SHORT_CONVOLUTION: RecurrentMixer(write_short_convolution, short_convolution_states),
}

"""The recurrent blocks of a layer, in place of attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localinfer.kernels.ops import Buffer, StateShape
from localinfer.models.decoder.architecture import Mixer
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.delta_net import delta_net_states, write_delta_net
from localinfer.models.decoder.graph import Graph
from localinfer.models.decoder.kimi_delta import kimi_delta_states, write_kimi_delta
from localinfer.models.decoder.rwkv import rwkv_states, write_time_mix
from localinfer.models.decoder.short_convolution import short_convolution_states, write_short_convolution
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

"""Families of Hugging Face folders whose towers hear: GGUF's names of their tensors, and the encoder's configuration.

A family is a record like those that see. Positions that a class computes are tensors here, as mmproj files store them.
Source: the models' classes in transformers 5.24.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from localinfer.models.checkpoint.changes import CONVOLUTION, FIRST_HALF, SECOND_HALF, Computed, Moved
from localinfer.models.media.folder_settings import PartSettings, ProcessorSettings
from localinfer.models.media.folder_tower_names import block_names
from localinfer.models.media.folder_towers import activation
from localinfer.models.media.mmproj import FOLDER_SOUND_PROJECTORS, SOUND_PROJECTORS, QueryConfig, SoundConfig
from localinfer.models.media.tower_file import Targets, To, TowerFile, TowerNames
from localinfer.types import FloatArray


@dataclass(frozen=True)
class SoundTowerFamily:
    """Reading of a family's tower that hears."""

    projector: str
    """Kind of projector, as an mmproj file would name it."""
    names: TowerNames
    """Names of its tensors."""
    defaults: Mapping[str, Any]
    """Settings of the tower's class."""
    fields: Callable[[ProcessorSettings, PartSettings], dict[str, Any]] = lambda settings, audio: {}
    """Fields of the configuration that are not as the settings that all towers have say."""
    heads: str = "encoder_attention_heads"
    """Setting with the number of heads."""
    width: str = ""
    """Setting with the width of positions that the class computes; empty where the tensors have them."""
    part: str = "audio_config"
    """Record of config.json with the settings of the tower."""
    frame: str = "num_mel_bins"
    """Setting with the values of a frame."""
    has_blocks: bool = True
    """False if frames are projected as they are."""


def sound_settings(settings: ProcessorSettings, family: SoundTowerFamily) -> PartSettings:
    """config.json's record of the tower, over the values of its class."""
    return settings.part(family.part).over(family.defaults)


def made_positions(family: SoundTowerFamily, audio: PartSettings) -> dict[str, FloatArray]:
    """Tensors that the class computes: sines, then cosines, of falling frequencies."""
    if not family.width:
        return {}
    count, half = audio.integer("max_source_positions"), audio.integer(family.width, low=4) // 2
    frequencies = np.exp(-np.log(10000.0) / (half - 1) * np.arange(half))
    turns = np.arange(count)[:, None] * frequencies
    return {"a.position_embd.weight": np.concatenate([np.sin(turns), np.cos(turns)], axis=1).astype(np.float32)}


def sound_config(family: SoundTowerFamily, settings: ProcessorSettings, file: TowerFile) -> SoundConfig:
    """The configuration of a folder's tower.

    Raises: CorruptFileError naming a setting or tensor, UnsupportedFormatError for what does not run.
    """
    audio = sound_settings(settings, family)
    for key, wanted in (("activation_function", "gelu"), ("projector_hidden_act", "gelu"), ("scale_embedding", False)):
        if audio.get(key) not in (wanted, None):
            raise audio.unsupported(key, repr(wanted))
    num_heads, num_rows, hidden_size, intermediate_size = 1, 1, 1, 1
    if family.has_blocks:
        num_heads, (num_rows, hidden_size) = audio.integer(family.heads), file.tensor("a.blk.0.attn_q.weight").shape
        intermediate_size = file.tensor("a.blk.0.ffn_up.weight").shape[0]
    if num_rows % num_heads:
        raise audio.wrong(family.heads, f"a divisor of {num_rows}")
    config = SoundConfig(
        projector=family.projector,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=file.count_blocks("a.blk."),
        num_heads=num_heads,
        norm_epsilon=1e-5,
        merge=1,
        output_size=file.tensor((SOUND_PROJECTORS | FOLDER_SOUND_PROJECTORS)[family.projector].output).shape[0],
        num_deepstack=0,
        num_mel_bins=audio.integer(family.frame),
    )
    return replace(config, **family.fields(settings, audio))


def _voxtral_fields(settings: ProcessorSettings, audio: PartSettings) -> dict[str, Any]:
    joined, rest = divmod(audio.integer("intermediate_size"), audio.integer("hidden_size"))
    if rest or not joined:
        raise audio.wrong("intermediate_size", "a multiple of hidden_size")
    return {"merge": joined, "joins_pairs": False}


def _qwen2_omni_fields(settings: ProcessorSettings, audio: PartSettings) -> dict[str, Any]:
    return {"piece_frames": 2 * audio.integer("n_window")}


def _qwen3_omni_fields(settings: ProcessorSettings, audio: PartSettings) -> dict[str, Any]:
    piece = 2 * audio.integer("n_window")
    return {"piece_frames": piece, "attended_pieces": max(1, audio.integer("n_window_infer") // piece)}


def _gemma4_fields(settings: ProcessorSettings, audio: PartSettings) -> dict[str, Any]:
    for key, wanted in (
        ("hidden_act", "silu"),
        ("attention_chunk_size", 12),
        ("attention_context_left", 13),
        ("attention_context_right", 0),
        ("attention_logit_cap", 50.0),
        ("residual_weight", 0.5),
        ("rms_norm_eps", 1e-6),
    ):
        if audio.get(key) != wanted:
            raise audio.unsupported(key, repr(wanted))
    return {}


def _granite_fields(settings: ProcessorSettings, audio: PartSettings) -> dict[str, Any]:
    config = settings.config.over({"window_size": 15, "downsample_rate": 5})
    projector = settings.part("projector_config").over(
        {"model_type": "blip_2_qformer", "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_act": "gelu"}
        | {"layer_norm_eps": 1e-12, "cross_attention_frequency": 2}
    )
    if projector.get("model_type") != "blip_2_qformer":
        raise projector.unsupported("model_type", "'blip_2_qformer'")
    size, rate = config.integer("window_size"), config.integer("downsample_rate")
    if rate > size:
        raise config.wrong("downsample_rate", f"at most window_size, {size}")
    block, most = audio.integer("context_size"), audio.integer("max_pos_emb")
    if block > most:
        raise audio.wrong("context_size", f"at most max_pos_emb, {most}")
    queries = QueryConfig(
        num_queries=size // rate,
        size=size,
        num_layers=projector.integer("num_hidden_layers", high=1 << 10),
        num_heads=projector.integer("num_attention_heads"),
        norm_epsilon=projector.number("layer_norm_eps", low=0.0, high=1.0),
        activation=activation(projector, "hidden_act"),
        frequency=projector.integer("cross_attention_frequency"),
    )
    layers = audio.get("cat_hidden_layers") or []
    count = audio.integer("num_layers", high=1 << 10)
    if not isinstance(layers, list) or any(type(layer) is not int or not 0 <= layer < count for layer in layers):
        raise audio.wrong("cat_hidden_layers", f"numbers of blocks from 0 to {count - 1}")
    return {"block_rows": block, "queries": queries, "feature_layers": tuple(sorted(set(layers)))}


def _gemma4_unified_fields(settings: ProcessorSettings, audio: PartSettings) -> dict[str, Any]:
    for key, wanted in (("audio_embed_dim", 640), ("rms_norm_eps", 1e-6)):
        if audio.get(key) != wanted:
            raise audio.unsupported(key, repr(wanted))
    return {}


_WHISPER: Targets = {
    "audio_tower.conv1": "a.conv1d.1",
    "audio_tower.conv2": "a.conv1d.2",
    "audio_tower.embed_positions": "a.position_embd",
    "audio_tower.layer_norm": "a.post_ln",
    "audio_tower.ln_post": "a.post_ln",
    **{
        f"audio_tower.layers.*.{name}": f"a.blk.*.{target}"
        for name, target in (
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.out_proj", "attn_out"),
            ("self_attn_layer_norm", "ln1"),
            ("final_layer_norm", "ln2"),
            ("fc1", "ffn_up"),
            ("fc2", "ffn_down"),
        )
    },
}
_PARTS = ("audio_tower", "multi_modal_projector")
_TWO_MATRICES: Targets = {
    "multi_modal_projector.linear_1": "mm.a.mlp.1",
    "multi_modal_projector.linear_2": "mm.a.mlp.2",
}
_SPEAKING = r"audio_tower\.audio_bos_eos_token\..*"
_GEMMA4_BLOCKS = {
    "feed_forward1.pre_layer_norm": "ffn_norm",
    "feed_forward1.post_layer_norm": "ffn_post_norm",
    "feed_forward1.ffw_layer_1": "ffn_up",
    "feed_forward1.ffw_layer_2": "ffn_down",
    "feed_forward2.pre_layer_norm": "ffn_norm_1",
    "feed_forward2.post_layer_norm": "ffn_post_norm_1",
    "feed_forward2.ffw_layer_1": "ffn_up_1",
    "feed_forward2.ffw_layer_2": "ffn_down_1",
    "norm_pre_attn": "attn_pre_norm",
    "norm_post_attn": "attn_post_norm",
    "norm_out": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.post": "attn_out",
    "self_attn.relative_k_proj": "attn_k_rel",
    # Converters give these two norms each other's name.
    "lconv1d.pre_layer_norm": "conv_norm",
    "lconv1d.conv_norm": "norm_conv",
    "lconv1d.linear_start": "conv_pw1",
    "lconv1d.linear_end": "conv_pw2",
}
_SOFTPLUS = Computed(lambda values: np.logaddexp(np.float32(0), values))
_GEMMA4: Targets = {
    **{f"audio_tower.layers.*.{name}": f"a.blk.*.{target}" for name, target in _GEMMA4_BLOCKS.items()},
    **{f"audio_tower.layers.*.{name}.linear": f"a.blk.*.{target}" for name, target in _GEMMA4_BLOCKS.items()},
    "audio_tower.layers.*.self_attn.per_dim_scale": To("a.blk.*.per_dim_scale.weight", _SOFTPLUS),
    "audio_tower.layers.*.lconv1d.depthwise_conv1d": To("a.blk.*.conv_dw", CONVOLUTION),
    "audio_tower.subsample_conv_projection.layer0.conv": "a.conv1d.0",
    "audio_tower.subsample_conv_projection.layer0.norm": "a.conv1d.0.norm",
    "audio_tower.subsample_conv_projection.layer1.conv": "a.conv1d.1",
    "audio_tower.subsample_conv_projection.layer1.norm": "a.conv1d.1.norm",
    "audio_tower.subsample_conv_projection.input_proj_linear": "a.input_projection",
    "audio_tower.output_proj": "a.pre_encode.out",
    "embed_audio.embedding_projection": "mm.a.input_projection",
}
_COLUMNS = Moved(lambda values: values[..., 0] if values.ndim == 3 else values)
"""Kernels of one tap as matrices; a bias as it is."""
_GRANITE_BLOCKS: Targets = {
    "ff1.pre_norm": "ffn_norm",
    "ff1.up_proj": "ffn_up",
    "ff1.down_proj": "ffn_down",
    "attn.pre_norm": "ln1",
    "attn.to_q": "attn_q",
    "attn.to_kv": (To("attn_k", FIRST_HALF), To("attn_v", SECOND_HALF)),
    "attn.to_out": "attn_out",
    "attn.rel_pos_emb": "attn_rel",
    "conv.norm": "norm_conv",
    "conv.up_conv": To("conv_pw1", _COLUMNS),
    "conv.depth_conv.conv": To("conv_dw", CONVOLUTION),
    "conv.batch_norm": "conv_norm",
    "conv.down_conv": To("conv_pw2", _COLUMNS),
    "ff2.pre_norm": "ffn_norm_1",
    "ff2.up_proj": "ffn_up_1",
    "ff2.down_proj": "ffn_down_1",
    "post_norm": "ln2",
}
_QUERY_BLOCKS: Targets = {
    **{
        f"{module}.{name}": f"{target}_{part}"
        for module, target in (("attention", "attn"), ("crossattention", "cross"))
        for name, part in (
            ("attention.query", "q"),
            ("attention.key", "k"),
            ("attention.value", "v"),
            ("output.dense", "out"),
            ("output.LayerNorm", "norm"),
        )
    },
    "intermediate_query.dense": "ffn_up",
    "output_query.dense": "ffn_down",
    "output_query.LayerNorm": "ffn_norm",
}
_GRANITE: Targets = {
    "encoder.input_linear": "a.input_projection",
    **block_names("encoder.layers", _GRANITE_BLOCKS, "a.blk.*"),
    "encoder.out": "a.ctc_out",
    "encoder.out_mid": "a.ctc_in",
    "projector.query": To("mm.a.query.weight", Moved(lambda values: values[0])),
    "projector.qformer.layernorm": "mm.a.query_norm",
    **block_names("projector.qformer.encoder.layer", _QUERY_BLOCKS, "mm.a.blk.*"),
    "projector.linear": "mm.a.fc",
}
_WHISPER_CLASS = {
    "encoder_attention_heads": 20,
    "num_mel_bins": 128,
    "d_model": 1280,
    "max_source_positions": 1500,
    "activation_function": "gelu",
    "scale_embedding": False,
}
_QWEN2_OMNI = SoundTowerFamily(
    "qwen2a",
    TowerNames(("audio_tower",), {**_WHISPER, "audio_tower.proj": "mm.a.fc"}, _SPEAKING),
    _WHISPER_CLASS | {"n_window": 100},
    _qwen2_omni_fields,
    width="d_model",
)
_QWEN3_OMNI = SoundTowerFamily(
    "qwen3a",
    TowerNames(
        _PARTS,
        {
            **_WHISPER,
            **{f"audio_tower.conv2d{number}": f"a.conv2d.{number}" for number in (1, 2, 3)},
            "audio_tower.conv_out": "a.conv_out",
            "audio_tower.proj1": "mm.a.mlp.1",
            "audio_tower.proj2": "mm.a.mlp.2",
            # Qwen3-ASR, as transformers writes it.
            **_TWO_MATRICES,
        },
    ),
    _WHISPER_CLASS | {"n_window": 50, "n_window_infer": 800},
    _qwen3_omni_fields,
    width="d_model",
)

SOUND_TOWERS: dict[str, SoundTowerFamily] = {
    "qwen2_audio": SoundTowerFamily(
        "qwen2a",
        TowerNames(_PARTS, {**_WHISPER, "multi_modal_projector.linear": "mm.a.fc"}),
        _WHISPER_CLASS,
    ),
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), _QWEN2_OMNI),
    **dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_asr"), _QWEN3_OMNI),
    "voxtral": SoundTowerFamily(
        "voxtral",
        TowerNames(
            _PARTS,
            {**_WHISPER, **_TWO_MATRICES},
        ),
        _WHISPER_CLASS | {"num_attention_heads": 20, "hidden_size": 1280, "intermediate_size": 5120},
        _voxtral_fields,
        "num_attention_heads",
    ),
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus"),
        SoundTowerFamily(
            "granite_speech",
            TowerNames(("encoder", "projector"), _GRANITE, r".*\.num_batches_tracked"),
            {"num_heads": 8, "num_layers": 10, "input_dim": 160, "context_size": 200, "max_pos_emb": 512},
            _granite_fields,
            "num_heads",
            part="encoder_config",
            frame="input_dim",
        ),
    ),
    "gemma4_unified": SoundTowerFamily(
        "gemma4ua",
        TowerNames(("embed_audio",), {"embed_audio.embedding_projection": "mm.a.input_projection"}),
        {"rms_norm_eps": 1e-6, "audio_embed_dim": 640},
        _gemma4_unified_fields,
        frame="audio_embed_dim",
        has_blocks=False,
    ),
    "audioflamingo3": SoundTowerFamily(
        "voxtral",
        TowerNames(_PARTS, {**_WHISPER, **_TWO_MATRICES}),
        _WHISPER_CLASS | {"num_attention_heads": 20},
        lambda settings, audio: {"joins_pairs": True},
        "num_attention_heads",
    ),
    "gemma4": SoundTowerFamily(
        "gemma4a",
        TowerNames(("audio_tower", "embed_audio"), _GEMMA4),
        {
            "num_attention_heads": 8,
            "num_mel_bins": 128,
            "hidden_act": "silu",
            "attention_chunk_size": 12,
            "attention_context_left": 13,
            "attention_context_right": 0,
            "attention_logit_cap": 50.0,
            "residual_weight": 0.5,
            "rms_norm_eps": 1e-6,
        },
        _gemma4_fields,
        "num_attention_heads",
    ),
}
"""Families by `model_type`."""

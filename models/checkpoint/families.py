"""The model types of config.json that run here, the reason why others do not, and the text model's part of a file.

A family is a table; the tables are in files by kin. A model that sees or hears is a wrapper: it nests the text model's
settings in a record of their own, and leaves out of it whatever is as in that model's class. Its own level has the
parts that see, hear and speak; of the text it has one setting, whether the output matrix is the embedding.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.attention_families import DELTA, LATENT, MINIMAX
from localinfer.models.checkpoint.contrastive_families import CONTRASTIVE
from localinfer.models.checkpoint.dense_families import DENSE, GPT
from localinfer.models.checkpoint.encoder_families import BERT_KIN, ENCODERS
from localinfer.models.checkpoint.family import Family
from localinfer.models.checkpoint.late_families import LATE
from localinfer.models.checkpoint.mixed_layer_families import GEMMA4, UNEVEN
from localinfer.models.checkpoint.mixture_families import MIXTURES
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.checkpoint.state_space_families import STATE_SPACE
from localinfer.models.decoder.architectures import (
    ARCHITECTURES,
    BLOCK_RESIDUALS,
    COMPARES,
    COMPRESSED,
    CROSS_ATTENTION,
    DIFFUSION,
    DRAFTS,
    EARLIER_RWKV,
    ENCODER_DECODER,
    GROUPED_EXPERTS,
    HEARS,
    HYPER_CONNECTIONS,
    OWN_TEXT,
    REPEATED,
    RETRIEVES,
    SEES,
    SPARSE_DELTA,
    SPEAKS,
    named,
    refuse_kind,
    spelling,
)

_ENCODER_DECODERS = (
    "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder florence2 fsmt led longt5 m2m_100 marian"
    " mbart mt5 mvp nllb-moe pegasus pegasus_x plbart pp_formulanet prophetnet switch_transformers t5 t5gemma"
    " t5gemma2 udop umt5 vision-encoder-decoder"
)
_HEARS = (
    "canary cohere_asr hubert kyutai_speech_to_text moonshine moonshine_streaming parakeet_ctc seamless_m4t"
    " seamless_m4t_v2 speech_to_text speech-encoder-decoder wav2vec2 wav2vec2-bert wavlm whisper"
)
_SPEAKS = "bark csm dia encodec mimi moshi musicgen musicgen_melody speecht5 vits"
_COMPARES = (
    "aimv2 align altclip bridgetower chinese_clip clap clvp flava groupvit metaclip_2 tipsv2 videoprism"
    " vision-text-dual-encoder xclip"
)
_OWN_TEXT = (
    "apertus1p5 aria blip-2 cosmos3_edge deepseek_ocr2 dots3_note emu3 fuyu granite4_vision instructblip"
    " instructblipvideo kosmos-2 kosmos-2.5 mistral_large4 molmo2 muse_spark unlimited_ocr voxtral_realtime"
)
_SEES = (
    "beit clip_vision_model clipseg convnext detr dinov2 dinov3_vit donut-swin grounding-dino omdet-turbo owlv2"
    " owlvit pix2struct resnet sam sam2 sam3 segformer siglip_vision_model swin trocr vit"
)

NOT_RUN_TYPES = named(
    {
        ENCODER_DECODER: _ENCODER_DECODERS,
        HEARS: _HEARS,
        SPEAKS: _SPEAKS,
        SEES: _SEES,
        COMPARES: _COMPARES,
        RETRIEVES: "colmodernvbert",
        OWN_TEXT: _OWN_TEXT,
        "whose experts differ for words and for images": "ernie4_5_vl_moe ernie4_5_vl_moe_text",
        "whose text model has an adapter (LoRA) for pictures and another one for sounds": "phi4_multimodal",
        CROSS_ATTENTION: "blip idefics mllama mllama_text_model",
        DIFFUSION: "Dream diffusion_gemma llada llada_moe rnd1 sdar sdar_moe",
        DRAFTS: "dflash eagle eagle3",
        REPEATED: "hrm_text inkling2_loop inkling2_loop_text iquestloopcoder",
        HYPER_CONNECTIONS: "glm5_next glm5_next_text hy_v4 hy_v4_vl",
        COMPRESSED: "deepseek_v4",
        BLOCK_RESIDUALS: "inkling2 inkling2_text kimi_k3",
        SPARSE_DELTA: "qwen4_exp qwen4_exp_text",
        "whose attention has a bias by relative position, between short convolutions": (
            "inkling inkling_mm_model inkling_text"
        ),
        "whose attention runs in a narrower, convolved space": "zaya",
        "with two attentions in a layer, and experts that return their input": "longcat_flash",
        "whose attention has experts": "jetmoe",
        "whose attention is a difference of two": "diffllama",
        "whose attention has a mask that it computes": "doge",
        "a model that reads bytes in patches, with cross attention between the two": "blt",
        "with recurrent layers of a kind of its own (RG-LRU)": "recurrent_gemma",
        "with recurrent layers of a kind of its own (mLSTM)": "xlstm",
        "with recurrent layers of an early kind (RWKV 4)": "rwkv",
        EARLIER_RWKV: "rwkv6",
        GROUPED_EXPERTS: "grove_moe",
        "whose attention goes by hashes of the rows": "reformer",
        "whose attention leaves out most positions, by a fixed pattern": "big_bird longformer",
        "a model that mixes rows by Fourier transforms": "fnet",
        "a model that reads texts by their places on a page": "layoutlm layoutlmv2 layoutlmv3 layoutxlm",
    }
)
"""Reasons by `model_type`, which follow the name in a sentence."""


FAMILIES: dict[str, Family] = {
    **DENSE,
    **DELTA,
    **STATE_SPACE,
    **GPT,
    **MIXTURES,
    **MINIMAX,
    **LATENT,
    **UNEVEN,
    **GEMMA4,
    **ENCODERS,
    **BERT_KIN,
    **CONTRASTIVE,
    **LATE,
}
"""Families by `model_type`."""


def find_family(config: Mapping[str, object]) -> Family:
    """Return the family of a config.json: that of its text model where the whole, which also sees or hears, has none.

    Raises: UnsupportedFormatError for any other, with the reason or the nearest types.
    """
    text = read_text_config(config, FAMILIES)
    if isinstance(text.model_type, str) and text.model_type in FAMILIES:
        return FAMILIES[text.model_type]
    raise _refusal([(f"config.json: {where}", kind) for where, kind in text.types.items()])


def _refusal(kinds: Sequence[tuple[str, object]]) -> Exception:
    """The error for types that are not in the table, of the whole and of its text model: the first whose reason, or
    whose way out, is known."""
    gguf_names = {spelling(name): name for name in ARCHITECTURES}
    for where, name in kinds:
        if not isinstance(name, str):
            continue
        if name in NOT_RUN_TYPES:
            reason = NOT_RUN_TYPES[name]
            return refuse_kind(where, name, FAMILIES, reason, "Update localinfer or choose another model.")
        if spelling(name) in gguf_names:
            return UnsupportedFormatError(
                f"{where} is {name!r:.60}, which this version runs from GGUF files (as "
                f"{gguf_names[spelling(name)]!r}) and not from folders. Use a GGUF file of the model."
            )
    way_out = "Use a GGUF file of the model, update localinfer, or choose another model."
    return refuse_kind(*kinds[0], FAMILIES, None, way_out)


_NESTED = ("thinker_config", "vlm_config", "text_config", "llm_config")
"""Records that have a text model, one inside the other."""
_OF_OTHER_PARTS = re.compile(
    r".*(vision|visual|vit|image|video|audio|speech|sound|acoustic|encoder|projector|connector|adapt[eo]r|former"
    r"|perceiver|resampler|vq|codec|talker|token2wav|code2wav).*_config"
)
"""Records of parts that see, hear or speak."""


@dataclass(frozen=True)
class Wrapper:
    """Values that the class of one wrapper has for settings that its file leaves out."""

    text_type: str
    """`model_type` of the text model."""
    ties_embeddings: bool | None
    """The output matrix is the embedding; None where the text model's own settings say so."""


def _wrappers(kinds: Mapping[tuple[str, bool | None], str]) -> dict[str, Wrapper]:
    return {name: Wrapper(*key) for key, names in kinds.items() for name in names.split()}


WRAPPERS: dict[str, Wrapper] = _wrappers(
    {
        ("clip_text_model", None): "clip",
        ("cohere2", True): "aya_vision cohere2_vision",
        ("deepseek_v3", True): "kimi_k25",
        ("exaone4", False): "exaone4_5",
        ("gemma", True): "paligemma",
        ("gemma3_text", True): "gemma3 shieldgemma2",
        ("gemma3n_text", True): "gemma3n",
        ("gemma4_text", True): "gemma4",
        ("gemma4_unified_text", True): "gemma4_unified",
        ("glm4v_moe_text", False): "glm4v_moe",
        ("glm4v_text", False): "glm4v glm46v glmga",
        ("glm_ocr_text", False): "glm_ocr",
        ("granite", True): "granite_speech granite_speech_plus",
        ("granite_docling_text", True): "granite_docling",
        ("hunyuan_vl_text", True): "hunyuan_vl",
        ("hyperclovax", True): "hyperclovax_vision_v2",
        ("lfm2", True): "lfm2_vl",
        ("lfm3", True): "lfm3_vl",
        ("llama", False): "idefics3 llava llava_next llava_next_video perception_lm smolvlm video_llava vipllava",
        ("llama", None): "omniasr voxtral",
        ("llama", True): "deepseek_vl deepseek_vl_hybrid glmasr janus",
        ("llama4_text", False): "llama4",
        ("minimax_m3_vl_text", False): "minimax_m3_vl",
        ("mistral", False): "idefics2",
        ("mistral", True): "mistral3",
        ("nemotron_h", None): "nemo_speechlm nemotron_h_omni",
        ("paddleocr_vl_text", True): "paddleocr_vl",
        ("qwen2", False): "fast_vlm llava_onevision vibevoice video_llama_3",
        ("qwen2", None): "audioflamingo3 internvl_chat musicflamingo qwen2_audio vibevoice_asr",
        ("qwen2", True): "got_ocr2 internvl ovis2 pp_chart2table",
        ("qwen2_5_omni_text", False): "qwen2_5_omni qwen2_5_omni_thinker",
        ("qwen2_5_vl_text", False): "qwen2_5_vl",
        ("qwen2_vl_text", False): "qwen2_vl",
        ("qwen3", False): "qianfan_ocr",
        ("qwen3", True): "fun_asr_nano lighton_ocr moss_transcribe_diarize qwen3_asr",
        ("qwen3_5_moe_text", False): "qwen3_5_moe",
        ("qwen3_5_text", False): "minicpmv4_6 minicpmv4_7 qwen3_5",
        ("qwen3_5_text", True): "minicpm_ocr",
        ("qwen3_omni_moe_text", False): "qwen3_omni_moe qwen3_omni_moe_thinker",
        ("qwen3_vl_moe_text", False): "qwen3_vl_moe",
        ("qwen3_vl_text", False): "cosmos3_omni qwen3_vl",
        ("siglip2_text_model", None): "siglip2",
        ("siglip_text_model", None): "siglip",
        ("step3p5", None): "step3p7",
    }
)
"""Wrappers by `model_type`. Source: the classes of transformers 5.24."""

_DEEPSTACK = (8, 16, 24)
"""Blocks whose outputs are taken where a file does not say."""

_MISNAMED_LAYERS = {"kimi_k25": ("blocks",), "qianfan_ocr": ("encoder.layers",)}
"""Words that transformers 5.24 writes before the numbers of the text model's layers, in place of `layers`."""

_LLAMA: dict[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_QWEN: dict[str, object] = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_GEMMA: dict[str, object] = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
}
TEXT_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "gemma": {
        **_GEMMA,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma2": {
        **_GEMMA,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
"""Sizes that the classes of text models take for absent ones, by `model_type`: published wrappers leave them out."""


@dataclass(frozen=True)
class TextConfig:
    """The text model's part of a config.json."""

    model_type: object
    """Type of the whole if it is in the table of families, else of the text model."""
    types: Mapping[str, object]
    """Types of all levels, by the setting's path, the outermost first."""
    settings: Mapping[str, Any]
    defaults: Mapping[str, object]
    """Values of the text model's class for absent settings."""
    ties_embeddings: bool | None
    """The wrapper's flag; None where the text model's own settings decide."""
    has_other_parts: bool
    """Some part sees, hears or speaks."""
    misnamed_layers: tuple[str, ...]
    """Words that may stand before the number of a layer beside the family's."""
    num_deepstack_layers: int = 0
    """First layers that parts of a picture's rows are added behind."""


def config_levels(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """config.json, and the records inside it that have the text model, by their paths, the outermost first."""
    levels = {"": config}
    while True:
        path, level = list(levels.items())[-1]
        key = next((key for key in _NESTED if isinstance(level.get(key), dict)), None)
        if key is None:
            return levels
        levels[f"{path}{key}."] = level[key]


def read_text_config(config: Mapping[str, Any], known: Collection[str]) -> TextConfig:
    """Find the text model's settings.

    known: model types that are families themselves; around a text model they have settings of it beside its own.
    Raises: CorruptFileError if `tie_word_embeddings` is neither true nor false.
    """
    named = config_levels(config)
    levels = list(named.values())
    types = [level.get("model_type") for level in levels]
    wrapper = next((WRAPPERS[name] for name in types if isinstance(name, str) and name in WRAPPERS), None)
    if len(levels) > 1 and wrapper is not None and types[-1] is None:
        types[-1] = wrapper.text_type
    found = next((name for name in types if isinstance(name, str) and name in known), types[0])
    settings: dict[str, Any] = {}
    for level in levels if found in types[:-1] else levels[-1:]:
        settings |= level
    defaults = TEXT_DEFAULTS.get(str(types[-1] if str(found) in LATE else found), {})
    return TextConfig(
        found,
        {f"{path}model_type": kind for path, kind in zip(named, types, strict=True)},
        settings,
        defaults if len(levels) > 1 else {},
        _tied(levels, wrapper),
        any(
            isinstance(value, dict) and _OF_OTHER_PARTS.fullmatch(key)
            for level in levels
            for key, value in level.items()
        ),
        _MISNAMED_LAYERS.get(str(types[0]), ()),
        _num_deepstack_layers(levels, types),
    )


def _num_deepstack_layers(levels: list[Mapping[str, Any]], types: list[object]) -> int:
    """Blocks of the tower whose outputs reach the text model beside the last one's."""
    if not any(isinstance(kind, str) and kind.startswith(("qwen3_vl", "qwen3_omni")) for kind in types):
        return 0
    tower = next((found for level in levels if isinstance(found := level.get("vision_config"), dict)), None)
    if tower is None:
        return 0
    blocks = tower.get("deepstack_visual_indexes", _DEEPSTACK)
    return len(blocks) if isinstance(blocks, list | tuple) else 0


def _tied(levels: list[Mapping[str, Any]], wrapper: Wrapper | None) -> bool | None:
    """The outermost flag. The classes of older writers had none, and tied as the text model says."""
    *outer, text = [Settings(level, {}) for level in levels]
    for level in outer:
        if "tie_word_embeddings" in level:
            return level.boolean("tie_word_embeddings", True)
    if not outer or wrapper is None or wrapper.ties_embeddings is None:
        return None
    return wrapper.ties_embeddings or text.boolean("tie_word_embeddings", False)

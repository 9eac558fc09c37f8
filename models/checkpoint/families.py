"""The model types of config.json that run here, and which of them a file is.

A family is a table; the tables are in files by kin.
"""

from collections.abc import Mapping, Sequence

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.dense_families import DENSE
from localinfer.models.checkpoint.encoder_families import BERT_KIN, ENCODERS
from localinfer.models.checkpoint.family import Family
from localinfer.models.checkpoint.gpt_families import GPT
from localinfer.models.checkpoint.latent_families import LATENT
from localinfer.models.checkpoint.linear_attention_families import DELTA, MINIMAX
from localinfer.models.checkpoint.mixed_layer_families import GEMMA4, UNEVEN
from localinfer.models.checkpoint.mixture_families import MIXTURES
from localinfer.models.checkpoint.state_space_families import STATE_SPACE
from localinfer.models.checkpoint.wrappers import read_text_config
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
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "encoder-decoder",
    "florence2",
    "fsmt",
    "led",
    "longt5",
    "m2m_100",
    "marian",
    "mbart",
    "mt5",
    "mvp",
    "nllb-moe",
    "pegasus",
    "pegasus_x",
    "plbart",
    "pp_formulanet",
    "prophetnet",
    "switch_transformers",
    "t5",
    "t5gemma",
    "t5gemma2",
    "udop",
    "umt5",
    "vision-encoder-decoder",
)
_HEARS = (
    "canary",
    "cohere_asr",
    "hubert",
    "kyutai_speech_to_text",
    "moonshine",
    "moonshine_streaming",
    "parakeet_ctc",
    "seamless_m4t",
    "seamless_m4t_v2",
    "speech_to_text",
    "speech-encoder-decoder",
    "wav2vec2",
    "wav2vec2-bert",
    "wavlm",
    "whisper",
)
_SPEAKS = ("bark", "csm", "dia", "encodec", "mimi", "moshi", "musicgen", "musicgen_melody", "speecht5", "vits")
_COMPARES = (
    "aimv2",
    "align",
    "altclip",
    "bridgetower",
    "chinese_clip",
    "clap",
    "clip",
    "clvp",
    "flava",
    "groupvit",
    "metaclip_2",
    "siglip",
    "siglip2",
    "tipsv2",
    "videoprism",
    "vision-text-dual-encoder",
    "xclip",
)
_OWN_TEXT = (
    "apertus1p5",
    "aria",
    "blip-2",
    "cosmos3_edge",
    "deepseek_ocr2",
    "dots3_note",
    "emu3",
    "fuyu",
    "granite4_vision",
    "instructblip",
    "instructblipvideo",
    "kosmos-2",
    "kosmos-2.5",
    "mistral_large4",
    "molmo2",
    "muse_spark",
    "unlimited_ocr",
    "voxtral_realtime",
)
_SEES = (
    "beit",
    "clip_vision_model",
    "clipseg",
    "convnext",
    "detr",
    "dinov2",
    "dinov3_vit",
    "donut-swin",
    "grounding-dino",
    "omdet-turbo",
    "owlv2",
    "owlvit",
    "pix2struct",
    "resnet",
    "sam",
    "sam2",
    "sam3",
    "segformer",
    "siglip_vision_model",
    "swin",
    "trocr",
    "vit",
)

NOT_RUN_TYPES = named(
    {
        ENCODER_DECODER: _ENCODER_DECODERS,
        HEARS: _HEARS,
        SPEAKS: _SPEAKS,
        SEES: _SEES,
        COMPARES: _COMPARES,
        RETRIEVES: ("colmodernvbert", "colpali", "colqwen2"),
        OWN_TEXT: _OWN_TEXT,
        "whose experts differ for words and for images": ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
        CROSS_ATTENTION: ("blip", "idefics", "mllama", "mllama_text_model"),
        DIFFUSION: ("Dream", "diffusion_gemma", "llada", "llada_moe", "rnd1", "sdar", "sdar_moe"),
        DRAFTS: ("dflash", "eagle", "eagle3"),
        REPEATED: ("hrm_text", "inkling2_loop", "inkling2_loop_text", "iquestloopcoder"),
        HYPER_CONNECTIONS: ("glm5_next", "glm5_next_text", "hy_v4", "hy_v4_vl"),
        COMPRESSED: ("deepseek_v4",),
        BLOCK_RESIDUALS: ("inkling2", "inkling2_text", "kimi_k3"),
        SPARSE_DELTA: ("qwen4_exp", "qwen4_exp_text"),
        "whose attention has a bias by relative position, between short convolutions": (
            "inkling",
            "inkling_mm_model",
            "inkling_text",
        ),
        "whose attention runs in a narrower, convolved space": ("zaya",),
        "with two attentions in a layer, and experts that return their input": ("longcat_flash",),
        "whose attention has experts": ("jetmoe",),
        "whose attention is a difference of two": ("diffllama",),
        "whose attention has a mask that it computes": ("doge",),
        "a model that reads bytes in patches, with cross attention between the two": ("blt",),
        "with recurrent layers of a kind of its own (RG-LRU)": ("recurrent_gemma",),
        "with recurrent layers of a kind of its own (mLSTM)": ("xlstm",),
        "with recurrent layers of an early kind (RWKV 4)": ("rwkv",),
        EARLIER_RWKV: ("rwkv6",),
        GROUPED_EXPERTS: ("grove_moe",),
        "whose attention goes by hashes of the rows": ("reformer",),
        "whose attention leaves out most positions, by a fixed pattern": ("big_bird", "longformer"),
        "a model that mixes rows by Fourier transforms": ("fnet",),
        "a model that reads texts by their places on a page": ("layoutlm", "layoutlmv2", "layoutlmv3", "layoutxlm"),
    }
)
"""By `model_type`: what follows the name in a sentence."""


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
}
"""By `model_type`."""


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

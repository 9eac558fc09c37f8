"""Families of Hugging Face folders whose towers run: GGUF's names of their tensors, and the encoder's configuration.

A family is a record, as the families of text models in `checkpoint` are. Sizes come from the tensors where these have
them, everything else from config.json over the values of the class, because published files leave those out. What an
mmproj file cannot say is data of `PictureConfig`: the class row first, exact GELU, windows by blocks.
Source: the models' classes in transformers 5.24.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localinfer.models.checkpoint.changes import (
    PLUS_ONE,
    Moved,
    RowOrder,
    pairs_adjacent,
)
from localinfer.models.media.folder_pictures import OVIS_MARKS, most_tiles
from localinfer.models.media.folder_processors import PictureProcessor
from localinfer.models.media.folder_settings import PartSettings, ProcessorSettings
from localinfer.models.media.folder_tower_names import (
    GATED_PROJECTOR,
    GEMMA4_LINEARS,
    GLM_NAMES,
    INTERNVL_FIRST_NAMES,
    INTERNVL_NAMES,
    LLAMA4_NAMES,
    LLAVA_PROJECTOR,
    MINICPM_NAMES,
    PADDLE_NAMES,
    POOLING_HEAD,
    QWEN_NAMES,
    block_names,
    columns_first,
    columns_of_patches_last,
    ovis_names,
    patches_last,
    pixtral_projector,
    qwen_names,
    siglip_names,
)
from localinfer.models.media.mmproj import FOLDER_PROJECTORS, PICTURE_PROJECTORS, PictureConfig
from localinfer.models.media.tower_file import Targets, To, TowerFile, TowerNames

_ACTIVATIONS = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "quick_gelu": "quick",
    "silu": "silu",
    "swish": "silu",
}
"""Our names of the functions, by `hidden_act`."""


@dataclass(frozen=True)
class Tower:
    """Everything that a family's configuration is made of."""

    settings: ProcessorSettings
    """The folder's settings."""
    vision: PartSettings
    """config.json's record of the tower, over the values of its class."""
    file: TowerFile
    """The tensors, under GGUF's names."""


@dataclass(frozen=True)
class TowerFamily:
    """Reading of a family's tower that sees."""

    projector: str
    """Kind of projector, as an mmproj file would name it."""
    names: Callable[[ProcessorSettings, PartSettings], TowerNames]
    """Reads the names of its tensors, of which some changes depend on sizes."""
    defaults: Mapping[str, Any]
    """Settings of the tower's class."""
    fields: Callable[[Tower], dict[str, Any]] = lambda tower: {}
    """Fields of the configuration that are not as the settings that all towers have say."""
    heads: str = "num_attention_heads"
    """Setting with the number of heads."""
    epsilon: str = "layer_norm_eps"
    """Setting with the epsilon of norms; a number is the epsilon itself."""
    has_blocks: bool = True
    """False if patches are projected as they are."""
    kv_heads: str = ""
    """Setting with the number of heads of keys and values; empty where there are as many."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """GGUF's names of rows of the embedding that the encoder puts between others, by special tokens."""
    marks: tuple[str, tuple[str, ...]] = ("", ())
    """Setting with the numbers of the tokens that are the encoder's marks, and these tokens in its order."""


def vision_settings(settings: ProcessorSettings, family: TowerFamily) -> PartSettings:
    """config.json's record of the tower, over the values of its class."""
    return settings.part("vision_config").over(family.defaults)


def picture_config(family: TowerFamily, tower: Tower, processor: PictureProcessor) -> PictureConfig:
    """The configuration of a folder's tower.

    Raises: CorruptFileError naming a setting or tensor, UnsupportedFormatError for what does not run.
    """
    file, vision = tower.file, tower.vision
    projector = (PICTURE_PROJECTORS | FOLDER_PROJECTORS)[family.projector]
    hidden_size = file.tensor("v.patch_embd.weight").shape[0]
    num_layers = file.num_layers
    num_heads, num_kv_heads, head_size, intermediate_size = 1, 1, hidden_size, 1
    if family.has_blocks:
        num_heads, intermediate_size = vision.integer(family.heads), file.tensor("v.blk.0.ffn_up.weight").shape[0]
        num_kv_heads = vision.integer(family.kv_heads, high=num_heads) if family.kv_heads else num_heads
        head_size, rest = _head_size(file, num_heads, num_kv_heads)
        if rest or num_heads % num_kv_heads or not num_layers:
            raise vision.wrong(family.heads, "a divisor of the rows of queries")
    output = file.tensor(projector.output).shape
    config = PictureConfig(
        projector=family.projector,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        norm_epsilon=vision.number(family.epsilon, low=0.0, high=1.0),
        merge=1,
        output_size=output[1 if projector.is_transposed else 0],
        num_deepstack=len({name.split(".")[2] for name in file.tensors if name.startswith("v.deepstack.")}),
        image_size=_side(vision, "image_size"),
        patch_size=_side(vision, "patch_size"),
        mean=processor.mean,
        std=processor.std,
        activation=activation(vision, "hidden_act"),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        feature_layers=(),
        window_pattern=0,
        window_layer=0,
        pinpoints=(),
        preproc_image_size=0,
        min_tiles=1,
        max_tiles=1,
        min_pixels=0,
        max_pixels=0,
        minicpmv_version=0,
        num_queries=0,
        swiglu_clamp=0.0,
        has_image_break="v.token_embd.img_break" in file.tensors,
        projector_activation="erf",
    )
    return replace(config, **family.fields(tower))


def activation(settings: PartSettings, key: str) -> str:
    """Our name of a function. Raises: UnsupportedFormatError for one that does not run."""
    found = settings.text(key)
    if found not in _ACTIVATIONS:
        raise settings.unsupported(key, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[found]


def _head_size(file: TowerFile, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Columns of a head, and the rows of queries that are left over, of one matrix for all or for queries alone."""
    name = "v.blk.0.attn_q.weight"
    if name in file.tensors:
        return divmod(file.tensor(name).shape[0], num_heads)
    return divmod(file.tensor("v.blk.0.attn_qkv.weight").shape[0], num_heads + 2 * num_kv_heads)


def _side(settings: PartSettings, key: str) -> int:
    """A side in pixels, or the first of two equal ones; 1 where the family has no such setting."""
    value = settings.get(key)
    if isinstance(value, list):
        if len(set(map(str, value))) != 1:
            raise settings.unsupported(key, "squares")
        return PartSettings(settings.file, {key: value[0]}).integer(key)
    return settings.integer(key) if key in settings else 1


def _qwen_names(settings: ProcessorSettings, vision: PartSettings) -> TowerNames:
    layers = vision.get("deepstack_visual_indexes") or []
    if not isinstance(layers, list) or any(type(layer) is not int or not 0 <= layer < 1 << 10 for layer in layers):
        raise vision.wrong("deepstack_visual_indexes", "numbers of blocks")
    return TowerNames(("visual",), QWEN_NAMES, numbers={"v.deepstack.": layers})


def _qwen_fields(tower: Tower) -> dict[str, Any]:
    return {"merge": tower.vision.integer("spatial_merge_size", high=64), "rotary_base": _rotary_base(tower.vision)}


def _qwen25_fields(tower: Tower) -> dict[str, Any]:
    layers = tower.vision.get("fullatt_block_indexes")
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise tower.vision.wrong("fullatt_block_indexes", "numbers of blocks")
    return _qwen_fields(tower) | {
        "full_layers": tuple(layers),
        "window_size": tower.vision.integer("window_size"),
        "window_pattern": 1,
    }


def _rotary_base(vision: PartSettings, default: float = 10000.0) -> float:
    record = vision.get("rope_parameters")
    values = record if isinstance(record, dict) else {"rope_theta": vision.get("rope_theta")}
    return PartSettings(f"{vision.file}: rope", values, {"rope_theta": default}).number("rope_theta", low=1.0, high=1e9)


_QWEN2_CLASS = {
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "hidden_act": "quick_gelu",
    "norm_eps": 1e-6,
    "image_size": 560,
}
_QWEN25_CLASS = _QWEN2_CLASS | {"hidden_act": "silu", "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
_QWEN3_CLASS = _QWEN2_CLASS | {
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [8, 16, 24],
}


def _qwen(projector: str, defaults: Mapping[str, Any], fields: Callable[[Tower], dict[str, Any]]) -> TowerFamily:
    return TowerFamily(projector, _qwen_names, defaults, fields, "num_heads", "norm_eps")


_GLM_CLASS = {
    "num_heads": 12,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "image_size": 336,
}
_GLM = TowerFamily(
    "glm4v",
    lambda settings, vision: TowerNames(("visual",), GLM_NAMES),
    _GLM_CLASS,
    lambda tower: _qwen_fields(tower) | {"projector_activation": ""},
    "num_heads",
    "rms_norm_eps",
)


def _clip_names(parts: tuple[str, ...], projector: Targets, unused: str = "") -> Callable[..., TowerNames]:
    """Names of a SigLIP or CLIP tower whose states are taken before its last norm."""
    found = TowerNames(
        parts, siglip_names(parts[0], False) | dict(projector), rf"{parts[0]}\.(post_layernorm|head)\..*{unused}"
    )
    return lambda settings, vision: found


def _siglip_names(parts: tuple[str, ...], projector: Targets) -> Callable[..., TowerNames]:
    found = TowerNames(parts, siglip_names(parts[0]) | dict(projector), rf"{parts[0]}\.head\..*")
    return lambda settings, vision: found


_LLAVA_PARTS = ("vision_tower", "multi_modal_projector", "image_newline")
_CLIP_CLASS = {
    "num_attention_heads": 12,
    "patch_size": 32,
    "image_size": 224,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP_CLASS = {
    "num_attention_heads": 12,
    "patch_size": 16,
    "image_size": 224,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def _feature_layer(tower: Tower, default: int) -> int:
    """Blocks that are computed, by the number of the states that are taken."""
    config = tower.settings.config.over({"vision_feature_layer": default})
    layer, count = config.get("vision_feature_layer"), tower.file.num_layers
    if type(layer) is not int or not -count <= layer <= count:
        raise config.unsupported("vision_feature_layer", "the states after one block")
    return layer if layer >= 0 else count + 1 + layer


def _llava_fields(tower: Tower) -> dict[str, Any]:
    default = -1 if tower.settings.model_type == "llava_onevision" else -2
    config = tower.settings.config.over({"projector_hidden_act": "gelu"})
    return {
        "feature_layers": (_feature_layer(tower, default),),
        "is_class_first": True,
        "projector_activation": activation(config, "projector_hidden_act"),
        "max_tiles": most_tiles(tower.settings),
    }


def _pixtral_names(parts: tuple[str, ...], projector: Targets) -> Callable[..., TowerNames]:
    def names(settings: ProcessorSettings, vision: PartSettings) -> TowerNames:
        turned = pairs_adjacent(vision.integer("num_attention_heads"))
        blocks: Targets = {
            "attention.q_proj": To("attn_q", turned),
            "attention.k_proj": To("attn_k", turned),
            "attention.v_proj": "attn_v",
            "attention.o_proj": "attn_out",
            "attention_norm": "ln1",
            "ffn_norm": "ln2",
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
        }
        root = parts[0]
        tower: Targets = {
            f"{root}.patch_conv": "v.patch_embd",
            f"{root}.ln_pre": "v.pre_ln",
            **block_names(f"{root}.transformer.layers", blocks),
        }
        return TowerNames(parts, {**tower, **projector})

    return names


def _pixtral_fields(tower: Tower) -> dict[str, Any]:
    config = tower.settings.config.over({"spatial_merge_size": 2, "projector_hidden_act": "gelu"})
    text = tower.settings.part("text_config").over(
        {"rms_norm_eps": 1e-6 if tower.settings.model_type == "lighton_ocr" else 1e-5}
    )
    has_merger = "mm.patch_merger.weight" in tower.file.tensors
    return {
        "merge": config.integer("spatial_merge_size", high=64) if has_merger else 1,
        "projector_epsilon": text.number("rms_norm_eps", low=0.0, high=1.0),
        "projector_activation": activation(config, "projector_hidden_act"),
        "rotary_base": _rotary_base(tower.vision),
    }


_PIXTRAL_CLASS = {
    "num_attention_heads": 16,
    "patch_size": 16,
    "image_size": 1024,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
_BREAK = {"v.token_embd.img_break": "[IMG_BREAK]"}


def _internvl_fields(tower: Tower) -> dict[str, Any]:
    config = tower.settings.config.over({"downsample_ratio": 0.5, "projector_hidden_act": "gelu"})
    vision = tower.vision
    if not vision.boolean("use_mean_pooling"):
        raise vision.unsupported("use_mean_pooling", "true")
    kind = vision.text("norm_type")
    if kind not in ("layer_norm", "rms_norm"):
        raise vision.unsupported("norm_type", "'layer_norm' and 'rms_norm'")
    return {
        "merge": _inverse(config, "downsample_ratio"),
        "projector_activation": activation(config, "projector_hidden_act"),
        "has_rms_norms": kind == "rms_norm",
        "has_rms_query_norms": True,
        "is_class_first": True,
    }


def _internvl_chat_fields(tower: Tower) -> dict[str, Any]:
    config = tower.settings.config
    for key, wanted, usual in (("ps_version", "v2", "v1"), ("select_layer", -1, -1)):
        # Qianfan's class has neither.
        if tower.settings.model_type == "internvl_chat" and config.over({key: usual}).get(key) != wanted:
            raise config.over({key: usual}).unsupported(key, repr(wanted))
    return _internvl_fields(tower)


_INTERNVL = TowerFamily(
    "internvl",
    lambda settings, vision: TowerNames(("vision_tower", "multi_modal_projector"), INTERNVL_NAMES),
    {
        "num_attention_heads": 16,
        "patch_size": [14, 14],
        "image_size": [448, 448],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "norm_type": "layer_norm",
        "use_mean_pooling": True,
    },
    _internvl_fields,
)


def _inverse(settings: PartSettings, key: str) -> int:
    """The whole number whose inverse a factor is."""
    value = settings.number(key, low=1e-3, high=1.0)
    if abs(round(1 / value) * value - 1) > 1e-6:
        raise settings.unsupported(key, "1 over a whole number")
    return round(1 / value)


def _gemma4_names(settings: ProcessorSettings, vision: PartSettings) -> TowerNames:
    blocks: Targets = {
        **GEMMA4_LINEARS,
        # Linears that may clamp have their matrix inside.
        **{f"{name}.linear": target for name, target in GEMMA4_LINEARS.items()},
        "input_layernorm": "ln1",
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ffn_post_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }
    targets: Targets = {
        "vision_tower.patch_embedder.input_proj.weight": To(
            "v.patch_embd.weight", patches_last(vision.integer("patch_size"))
        ),
        "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
        **block_names("vision_tower.encoder.layers", blocks),
        "vision_tower.std_bias": "v.std_bias",
        "vision_tower.std_scale": "v.std_scale",
        "embed_vision.embedding_projection": "mm.input_projection",
    }
    return TowerNames(("vision_tower", "embed_vision"), targets)


def _gemma4_fields(tower: Tower) -> dict[str, Any]:
    vision = tower.vision
    num_kv_heads = tower.file.tensor("v.blk.0.attn_k.weight").shape[0] // vision.integer("head_dim")
    return {
        "merge": vision.integer("pooling_kernel_size", high=64),
        "num_kv_heads": num_kv_heads,
        "rotary_base": _rotary_base(vision, 100.0),
        "activation": activation(vision, "hidden_activation"),
    }


def _gemma4_unified_names(settings: ProcessorSettings, vision: PartSettings) -> TowerNames:
    side = vision.integer("patch_size") * vision.integer("pooling_kernel_size", high=64)
    targets: Targets = {
        "vision_embedder.patch_ln1": To("v.patch_norm.1", columns_of_patches_last(side)),
        "vision_embedder.patch_dense.weight": To("v.patch_embd.weight", columns_of_patches_last(side)),
        "vision_embedder.patch_dense": "v.patch_embd",
        "vision_embedder.patch_ln2": "v.patch_norm.2",
        "vision_embedder.pos_embedding": To("v.position_embd.weight", Moved(lambda values: values.swapaxes(0, 1))),
        "vision_embedder.pos_norm": "v.patch_norm.3",
        "embed_vision.embedding_projection": "mm.input_projection",
    }
    return TowerNames(("vision_embedder", "embed_vision"), targets)


def _gemma4_unified_fields(tower: Tower) -> dict[str, Any]:
    picture = tower.settings.picture.over({"max_soft_tokens": 280})
    window = tower.settings.part("text_config").over({"sliding_window": 1024}).integer("sliding_window", high=1 << 30)
    # Its rows see all of their picture in windowed layers too, whose keys are kept for a window alone.
    if picture.integer("max_soft_tokens") > window:
        raise picture.unsupported("max_soft_tokens", f"pictures of up to sliding_window, {window}, rows")
    return {"merge": tower.vision.integer("pooling_kernel_size", high=64)}


def _gemma3_fields(tower: Tower) -> dict[str, Any]:
    config = tower.settings.config.over({"mm_tokens_per_image": 256})
    side = _side(tower.vision, "image_size") // _side(tower.vision, "patch_size")
    tokens = round(config.integer("mm_tokens_per_image") ** 0.5)
    if tokens**2 != config.integer("mm_tokens_per_image") or side % tokens:
        raise config.wrong("mm_tokens_per_image", f"the square of a divisor of {side}")
    return {"merge": side // tokens}


def _idefics_fields(tower: Tower) -> dict[str, Any]:
    return {"merge": tower.settings.config.over({"scale_factor": 2}).integer("scale_factor", high=64)}


_PROJECTOR_PARTS = ("vision_tower", "multi_modal_projector")


def _merged_fields(tower: Tower) -> dict[str, Any]:
    """Of rows joined in blocks, a norm where there is one, and a gated product (Aya Vision, Command-A Vision)."""
    config = tower.settings.config.over({"downsample_factor": 2, "adapter_layer_norm_eps": 1e-6})
    return {
        "merge": config.integer("downsample_factor", high=64),
        "projector_epsilon": config.number("adapter_layer_norm_eps", low=0.0, high=1.0),
        "projector_activation": "silu",
    }


def _aya_fields(tower: Tower) -> dict[str, Any]:
    if _feature_layer(tower, -1) != tower.file.num_layers:
        raise tower.settings.config.unsupported("vision_feature_layer", "-1")
    return _merged_fields(tower)


def _kimi_names(settings: ProcessorSettings, vision: PartSettings) -> TowerNames:
    heads = vision.integer("num_attention_heads")
    turned = RowOrder(lambda num_rows: columns_first(num_rows, heads))
    blocks: Targets = {
        "norm0": "ln1",
        "norm1": "ln2",
        "wqkv": To("attn_qkv", turned),
        "wo": "attn_out",
        "mlp.fc0": "ffn_up",
        "mlp.fc1": "ffn_down",
    }
    targets: Targets = {
        "vision_tower.patch_embed.proj": "v.patch_embd",
        "vision_tower.patch_embed.pos_emb": "v.position_embd",
        "vision_tower.encoder.patch_embed.proj": "v.patch_embd",
        "vision_tower.encoder.patch_embed.pos_emb": "v.position_embd",
        **block_names("vision_tower.encoder.blocks", blocks),
        "vision_tower.encoder.final_layernorm": "v.post_ln",
        "mm_projector.pre_norm": "mm.input_norm",
        "mm_projector.proj.0": "mm.1",
        "mm_projector.proj.2": "mm.2",
    }
    return TowerNames(("vision_tower", "mm_projector"), targets)


def _kimi_fields(tower: Tower) -> dict[str, Any]:
    config, vision = tower.settings.config.over({"projection_layer_norm_eps": 1e-5}), tower.vision
    merge = vision.get("merge_kernel_size")
    if not isinstance(merge, list) or len(merge) != 2 or merge[0] != merge[1] or type(merge[0]) is not int:
        raise vision.unsupported("merge_kernel_size", "squares")
    return {
        "merge": merge[0],
        "projector_epsilon": config.number("projection_layer_norm_eps", low=0.0, high=1.0),
        "rotary_base": _rotary_base(vision),
    }


def _minicpm_fields(tower: Tower) -> dict[str, Any]:
    config = tower.settings.config.over(
        {"insert_layer_id": 6, "downsample_mode": "16x", "drop_vision_last_layer": False, "merger_times": 1}
    )
    if config.text("downsample_mode") not in ("4x", "16x"):
        raise config.unsupported("downsample_mode", "'4x' and '16x'")
    if config.boolean("drop_vision_last_layer") or config.integer("merger_times") != 1:
        raise config.unsupported("merger_times", "one merger behind all blocks")
    return {
        "merge": 2 if config.text("downsample_mode") == "4x" else 4,
        "window_layer": config.integer("insert_layer_id", low=0),
    }


def _paddle_fields(tower: Tower) -> dict[str, Any]:
    return _qwen_fields(tower) | {"table_resize": "linear", "projector_epsilon": 1e-5}


def _lfm2_names(settings: ProcessorSettings, vision: PartSettings) -> TowerNames:
    patches = To("v.patch_embd.weight", patches_last(vision.integer("patch_size")))
    targets: Targets = {
        **siglip_names("vision_tower"),
        "vision_tower.embeddings.patch_embedding.weight": patches,
        "multi_modal_projector.layer_norm": "mm.input_norm",
        "multi_modal_projector.linear_1": "mm.1",
        "multi_modal_projector.linear_2": "mm.2",
    }
    return TowerNames(("vision_tower", "multi_modal_projector"), targets, r"vision_tower\.head\..*")


def _lfm2_fields(tower: Tower) -> dict[str, Any]:
    config = tower.settings.config.over({"downsample_factor": 2, "projector_hidden_act": "gelu"})
    return {
        "merge": config.integer("downsample_factor", high=64),
        "projector_activation": activation(config, "projector_hidden_act"),
    }


def _ovis_names(settings: ProcessorSettings, vision: PartSettings) -> TowerNames:
    num_marks = vision.integer("num_visual_indicator_tokens")
    if num_marks != len(OVIS_MARKS):
        raise vision.unsupported("num_visual_indicator_tokens", str(len(OVIS_MARKS)))
    return TowerNames(("vision_tower", "visual_embeddings_table"), ovis_names(num_marks))


def _ovis_fields(tower: Tower) -> dict[str, Any]:
    if tower.vision.text("tokenize_function") != "softmax":
        raise tower.vision.unsupported("tokenize_function", "'softmax'")
    return {"merge": tower.vision.integer("hidden_stride", high=64), "num_marks": len(OVIS_MARKS)}


def _siglip2_names(settings: ProcessorSettings, vision: PartSettings) -> TowerNames:
    patches = To("v.patch_embd.weight", patches_last(vision.integer("patch_size")))
    targets = siglip_names("vision_model") | {"vision_model.embeddings.patch_embedding.weight": patches}
    return TowerNames(("vision_model",), targets | dict(POOLING_HEAD))


def _llama4_fields(tower: Tower) -> dict[str, Any]:
    return {
        "merge": _inverse(tower.vision, "pixel_shuffle_ratio"),
        "joins_columns_first": False,
        "rounds_pixels": True,
        "rotary_base": _rotary_base(tower.vision),
    }


TOWER_FAMILIES: dict[str, TowerFamily] = {
    "gemma3": TowerFamily(
        "gemma3",
        _siglip_names(
            ("vision_tower", "multi_modal_projector"),
            {
                "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
                "multi_modal_projector.mm_soft_emb_norm": To("mm.soft_emb_norm", PLUS_ONE),
            },
        ),
        _SIGLIP_CLASS,
        _gemma3_fields,
    ),
    "gemma4": TowerFamily(
        "gemma4v",
        _gemma4_names,
        {
            "num_attention_heads": 12,
            "head_dim": 64,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
        },
        _gemma4_fields,
        epsilon="rms_norm_eps",
    ),
    "gemma4_unified": TowerFamily(
        "gemma4uv",
        _gemma4_unified_names,
        {"patch_size": 16, "pooling_kernel_size": 3, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
        _gemma4_unified_fields,
        epsilon="rms_norm_eps",
        has_blocks=False,
    ),
    **dict.fromkeys(("qwen2_vl", "colqwen2"), _qwen("qwen2vl_merger", _QWEN2_CLASS, _qwen_fields)),
    **dict.fromkeys(
        ("qwen2_5_vl", "qwen2_5_omni", "qwen2_5_omni_thinker"), _qwen("qwen2.5vl_merger", _QWEN25_CLASS, _qwen25_fields)
    ),
    "exaone4_5": replace(
        _qwen("qwen2.5vl_merger", _QWEN25_CLASS | {"num_key_value_heads": 8}, _qwen25_fields),
        kv_heads="num_key_value_heads",
    ),
    "hyperclovax_vision_v2": replace(
        _qwen("qwen2.5vl_linear", _QWEN25_CLASS, _qwen25_fields),
        names=lambda settings, vision: TowerNames(
            ("vision_model", "vision_projector"), {**qwen_names("vision_model"), "vision_projector": "mm.4"}
        ),
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        _qwen("qwen3vl_merger", _QWEN3_CLASS, _qwen_fields),
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        _qwen("qwen3vl_merger", _QWEN3_CLASS | {"deepstack_visual_indexes": []}, _qwen_fields),
    ),
    **dict.fromkeys(
        ("mistral3", "pixtral"),
        TowerFamily(
            "pixtral",
            _pixtral_names(("vision_tower", "multi_modal_projector"), pixtral_projector("multi_modal_projector")),
            _PIXTRAL_CLASS,
            _pixtral_fields,
            extra=_BREAK,
        ),
    ),
    "lighton_ocr": TowerFamily(
        "lightonocr",
        _pixtral_names(("vision_encoder", "vision_projection"), pixtral_projector("vision_projection")),
        _PIXTRAL_CLASS,
        _pixtral_fields,
    ),
    **dict.fromkeys(
        ("idefics3", "smolvlm"),
        TowerFamily(
            "idefics3",
            _siglip_names(("vision_model", "connector"), {"connector.modality_projection.proj": "mm.model.fc"}),
            _SIGLIP_CLASS | {"num_attention_heads": 16, "patch_size": 32},
            _idefics_fields,
        ),
    ),
    "internvl": _INTERNVL,
    **dict.fromkeys(
        ("internvl_chat", "qianfan_ocr"),
        replace(
            _INTERNVL,
            names=lambda settings, vision: TowerNames(("vision_model", "mlp1"), INTERNVL_FIRST_NAMES),
            fields=_internvl_chat_fields,
        ),
    ),
    **dict.fromkeys(
        ("llava", "llava_next", "llava_next_video"),
        TowerFamily("mlp", _clip_names(_LLAVA_PARTS, LLAVA_PROJECTOR), _CLIP_CLASS, _llava_fields),
    ),
    "llava_onevision": TowerFamily(
        "mlp",
        _clip_names(_LLAVA_PARTS, LLAVA_PROJECTOR),
        _SIGLIP_CLASS | {"patch_size": 14, "image_size": 384},
        _llava_fields,
    ),
    "lfm2_vl": TowerFamily("lfm2", _lfm2_names, _SIGLIP_CLASS, _lfm2_fields),
    "llama4": TowerFamily(
        "llama4",
        lambda settings, vision: TowerNames(("vision_model", "multi_modal_projector"), LLAMA4_NAMES),
        {
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 448,
            "hidden_act": "gelu",
            "norm_eps": 1e-5,
            "pixel_shuffle_ratio": 0.5,
        },
        _llama4_fields,
        epsilon="norm_eps",
    ),
    "ovis2": TowerFamily(
        "ovis2",
        _ovis_names,
        {
            "num_attention_heads": 8,
            "patch_size": 14,
            "image_size": 224,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "hidden_stride": 1,
            "num_visual_indicator_tokens": 5,
            "tokenize_function": "softmax",
        },
        _ovis_fields,
        epsilon="rms_norm_eps",
        marks=("visual_indicator_token_ids", OVIS_MARKS),
    ),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), _GLM),
    "glm_ocr": replace(_GLM, defaults=_GLM_CLASS | {"num_heads": 16}),
    "aya_vision": TowerFamily(
        "gated", _clip_names(_PROJECTOR_PARTS, GATED_PROJECTOR), _SIGLIP_CLASS | {"patch_size": 14}, _aya_fields
    ),
    "cohere2_vision": TowerFamily(
        "gated", _siglip_names(_PROJECTOR_PARTS, GATED_PROJECTOR), _SIGLIP_CLASS, _merged_fields
    ),
    **dict.fromkeys(
        ("paligemma", "colpali"),
        TowerFamily(
            "idefics3", _siglip_names(_PROJECTOR_PARTS, {"multi_modal_projector.linear": "mm.model.fc"}), _SIGLIP_CLASS
        ),
    ),
    "kimi_k25": TowerFamily(
        "kimik25",
        _kimi_names,
        {
            "num_attention_heads": 16,
            "patch_size": 14,
            "merge_kernel_size": [2, 2],
            "hidden_act": "gelu_pytorch_tanh",
            "norm_eps": 1e-5,
        },
        _kimi_fields,
        epsilon="norm_eps",
    ),
    "minicpmv4_6": TowerFamily(
        "minicpmv4_6",
        _siglip_names(("vision_tower", "merger"), MINICPM_NAMES),
        _SIGLIP_CLASS,
        _minicpm_fields,
    ),
    "clip": TowerFamily(
        "class_row",
        lambda settings, vision: TowerNames(
            ("vision_model", "visual_projection"), siglip_names("vision_model") | {"visual_projection": "mm.fc"}
        ),
        _CLIP_CLASS,
        lambda tower: {"is_class_first": True},
    ),
    "siglip": TowerFamily(
        "pooled",
        lambda settings, vision: TowerNames(("vision_model",), siglip_names("vision_model") | dict(POOLING_HEAD)),
        _SIGLIP_CLASS,
    ),
    "siglip2": TowerFamily("pooled_any_size", _siglip2_names, _SIGLIP_CLASS),
    "paddleocr_vl": TowerFamily(
        "paddleocr",
        _siglip_names(("visual", "mlp_AR"), PADDLE_NAMES),
        _SIGLIP_CLASS | {"num_attention_heads": 16, "patch_size": 14, "image_size": 384, "spatial_merge_size": 2},
        _paddle_fields,
    ),
}
"""Families by `model_type`; Pixtral is a `llava` whose tower is Pixtral's."""

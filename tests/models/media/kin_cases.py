"""Tiny models of families near to those of the data folder, made by transformers when they are asked for.

Tokenizers, sizes of text models and numbers of tensors are those of `../shared/vision/hf/make.py`.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from localinfer.models.media.records import EncoderInput

_FUNCTIONS = (
    "tokenizer text tower ids mrope plain features weights qwen_tokens glm_tokens glm_vision picture sound"
).split()
_VALUES = "VOCAB CHAT CHATML PARTS VISION QWEN QWEN_TOKENS HALF PUBLISHED AROUND".split()


@dataclass(frozen=True)
class Kin:
    """A model, and what prepares its inputs."""

    model: str
    """Name of its class."""
    config: Any
    """Its settings."""
    tokenizer: Any
    """Its tokenizer."""
    images: Any = None
    """What prepares pictures: its class, or a function of what is prepared here, where that takes further packages;
    None if it sees none."""
    sounds: Any = None
    """The same of sounds."""
    placeholders: tuple[str, str] = ("", "")
    """Tokens that embeddings of pictures and of sounds take the place of."""
    sizes: tuple[tuple[int, int], ...] = ((180, 132), (75, 270))
    """Widths and heights of pictures, each of which is alone in a prompt."""
    seconds: tuple[float, ...] = (1.3, 0.3)
    """Lengths of sounds, likewise."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of what prepares sounds."""
    has_types: bool = False
    """True if the model is told which tokens are pictures."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the model by what the preparation calls them."""
    logits_divisor: float = 1.0
    """Divisor of the logits that the class drops."""
    processor: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its processor_config.json."""


class Maker:
    """Functions of the data folder's script, over an imported transformers."""

    def __init__(self, source: Path, transformers: ModuleType) -> None:
        import json
        import re

        import torch
        from PIL import Image
        from safetensors import safe_open

        sys.path.insert(0, str(source))
        try:
            from weights import write  # type: ignore[import-not-found]
        finally:
            sys.path.remove(str(source))
        tree = ast.parse((source / "make.py").read_text())
        kept = [
            node
            for node in tree.body
            if (isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS)
            or (
                isinstance(node, ast.Assign)
                and any(isinstance(target, ast.Name) and target.id in _VALUES for target in node.targets)
            )
        ]
        self.names: dict[str, Any] = {
            "np": np, "torch": torch, "json": json, "re": re, "Path": Path, "Image": Image, "safe_open": safe_open,
            "write": write, "transformers": transformers, "T": transformers,
        }  # fmt: skip
        exec(compile(ast.Module(kept, []), "make.py", "exec"), self.names)
        self.transformers: Any = transformers

    def __getattr__(self, name: str) -> Any:
        return self.names[name]


def _glm46v(make: Maker, r: Random) -> Kin:
    transformers = make.transformers
    tok, special = make.glm_tokens()
    config = transformers.Glm46VConfig(
        text_config=make.text(
            r,
            model_type="glm4v_text",
            num_attention_heads=4,
            rope_parameters=make.mrope([1, 1, 2], 1e4, partial_rotary_factor=0.5),
        ),
        vision_config=make.glm_vision(r) | {"model_type": "glm4v_vision"},
        **special,
    )
    size = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 30}
    return Kin(
        "Glm46VForConditionalGeneration",
        config,
        tok,
        transformers.Glm46VImageProcessorPil(size=size),
        placeholders=("<|image|>", ""),
        sizes=((120, 88), (75, 170)),
        has_types=True,
    )


def _qwen3_asr(make: Maker, r: Random) -> Kin:
    transformers = make.transformers
    names = dict(audio_token="<|audio_pad|>", audio_bos_token="<|audio_start|>", audio_eos_token="<|audio_end|>")
    tok = make.tokenizer(names, make.CHAT, bos=False)
    config = transformers.Qwen3ASRConfig(
        text_config=make.text(r, model_type="qwen3"),
        audio_config=dict(
            num_mel_bins=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=48, d_model=32,
            n_window=50, n_window_infer=200, output_dim=64, downsample_hidden_size=16,
        ),
        audio_token_id=tok.convert_tokens_to_ids("<|audio_pad|>"),
    )  # fmt: skip
    return Kin(
        "Qwen3ASRForConditionalGeneration",
        config,
        tok,
        sounds=transformers.Qwen3ASRFeatureExtractor(feature_size=32),
        placeholders=("", "<|audio_pad|>"),
        seconds=(1.3, 0.3, 4.65),
        call={"padding": True, "return_attention_mask": True},
        renamed={"attention_mask": "input_features_mask"},
    )


def _gemma4_unified(make: Maker, r: Random) -> Kin:
    transformers = make.transformers
    names = dict(
        image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>", audio_token="<|audio|>",
        boa_token="<|audio>", eoa_token="<audio|>",
    )  # fmt: skip
    tok = make.tokenizer(names, ["<|video|>", "<|turn>", "<turn|>"])
    numbers = {f"{key}_id": tok.convert_tokens_to_ids(value) for key, value in names.items() if key != "eoa_token"}
    text = make.text(
        r, num_hidden_layers=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        head_dim=16, global_head_dim=32, sliding_window=80, final_logit_softcapping=30.0,
    )  # fmt: skip
    config = transformers.Gemma4UnifiedConfig(
        text_config=text,
        vision_config=dict(mm_embed_dim=48, mm_posemb_size=64, output_proj_dims=48),
        audio_config=dict(audio_embed_dim=640),
        eoa_token_index=tok.convert_tokens_to_ids("<audio|>"),
        video_token_id=tok.convert_tokens_to_ids("<|video|>"),
        **numbers,
    )

    def pixels(entry: EncoderInput) -> dict[str, Any]:
        rows, columns = (side // 48 for side in entry.values.shape[:2])
        patches = entry.values.reshape(rows, 48, columns, 48, 3).swapaxes(1, 2).reshape(1, rows * columns, -1)
        places = np.stack([np.tile(np.arange(columns), rows), np.repeat(np.arange(rows), columns)], axis=1)
        return {
            "pixel_values": make.torch.tensor(patches.astype(np.float32) / 255),
            "image_position_ids": make.torch.tensor(places[None]),
        }

    return Kin(
        "Gemma4UnifiedForConditionalGeneration",
        config,
        tok,
        pixels,
        transformers.Gemma4UnifiedAudioFeatureExtractor(),
        placeholders=("<|image|>", "<|audio|>"),
        sizes=((200, 150), (90, 260)),
        has_types=True,
        processor={"image_processor": {"max_soft_tokens": 70}},
    )


def _granite_speech_plus(make: Maker, r: Random) -> Kin:
    transformers = make.transformers
    tok = make.tokenizer({}, ["<|audio|>", "<|start_of_role|>", "<|end_of_role|>"], bos=False)
    factors = dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=2.0)
    config = transformers.GraniteSpeechPlusConfig(
        text_config=make.text(r, model_type="granite", **factors),
        encoder_config=dict(
            input_dim=160, num_layers=5, hidden_dim=32, feedforward_mult=2, num_heads=2, dim_head=24, output_dim=14,
            context_size=20, max_pos_emb=20, conv_kernel_size=6, conv_expansion_factor=2, cat_hidden_layers=[0, 2],
        ),
        projector_config=dict(
            model_type="blip_2_qformer", hidden_size=48, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=40, encoder_hidden_size=96, cross_attention_frequency=2,
        ),
        audio_token_index=tok.convert_tokens_to_ids("<|audio|>"),
        has_lora_adapter=False,
        window_size=12,
        downsample_rate=3,
    )  # fmt: skip

    def features(entry: EncoderInput) -> dict[str, Any]:
        return {"input_features": make.torch.tensor(entry.values[None])}

    return Kin(
        "GraniteSpeechPlusForConditionalGeneration",
        config,
        tok,
        sounds=features,
        placeholders=("", "<|audio|>"),
        processor={"audio_processor": {"projector_window_size": 12, "projector_downsample_rate": 3}},
        logits_divisor=2.0,
    )


def _qianfan_ocr(make: Maker, r: Random) -> Kin:
    transformers = make.transformers
    names = dict(start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>")
    tok = make.tokenizer(names, [*make.CHAT, "<image>"], bos=False)
    vision = make.tower(r, image_size=[56, 56], patch_size=[14, 14], use_qk_norm=False, attention_bias=True)
    config = transformers.QianfanOCRConfig(
        text_config=make.text(r, model_type="qwen3"),
        vision_config=vision,
        image_token_id=tok.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    images = transformers.GotOcr2ImageProcessorPil(
        size=dict(height=56, width=56), crop_to_patches=True, max_patches=4, image_mean=[0.485, 0.456, 0.406]
    )
    return Kin(
        "QianfanOCRForConditionalGeneration",
        config,
        tok,
        images,
        placeholders=("<IMG_CONTEXT>", ""),
        sizes=((60, 44), (50, 150)),
        renamed={"num_patches": ""},
        processor={"image_seq_length": 4},
    )


def _qwen_kin(make: Maker, r: Random, name: str, text: Any, vision: Any, **more: Any) -> Kin:
    transformers = make.transformers
    tok, special = make.qwen_tokens()
    numbers = {key: value for key, value in special.items() if key in more.pop("numbers", special)}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **numbers)
    size = dict(shortest_edge=28 * 28 * 4, longest_edge=28 * 28 * 12)
    return Kin(
        f"{name}{more.pop('suffix', 'ForConditionalGeneration')}",
        config,
        tok,
        transformers.Qwen2VLImageProcessorPil(size=size, **more.pop("images", {})),
        placeholders=("<|image_pad|>", ""),
        **more,
    )


def _exaone4_5(make: Maker, r: Random) -> Kin:
    text = make.text(r, model_type="exaone4", layer_types=["full_attention"] * 4, num_hidden_layers=4)
    vision = dict(
        depth=4, hidden_size=32, intermediate_size=44, num_heads=4, num_key_value_heads=2, patch_size=14,
        spatial_merge_size=2, temporal_patch_size=2, window_size=56, out_hidden_size=64, fullatt_block_indexes=[1, 3],
    )  # fmt: skip
    numbers = ("image_token_id", "video_token_id")
    return _qwen_kin(make, r, "Exaone4_5_", text, vision, numbers=numbers)


def _hyperclovax_vision_v2(make: Maker, r: Random) -> Kin:
    text = make.text(r, model_type="hyperclovax")
    vision = dict(
        depth=4, hidden_size=32, intermediate_size=44, num_heads=2, patch_size=14, spatial_merge_size=2,
        temporal_patch_size=2, window_size=56, out_hidden_size=48, fullatt_block_indexes=[1, 3],
    )  # fmt: skip
    numbers = ("image_token_id", "video_token_id")
    return _qwen_kin(make, r, "HyperCLOVAXVisionV2", text, vision, numbers=numbers)


def _audioflamingo3(make: Maker, r: Random) -> Kin:
    transformers = make.transformers
    tok = make.tokenizer({}, ["<sound>", *make.CHAT], bos=False)
    config = transformers.AudioFlamingo3Config(
        text_config=make.text(r, model_type="qwen2"),
        audio_config=dict(
            num_mel_bins=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, hidden_size=32,
            max_source_positions=100,
        ),
        audio_token_id=tok.convert_tokens_to_ids("<sound>"),
    )  # fmt: skip
    return Kin(
        "AudioFlamingo3ForConditionalGeneration",
        config,
        tok,
        sounds=transformers.WhisperFeatureExtractor(feature_size=32, chunk_length=2),
        call={"return_attention_mask": True},
        placeholders=("", "<sound>"),
        renamed={"attention_mask": "input_features_mask"},
    )


def _llava_next_video(make: Maker, r: Random) -> Kin:
    transformers = make.transformers
    tok = make.tokenizer(dict(image_token="<image>", video_token="<video>"), [])
    pins = [[56, 112], [112, 56], [112, 112]]
    config = transformers.LlavaNextVideoConfig(
        text_config=make.text(r, model_type="llama"),
        vision_config=make.tower(r, model_type="clip_vision_model"),
        image_grid_pinpoints=pins,
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        video_token_index=tok.convert_tokens_to_ids("<video>"),
    )
    images = transformers.LlavaNextImageProcessorPil(
        size=dict(shortest_edge=56), crop_size=dict(height=56, width=56), image_grid_pinpoints=pins
    )
    return Kin(
        "LlavaNextVideoForConditionalGeneration",
        config,
        tok,
        images,
        placeholders=("<image>", ""),
        sizes=((60, 44), (50, 150)),
    )


CASES: dict[str, Callable[[Maker, Random], Kin]] = {
    "audioflamingo3": _audioflamingo3,
    "exaone4_5": _exaone4_5,
    "gemma4_unified": _gemma4_unified,
    "glm46v": _glm46v,
    "granite_speech_plus": _granite_speech_plus,
    "hyperclovax_vision_v2": _hyperclovax_vision_v2,
    "llava_next_video": _llava_next_video,
    "qianfan_ocr": _qianfan_ocr,
    "qwen3_asr": _qwen3_asr,
}
"""Models by `model_type`."""

"""Text towers of models that compare texts with pictures: CLIP and SigLIP, whose pictures have a tower of their own.

A text's vector is that of one row, behind a matrix. Which row, and how a text is filled up, is part of how such models
were trained, so both are metadata here (`reading_metadata`). GGUF has no such models; names and keys are ours.
"""

from collections.abc import Mapping
from typing import Any

from localinfer.models.checkpoint.family import NO_ROPE, Family, Metadata, Source
from localinfer.models.checkpoint.settings import Settings

_LAST_ROW = 3
_BLOCKS: dict[str, Source] = {
    "attn_norm": "layer_norm1",
    "ffn_norm": "layer_norm2",
    **{f"attn_{letter}": f"self_attn.{letter}_proj" for letter in "qkv"},
    "attn_output": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_ENDS: dict[str, Source] = {
    "token_embd": "embeddings.token_embedding",
    "position_embd": "embeddings.position_embedding",
    "output_norm": "final_layer_norm",
}
_UNSAID_END = 2
"""`eos_token_id` of the first folders, which is no token's: the pooled row is then that of the greatest id."""
_LEFT_BY_DEFAULT = ("Siglip2Tokenizer", "GemmaTokenizer", "GemmaTokenizerFast")
"""Tokenizers that fill up texts before their first token, where a folder does not say."""
_LOWERED = (*_LEFT_BY_DEFAULT, "SiglipTokenizer", "SiglipTokenizerFast")
"""Tokenizers of SigLIP whose class makes letters small, whatever tokenizer.json says."""
_WITHOUT_PUNCTUATION = ("SiglipTokenizer", "SiglipTokenizerFast")


def _clip(settings: Settings) -> Metadata:
    """CLIP (arXiv 2103.00020): rows see those before them; the vector is that of the token that ends a text."""
    end = settings.integer("eos_token_id", _UNSAID_END, low=0)
    pooled = {} if end == _UNSAID_END else {"pooled_token_id": end}
    return {**NO_ROPE, "pooling_type": _LAST_ROW, "pools_end_token": True, **pooled}


def _siglip(settings: Settings) -> Metadata:
    """SigLIP (arXiv 2303.15343, 2502.14786): the last row of a text that fills all positions, padding included."""
    length = settings.integer("max_position_embeddings", low=1)
    return {**NO_ROPE, "pooling_type": _LAST_ROW, "attention.causal": False, "padded_length": length}


_CLIP = Family(
    architecture="clip-text",
    blocks=_BLOCKS,
    outside=_ENDS,
    heads={"dense_2": "text_projection"},
    layers="encoder.layers",
    unused=r"(.*\.)?embeddings\.position_ids|logit_scale",
    activations=("quick_gelu", "gelu"),
    has_layer_norms=True,
    epsilon="layer_norm_eps",
    defaults={
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "eos_token_id": 49407,
    },
    seen="projection_dim initializer_factor",
    metadata=lambda settings: {**_clip(settings), "hidden_activation": settings.text("hidden_act", "quick_gelu")},
)
_SIGLIP = Family(
    architecture="siglip-text",
    blocks=_BLOCKS,
    outside={**_ENDS, "dense_2": "head"},
    layers="encoder.layers",
    unused=r"(.*\.)?embeddings\.position_ids|logit_(scale|bias)",
    activations=("gelu_pytorch_tanh",),
    has_layer_norms=True,
    epsilon="layer_norm_eps",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    seen="projection_size",
    metadata=_siglip,
)

CONTRASTIVE: dict[str, Family] = {
    "clip_text_model": _CLIP,
    "siglip_text_model": _SIGLIP,
    "siglip2_text_model": _SIGLIP,
}
"""By the `model_type` of the text tower."""


def reading_metadata(metadata: Mapping[str, object], tokenizer: Mapping[str, Any]) -> dict[str, object]:
    """Metadata of how texts are filled up and spelled, as the tokenizer's settings say; empty for other models.

    metadata: of the model. tokenizer: tokenizer_config.json.
    """
    prefix = metadata.get("general.architecture")
    if f"{prefix}.padded_length" not in metadata:
        return {}
    kind = str(tokenizer.get("tokenizer_class"))
    side = tokenizer.get("padding_side") or ("left" if kind in _LEFT_BY_DEFAULT else "right")
    return {
        f"{prefix}.pads_left": side == "left",
        f"{prefix}.lowers_texts": kind in _LOWERED,
        f"{prefix}.strips_punctuation": kind in _WITHOUT_PUNCTUATION,
    }

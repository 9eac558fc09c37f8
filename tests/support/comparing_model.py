"""Tiny folders of CLIP and ColQwen2 with random weights, in the names of published folders."""

from pathlib import Path

import numpy as np

from tests.support.checkpoint_files import VOCAB, Array, added_token, tokenizer_document, write_folder

SIDE, PATCH, WIDTH, SIZE = 28, 14, 32, 16
_LAYER = {
    **{f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")},
    "layer_norm1": (WIDTH,),
    "layer_norm2": (WIDTH,),
    "mlp.fc1": (2 * WIDTH, WIDTH),
    "mlp.fc2": (WIDTH, 2 * WIDTH),
}


def write_clip(folder: Path) -> Path:
    """Write the folder of a model of two towers of two blocks, whose texts have up to 64 tokens."""
    generator = np.random.default_rng(3)
    tensors: dict[str, Array] = {"logit_scale": np.float32([2.0])}

    def add(name: str, *shape: int, bias: bool = False) -> None:
        values = generator.standard_normal(shape).astype(np.float32)
        tensors[f"{name}.weight"] = values / np.float32(np.sqrt(shape[-1])) if len(shape) > 1 else 1 + values / 10
        if bias:
            tensors[f"{name}.bias"] = generator.standard_normal(shape[0]).astype(np.float32) / 10

    for tower, rows in (("text_model", 64), ("vision_model", (SIDE // PATCH) ** 2 + 1)):
        add(f"{tower}.embeddings.position_embedding", rows, WIDTH)
        for layer in range(2):
            for name, shape in _LAYER.items():
                add(f"{tower}.encoder.layers.{layer}.{name}", *shape, bias=True)
    add("text_model.embeddings.token_embedding", VOCAB, WIDTH)
    add("text_model.final_layer_norm", WIDTH, bias=True)
    add("text_projection", SIZE, WIDTH)
    tensors["vision_model.embeddings.class_embedding"] = generator.standard_normal(WIDTH).astype(np.float32)
    add("vision_model.embeddings.patch_embedding", WIDTH, 3, PATCH, PATCH)
    for norm in ("pre_layrnorm", "post_layernorm"):
        add(f"vision_model.{norm}", WIDTH, bias=True)
    add("visual_projection", SIZE, WIDTH)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": VOCAB, "max_position_embeddings": 64, "eos_token_id": 2}
    config = {
        "model_type": "clip",
        "projection_dim": SIZE,
        "text_config": {"model_type": "clip_text_model", **sizes, **text},
        "vision_config": {"model_type": "clip_vision_model", **sizes, "image_size": SIDE, "patch_size": PATCH},
    }
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE}, "crop_size": SIDE}
    return write_folder(folder, tensors, config, tokenizer=tokenizer_document(), preprocessor_config=processor)


def write_colqwen(folder: Path) -> Path:
    """Write the folder of a text model of two blocks and a tower of one, whose tokenizer has Qwen's tokens."""
    generator = np.random.default_rng(4)
    tensors: dict[str, Array] = {}

    def add(name: str, *shape: int, bias: bool = False) -> None:
        values = generator.standard_normal(shape).astype(np.float32)
        tensors[f"{name}.weight"] = values / np.float32(np.sqrt(shape[-1])) if len(shape) > 1 else 1 + values / 10
        if bias:
            tensors[f"{name}.bias"] = generator.standard_normal(shape[0]).astype(np.float32) / 10

    text, wide, vocab = "vlm.language_model", 2 * WIDTH, VOCAB + 6
    add(f"{text}.embed_tokens", vocab, WIDTH)
    add(f"{text}.norm", WIDTH)
    for layer in range(2):
        block = f"{text}.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            add(f"{block}.self_attn.{name}_proj", WIDTH, WIDTH, bias=name != "o")
        for name, rows, columns in (("gate", wide, WIDTH), ("up", wide, WIDTH), ("down", WIDTH, wide)):
            add(f"{block}.mlp.{name}_proj", rows, columns)
        add(f"{block}.input_layernorm", WIDTH)
        add(f"{block}.post_attention_layernorm", WIDTH)
    add("embedding_proj_layer", SIZE, WIDTH, bias=True)
    tower = "vlm.visual"
    add(f"{tower}.patch_embed.proj", WIDTH, 3, 2, PATCH, PATCH)
    for norm in ("norm1", "norm2"):
        add(f"{tower}.blocks.0.{norm}", WIDTH, bias=True)
    for name, rows, columns in (("attn.qkv", 3 * WIDTH, WIDTH), ("attn.proj", WIDTH, WIDTH), ("mlp.fc1", wide, WIDTH)):
        add(f"{tower}.blocks.0.{name}", rows, columns, bias=True)
    add(f"{tower}.blocks.0.mlp.fc2", WIDTH, wide, bias=True)
    add(f"{tower}.merger.ln_q", WIDTH, bias=True)
    add(f"{tower}.merger.mlp.0", 4 * WIDTH, 4 * WIDTH, bias=True)
    add(f"{tower}.merger.mlp.2", WIDTH, 4 * WIDTH, bias=True)
    sizes = {"hidden_size": WIDTH, "intermediate_size": wide, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    own = {"model_type": "qwen2_vl_text", "num_key_value_heads": 2, "vocab_size": vocab, "rope_parameters": rope}
    vision = {"model_type": "qwen2_vl_vision", "depth": 1, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": 2}
    vlm = {
        "model_type": "qwen2_vl",
        "tie_word_embeddings": False,
        "text_config": {**sizes, **own, "max_position_embeddings": 512, "rms_norm_eps": 1e-6},
        "vision_config": {**vision, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    names = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "endoftext")
    tokenizer = tokenizer_document()
    tokenizer["added_tokens"] += [added_token(VOCAB + index, f"<|{name}|>") for index, name in enumerate(names)]
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}
    return write_folder(
        folder,
        tensors,
        {"model_type": "colqwen2", "embedding_dim": SIZE, "vlm_config": vlm},
        tokenizer=tokenizer,
        preprocessor_config={"image_processor_type": "Qwen2VLImageProcessor", "size": size},
    )

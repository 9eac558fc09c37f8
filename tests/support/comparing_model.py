"""A tiny CLIP folder with random weights, in the names of published folders."""

from pathlib import Path

import numpy as np

from tests.support.checkpoint_files import VOCAB, Array, tokenizer_document, write_folder

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

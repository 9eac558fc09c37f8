"""Small Gemma 4 models with a vocabulary: a target, and the draft model made for it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localinfer.models.text.vocabulary import PREFIX
from localinfer.quant.gguf.reader import read_gguf
from tests.api.encoder_models import vocabulary_entries
from tests.models.arch_models import skeletons, write_skeleton
from tests.models.text.vocabularies import CONTROL, USER_DEFINED, gemma4_metadata
from tests.support.checkpoint_files import Stored, write_folder

TARGET, DRAFT = "gemma4-e2b", "gemma4-assistant-draft"
CONTROLS = ("<|turn>", "<turn|>")
MARKERS = ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>')


def write_gemma4(
    folder: Path,
    name: str = TARGET,
    *,
    context: int = 1024,
    renamed: Mapping[str, str] | None = None,
    further: Sequence[tuple[str, list[int]]] = (),
    template: str | None = None,
) -> Path:
    """The fixture of this name with text for tokens and a longer context.

    renamed: tokens in place of others. further: names and shapes of tensors that it has besides.
    """
    skeleton = dict(skeletons()[name])
    metadata: dict[str, Any] = dict(gemma4_metadata())
    tokens = [(renamed or {}).get(token, token) for token in (*metadata[PREFIX + "tokens"], *CONTROLS, *MARKERS)]
    types = [*metadata[PREFIX + "token_type"], *[CONTROL] * len(CONTROLS), *[USER_DEFINED] * len(MARKERS)]
    merges = metadata.pop(PREFIX + "merges")
    metadata |= {
        PREFIX + "tokens": tokens,
        PREFIX + "token_type": np.array(types, np.int32),
        PREFIX + "scores": np.zeros(len(tokens), np.float32),
    }
    size, arch = -(-len(tokens) // 16) * 16, skeleton["arch"]
    changed = {f"{arch}.context_length": context, f"{arch}.vocab_size": size}
    kept = [entry for entry in skeleton["kv"] if not entry[0].startswith(PREFIX)]
    skeleton["kv"] = [[key, kind, element, changed.get(key, value)] for key, kind, element, value in kept]
    skeleton["kv"] += [*vocabulary_entries(metadata, size), [PREFIX + "merges", "ARRAY", "STRING", merges]]
    if template is not None:
        skeleton["kv"].append(["tokenizer.chat_template", "STRING", None, template])
    sizes = {"token_embd.weight": size, "per_layer_token_embd.weight": size}
    tensors = [*skeleton["tensors"], *further]
    skeleton["tensors"] = [[key, [sizes.get(key, shape[0]), *shape[1:]]] for key, shape in tensors]
    path = folder / f"{name}.gguf"
    write_skeleton(skeleton, path)
    return path


def write_draft_folder(folder: Path, draft: Path, *, with_centroids: bool = False) -> Path:
    """The draft model of a GGUF file as its publisher lays it out: a folder, without a tokenizer."""
    tensors: dict[str, Stored] = {}
    with read_gguf(draft) as file:
        names = {name: name for name in file.tensors}
        for ours, theirs in _NAMES:
            names = {name: re.sub(ours, theirs, changed) for name, changed in names.items()}
        for name, changed in names.items():
            if name != "rope_freqs.weight":
                values = file.tensor_bytes(name).view(np.float32)
                tensors[changed] = values.reshape(file.tensors[name].shape).copy()
        size = {key: int(file.metadata[f"gemma4-assistant.{key}"]) for key in _SIZES}
        windowed = [bool(one) for one in file.metadata["gemma4-assistant.attention.sliding_window_pattern"]]
    if with_centroids:
        tensors["masked_embedding.centroids.weight"] = np.ones((4, size["embedding_length"]), np.float32)
        tensors["masked_embedding.token_ordering"] = np.arange(len(tensors["model.embed_tokens.weight"]))
    text = {
        "model_type": "gemma4_text",
        **{name: size[key] for key, name in _SIZES.items()},
        "num_hidden_layers": len(windowed),
        "num_kv_shared_layers": len(windowed),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    config = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": len(tensors["post_projection.weight"]),
        "use_ordered_embeddings": with_centroids,
        "num_centroids": 4,
        "centroid_intermediate_top_k": 2,
        "text_config": text,
    }
    return write_folder(folder, tensors, config)


_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
}
_NAMES = (
    (r"nextn\.", ""),
    (r"^(token_embd|output_norm|blk)\.", r"model.\1."),
    (r"token_embd\.", "embed_tokens."),
    (r"output_norm\.", "norm."),
    (r"blk\.", "layers."),
    (r"attn_norm\.", "input_layernorm."),
    (r"attn_(q)\.", r"self_attn.\1_proj."),
    (r"attn_output\.", "self_attn.o_proj."),
    (r"attn_q_norm\.", "self_attn.q_norm."),
    (r"post_attention_norm\.", "post_attention_layernorm."),
    (r"layer_output_scale\.weight", "layer_scalar"),
    (r"post_ffw_norm\.", "post_feedforward_layernorm."),
    (r"ffn_norm\.", "pre_feedforward_layernorm."),
    (r"ffn_(gate|up|down)\.", r"mlp.\1_proj."),
)
"""GGUF's names of tensors to those of published checkpoints, one rule after the other."""

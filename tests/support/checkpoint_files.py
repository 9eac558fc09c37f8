"""Writes Hugging Face folders for tests: safetensors, a tiny Llama in the checkpoint's own names, its tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Stored = Array | tuple[str, Array]
"""An array, its dtype named by its type; or a dtype's name and the array that holds its bits (BF16 in uint16)."""

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD, VOCAB, LAYERS = 128, 256, 4, 2, 32, 120, 2
LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MODULES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOKEN_IDS = np.random.default_rng(4).integers(0, VOCAB, 30).astype(np.int32)

_NAMES = {"i1": "I8", "f2": "F16", "f4": "F32", "f8": "F64", "i4": "I32", "i8": "I64", "u1": "U8", "i2": "I16"}


def safetensors_bytes(tensors: Mapping[str, Stored]) -> bytes:
    """A whole file. The order of the tensors is that of the mapping."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data: list[bytes] = []
    size = 0
    for name, stored in tensors.items():
        dtype, array = stored if isinstance(stored, tuple) else (_NAMES[stored.dtype.str[1:]], stored)
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [size, size + len(raw)]}
        data.append(raw)
        size += len(raw)
    return with_header(json.dumps(header), b"".join(data))


def with_header(header: str, data: bytes = b"") -> bytes:
    """A file of this header and these tensor bytes."""
    raw = header.encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + data


def bfloat16(values: Array) -> tuple[str, Array]:
    """Values cut to bfloat16, as a file stores them."""
    return "BF16", (np.asarray(values, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def llama_weights(seed: int = 9) -> dict[str, Array]:
    """Random float32 weights of the tiny Llama, in the checkpoint's names."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return (generator.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        weights |= {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in MODULES.items()}
        norms += [f"model.layers.{layer}.{name}" for name in ("input_layernorm", "post_attention_layernorm")]
    for norm in norms:
        weights[f"{norm}.weight"] = (1 + 0.1 * generator.standard_normal(HIDDEN)).astype(np.float32)
    return weights


def write_folder(
    folder: Path, tensors: Mapping[str, Stored], config: Mapping[str, Any] = LLAMA_CONFIG, **documents: Any
) -> Path:
    """Write model.safetensors, config.json and the named JSON documents; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    for name, document in {"config": config, **documents}.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def added_token(index: int, text: str, is_special: bool = True) -> dict[str, Any]:
    """An entry of `added_tokens`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text, **flags, "special": is_special}


def tokenizer_document() -> dict[str, Any]:
    """A tokenizer.json of 120 ids: SentencePiece's bytes for a few letters, two merges, three special tokens."""
    letters = "▁abcdefghijklmnopqrstuvwxyz"
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(32, 112)), *letters, "▁a", "▁ab"]
    added = [added_token(index, texts[index]) for index in range(3)]
    return {
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(texts)},
            "merges": [["▁", "a"], ["▁a", "b"]],
        },
    }

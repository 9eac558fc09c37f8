"""Write the trained demo model as a GGUF file, and run that file in plain NumPy to prove it right."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from dialogues import CHAT_TEMPLATE, EOS, IM_END, SPECIAL_TOKENS
from network import DemoModel
from numpy.typing import NDArray
from tokenizers import Tokenizer

DESCRIPTION = (
    "A very small model that ships inside localinfer, so that everything runs on a fresh machine. It tells little "
    "stories and makes things up. Trained on public-domain children's books, TinyStories and generated dialogues."
)

_LAYER_TENSORS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def write_gguf(model: DemoModel, tokenizer: Tokenizer, path: Path) -> None:
    """Write matrices as F16, norms as F32, the vocabulary, the chat template and the model's description."""
    shape = model.shape
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("localinfer demo")
    writer.add_description(DESCRIPTION)
    writer.add_author("the localinfer project")
    writer.add_license("MIT")
    writer.add_languages(["en"])
    writer.add_tags(["text-generation", "stories", "demo"])
    writer.add_size_label(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f}M")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_vocab_size(shape.vocab_size)
    _add_vocabulary(writer, tokenizer)
    for name, weight in model.named_parameters():
        data = weight.detach().numpy()
        writer.add_tensor(name, data if data.ndim == 1 else data.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(vocabulary[SPECIAL_TOKENS[0]])
    writer.add_eos_token_id(vocabulary[EOS])
    writer.add_eot_token_id(vocabulary[IM_END])
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _normalize(x: NDArray[np.float32], weight: NDArray[np.float32], epsilon: float) -> NDArray[np.float32]:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def forward_in_numpy(path: Path, token_ids: list[int]) -> NDArray[np.float32]:
    """Return logits float32[time, vocab] from nothing but the GGUF file."""
    reader = gguf.GGUFReader(str(path))
    weights = {tensor.name: np.asarray(tensor.data, np.float32) for tensor in reader.tensors}

    def setting(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    num_heads, num_kv_heads = setting("attention.head_count"), setting("attention.head_count_kv")
    head_dim, epsilon = setting("rope.dimension_count"), setting("attention.layer_norm_rms_epsilon")
    time_steps = len(token_ids)
    frequencies = setting("rope.freq_base") ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = np.exp(1j * np.arange(time_steps)[:, None] * frequencies)[:, None]

    def rotate(x: NDArray[np.float32]) -> NDArray[np.float32]:
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * turns
        return np.stack((turned.real, turned.imag), -1).reshape(x.shape).astype(np.float32)

    x = weights["token_embd.weight"][token_ids]
    for index in range(setting("block_count")):
        layer = {name: weights[f"blk.{index}.{name}.weight"] for name in _LAYER_TENSORS}
        normed = _normalize(x, layer["attn_norm"], epsilon)
        q = rotate((normed @ layer["attn_q"].T).reshape(time_steps, num_heads, head_dim))
        k = rotate((normed @ layer["attn_k"].T).reshape(time_steps, num_kv_heads, head_dim))
        v = (normed @ layer["attn_v"].T).reshape(time_steps, num_kv_heads, head_dim)
        k, v = (np.repeat(part, num_heads // num_kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
        scores = np.where(np.tri(time_steps, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(time_steps, -1).astype(np.float32) @ layer["attn_output"].T
        normed = _normalize(x, layer["ffn_norm"], epsilon)
        gate = normed @ layer["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    return _normalize(x, weights["output_norm.weight"], epsilon) @ weights["token_embd.weight"].T


@torch.no_grad()
def verify_gguf(model: DemoModel, tokenizer: Tokenizer, path: Path) -> float:
    """Return the relative L2 error of the file's logits, in NumPy, against torch's with F16 matrices.

    Raises: SystemExit if it is above 1e-3 or the file's vocabulary encodes a text differently.
    """
    text = 'Once upon a time, there was a fox who said, "I\'m 12 years old!" It was naïve.\n\nThe end. '
    token_ids = tokenizer.encode(SPECIAL_TOKENS[0] + text * 6).ids
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.copy_(weight.half().float())
    expected = model(torch.tensor([token_ids]))[0].numpy()
    found = forward_in_numpy(path, token_ids)
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    if error > 1e-3:
        raise SystemExit(f"{path} gives logits that differ from torch's by {error:.1e}; at most 1e-3 was expected")
    return error

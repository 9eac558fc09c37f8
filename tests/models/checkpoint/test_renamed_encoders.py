"""Folders of encoders whose code is not in transformers: the same vectors as from the same weights in a GGUF file."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.quant.gguf.reader import read_gguf
from tests.models.arch_models import build_text_model
from tests.support.checkpoint_files import write_folder

Values = NDArray[np.float32]
_JINA = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_q_norm": "attention.self.layer_norm_q",
    "attn_k_norm": "attention.self.layer_norm_k",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
}
_TEXTS = {**_JINA, "ffn_down": "mlp.wo", "layer_output_norm": "mlp.layernorm"}
_CODE = {**_JINA, "attn_norm_2": "layer_norm_1", "ffn_down": "mlp.down_layer", "layer_output_norm": "layer_norm_2"}
_NEO = {
    "attn_norm": "attention_norm",
    "attn_qkv": "qkv",
    "attn_output": "wo",
    "ffn_norm": "ffn_norm",
    "ffn_up": "ffn.w12",
    "ffn_down": "ffn.w3",
}
_BERT_ENDS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_ENDS = {
    "jina-bert-v2-encoder": _BERT_ENDS,
    "jina-bert-v2-code-encoder": _BERT_ENDS,
    "neo-bert-encoder": {"token_embd": "model.encoder", "enc.output_norm": "model.layer_norm"},
}
_BLOCKS = {"jina-bert-v2-encoder": _TEXTS, "jina-bert-v2-code-encoder": _CODE, "neo-bert-encoder": _NEO}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128}
_JINA_CONFIG = {
    "model_type": "bert",
    "architectures": ["JinaBertForMaskedLM"],
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "emb_pooler": "mean",
    "attn_implementation": "torch",
    "hidden_act": "gelu",
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    **_SIZES,
}
_NEO_CONFIG = {
    "model_type": "neobert",
    "architectures": ["NeoBERTLMHead"],
    "embedding_init_range": 0.02,
    "decoder_init_range": 0.02,
    "intermediate_size": 144,
    "max_length": 256,
    "norm_eps": 1e-6,
    "pad_token_id": 0,
    **_SIZES,
}


def stored_layer(name: str, tensors: dict[str, Values]) -> dict[str, Values]:
    """A block's tensors under the names and in the order that published folders have."""
    names = _BLOCKS[name]
    found: dict[str, Values] = {}
    for key, values in tensors.items():
        stem, _, leaf = key.rpartition(".")
        if stem == "attn_qkv" and name == "neo-bert-encoder":
            values = values.reshape(3, 4, -1, 64).swapaxes(0, 1).reshape(-1, 64)
        if stem in names:
            found[f"{names[stem]}.{leaf}"] = values
    if name == "jina-bert-v2-encoder":
        halves = [tensors["ffn_gate.weight"], tensors["ffn_up.weight"]]
        found["mlp.gated_layers.weight"] = np.concatenate(halves)
    elif name == "jina-bert-v2-code-encoder":
        gate, up = np.split(tensors["ffn_up.weight"], 2)
        found["mlp.up_gated_layer.weight"] = np.concatenate([up, gate])
    return found


def write_published(path: Path, name: str, folder: Path) -> Path:
    """The model of a GGUF file as a folder."""
    tensors: dict[str, Any] = {}
    layers: dict[int, dict[str, Values]] = {}
    with read_gguf(path) as file:
        for key, record in file.tensors.items():
            values = file.tensor_bytes(key).view(np.float32).reshape(record.shape).copy()
            block = re.fullmatch(r"blk\.(\d+)\.(.+)", key)
            if block is not None:
                layers.setdefault(int(block[1]), {})[block[2]] = values
                continue
            stem, _, leaf = key.rpartition(".")
            tensors[f"{_ENDS[name][stem]}.{leaf}"] = values
    place = "model.transformer_encoder" if name == "neo-bert-encoder" else "encoder.layer"
    for layer, found in layers.items():
        tensors |= {f"{place}.{layer}.{key}": values for key, values in stored_layer(name, found).items()}
    return write_folder(folder, tensors, _NEO_CONFIG if name == "neo-bert-encoder" else _JINA_CONFIG)


@pytest.mark.parametrize("name", _BLOCKS)
def test_vectors_are_those_of_the_same_weights_in_a_file(name: str, tmp_path: Path) -> None:
    path = build_text_model(tmp_path, name).path
    folder = write_published(path, name, tmp_path / "folder")
    with open_checkpoint(folder) as file:
        assert file.unknown_settings == ()
    token_ids = np.arange(5, 45)
    # Config.json's "gelu" is not the tanh form that such a file means.
    exact = {} if name == "neo-bert-encoder" else {"jina-bert-v2.exact_gelu": True}
    with localinfer.load(path, threads=1, overrides=exact) as plain, localinfer.load(folder, threads=1) as published:
        wanted = plain.embed(token_ids, pooling="none", normalize=False)
        found = published.embed(token_ids, pooling="none", normalize=False)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))

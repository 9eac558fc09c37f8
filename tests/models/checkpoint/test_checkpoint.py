"""Hugging Face folders of plain weights: the same logits as the GGUF file of the same model, and typed refusals."""

import gc
import weakref
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import localinfer
from localinfer.errors import CorruptFileError, ModelFileError, UnsupportedFormatError
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.load.loader import load_model
from tests.support.checkpoint_files import (
    GGUF_NAMES,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    LLAMA_CONFIG,
    TOKEN_IDS,
    VOCAB,
    Array,
    bfloat16,
    llama_weights,
    tokenizer_document,
    write_folder,
)


def write_gguf(path: Path, weights: dict[str, Array]) -> Path:
    """The same Llama as a converter would write it: rows of queries and keys as pairs that rotate together."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        if module in names:
            writer.add_tensor(f"{names[module]}.weight", values)
            continue
        _, _, layer, inner = module.split(".", 3)
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(inner)
        if heads is not None:
            pairs = [values[h * 32 + i + half] for h in range(heads) for i in range(16) for half in (0, 16)]
            values = np.stack(pairs)
        writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[inner]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def cpu_logits(path: Path, threads: int = 2) -> Array:
    with localinfer.load(path, threads=threads, kv_type="f32") as llm:
        return llm.logits(TOKEN_IDS)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_folder_gives_the_same_bits_as_the_gguf_file_of_the_same_weights(tmp_path: Path) -> None:
    weights = llama_weights()
    folder = write_folder(tmp_path / "folder", weights)
    wanted = cpu_logits(write_gguf(tmp_path / "model.gguf", weights))
    np.testing.assert_array_equal(cpu_logits(folder), wanted)
    np.testing.assert_array_equal(cpu_logits(folder, threads=1), wanted)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_folder_gives_the_bits_of_its_weights_widened(dtype: str, tmp_path: Path) -> None:
    weights = llama_weights()
    halves: dict[str, Any] = {
        name: values.astype(np.float16) if dtype == "F16" else bfloat16(values) for name, values in weights.items()
    }
    widened = {
        name: half.astype(np.float32) if dtype == "F16" else (half[1].astype(np.uint32) << 16).view(np.float32)
        for name, half in halves.items()
    }
    found = cpu_logits(write_folder(tmp_path / "halves", halves))
    np.testing.assert_array_equal(found, cpu_logits(write_folder(tmp_path / "widened", widened)))


def test_folder_runs_with_its_tokenizer_template_and_ends(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        llama_weights(),
        tokenizer=tokenizer_document(),
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ messages }}"},
        generation_config={"eos_token_id": [2, 83, 84, 85]},
    )
    with localinfer.load(folder, threads=1) as llm:
        assert llm.tokenizer.encode("ab a") == [1, 111, 110]
        assert llm.tokenizer.decode([111, 110]) == "ab a"
        assert llm.tokenizer.eog_token_ids == {2, 83, 84, 85}
        assert llm.complete("ab", max_tokens=3, seed=1).token_ids
    assert localinfer.load_tokenizer(folder).encode("ab") == [1, 111]


def test_tied_folder_needs_no_head_and_an_untied_one_does(tmp_path: Path) -> None:
    weights = llama_weights()
    del weights["lm_head.weight"]
    with open_checkpoint(write_folder(tmp_path / "a", weights, {**LLAMA_CONFIG, "tie_word_embeddings": True})) as model:
        assert "output.weight" not in model.tensors
    with pytest.raises(CorruptFileError, match=r"there is no lm_head\.weight"):
        open_checkpoint(write_folder(tmp_path / "b", weights))


def test_stacks_of_experts_are_their_matrices_in_order(tmp_path: Path) -> None:
    weights = llama_weights()
    config = {**LLAMA_CONFIG, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for expert in range(3):
            for letter, module in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                name = f"{prefix}.block_sparse_moe.experts.{expert}.{letter}.weight"
                weights[name] = weights[f"{prefix}.mlp.{module}.weight"] + np.float32(expert)
        for module in ("gate_proj", "down_proj", "up_proj"):
            del weights[f"{prefix}.mlp.{module}.weight"]
        weights[f"{prefix}.block_sparse_moe.gate.weight"] = np.ones((3, HIDDEN), np.float32)
    with open_checkpoint(write_folder(tmp_path / "whole", weights, config)) as model:
        info = model.tensor("blk.1.ffn_down_exps.weight")
        assert info.shape == (3, HIDDEN, INTERMEDIATE)
        stack = model.tensor_bytes(info.name).view(np.float32).reshape(info.shape)
        np.testing.assert_array_equal(stack[2], weights["model.layers.1.block_sparse_moe.experts.2.w2.weight"])
    del weights["model.layers.1.block_sparse_moe.experts.1.w2.weight"]
    with pytest.raises(CorruptFileError, match="there for 2 experts; wanted all 3"):
        open_checkpoint(write_folder(tmp_path / "gap", weights, config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "rwkv"}, "model_type is 'rwkv'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"rope_scaling": {"type": "magic", "factor": 2.0}}, "RoPE scaling 'magic'"),
    ],
)
def test_config_that_cannot_run_here_is_refused_by_its_key(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match=words):
        open_checkpoint(write_folder(tmp_path, llama_weights(), {**LLAMA_CONFIG, **change}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "128"}, "hidden_size is '128'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, "long_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
    ],
)
def test_config_without_meaning_is_refused_by_its_key(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=words):
        open_checkpoint(write_folder(tmp_path, llama_weights(), {**LLAMA_CONFIG, **change}))


def test_tensor_without_a_place_is_refused_and_a_picture_part_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = llama_weights()
    pictures = {"vision_tower.patch.weight": np.ones((2, 2), np.float32)}
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    with open_checkpoint(write_folder(tmp_path / "a", {**weights, **pictures, **inverse})):
        assert "its text model runs without" in caplog.text
    sinks = {"model.layers.0.self_attn.sinks": np.ones(4, np.float32)}
    with pytest.raises(UnsupportedFormatError, match=r"model\.layers\.0\.self_attn\.sinks"):
        open_checkpoint(write_folder(tmp_path / "b", {**weights, **sinks}))
    beyond = {"model.layers.2.input_layernorm.weight": np.ones(HIDDEN, np.float32)}
    with pytest.raises(UnsupportedFormatError, match=r"model\.layers\.2\.input_layernorm"):
        open_checkpoint(write_folder(tmp_path / "c", {**weights, **beyond}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.ones((HIDDEN, HIDDEN - 32), np.float32), "the 96 columns of blk.1.attn_output.weight"),
        (np.ones((HIDDEN - 8, HIDDEN), np.float32), r"shape \(120, 128\)"),
        (np.ones((HIDDEN, HIDDEN), np.int64), "is I64"),
        (np.ones((HIDDEN, HIDDEN), np.float64), "is F64"),
        (("F8_E4M3", np.ones((HIDDEN, HIDDEN), np.uint8)), "is F8_E4M3"),
        (np.ones((HIDDEN, 2, HIDDEN // 2), np.float32), "wanted a vector or a matrix"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weight_of_a_wrong_shape_or_type_is_refused(values: Any, words: str, tmp_path: Path) -> None:
    weights = {**llama_weights(), "model.layers.1.self_attn.o_proj.weight": values}
    with pytest.raises(ModelFileError, match=words):
        localinfer.load(write_folder(tmp_path, weights), threads=1)


def test_closed_folder_without_a_tokenizer_is_freed_at_once(tmp_path: Path) -> None:
    model = load_model(write_folder(tmp_path, llama_weights()), threads=1)
    assert model.tokenizer is None
    file = weakref.ref(model.file)
    gc.disable()
    try:
        model.close()
        del model
        assert file() is None, "no cycle keeps it until the collector runs"
    finally:
        gc.enable()

"""`localinfer show`: true numbers, and nothing from a file that could control a terminal."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from localinfer.apps.cli import main
from localinfer.apps.show.describe import describe_file, render_json, render_text
from tests.models.gemma4_texts import DRAFT, write_gemma4
from tests.models.small_models import write_small_llama
from tests.support.checkpoint_files import (
    LLAMA_CONFIG,
    MODULES,
    Stored,
    llama_weights,
    tokenizer_document,
    write_folder,
)
from tests.support.quantized_checkpoints import gptq_tensors, in_module, random_codes

TEMPLATE = "{{ messages }}"


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "made.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("evil\x1b[2J\u202e name\nsecond line")
    writer.add_context_length(128)
    writer.add_block_count(3)
    writer.add_float32("llama.rope.freq_base", 1e-5)
    writer.add_float32("made.infinite", float("inf"))
    writer.add_array("made.short", [1, 2, 3])
    writer.add_array("made.words", ["a", "b\x07"])
    writer.add_token_list([f"token {index}" for index in range(40)])
    writer.add_tokenizer_model("gpt2")
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("norm.weight", np.zeros(64, np.float32))
    blocks = np.zeros((32, 2 * 18), np.uint8)
    writer.add_tensor("a.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_description_counts_weights_bytes_and_types(model_file):
    description = describe_file(str(model_file))
    assert description.num_parameters == 64 + 32 * 64
    stored_bytes = 64 * 4 + 32 * 64 // 32 * 18
    assert description.bits_per_weight == pytest.approx(8 * stored_bytes / (64 + 32 * 64))
    assert [(share.type, share.num_tensors, share.num_parameters) for share in description.types] == [
        ("Q4_0", 1, 32 * 64),
        ("F32", 1, 64),
    ]
    assert description.sizes == {"num_layers": 3, "context_length": 128, "vocab_size": 40}
    assert description.num_bytes == model_file.stat().st_size


def test_description_names_long_arrays_and_lists_short_ones(model_file):
    metadata = describe_file(str(model_file)).metadata
    assert metadata["tokenizer.ggml.tokens"] == "array of 40 string"
    assert metadata["made.short"] == [1, 2, 3]
    assert metadata["llama.rope.freq_base"] == 1e-5


def test_text_has_no_control_characters(model_file):
    text = render_text(describe_file(str(model_file)), tensors=True)
    assert "evil\\u001b[2J\ufffd name\\nsecond line" in text
    assert not [character for character in text if character < " " and character != "\n"]
    assert "\u202e" not in text


def test_memory_by_context_is_shown_and_in_json(tmp_path: Path) -> None:
    description = describe_file(str(write_small_llama(tmp_path / "small.gguf")))
    (row,) = json.loads(render_json(description, tensors=False))["memory"]["contexts"]
    # Two layers of one head of 16: keys and values as float16, or as codes with a float16 scale each.
    assert row["context_length"] == 128
    assert row["kv_bytes"] == {"f16": 128 * 2 * 2 * 16 * 2, "q8_0": 128 * 2 * 2 * (16 + 2)}
    text = render_text(description, tensors=False)
    assert "memory on the CPU" in text and "the whole context fits here" in text


def test_json_is_strict_json(model_file, capsys):
    assert main(["show", "--json", "--tensors", str(model_file)]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    description = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert description["metadata"]["made.infinite"] == "inf"
    assert description["chat_template"]["num_characters"] == len(TEMPLATE)
    assert [(tensor["name"], tensor["shape"]) for tensor in description["tensors"]] == [
        ("norm.weight", [64]),
        ("a.weight", [32, 64]),
    ]


def test_file_without_tensors_is_shown(tmp_path, capsys):
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert main(["show", str(path)]) == 0
    assert "tokenizer      none" in capsys.readouterr().out


def test_show_describes_a_folder_as_the_file_it_would_become(tmp_path: Path) -> None:
    codes = random_codes(np.random.default_rng(1), MODULES["self_attn.q_proj"], is_symmetric=True)
    weights: dict[str, Stored] = {
        **llama_weights(),
        **in_module("model.layers.0.self_attn.q_proj", gptq_tensors(codes)),
    }
    del weights["model.layers.0.self_attn.q_proj.weight"]
    config = {**LLAMA_CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    folder = write_folder(tmp_path / "tiny", weights, config, tokenizer=tokenizer_document())
    description = describe_file(str(folder))
    assert description.gguf_version is None
    assert (description.architecture, description.name) == ("llama", "tiny")
    assert description.sizes["num_layers"] == 2
    assert description.sizes["vocab_size"] == 120
    assert {share.type: share.num_tensors for share in description.types} == {"F32": 20, "Q4_0": 1}
    assert description.num_bytes == (folder / "model.safetensors").stat().st_size
    text = render_text(description, tensors=True)
    assert "Hugging Face folder" in text
    assert "array of 120" in text
    json.loads(render_json(description, tensors=True))


def test_draft_model_of_another_cache_is_shown_as_one_and_told_how_to_run(tmp_path: Path, capsys) -> None:
    path = write_gemma4(tmp_path, DRAFT)
    description = describe_file(str(path))
    assert description.drafts_for == "gemma4" and not description.unknown_settings
    shown = render_text(description, tensors=False)
    assert "gemma4-assistant, a draft model: for a gemma4 model, given with it as --draft" in shown
    assert main(["run", "--model", str(path), "--prompt", "the"]) == 2
    assert "'gemma4' model that it drafts for" in (error := capsys.readouterr().err) and "(--draft)" in error

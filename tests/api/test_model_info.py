"""`llm.info` says what a model is: of a file, a folder, an encoder, a mixture, with and without tools and reasoning."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import localinfer
from localinfer.errors import ClosedError
from localinfer.loading.memory.plan import plan_file
from localinfer.loading.options import model_path
from tests.models.arch_models import build_model, build_text_model
from tests.models.text.family_templates import HERMES_THINKING, LLAMA3
from tests.support.checkpoint_files import llama_weights, tokenizer_document, write_folder


def test_of_a_file() -> None:
    demo = model_path(None)
    with localinfer.load(threads=1, context_length=512, kv_type="q8_0", speculation=None) as llm:
        info = llm.info
        assert info is llm.info
    assert (info.name, info.path, info.architecture) == ("localinfer demo", demo, "llama")
    assert (info.capabilities, info.device, info.threads) == (("completion", "chat", "embeddings"), "cpu", 1)
    assert (info.parameters, info.quantization, info.file_bytes) == (5_770_496, "F16", demo.stat().st_size)
    assert info.bits_per_weight == pytest.approx(16, abs=0.1)
    assert (info.num_layers, info.num_experts, info.vocab_size) == (6, 0, 4096)
    assert (info.context_length, info.trained_context_length, info.kv_type) == (512, 1024, "q8_0")
    assert info.memory_bytes == plan_file(demo, kv_type="q8_0").total_bytes(512)
    assert info.chat_template is not None and "<|im_start|>" in info.chat_template
    assert (info.supports_tools, info.supports_thinking) == (False, False)
    with pytest.raises(FrozenInstanceError):
        info.name = "another"  # type: ignore[misc]


@pytest.mark.parametrize(("template", "thinks"), [(HERMES_THINKING, True), (LLAMA3, False)])
def test_templates_with_tools_and_reasoning(template: str, thinks: bool) -> None:
    with localinfer.load(threads=1, speculation=None, chat_template=template) as llm:
        info = llm.info
    assert (info.supports_tools, info.supports_thinking, info.chat_template) == (True, thinks, template)


def test_of_a_folder_without_a_template(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a folder", llama_weights(), tokenizer=tokenizer_document())
    with localinfer.load(folder, threads=1, speculation=None) as llm:
        info = llm.info
        assert info.context_length == llm.context_length and info.vocab_size == llm.vocab_size
    assert (info.name, info.path, info.architecture, info.quantization) == ("a folder", folder, "llama", "F32")
    assert (info.chat_template, info.supports_tools) == (None, False)


def test_of_an_encoder_and_of_a_mixture(tmp_path: Path) -> None:
    with localinfer.load(build_text_model(tmp_path, "bert-encoder").path, threads=1) as llm:
        info = llm.info
    assert info.capabilities == ("embeddings",) and info.memory_bytes > 0
    assert (info.chat_template, info.supports_tools, info.supports_thinking) == (None, False, False)
    with localinfer.load(build_model(tmp_path, "glm4moe-mtp").path, threads=1) as llm:
        info = llm.info
        assert info.num_experts == llm._model.config.experts.num_experts > 1  # type: ignore[union-attr]
        assert info.num_layers < llm._model.config.num_layers, "layers that predict further tokens draft only"


def test_of_a_closed_model() -> None:
    llm = localinfer.load(threads=1, speculation=None)
    llm.close()
    with pytest.raises(ClosedError):
        _ = llm.info

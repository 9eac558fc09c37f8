"""Which kernels a model needs is known without its weights, and is what loading it compiles."""

from pathlib import Path
from typing import Any

import pytest

import localinfer
from localinfer.kernels.cpu import lower
from localinfer.kernels.jit import object_cache
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.loading.options import model_path
from localinfer.models.load import loader
from localinfer.models.load.loader import load_model
from localinfer.models.load.needed_kernels import needed_kernels
from localinfer.models.load.weights import CpuWeights
from tests.models.arch_models import architectures, build_model, build_text_model, text_models


class EndOfLoad(Exception):
    """What is loaded after the kernels are known is not tested here."""


def compiled_by_load(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[Kernel]:
    """What a load compiles up to its first program."""
    compiled: set[Kernel] = set()

    def compile_tape(kernels: Any, progress: object = None) -> None:
        compiled.update(kernels)
        raise EndOfLoad

    with monkeypatch.context() as patched:
        patched.setattr(loader, "compile_ahead", lambda kernels, progress=None: compiled.update(kernels))
        patched.setattr(lower, "compile_ahead", compile_tape)
        with pytest.raises(EndOfLoad):
            load_model(path, threads=1, device="cpu", **options)
    return compiled


def needed(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[Kernel]:
    """The same without the weights, none of which may be packed or converted."""

    def refuse(self: object, name: str, *_: object) -> None:
        raise AssertionError(f"{name} was read")

    with monkeypatch.context() as patched:
        patched.setattr(CpuWeights, "_runnable", refuse)
        patched.setattr(object_cache, "_address", refuse)
        return set(needed_kernels(path, **options))


@pytest.mark.parametrize("name", architectures()[::3])
def test_every_kind_of_decoder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_model(tmp_path, name).path
    assert compiled_by_load(path, monkeypatch) == needed(path, monkeypatch)
    if "mtp" in name:
        assert compiled_by_load(path, monkeypatch) <= needed(path, monkeypatch, draft_layers=True)


@pytest.mark.parametrize("name", text_models())
def test_every_kind_of_encoder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_text_model(tmp_path, name).path
    assert compiled_by_load(path, monkeypatch) <= needed(path, monkeypatch)


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0/f32"])
def test_the_types_of_the_cache_and_its_window(kv_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_path(None)
    assert compiled_by_load(path, monkeypatch, kv_type=kv_type) == needed(path, monkeypatch, kv_type=kv_type)
    windowed = needed(path, monkeypatch, has_window=True)
    assert compiled_by_load(path, monkeypatch, kv_window=256) == windowed > needed(path, monkeypatch)


def test_nothing_else_is_compiled_by_texts_chats_and_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    with localinfer.load(threads=1) as llm:
        asked: set[str] = set()
        real = object_cache._address
        monkeypatch.setattr(object_cache, "_address", lambda name: asked.add(name) or real(name))
        llm.complete("Once upon a time", max_tokens=40, temperature=1.0, top_k=5, top_p=0.9, repetition_penalty=1.1)
        llm.chat([{"role": "user", "content": "Hi"}], max_tokens=2)
        llm.embed("a text")
    assert asked <= {kernel.name for kernel in needed_kernels(model_path(None))}

"""A model that sees on an emulated GPU: its encoders on the CPU, which is said, and pictures in its prompt cache."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.engine.media import MediaRun, join_pieces, media_ids
from localinfer.errors import OutOfMemoryError
from localinfer.generation.text_generation import EncodedPrompt
from localinfer.kernels.cuda.device import FoundDevice
from localinfer.loading.memory import gpu_plan
from localinfer.types import FloatArray
from tests.models.small_models import HIDDEN, write_small_llama
from tests.support.seeing_model import write_mmproj

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from tests.models.emulated_gpu import emulate_gpu, find_gpus

OPTIONS: dict[str, Any] = {"threads": 1, "context_length": 64, "speculation": None, "disk_cache": False}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 2, "max_tokens": 3}
SAID = "small.gguf: pictures and sounds are encoded on the CPU"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_mmproj(tmp_path / "mmproj-small.gguf", HIDDEN)
    return write_small_llama(tmp_path / "small.gguf")


def picture(asked: list[int]) -> MediaRun:
    def embed(check: object) -> FloatArray:
        asked.append(1)
        return np.random.default_rng(3).standard_normal((6, HIDDEN), np.float32)

    return MediaRun(media_ids(b"encoder", b"picture", 6), embed, None, 6, False)


def test_a_picture_on_a_gpu_is_encoded_on_the_cpu_once_and_cached(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emulate_gpu(monkeypatch)
    asked: list[int] = []
    ids, runs = join_pieces([[1, 2], picture(asked), [3]])
    found = []
    for device in ("cpu", "cuda"):
        with caplog.at_level(logging.INFO), localinfer.load(model, device=device, **OPTIONS) as llm:
            assert (SAID in caplog.text) == (device == "cuda")
            assert llm.info.device == device and "vision" in llm.capabilities
            for cached in (0, len(ids) - 1):
                found.append(answer := llm.complete(EncodedPrompt(ids, media=runs), **GREEDY))  # type: ignore[arg-type]
                assert answer.stats.cached_tokens == cached
            assert len(asked) == 1
            asked.clear()
    for cold, warm in (found[:2], found[2:]):
        assert warm.token_ids == cold.token_ids == found[0].token_ids and warm.logprobs == cold.logprobs


def test_encoders_take_main_memory_beside_the_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch)
    with pytest.raises(OutOfMemoryError, match=r"needs .* beside what is on GPUs .* for encoders of pictures"):
        localinfer.load(model, device="cuda", memory_limit=1 << 16, **OPTIONS)


def test_show_says_where_pictures_are_encoded(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_plan, "has_driver", lambda: True)
    find_gpus(monkeypatch, [FoundDevice("GPU", 1 << 30)])
    assert main(["show", str(model)]) == 0
    assert "free on GPU; pictures and sounds are encoded on the CPU\n" in capsys.readouterr().out

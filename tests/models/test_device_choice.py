"""Which device a model runs on, and a whole model on an emulated GPU behind the public API."""

import logging
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.errors import BackendUnavailableError
from localinfer.kernels.cuda.device import FoundDevice, has_driver
from localinfer.models import device_choice
from localinfer.models.loader import load_model
from localinfer.sampling_params import SamplingParams
from tests.models.arch_models import build_model

needs_no_gpu = pytest.mark.skipif(has_driver(), reason="this machine has NVIDIA's driver")


@needs_no_gpu
def test_cuda_by_name_without_a_gpu_is_an_error_and_auto_is_the_cpu() -> None:
    with pytest.raises(BackendUnavailableError, match="needs an NVIDIA GPU"):
        localinfer.load(device="cuda")
    assert device_choice.open_device("auto", 1000) is None


def test_a_model_that_does_not_fit_runs_on_the_cpu_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_choice, "has_driver", lambda: True)
    monkeypatch.setattr(device_choice, "find_device", lambda: FoundDevice("a small GPU", 3 << 30))
    with caplog.at_level(logging.WARNING):
        assert device_choice.open_device("auto", 8 << 30) is None
    assert "running on the CPU: the model needs 9.7 GB on a small GPU, which has 3.2 GB free" in caplog.text
    with pytest.raises(BackendUnavailableError, match="9.7 GB"):
        device_choice.open_device("cuda", 8 << 30)


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is the emulator."""
    pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")
    from tests.kernels.cuda_device import EmulatedDevice

    class NamedDevice(EmulatedDevice):
        name = "emulator"

    monkeypatch.setattr(device_choice, "has_driver", lambda: True)
    monkeypatch.setattr(device_choice, "find_device", lambda: FoundDevice("emulator", 64 << 30))
    monkeypatch.setattr(device_choice, "CudaDevice", NamedDevice)


def test_what_cannot_run_on_the_gpu_falls_back_with_the_reason(
    emulated_gpu: None, shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model(shared, tmp_path, "llama-gqa")
    with caplog.at_level(logging.WARNING):
        loaded = load_model(model.path, device="auto", threads=1, context_length=64, kv_type="q8_0")
    assert loaded.device == "cpu"
    loaded.close()
    assert "running on the CPU: device 'cuda' keeps keys and values in f16 or f32, not in q8_0" in caplog.text
    with pytest.raises(BackendUnavailableError, match="q8_0"):
        load_model(model.path, device="cuda", threads=1, context_length=64, kv_type="q8_0")


def test_a_model_on_the_gpu_continues_a_prompt_as_the_cpu_does(
    emulated_gpu: None, shared: Path, tmp_path: Path
) -> None:
    model = build_model(shared, tmp_path, "llama-gqa")
    texts = []
    for device in ("cpu", "cuda"):
        with localinfer.load(
            model.path, device=device, threads=1, context_length=64, kv_memory=1 << 24, speculation=None
        ) as llm:
            prompt = model.token_ids[:1].tolist()
            texts.append(
                [
                    event.token_id
                    for event in llm._engine.generate(
                        np.array(prompt, np.int32), SamplingParams(temperature=0), max_tokens=2
                    )
                ]
            )
    assert texts[0] == texts[1]

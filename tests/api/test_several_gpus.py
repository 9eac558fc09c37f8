"""A model on several emulated GPUs behind the public API: prefixes, drafts, disk, limits, and what is shown of it."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.engine.sampling.params import SamplingParams
from localinfer.errors import BackendUnavailableError, OutOfMemoryError, RequestError, SessionMismatchError
from localinfer.kernels.cuda.device import FoundDevice
from localinfer.loading import drafters
from localinfer.loading.load_options import HeaderOptions
from localinfer.loading.memory import gpu_plan
from localinfer.loading.memory.limit import check_host_part
from localinfer.loading.memory.plan import plan_file
from localinfer.models.load import device_request, devices
from localinfer.models.load.placement import DevicePlacement, GpuShare
from localinfer.system import machine_limits
from localinfer.system.machine_limits import MemoryLimits
from tests.models.arch_models import build_model, build_text_model
from tests.models.small_models import write_small_llama, write_small_mixture
from tests.support.inside import engine_of

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from tests.models.emulated_gpu import emulate_gpus, find_gpus

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    # Drafts cost nothing, by a measurement that the emulator is spared.
    monkeypatch.setattr(drafters, "_verification_seconds", lambda *_: [1.0, 1.0, 1.0])
    return emulate_gpus(monkeypatch, [64 << 30] * 2)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small_llama(tmp_path / "small.gguf")


def generated(llm: localinfer.LLM, prompt: np.ndarray[Any, Any] = PROMPT) -> tuple[list[int], int]:
    """Four likeliest tokens, and how many of the prompt's were cached."""
    run = engine_of(llm).generate(prompt, SamplingParams(temperature=0), max_tokens=4)
    return [event.token_id for event in run], run.record.cached_tokens


def test_prefixes_are_reused_drafts_verified_and_pages_kept_on_disk_over_two_gpus(
    gpus: list[Any], small: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"threads": 1, "context_length": 64, "kv_memory": 1 << 24}
    session = tmp_path / "kept.session"
    with localinfer.load(small, device="cuda:0", speculation=None, **options) as llm:
        wanted, _ = generated(llm)
    two = {**options, "device": "cuda:0,cuda:1", "disk_cache": True, "disk_cache_folder": tmp_path / "disk"}
    with localinfer.load(small, **two) as llm:
        assert generated(llm) == (wanted, 0)
        assert generated(llm) == (wanted, 4)
        llm.save_session(session)
    with localinfer.load(small, speculation=None, **two) as llm:
        assert generated(llm) == (wanted, 4)
    with (
        localinfer.load(small, device="cuda:1", speculation=None, **options) as llm,
        pytest.raises(SessionMismatchError, match="key-value layout"),
    ):
        llm.load_session(session)
    assert {gpu.index for gpu in gpus} == {0, 1}


def test_a_draft_model_takes_what_its_target_leaves_of_the_named_gpu(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [FoundDevice("emulator", 64 << 30, 0), FoundDevice("emulator", 640 << 20, 1)]
    find_gpus(monkeypatch, found)
    demo = localinfer.loading.options.model_path(None)
    options = localinfer.loading.options.check_model_options(HeaderOptions(model=demo, draft=demo, device="cuda:1"))

    class Target:
        device = "cuda"
        pool = None
        reserved_bytes = {1: 600 << 20}

    tried = []

    def load_model(path: Path, **given: Any) -> Any:
        tried.append(given["device"])
        if given["device"] != "cpu":
            devices.open_devices(
                device_request.DeviceRequest(device=given["device"]),
                lambda: devices.MemoryNeeds([1 << 20], 0, 0, 1 << 20),
                reserved=given["beside"].reserved_bytes,
            )

    monkeypatch.setattr(drafters, "load_model", load_model)
    drafters.load_drafter(options, Target())  # type: ignore[arg-type]
    assert tried == ["cuda:1", "cpu"]
    assert "demo-f16.gguf drafts on the CPU: a single layer and the output need" in caplog.text
    assert "which has 0.0 GB free" in caplog.text


def test_main_memory_beside_the_gpus_is_checked_before_weights_are_read(
    gpus: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_small_mixture(tmp_path / "mixture.gguf", num_layers=2)
    options: dict[str, Any] = {"device": "cuda", "cpu_moe": True, "threads": 1, "context_length": 64}
    with pytest.raises(
        OutOfMemoryError, match=r"mixture.gguf needs .* of main memory beside what is on GPUs .*experts"
    ):
        localinfer.load(model, memory_limit=1 << 20, **options)
    assert not gpus[0].kernels
    with localinfer.load(model, memory_limit=1 << 30, speculation=None, **options) as llm:
        assert llm.info.device == "cuda"
    assert "the experts of layers 0 to 1 on the CPU" in caplog.text


def test_keys_and_values_in_main_memory_stay_within_the_limit(small: Path) -> None:
    plan = plan_file(small)
    share = GpuShare(FoundDevice("GPU", 1 << 30), 1, 2, 1 << 20, 1 << 10)
    placement = DevicePlacement(2, (share,), False, host_bytes=1 << 20, host_cache_bytes=1 << 10)
    memory = MemoryLimits(1 << 34, 1 << 33)
    assert check_host_part(plan, placement, memory, None) is None
    limit = plan.scratch_bytes + (2 << 20)
    assert check_host_part(plan, placement, memory, limit) == 1 << 20
    with pytest.raises(OutOfMemoryError, match=r"and 2 MB of .* are free; put more of it on GPUs"):
        check_host_part(plan, placement, MemoryLimits(1 << 34, 1 << 20), limit)


def test_what_gpus_would_hold_is_shown(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(small)]) == 0
    assert "on GPUs" not in capsys.readouterr().out
    found = [FoundDevice("GPU", 1 << 20), FoundDevice("GPU", 1 << 30, 1)]
    monkeypatch.setattr(gpu_plan, "has_driver", lambda: True)
    find_gpus(monkeypatch, found)
    assert main(["show", str(small)]) == 0
    shown = capsys.readouterr().out
    assert "on GPUs\n  with a context of 128 tokens 2 of 2 layers on the GPU: they need 0.1 GB of" in shown
    assert main(["show", str(small), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["gpus"]
    assert [(gpu["index"], gpu["num_layers"]) for gpu in plan["gpus"]] == [(1, 2)] and plan["gpus"][0]["kv_bytes"] > 0
    find_gpus(monkeypatch, found[:1])
    assert main(["show", str(small)]) == 0
    assert "on the CPU: a single layer and the output need 0.4 GB on GPU" in capsys.readouterr().out

    def none(*_: Any, **__: Any) -> list[FoundDevice]:
        raise BackendUnavailableError("torch sees none")

    monkeypatch.setattr(devices, "find_devices", none)
    assert gpu_plan.describe_gpus(small) == {"reason": "torch sees none"}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("small", {}),
        ("small", {"gpu_layers": 1}),
        ("small", {"gpu_layers": 0}),
        ("small", {"tensor_split": [1, 1]}),
        ("small", {"tensor_split": [1, 1, 1]}),
        ("small", {"device": "cuda:1"}),
        ("small", {"device": "cuda:5"}),
        ("small", {"device": "cuda", "gpu_layers": 1, "kv_window": 32}),
        ("small", {"device": "cuda", "kv_type": "q4_0"}),
        ("small", {"kv_type": "q4_0"}),
        ("small", {"cpu_moe": True}),
        ("mixture", {"cpu_moe": True, "memory_limit": 1 << 30}),
        ("mixture", {"cpu_moe": True, "memory_limit": 1 << 20}),
        ("mixture", {"cpu_moe": 1, "gpu_layers": 99}),
        ("hybrid", {"gpu_layers": 1}),
        ("hybrid", {"tensor_split": [1, 1]}),
        ("encoder", {"device": "cuda"}),
    ],
)
def test_availability_says_what_load_finds_on_gpus(
    model: str, options: dict[str, Any], gpus: list[Any], tmp_path: Path
) -> None:
    if model == "small":
        path = write_small_llama(tmp_path / "small.gguf")
    elif model == "mixture":
        path = write_small_mixture(tmp_path / "mixture.gguf", num_layers=2)
    elif model == "hybrid":
        path = build_model(tmp_path, "qwen3next-hybrid").path
    else:
        path = build_text_model(tmp_path, "bert-encoder").path
    found = localinfer.availability(path, context_length=64, **options)
    assert not gpus, "no GPU is opened for it"
    if found.error is not None:
        with pytest.raises(type(found.error)) as raised:
            localinfer.load(path, threads=1, context_length=64, speculation=None, **options)
        assert str(raised.value) == found.reason
        return
    with localinfer.load(path, threads=1, context_length=64, speculation=None, **options) as llm:
        assert (found.supported, found.context_length) == (True, llm.context_length)


def test_availability_counts_the_memory_of_gpus(small: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[Any]) -> None:
    """A model that main memory has no room for runs on a GPU, and one that the GPUs have none for does not."""
    monkeypatch.setattr(machine_limits, "memory_limits", lambda: MemoryLimits(1 << 20, 1 << 20))
    assert localinfer.availability(small).supported
    assert isinstance(localinfer.availability(small, device="cpu").error, OutOfMemoryError)
    monkeypatch.undo()
    monkeypatch.setattr(device_request, "has_driver", lambda: True)
    find_gpus(monkeypatch, [FoundDevice("a small GPU", 1 << 20)])
    assert localinfer.availability(small).supported
    refused = localinfer.availability(small, device="cuda")
    assert isinstance(refused.error, BackendUnavailableError) and "a single layer" in str(refused.reason)
    wanted = localinfer.availability(small, gpu_layers=2)
    assert isinstance(wanted.error, RequestError) and "gpu_layers is 2" in str(wanted.reason)


def test_options_of_several_gpus_are_passed_on_or_refused_where_there_is_none(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An automatic choice goes to the CPU with a reason; a named GPU is required."""
    with caplog.at_level(logging.WARNING), localinfer.load(small, threads=1, context_length=64, cpu_moe=True) as llm:
        assert llm.info.device == "cpu"
    assert "cpu_moe has no effect" in caplog.text
    if device_request.has_driver():
        pytest.skip("this machine has NVIDIA's driver")
    with localinfer.load(small, threads=1, context_length=64, tensor_split=[3, 1]) as llm:
        assert llm.info.device == "cpu"
    assert "running on the CPU: device 'cuda' needs an NVIDIA GPU" in caplog.text
    with pytest.raises(BackendUnavailableError, match="needs an NVIDIA GPU"):
        localinfer.load(small, device="cuda:0,cuda:1")

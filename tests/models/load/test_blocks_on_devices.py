"""Models whose layers read from further back stay on one device, and what only the CPU computes stays there."""

from pathlib import Path

import pytest

from localinfer.errors import BackendUnavailableError
from localinfer.models.decoder.decoder import crosses_layers
from localinfer.models.load.device_request import DeviceRequest
from localinfer.models.load.loader import load_model
from tests.models.arch_models import build_model, read_config

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from tests.models.emulated_gpu import emulate_gpu


@pytest.mark.parametrize(
    ("name", "gpu_layers", "reason"),
    [
        ("gemma4-e2b", 4, "the GPU was to hold 4 of 9 layers"),
        ("gemma3n-altup", 20, "the GPU was to hold 20 of 25 layers"),
        ("glm-dsa-sparse", None, "sparse attention of glm-dsa models is computed on the CPU only"),
        ("minimax-m3-sparse", 4, "sparse attention of minimax-m3 models is computed on the CPU only"),
    ],
)
def test_what_a_gpu_cannot_hold_alone_is_refused_or_left_to_the_cpu(
    name: str,
    gpu_layers: int | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    emulate_gpu(monkeypatch)
    path = build_model(tmp_path, name).path
    required, wanted = (DeviceRequest(device=device, gpu_layers=gpu_layers) for device in ("cuda", "auto"))
    with pytest.raises(BackendUnavailableError, match=reason):
        load_model(path, device=required, threads=1)
    model = load_model(path, device=wanted, threads=1)
    assert model.device == "cpu" and reason in caplog.text
    model.close()


def test_models_that_cross_layers_are_those_that_share_or_choose(tmp_path: Path) -> None:
    crossing = {}
    for name in ("gemma4-e2b", "gemma4-dense", "gemma3n-altup", "deepseek32-sparse", "glm-dsa-sparse", "gemma3-gqa"):
        path = build_model(tmp_path, name).path
        crossing[name] = crosses_layers(read_config(path))
    assert [name for name, crosses in crossing.items() if crosses] == ["gemma4-e2b", "gemma3n-altup", "glm-dsa-sparse"]

"""`localinfer bench --device cuda` on an emulated GPU: every figure is there, and the table prints."""

import json
from pathlib import Path

import pytest

from localinfer.apps.bench import gpu as bench_gpu
from localinfer.apps.bench.report import render_gpu
from localinfer.apps.cli import main
from localinfer.quant.gguf.reader import read_gguf
from localinfer.system.machine_limits import has_driver
from tests.models.small_models import VOCAB, write_small_llama

SMALL = ("--device", "cuda", "--prompt", "2", "--decode", "1", "--context", "1", "--repetitions", "1")


def test_a_gpu_is_measured_with_every_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")
    from tests.models.emulated_gpu import emulate_gpu

    emulate_gpu(monkeypatch)
    monkeypatch.setattr(bench_gpu, "VERIFIED_ROWS", (1, 2))
    model = write_small_llama(tmp_path / "small.gguf", num_layers=1)
    assert main(["bench", str(model), *SMALL, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    figures, machine = record["figures"], record["machine"]
    assert machine["gpu"] == "emulator" and machine["gpu_layers"] == machine["num_layers"] == 1
    for name in ("prefill", "decode", "drawn"):
        assert figures[f"{name}_tokens_per_second"]["median"] > 0
    assert figures["host_seconds_per_token"] > 0 and set(figures["verification_cost"]) == {"2"}
    with read_gguf(model) as file:
        sizes = {name: tensor.num_bytes for name, tensor in file.tensors.items()}
    # Of the embeddings a token reads a row.
    row = sizes["token_embd.weight"] // VOCAB
    assert figures["weight_bytes_per_token"] == sum(sizes.values()) - (VOCAB - 1) * row
    table = render_gpu(record)
    assert "1 of 1 layers; reads 1.0 GB/s" in table and "verifying 2 tokens over 1" in table


@pytest.mark.skipif(has_driver(), reason="this machine has NVIDIA's driver")
def test_without_a_gpu_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_small_llama(tmp_path / "small.gguf")
    assert main(["bench", str(model), *SMALL]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err

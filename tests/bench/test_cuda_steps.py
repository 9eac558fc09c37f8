"""The first run on a GPU, step by step on a device that records: its selections match tests, its table has figures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from tests.bench import cuda_steps, cuda_table
from tests.bench.bench_cuda import PARTS
from tests.kernels.cuda import test_cuda_on_gpu, test_cuda_ops_on_gpu

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tests/bench/cuda_first_run.sh"
STEPS = {step.name: step for step in cuda_steps.STEPS}


def test_every_step_is_short_and_the_order_is_by_worth() -> None:
    assert all(step.seconds <= cuda_steps.LIMIT for step in cuda_steps.STEPS)
    names = list(STEPS)
    assert names[:4] == ["imports", "product", "demo", "decode"] and names[-1] == "table"
    wanted = ["demo", "rates", "shapes", "failed", "memcheck", "racecheck", "layer", "ops", "products", "models"]
    assert [name for name in names if name in wanted] == wanted
    parts = {word for step in cuda_steps.STEPS for command in step.commands for word in command if word in PARTS}
    assert parts == set(PARTS), "every part of the bench is measured"
    assert {step.name for step in cuda_steps.STEPS if step.allocates_apart} == {"memcheck", "racecheck"}


def test_every_selection_of_tests_selects_some() -> None:
    names = [name for module in (test_cuda_on_gpu, test_cuda_ops_on_gpu) for name in vars(module)]
    for step in cuda_steps.STEPS:
        for command in step.commands:
            if "-k" in command:
                words = re.sub(r"\b(not|and|or)\b", " ", command[command.index("-k") + 1]).split()
                layouts = [word for word in words if re.match(r"[A-Z]", word)]
                assert all(any(word in name for name in names) for word in set(words) - set(layouts))


def test_steps_run_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(REPOSITORY)
    tools, results = tmp_path / "tools", tmp_path / "results"
    tools.mkdir()
    results.mkdir()
    monkeypatch.setattr(cuda_steps, "_DRY_RESULTS", results)
    environment = {**cuda_steps.dry_environment(tools), "OUT": str(tmp_path / "out")}
    for name in ("ceilings", "layer", "table"):
        assert cuda_steps.run_step(STEPS[name], environment, is_dry=True), capsys.readouterr().out
        assert (tmp_path / "out" / f"{name}.log").read_text().splitlines()[-1].startswith("exit 0 after")
    told = capsys.readouterr().out
    assert "== layer: one layer under the profiler" in told and "| an empty kernel in a graph |" in told
    assert "boundary_seconds" in json.loads((results / "bench.json").read_text())
    assert (results / "commands.log").read_text().startswith("ncu --profile-from-start off")


def test_tests_are_shared_by_processes_but_not_under_a_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_steps.os, "cpu_count", lambda: 16)
    told = {name: cuda_steps.with_workers(step.commands[-1]) for name, step in STEPS.items()}
    shared = {name for name, command in told.items() if command[-4:] == ["-n", "12", "--dist", "worksteal"]}
    assert shared == {"product", "failed", "ops", "products", "models"}
    monkeypatch.setattr(cuda_steps.os, "cpu_count", lambda: 1)
    assert cuda_steps.with_workers(STEPS["ops"].commands[0]) == list(STEPS["ops"].commands[0])


def test_a_step_ends_when_its_time_is_over(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        assert cuda_steps.run_within(command, 1.0, log.fileno(), {}) == 124
        assert cuda_steps.run_within(["there-is-no-such-tool"], 1.0, log.fileno(), {}) == 127


def test_the_table_has_a_dash_for_what_is_missing_or_failed() -> None:
    figures = {"model 8B Q4_0": {"decode_tokens_per_second": 512.3}, "boundary_seconds": {"failed": "RuntimeError"}}
    table = cuda_table.render(figures)
    assert "| 512 tok/s |" in table and "| an empty kernel in a graph |  |  | 1 | - |" in table
    assert "512 tok/s" not in cuda_table.render(figures, is_dry=True)


def test_the_script_is_shell() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)

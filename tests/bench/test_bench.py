"""`localinfer bench`: figures that are complete and possible, a table, a chart, and errors that say the way out."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from localinfer.apps.bench import measured_model, worker
from localinfer.apps.bench.figures import compare, find_walls
from localinfer.apps.bench.processes import EngineOptions, EngineProcess
from localinfer.apps.bench.report import render_bench
from localinfer.apps.cli import main
from localinfer.apps.cli.bench import PEERS
from localinfer.errors import BackendUnavailableError, ModelFileError
from localinfer.kernels.ops import Rows
from localinfer.kernels.program import OpCost
from localinfer.loading.options import model_path
from tests.bench.bench_commands import run_bench, short_rounds, warm_processes

HAS_PEER = importlib.util.find_spec("llama_cpp") is not None
HAS_CHARTS = importlib.util.find_spec("matplotlib") is not None
SMALL = ("--prompt", "24", "--decode", "6", "--context", "9", "--repetitions", "2", "--threads", "2")
RATES = ("prefill_tokens_per_second", "decode_tokens_per_second", "time_to_first_token_seconds")


@pytest.fixture(scope="module")
def model() -> str:
    """The demo model's path."""
    return str(model_path(None))


@pytest.fixture(scope="module")
def record(model: str) -> dict[str, Any]:
    """What the command prints with --json, and nothing else."""
    with short_rounds(), warm_processes():
        printed, errors = run_bench(model, *SMALL, "--json")
    assert errors == ""
    found: dict[str, Any] = json.loads(printed)
    return found


def test_json_has_every_figure_and_all_are_possible(record: dict[str, Any]) -> None:
    assert set(record) == {"model", "machine", "settings", "engines", "walls"}
    assert record["settings"] == {"prompt": 24, "decode": 6, "context": 9, "repetitions": 2}
    assert record["machine"]["threads"] == 2
    assert record["machine"]["read_bytes_per_second"] > 1e8
    assert record["machine"]["multiply_adds_per_second"] > 1e8
    ours = record["engines"]["localinfer"]
    for name in (*RATES, "process_to_first_token_seconds"):
        assert len(ours[name]["values"]) == 2
        assert min(ours[name]["values"]) > 0
        assert min(ours[name]["values"]) <= ours[name]["median"] <= max(ours[name]["values"])
    assert 0 < ours["itl_p50_seconds"] <= ours["itl_p99_seconds"]
    assert ours["load_seconds"] > 0
    assert ours["compile_seconds"] is None or ours["compile_seconds"] >= 0
    assert ours["peak_memory_bytes"] > record["model"]["num_bytes"]
    assert set(ours["verification_cost"]) == {"4", "8"}
    assert ours["weight_bytes_per_token"] > 0
    assert ours["kv_bytes_per_token"] > 0
    assert ours["decode_read_share"] > 0
    assert ours["prefill_multiply_share"] > 0
    for phase, found in record["walls"].items():
        shares = {"memory": ours[f"{phase}_read_share"], "arithmetic": ours[f"{phase}_multiply_share"]}
        assert found["reached"] == shares[found["wall"]] == max(shares.values())
        assert found["moves"]


def test_table_shows_the_same_figures(record: dict[str, Any]) -> None:
    table = render_bench(record)
    assert f"{record['engines']['localinfer']['decode_tokens_per_second']['median']:,.1f} tokens/s" in table
    for words in (
        "prefill of 24 tokens",
        "decode of 6 after 9",
        "peak memory",
        "verifying 8 tokens over 1",
        "ceilings",
        "the wall of",
        "what would move it: ",
    ):
        assert words in table
    machine = record["machine"] | {"performance_cores": 4, "efficiency_cores": 6}
    assert "cores: 4 P + 6 E\n" in render_bench({**record, "machine": machine})


@pytest.mark.parametrize(
    ("planted", "free", "phase", "expected", "named", "unnamed"),
    [
        (
            {},
            0,
            "decode",
            ("memory", 0.8, True),
            ["smaller type", "drafts", "1.10 x"],
            ["threads", "cache", "programs"],
        ),
        ({"kv_bytes_per_token": 50}, 2, "decode", ("memory", 0.8, True), ["--kv-type", "--kv-window"], ["threads"]),
        (
            {"verification_cost": {"4": 3.9}},
            0,
            "decode",
            ("memory", 0.8, True),
            ["smaller type"],
            ["drafts", "several"],
        ),
        ({"decode_read_share": 0.4}, 2, "decode", ("memory", 0.4, False), ["2 of this", "programs"], []),
        (
            {"decode_multiply_share": 0.9},
            1,
            "decode",
            ("arithmetic", 0.9, True),
            ["more threads: 1"],
            ["programs"],
        ),
        ({}, 0, "prefill", ("arithmetic", 0.7, True), ["not computed again"], ["threads", "square", "programs"]),
        ({"prefill_multiply_share": 0.69}, 3, "prefill", ("arithmetic", 0.69, False), ["threads: 3", "programs"], []),
        ({"prefill_attention_share": 0.3}, 0, "prefill", ("arithmetic", 0.7, True), ["square"], []),
        ({"prefill_read_share": 0.75}, 1, "prefill", ("memory", 0.75, True), ["longer prompt"], ["threads", "again"]),
    ],
)
def test_walls_and_what_moves_them_of_planted_figures(
    record: dict[str, Any],
    planted: dict[str, Any],
    free: int,
    phase: str,
    expected: tuple[str, float, bool],
    named: list[str],
    unnamed: list[str],
) -> None:
    figures = {
        "decode_read_share": 0.8,
        "decode_multiply_share": 0.2,
        "prefill_read_share": 0.1,
        "prefill_multiply_share": 0.7,
        "prefill_attention_share": 0.05,
        "kv_bytes_per_token": 5,
        "weight_bytes_per_token": 100,
        "verification_cost": {"4": 1.1},
    }
    machine = {"read_bytes_per_second": 20.5e9, "multiply_adds_per_second": 99e9}
    walls = find_walls(figures | planted, machine, free_threads=free)
    assert tuple(walls[phase][key] for key in ("wall", "reached", "is_near")) == expected
    moves = "; ".join(walls[phase]["moves"])
    assert all(word in moves for word in named) and not any(word in moves for word in unnamed)
    table = render_bench({**record, "walls": walls})
    rate = "20.5 GB/s read" if expected[0] == "memory" else "99 G multiplications per second"
    assert (
        f"{phase} is {'at' if expected[2] else 'below'} the wall of {expected[0]}: {expected[1]:.2f} of {rate}" in table
    )
    assert moves in table


FAKE_GENAI = """
import json, os, time
StreamerBase, StreamingStatus = object, type("StreamingStatus", (), {"RUNNING": 0})
GenerationConfig = type("GenerationConfig", (), {})
TokenizedInputs = lambda ids, mask: ids
def log(*what):
    with open(os.path.join(os.path.dirname(__file__), "log"), "a") as file:
        print(json.dumps(what), file=file)
class LLMPipeline:
    def __init__(self, path, device, **settings):
        log("load", settings)
        if os.path.exists(os.path.join(os.path.dirname(__file__), "refuse")):
            raise IndexError("map::at")
    def generate(self, ids, config, streamer):
        assert config.ignore_eos and not config.do_sample
        log("generate", ids.shape[1], config.max_new_tokens)
        for index in range(config.max_new_tokens):
            time.sleep(0.03 if index == 0 else 0.01)
            streamer.write(7)
        streamer.end()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the fake interpreter is a shell script")
@pytest.mark.parametrize("refuses", [False, True])
def test_a_peer_that_generates_is_measured_and_one_that_cannot_load_says_so(
    model: str, tmp_path: Path, refuses: bool
) -> None:
    (tmp_path / "openvino_genai.py").write_text(FAKE_GENAI)
    (tmp_path / "openvino.py").write_text("Tensor = lambda array: array")
    (tmp_path / "openvino_genai-9.1.dist-info").mkdir()
    (tmp_path / "openvino_genai-9.1.dist-info/METADATA").write_text("Name: openvino-genai\nVersion: 9.1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    if refuses:
        (tmp_path / "refuse").touch()
    words = [*SMALL[:-4], "--repetitions", "1", "--threads", "1", "--compare", "openvino-genai"]
    with short_rounds(), warm_processes():
        found = json.loads(run_bench(model, *words, "--peer-python", str(python), "--json")[0])
    table, peer = render_bench(found), found["engines"]["openvino-genai"]
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    settings = {"INFERENCE_NUM_THREADS": 1, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128, "ATTENTION_BACKEND": "SDPA"}
    assert log[0] == ["load", settings]
    if refuses:
        assert "ratios" not in found and "IndexError: map::at" in peer["error"]
        assert "openvino-genai failed" in table and "map::at" in table
        return
    # Warm-up, prefill, context and decode; then a start's first token.
    assert [line[1:] for line in log if line[0] == "generate"] == [[24, 1], [23, 2], [24, 1], [9, 1], [9, 7], [8, 1]]
    assert peer["version"] == "9.1" and peer["verification_cost"] == {}
    # What the fake waits at least.
    assert 0 < peer["prefill_tokens_per_second"]["median"] <= 24 / 0.03
    assert 0 < peer["decode_tokens_per_second"]["median"] <= 1 / 0.01
    assert found["ratios"]["decode_tokens_per_second"]["ratio"] > 0
    assert "openvino-genai 9.1" in table and "unknown" in table


def test_every_engine_to_compare_with_can_be_named() -> None:
    assert {"localinfer", *PEERS} == set(worker.ENGINES)


def test_ratios_are_above_one_where_localinfer_is_better(record: dict[str, Any]) -> None:
    ours = record["engines"]["localinfer"]
    worse = json.loads(json.dumps(ours))
    for name in ours:
        for figure in [worse[name]] if isinstance(worse[name], dict) else []:
            factor = 0.5 if name.endswith("_per_second") else 2
            figure.update({key: value * factor for key, value in figure.items() if key == "median"})
            if "values" in figure:
                figure["values"] = [value * factor for value in figure["values"]]
    worse["peak_memory_bytes"] = 2 * ours["peak_memory_bytes"]
    ratios = compare(ours, worse)
    assert ratios["peak_memory_bytes"] == {"ratio": 2}
    for name in RATES:
        assert ratios[name] == {"ratio": pytest.approx(2), "lowest": pytest.approx(2), "highest": pytest.approx(2)}
    table = render_bench({**record, "engines": {"localinfer": ours, "peer": worse}, "ratios": ratios})
    assert "2.00 (2.00 to 2.00)" in table


def test_stream_counts_tokens(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", model, "--stream", "--decode", "5", "--repetitions", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["threads"] == 1
    assert found["engines"]["localinfer"]["tokens"] == 5
    assert found["engines"]["localinfer"]["stream_tokens_per_second"]["median"] > 0


@pytest.mark.skipif(not HAS_PEER, reason="llama-cpp-python is not installed")
def test_comparison_has_both_engines_and_ratios(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", model, *SMALL, "--compare", "llama-cpp-python", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["engines"]) == {"localinfer", "llama-cpp-python"}
    assert found["ratios"]["decode_tokens_per_second"]["lowest"] > 0


@pytest.mark.skipif(HAS_PEER, reason="llama-cpp-python is installed")
def test_missing_peer_says_how_to_install_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with warm_processes():
        assert main(["bench", model, *SMALL, "--stream", "--compare", "llama-cpp-python"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip install 'localinfer[bench]'" in captured.err


def test_peer_python_that_does_not_exist_is_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--stream", "--compare", "llama-cpp-python", "--peer-python", "no-such-python"]
    with warm_processes():
        assert main(["bench", model, *SMALL, *words]) == 2
    assert "no-such-python" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "MODEL"),
        (["MODEL", "--output", "x.png"], "--roofline"),
        (["MODEL", "--peer-python", "python"], "--compare"),
        (["MODEL", "--roofline", "--stream"], "--stream"),
        (["MODEL", "--prompt", "100000"], "--prompt"),
        (["MODEL", "--roofline", "--json", "--context", "100000"], "--context"),
        (["MODEL", "--decode", "0"], "--decode"),
        (["MODEL", "--device", "cuda", "--speculation"], "--stream"),
        (["nothing.gguf"], "nothing.gguf"),
    ],
)
def test_bad_request_is_one_line(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert main(["bench", *(model if argument == "MODEL" else argument for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert word in captured.err


def test_errors_of_the_measured_process_are_raised_here(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF and no more")
    options = EngineOptions(engine="localinfer", model=str(path), threads=1, context_length=None)
    with warm_processes(), pytest.raises(ModelFileError, match=r"broken\.gguf"):
        EngineProcess(options)


@pytest.mark.skipif(sys.platform == "win32", reason="ends processes by a signal")
def test_process_that_ends_by_itself_is_an_error(model: str) -> None:
    options = EngineOptions(engine="localinfer", model=model, threads=1, context_length=None)
    with warm_processes(), EngineProcess(options) as process:
        psutil.Process(process.pid).kill()
        with pytest.raises(BackendUnavailableError, match="exit code -9"):
            process.ask("memory")


def test_roofline_times_every_op(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with short_rounds():
        assert main(["bench", model, *SMALL, "--roofline", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    decode, prefill = found["phases"]
    assert (decode["num_rows"], prefill["num_rows"]) == (1, 24)
    for phase in (decode, prefill):
        assert phase["operation_seconds"] == pytest.approx(sum(entry["seconds"] for entry in phase["operations"]))
        assert all(entry["seconds"] > 0 and entry["count"] > 0 for entry in phase["operations"])
    names = [entry["name"] for entry in decode["operations"]]
    assert any("ffn_down" in name for name in names)
    assert any(name.startswith("attention") for name in names)


@pytest.mark.skipif(HAS_CHARTS, reason="matplotlib is installed")
def test_roofline_without_matplotlib_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--roofline"]) == 2
    assert "pip install 'localinfer[plot]'" in capsys.readouterr().err


def test_roofline_without_a_model_measures_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with short_rounds():
        assert main(["bench", "--roofline", "--json", "--threads", "1"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"machine"}


def test_work_counts_rows_windows_and_outputs() -> None:
    head = OpCost("head", Rows.OUTPUT, weight_bytes=1000, row_weight_bytes=1000, multiply_adds=7)
    assert measured_model.work_of(head, 0, 512, 1) == measured_model.LeastWork(1000, 0, 7, 0)
    assert measured_model.work_of(head, 0, 512, 0) == measured_model.LeastWork(0, 0, 0, 0)
    experts = OpCost("experts", weight_bytes=1000, row_weight_bytes=100, multiply_adds=7)
    assert measured_model.work_of(experts, 0, 3, 1) == measured_model.LeastWork(300, 0, 21, 0)
    assert measured_model.work_of(experts, 0, 30, 1) == measured_model.LeastWork(1000, 0, 210, 0)
    attention = OpCost("attention", kv_bytes=10, kv_multiply_adds=2)
    assert measured_model.work_of(attention, 4, 3, 1) == measured_model.LeastWork(0, 70, 0, 2 * (5 + 6 + 7))
    sliding = OpCost("attention", kv_bytes=10, kv_multiply_adds=2, window=4)
    assert measured_model.work_of(sliding, 9, 2, 1) == measured_model.LeastWork(0, 50, 0, 2 * 8)
    recurrent = OpCost("scan", state_bytes=30)
    assert measured_model.work_of(recurrent, 9, 2, 1) == measured_model.LeastWork(0, 30, 0, 0)


def test_speculation_is_measured_on_new_text_and_on_text_said_before(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", model, "--speculation", "--decode", "24", "--repetitions", "2", "--threads", "1"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["costs"][0] == 1 and found["plain_step_seconds"] > 0
    assert found["costs"] == sorted(found["costs"]) and found["drafters"] == ["ngram"]
    assert set(found["texts"]) == {"new", "said before"}
    for text in found["texts"].values():
        assert len(text["speedup"]["values"]) == 2 and min(text["speedup"]["values"]) > 0
        places = zip(text["accepted_by_position"], text["drafted_by_position"], strict=True)
        assert all(0 <= accepted <= drafted for accepted, drafted in places)
    assert found["texts"]["said before"]["tokens_per_pass"] > 1
    assert main(command) == 0
    assert "said before: 24 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("others", [["--stream"], ["--roofline"], ["--compare", "llama-cpp-python"]])
def test_speculation_is_measured_alone(model: str, others: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", model, "--speculation", *others]) == 2
    error = capsys.readouterr().err
    assert others[0] in error and "leave" in error and "--speculation" in error


def test_a_draft_model_needs_speculation(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", model, "--draft", model]) == 2
    assert "--draft is for --speculation" in capsys.readouterr().err

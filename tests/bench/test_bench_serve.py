"""`localinfer bench --serve`: figures of constructed loads, replies that are not whole, a short measurement, charts."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from localinfer.apps.bench.figures import (
    Failure,
    Objective,
    RequestTimes,
    compare_texts,
    knee,
    level_record,
    percentile,
    spread,
)
from localinfer.apps.bench.processes import ServerProcess
from localinfer.apps.bench.report import render_serve
from localinfer.apps.bench.serve import HttpAnswer, Prompts, chat_body, read_reply, reply_lengths
from localinfer.apps.cli import main
from localinfer.apps.server.operation.observation import GOOD_FIRST_TOKEN_SECONDS, GOOD_INTERVAL_SECONDS
from localinfer.errors import BackendUnavailableError
from localinfer.loading.options import model_path
from tests.bench.bench_commands import run_bench, short_rounds, warm_processes

HAS_CHARTS = importlib.util.find_spec("matplotlib") is not None
OBJECTIVE = Objective(first_token_seconds=1.0, interval_seconds=0.1)
QUICK = ("--serve", "--concurrency", "2,1", "--requests", "2", "--prompt", "20", "--decode", "6", "--threads", "1")


def request(sent: float, first: float, interval: float, count: int, *, hidden: int = 0) -> RequestTimes:
    """A reply of `count` tokens, the last `hidden` of which brought no text of their own."""
    times = tuple(sent + first + interval * index for index in range(count - hidden))
    return RequestTimes(sent, sent + first / 2, times, times[-1], count, 7, "text")


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (1, 1.0), (50, 50.0), (51, 51.0), (95, 95.0), (99, 99.0), (100, 100.0)]
)
def test_percentile_is_the_nearest_rank(percent, expected):
    assert percentile([float(value) for value in range(100, 0, -1)], percent) == expected


def test_percentiles_of_few_values_are_among_them():
    assert spread([3.0, 1.0]) == {"p50": 1.0, "p95": 3.0, "p99": 3.0, "values": [3.0, 1.0]}
    assert spread([]) is None


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        # Throughput grows at nearly no price, then not any more.
        ([(10, 1.0), (20, 1.1), (40, 1.3), (42, 2.6), (43, 5.2)], 2),
        # The same in other units.
        ([(1e4, 1e-3), (2e4, 1.1e-3), (4e4, 1.3e-3), (4.2e4, 2.6e-3), (4.3e4, 5.2e-3)], 2),
        # Throughput falls at the end.
        ([(10, 1.0), (30, 1.2), (25, 4.0)], 1),
        # A line, a bend to the other side, and too few points to tell.
        ([(10, 1.0), (20, 2.0), (30, 3.0), (40, 4.0)], None),
        ([(10, 1.0), (11, 3.0), (40, 4.0)], None),
        ([(10, 1.0), (20, 1.1)], None),
        ([(10, 1.0), (10, 1.0), (10, 1.0)], None),
        ([], None),
    ],
)
def test_knee_is_furthest_from_the_chord(points, expected):
    assert knee(points) == expected


def test_goodput_counts_replies_that_met_the_objective():
    good, late, slow = request(0.0, 0.9, 0.05, 11), request(0.0, 1.1, 0.05, 11), request(0.0, 0.5, 0.11, 11)
    assert [OBJECTIVE.is_met(reply) for reply in (good, late, slow)] == [True, False, False]
    outcomes = [good, late, slow, Failure("refused")]
    record = level_record(4, outcomes, OBJECTIVE, began=0.0, busy_until=2.0)
    assert record["tokens_per_second"] == pytest.approx(33 / 2)
    assert record["requests_per_second"] == pytest.approx(1.5)
    assert record["goodput_requests_per_second"] == pytest.approx(0.5)
    assert record["goodput_share"] == 0.25
    assert record["failures"] == ["refused"]
    assert record["requests"] == 4


def test_rates_count_only_the_time_in_which_all_streams_are_busy():
    replies = [request(0.0, 1.0, 0.1, 11), request(1.0, 1.0, 0.1, 11, hidden=1)]
    record = level_record(2, replies, OBJECTIVE, began=0.0, busy_until=2.05)
    # All of the first, and one text of ten of the second, which had eleven tokens.
    assert record["tokens_per_second"] == pytest.approx((11 + 11 / 10) / 2.05)
    assert len(record["itl_seconds"]["values"]) == 10 + 9
    assert record["completion_tokens"] == 22


def test_level_of_failures_has_no_figures():
    record = level_record(1, [Failure("refused")], OBJECTIVE, began=0.0, busy_until=1.0)
    assert record["tokens_per_second"] == record["goodput_share"] == 0
    assert record["itl_seconds"] is record["seconds_per_token"] is None


def test_texts_that_differ_and_texts_that_did_not_come_are_told_apart():
    text, other, none = request(0, 1, 1, 2), replace(request(5, 1, 1, 2), text="another"), Failure("refused")
    found = compare_texts([text, text, none, text], [text, other, text, none])
    assert found == {"compared": 2, "different": [1], "failures": ["refused", "refused"]}


def test_default_objective_is_that_of_the_servers_own_metric():
    from localinfer.apps.cli.bench import bench_command

    defaults = {parameter.name: parameter.default for parameter in bench_command.commands["serve"].params}
    assert defaults["slo_ttft"] == 1e3 * GOOD_FIRST_TOKEN_SECONDS
    assert defaults["slo_itl"] == 1e3 * GOOD_INTERVAL_SECONDS


def events(*payloads: Any) -> bytes:
    frames = [payload if isinstance(payload, str) else json.dumps(payload) for payload in payloads]
    return b"".join(b": ping\ndata: " + frame.encode() + b"\n\n" for frame in frames)


def delta(**members: Any) -> dict[str, Any]:
    return {"choices": [{"delta": members}], "usage": None}


WHOLE = [
    delta(role="assistant", content=""),
    delta(reasoning_content="Well. "),
    delta(content="h\u00e9"),
    delta(content="y"),
    delta(),
    {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 9}},
    "[DONE]",
]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_reply_is_read_whatever_chunks_it_comes_in(size):
    body = events(*WHOLE)
    chunks = [(float(start + size), body[start : start + size]) for start in range(0, len(body), size)]
    reply = read_reply(HttpAnswer(sent=0.5, status=200, is_stream=True, chunks=chunks, ended=1e4), 4)
    assert isinstance(reply, RequestTimes)
    assert (reply.text, reply.num_tokens, reply.prompt_tokens) == ("Well. h\u00e9y", 4, 9)
    assert reply.first_byte == size
    ends = [len(events(*WHOLE[:count])) for count in (2, 3, 4)]
    assert reply.tokens == tuple(math.ceil(end / size) * size for end in ends)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (events(*WHOLE[:-1]), "broke off"),
        (events(*WHOLE[:-2], "[DONE]"), "0 of 4 tokens"),
        (events(WHOLE[0], *WHOLE[-2:]), "0 of them with text"),
        (events(*WHOLE[:3], {"error": {"message": "stopped"}}, "[DONE]"), "stopped"),
    ],
)
def test_reply_that_is_not_whole_is_a_failure(body, reason):
    reply = read_reply(HttpAnswer(sent=0.0, status=200, is_stream=True, chunks=[(1.0, body)], ended=2.0), 4)
    assert isinstance(reply, Failure)
    assert reason in reply.reason


def test_refusal_is_a_failure_with_its_status():
    reply = read_reply(HttpAnswer(sent=0.0, status=429, chunks=[(1.0, b'{"error": {}}')]), 4)
    assert isinstance(reply, Failure)
    assert "429" in reply.reason


def test_prompts_have_their_length_and_distinct_beginnings():
    prompts = Prompts([f"{number} " for number in range(100)])
    taken = [prompts.take(30) for _ in range(100)]
    assert {len(message.split()) for message in taken} == {30}
    assert len({message.split()[0] for message in taken}) == 100


def test_reply_lengths_vary_about_their_mean():
    lengths = reply_lengths(128, 64)
    assert 96 <= min(lengths) < 105 < 150 < max(lengths) <= 160
    assert abs(sum(lengths) / 64 - 128) < 2
    assert min(reply_lengths(1, 9)) == 1


def test_requests_are_greedy_without_a_seed():
    assert chat_body("hi", 3, None)["temperature"] == 0
    assert "temperature" not in chat_body("hi", 3, 5)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command prints with --json, and nothing else on stdout; the chart is drawn where it can be."""
    chart = tmp_path_factory.mktemp("charts") / "serve.png"
    words = [*QUICK, "--json", *(["--output", str(chart)] if HAS_CHARTS else [])]
    with warm_processes():
        printed, _ = run_bench(str(model_path(None)), *words)
    if HAS_CHARTS:
        assert chart.read_bytes().startswith(b"\x89PNG")
    found: dict[str, Any] = json.loads(printed)
    return found


def test_measurement_is_complete(record):
    assert record["settings"]["concurrency"] == [1, 2]
    assert record["num_failed"] == 0
    for level, streams in zip(record["levels"], (1, 2), strict=True):
        assert (level["concurrency"], level["requests"], level["failures"]) == (streams, 2 * streams, [])
        assert level["completion_tokens"] == sum(reply_lengths(6, 2 * streams))
        assert level["prompt_tokens"] >= 2 * streams * 20
        assert len(level["time_to_first_token_seconds"]["values"]) == 2 * streams
        for name in ("first_byte_seconds", "time_to_first_token_seconds", "itl_seconds", "seconds_per_token"):
            assert 0 <= level[name]["p50"] <= level[name]["p95"] <= level[name]["p99"]
        assert level["tokens_per_second"] > 0
        assert level["health_failures"] == 0
    assert record["levels"][0]["ratio_to_one"] == 1
    assert [len(record["leaving"][phase]["values"]) for phase in ("prompt", "reply")] == [9, 9]
    assert record["same_text"] == {"compared": 3 + 6, "different": [], "failures": []}


def test_table_has_a_column_for_each_number_of_streams(record):
    table = render_serve(record)
    assert f"{record['levels'][1]['tokens_per_second']:,.1f}" in table
    for words in (
        "streams                           1          2",
        "goodput",
        "knee",
        "all 9 texts",
        "during a reply",
    ):
        assert words in table
    record = {**record, "same_text": {"compared": 9, "different": [3], "failures": ["status 503"]}, "knee": 2}
    record["levels"] = [{**record["levels"][0], "failures": ["status 429", "status 429"], "itl_seconds": None}]
    table = render_serve(record)
    assert table.count("status 429") == table.count("status 503") == 1
    assert "DIFFERENT text" in table
    assert "knee: 2 streams" in table


WRONG = {
    "--serve": ["--serve --stream", "--serve --speculation", "--serve --roofline", "--output x.png"],
    "numbers of streams": ["--serve --concurrency 1,x", "--serve --concurrency 0"],
    "concurrency": ["--serve --concurrency 1000"],
    "--requests": ["--serve --requests 0"],
    "--slo-ttft": ["--serve --slo-ttft 0"],
    "--draft": ["--serve --draft x.gguf"],
    "--prompt": ["--serve --prompt 100000"],
    "--context has no meaning": ["--serve --context 32"],
    "--repetitions has no meaning": ["--serve --repetitions 3"],
    "--concurrency is for --serve": ["--concurrency 1"],
    "--requests is for --serve": ["--requests 4"],
    "--slo-itl is for --serve": ["--slo-itl 50"],
}
"""Arguments by what the message names."""


@pytest.mark.parametrize(("arguments", "word"), [(line.split(), word) for word in WRONG for line in WRONG[word]])
def test_wrong_arguments_end_in_one_line(capsys, arguments, word):
    assert main(["bench", str(model_path(None)), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert word in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.skipif(HAS_CHARTS, reason="matplotlib is installed")
def test_missing_charts_are_told_before_anything_is_measured(capsys):
    assert main(["bench", str(model_path(None)), *QUICK, "--output", "x.png"]) == 2
    assert "pip install 'localinfer[plot]'" in capsys.readouterr().err


def test_server_that_cannot_start_says_why(tmp_path):
    with warm_processes(), pytest.raises(BackendUnavailableError, match=r"missing\.gguf"):
        ServerProcess(str(tmp_path / "missing.gguf"), device="cpu", threads=1, max_generations=4)


@pytest.mark.skipif(sys.platform == "win32", reason="kills as Unix does")
def test_server_ends_with_the_process_that_started_it():
    program = (
        "import sys; from localinfer.apps.bench.processes import ServerProcess; "
        f"server = ServerProcess({str(model_path(None))!r}, device='cpu', threads=1, max_generations=4); "
        "print(server.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    with tempfile.TemporaryDirectory(prefix="li-") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as starter:
            try:
                assert starter.stdout is not None
                server = psutil.Process(int(starter.stdout.readline()))
                assert "serve" in server.cmdline()
            finally:
                starter.send_signal(signal.SIGKILL)
        assert psutil.wait_procs([server], timeout=30)[1] == []


def test_chart_without_a_folder_for_it_is_refused(record, tmp_path):
    if not HAS_CHARTS:
        pytest.skip("matplotlib is not installed")
    from localinfer.apps.bench.charts import save_figure, serve_figure
    from localinfer.errors import RequestError

    with pytest.raises(RequestError, match="there is no folder"):
        save_figure(serve_figure({**record, "knee": 2}), Path(tmp_path) / "missing" / "chart.png")


@pytest.mark.skipif(not HAS_CHARTS, reason="matplotlib is not installed")
def test_roofline_draws_a_png(tmp_path: Path) -> None:
    """Here, as matplotlib takes two seconds to import."""
    path = tmp_path / "roof.png"
    words = ["--prompt", "24", "--decode", "6", "--context", "9", "--repetitions", "1", "--threads", "1"]
    with short_rounds():
        printed, messages = run_bench(str(model_path(None)), *words, "--roofline", "--output", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "ceilings" in printed and messages == f"drawn: {path}\n"


@pytest.mark.skipif(not HAS_CHARTS, reason="matplotlib is not installed")
@pytest.mark.parametrize("rise", [0.0, 0.0001, 0.01, 1.0])
def test_no_point_of_a_chart_is_cut_off(rise: float) -> None:
    from localinfer.apps.bench.charts import serve_figure

    def level(streams: int) -> dict[str, Any]:
        seconds = 0.1 + rise * streams
        return {
            "concurrency": streams,
            "tokens_per_second": 30.0 + 10 * streams,
            "seconds_per_token": {"p50": seconds},
            **{
                name: {f"p{q}": seconds for q in (50, 95, 99)}
                for name in ("time_to_first_token_seconds", "itl_seconds")
            },
            "requests_per_second": seconds,
            "goodput_requests_per_second": seconds,
        }

    settings = {"prompt": 9, "decode": 9, "slo_first_token_seconds": 0.1, "slo_itl_seconds": 0.1}
    levels = [level(streams) for streams in (1, 2, 8)]
    figure = serve_figure({"settings": settings, "model": {"path": "m"}, "levels": levels, "knee": 8})
    figure.draw_without_rendering()
    for axes in figure.axes:
        frame = axes.bbox.padded(-8)
        points = [axes.transData.transform(point) for line in axes.lines[:1] for point in line.get_xydata()]
        assert len(points) == 3 and all(frame.contains(*point) for point in points)
        low, high = axes.get_ylim()
        assert low == 0 and all(line.get_ydata().max() < 0.9 * high for line in axes.lines[:-1])

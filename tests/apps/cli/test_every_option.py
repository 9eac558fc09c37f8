"""Every option of every command, once with a value that is good and once with one that is not: never a traceback."""

import io
import json
import logging
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

import localinfer
from localinfer.apps.cli import localinfer_command as commands, main
from localinfer.apps.evaluate import measure
from localinfer.apps.server.app import LocalServer
from localinfer.apps.show.certificate import certify
from localinfer.models import demo
from localinfer.storage.conversations import ConversationStore, SavedConversation
from tests.api.encoder_models import write_encoder
from tests.apps.cli.option_lines import BAD, GOOD, cases, lines_of
from tests.models.talking_models import build_talking_model

DEMO = str(Path(demo.__file__).parent / "demo-f16.gguf")


@cache
def _calibration() -> str:
    """A calibration of the demo model."""
    with localinfer.load(DEMO) as llm:
        questions = {"ran": localinfer.YesNo(instructions="Did it?")}
        calibration = localinfer.DecisionCalibration.fit(llm, questions, [("It ran.", {"ran": True})])
    return json.dumps(calibration.to_json())


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Fill the places of a line with files of this test; standard input is one message, and servers end once ready."""
    run = LocalServer.run

    def run_until_ready(server: LocalServer, on_ready: Callable[[], object]) -> None:
        def end() -> None:
            on_ready()
            server.stop()

        run(server, on_ready=end)

    monkeypatch.setattr(LocalServer, "run", run_until_ready)
    monkeypatch.setattr("localinfer.apps.cli.serve.input_can_end", lambda: True)
    # Which would read standard input; the model is loaded as ever.
    monkeypatch.setattr("localinfer.apps.cli.mcp.serve_model", lambda load: load(threading.Event()).close())
    # Whatever is pulled, listed and removed: the command has no other options here.
    monkeypatch.setattr(
        "localinfer.storage.hub.pull.pull_model", lambda *_, **__: SimpleNamespace(name="org/repo:Q8_0")
    )
    monkeypatch.setattr("localinfer.storage.hub.installed.find_pulled", lambda places: [])
    monkeypatch.setattr("localinfer.storage.hub.installed.find_installed", lambda places: [])
    monkeypatch.setattr(measure, "QUESTIONS", measure.QUESTIONS[:2])
    (tmp_path / "folder").mkdir()
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    (tmp_path / "grammar.lark").write_text('start: "a"')
    (tmp_path / "text.txt").write_text("Once upon a time there was a little dog. " * 60)
    (tmp_path / "keys").write_text("alice: secret max_running=2\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    (tmp_path / "broken").write_text("{% for %}")
    (tmp_path / "asked").write_text('{"ran": {"type": "noul", "instructions": "Did it?"}}')
    (tmp_path / "labelled").write_text('{"state": "It ran.", "expected": {"ran": true}}\n' * 4)
    (tmp_path / "fitted").write_text(_calibration())
    (tmp_path / "settings").write_text('[models.demo]\naliases = "small"\nthreads = 1\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN_OF_THIS_TEST", "secret")
    monkeypatch.setattr("localinfer.storage.conversations.user_folder", lambda _: tmp_path / "state")
    kept = SavedConversation.begin("demo", name="kept").with_turns([{"role": "user", "content": "Hi"}], system=None)
    ConversationStore(tmp_path / "state" / "conversations").save(kept)
    places = {name: str(tmp_path / name) for name in ("folder", "models", "file", "template", "broken", "settings")}
    places |= {"schema": str(tmp_path / "schema.json"), "grammar": str(tmp_path / "grammar.lark"), "demo": DEMO}
    places |= {"text": str(tmp_path / "text.txt"), "keys": str(tmp_path / "keys"), "sock": "s/s.sock"}
    places |= {name: str(tmp_path / name) for name in ("asked", "labelled", "fitted")}
    (tmp_path / "s").mkdir(mode=0o700)
    # Without options of threads a load measures how many are the fastest.
    places |= {"hi": "-p Hi -n 1 --no-disk-cache --threads 1", "one": "--lines -n 1 --no-disk-cache --threads 1"}
    places["brief"] = "--system Brief. --no-disk-cache --temperature 0 --threads 1"
    places["local"] = "--no-disk-cache --no-tcp --socket s/s.sock --threads 1"
    # --verbose and --log-format add a handler, on the standard error of its test, and lets more through.
    loggers = [logging.getLogger(name) for name in ("localinfer", "localinfer.server")]
    kept = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]

    def fill(line: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
        if "{models}" in line:
            (tmp_path / "models").mkdir(exist_ok=True)
            (tmp_path / "models" / "demo.gguf").write_bytes(Path(DEMO).read_bytes())
        if "{cert}" in line:
            places["cert"] = str(tmp_path / "demo.cert")
            (tmp_path / "demo.cert").write_bytes(certify(DEMO).write())
        if "{ranker}" in line:
            places["ranker"] = str(write_encoder(tmp_path, "bert-reranker"))
        if "{tiny}" in line:
            # Calibrating the demo model would take most of this file's time.
            places["tiny"] = str(build_talking_model(tmp_path, "llama-moe"))
        if "{mtp}" in line:
            places["mtp"] = str(build_talking_model(tmp_path, "glm4moe-mtp"))
        return line.format(**places).split()

    yield fill
    for logger, handlers, propagate, level in kept:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.parametrize(("command", "line"), [(name, line) for name, line in cases(GOOD) if name != "quantize"])
def test_good_values_are_taken(command, line, words, capfd):
    code = main([command, *words(line)])
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    assert code == 0, errors


def test_good_values_of_quantize_are_taken(words, capfd):
    for line in lines_of(GOOD, "quantize"):
        code = main(["quantize", *words(line)])
        errors = capfd.readouterr().err
        assert "Traceback" not in errors
        assert code == 0, errors


@pytest.mark.parametrize("command", list(dict(cases(BAD))))
def test_bad_values_are_one_line_that_names_them(command, words, capfd):
    for line in lines_of(BAD, command):
        given = words(line)
        needs_prompt = command == "run" and "--prompt" not in given
        assert main([command, *(["-p", "Hi"] if needs_prompt else []), *given]) == 2, line
        captured = capfd.readouterr()
        *before, error = captured.err.splitlines()
        assert error.startswith("error: "), (line, captured.err)
        assert [said for said in before if not said.startswith("listening on ")] == [], line
        assert any(_named(word, error) for word in given if word not in (DEMO, "--serve", "--speculation")), error
        assert captured.out == "", line


def _named(word: str, message: str) -> bool:
    if word == "\udcff":
        return "U+DCFF" in message
    option = word.partition("=")[0]
    return (
        option in message
        or option[2:].replace("-", " ") in message
        or ("/" in word and str(Path(word).parent) in message)
    )


SERVE = ("concurrency", "requests", "slo_ttft", "slo_itl")
ELSEWHERE = {
    "good": {
        *(("bench", name) for name in ("compare", "peer_python", "output", *SERVE)),
        *(("chat", name) for name in ("images", "audios", "mcp", "mcp_allow")),
        *(("compare", name) for name in ("images", "mmproj", "candidate_mmproj")),
        ("pull", "no_mmproj"),
        ("warmup", "packs"),
    },
    "bad": {(command, "disk_cache_folder") for command in ("run", "chat", "serve", "mcp", "cache")},
}
"""Good values of the first want a peer, seconds of measuring or matplotlib, and are in test_bench.py and
test_bench_serve.py; pictures want a model that reads them, and MCP servers are in tests/apps/mcp. A folder that cannot
be written costs speed only, so the others warn of it."""


@pytest.mark.parametrize(("kind", "table"), [("good", GOOD), ("bad", BAD)])
@pytest.mark.parametrize("command", sorted(commands.commands))
def test_no_option_is_left_out(command, kind, table):
    words = {word.partition("=")[0] for line in lines_of(table, command) for word in line.split()}
    named = commands.commands[command]
    for option in (option for one in (named, *getattr(named, "commands", {}).values()) for option in one.params):
        if isinstance(option, click.Option) and (command, option.name) not in ELSEWHERE[kind]:
            assert words & {*option.opts, *option.secondary_opts}, f"{command} {option.opts[-1]} is not tried"

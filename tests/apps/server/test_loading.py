"""A server whose model takes long to load, cannot be loaded, or is not wanted any more while it loads."""

import json
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from local_servers import MODEL, STORY, serving
from scripted_models import scripted_model, scripted_sources

from localinfer.apps.cli import EXIT_BAD_INPUT, main
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import (
    BackendUnavailableError,
    CorruptFileError,
    ModelFileError,
    OutOfMemoryError,
    RequestError,
    UnsupportedFormatError,
)
from tests.support.limits import seconds, wait_until
from tests.support.warm_python import WarmPython

PATH = "/v1/chat/completions"
BODY = {"messages": STORY, "max_tokens": 2}
SECRET = "/home/somebody/models"
UNIX_ONLY = pytest.mark.skipif(sys.platform == "win32", reason="signals and sockets of Unix")

SLOW = """
import sys, threading, time, localinfer
from localinfer.apps.cli import main
from localinfer.apps.server import app
app._LOAD_END_SECONDS = 0.1  # a thread that never looks is left behind the sooner
def load(*, progress, **options):
    print("loading has begun", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.02)
        {step}
localinfer.load = load
sys.exit(main(sys.argv[1:]))
"""
STEPS = {"reports its progress": 'progress("reading", 1, 2)', "never looks": "pass"}


@contextmanager
def command(folder: Path, *words: str, script: str | None = None) -> Iterator[subprocess.Popen]:
    folder.mkdir(mode=0o700, exist_ok=True)
    started = ["-m", "localinfer"] if script is None else ["-c", script]
    options = ["serve", "--port", "0", "--socket", str(folder / "s.sock"), "--no-disk-cache", "--threads", "1", *words]
    process = WarmPython(
        [sys.executable, *started, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=seconds(15))


def wait_for_progress(url: str) -> dict:
    def told() -> dict:
        return httpx.get(f"{url}/health", trust_env=False).json()["error"]

    assert wait_until(lambda: "progress" in told())
    return told()


def url_in(line: str) -> str:
    found = re.search(r"http://127\.0\.0\.1:\d+", line)
    assert found is not None, line
    return found[0]


def broken_models(folder: Path) -> dict[str, Path]:
    """Files that are no model, each in its own way."""
    whole = MODEL.path.read_bytes()
    contents = {
        "empty": b"",
        "short": whole[:20],
        "magic": b"ABCD" + whole[4:4096],
        "version": whole[:4] + struct.pack("<I", 99) + whole[8:4096],
        "cut": whole[: len(whole) // 2],
        "unknown": whole.replace(b"llama", b"lambo"),
        "zeros": bytes(4096),
    }
    paths = {name: folder / f"{name}.gguf" for name in contents}
    for name, path in paths.items():
        path.write_bytes(contents[name])
    for name, config in (("folder", "{}"), ("nonsense", "not JSON")):
        paths[name] = folder / name
        paths[name].mkdir()
        (paths[name] / "config.json").write_text(config)
    paths["missing"] = folder / "missing.gguf"
    return paths


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> dict[str, Path]:
    return broken_models(tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize(
    "name", ["empty", "short", "magic", "version", "cut", "unknown", "zeros", "folder", "nonsense", "missing"]
)
def test_model_that_cannot_be_served_ends_the_command_in_one_line(runtime_folder, capfd, broken, name):
    words = ["serve", "--port", "0", "--socket", str(runtime_folder / "bad.sock"), "--no-disk-cache"]
    assert main([*words, "-m", str(broken[name])]) == EXIT_BAD_INPUT
    told, said = capfd.readouterr()
    assert told == ""
    *before, error = said.splitlines()
    assert error.startswith("error: ")
    assert all(line.startswith("listening on ") for line in before)
    assert not (runtime_folder / "bad.sock").exists()


@UNIX_ONLY
def test_ready_line_is_written_to_stdout_when_requests_work(runtime_folder):
    with command(runtime_folder / "ready") as process:
        assert process.stdout is not None
        url = url_in(process.stdout.readline())
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert httpx.post(f"{url}{PATH}", json=BODY, trust_env=False, timeout=seconds(15)).status_code == 200
        process.terminate()
        told, said = process.communicate(timeout=seconds(15))
    assert (told, process.returncode) == ("", 0)
    assert [line.partition(" ")[0] for line in said.splitlines()] == ["listening"]


@UNIX_ONLY
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
def test_load_ends_with_the_server_and_nothing_more_is_said(runtime_folder, step, number):
    folder = runtime_folder / "slow"
    with command(folder, script=SLOW.replace("{step}", step)) as process:
        assert process.stderr is not None
        url = url_in(process.stderr.readline())
        assert process.stderr.readline() == "loading has begun\n"
        loading = httpx.get(f"{url}/health", trust_env=False)
        assert (loading.status_code, loading.json()["error"]["code"]) == (503, "model_loading")
        if "progress" in step:
            told = wait_for_progress(url)
            assert told["progress"] == {"stage": "reading", "done": 1, "total": 2}
            assert "(reading, 1 of 2)" in told["message"]
        assert loading.headers["x-should-retry"] == "true"
        process.send_signal(number)
        told, said = process.communicate(timeout=seconds(15))
    assert (told, said, process.returncode) == ("", "", 0)
    assert not (folder / "s.sock").exists()


class PausedLoader:
    """Loads when it is told to go on, and remembers what was closed."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.closed = threading.Event()

    def __call__(self, source: ModelSource):
        self.begun.set()
        assert self.go_on.wait(seconds(10))
        llm = scripted_model(b"Yes.")
        close, closed = llm.close, self.closed

        def close_and_tell() -> None:
            close()
            closed.set()

        llm.close = close_and_tell
        return llm


def test_server_that_ends_refuses_who_waits_for_a_model_and_closes_it_when_it_comes(monkeypatch):
    loader, answers = PausedLoader(), []
    monkeypatch.setattr("localinfer.apps.server.app._LOAD_END_SECONDS", 0.05)

    def ask(url: str) -> None:
        answers.append(httpx.post(f"{url}{PATH}", json=BODY, trust_env=False, timeout=seconds(15)))

    with serving(ServerSettings(port=0), sources=scripted_sources("slow"), load=loader) as running:
        asking = threading.Thread(target=ask, args=(running.url,))
        asking.start()
        assert loader.begun.wait(seconds(10))
        running.server.stop()
        asking.join(seconds(10))
        running.thread.join(seconds(10))
        assert not running.thread.is_alive()
        assert not running.server.has_ended()
        loader.go_on.set()
        assert loader.closed.wait(seconds(10))
        assert wait_until(running.server.has_ended)
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


def test_request_that_leaves_while_its_model_loads_does_not_end_the_load():
    loader = PausedLoader()
    with serving(ServerSettings(port=0), sources=scripted_sources("slow"), load=loader) as running:
        with pytest.raises(httpx.ReadTimeout), running.client() as client:
            client.post(PATH, json=BODY, timeout=0.1)
        loader.go_on.set()
        with running.client() as client:
            assert client.post(PATH, json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelFileError(f"{SECRET} is no file"), 500),
        (CorruptFileError(f"{SECRET}/a.gguf is cut"), 500),
        (UnsupportedFormatError(f"{SECRET}/a.gguf has a new type"), 500),
        (RequestError(f"{SECRET} is a draft of another vocabulary"), 500),
        (BackendUnavailableError(f"{SECRET}: no GPU"), 500),
        (OutOfMemoryError(f"{SECRET}/a.gguf is large"), 503),
        (MemoryError(), 503),
        (FileNotFoundError(2, "No such file", f"{SECRET}/a.gguf"), 500),
        (PermissionError(13, "Denied", f"{SECRET}/a.gguf"), 500),
        (ValueError(f"a fault of ours at {SECRET}"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_model_that_cannot_be_loaded_is_told_without_its_path_and_logged_in_a_line(caplog, error, status):
    def load(source: ModelSource):
        raise error

    with (
        serving(ServerSettings(port=0), sources=scripted_sources("one", "two"), load=load) as running,
        running.client() as client,
    ):
        for path, body in (
            (PATH, BODY),
            (PATH, {**BODY, "stream": True}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/messages", BODY),
            ("/v1/responses", {"input": "a"}),
            ("/v1/embeddings", {"input": "a"}),
            ("/tokenize", {"content": "a"}),
            ("/apply-template", {"messages": STORY}),
        ):
            caplog.clear()
            answer = client.post(path, json={**body, "model": "two"})
            told = answer.json()["error"]
            assert answer.status_code == status
            assert "somebody" not in answer.text
            assert "'two'" in told["message"]
            assert answer.headers["x-request-id"] in told["message"]
            (record,) = [one for one in caplog.records if one.name.startswith("localinfer")]
            assert answer.headers["x-request-id"] in record.message
            assert "\n" not in record.message
            assert bool(record.exc_info) is isinstance(error, ValueError)
            assert str(error) in record.message or record.exc_info
        assert client.get("/health").status_code == 200


def test_broken_models_of_a_folder_are_refused_and_the_others_served(runtime_folder, tmp_path, broken):
    for path in broken.values():
        if path.exists():
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "sound.gguf").symlink_to(MODEL.path)
    if sys.platform == "win32":
        pytest.skip("signals and sockets of Unix")
    with command(runtime_folder / "models", "--models", str(tmp_path)) as process:
        assert process.stdout is not None
        url = url_in(process.stdout.readline())
        with httpx.Client(base_url=url, trust_env=False, timeout=seconds(15)) as client:
            names = {card["id"] for card in client.get("/v1/models").json()["data"]}
            assert names == {path.stem for path in broken.values() if path.exists()} | {"sound"}
            for name in sorted(names - {"sound"}):
                answer = client.post(PATH, json={**BODY, "model": name})
                assert answer.status_code == 500, (name, answer.text)
                assert str(tmp_path) not in answer.text and str(broken["empty"].parent) not in answer.text
            assert client.post(PATH, json={**BODY, "model": "sound"}).status_code == 200
        process.terminate()
        _, said = process.communicate(timeout=seconds(15))
    lines = said.splitlines()
    assert len(lines) == len(names)
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["failing", "letters"])
def test_failure_while_a_reply_is_made_tells_no_path(scripted, name):
    body = {"messages": STORY, "model": name, "max_tokens": 9}
    whole = scripted.post(PATH, json=body)
    streamed = scripted.post(PATH, json={**body, "stream": True})
    assert (whole.status_code == 500) is (name == "failing")
    for answer in (whole, streamed):
        assert "somebody" not in answer.text
    if name == "failing":
        assert "req-" in whole.text
        error = json.loads(streamed.text.split("data: ")[-2])["error"]
        assert error["message"].startswith("the server failed")

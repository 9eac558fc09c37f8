"""A server that another program starts: its one line, and its end with that program, whatever it is doing."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from local_servers import MODEL, STORY

from localinfer.apps.cli import EXIT_BAD_INPUT, main
from localinfer.apps.cli.standard_streams import NonBlockingWriter
from localinfer.apps.server.transport.sockets import has_unix_sockets
from localinfer.kernels.versions import installed_version
from tests.support.limits import seconds, wait_until
from tests.support.warm_python import WarmPython

UNIX_ONLY = pytest.mark.skipif(sys.platform == "win32", reason="signals and sockets of Unix")
PATH = "/v1/chat/completions"
ENDLESS = {"messages": STORY, "ignore_eos": True, "context_shift": True, "max_tokens": 1 << 20, "stream": True}

STUCK = """
import ctypes, sys, time, localinfer, localinfer.kernels.jit.compile_ahead
children = "import sys, json; sys.path[:], _ = json.loads(sys.argv[1])\\n"
children += "from localinfer.kernels.jit.compile_ahead import end_with_parent as end; end()\\n"
children += "import time; time.sleep(600)"
def load(**options):
    print("loading has begun", file=sys.stderr, flush=True)
    {stuck}
localinfer.load = load
from localinfer.apps.cli import main, shutdown
shutdown._LOADING_SECONDS = shutdown._GUARD_SECONDS = 0.1
sys.exit(main())
"""
LOADS = {
    "holds the interpreter's lock": "ctypes.PyDLL(None).sleep(600)",
    "computes beside it": "ctypes.CDLL(None).sleep(600)",
    "starts children": "localinfer.kernels.jit.compile_ahead.run_children(children, [0], lambda: True)",
}
"""What a load may be doing that cannot be interrupted."""

PARENT = """
import json, subprocess, sys
server = subprocess.Popen(json.loads(sys.argv[1]), stdin=subprocess.PIPE if sys.argv[2] == "own" else None)
sys.stdin.readline()
"""
"""Starts a server and waits; killed by a test, it can tell nobody."""
WARM_PARENT = """
import json, os, sys
if not os.fork():
    _, _, code, *sys.argv[1:] = json.loads(sys.argv[1])
    exec(code)
sys.stdin.readline()
"""
"""The same as a copy of a process that has imported what the server's code needs, which inherits it."""


@contextmanager
def sidecar(folder: Path, *words: str, script: str | None = None, **streams) -> Iterator[subprocess.Popen]:
    folder.mkdir(mode=0o700, exist_ok=True)
    process = WarmPython(
        [sys.executable, *_command(folder, *words, script=script)],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(seconds(10))
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _command(folder: Path, *words: str, script: str | None = None) -> list[str]:
    options = ["serve", "--ready-json", "--port", "0", "--no-disk-cache", "--threads", "1", *words]
    if "--socket" not in words:
        options += ["--socket", str(folder / "s.sock")]
    return [*(["-m", "localinfer"] if script is None else ["-c", script]), *options]


def ready(process: subprocess.Popen) -> dict:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.endswith(b"\n"), line
    told = json.loads(line)
    assert told["version"] == installed_version("localinfer")
    return told


def url_of(told: dict) -> str:
    return f"http://{told['host']}:{told['port']}"


def ended(process: subprocess.Popen) -> tuple[bytes, int]:
    """What else it wrote to standard output, and its exit code."""
    process.wait(seconds(15))
    assert process.stdout is not None
    return process.stdout.read(), process.returncode


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    # Where nobody takes note of its end, a process that has ended stays in the list.
    try:
        return not state.parent.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@UNIX_ONLY
@pytest.mark.parametrize("ask", ["stdin", "SIGTERM"])
def test_the_one_line_says_where_requests_are_answered_until_the_end(runtime_folder, ask):
    with sidecar(runtime_folder / "line", "--until-stdin-ends") as process:
        told = ready(process)
        assert set(told) == {"version", "pid", "host", "port", "socket", "models"}
        assert (told["pid"], told["models"]) == (process.pid, [MODEL.id if MODEL.id != "demo" else "demo-f16"])
        with httpx.Client(transport=httpx.HTTPTransport(uds=told["socket"]), base_url="http://localhost") as client:
            assert client.get("/health").status_code == 200
        assert httpx.get(f"{url_of(told)}/health", trust_env=False).status_code == 200
        if ask == "stdin":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM)
        assert ended(process) == (b"", 0)
        assert not Path(told["socket"]).exists()


@UNIX_ONLY
def test_servers_of_two_programs_share_nothing_and_tokens_are_taken_from_the_environment(runtime_folder, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    monkeypatch.setenv("TOKEN_OF_THIS_TEST", "secret")
    folder = runtime_folder / "of two programs"
    folder.mkdir()
    (folder / "one.gguf").symlink_to(MODEL.path)
    words = [*_command(folder, "--socket", "x", "--models", str(folder), "--token-env", "TOKEN_OF_THIS_TEST")]
    del words[words.index("--socket") : words.index("--socket") + 2]
    processes = []
    try:
        for options in ([], ["--no-tcp"]):
            command = [sys.executable, *words, *options]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        first, second = map(ready, processes)
        assert first["socket"] != second["socket"]
        assert (second["host"], second["port"], first["models"]) == (None, None, ["one"])
        assert httpx.get(f"{url_of(first)}/v1/models", trust_env=False).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url_of(first)}/v1/models", headers=headers, trust_env=False).status_code == 200
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [ended(process) for process in processes] == [(b"", 0)] * 2
        assert wait_until(lambda: not list((runtime_folder / "localinfer").glob("*.sock*")))
    finally:
        for process in processes:
            process.kill()
            process.wait(seconds(10))
            process.stdout.close()


@pytest.mark.parametrize(
    ("kind", "words", "told"),
    [
        ("CorruptFileError", ["-m", "{cut}"], "cut.gguf"),
        ("RequestError", ["-m", "missing.gguf"], "missing.gguf"),
        ("RequestError", ["--models", "missing"], "missing"),
        ("RequestError", ["--port", "{taken}"], "{taken}"),
        ("RequestError", ["--token-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        ("RequestError", ["--token-file", "missing"], "missing"),
        ("RequestError", ["--host", "0.0.0.0"], "token"),
        ("RequestError", ["--socket", "/" + "x" * 200], "shorter"),
        ("UsageError", ["--port", "many"], "--port"),
        ("UsageError", ["--prot", "1"], "--prot"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_way_out(runtime_folder, tmp_path, capfd, kind, words, told):
    if not has_unix_sockets() and "--socket" in words:
        pytest.skip("this system has no Unix sockets for Python")
    (tmp_path / "cut.gguf").write_bytes(MODEL.path.read_bytes()[:100_000])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"{cut}": str(tmp_path / "cut.gguf"), "{taken}": str(taken.getsockname()[1])}
        words = [places.get(word, word) for word in words]
        options = _command(runtime_folder, *words)[2:]
        if words[0] == "--port":
            del options[2:4]
        assert main(options) == EXIT_BAD_INPUT
    out, errors = capfd.readouterr()
    (line,) = out.splitlines()
    error = json.loads(line)["error"]
    assert error["type"] == kind
    assert error["message"] and error["way_out"]
    assert places.get(told, told) in error["message"] + error["way_out"]
    assert "Traceback" not in errors and errors.splitlines()[-1].startswith("error: ")


def test_a_fault_of_ours_is_told_in_the_line_too(runtime_folder, capfd, monkeypatch):
    monkeypatch.setattr("localinfer.apps.cli.serve.find_sources", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(_command(runtime_folder)[2:])
    assert json.loads(capfd.readouterr().out)["error"]["type"] == "InternalError"


@UNIX_ONLY
@pytest.mark.parametrize(
    ("ask", "doing"),
    [
        ("SIGTERM", "holds the interpreter's lock"),
        ("parent", "holds the interpreter's lock"),
        ("SIGTERM", "computes beside it"),
        ("parent", "starts children"),
    ],
)
def test_a_load_that_cannot_be_interrupted_ends_with_the_server(runtime_folder, ask, doing):
    load = LOADS[doing]
    folder = runtime_folder / "stuck"
    folder.mkdir(mode=0o700, exist_ok=True)
    words = [sys.executable, *_command(folder, "--until-stdin-ends", script=STUCK.replace("{stuck}", load))]
    # Standard input of the server is that of its parent, and does not end.
    command = [sys.executable, "-c", WARM_PARENT, json.dumps(words)]
    messages = folder / "messages"
    with (
        messages.open("wb") as said,
        WarmPython(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said) as parent,
    ):
        try:
            assert wait_until(lambda: b"loading has begun" in messages.read_bytes()), messages.read_text()
            (server,) = [child.pid for child in psutil.Process(parent.pid).children()]
            assert wait_until(lambda: len(children_of(server)) == 1 + ("children" in load))
            everything = [server, *children_of(server)]
            if ask == "parent":
                parent.kill()
            else:
                os.kill(server, signal.SIGTERM)
            assert wait_until(lambda: not any(map(is_alive, everything)))
        finally:
            parent.kill()


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


@contextmanager
def started_by_another(folder: Path, stdin: str) -> Iterator[tuple[subprocess.Popen, psutil.Process]]:
    """A parent and the server that it started, whose standard input is a pipe of the parent's or the parent's own."""
    folder.mkdir(mode=0o700, exist_ok=True)
    words = json.dumps([sys.executable, *_command(folder, "--until-stdin-ends")])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", PARENT, words, stdin]
    with subprocess.Popen(command, stdin=subprocess.PIPE, **quiet) as parent:
        try:
            assert wait_until(lambda: children_of(parent.pid))
            yield parent, psutil.Process(children_of(parent.pid)[0])
        finally:
            parent.kill()


@UNIX_ONLY
@pytest.mark.parametrize("moment", [0.0, 0.2])
def test_the_parent_may_be_killed_at_any_moment(runtime_folder, moment):
    with started_by_another(runtime_folder / "moment", "own") as (parent, server):
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > moment)
        parent.kill()
        assert wait_until(lambda: not is_alive(server.pid))


@UNIX_ONLY
def test_the_parent_may_be_killed_where_its_standard_input_goes_on(runtime_folder):
    with started_by_another(runtime_folder / "watched", "inherited") as (parent, server):
        assert wait_until(lambda: server.num_threads() > 1), "the watch has not begun"
        parent.kill()
        assert wait_until(lambda: not is_alive(server.pid))


@UNIX_ONLY
def test_the_parent_may_be_killed_before_it_was_seen(runtime_folder):
    if os.getsid(adopter()) == os.getsid(0):
        pytest.skip("here the process that adopts orphans could be the one that started them: both are in one session")
    with started_by_another(runtime_folder / "unseen", "inherited") as (parent, server):
        parent.kill()
        assert wait_until(lambda: not is_alive(server.pid))


def adopter() -> int:
    """The number of the process that becomes the parent of those whose own has ended."""
    grandchild = "import os, sys; sys.stdin.read(); print(os.getppid())"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.wait(seconds(10))
        return int(process.communicate()[0])


@UNIX_ONLY
def test_replies_do_not_hold_up_the_end(runtime_folder):
    with sidecar(runtime_folder / "replies", "--until-stdin-ends") as process:
        url = url_of(ready(process))
        with httpx.Client(timeout=seconds(15)) as client, client.stream("POST", f"{url}{PATH}", json=ENDLESS) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.stdin.close()
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert ended(process) == (b"", 0)


@UNIX_ONLY
def test_a_parent_that_reads_nothing_does_not_stop_the_server(runtime_folder):
    """Standard output is a pipe without a reader, and standard error one that is full."""
    folder = runtime_folder / "unread"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    closed, broken = os.pipe()
    os.close(closed)
    try:
        with sidecar(folder, "--verbose", "--until-stdin-ends", stdout=broken, stderr=writing) as process:
            transport = httpx.HTTPTransport(uds=str(folder / "s.sock"))
            with httpx.Client(transport=transport, base_url="http://localhost", timeout=seconds(15)) as client:
                assert wait_until(lambda: accepts(folder / "s.sock"), every=0.05)
                assert wait_until(lambda: client.get("/health").status_code == 200, every=0.05)
                for _ in range(20):
                    assert client.get("/health").status_code == 200
            process.stdin.close()
            process.wait(seconds(15))
            assert process.returncode == 0
    finally:
        for descriptor in (reading, writing, broken):
            os.close(descriptor)


def accepts(path: Path) -> bool:
    """Return whether a server takes connections at a path; httpx leaves a socket open whose connection was refused."""
    with socket.socket(socket.AF_UNIX) as tried:
        return tried.connect_ex(str(path)) == 0


def test_messages_without_a_reader_are_dropped_and_counted():
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    stream = NonBlockingWriter(writing)
    for _ in range(3000):
        stream.write("x" * 999 + "\n")
    read = bytearray()

    def has_all() -> bool:
        with suppress(BlockingIOError):
            read.extend(os.read(reading, 1 << 20))
        return stream.drain(0)

    assert wait_until(has_all)
    stream.write("the last\n")
    assert wait_until(lambda: has_all() and read.endswith(b"the last\n"))
    stream.close()
    os.close(writing)
    os.close(reading)
    *lines, last, _ = read.decode().split("\n")
    dropped = [int(line.split()[1]) for line in lines if line.startswith("warning: ")]
    assert dropped and {line for line in lines if not line.startswith("warning: ")} == {"x" * 999}
    assert last == "the last" and sum(dropped) == 1000 * (3000 - len(lines) + len(dropped))

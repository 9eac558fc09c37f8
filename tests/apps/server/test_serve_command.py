"""The command as people run it: in a process of its own, ended by signals, and killed."""

import json
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from local_servers import STORY
from server_process import serve

from localinfer.apps.cli import EXIT_BAD_INPUT, main
from localinfer.apps.server.app import LocalServer
from localinfer.apps.server.transport.sockets import UnixListener, has_unix_sockets
from tests.support.limits import seconds, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and sockets of Unix")
PATH = "/v1/chat/completions"
ENDLESS = {"messages": STORY, "ignore_eos": True, "context_shift": True, "max_tokens": 1 << 20, "stream": True}


def ask(url: str, messages: list[dict], **members) -> dict:
    response = httpx.post(f"{url}{PATH}", json={"messages": messages, "temperature": 0, **members}, timeout=seconds(15))
    assert response.status_code == 200, response.text
    return response.json()


@contextmanager
def endless_reply(url: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun and does not end by itself."""
    with (
        httpx.Client(timeout=seconds(15)) as client,
        client.stream("POST", f"{url}{PATH}", json=ENDLESS) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        yield lines


def wait_until_written(folder: Path) -> None:
    """Until what went idle is on disk, while another reply runs: files are there, and have not grown for a while."""
    former: dict[str, int] = {}

    def is_written() -> bool:
        nonlocal former
        before, former = former, {str(path): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        return former == before and sum(former.values()) > 1 << 16

    assert wait_until(is_written, every=0.25)


def test_conversations_go_on_from_disk_after_a_kill(runtime_folder, tcp):
    folder = runtime_folder / "killed"
    folder.mkdir(mode=0o700)
    question = [{"role": "user", "content": "Tell me a story about a little girl and her cat. " * 12}]
    with serve(folder) as (process, url):
        first = ask(url, question, max_tokens=40)
        reply = first["choices"][0]["message"]
        chat = [*question, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "Go on."}]
        with endless_reply(url):
            wait_until_written(folder)
            process.send_signal(signal.SIGKILL)
            process.wait(seconds(10))
        assert (folder / "s.sock").exists()
    with serve(folder) as (process, url):
        again = ask(url, chat, max_tokens=20)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > first["usage"]["prompt_tokens"] // 2
    cold = tcp.post(PATH, json={"messages": chat, "temperature": 0, "max_tokens": 20}).json()
    assert cold["choices"] == again["choices"]


def test_terminated_server_tells_its_streams_and_takes_its_socket_along(runtime_folder):
    folder = runtime_folder / "ended"
    folder.mkdir(mode=0o700)
    with serve(folder, "--shutdown-seconds", "0.3") as (process, url):
        with endless_reply(url) as lines:
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert process.wait(seconds(15)) == 0
        assert not (folder / "s.sock").exists()


def test_second_server_of_a_socket_is_refused(served, tcp):
    assert main(["serve", "--no-tcp", "--socket", str(served.socket_path)]) == EXIT_BAD_INPUT
    assert tcp.get("/health").status_code == 200


def test_second_server_goes_on_by_tcp_where_its_socket_was_not_named(runtime_folder, capsys, monkeypatch):
    place = runtime_folder / "localinfer" / "server.sock"
    monkeypatch.setattr("localinfer.apps.server.transport.sockets.default_socket_path", lambda: place)
    said, run = [], LocalServer.run

    def run_until_ready(server: LocalServer, on_ready) -> None:
        said.append((server.addresses, server.settings.socket_path))
        run(server, on_ready=lambda: (on_ready(), server.stop()))

    monkeypatch.setattr(LocalServer, "run", run_until_ready)
    words = ["serve", "--port", "0", "--no-disk-cache"]
    with UnixListener(place):
        assert main(words) == 0
        assert f"another server listens on {place}" in capsys.readouterr().err
        assert main(["serve", "--no-tcp"]) == EXIT_BAD_INPUT
        assert main([*words, "--no-socket"]) == 0
        assert "another server" not in capsys.readouterr().err.partition("--no-tcp")[2]
    assert list(place.parent.iterdir()) == []
    assert [socket_path for _, socket_path in said] == [None, None]
    assert all(len(addresses) == 1 for addresses, _ in said)
    assert main(["serve", "--no-socket", "--socket", str(place)]) == EXIT_BAD_INPUT


def test_second_signal_ends_the_server_at_once(runtime_folder):
    folder = runtime_folder / "twice"
    folder.mkdir(mode=0o700)
    with serve(folder, "--shutdown-seconds", "60", "--no-disk-cache") as (process, url):
        with endless_reply(url) as lines:
            process.send_signal(signal.SIGTERM)
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            with pytest.raises(ConnectionError):
                wait_until(lambda: socket.create_connection(address, timeout=5).close())
            assert process.poll() is None and next(lines) is not None
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
            assert process.wait(seconds(15)) == 0
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert list(folder.glob("s.sock*")) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--host", "0.0.0.0"], "token"),
        (["-m", "missing.gguf"], "missing.gguf"),
        (["--models", "missing"], "missing"),
        (["--socket", "/" + "x" * 200 + "/s.sock"], "shorter"),
        (["--token-file", "missing"], "missing"),
        (["--allow-origin", "*"], "origin"),
    ],
)
def test_wrong_options_end_in_one_line(runtime_folder, capsys, words, told):
    place = [] if "--socket" in words else ["--socket", str(runtime_folder / "wrong.sock")]
    assert main(["serve", "--port", "0", *place, *words]) == EXIT_BAD_INPUT
    assert told in capsys.readouterr().err


def test_taken_port_ends_in_one_line(runtime_folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["serve", "--port", str(taken.getsockname()[1]), "--socket", str(runtime_folder / "taken.sock")]
        assert main(words) == EXIT_BAD_INPUT
    assert "--port" in capsys.readouterr().err
    assert not (runtime_folder / "taken.sock").exists() or not has_unix_sockets()

"""SIGHUP: tokens, models and the configuration file are read again, and what runs goes on; what is wrong stays out."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from local_servers import MODEL, STORY
from server_process import serve

from tests.support.limits import seconds, wait_until

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="a signal of Unix")
ENDLESS = {"messages": STORY, "ignore_eos": True, "context_shift": True, "max_tokens": 1 << 20, "stream": True}


class Reloaded:
    """A server with its files, and what it has logged."""

    def __init__(self, process: subprocess.Popen, url: str, folder: Path) -> None:
        self.process, self.url, self.folder = process, url, folder
        self.logged: list[dict] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.logged.append(json.loads(line))

    def status(self, token: str, **headers: str) -> int:
        headers = {"authorization": f"Bearer {token}", **headers}
        return httpx.get(f"{self.url}/v1/models", headers=headers, timeout=seconds(15)).status_code

    def models(self, token: str) -> set[str]:
        answer = httpx.get(f"{self.url}/v1/models", headers={"authorization": f"Bearer {token}"}, timeout=seconds(15))
        return {model["id"] for model in answer.json()["data"]}

    def reload(self) -> str:
        """Send the signal, and return what the server says of it."""
        before = self._said()
        self.process.send_signal(signal.SIGHUP)
        assert wait_until(lambda: len(self._said()) > len(before)), self.logged
        return self._said()[-1]

    def _said(self) -> list[str]:
        return [line["message"] for line in self.logged if line["message"].startswith("the configuration was")]


@pytest.fixture
def reloaded(runtime_folder: Path, tmp_path: Path) -> Iterator[Reloaded]:
    folder = runtime_folder / "reload"
    folder.mkdir(mode=0o700)
    (folder / "models").mkdir()
    shutil.copy(MODEL.path, folder / "models" / "one.gguf")
    (folder / "tokens").write_text("alice: first\n")
    (tmp_path / "localinfer").mkdir()
    (tmp_path / "localinfer" / "config.toml").write_text('[serve]\nallow_host = ["a.example"]\n')
    options = ["--token-file", str(folder / "tokens"), "--models", str(folder / "models"), "--log-format", "json"]
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    if sys.platform == "darwin":
        pytest.skip("its configuration folder is named by no variable")
    with serve(folder, *options, "--no-disk-cache", **home) as (process, url):
        yield Reloaded(process, url, tmp_path / "localinfer")
    shutil.rmtree(folder)


def test_what_changed_counts_from_the_signal_on_and_streams_go_on(reloaded, runtime_folder):
    folder = runtime_folder / "reload"
    assert (reloaded.status("first"), reloaded.status("second")) == (200, 401)
    assert reloaded.status("first", host="a.example") == 200
    with (
        httpx.Client(timeout=seconds(15), headers={"authorization": "Bearer first"}) as client,
        client.stream("POST", f"{reloaded.url}/v1/chat/completions", json={"model": "one", **ENDLESS}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        (folder / "tokens").write_text("bob: second\n")
        (folder / "models" / "one.gguf").rename(folder / "models" / "two.gguf")
        (reloaded.folder / "config.toml").write_text('[serve]\nallow_host = ["b.example"]\nrequests_per_minute = 1\n')
        assert "read again" in reloaded.reload()
        assert (reloaded.status("first"), reloaded.status("second")) == (401, 200)
        assert reloaded.status("second", host="a.example") == 403
        assert reloaded.status("second", host="b.example") == 200
        assert reloaded.models("second") == {"two"}
        # The reply that runs is of the model that is no longer served, for a token that is no longer valid.
        pieces = [line for _ in range(40) if (line := next(lines)).startswith("data: {")]
        assert pieces and not any('"error"' in piece for piece in pieces)
    ask = {"model": "two", "messages": STORY, "max_tokens": 1}
    answers = [
        httpx.post(
            f"{reloaded.url}/v1/chat/completions",
            json=ask,
            headers={"authorization": "Bearer second"},
            timeout=seconds(15),
        )
        for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 429]


def test_a_wrong_configuration_is_told_and_the_former_stays(reloaded, runtime_folder):
    folder = runtime_folder / "reload"
    for file, text, told in (
        (folder / "tokens", "# nobody\n", "no token"),
        (reloaded.folder / "config.toml", "[serve]\nallow_host = 3\n", "allow_host"),
        (reloaded.folder / "config.toml", '[serve]\nallow_origin = ["x"]\n', "origin"),
        (folder / "models", None, "no model"),
    ):
        former = None
        if text is None:
            (folder / "models" / "one.gguf").rename(folder / "one.gguf")
        else:
            former = file.read_text()
            file.write_text(text)
        said = reloaded.reload()
        assert "was not read again" in said and told in said, said
        assert reloaded.status("first", host="a.example") == 200
        assert reloaded.models("first") == {"one"}
        if former is not None:
            file.write_text(former)
    (folder / "one.gguf").rename(folder / "models" / "one.gguf")
    assert "models served: 1" in reloaded.reload()


def test_a_terminal_that_is_closed_ends_the_server_and_a_signal_there_does_not(runtime_folder):
    folder = runtime_folder / "terminal"
    folder.mkdir(mode=0o700)
    master, slave = os.openpty()
    words = ["serve", "--no-tcp", "--socket", str(folder / "s.sock"), "--threads", "1", "--no-disk-cache"]
    take_terminal = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{take_terminal} os.execv(sys.executable, sys.argv[1:])", sys.executable, "-m"]
        + ["localinfer", *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    shown = b""
    try:
        for expected in (b"serving", b"read again"):
            while expected not in shown:
                assert select.select([master], [], [], seconds(10))[0], shown
                shown += os.read(master, 4096)
            if expected == b"serving":
                process.send_signal(signal.SIGHUP)
        os.close(master)
        assert process.wait(seconds(10)) == 0
        assert not (folder / "s.sock").exists()
    finally:
        process.kill()
        process.wait(seconds(10))

"""What is typed while a reply is printed: never shown in its midst, never lost, one message for each Enter."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.limits import seconds

pty = pytest.importorskip("pty", reason="needs the terminals of Unix")

GIVING_UP_SECONDS = 20.0
PROGRAM = """
import json, os, signal, sys
from contextlib import nullcontext
from types import SimpleNamespace
from localinfer.cli.chat import loop
from prompt_toolkit.history import InMemoryHistory

loop.open_history = InMemoryHistory
go_on = int(sys.argv[1])
asked = []

def reply(messages, **options):
    asked.append(messages[-1]["content"])
    def events():
        yield SimpleNamespace(text=f"<begin {len(asked)}>", reasoning="", finish_reason=None)
        os.read(go_on, 1)
        yield SimpleNamespace(text=f"<end {len(asked)}>", reasoning="", finish_reason="stop")
    class Stream:
        stats = SimpleNamespace(prompt_tokens=1, completion_tokens=1, dropped_tokens=0)
        def __init__(self): self.events = events()
        def __iter__(self): return self.events
        def __enter__(self): return self
        def __exit__(self, *_): self.events.close()
    return Stream()

llm = SimpleNamespace(stream_chat=reply, count_chat_tokens=len, context_length=100)
loop.run_chat(llm, system=None, max_tokens=None, seed=None)
print("ASKED " + json.dumps(asked))
"""


class ChatOnTerminal:
    """A chat in a child process on a terminal of ours; each reply waits in its midst until `go_on`."""

    def __init__(self) -> None:
        self.screen = ""
        self._master, slave = pty.openpty()
        waiting, self._go_on = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(waiting)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            pass_fds=[waiting],
            start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(slave)
        os.close(waiting)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def go_on(self) -> None:
        os.write(self._go_on, b".")

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + seconds(GIVING_UP_SECONDS)
        while text not in self.screen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} never came:\n{self.screen}"
            try:
                received = os.read(self._master, 1 << 16)
            except OSError:  # the chat has ended
                received = b""
            assert received, f"the chat ended before {text!r}:\n{self.screen}"
            self.screen += received.decode(errors="replace")

    def asked(self) -> list[str]:
        self.wait_for("ASKED [")
        self.wait_for("]\r\n")
        return json.loads(self.screen.partition("ASKED ")[2].splitlines()[0])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)
        os.close(self._go_on)


def _take_terminal() -> None:
    """Make standard input the terminal that Ctrl-C of its keyboard interrupts us by."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def chat() -> Iterator[ChatOnTerminal]:
    running = ChatOnTerminal()
    try:
        running.wait_for("\x1b[?2004h")
        yield running
    finally:
        running.close()


def during_reply(screen: str, number: int) -> str:
    return screen.partition(f"<begin {number}>")[2].partition(f"<end {number}>")[0]


def test_messages_typed_during_a_reply_are_not_shown_in_it_and_follow_one_by_one(chat):
    chat.type("first\r")
    chat.wait_for("<begin 1>")
    chat.type("second\rthird\r")
    chat.type("fourth, begun")
    chat.go_on()
    chat.wait_for("<begin 2>")
    chat.go_on()
    chat.wait_for("<begin 3>")
    chat.go_on()
    chat.wait_for("<end 3>")
    chat.type(" and ended\r")
    chat.wait_for("<begin 4>")
    chat.go_on()
    chat.wait_for("<end 4>")
    chat.type("\x04")
    assert chat.asked() == ["first", "second", "third", "fourth, begun and ended"]
    for number in (1, 2, 3):
        assert during_reply(chat.screen, number) == ""


def test_a_paste_during_a_reply_is_one_message(chat):
    chat.type("first\r")
    chat.wait_for("<begin 1>")
    chat.type("\x1b[200~line 1\rline 2\nline 3\x1b[201~\r")
    chat.go_on()
    chat.wait_for("<begin 2>")
    chat.go_on()
    chat.wait_for("<end 2>")
    chat.type("/exit\r")
    assert chat.asked() == ["first", "line 1\nline 2\nline 3"]


def test_ctrl_c_stops_a_reply_and_the_chat_goes_on(chat):
    chat.type("first\r")
    chat.wait_for("<begin 1>")
    chat.type("\x03")
    chat.wait_for("stopped")
    chat.type("second\r")
    chat.wait_for("<begin 2>")
    chat.go_on()
    chat.wait_for("<end 2>")
    chat.type("\x04")
    assert chat.asked() == ["first", "second"]

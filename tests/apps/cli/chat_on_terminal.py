"""A chat in a process of its own, on a terminal whose screen can be read, with a model that says what it is told.

`python -c PROGRAM FILE_DESCRIPTOR` runs the chat, mostly as a copy of a process that has imported what it needs. Each
line of the file is one thing that the model does: an event, or a number of tokens that it has read of its prompt. The
reply waits for the next line, so a test sees every moment of it.
With WAITS_FOR_KEYS in the environment the chat begins once something is typed; with INTERRUPTED_AFTER_REPLY Ctrl-C
comes after each reply, before the next prompt.
"""

import atexit
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Self

from localinfer.types import Closing
from tests.apps.cli.terminal_screen import TerminalScreen
from tests.support.limits import seconds

GIVING_UP_SECONDS = 5.0
PROGRAM = """
import json, os, select, signal, sys
from types import SimpleNamespace
from localinfer.apps.terminal import loop
from prompt_toolkit.history import InMemoryHistory

loop.open_history = InMemoryHistory
if os.environ.pop("INTERRUPTED_AFTER_REPLY", None):
    class Interrupted(loop.Chat):
        def handle(self, text):
            super().handle(text)
            signal.raise_signal(signal.SIGINT)
    loop.Chat = Interrupted
script = open(int(sys.argv[1]), closefd=False)
asked = []

class Stream:
    def __init__(self, asked):
        self.prompt_tokens, self.computed_tokens = 4000 if asked == "long" else 10, 0
        self.num_events, self.has_ended = 0, False
    @property
    def stats(self):
        return SimpleNamespace(prompt_tokens=self.prompt_tokens, cached_tokens=5, cache_miss=None, dropped_tokens=0,
            completion_tokens=self.num_events, time_to_first_token_seconds=0.25 if self.num_events else 0.0,
            decode_tokens_per_second=1234.5 if self.num_events else 0.0, drafted_tokens=0, accepted_tokens=0, seed=1,
            notices=())
    def __iter__(self): return self
    def __next__(self):
        while True:
            if self.has_ended:
                raise StopIteration
            does = json.loads(script.readline())
            if "computed" in does:
                self.computed_tokens = does["computed"]
                continue
            self.num_events += 1
            self.has_ended = does.get("ends") is not None
            return SimpleNamespace(
                text=does.get("text", ""), finish_reason=does.get("ends"), reasoning=does.get("reasoning", ""),
                tool_calls=())
    def __enter__(self): return self
    def __exit__(self, *_): pass

class Model:
    @property
    def context_length(self):
        if os.environ.pop("WAITS_FOR_KEYS", None):
            select.select([0], [], [])
        return 8192
    def stream_chat(self, messages, **options):
        asked.append([message["content"] for message in messages][-1])
        return Stream(asked[-1])
    # Never so many that the conversation would be summed up.
    def count_chat_tokens(self, messages): return min(4096, sum(len(message["content"]) for message in messages))

try:
    loop.run_chat(Model(), system=None, max_tokens=None, seed=None, model_name="scripted")
finally:
    print("ASKED " + json.dumps(asked), file=sys.stderr if os.environ.get("TERM") else sys.stdout, flush=True)
"""


COPIED = """
import json, os, socket, sys
from localinfer.apps.terminal import loop
from tests.apps.cli.chat_on_terminal import PROGRAM, _become_job
asked = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
    if not message or not os.fork():
        break
    os.wait()
    for stream in streams:
        os.close(stream)
if message and not os.fork():
    terminal, script, status = streams
    asked.close()
    os.setsid()
    for number in range(3):
        os.dup2(terminal, number)
    os.environ.clear()
    os.environ.update(json.loads(message))
    _become_job(status)
    os.close(status)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv[1:] = [str(script)]
    exec(PROGRAM, {"__name__": "__main__"})
"""
"""Copies itself for each message: an environment, with the terminal, the script and where the exit code goes."""


def _become_job(status: int | None = None) -> None:
    """Leave a process behind that is a shell to this one: only then can Ctrl-Z stop it. status: takes its exit code."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    job = os.fork()
    if job:
        os.closerange(0, status or 256)
        code = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
        code = code if code >= 0 else 128 - code
        if status is not None:
            os.write(status, f"{code}\n".encode())
        os._exit(code)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)


class _Copy:
    """A chat that was copied; its exit code comes through a pipe, because it is no child of this process."""

    def __init__(self, terminal: int, script: int, environment: dict[str, str]) -> None:
        self._ended, status = os.pipe()
        with open(status, "wb", buffering=0):
            socket.send_fds(_origin(), [json.dumps(environment).encode()], [terminal, script, status])
        self._code: int | None = None

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, limit: float = GIVING_UP_SECONDS) -> int | None:
        """Its exit code, or None if it has not ended after so many seconds of an idle machine."""
        if self._code is None and select.select([self._ended], [], [], seconds(limit))[0]:
            # Nothing if the shell was killed.
            self._code = int(os.read(self._ended, 16) or -1)
            os.close(self._ended)
        return self._code


@cache
def _origin() -> socket.socket:
    """The process that is copied; it ends with this one, whose side of the socket is closed then."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", COPIED, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


class ChatOnTerminal(Closing):
    """A running chat: `type` keys, let the model `say` things, and look at the `lines` of its screen."""

    def __init__(self, columns: int = 80, lines: int = 24, *, is_new: bool = False, **environment: str) -> None:
        """is_new: the process is no copy, so that what comes while it imports comes before the chat begins."""
        self.received = ""
        self.screen = TerminalScreen(columns, lines)
        self._master, slave = pty.openpty()
        self._set_size(columns, lines)
        script, self._script = os.pipe()
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", **environment}
        self.process: subprocess.Popen[bytes] | _Copy
        if is_new:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(script)],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                pass_fds=[script],
                start_new_session=True,
                preexec_fn=_become_job,
                env=environment,
            )
        else:
            self.process = _Copy(slave, script, environment)
        self._slave = slave
        os.close(script)

    def start(self) -> Self:
        """Wait for the first prompt."""
        self.wait_until(lambda: ">" in self.lines)
        return self

    def type(self, keys: str) -> None:
        """Type on its keyboard, while its screen is read: a terminal's input holds few keys."""
        waiting = keys.encode()
        while waiting:
            self._read(0.0)
            _, can_write, _ = select.select([], [self._master], [], 0.01)
            if can_write:
                waiting = waiting[os.write(self._master, waiting[:1024]) :]

    def say(self, text: str = "", *, ends: str | None = None, reasoning: str = "") -> None:
        """Have the model emit one event; `ends`: its last, for this reason."""
        self._tell({"text": text, "ends": ends, "reasoning": reasoning})

    def compute(self, computed: int) -> None:
        """Have the model read so many tokens of the prompt; the message "long" has 4,000, others 10."""
        self._tell({"computed": computed})

    def resize(self, columns: int, lines: int) -> None:
        """Resize the window, and let the screen cut its lines as a terminal without reflow does."""
        self._read(0.0)
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)

    def interrupt_process(self, number: int) -> None:
        """Send a signal to the chat."""
        os.killpg(os.tcgetpgrp(self._master), number)

    @property
    def lines(self) -> list[str]:
        """The screen's lines, without spaces at their ends."""
        return self.screen.shown_lines

    @property
    def text(self) -> str:
        """Scrollback and screen."""
        return self.screen.text

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Read the screen until something is so. Raises: AssertionError with the screen."""
        deadline = time.monotonic() + seconds(GIVING_UP_SECONDS)
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0 and self._read(min(left, 0.2)), f"it never came:\n{self.text}\n{self.received[-500:]!r}"

    def wait_for(self, text: str) -> None:
        """Read until this is on the screen, or above it."""
        self.wait_until(lambda: text in f"\n{self.text}")

    def wait_for_row(self, text: str) -> None:
        """Read until a line of the screen begins with this."""
        self.wait_until(lambda: any(line.startswith(text) for line in self.lines))

    def asked(self) -> list[str]:
        """What the model was asked, once the chat has ended."""
        self.wait_until(lambda: "ASKED [" in self.received and "]\r\n" in self.received.partition("ASKED [")[2])
        asked: list[str] = json.loads(self.received.partition("ASKED ")[2].splitlines()[0])
        return asked

    def modes(self) -> list[Any]:
        """The terminal's modes now."""
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        """End the chat, whatever it does."""
        if self.process.poll() is None:
            # Its group may have ended, or not be the terminal's, in this moment.
            with contextlib.suppress(ProcessLookupError):
                self.interrupt_process(signal.SIGKILL)
        # A terminal that is gone ends whatever is left of its session.
        os.close(self._master)
        self.process.wait()
        os.close(self._slave)
        os.close(self._script)

    def _tell(self, does: dict[str, Any]) -> None:
        os.write(self._script, f"{json.dumps(does)}\n".encode())

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self, limit: float) -> bool:
        """Take what the chat has drawn, at most after so many seconds; return whether it may draw more."""
        if select.select([self._master], [], [], limit)[0]:
            received = os.read(self._master, 1 << 16)
            self.received += received.decode(errors="replace")
            os.write(self._master, self.screen.show(received))
        return True

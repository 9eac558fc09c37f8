"""How long a typed character takes to be shown while a model answers at full speed, on a terminal of this machine.

    python -m tests.bench.bench_keystrokes [MODEL] [--keys 300]

Runs the chat on a pseudo-terminal with replies that never end, and types one character at a time, at random moments of
a reply, each when the one before it is shown. A key's latency is from the write to the pseudo-terminal to the read
that has it in the row of what is typed. The demo model, which gives thousands of tokens per second, is the hardest
case: it leaves the interpreter the least time.
"""

import argparse
import fcntl
import os
import pty
import random
import re
import select
import statistics
import struct
import subprocess
import sys
import termios
import time

from localinfer.apps.bench.figures import percentile

_PROGRAM = """
import sys, localinfer
from localinfer.apps.terminal.loop import run_chat
with localinfer.load(*sys.argv[1:], disk_cache=False) as llm:
    run_chat(llm, system=None, max_tokens=None, seed=1, ignore_eos=True, context_shift=True)
"""
_KEYS = "abcdefghijklmnopqrstuvwxyz"
_MESSAGE = "Tell me a story about a cat and a dog and a bird.\r"
_SILENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.05
_STATUS_RATE = re.compile(r"([\d.]+) t/s")


class ChatTerminal:
    """The chat on a pseudo-terminal of 100 columns."""

    def __init__(self, model: list[str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *model],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(slave)
        self.received = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read_until(self, text: str) -> float:
        """Read until `text` has come since the last call; return when. Raises: SystemExit if nothing comes."""
        while text not in self.received:
            self.read(_SILENCE_SECONDS)
        self.received = self.received.rpartition(text)[2]
        return time.perf_counter()

    def read(self, limit: float) -> None:
        """Take what comes within so many seconds."""
        if select.select([self._master], [], [], limit)[0]:
            self.received += os.read(self._master, 1 << 16).decode(errors="replace")
        elif limit >= _SILENCE_SECONDS:
            raise SystemExit(f"nothing came for {limit:.0f} s; the last was {self.received[-300:]!r}")

    def rest(self, seconds: float) -> None:
        """Read for so long."""
        ends = time.perf_counter() + seconds
        while (left := ends - time.perf_counter()) > 0:
            self.read(left)


def measure(chat: ChatTerminal, num_keys: int) -> tuple[list[float], list[float]]:
    """Latencies of keys in seconds, and the rates that the status line showed, in tokens per second."""
    chance = random.Random(0)
    chat.read_until("\x1b[?2004h")
    chat.rest(1.0)
    latencies: list[float] = []
    rates: list[float] = []
    while len(latencies) < num_keys:
        chat.type(_MESSAGE)
        chat.read_until("t/s")
        typed = ""
        for _ in range(25):
            key = chance.choice(_KEYS)
            chat.rest(chance.random() * _PAUSE_SECONDS)
            rates += [float(rate) for rate in _STATUS_RATE.findall(chat.received)]
            chat.received = ""
            began = time.perf_counter()
            chat.type(key)
            typed += key
            latencies.append(chat.read_until(f"> {typed}_") - began)
        # Stops the reply, and clears what was typed; far enough apart not to leave.
        chat.type("\x03")
        chat.read_until("stopped")
        chat.rest(2.0)
        chat.type("\x03")
        chat.rest(2.0)
    return latencies, rates


def main() -> None:
    """Measure, and print percentiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--keys", type=int, default=300)
    options = parser.parse_args()
    chat = ChatTerminal([] if options.model is None else [options.model])
    try:
        latencies, rates = measure(chat, options.keys)
    finally:
        chat.process.kill()
        chat.process.wait()
    milliseconds = sorted(1000 * latency for latency in latencies)
    shown = ", ".join(f"p{share} {percentile(milliseconds, share):.1f}" for share in (50, 95, 99))
    print(f"{len(milliseconds)} keys, ms until shown: {shown}, most {milliseconds[-1]:.1f}")
    if rates:
        print(f"the model meanwhile: {statistics.median(rates):.0f} tokens/s")


if __name__ == "__main__":
    main()

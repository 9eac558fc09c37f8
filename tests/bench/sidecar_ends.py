"""How soon a server that another program started is gone, with every process of its own, when it has to end.

    python -m tests.bench.sidecar_ends [--model MODEL ...] [--times 200] [--cold 0.3] [--seed 1]

Starts `localinfer serve --ready-json --until-stdin-ends` as the child of a small program, and at a random moment of its
start, its load, the compilation of its kernels or its replies either kills that program (kill -9), with standard input
a pipe of its own or inherited from another that lives on; or ends standard input; or sends SIGTERM. A time is from
there until neither the server nor any process that it started is left. `--cold`: the share of starts without compiled
kernels.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from localinfer.apps.bench.figures import percentile

_PARENT = """
import json, subprocess, sys
words, folder, owns_input = json.loads(sys.argv[1])
out, errors = open(folder + "/out", "wb"), open(folder + "/errors", "wb")
server = subprocess.Popen(words, stdin=subprocess.PIPE if owns_input else None, stdout=out, stderr=errors)
print(server.pid, flush=True)
sys.stdin.readline()
if owns_input:
    server.stdin.close()
server.wait()
"""
_MARK = "LOCALINFER_SIDECAR_ENDS"
_LIMIT_SECONDS = 2.0
_PATIENCE_SECONDS = 60.0
_COLD_SPAN_SECONDS = 12.0
_AFTER_READY_SECONDS = 1.5
_REPLIES = 3
WAYS = ("parent killed", "parent killed, its stdin lives on", "stdin ends", "SIGTERM")


@dataclass(frozen=True)
class Sample:
    """One end: how it was asked for, what the server was doing, and the seconds until nothing was left."""

    way: str
    state: str
    seconds: float


class Sidecar:
    """A server and the program that started it."""

    def __init__(self, model: str | None, folder: Path, *, is_cold: bool, owns_input: bool) -> None:
        self.folder = folder
        self.mark = folder.name
        environment = {**os.environ, _MARK: self.mark}
        if is_cold:
            environment["XDG_CACHE_HOME"] = str(folder / "cache")
            environment["LOCALINFER_CACHE"] = str(folder / "cache")
        words = [sys.executable, "-m", "localinfer", "serve", "--ready-json", "--until-stdin-ends", "--port", "0"]
        words += ["--socket", str(folder / "s")] + ([] if model is None else ["-m", model])
        argument = json.dumps([words, str(folder), owns_input])
        self.began = time.monotonic()
        self.parent = subprocess.Popen(
            [sys.executable, "-c", _PARENT, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self.parent.stdout is not None
        self.pid = int(self.parent.stdout.readline())
        self._replies: list[socket.socket] = []

    def is_ready(self) -> bool:
        return b"\n" in (self.folder / "out").read_bytes()

    def state(self) -> str:
        """What the server is doing, as far as it can be seen from outside."""
        if self.is_ready():
            return "replying" if self._replies else "ready"
        with contextlib.suppress(psutil.Error):
            if any("-c" in child.cmdline()[:2] for child in psutil.Process(self.pid).children()):
                return "compiling"
        return "loading" if b"listening" in (self.folder / "errors").read_bytes() else "starting"

    def begin_replies(self) -> None:
        """Have texts generated that do not end by themselves."""
        port = json.loads((self.folder / "out").read_bytes())["port"]
        message = [{"role": "user", "content": "Tell me a story. " * 20}]
        fields = {"messages": message, "ignore_eos": True, "context_shift": True, "max_tokens": 1 << 20, "stream": True}
        body = json.dumps(fields).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for _ in range(_REPLIES):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            self._replies.append(connection)

    def end(self, way: str) -> float:
        """Ask for the end; return the seconds until nothing is left."""
        asked = time.monotonic()
        if way.startswith("parent killed"):
            self.parent.kill()
        elif way == "SIGTERM":
            os.kill(self.pid, signal.SIGTERM)
        else:
            assert self.parent.stdin is not None
            self.parent.stdin.write("\n")
            self.parent.stdin.flush()
        while self._has_left() and time.monotonic() - asked < _PATIENCE_SECONDS:
            time.sleep(0.01)
        return time.monotonic() - asked

    def clean_up(self) -> None:
        for connection in self._replies:
            connection.close()
        for process in self._marked():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.parent.kill()
        self.parent.wait()
        for pipe in (self.parent.stdin, self.parent.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _has_left(self) -> bool:
        # Looking at every process takes longer than at one.
        with contextlib.suppress(psutil.Error):
            if psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
                return True
        return bool(self._marked())

    def _marked(self) -> list[psutil.Process]:
        """Processes of this sidecar, but for the program that started it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != self.parent.pid and process.environ().get(_MARK) == self.mark:
                    found.append(process)
        return found


def measure(model: str | None, way: str, moment: float, span: float, *, is_cold: bool) -> Sample:
    """Start a sidecar, and end it `moment` of the way (0 to 1) into the span of seconds, or into its replies."""
    folder = Path(tempfile.mkdtemp(prefix="li-"))
    sidecar = Sidecar(model, folder, is_cold=is_cold, owns_input="lives on" not in way)
    try:
        due = sidecar.began + moment * span
        while (left := due - time.monotonic()) > 0:
            time.sleep(min(left, 0.02))
            if not sidecar._replies and sidecar.is_ready():
                sidecar.begin_replies()
        state = sidecar.state()
        return Sample(way, state + (", cold" if is_cold else ""), sidecar.end(way))
    finally:
        sidecar.clean_up()
        shutil.rmtree(folder, ignore_errors=True)


def seconds_to_ready(model: str | None) -> float:
    """How long a warm start takes."""
    folder = Path(tempfile.mkdtemp(prefix="li-"))
    sidecar = Sidecar(model, folder, is_cold=False, owns_input=True)
    try:
        while not sidecar.is_ready():
            time.sleep(0.01)
        return time.monotonic() - sidecar.began
    finally:
        sidecar.clean_up()
        shutil.rmtree(folder, ignore_errors=True)


def describe(title: str, seconds: list[float]) -> str:
    figures = [statistics.median(seconds), percentile(seconds, 90), percentile(seconds, 99), max(seconds)]
    late = sum(value > _LIMIT_SECONDS for value in seconds)
    return f"{title:42} {len(seconds):4}  " + "  ".join(f"{value:6.2f}" for value in figures) + f"  {late:5}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="path of a model; may be repeated (default: the demo model)")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--cold", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    models = arguments.model or [None]
    spans = {model: seconds_to_ready(model) + _AFTER_READY_SECONDS for model in models}
    choose = random.Random(arguments.seed)
    samples = []
    # Ctrl-C gives the figures so far.
    with contextlib.suppress(KeyboardInterrupt):
        for index in range(arguments.times):
            model, way = models[index % len(models)], WAYS[index // len(models) % len(WAYS)]
            is_cold = choose.random() < arguments.cold
            span = _COLD_SPAN_SECONDS if is_cold else spans[model]
            sample = measure(model, way, choose.random(), span, is_cold=is_cold)
            samples.append(sample)
            if sample.seconds > _LIMIT_SECONDS:
                print(f"late: {sample}", flush=True)
    print(f"{'':42} times  median     90 %    99 %   worst   > {_LIMIT_SECONDS:g} s")
    groups: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        groups["all"].append(sample.seconds)
    for name in ("way", "state"):
        for sample in sorted(samples, key=lambda one: str(getattr(one, name))):
            groups[getattr(sample, name)].append(sample.seconds)
    for title, seconds in groups.items():
        print(describe(title, seconds))


if __name__ == "__main__":
    main()

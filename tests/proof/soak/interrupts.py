"""Commands that get Ctrl-C at random moments of their first processor time, several beside each other: all must end."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from localinfer.models import demo
from tests.kernels.subprocesses import environment
from tests.support.limits import seconds

DEMO = str(Path(demo.__file__).parent / "demo-f16.gguf")
COMMANDS = {
    "serve": ["serve", "--port", "0", "--no-socket", "--no-disk-cache", "--threads", "1"],
    "sidecar": ["serve", "--port", "0", "--no-socket", "--no-disk-cache", "--threads", "1", "--ready-json"],
    "run": ["run", "-p", "Once", "-n", "400", "--no-disk-cache", "--threads", "1"],
    "chat": ["chat", "-p", "Once", "-n", "400", "--no-disk-cache", "--threads", "1"],
    "lines": ["chat", "--lines", "--no-disk-cache", "--threads", "1"],
    "bench": ["bench", DEMO, "--threads", "1"],
    "perplexity": ["perplexity", DEMO, "--threads", "1"],
    "embed": ["embed", DEMO, "Hi", "--threads", "1"],
    "quantize": ["quantize", DEMO, "out.gguf", "--type", "q4_0", "--chunks", "0", "--threads", "1"],
    "pull": ["pull", "org/repo"],
    "mcp": ["mcp", "--no-disk-cache", "--threads", "1"],
    "doctor": ["doctor"],
}
"""Words of each. `pull` asks a port of this machine on which nobody listens."""
_SERVERS = ("serve", "sidecar")
_WEIGHTS = {name: 4.0 if name in _SERVERS else 1.0 for name in COMMANDS}
"""How often each is started."""

_FIRST_SECONDS = (0.6, 1.6)
"""Of processor time, in which it comes: imports and options, or a load and its end as well; one is drawn."""
_IDLE_SECONDS = 2.0
"""After which it comes to one that waits, and will not have so much processor time."""
_END_SECONDS = 3.0
_LOOK_SECONDS = 0.0005
_OURS = re.compile(r'__main__\.py", line \d+, in main\b')
_ENDS = {130: "130", -signal.SIGINT: "by the signal", 0: "0", 2: "2"}
"""Exit codes that are right: interrupted, in the first imports, a server or a command that was done, a refused pull."""


@dataclass
class _Start:
    """One process. at: its processor time when it gets Ctrl-C, in seconds; sent: when that was, of the clock."""

    process: subprocess.Popen[bytes]
    name: str
    folder: Path
    at: float
    began: float
    sent: float | None = None


class Interrupts:
    """A campaign; names and moments are chosen by the seed. say: is given lines of progress.

    counts: ends by what they were.
    """

    def __init__(self, seed: int, names: Sequence[str] = (), say: Callable[[str], None] = print) -> None:
        self.counts: Counter[str] = Counter()
        self._random = Random(seed)
        self._seed = seed
        self._names = list(names or COMMANDS)
        self._say = say

    def run(self, starts: int, beside: int) -> bool:
        """Interrupt so many, `beside` of them at a time; return whether all ended as they have to."""
        folder = Path(tempfile.mkdtemp(prefix="soak-interrupts-"))
        running: list[_Start] = []
        began, num_started, problems = time.monotonic(), 0, []
        with _terminal_dispositions():
            try:
                while num_started < starts or running:
                    if num_started < starts and len(running) < beside:
                        running.append(self._start(folder, num_started))
                        num_started += 1
                    for one in list(running):
                        problem = self._look(one)
                        if problem is not None:
                            running.remove(one)
                            if problem:
                                problems.append(problem)
                                self._say(f"FOUND with --seed {self._seed}: {problem}")
                    time.sleep(_LOOK_SECONDS)
            except KeyboardInterrupt:
                self._say("stopped: these are the figures so far")
            finally:
                for one in running:
                    _kill(one.process)
        ends = ", ".join(f"{number} {what}" for what, number in self.counts.most_common())
        self._say(f"{num_started} starts in {time.monotonic() - began:.0f} s: {ends}; {len(problems)} problems")
        if not problems:
            shutil.rmtree(folder)
        return not problems

    def _start(self, folder: Path, number: int) -> _Start:
        name = self._random.choices(self._names, [_WEIGHTS[name] for name in self._names])[0]
        place = folder / str(number)
        (place / "home").mkdir(parents=True)
        at = self._random.uniform(0.0, self._random.choice(_FIRST_SECONDS))
        with (place / "out").open("wb") as out, (place / "err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "localinfer", *COMMANDS[name]],
                cwd=place,
                env=environment(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(place / "home")),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return _Start(process, name, place, at, time.monotonic())

    def _look(self, one: _Start) -> str | None:
        """None while a process runs; what is wrong with its end, nothing for a good one."""
        code = one.process.poll()
        if code is None:
            now = time.monotonic()
            is_idle = now - one.began > seconds(_IDLE_SECONDS) or bool((one.folder / "out").stat().st_size)
            if one.sent is None and (is_idle or _processor_seconds(one.process.pid) >= one.at):
                one.process.send_signal(signal.SIGINT)
                one.sent = time.monotonic()
            if one.sent is None or now - one.sent < seconds(_END_SECONDS):
                return None
            return self._lost(one)
        errors, said = _text(one.folder / "err"), f"{one.name} at {one.at:.3f} s"
        if one.process.stdin is not None:
            one.process.stdin.close()
        if one.sent is None:
            self._count("done before", one)
            return "" if code in (0, 2) else f"{said}: exit code {code} by itself: {errors}"
        is_early = code == -signal.SIGINT or (code == 1 and "Fatal Python error: init" in errors)
        if is_early and not _OURS.search(errors):
            # Before our first line it is the interpreter that answers, with a traceback of its own.
            self._count("before the first line" if errors else _ENDS[-signal.SIGINT], one)
            return ""
        self._count(_ENDS.get(code, f"exit code {code}"), one)
        is_silent = "Traceback" not in errors and "Exception ignored" not in errors
        if code not in _ENDS or not is_silent:
            return f"{said}: exit code {code}: {errors}\nits files: {one.folder}"
        return ""

    def _lost(self, one: _Start) -> str:
        """What became of one that goes on."""
        is_listening = "listening" in _text(one.folder / "err") + _text(one.folder / "out")
        self._count("lost", one)
        one.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + seconds(_END_SECONDS)
        while one.process.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        again = "a second one ended it" if one.process.poll() is not None else "a second one did not end it either"
        _kill(one.process)
        what = "it listens" if is_listening else _text(one.folder / "err")
        return f"{one.name} at {one.at:.3f} s goes on: {what}; {again}\nits files: {one.folder}"

    def _count(self, what: str, one: _Start) -> None:
        self.counts[f"{'serve' if one.name in _SERVERS else 'others'} {what}"] += 1


@contextmanager
def _terminal_dispositions() -> Iterator[None]:
    """Have children start with SIGINT as a terminal's have it, though this process was started in the background."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _processor_seconds(number: int) -> float:
    """Processor time of a child, by its own clock of Linux; nothing once it has ended."""
    try:
        return time.clock_gettime((~number << 3) | 2)
    except OSError:
        return 0.0


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""

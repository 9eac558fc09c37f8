"""How evenly an app draws its frames while a model loads, reads a long prompt, answers and is constrained.

    python -m tests.bench.bench_frames [MODEL] --toolkit qt|tk|asyncio [--cold] [--prompt 2000] [--traces FILE]

A window of Qt (PySide6, off the screen), of Tk (under Xvfb where there is no display), or a ticker of asyncio draws 60
frames a second in the main thread, each with the text that has come so far, while another thread uses the model as an
app does. A frame's time is from its beginning to the beginning of the next. "queued" is what the system itself took
of the worst frame: the main thread could run, but other processes had the cores. What is beyond that, a thread of this
process held the interpreter's lock, which the column "lock" shows: the worst time that a thread which sleeps for 1 ms
at a time waited beyond it, less its own time in the system's queue. "gc" is the longest run of Python's garbage
collector, which grows with all objects of the process. The phase "idle" is the machine without a model.

On a machine that does other work, --runs=5 measures so often and prints the least of each figure: what the program
does is in every run. "late" counts frames of more than 25 ms without what the system took.

--cold gives kernels a cache folder of their own, so that they are compiled. --traces writes the stacks of all threads
whenever a frame is late, while it is: what holds the lock is on top of one of them. They are read while the threads
run, which can end the process; for finding causes, not for figures.
"""

import argparse
import asyncio
import faulthandler
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TextIO

Figures = dict[str, list[float]]
_FRAME_SECONDS = 1 / 60
_LATE_SECONDS = 0.025
_SHOWN_CHARACTERS = 2000
_COLUMNS = ("p50", "p99", "worst", "queued", "lock", "gc")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def percentile(values: list[float], percent: int) -> float:
    """The nearest-rank percentile; written here because importing it would import part of what is measured."""
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


class QueueClock:
    """How long a thread has waited for a core, in seconds; 0 where the system does not say."""

    def __init__(self, thread: int) -> None:
        try:
            self._file: int | None = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def seconds(self) -> float:
        return 0.0 if self._file is None else int(os.pread(self._file, 100, 0).split()[1]) / 1e9


class FrameLog:
    """Times of frames by the phase in which they began."""

    def __init__(self, traces: TextIO | None) -> None:
        self.phase = "start"
        self.is_over = False
        self.began: list[tuple[float, str]] = []
        self.queued: list[tuple[float, float]] = []
        self.waits: dict[str, list[float]] = {}
        self.seconds: dict[str, float] = {}
        self.texts: deque[str] = deque()
        self.shown = ""
        self.failure: BaseException | None = None
        self.collections: dict[str, list[float]] = {}
        self._collecting_since = 0.0
        self._traces = traces

    def frame(self) -> str:
        """Called at the beginning of each frame by the main thread; returns the text to show."""
        now = time.perf_counter()
        if self._traces is not None:
            if self.began and now - self.began[-1][0] > _LATE_SECONDS:
                print(f"--- {1e3 * (now - self.began[-1][0]):.1f} ms in {self.phase}", file=self._traces, flush=True)
            faulthandler.dump_traceback_later(_LATE_SECONDS, file=self._traces)
        self.began.append((now, self.phase))
        while self.texts:
            self.shown = (self.shown + self.texts.popleft())[-_SHOWN_CHARACTERS:]
        return self.shown

    def watch(self) -> None:
        """Measure in a thread how long one that wants to run cannot, and what the system takes of the main thread."""
        own, of_main = QueueClock(threading.get_native_id()), QueueClock(os.getpid())
        while not self.is_over:
            phase, queued, began = self.phase, own.seconds(), time.perf_counter()
            time.sleep(0.001)
            waited = time.perf_counter() - began - 0.001
            self.waits.setdefault(phase, []).append(max(0.0, waited - (own.seconds() - queued)))
            self.queued.append((time.perf_counter(), of_main.seconds()))

    def collect(self, stage: str, _: dict[str, int]) -> None:
        """Called by the garbage collector when it begins and ends."""
        if stage == "start":
            self._collecting_since = time.perf_counter()
        else:
            self.collections.setdefault(self.phase, []).append(time.perf_counter() - self._collecting_since)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Call the frames of this time so."""
        self.phase = phase
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = time.perf_counter() - began

    def figures(self) -> Figures:
        """By phase its seconds, how many frames it had, and how many of them this process made late; then _COLUMNS."""
        frames: dict[str, list[tuple[float, float]]] = {}
        for (began, phase), (ended, _) in pairwise(self.began):
            frames.setdefault(phase, []).append((ended - began, self._queued_at(ended) - self._queued_at(began)))
        found: Figures = {}
        for phase, pairs in frames.items():
            times = [seconds for seconds, _ in pairs]
            late = sum(seconds - queued > _LATE_SECONDS for seconds, queued in pairs)
            waits, collections = (max(one.get(phase, [0.0])) for one in (self.waits, self.collections))
            shown = (percentile(times, 50), percentile(times, 99), *max(pairs), waits, collections)
            found[phase] = [self.seconds.get(phase, 0.0), len(times), late, *(1e3 * seconds for seconds in shown)]
        return found

    def _queued_at(self, moment: float) -> float:
        """What the system had taken of the main thread when it was looked at next."""
        index = bisect_left(self.queued, (moment, 0.0))
        return self.queued[min(index, len(self.queued) - 1)][1] if self.queued else 0.0


def use_model(log: FrameLog, options: argparse.Namespace) -> None:
    """What the app's other thread does."""
    try:
        with log.during("idle"):
            time.sleep(options.idle)
        with log.during("import"):
            import localinfer
        with log.during("load"):
            llm = localinfer.load(options.model, context_length=options.prompt + 1000, disk_cache=False)
        with llm:
            prompt = [5 + number * 7 % (llm.vocab_size - 10) for number in range(options.prompt)]
            with log.during("prefill"):
                stream = llm.stream(prompt, max_tokens=options.tokens, ignore_eos=True, seed=1)
                log.texts.append(next(stream).text)
            with log.during("decode"):
                for event in stream:
                    log.texts.append(event.text)
            with log.during("chat"):
                for event in llm.stream_chat([{"role": "user", "content": "Hello " * 200}], max_tokens=20, seed=1):
                    log.texts.append(event.text)
            with log.during("constraint"):
                form = localinfer.JsonSchema(_SCHEMA)
                for event in llm.stream("Once", constraint=form, max_tokens=60, seed=1):
                    log.texts.append(event.text)
            log.phase = "close"
    except BaseException as error:
        log.failure = error
    finally:
        log.is_over = True


def run_qt(log: FrameLog, start: Callable[[], None]) -> None:
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    from PySide6.QtCore import Qt, QTimer
    from PySide6.QtWidgets import QApplication, QPlainTextEdit

    app = QApplication([])
    window = QPlainTextEdit()
    window.resize(800, 600)
    window.show()

    def draw() -> None:
        text = log.frame()
        if text != window.toPlainText():
            window.setPlainText(text)
        window.viewport().update()
        if log.is_over:
            app.quit()

    timer = QTimer()
    timer.setTimerType(Qt.TimerType.PreciseTimer)
    timer.timeout.connect(draw)
    timer.start(round(1000 * _FRAME_SECONDS))
    start()
    app.exec()


def run_tk(log: FrameLog, start: Callable[[], None]) -> None:
    import tkinter

    window = tkinter.Tk()
    shown = tkinter.StringVar(window)
    tkinter.Label(window, textvariable=shown, wraplength=780, width=100, height=40, anchor="nw").pack()
    next_at = time.perf_counter()

    def draw() -> None:
        nonlocal next_at
        text = log.frame()
        if text != shown.get():
            shown.set(text)
        if log.is_over:
            window.destroy()
            return
        next_at = max(next_at + _FRAME_SECONDS, time.perf_counter() + 0.001)
        window.after(round(1000 * (next_at - time.perf_counter())), draw)

    window.after(0, draw)
    start()
    window.mainloop()


def run_asyncio(log: FrameLog, start: Callable[[], None]) -> None:
    async def draw() -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while not log.is_over:
            log.frame()
            next_at = max(next_at + _FRAME_SECONDS, loop.time())
            await asyncio.sleep(next_at - loop.time())

    start()
    asyncio.run(draw())


def print_figures(figures: Figures) -> None:
    print(f"{'':12s}   {'s':>6s} {'frames':>7s} {'late':>5s}" + "".join(f"{name:>8s}" for name in _COLUMNS) + "   ms")
    for phase, (seconds, count, late, *shown) in figures.items():
        print(f"{phase:12s} {seconds:8.2f} {count:7.0f} {late:5.0f}" + "".join(f"{value:8.1f}" for value in shown))


def print_least(runs: int) -> None:
    """Measure in processes of their own, and print the least of each figure."""
    arguments = [word for word in sys.argv[1:] if not word.startswith("--runs")]
    found: list[Figures] = []
    for _ in range(runs):
        command = [sys.executable, "-m", "tests.bench.bench_frames", *arguments, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    phases = [phase for phase in found[0] if all(phase in one for one in found)]
    print_figures(
        {phase: [min(column) for column in zip(*(one[phase] for one in found), strict=True)] for phase in phases}
    )


_TOOLKITS: dict[str, Callable[[FrameLog, Callable[[], None]], None]] = {
    "qt": run_qt,
    "tk": run_tk,
    "asyncio": run_asyncio,
}


@contextmanager
def display(toolkit: str) -> Iterator[None]:
    """A display of Xvfb for Tk where there is none."""
    if toolkit != "tk" or os.environ.get("DISPLAY") or not sys.platform.startswith("linux"):
        yield
        return
    if shutil.which("Xvfb") is None:
        raise SystemExit("Tk needs a display, and Xvfb is not installed; set DISPLAY or install xvfb")
    reader, writer = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(writer), "-screen", "0", "1024x768x24", "-nolisten", "tcp"],
        pass_fds=(writer,),
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    with os.fdopen(reader) as numbers:
        os.environ["DISPLAY"] = f":{numbers.readline().strip()}"
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Measure, and print the figures of each phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--toolkit", choices=tuple(_TOOLKITS), default="asyncio")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--idle", type=float, default=3.0)
    parser.add_argument("--traces", type=argparse.FileType("w"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    if options.runs > 1:
        print_least(options.runs)
        return
    log = FrameLog(options.traces)
    threads: list[Any] = [
        threading.Thread(target=log.watch, name="watch"),
        threading.Thread(target=use_model, args=(log, options), name="model"),
    ]

    def start() -> None:
        for thread in threads:
            thread.start()

    gc.callbacks.append(log.collect)
    with tempfile.TemporaryDirectory() as folder, display(options.toolkit):
        if options.cold:
            os.environ["XDG_CACHE_HOME"] = folder
        _TOOLKITS[options.toolkit](log, start)
        faulthandler.cancel_dump_traceback_later()
        for thread in threads:
            thread.join()
    if options.json:
        print(json.dumps(log.figures()))
    else:
        print_figures(log.figures())
    if log.failure is not None:
        raise log.failure


if __name__ == "__main__":
    main()

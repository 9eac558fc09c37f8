"""The campaign's end of a worker process: starts it, gives it inputs, and says how it died."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.proof.fuzz.target import FOLDER, Target
from tests.proof.fuzz.worker import Report, read_frame, write_frame

READY_SECONDS = 600.0
"""Until a worker has imported and compiled what it needs."""
WAITING_FACTOR = 6
"""How many times its seconds a case may wait; while others have the CPU that it wants, it does not wait."""
_LOOKED_EVERY = 0.25
_DUMP_SECONDS = 1.0
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in ')


class WorkerProcess:
    """A worker that is started when it is first needed, and again after it died.

    is_guarded: in guard mode, whose kernels are others than those of other processes. kind: `WarmPython` for a copy of
    a process that has imported the package, whose hashes are others each time.
    """

    def __init__(
        self,
        target: Target,
        *,
        is_guarded: bool = True,
        kind: type["subprocess.Popen[bytes]"] = subprocess.Popen,
    ) -> None:
        self.target, self._is_guarded, self._kind = target, is_guarded, kind
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="localinfer-fuzz-", ignore_cleanup_errors=True)
        self._errors = Path(self._folder.name) / "stderr.txt"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._folder.cleanup()

    def stop(self) -> None:
        """End the process; the next case starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert stream is not None
                    stream.close()

    def run(self, data: bytes, *, watches_lines: bool = False, is_sound: bool = False) -> Report:
        """Run one input; a worker that dies or hangs is a finding.

        is_sound: it is of the corpus, and may take long, as the first one that needs a kernel compiles it.
        """
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        watch = _Watch(process, READY_SECONDS if is_sound else self.target.limits.seconds)
        with watch, contextlib.suppress(OSError):
            write_frame(process.stdin, (b"1" if watches_lines else b"0") + data)
            answer = read_frame(process.stdout)
            if answer is not None:
                return Report(**json.loads(answer))
        code = process.wait()
        self.stop()
        text = self._last_errors()
        kind = "hang" if watch.has_ended else _death(code)
        return Report(kind=kind, place=_place(text), text=text)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        with self._errors.open("wb") as errors:
            self._process = self._kind(
                [sys.executable, "-m", "tests.proof.fuzz.worker", *self._arguments()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=FOLDER.parents[2],
                env=self._environment(),
            )
        assert self._process.stdout is not None
        timer = threading.Timer(READY_SECONDS, self._process.kill)
        timer.start()
        is_ready = read_frame(self._process.stdout) == b"ready"
        timer.cancel()
        if not is_ready:
            self.stop()
            raise RuntimeError(f"a worker of {self.target.name} does not start:\n{self._last_errors()}")
        return self._process

    def _arguments(self) -> list[str]:
        return [self.target.name, self._folder.name]

    def _environment(self) -> dict[str, str]:
        """Nothing that the user has configured, and everything alike in every worker."""
        wanted = {
            "LOCALINFER_GUARD": "1" if self._is_guarded else "",
            "XDG_CONFIG_HOME": self._folder.name,
            "HF_HUB_OFFLINE": "1",
        }
        alike = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUTF8": "1"}
        return os.environ | wanted | alike

    def _last_errors(self) -> str:
        with contextlib.suppress(OSError):
            return self._errors.read_bytes()[-6000:].decode("utf-8", "replace")
        return ""


class _Watch:
    """Ends a process whose case takes too long, after asking it where it is."""

    def __init__(self, process: "subprocess.Popen[bytes]", seconds: float) -> None:
        self.has_ended = False
        self._process, self._seconds = process, seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        looked, waited, busy = time.monotonic(), 0.0, None
        while not self._is_over.wait(_LOOKED_EVERY):
            since, looked = looked, time.monotonic()
            with contextlib.suppress(psutil.Error):
                now = sum(psutil.Process(self._process.pid).cpu_times()[:2])
                busy = now if busy is None else busy
                if not _wants_cpu(self._process.pid):
                    waited += looked - since
                if now - busy > self._seconds or waited > WAITING_FACTOR * self._seconds:
                    self._end()
                    return

    def _end(self) -> None:
        self.has_ended = True
        if hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGUSR1)
            self._is_over.wait(_DUMP_SECONDS)
        self._process.kill()


def _wants_cpu(process_id: int) -> bool:
    """Whether a thread of a process runs or would, if others left it the CPU; False where systems do not tell."""
    for status in Path(f"/proc/{process_id}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] in "RD":
                return True
    return False


def _death(code: int) -> str:
    """How a process ended, by its status."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit status {code}"


def _place(errors: str) -> str:
    """The innermost line of ours in what faulthandler wrote, or else the innermost of all."""
    frames = _FRAME.findall(errors)
    for path, line in frames:
        parts = Path(path).parts
        for package in ("kernels", "models", "quant", "localinfer"):
            if package in parts[:-1] and "site-packages" not in parts and "tests" not in parts:
                return "/".join([*parts[parts.index(package) :]]) + f":{line}"
    return "".join(f"{Path(path).name}:{line}" for path, line in frames[:1])

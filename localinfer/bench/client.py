"""The near end of a measured process: starts `worker.py` and asks it for measurements."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from localinfer import errors
from localinfer.errors import BackendUnavailableError, LocalinferError, RequestError

OURS = "localinfer"
PEERS = ("llama-cpp-python",)

_SCRIPT = Path(__file__).with_name("worker.py")
_CLOSING_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is started. python: the interpreter that has it, None for this one. streams: by its text API.

    device: where ours computes, as `localinfer.load` takes it; a peer has its own defaults.
    """

    engine: str
    model: str
    threads: int | None
    context_length: int | None
    streams: bool = False
    python: str | None = None
    device: str = "cpu"


class EngineProcess:
    """One engine in its own process. A context manager: leaving it ends the process, whatever it is doing.

    Raises, when made and when asked: the error of the other side; BackendUnavailableError if it has not the engine or
    ended by itself.
    """

    def __init__(self, options: EngineOptions, first_request: dict[str, Any] | None = None) -> None:
        """Start it and wait until the model is loaded; `first_request` goes out at once, to be read by `reply`."""
        self.options = options
        self._python = options.python or sys.executable
        # Our own process may show progress and warnings; a peer's messages are kept for the case that it fails.
        self._messages = None if options.engine == OURS else tempfile.TemporaryFile()  # noqa: SIM115
        loading = {
            "model": options.model,
            "threads": options.threads,
            "context_length": options.context_length,
            "streams": options.streams,
            "device": options.device,
        }
        self._started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                [self._python, str(_SCRIPT), options.engine, json.dumps(loading)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            if self._messages is not None:
                self._messages.close()
            raise RequestError(
                f"{self._python!r} cannot be started ({error.strerror}); give the path of a Python with --peer-python"
            ) from None
        try:
            if first_request is not None:
                self._send(first_request)
            self.ready = self.reply()
        except BaseException:
            self.close(is_failed=True)
            raise

    def ask(self, action: str, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        self._send({"action": action, **request})
        return self.reply()

    def reply(self) -> dict[str, Any]:
        """The next line the process writes."""
        assert self._process.stdout is not None, "the process was started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise BackendUnavailableError(
                f"the process of {self.options.engine} ended ({self._last_message()}); run it again without --compare, "
                "or update it"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise self._error(reply)
        return reply

    def seconds_since_start(self) -> float:
        """Time since just before the process was started."""
        return time.perf_counter() - self._started

    def peak_memory_bytes(self) -> int | None:
        """The most memory the process has had resident, or None if this system does not say."""
        found: int | None = self.ask("memory")["bytes"]
        if found is None:
            import psutil

            peak = getattr(psutil.Process(self._process.pid).memory_info(), "peak_wset", None)
            found = None if peak is None else int(peak)
        return found

    def close(self, *, is_failed: bool = False) -> None:
        """End the process; may be called again."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(0 if is_failed else _CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._messages is not None:
            self._messages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(is_failed=kind is not None)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "the process was started with a pipe"
        # A process that ended wrote what went wrong, or nothing; either is told when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _error(self, reply: dict[str, Any]) -> LocalinferError:
        name, message = reply["error"], reply["message"]
        if name == "missing":
            return BackendUnavailableError(
                f"{self.options.engine} is not installed for {self._python}; install it with "
                "`pip install 'localinfer[bench]'`, or name a Python that has it with --peer-python"
            )
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, LocalinferError):
            return kind(message)
        return BackendUnavailableError(
            f"{self.options.engine} failed ({name}: {message}); check that it runs this model, or leave --compare out"
        )

    def _last_message(self) -> str:
        code = self._process.wait()
        lines: list[str] = []
        if self._messages is not None:
            self._messages.seek(0)
            lines = self._messages.read().decode("utf-8", "replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"exit code {code}" + (f", {said:.200}" if said else "")

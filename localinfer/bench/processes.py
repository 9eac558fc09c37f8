"""The processes that are measured: an engine behind `worker.py`, or `localinfer serve`. None outlives its use."""

import contextlib
import http.client
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from localinfer import errors
from localinfer.errors import BackendUnavailableError, LocalinferError, RequestError

OURS = "localinfer"

_SCRIPT = Path(__file__).with_name("worker.py")
_CLOSING_SECONDS = 10.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
_KEPT_LINES = 20
_POLL_SECONDS = 0.5


class ChildProcess:
    """A process with a pipe to its standard input, which ends it. A context manager that closes it.

    pid: of the process. pipes: where its other streams go, as `subprocess.Popen` takes them. Raises: OSError.
    """

    def __init__(self, command: Sequence[str], **pipes: Any) -> None:
        self._process: subprocess.Popen[str] = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, encoding="utf-8", errors="replace", **pipes
        )
        self.pid = self._process.pid

    def close(self, *, is_failed: bool = False) -> None:
        """End the process, at once if it has failed; may be called again."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(0 if is_failed else _CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(is_failed=kind is not None)


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


class EngineProcess(ChildProcess):
    """One engine in its own process, which answers one request at a time.

    Raises, when made and when asked: the error of the other side; BackendUnavailableError if it lacks the engine or
    ended by itself.
    """

    def __init__(self, options: EngineOptions, first_request: dict[str, Any] | None = None) -> None:
        """Start it and wait until the model is loaded; `first_request` is sent at once, to be read by `reply`."""
        self.options = options
        self._python = options.python or sys.executable
        # Our own process may show progress and warnings; a peer's messages are kept for the case that it fails.
        self._messages = None if options.engine == OURS else tempfile.TemporaryFile()  # noqa: SIM115
        self._started = time.perf_counter()
        try:
            super().__init__(
                [self._python, str(_SCRIPT), options.engine, json.dumps(asdict(options))],
                stdout=subprocess.PIPE,
                stderr=self._messages,
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
            raise self._error(reply["error"], reply["message"])
        return reply

    def seconds_since_start(self) -> float:
        """Time since just before the process was started."""
        return time.perf_counter() - self._started

    def peak_memory_bytes(self) -> int | None:
        """The most memory the process has had resident, or None if this system does not say."""
        found: int | None = self.ask("memory")["bytes"]
        if found is None:
            import psutil

            found = getattr(psutil.Process(self.pid).memory_info(), "peak_wset", None)
        return found

    def close(self, *, is_failed: bool = False) -> None:
        """End the process; may be called again."""
        super().close(is_failed=is_failed)
        if self._messages is not None:
            self._messages.close()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "the process was started with a pipe"
        # A process that has ended wrote an error, or nothing; reading its answer raises for either.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _error(self, name: str, message: str) -> LocalinferError:
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
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"exit code {code}" + (f", {last:.200}" if last else "")


class ServerProcess(ChildProcess):
    """`localinfer serve` with one model on a free loopback port; made when it answers. port: of it.

    It ends with its standard input, so it does not outlive this process either, however that ends.
    Raises: BackendUnavailableError if it ends by itself.
    """

    def __init__(self, model: str, *, device: str, threads: int | None, max_generations: int) -> None:
        # The name says that the folder is private, as its mode does.
        self._folder = tempfile.TemporaryDirectory(prefix="localinfer-")
        words = ["serve", "--model", model, "--device", device, "--max-generations", str(max_generations)]
        words += ["--port", "0", "--socket", str(Path(self._folder.name) / "s.sock"), "--until-stdin-ends"]
        words += ["--no-disk-cache", "--idle-unload", "0", "--shutdown-seconds", "0"]
        words += [] if threads is None else ["--threads", str(threads)]
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._port: int | None = None
        self._has_port = threading.Event()
        try:
            super().__init__(
                [sys.executable, "-m", "localinfer", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        except BaseException:
            self._folder.cleanup()
            raise
        assert self._process.stderr is not None, "the process was started with a pipe"
        self._listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()
        try:
            self.port = self._wait()
        except BaseException:
            self.close(is_failed=True)
            raise

    def close(self, *, is_failed: bool = False) -> None:
        """End the process; may be called again."""
        super().close(is_failed=is_failed)
        self._listener.join()
        assert self._process.stderr is not None, "the process was started with a pipe"
        self._process.stderr.close()
        self._folder.cleanup()

    def _listen(self, lines: IO[str]) -> None:
        for line in lines:
            self._lines.append(line.strip())
            found = _ADDRESS.search(line)
            if found and not self._has_port.is_set():
                self._port = int(found[1])
                self._has_port.set()
        self._has_port.set()

    def _wait(self) -> int:
        """The port, once the model is loaded, which takes its time where kernels have to be compiled."""
        while not self._has_port.wait(_POLL_SECONDS):
            pass
        while self._port is not None and self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_POLL_SECONDS)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return self._port
                time.sleep(_POLL_SECONDS)
            except OSError:
                continue
            finally:
                connection.close()
        code = self._process.wait()
        self._listener.join()
        last = next((line for line in reversed(self._lines) if line), "without a message")
        raise BackendUnavailableError(
            f"the server ended with code {code} ({last:.300}); check that `localinfer serve -m MODEL` starts here"
        )

"""The measured processes: an engine behind `worker.py`, or `localinfer serve`. Each ends with its context manager."""

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from localinfer import errors
from localinfer.errors import BackendUnavailableError, LocalinferError, RequestError

OURS = "localinfer"
_PACKAGES = {"llama-cpp-python": "'localinfer[bench]'"}
"""Names that distributions are installed by, where they differ."""

_SCRIPT = Path(__file__).with_name("worker.py")
_CLOSING_SECONDS = 10.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+).*\n")
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 0.5


class ChildProcess:
    """A process that ends with its standard input, a pipe. A context manager that closes it.

    folder: where its messages are kept, and deleted with it; None shows them. pid: of the process. Raises: OSError.
    """

    def __init__(self, command: Sequence[str], stdout: int, folder: tempfile.TemporaryDirectory[str] | None) -> None:
        self._folder = folder
        self._messages = None if folder is None else Path(folder.name) / "messages"
        try:
            with contextlib.nullcontext() if self._messages is None else self._messages.open("wb") as stderr:
                self._process: subprocess.Popen[str] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, text=True, encoding="utf-8"
                )
        except BaseException:
            if folder is not None:
                folder.cleanup()
            raise
        self.pid = self._process.pid

    def messages(self) -> str:
        """Its standard error so far, where that is kept."""
        return "" if self._messages is None else self._messages.read_text("utf-8", "replace")

    def wait_and_describe(self) -> str:
        """Wait until it has ended by itself; return its exit code and its last message."""
        code = self._process.wait()
        lines = [line.strip() for line in self.messages().split("\n") if line.strip()]
        return f"exit code {code}" + "".join(f", {line:.300}" for line in lines[-1:])

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
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(is_failed=kind is not None)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine's process."""

    engine: str
    """Name of its distribution, as in `worker.ENGINES`."""
    model: str
    threads: int | None
    context_length: int | None
    streams: bool = False
    """Use the engine's text API, in place of token ids."""
    python: str | None = None
    """Its interpreter; None: this one."""
    device: str = "cpu"
    """As for `localinfer.load`; a peer uses its own default."""


class PeerFailedError(BackendUnavailableError):
    """An engine ended, or cannot load or compute a model."""


def check_interpreter(python: str | None) -> None:
    """Refuse what is no program, before anything is measured. Raises: RequestError."""
    if python is not None and shutil.which(python) is None:
        raise _unstartable(python, "no program is there")


def _unstartable(python: str, reason: str | None) -> RequestError:
    return RequestError(f"{python!r} cannot be started ({reason}); give the path of a Python with --peer-python")


class EngineProcess(ChildProcess):
    """One engine in its own process, which answers one request at a time.

    Raises, when made and for each request: the error of the other side; BackendUnavailableError if it lacks the engine
    or ended by itself.
    """

    def __init__(self, options: EngineOptions, first_request: dict[str, Any] | None = None) -> None:
        """Start it and wait until the model is loaded; `first_request` is sent at once and answered by `reply`."""
        self.options = options
        self._python = options.python or sys.executable
        self._started = time.perf_counter()
        # Our own process may show progress and warnings; a peer's messages are kept for the case that it fails.
        folder = None if options.engine == OURS else tempfile.TemporaryDirectory(prefix="localinfer-")
        command = [self._python, str(_SCRIPT), options.engine, json.dumps(asdict(options))]
        try:
            super().__init__(command, subprocess.PIPE, folder)
        except OSError as error:
            raise _unstartable(self._python, error.strerror) from None
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
        """Read the next response."""
        assert self._process.stdout is not None, "the process was started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailedError(
                f"the process of {self.options.engine} ended ({self.wait_and_describe()}); run it again without "
                "--compare, or update it"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise self._error(reply["error"], reply["message"])
        return reply

    def seconds_since_start(self) -> float:
        """Time since the process was started."""
        return time.perf_counter() - self._started

    def peak_memory_bytes(self) -> int | None:
        """Peak resident memory, or None if this system does not report it."""
        found: int | None = self.ask("memory")["bytes"]
        if found is None:
            import psutil

            found = getattr(psutil.Process(self.pid).memory_info(), "peak_wset", None)
        return found

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "the process was started with a pipe"
        # If the process has exited, reading its response raises.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _error(self, name: str, message: str) -> LocalinferError:
        if name == "missing":
            return BackendUnavailableError(
                f"{self.options.engine} is not installed for {self._python}; install it with `pip install "
                f"{_PACKAGES.get(self.options.engine, self.options.engine)}`, or name a Python that has it with "
                "--peer-python"
            )
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, LocalinferError):
            return kind(message)
        return PeerFailedError(
            f"{self.options.engine} failed ({name}: {message}); check that it runs this model, or leave --compare out"
        )


class ServerProcess(ChildProcess):
    """`localinfer serve` with one model on a free loopback `port`; the constructor returns once it is ready.

    It ends with its standard input, so also when this process is killed. more: further words of its command line.
    Raises: BackendUnavailableError if it exits.
    """

    def __init__(
        self, model: str, *, device: str, threads: int | None, max_generations: int, more: Sequence[str] = ()
    ) -> None:
        # Private, by its mode and its name.
        folder = tempfile.TemporaryDirectory(prefix="localinfer-")
        words = ["serve", "--model", model, "--device", device, "--max-generations", str(max_generations)]
        words += ["--port", "0", "--socket", str(Path(folder.name) / "s.sock"), "--until-stdin-ends"]
        words += ["--no-disk-cache", "--idle-unload", "0", "--shutdown-seconds", "0"]
        words += [] if threads is None else ["--threads", str(threads)]
        words += more
        super().__init__([sys.executable, "-m", "localinfer", *words], subprocess.DEVNULL, folder)
        try:
            self.port = self._wait_for_port()
        except BaseException:
            self.close(is_failed=True)
            raise

    def _wait_for_port(self) -> int:
        """The port, once the model is loaded, which takes its time where kernels have to be compiled."""
        while self._process.poll() is None:
            found = _ADDRESS.search(self.messages())
            if found is not None and _is_ready(int(found[1])):
                return int(found[1])
            time.sleep(_POLL_SECONDS)
        raise BackendUnavailableError(
            f"the server ended ({self.wait_and_describe()}); check that `localinfer serve -m MODEL` starts here"
        )


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()

"""The server that a load is measured on: `localinfer serve` in a process of its own, which never outlives its use."""

import contextlib
import http.client
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from localinfer.errors import BackendUnavailableError

_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
_KEPT_LINES = 20
_POLL_SECONDS = 0.5
_CLOSING_SECONDS = 10.0


class ServerProcess:
    """A server of one model on a free loopback port; made when it answers. Leaving the context ends the process.

    port, pid: of the process.
    It ends by itself when its standard input does, so it does not outlive this process either, however that ends.
    Raises: BackendUnavailableError if it ends by itself.
    """

    def __init__(self, model: str, *, device: str, threads: int | None, max_generations: int) -> None:
        # The name says that the folder is ours alone, as its mode does.
        self._folder = tempfile.TemporaryDirectory(prefix="localinfer-")
        words = ["serve", "--model", model, "--device", device, "--max-generations", str(max_generations)]
        words += ["--port", "0", "--socket", str(Path(self._folder.name) / "s.sock"), "--until-stdin-ends"]
        words += ["--no-disk-cache", "--idle-unload", "0", "--shutdown-seconds", "0"]
        words += [] if threads is None else ["--threads", str(threads)]
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._port: int | None = None
        self._has_port = threading.Event()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "localinfer", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except BaseException:
            self._folder.cleanup()
            raise
        assert self._process.stderr is not None, "the process was started with a pipe"
        self.pid = self._process.pid
        self._listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()
        try:
            self.port = self._wait()
        except BaseException:
            self.close(is_failed=True)
            raise

    def close(self, *, is_failed: bool = False) -> None:
        """End the process; may be called again."""
        assert self._process.stdin is not None, "the process was started with a pipe"
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(0 if is_failed else _CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        assert self._process.stderr is not None, "the process was started with a pipe"
        self._process.stderr.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(is_failed=kind is not None)

    def _listen(self, lines: IO[str]) -> None:
        for line in lines:
            self._said.append(line.strip())
            found = _ADDRESS.search(line)
            if found and not self._has_port.is_set():
                self._port = int(found[1])
                self._has_port.set()
        self._has_port.set()

    def _wait(self) -> int:
        """The port, once the model is loaded: kernels may have to be compiled first, which takes its time."""
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
        said = next((line for line in reversed(self._said) if line), "nothing was said")
        raise BackendUnavailableError(
            f"the server ended with code {code} ({said:.300}); check that `localinfer serve -m MODEL` starts here"
        )

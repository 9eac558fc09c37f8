"""The one line of JSON that `localinfer serve --ready-json` writes to standard output, and nothing else ever."""

import json
import os
import re
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from localinfer.apps.cli.patient_stream import PatientStream
from localinfer.system.parent_watch import OPTION
from localinfer.types import Closing

READY_JSON = "--ready-json"

_WAY_OUT = (re.compile("; "), re.compile(" (?=(?:See|Type) `)"), re.compile(r"(?<=\.) (?=The )"))
"""What stands between what is wrong and what to do: the first that is found."""


class ReadyLine(Closing):
    """Standard output, kept for one line; whatever else is printed there goes to standard error.

    The line tells that requests are answered, or what is wrong; a second one is not written. A pipe that is closed or
    full stops nothing. Closing this gives standard output back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_told = self._is_closed = False
        self._own: int | None = None
        with suppress(OSError):
            _flush(sys.stdout)
            self._own = os.dup(1)
        try:
            os.dup2(2, 1)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)

    def tell_ready(self, **facts: Any) -> None:
        """Write where requests are answered."""
        # A list of many models may be more than a pipe has room for.
        threading.Thread(target=self._tell, args=(facts,), name="localinfer-ready", daemon=True).start()

    def tell_error(self, kind: str, message: str) -> None:
        """Write what is wrong; kind: the name of the error's class. The end of the message is the way out."""
        found = next((end for form in _WAY_OUT if (end := form.search(message))), None)
        what, way_out = (message, None) if found is None else (message[: found.start()], message[found.end() :])
        self._tell({"error": {"type": kind, "message": what, "way_out": way_out}})

    def close(self) -> None:
        """Give standard output back; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):
            _flush(sys.stdout)
            if self._own is not None:
                os.dup2(self._own, 1)

    def _tell(self, facts: dict[str, Any]) -> None:
        from localinfer.kernels.versions import installed_version

        with self._lock:
            is_told, self._is_told = self._is_told, True
        if is_told or self._own is None:
            return
        line = json.dumps({"version": installed_version("localinfer"), **facts}) + "\n"
        with suppress(OSError):
            data = line.encode()
            while data:
                data = data[os.write(self._own, data) :]


@contextmanager
def sidecar_streams(words: Sequence[str]) -> Iterator[ReadyLine | None]:
    """The standard streams of a server that another program has started; the ready line if it is wanted.

    Messages to a pipe that nobody reads do not stop the server. words: of the command line. An error that nobody
    expected is told by the ready line too, and raised on.
    """
    is_server = words[:1] == ["serve"]
    stderr = sys.stderr
    patient = PatientStream(stderr.fileno()) if is_server and _is_sidecar(words) and _is_pipe(stderr) else None
    ready = ReadyLine() if is_server and READY_JSON in words else None
    if patient is not None:
        sys.stderr = patient
    try:
        yield ready
    except Exception as error:
        if ready is not None:
            ready.tell_error("InternalError", f"{type(error).__name__}: {error}; please report what stderr has")
        raise
    finally:
        if ready is not None:
            ready.close()
        if patient is not None:
            patient.drain()
            sys.stderr = stderr


def drain_stderr() -> None:
    """Write what waits to be written to standard error, before the process is ended."""
    if isinstance(sys.stderr, PatientStream):
        sys.stderr.drain()


def _is_sidecar(words: Sequence[str]) -> bool:
    return READY_JSON in words or OPTION in words


def _is_pipe(stream: TextIO | None) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode if stream is not None else 0
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _flush(stream: TextIO | None) -> None:
    if stream is not None:
        stream.flush()

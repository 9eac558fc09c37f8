"""Python processes that need not import the package: copies of one that has, with arguments, streams and a parent.

A server's process takes a fifth of a second, and what it imports four times as long. What starts a test's process in
this way is not tested by it; a few tests of each command start it as people do.
"""

import atexit
import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from socket import recv_fds, send_fds, socket, socketpair
from typing import Any

from tests.support.limits import seconds

_PREPARED = (
    "localinfer.apps.cli",
    "localinfer.apps.server.app",
    "localinfer.generation.chat_model",
    "localinfer.generation.text_generation",
    "localinfer.kernels.cpu.program",
    "localinfer.kernels.jit.compile_ahead",
    "localinfer.llm",
    "localinfer.loading.build",
    "localinfer.loading.load",
    "localinfer.models.load.loader",
    "localinfer.models.text.chat_template",
    "localinfer.models.text.tokenizer",
    "uvicorn.lifespan.on",
    "uvicorn.loops.asyncio",
    "uvicorn.protocols.http.h11_impl",
)
_SET_CHILD_SUBREAPER = 36


class WarmPython(subprocess.Popen[Any]):
    """As `subprocess.Popen` with `[sys.executable, ...]` and a script's path, `-m` and a module, or `-c` and code.

    It takes the streams, `text`, `env`, `cwd` and `start_new_session`. For other programs, and where Linux's way to
    adopt a process is missing, it is `Popen` itself.
    """

    if sys.platform == "linux":

        def _execute_child(self, args: Any, *rest: Any) -> None:
            """Have a copy made where `Popen` would fork. rest: as it gives them."""
            if args[0] != sys.executable:
                super()._execute_child(args, *rest)  # type: ignore[misc]
                return
            cwd, environment = rest[4], rest[5]
            pipes = rest[9:15]
            streams = [inherited if own == -1 else own for inherited, own in enumerate((pipes[0], pipes[3], pipes[5]))]
            asked = {
                "words": args[1:],
                "cwd": os.fspath(cwd or os.getcwd()),
                "environment": dict(os.environ if environment is None else environment),
                "is_session": bool(rest[20]),
            }
            self.pid = _origin().copy(asked, streams)
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_copy(
    words: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    input: str | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with these words, whose output and errors are captured as text, in a copy."""
    pipe = subprocess.PIPE
    stdin = subprocess.DEVNULL if input is None else pipe
    with WarmPython(words, env=env, cwd=cwd, stdin=stdin, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


class _Origin:
    """The process that has imported the package, and is asked for copies by a socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking, theirs = socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        atexit.register(self._close)

    def copy(self, asked: dict[str, Any], streams: list[int]) -> int:
        """The number of a new process, a child of this one."""
        with self._lock:
            _adopt(True)
            try:
                send_fds(self._asking, [json.dumps(asked).encode()], streams)
                said = self._asking.recv(32)
            finally:
                _adopt(False)
        assert said, "the process that is copied has ended"
        return int(said)

    def _close(self) -> None:
        self._asking.close()
        self._process.wait(seconds(10))


@cache
def _origin() -> _Origin:
    return _Origin()


def _adopt(does: bool) -> None:
    """Whether the processes of children that have ended become children of this process."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(does), 0, 0, 0)


def _make_copies(asked: socket) -> dict[str, Any] | None:
    """Make a copy of this process for each message; return it in the copy, and nothing at the last one's end."""
    while True:
        message, streams, _, _ = recv_fds(asked, 1 << 20, 3)
        if not message:
            return None
        between = os.fork()
        if not between:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                os.sched_yield()
            asked.send(b"%d" % os.getpid())
            asked.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return json.loads(message)  # type: ignore[no-any-return]
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)


if __name__ == "__main__":
    import gc
    import importlib
    import runpy
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _name in _PREPARED:
        importlib.import_module(_name)
    gc.freeze()
    if _copy := _make_copies(socket(fileno=int(sys.argv[1]))):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Of a pipe where the former was none: whether one can seek in them was asked when they were opened.
        sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.environ.clear()
        os.environ.update(_copy["environment"])
        os.chdir(_copy["cwd"])
        if _copy["is_session"]:
            os.setsid()
        _way, *sys.argv[1:] = _copy["words"]
        sys.path[0] = ""
        if _way == "-m":
            runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        elif _way == "-c":
            sys.argv[0] = "-c"
            exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv[0], sys.path[0] = _way, os.path.dirname(_way)
            runpy.run_path(_way, run_name="__main__")

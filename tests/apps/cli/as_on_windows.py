"""A process whose localinfer sees Windows: its modules lack what Python lacks there, and files in use stay.

Only modules of localinfer get these views; Python's own and other packages are those of this machine, and so is
compiled code. What stands in for Windows's own calls is given where localinfer asks for them.
"""

import builtins
import errno
import fcntl
import hashlib
import importlib
import io
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ABSENT_MODULES = {"fcntl", "termios", "resource", "pwd", "grp", "tty", "pty", "syslog", "readline"}
ABSENT: dict[str, str] = {
    "os": "fork forkpty getuid geteuid getgid getegid getsid setsid getpgid getpgrp setpgid killpg fchmod fchown chown "
    "sched_getaffinity sched_setaffinity sched_yield sysconf getloadavg nice getpriority setpriority pidfd_open "
    "WNOHANG O_NONBLOCK O_NOFOLLOW O_CLOEXEC O_NOCTTY O_DIRECTORY O_SYNC mkfifo uname statvfs posix_fadvise "
    "posix_fallocate pread preadv pwrite pwritev sendfile memfd_create copy_file_range splice eventfd register_at_fork "
    "set_blocking get_blocking",
    "signal": "SIGHUP SIGKILL SIGQUIT SIGTSTP SIGCONT SIGSTOP SIGUSR1 SIGUSR2 SIGCHLD SIGPIPE SIGALRM SIGWINCH SIGTTOU "
    "SIGTTIN SIGBUS pthread_kill pthread_sigmask sigwait sigtimedwait alarm setitimer siginterrupt",
    "socket": "AF_UNIX SO_REUSEPORT MSG_DONTWAIT MSG_NOSIGNAL send_fds recv_fds SCM_RIGHTS SO_PEERCRED",
    "select": "poll epoll kqueue",
    "mmap": "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTNEED MADV_WILLNEED",
    "time": "tzset clock_gettime clock_gettime_ns pthread_getcpuclockid CLOCK_MONOTONIC",
}
THIS_MACHINE = ("localinfer.kernels.cpu.compiled", "localinfer.kernels.jit", "localinfer.kernels.cuda.compiled")
"""Compiled code is that of the system that runs it."""
REPOSITORY = Path(__file__).resolve().parents[3]
DEMO = REPOSITORY / "models" / "demo" / "demo-f16.gguf"
FOLDERS = ("localinfer", "kernels", "models", "quant")
LEFT_OUT = (
    "localinfer.ray",
    "localinfer.pyinstaller_hooks",
    "localinfer.kernels.cuda",
    "localinfer.models.demo.training",
)
"""What imports large packages that are the same everywhere, or only runs inside another program."""
REFUSED, CUT = 2, 3
"""Exit codes."""
BREAK = signal.SIGUSR1
"""Stands in for SIGBREAK."""


class View(ModuleType):
    """A module as localinfer has it: some names are absent, and others are said."""

    def __init__(self, module: ModuleType, absent: str = "", **said: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _absent=frozenset(absent.split()), _said=said)

    def __getattr__(self, name: str) -> Any:
        if name in self._absent:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on Windows")
        return self._said[name] if name in self._said else getattr(self._module, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._module, name, value)


def lock(descriptor: int, _mode: int, _count: int) -> None:
    """`msvcrt.locking`, by this system's locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


msvcrt = ModuleType("msvcrt")
vars(msvcrt).update(locking=lock, LK_NBLCK=2, get_osfhandle=lambda descriptor: descriptor)


class Library:
    """A library of Windows whose functions all fail."""

    def __init__(self, *_names: str, **_options: Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Callable[..., int]:
        return lambda *_: 0


VIEWS: dict[str, ModuleType] = {name: View(importlib.import_module(name), absent) for name, absent in ABSENT.items()}
VIEWS["sys"] = View(sys, platform="win32", getwindowsversion=lambda: (10, 0, 19045))
VIEWS["signal"] = View(signal, ABSENT["signal"], SIGBREAK=BREAK)
VIEWS["ctypes"] = View(importlib.import_module("ctypes"), WinDLL=Library, windll=SimpleNamespace(kernel32=Library()))
VIEWS["msvcrt"] = msvcrt


def sees_windows(importer: str) -> bool:
    return importer.split(".")[0] == "localinfer" and not importer.startswith(THIS_MACHINE)


def as_on_windows() -> None:
    """From now on modules of localinfer import these views."""
    whole = builtins.__import__

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        if level == 0 and sees_windows(importer):
            if name.split(".")[0] in ABSENT_MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in VIEWS:
                return VIEWS[name]
            if fromlist and name == "ctypes":
                return VIEWS[name]
        return whole(name, globals, locals, fromlist, level)

    builtins.__import__ = imported


def is_in_use(path: Any) -> bool:
    """Whether this process has a file open, or mapped."""
    real = os.path.realpath(os.fsdecode(path))
    descriptors = []
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return real in descriptors or any(line.rstrip("\n").endswith(f" {real}") for line in maps)


NEITHER_HELD_NOR_NAMED: list[str] = []
"""What Windows would have refused: in the test none of it may be met."""
_REFUSED_NAME = re.compile(r'[<>:"|?*\x00-\x1f]|[. ]$|^(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$)', re.IGNORECASE)


def refuse_what_windows_refuses(folder: Path) -> None:
    """Deletions and renames of files in use fail, as do names with characters that Windows has a use for."""

    def held(name: str, arguments: int) -> None:
        whole = getattr(os, name)

        def call(*paths: Any, **options: Any) -> Any:
            for path in paths[:arguments]:
                if not options and is_in_use(path):
                    NEITHER_HELD_NOR_NAMED.append(f"{name} of {path}, which is open")
                    raise PermissionError(errno.EACCES, "the file is in use by a process", os.fspath(path))
            return whole(*paths, **options)

        setattr(os, name, call)

    def named(module: Any, name: str) -> None:
        whole = getattr(module, name)

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            text = "" if isinstance(path, int) else os.fsdecode(path)
            if text.startswith(str(folder)):
                parts = text.removeprefix(str(folder)).split("/")
                if any(part and _REFUSED_NAME.search(part) for part in parts if part not in (".", "..")):
                    NEITHER_HELD_NOR_NAMED.append(f"{name} of {text}")
                    raise OSError(errno.EINVAL, "the name has a character that Windows refuses", text)
            return whole(path, *arguments, **options)

        setattr(module, name, call)

    for name, count in (("unlink", 1), ("remove", 1), ("replace", 2), ("rename", 2)):
        held(name, count)
    for module, name in ((os, "open"), (os, "mkdir"), (io, "open"), (builtins, "open")):
        named(module, name)


def import_everything() -> dict[str, str]:
    """Import every module of localinfer; those that cannot be imported, each with its error."""
    faults = {}
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            name = ".".join(part for part in ("localinfer", *parts[folder == "localinfer" :]) if part != "__init__")
            if name.endswith("__main__") or name.startswith(LEFT_OUT):
                continue
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                # Packages that an extra installs may be missing.
                if str(error.name).partition(".")[0] in {"localinfer", *ABSENT_MODULES}:
                    faults[name] = str(error)
            except Exception as error:
                faults[name] = f"{type(error).__name__}: {error}"
    return faults


@contextmanager
def streams(given: str = "") -> Iterator[tuple[io.StringIO, io.StringIO]]:
    former, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(given.encode()), encoding="utf-8")
    try:
        with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
            yield output, errors
    finally:
        sys.stdin = former


def ran(words: list[str], given: str = "", code: int = 0) -> str:
    """Run a command; returns what it printed. Raises: AssertionError if it ends otherwise than wanted."""
    from localinfer.apps.cli import main

    with streams(given) as (output, errors):
        found = main(words)
    assert found == code, f"{words} ended with {found}: {errors.getvalue()}"
    return errors.getvalue() if code == REFUSED else output.getvalue()


def serve_until_break() -> None:
    """Serve, and press Ctrl-Break once a request is answered."""
    from localinfer.apps.server import app

    asked: list[bool] = []
    run = app.LocalServer.run

    def run_until_break(server: Any, *, on_ready: Callable[[], object]) -> None:
        def ready() -> None:
            on_ready()
            asked.append(True)
            threading.Timer(0.05, os.kill, (os.getpid(), BREAK)).start()

        run(server, on_ready=ready)

    app.LocalServer.run = run_until_break  # type: ignore[method-assign]
    try:
        output = ran(["serve", "--port", "0"])
    finally:
        app.LocalServer.run = run  # type: ignore[method-assign]
    assert asked and "serving" in output, output
    assert signal.getsignal(BREAK) == signal.SIG_DFL


def main() -> None:
    """Import everything and run the main commands in a folder; prints what was found as JSON."""
    folder = Path(sys.argv[1])
    # What other packages import of the system, they have before; numba, gguf and the rest are not under test.
    for name in (
        "numba",
        "gguf",
        "ctypes.wintypes",
        "psutil",
        "uvicorn",
        "prompt_toolkit",
        "asyncio",
        "subprocess",
        "multiprocessing",
    ):
        importlib.import_module(name)
    assert select and socket
    as_on_windows()
    refuse_what_windows_refuses(folder)
    results: dict[str, Any] = {"imports": import_everything()}
    steps: dict[str, Callable[[], object]] = {
        "version": lambda: ran(["--version"]),
        "doctor": lambda: ran(["doctor"]),
        "show": lambda: ran(["show", str(DEMO)]),
        "run": lambda: ran(["run", "-p", "Once upon a time", "-n", "4", "--temperature", "0"]),
        "run of a pipe": lambda: ran(["run", "-n", "2", "--temperature", "0"], "Once upon a time\r\n"),
        "tokenize": lambda: ran(["tokenize", "Once", "--ids"]),
        "chat": lambda: ran(["chat", "-p", "Tell me a story.", "-n", "3", "--temperature", "0"], code=CUT),
        "list": lambda: ran(["list"]),
        "sessions": lambda: ran(["sessions"]),
        "cache": lambda: ran(["cache"]),
        "quantize": lambda: quantize(folder),
        "serve": serve_until_break,
    }
    for name, step in steps.items():
        try:
            found = step()
            results[name] = found.splitlines()[:3] if isinstance(found, str) else True
        except BaseException:
            results[name] = {"failed": traceback.format_exc(limit=-6)}
    results["refused"] = NEITHER_HELD_NOR_NAMED
    sys.stdout.write(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)


def quantize(folder: Path) -> None:
    """Quantize the demo model beside what a killed writer left of the same output, which goes."""
    target = folder / "small.gguf"
    mark = hashlib.sha256(target.name.encode()).hexdigest()[:6]
    left = folder / f".{mark}000000.tmp"
    left.write_bytes(b"half of a model")
    ran(["quantize", str(DEMO), str(target), "--type", "q8_0"])
    assert target.stat().st_size > 1000 and not left.exists(), "what a killed writer left is there still"
    told = ran(["quantize", str(DEMO), str(folder / "a:b.gguf"), "--type", "q8_0"], code=REFUSED)
    assert "a:b.gguf cannot be written: names have no ':' on Windows" in told, told
    assert [path.name for path in folder.glob("*.gguf")] == [target.name]


if __name__ == "__main__":
    main()

"""Modules as localinfer has them on Windows: those of this machine, less what Python lacks there.

Only modules of localinfer get these views; Python's own and other packages are those of this machine, and so is
compiled code. What stands in for Windows's own calls is given where localinfer asks for them. As a plugin of pytest,
`python -m pytest -p tests.support.as_on_windows`, it shows modules of tests too which platform this is, so that tests
that are not for Windows skip, and leaves out those below that ask for what Windows lacks.
"""

import builtins
import errno
import fcntl
import importlib
import os
import signal
import sys
from collections.abc import Callable
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
BREAK = signal.SIGUSR1
"""Stands in for SIGBREAK."""


class View:
    """A module as localinfer has it: some names are absent, and others are said until a test says another thing."""

    __slots__ = ("_absent", "_first", "_module", "_said")

    def __init__(self, module: ModuleType, absent: str = "", **said: Any) -> None:
        first = {name: getattr(module, name, None) for name in said}
        for name, value in zip(sorted(View.__slots__), (frozenset(absent.split()), first, module, said), strict=True):
            object.__setattr__(self, name, value)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """All names, of which `monkeypatch` notes what a value was."""
        return {name: getattr(self, name) for name in {*vars(self._module), *self._said} - self._absent}

    def __getattr__(self, name: str) -> Any:
        if name in self._absent:
            raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r} on Windows")
        if name in self._said and getattr(self._module, name, None) is self._first[name]:
            return self._said[name]
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: object) -> None:
        first = self._first.get(name)
        setattr(self._module, name, first if first is not None and value is self._said.get(name) else value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)


def lock(descriptor: int, _mode: int, _count: int) -> None:
    """`msvcrt.locking`, by this system's locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


_SHARED: dict[int, tuple[int, int]] = {}
"""By descriptor, files that were opened so that they can be deleted and renamed meanwhile: device and number."""


def create_file(path: str, access: int, share: int, _: int, disposition: int, *_others: int) -> int:
    """`_winapi.CreateFile`, of the combinations that localinfer has."""
    flags = {0x4000_0000: os.O_WRONLY, 0xC000_0000: os.O_RDWR}[access]
    flags |= {1: os.O_CREAT | os.O_EXCL, 4: os.O_CREAT}[disposition]
    descriptor = os.open(path, flags, 0o600)
    if share & 4:
        status = os.fstat(descriptor)
        _SHARED[descriptor] = status.st_dev, status.st_ino
    return descriptor


msvcrt, winapi = ModuleType("msvcrt"), ModuleType("_winapi")
vars(msvcrt).update(locking=lock, LK_NBLCK=2, get_osfhandle=lambda descriptor: descriptor)
vars(msvcrt).update(open_osfhandle=lambda handle, _: handle)
vars(winapi).update(CreateFile=create_file, CloseHandle=os.close)


class Library:
    """A library of Windows whose functions all fail."""

    def __init__(self, *_names: str, **_options: Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Callable[..., int]:
        return lambda *_: 0


VIEWS: dict[str, Any] = {name: View(importlib.import_module(name), absent) for name, absent in ABSENT.items()}
# Another object than the text of a test that says the same, which is to be seen everywhere.
VIEWS["sys"] = View(sys, platform="".join(["win", "32"]), getwindowsversion=lambda: (10, 0, 19045))
VIEWS["signal"] = View(signal, ABSENT["signal"], SIGBREAK=BREAK)
VIEWS["ctypes"] = View(importlib.import_module("ctypes"), WinDLL=Library, windll=SimpleNamespace(kernel32=Library()))
VIEWS |= {"msvcrt": msvcrt, "_winapi": winapi}


def sees_windows(importer: str) -> bool:
    """True for modules of localinfer, but for those of compiled code."""
    return importer.split(".")[0] == "localinfer" and not importer.startswith(THIS_MACHINE)


def as_on_windows(*, tests_see: frozenset[str] = frozenset()) -> None:
    """From now on modules of localinfer import these views. tests_see: which of them modules of tests import too."""
    whole = builtins.__import__

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        if level == 0 and sees_windows(importer):
            if name.split(".")[0] in ABSENT_MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in VIEWS:
                return VIEWS[name]
        if name in tests_see and importer.startswith(("tests.", "test_", "conftest")):
            return VIEWS[name]
        return whole(name, globals, locals, fromlist, level)

    builtins.__import__ = imported
    for name, count in (("unlink", 1), ("remove", 1), ("replace", 2), ("rename", 2)):
        _refuse_files_in_use(name, count)


REFUSED: list[str] = []
"""Calls of localinfer that Windows would have refused, of which it knows none."""
_BETWEEN = ("pathlib", "shutil", "tempfile", "contextlib", "os")


def _refuse_files_in_use(name: str, num_paths: int) -> None:
    """Have calls of localinfer that delete or rename an open file fail, as they do on Windows."""
    whole = getattr(os, name)

    def call(*paths: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
            frame = frame.f_back
        if not options and sees_windows(frame.f_globals.get("__name__", "")):
            for path in paths[:num_paths]:
                if is_in_use(path):
                    REFUSED.append(f"{name} of {path}, which is open")
                    raise PermissionError(errno.EACCES, "the file is in use by a process", os.fspath(path))
        return whole(*paths, **options)

    setattr(os, name, call)


def is_in_use(path: Any) -> bool:
    """True if this process has a file open that it does not share, or mapped."""
    real = os.path.realpath(os.fsdecode(path))
    descriptors = []
    for number in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(number))
            if _SHARED.get(int(number)) != (status.st_dev, status.st_ino):
                descriptors.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return real in descriptors or any(line.rstrip("\n").endswith(f" {real}") for line in maps)


def pytest_load_initial_conftests() -> None:
    """Take away what Windows lacks before anything of localinfer is imported."""
    assert not any(map(sees_windows, sys.modules)), "localinfer was imported before this plugin"
    # What other packages import of the system, they have before.
    for name in ("numba", "gguf", "ctypes.wintypes", "psutil", "asyncio", "subprocess", "multiprocessing"):
        importlib.import_module(name)
    as_on_windows(tests_see=frozenset({"sys"}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what Windows would have refused."""
    for line in sorted(set(REFUSED)):
        terminalreporter.write_line(f"refused: {line}")

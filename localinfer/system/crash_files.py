"""Reports of native crashes: whether this process writes them, and the files of those before it.

What is in one, and how it is written while a process crashes, is in `kernels/cpu/crash_reports.py`. They stay on this
machine.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from localinfer.system.files import read_bounded
from localinfer.system.folders import expand_home, make_private, user_folder
from localinfer.types import Record

_MOST_KEPT = 8
_MOST_BYTES = 64 << 10
_NEW, _TOLD = ".crash.txt", ".told.txt"


class ReportTarget(Record):
    """The folder of reports; None for no files."""

    folder: Path | None

    def new_path(self) -> Path | None:
        """Path of this process's report; None if the folder cannot be private."""
        if self.folder is None or make_private(self.folder) is not None:
            return None
        return self.folder / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}{_NEW}"


class Report(Record):
    """A report that a crash left behind."""

    path: Path
    text: str

    @property
    def place(self) -> str:
        """The line that names the op, or else the position; empty if there is none."""
        lines = [line.strip() for line in self.text.splitlines()]
        return next((line for line in lines[1:] if line.startswith(("in ", "not "))), "")

    @property
    def is_told(self) -> bool:
        """True if a start of the program has mentioned it."""
        return self.path.name.endswith(_TOLD)


_asked: list[ReportTarget] = []
when_asked: list[Callable[[], None]] = []
"""Called once reports are wanted."""


def report_crashes(folder: str | os.PathLike[str] | None = None) -> None:
    """Report native crashes of this process from now on, or once a model is loaded, on stderr and in a private file.

    A report names the op that crashed, its tensor as in the model's file, shapes, instruction set, threads and
    versions, and nothing that a user or a model wrote; it is sent nowhere. The handlers of SIGSEGV, SIGBUS, SIGILL,
    SIGFPE and SIGABRT that are set when the first model is loaded are called afterwards. The `localinfer` command does
    this for itself; a program that does not call it keeps its own handlers. Nothing is changed on Windows.

    folder: for the files, created with mode 0700; None: a folder of this user's state, which `localinfer doctor` reads.
    Raises: RequestError.
    """
    _asked[:] = [ReportTarget(reports_folder() if folder is None else expand_home(folder).absolute())]
    for tell in when_asked:
        tell()


def is_asked() -> bool:
    """True if reports are wanted."""
    return bool(_asked)


def asked() -> ReportTarget:
    """Folder of the reports that are wanted."""
    return _asked[0] if _asked else ReportTarget(None)


def reports_folder() -> Path | None:
    """This user's folder of reports, which need not exist; None without a home folder."""
    state = user_folder("state")
    return None if state is None else state / "crashes"


def stored_reports(folder: Path | None) -> list[Report]:
    """The reports in a folder, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        names = [] if folder is None else os.listdir(folder)
        for name in sorted((one for one in names if one.endswith((_NEW, _TOLD))), reverse=True):
            path = Path(folder or "", name)
            with contextlib.suppress(OSError, ValueError):
                found.append(Report(path, read_bounded(path, _MOST_BYTES).decode("utf-8", "replace")))
    return found


def take_untold(folder: Path | None) -> Report | None:
    """The newest report that no start has mentioned; then all count as mentioned, and only the newest are kept."""
    reports = stored_reports(folder)
    untold = [report for report in reports if not report.is_told and report.text]
    with contextlib.suppress(OSError):
        for report in untold:
            report.path.rename(report.path.with_name(report.path.name.removesuffix(_NEW) + _TOLD))
    for report in reports[_MOST_KEPT:]:
        with contextlib.suppress(OSError):
            report.path.unlink()
    return untold[0] if untold else None

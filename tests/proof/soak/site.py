"""What processes that are killed have in common: a folder that lasts, what they reported as finished, what is left."""

import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import ClassVar

from localinfer.types import Closing
from tests.proof.soak.cold_answers import ColdAnswers
from tests.proof.soak.moments import Life
from tests.support.limits import seconds, wait_until

GIVING_UP_SECONDS = 60.0
_TEMPORARY = re.compile(r"tmp\w+\.tmp|\.[0-9a-f]{12}\.tmp|.*\.incomplete")
_AGE_SECONDS = 2 * 3600.0
_MOST_WARNINGS = 1


class ViolationError(Exception):
    """Something that was finished is gone, is not what it was, or is left over."""


def require(is_so: object, problem: str) -> None:
    """Raise a `ViolationError` that names the problem, unless something is so."""
    if not is_so:
        raise ViolationError(problem)


class Site(Closing):
    """One use of localinfer in a folder of its own, by one process after the other.

    `start` begins a process, `drive` keeps it busy in a thread until it ends by itself or is killed, and notes what it
    reports as finished; `check` proves what is left behind. most_temporaries: unfinished files that may lie about after
    any number of kills, once those that are hours old had their chance to be deleted. first_life: what a life is; None:
    one is measured, which nothing cuts short.
    """

    name: ClassVar[str]
    most_temporaries: ClassVar[int] = 4
    first_life: ClassVar[Life | None] = None

    def __init__(self, folder: Path, cold: ColdAnswers) -> None:
        self.folder = folder / self.name
        self.folder.mkdir(mode=0o700)
        self.cold = cold
        self.counts: dict[str, int] = {}

    def start(self, random: Random) -> subprocess.Popen[str]:
        """Start a process that works in the folder."""
        raise NotImplementedError

    def drive(self, process: subprocess.Popen[str], random: Random) -> None:
        """Keep it busy until it ends or is killed. Raises: ViolationError."""
        raise NotImplementedError

    def check(self) -> None:
        """Prove that what was finished is there. Raises: ViolationError."""
        raise NotImplementedError

    def finish(self) -> None:
        """What is proven once, after the last round. Raises: ViolationError."""

    def close(self) -> None:
        """Release what the site holds."""

    def count(self, what: str, number: int = 1) -> None:
        """Count what was compared, for the report."""
        self.counts[what] = self.counts.get(what, 0) + number

    def temporaries(self) -> list[Path]:
        """Files that are unfinished by their names."""
        return [path for path in self.folder.rglob("*") if _TEMPORARY.fullmatch(path.name)]

    def age_temporaries(self) -> None:
        """Make unfinished files hours old, as they would be at another day's start."""
        old = time.time() - _AGE_SECONDS
        for path in self.temporaries():
            os.utime(path, (old, old))

    def check_temporaries(self) -> None:
        """Count what unfinished files are left. Raises: ViolationError."""
        left = self.temporaries()
        self.counts["most temporary files"] = max(len(left), self.counts.get("most temporary files", 0))
        require(len(left) <= self.most_temporaries, f"temporary files pile up: {sorted(map(str, left))}")


class Drive:
    """A site's `drive` in a thread; what it raises is raised by `join`."""

    def __init__(self, site: Site, process: subprocess.Popen[str], random: Random) -> None:
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(site, process, random), daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it still drives."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for its end. Raises: ViolationError, also if it does not end."""
        self._thread.join(seconds(GIVING_UP_SECONDS))
        require(not self._thread.is_alive(), "the process, or what drives it, is stuck")
        if self._problem is not None:
            raise self._problem

    def _run(self, site: Site, process: subprocess.Popen[str], random: Random) -> None:
        try:
            site.drive(process, random)
        except BaseException as problem:
            self._problem = problem


def kill(process: subprocess.Popen[str]) -> None:
    """End a process as `kill -9` does."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def check_nothing_runs(session: int) -> None:
    """Wait until no process of a session runs any more. Raises: ViolationError; on Linux only."""
    left: list[int] = []

    def is_over() -> bool:
        left[:] = _processes_of(session)
        return not left

    if not wait_until(is_over, 20, every=0.01):
        for number in left:
            os.kill(number, signal.SIGKILL)
        raise ViolationError(f"processes outlive the one that started them: {left}")


def _processes_of(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@contextmanager
def few_warnings(what: str) -> Iterator[None]:
    """Require that a block logs at most one warning. Raises: ViolationError."""
    told: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler, logger = Handler(logging.WARNING), logging.getLogger("localinfer")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    require(len(told) <= _MOST_WARNINGS, f"{what} warns more than once: {told}")


def check_ended_well(process: subprocess.Popen[str], errors: str, *, codes: tuple[int, ...] = (0,)) -> None:
    """Require of a process that was not killed that it succeeded, and of any that it warned at most once."""
    warned = [line for line in errors.splitlines() if re.match(r"(?i)warning\b|.*Warning:", line)]
    require(len(warned) <= _MOST_WARNINGS, f"the start after a kill warns more than once: {warned}")
    if process.returncode != -signal.SIGKILL:
        require(process.returncode in codes, f"exit status {process.returncode}: {errors[-2000:]}")
    require("Traceback" not in errors, f"a traceback: {errors[-3000:]}")

"""Run Python in a process of its own, for what is decided once per process: cache folder, instruction set, fork."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.limits import seconds
from tests.support.warm_python import WarmPython

REPOSITORY = Path(__file__).resolve().parents[2]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without settings that choose kernels, plus the changes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "LOCALINFER_"))}
    path = os.pathsep.join(part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if part)
    # As in `conftest.py`: Numba colours errors that nobody sees.
    return kept | {"PYTHONPATH": path, "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"} | changes


def start(
    code: str, folder: Path = REPOSITORY, kind: type[subprocess.Popen[str]] = subprocess.Popen, **changes: str
) -> subprocess.Popen[str]:
    """Start Python on some code, in a folder, with changes to the environment. kind: `WarmPython` for a copy."""
    arguments = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    return kind(arguments, cwd=folder, env=environment(**changes), stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Standard output and errors of a process that must succeed."""
    output, errors = process.communicate(timeout=seconds(50))
    assert process.returncode == 0, f"exit code {process.returncode}: {errors}"
    return output.strip(), errors.strip()


def run(code: str, folder: Path = REPOSITORY, **changes: str) -> tuple[str, str]:
    """Standard output and errors of code that must succeed."""
    return finish(start(code, folder, **changes))


def run_in_copy(code: str, **changes: str) -> tuple[str, str]:
    """As `run`, in a copy of a process that has imported the package and loaded nothing."""
    return finish(start(code, kind=WarmPython, **changes))

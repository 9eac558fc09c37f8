"""`localinfer bench` in this process, and the processes that it measures as copies of one that has imported enough."""

import io
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

from localinfer.apps.bench import processes, roofline
from localinfer.apps.cli import main
from tests.support.warm_python import WarmPython


@contextmanager
def warm_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": WarmPython}))
        yield


def run_bench(*words: str) -> tuple[str, str]:
    """What a command that must succeed writes to standard output, and as messages."""
    printed, messages = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(messages):
        code = main(["bench", *words])
    assert code == 0, messages.getvalue()
    return printed.getvalue(), messages.getvalue()


@contextmanager
def short_rounds() -> Iterator[None]:
    """The machine's rates from shorter rounds and fewer passes, which measure less exactly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "BUFFER_BYTES", 32 << 20)
        patch.setattr(roofline, "_ROUND_SECONDS", 0.003)
        patch.setattr(roofline, "_ATTEMPTS", 3)
        patch.setattr(roofline, "_DECODE_RUNS", 3)
        patch.setattr(roofline, "_PREFILL_RUNS", 2)
        yield

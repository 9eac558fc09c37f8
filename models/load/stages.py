"""A stage of loading that runs a model: it is reported within long passes too, so that a load can be ended."""

import time
from collections.abc import Callable
from typing import Any

from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.program import Batch, Program
from localinfer.types import ProgressCallback

_OFTEN_SECONDS = 0.02
_QUICK_SECONDS = 0.05
"""A pass that takes no longer is run in one go, since looking up in between would be measured too."""


class Stage:
    """Reports one stage's progress, and what was reported last again. Does nothing without a callback."""

    def __init__(self, progress: ProgressCallback | None, name: str) -> None:
        self._progress = progress
        self._name = name
        self._last = (0, 1)
        self._told_at = float("-inf")

    def __call__(self, done: int, total: int) -> None:
        """Report units done and their total."""
        self._last, self._told_at = (done, total), time.monotonic()
        if self._progress is not None:
            self._progress(self._name, done, total)

    def again(self) -> None:
        """Report the same again, unless that was done a moment ago."""
        if time.monotonic() - self._told_at >= _OFTEN_SECONDS:
            self(*self._last)


def checked_run(program: Program, stage: Stage) -> Callable[[Batch], Any]:
    """What runs batches of a program, and lets `stage` report within those that take long; what it raises ends them."""
    if not isinstance(program, CpuProgram):
        return program.run
    seconds: dict[int, float] = {}

    def go_on(done: float) -> bool:
        stage.again()
        return False

    def run(batch: Batch) -> Any:
        rows = len(batch.token_ids)
        if seconds.get(rows, 1.0) <= _QUICK_SECONDS:
            return program.run(batch)
        began = time.perf_counter()
        result = program.run_abortable(batch, go_on, least_rows=1)
        seconds[rows] = time.perf_counter() - began
        return result

    return run

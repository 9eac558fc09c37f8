"""Every input that fuzzing found to be handled wrongly is handled rightly now."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.proof.fuzz.findings import found_cases, read
from tests.proof.fuzz.target import MODEL_TARGETS, Target, find_target, target_names
from tests.proof.fuzz.worker_process import WorkerProcess

PATIENCE = 60.0
"""Seconds of a case."""
CASES = [pytest.param(name, path, id=f"{name}/{path.name}") for name in target_names() for path in found_cases(name)]


@pytest.fixture(scope="module")
def workers() -> Iterator[object]:
    """A worker for each target, started when it is first asked for."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(_worker(name)))


def _worker(name: str) -> WorkerProcess:
    return WorkerProcess(_patient(find_target(name)), is_guarded=name not in MODEL_TARGETS)


def _patient(target: Target) -> Target:
    """With time for a case to compile kernels, where some are needed."""
    if target.prepare is None:
        return target
    return replace(target, limits=replace(target.limits, seconds=PATIENCE))


@pytest.mark.parametrize(("name", "path"), CASES)
def test_found_case_is_handled(name: str, path: Path, workers) -> None:
    report = workers(name).run(read(path))
    assert not report.kind, f"{report.kind} at {report.place}\n{report.text}"
    assert report.outcome

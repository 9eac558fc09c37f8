"""Each target by one worker: some sound inputs, mutations of them, and every input that was once handled wrongly."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.proof.fuzz.campaign import Campaign
from tests.proof.fuzz.findings import found_cases, read
from tests.proof.fuzz.target import MODEL_TARGETS, find_target, target_names
from tests.proof.fuzz.worker_process import WorkerProcess
from tests.support.warm_python import WarmPython

NUM_INPUTS = 5
"""Sound ones."""
NUM_MUTATIONS = 16
PATIENCE = 300.0
"""Seconds of a case: where no kernel is compiled yet, mutations need some that no sound input needed before."""
CASES = [pytest.param(name, path, id=f"{name}/{path.name}") for name in target_names() for path in found_cases(name)]


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[[str], WorkerProcess]]:
    """A worker for each target, started when it is first asked for."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(_worker(name)))


def _worker(name: str) -> WorkerProcess:
    target = find_target(name)
    if target.prepare is not None:
        target = replace(target, limits=replace(target.limits, seconds=PATIENCE))
    return WorkerProcess(target, is_guarded=name not in MODEL_TARGETS, kind=WarmPython)


@pytest.mark.parametrize("name", target_names())
def test_target_runs_and_refuses_and_finds_nothing(
    name: str, tmp_path: Path, workers: Callable[[str], WorkerProcess]
) -> None:
    worker = workers(name)
    corpus = worker.target.corpus()
    # Some of the sound inputs, from all of them.
    inputs = corpus[:: -(-len(corpus) // NUM_INPUTS)]
    num_cases = len(inputs) + NUM_MUTATIONS
    campaign = Campaign(
        replace(worker.target, corpus=lambda: inputs),
        seed=1,
        seconds=600,
        most_cases=num_cases,
        folder=tmp_path,
        shrink_seconds=0,
        worker=worker,
    )
    campaign.run()
    counts = campaign.counts
    assert not campaign.findings, [finding.text for finding, _ in campaign.findings.values()]
    assert counts.cases == num_cases
    is_refused = [outcome.startswith("refused") for outcome in counts.outcomes]
    assert any(is_refused) and not all(is_refused)
    assert len(counts.lines) > 100, "lines of ours were watched"


@pytest.mark.parametrize(("name", "path"), CASES)
def test_found_case_is_handled(name: str, path: Path, workers: Callable[[str], WorkerProcess]) -> None:
    report = workers(name).run(read(path))
    assert not report.kind, f"{report.kind} at {report.place}\n{report.text}"
    assert report.outcome

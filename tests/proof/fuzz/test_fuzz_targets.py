"""Each target for a moment, by a fixed seed: sound inputs load, and some mutations are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.proof.fuzz.campaign import Campaign
from tests.proof.fuzz.target import MODEL_TARGETS, find_target, target_names

NUM_INPUTS = 5
"""Sound ones."""
NUM_MUTATIONS = 16
PATIENCE = 300.0
"""Seconds of a case: where no kernel is compiled yet, mutations need some that no sound input needed before."""


@pytest.mark.parametrize("name", target_names())
def test_target_runs_and_refuses_and_finds_nothing(name: str, tmp_path: Path) -> None:
    target = find_target(name)
    # Some of the sound inputs, from all of them.
    step = -(-len(target.corpus()) // NUM_INPUTS)
    inputs = target.corpus()[::step]
    target = replace(target, corpus=lambda: inputs, limits=replace(target.limits, seconds=PATIENCE))
    num_cases = len(inputs) + NUM_MUTATIONS
    campaign = Campaign(
        target,
        seed=1,
        seconds=600,
        most_cases=num_cases,
        folder=tmp_path,
        shrink_seconds=0,
        is_guarded=name not in MODEL_TARGETS,
    )
    campaign.run()
    counts = campaign.counts
    assert not campaign.findings, [finding.text for finding, _ in campaign.findings.values()]
    assert counts.cases == num_cases
    is_refused = [outcome.startswith("refused") for outcome in counts.outcomes]
    assert any(is_refused) and not all(is_refused)
    assert len(counts.lines) > 100, "lines of ours were watched"

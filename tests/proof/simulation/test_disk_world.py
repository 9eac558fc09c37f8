"""What is kept on disk, through faults, kills and power cuts at every operation, by a simulation of all of it."""

import sys

import pytest

if sys.platform == "win32":
    pytest.skip("it simulates a POSIX file system", allow_module_level=True)

from localinfer.system import disk as calls
from tests.proof.simulation.disk_part import Part
from tests.proof.simulation.disk_world import PARTS, shrunk, simulate

_STEPS = 250


@pytest.mark.parametrize("part", PARTS)
def test_nothing_that_was_reported_as_saved_is_lost_or_wrong(part: type[Part]):
    assert simulate(_STEPS, 1, [part]) is None


def test_everything_at_once_keeps_what_was_saved():
    assert simulate(_STEPS, 2) is None


@pytest.mark.parametrize("name", ["sync", "sync_folder"])
def test_a_lost_sync_is_found_and_shrunk_to_few_steps(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, name, lambda of: None)
    found = simulate(20_000, 3, [part for part in PARTS if part.name == "sessions"])
    assert found is not None and "the power fails" in found
    assert found.count("\nstep ") <= 6


def test_shrinking_leaves_the_steps_that_matter(monkeypatch: pytest.MonkeyPatch):
    wrong = {3, 17}
    monkeypatch.setattr(
        "tests.proof.simulation.disk_world.failure_of",
        lambda seed, steps, parts: (ValueError(), []) if wrong <= set(steps) else None,
    )
    assert shrunk(0, list(range(40)), PARTS) == sorted(wrong)

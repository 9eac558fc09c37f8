"""The test of the test: bugs that are planted in the product are found by the simulation, and each can be planted."""

from pathlib import Path

import pytest

from tests.proof.simulation.plant import search
from tests.proof.simulation.planted import PLANTED
from tests.proof.simulation.planting import Planted

ROOT = Path(__file__).parents[3]
QUICK = ("shared-page-written", "snapshot-one-token-late", "preempted-without-its-last-token", "salt-of-prompts-only")
"""Of each kind one that takes about a second."""


def test_every_bug_can_be_planted_in_one_place():
    assert len(PLANTED) >= 20 and len({bug.name for bug in PLANTED}) == len(PLANTED)
    for bug in PLANTED:
        source = (ROOT / f"{bug.module.replace('.', '/')}.py").read_text()
        assert source.count(bug.old) == 1, f"{bug.name} has to be written anew: its place in {bug.module} has changed"
        compile(source.replace(bug.old, bug.new), bug.module, "exec")


@pytest.mark.parametrize("bug", [bug for bug in PLANTED if bug.name in QUICK], ids=lambda bug: bug.name)
def test_planted_bug_is_found(bug: Planted):
    pytest.importorskip("resource", reason="the time of a search is bounded as POSIX systems do")
    assert search(bug, seconds=60).error is not None, f"nothing was noticed of {bug.what}"

"""The simulated operations of models whose caches hold more than pages: sliding-window blocks, recurrent states."""

import pytest

from tests.proof.simulation.test_simulated_engine import simulate


@pytest.mark.parametrize("model", ["window", "hybrid"])
def test_nothing_simulated_is_ever_wrong_of_windows_and_states(model: str) -> None:
    counts = simulate(model).counts
    for name in ("preemptions", "cached_tokens", "evicted_tokens", "drafted", "read_pages", "died", "loaded"):
        assert counts[name] > 0, name
    assert model != "hybrid" or (counts["snapshot_hits"] > 0 and counts["read_states"] > 0)

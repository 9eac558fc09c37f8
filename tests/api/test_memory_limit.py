"""`memory_limit` is checked before weights are read, and what it leaves is all that keys and values may take."""

from dataclasses import replace

import pytest

import localinfer
from localinfer.errors import OutOfMemoryError, RequestError
from localinfer.load_options import model_path
from localinfer.memory_limit import keep_within
from localinfer.memory_plan import MemoryPlan, plan_file
from localinfer.models.load.weights import CpuWeights
from tests.inside import engine_of

MB = 10**6


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    return plan_file(model_path(None))


@pytest.mark.parametrize(("context", "way_out"), [(None, "raise memory_limit"), (1024, "largest context_length")])
def test_what_does_not_fit_is_refused_before_weights_are_read(
    plan: MemoryPlan, context: int | None, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuWeights, "linear", lambda *_: pytest.fail("weights are read"))
    limit = 30 * MB if context is None else plan.total_bytes(900)
    with pytest.raises(OutOfMemoryError, match=f"memory_limit is {-(-limit // MB)} MB.*{way_out}"):
        localinfer.load(threads=1, memory_limit=limit, context_length=context)


def test_the_context_is_reduced_and_the_cache_is_bounded(plan: MemoryPlan) -> None:
    limit = plan.total_bytes(700)
    with localinfer.load(threads=1, memory_limit=limit, speculation=None) as llm:
        assert llm.context_length == plan.largest_context(plan.kv_bytes(700)) == 704
        assert engine_of(llm).pool.max_bytes == limit - plan.fixed_bytes
        # The whole context fits what is left.
        assert llm.complete([3] * 690, max_tokens=8, ignore_eos=True).stats.completion_tokens == 8
    with localinfer.load(threads=1, memory_limit=limit, kv_memory=MB, speculation=None) as llm:
        assert (llm.context_length, engine_of(llm).pool.max_bytes) == (1024, MB)


def test_a_limit_beyond_the_machine_leaves_the_usual_cache(plan: MemoryPlan) -> None:
    with localinfer.load(threads=1, memory_limit=1 << 50, speculation=None) as llm:
        assert llm.context_length == 1024
        assert engine_of(llm).pool.max_bytes <= 8 << 30


def test_a_draft_model_gets_its_share(plan: MemoryPlan) -> None:
    both = replace(plan, beside=plan)
    limit = both.total_bytes(700)
    budget = keep_within(both, limit, 1024, is_requested=False)
    assert budget.context_length == 704
    assert budget.kv_memory is not None and budget.draft_kv_memory is not None
    assert abs(budget.kv_memory - budget.draft_kv_memory) <= 1
    assert budget.kv_memory + budget.draft_kv_memory == limit - both.fixed_bytes
    demo = model_path(None)
    with localinfer.load(threads=1, memory_limit=limit, draft=demo) as llm:
        assert llm.context_length == 704
        assert llm.complete([3] * 600, max_tokens=8, ignore_eos=True).stats.completion_tokens == 8


def test_a_window_bounds_what_a_context_takes(plan: MemoryPlan) -> None:
    trained = replace(plan, config=replace(plan.config, context_length=1 << 20))
    limit = plan.fixed_bytes + trained.kv_bytes(2048)
    assert keep_within(trained, limit, 1 << 20, is_requested=True, kv_window=512).context_length == 1 << 20
    with pytest.raises(OutOfMemoryError):
        keep_within(trained, limit, 1 << 20, is_requested=True)


@pytest.mark.parametrize("value", [0, -1, "4 GB", 1.5, True])
def test_a_limit_is_a_number_of_bytes(value: object) -> None:
    with pytest.raises(RequestError, match="memory_limit is"):
        localinfer.load(memory_limit=value)  # type: ignore[arg-type]

"""`memory_limit` is checked before weights are read, and what it leaves is all that keys and values may take."""

import subprocess
import sys
from dataclasses import replace

import pytest

import localinfer
from localinfer.errors import OutOfMemoryError, RequestError
from localinfer.loading.memory.limit import keep_within
from localinfer.loading.memory.plan import MemoryPlan, plan_file
from localinfer.loading.options import model_path
from localinfer.models.load.weights import CpuWeights
from tests.kernels.subprocesses import environment
from tests.support.inside import engine_of
from tests.support.limits import seconds

MB = 10**6


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    return plan_file(model_path(None))


@pytest.mark.parametrize(("context", "way_out"), [(None, "raise memory_limit"), (1024, "largest context_length")])
def test_what_does_not_fit_is_refused_before_weights_are_read(
    plan: MemoryPlan, context: int | None, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuWeights, "linear", lambda *_: pytest.fail("weights are read"))
    limit = 30 * MB if context is None else plan.total_bytes(900) + plan.growth_bytes(1024)
    with pytest.raises(OutOfMemoryError, match=f"memory_limit is {-(-limit // MB)} MB.*{way_out}"):
        localinfer.load(threads=1, memory_limit=limit, context_length=context)


def test_the_context_is_reduced_and_the_cache_is_bounded(plan: MemoryPlan) -> None:
    limit = plan.total_bytes(700) + plan.growth_bytes(1024)
    with localinfer.load(threads=1, memory_limit=limit, speculation=None) as llm:
        assert llm.context_length == plan.largest_context(plan.kv_bytes(700)) == 704
        assert engine_of(llm).pool.max_bytes == limit - plan.fixed_bytes - plan.growth_bytes(1024)
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
    limit = both.total_bytes(700) + both.growth_bytes(1024)
    budget = keep_within(both, limit, 1024, is_requested=False)
    assert budget.context_length == 704
    assert budget.kv_memory is not None and budget.draft_kv_memory is not None
    assert abs(budget.kv_memory - budget.draft_kv_memory) <= 1
    assert budget.kv_memory + budget.draft_kv_memory == limit - both.fixed_bytes - both.growth_bytes(1024)
    demo = model_path(None)
    with localinfer.load(threads=1, memory_limit=limit, draft=demo) as llm:
        assert llm.context_length == 704
        assert llm.complete([3] * 600, max_tokens=8, ignore_eos=True).stats.completion_tokens == 8


def test_a_window_bounds_what_a_context_takes(plan: MemoryPlan) -> None:
    trained = replace(plan, config=replace(plan.config, context_length=1 << 20))
    limit = plan.fixed_bytes + trained.growth_bytes(1 << 20) + trained.kv_bytes(2048)
    kept = replace(trained, kv_tokens=512)
    assert keep_within(kept, limit, 1 << 20, is_requested=True).context_length == 1 << 20
    with pytest.raises(OutOfMemoryError):
        keep_within(trained, limit, 1 << 20, is_requested=True)


UNDER_LIMIT = """
import os, random, sys, threading
import jinja2, llvmlite.binding, numpy, psutil, tokenizers
import localinfer, localinfer.loading.build, localinfer.loading.memory.plan

def rss():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def text(length):
    return [rng.randrange(300, 4000) for _ in range(length)]

def read():
    stream = llm.stream(text(400), max_tokens=12, ignore_eos=True)
    for event in stream:
        sizes.append(rss() - before)
    reasons.append(event.finish_reason)

limit, before, rng, sizes, reasons = int(sys.argv[1]), rss(), random.Random(1), [], []
llm = localinfer.load(device="cpu", threads=2, memory_limit=limit)
for event in llm.stream(text(900), ignore_eos=True):
    sizes.append(rss() - before)
readers = [threading.Thread(target=read) for _ in range(16)]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
llm.embed(text(900))
llm.complete("x", max_tokens=8, constraint=localinfer.JsonObject())
sizes.append(rss() - before)
print(max(sizes) <= limit, set(reasons), len(reasons), max(sizes), llm._engine.pool.allocated_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what a process takes is read from /proc")
def test_a_long_text_and_many_streams_stay_under_the_limit(plan: MemoryPlan) -> None:
    limit = plan.total_bytes(512) + plan.growth_bytes(1024) + 8 * MB
    done = subprocess.run(
        [sys.executable, "-c", UNDER_LIMIT, str(limit)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    holds, reasons, rest = done.stdout.split(" ", 2)
    assert (holds, reasons, rest.split()[0]) == ("True", "{'length'}", "16"), (done.stdout, limit)


def test_a_cache_that_may_not_grow_says_so_in_the_stream(plan: MemoryPlan) -> None:
    limit = plan.total_bytes(512) + plan.growth_bytes(1024)
    with localinfer.load(threads=1, memory_limit=limit, context_length=512, speculation=None) as llm:
        pool = engine_of(llm).pool
        assert pool.max_bytes is not None
        held = pool.acquire(pool.max_bytes // pool.page_bytes - 4)
        stream = llm.stream([3] * 90, max_tokens=400, ignore_eos=True)
        events = list(stream)
        assert events[-1].finish_reason == "length" and 30 < len(events) < 60
        assert "memory_limit" in stream.stats.notices[0]
        with pytest.raises(OutOfMemoryError, match="memory_limit"):
            llm.complete([4] * 200, max_tokens=4)
        pool.release(held)
        assert llm.complete([4] * 200, max_tokens=4, ignore_eos=True).stats.completion_tokens == 4


@pytest.mark.parametrize("value", [0, -1, "4 GB", 1.5, True])
def test_a_limit_is_a_number_of_bytes(value: object) -> None:
    with pytest.raises(RequestError, match="memory_limit is"):
        localinfer.load(memory_limit=value)  # type: ignore[arg-type]

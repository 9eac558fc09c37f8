"""Real models with recurrent layers: bits warm are those of a cold start, through every feature of the cache."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.apps.bench.measured_model import MeasuredModel
from localinfer.engine.engine import Engine
from localinfer.engine.speculation.draft_model import DraftModel
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.generation.stream import Completion
from localinfer.llm import LLM
from localinfer.models.load.loader import load_model
from localinfer.storage.page_store import Rejection
from tests.engine.generations import PARAMS
from tests.engine.speculation.test_speculation import speculation
from tests.kernels.subprocesses import start
from tests.models.arch_models import skeletons, write_skeleton
from tests.support.inside import engine_of, model_of

OPTIONS = {"temperature": 0.0, "ignore_eos": True, "logprobs": 1}
CONTEXT = 4096


@pytest.fixture(scope="module", params=["qwen35-hybrid", "lfm2-hybrid"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid with room for long texts."""
    return hybrid(tmp_path_factory.mktemp("hybrid"), request.param)


def hybrid(folder: Path, name: str) -> Path:
    skeleton = deepcopy(skeletons()[name])
    for setting in skeleton["kv"]:
        if setting[0].endswith("context_length"):
            setting[3] = CONTEXT
    write_skeleton(skeleton, folder / f"{name}.gguf")
    return folder / f"{name}.gguf"


def loaded(path: Path, **options: Any) -> LLM:
    return localinfer.load(path, threads=1, **{"speculation": None, "disk_cache": False, **options})


def answer(llm: LLM, prompt: list[int], count: int = 12, **options: Any) -> Completion:
    return llm.complete(prompt, max_tokens=count, **{**OPTIONS, **options})  # type: ignore[arg-type]


def ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 90, count).tolist()
    return found


@pytest.fixture(scope="module")
def cold(path: Path) -> Iterator[LLM]:
    with loaded(path) as llm:
        yield llm


def check(cold: LLM, llm: LLM, prompt: list[int], cached: int | None, count: int = 12, **options: Any) -> Completion:
    """An answer as cold as it can be, compared to the last bit of every log probability."""
    cold.clear_cache()
    wanted, found = answer(cold, prompt, count, **options), answer(llm, prompt, count, **options)
    assert found.token_ids == wanted.token_ids and found.logprobs == wanted.logprobs
    assert wanted.stats.cached_tokens == 0 and cached in (None, found.stats.cached_tokens)
    return found


def test_long_chat_computes_what_is_new_and_at_most_one_step_of_the_grid(path: Path, cold: LLM, tmp_path: Path):
    disk = {"disk_cache": True, "disk_cache_folder": tmp_path / "disk"}
    first = ids(2000)
    with loaded(path, **disk) as llm:
        reply = check(cold, llm, first, 0, 30).token_ids
        second = [*first, *reply, *ids(40, 1)]
        check(cold, llm, second, 2029)
        check(cold, llm, [*first, *reply, *ids(50, 2)], 2029)
        check(cold, llm, first, 1999, temperature=1.0, seed=5)
        middle = check(cold, llm, [*first[:1500], *ids(30, 3)], None)
        assert 1500 - middle.stats.cached_tokens <= 512
        stats = llm.snapshot_stats
        assert stats is not None and stats.grid >= 1 and middle.stats.state_snapshots == stats.held
        with engine_of(llm).exclusive_cache() as cache:
            assert stats.grid_bytes <= 0.15 * cache.pool.held_bytes
        llm.save_session(tmp_path / "session")
    with loaded(path, **disk) as llm:
        check(cold, llm, [*second, 3], len(second) - 1)
        check(cold, llm, [*first, *reply, *ids(50, 4)], 2029)
    with loaded(path) as llm:
        llm.load_session(tmp_path / "session")
        check(cold, llm, [*first[:1500], *ids(30, 3), *ids(9)], 1529)
    # What is damaged is computed again.
    states = list((tmp_path / "disk").rglob("*.state"))
    assert states
    for state in states:
        content = state.read_bytes()
        state.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with loaded(path, **disk) as llm:
        assert check(cold, llm, second, 0).stats.cache_miss is not None
        assert llm._disk is not None and set(llm._disk.snapshot_counters.rejected) == {Rejection.ALTERED}


def test_drafts_and_neighbours_change_no_bit(path: Path, cold: LLM):
    prompt = ids(60)
    engine = Engine(model_of(cold), speculation=speculation(NgramDrafter()))
    drafter = DraftModel(load_model(path, threads=1), target_vocab_size=engine.vocab_size)
    by_model = Engine(model_of(cold), speculation=speculation(None, drafter))
    for params in PARAMS:
        wanted = [event.token_id for event in Engine(model_of(cold)).generate(prompt, params, max_tokens=60)]
        wrong = [token if index % 6 else 5 for index, token in enumerate(wanted)]
        generation = engine.generate(prompt, params, max_tokens=60, prediction=wrong)
        assert [event.token_id for event in generation] == wanted
        record = generation.record.speculation
        assert record is not None and sum(record.drafted) > sum(record.accepted) > 10
        # From the states after the reply, which the last log was settled for.
        longer = [*prompt, *wanted, 4]
        again = engine.generate(longer, params, max_tokens=8)
        fresh = Engine(model_of(cold)).generate(longer, params, max_tokens=8)
        assert list(again) == list(fresh) and again.record.cached_tokens >= 100
        drafted = by_model.generate(prompt, params, max_tokens=60)
        assert [event.token_id for event in drafted] == wanted
        record = drafted.record.speculation
        assert record is not None and sum(record.accepted) > 10 and not record.all_notices
        streams = [engine.generate(ids(30 + seed, seed), params, max_tokens=12) for seed in range(7)]
        beside = engine.generate(prompt, params, max_tokens=12)
        rounds = list(zip(beside, *streams, strict=True))
        assert [events[0].token_id for events in rounds] == wanted[:12]
        for seed in range(7):
            alone = Engine(model_of(cold)).generate(ids(30 + seed, seed), params, max_tokens=12)
            assert [events[1 + seed] for events in rounds] == list(alone)
    drafter.close()


def test_what_was_evicted_or_grows_past_the_context_is_computed_again(path: Path, cold: LLM):
    pool = engine_of(cold).pool
    memory = 40 * pool.page_bytes + 6 * pool.states.slot_bytes
    with loaded(path, kv_memory=memory) as llm:
        for seed in (1, 2, 3, 1, 2, 3):
            check(cold, llm, ids(600, seed), None)
        assert engine_of(llm).pool.allocated_bytes <= memory
        stats = llm.snapshot_stats
        assert stats is not None and stats.evicted > 3
    with loaded(path, context_length=64) as llm, loaded(path, context_length=64) as other:
        shifted = [answer(one, ids(20), 100, context_shift=True) for one in (llm, other)]
        again = answer(llm, ids(20), 100, context_shift=True)
        assert shifted[0].stats.dropped_tokens > 0
        assert again.token_ids == shifted[0].token_ids == shifted[1].token_ids


def test_measuring_may_go_back_anywhere(path: Path):
    tokens = ids(200)
    with MeasuredModel(path, threads=1) as model:
        model.compute(0, tokens)
        again = model.compute(60, tokens[60:100]).copy()
        assert (again == model.compute(60, tokens[60:100])).all()
        assert (again == model.compute(0, tokens[:100])).all()


KILLED = """
import time
import localinfer
llm = localinfer.load({path!r}, threads=1, speculation=None, disk_cache=True, disk_cache_folder={folder!r})
reply = llm.complete(list(range(3, 83)) * 3, max_tokens=32, temperature=0, ignore_eos=True)
llm._disk.flush()
print(*reply.token_ids, flush=True)
time.sleep(600)
"""


def test_killed_process_leaves_snapshots(path: Path, cold: LLM, tmp_path: Path):
    process = start(KILLED.format(path=str(path), folder=str(tmp_path)))
    assert process.stdout is not None
    reply = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.communicate()
    with loaded(path, disk_cache=True, disk_cache_folder=tmp_path) as llm:
        prompt = [*range(3, 83), *range(3, 83), *range(3, 83), *reply, 5, 6]
        check(cold, llm, prompt, 240 + 31)

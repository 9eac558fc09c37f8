"""Every architecture with recurrent layers, through the public API: warm bits are cold bits, whatever came between."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest

import localinfer
from localinfer.engine.cache.sequence import forward
from localinfer.engine.speculation.draft_model import DraftModel
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.generation.stream import Completion
from localinfer.llm import LLM
from localinfer.models.load.loader import load_model
from tests.engine.speculation.test_speculation import speculation
from tests.models.arch_models import skeletons, write_skeleton
from tests.support.inside import engine_of

# One of each kind of state and page; what shares all of its code with another is left out.
NAMES = (
    "mamba-falcon mamba2-recurrent rwkv7-recurrent lfm2moe-hybrid granitehybrid-moe"
    " nemotron_h-hybrid nemotron_h_moe-hybrid falcon-h1-hybrid jamba-hybrid qwen35moe-mtp qwen3next-hybrid"
    " qwen3next-legacy kimi-linear-hybrid bailingmoe3-mtp"
).split()
WITHOUT_PAGES = {"mamba-falcon", "mamba2-recurrent", "rwkv7-recurrent"}
KV_TYPES = ("f16", "q8_0", "q4_0", "q8_0/q4_0")
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 1}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "logprobs": 1}


def test_none_is_forgotten():
    """Each architecture with recurrent layers that the fixtures know has a model here, or in the other tests."""
    settings = (".ssm.", ".shortconv.", ".wkv.")
    recurrent = {
        skeleton["arch"]
        for skeleton in skeletons().values()
        if any(setting in key[0] for key in skeleton["kv"] for setting in settings)
    }
    here = {skeletons()[name]["arch"] for name in (*NAMES, "qwen35-hybrid", "lfm2-hybrid")}
    assert here == recurrent


@pytest.fixture(scope="module", params=enumerate(NAMES), ids=NAMES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for a long text; every one of them keeps another type of keys and values."""
    index, name = request.param
    skeleton = deepcopy(skeletons()[name])
    for setting in skeleton["kv"]:
        if setting[0].endswith("context_length"):
            setting[3] = 1024
    found = tmp_path_factory.mktemp("recurrent") / f"{name}.{KV_TYPES[index % len(KV_TYPES)].replace('/', '-')}.gguf"
    write_skeleton(skeleton, found)
    return found


def kv_type_of(path: Path) -> str:
    return path.suffixes[-2][1:].replace("-", "/")


def loaded(path: Path, **options: Any) -> LLM:
    return localinfer.load(path, **{"threads": 1, "kv_type": kv_type_of(path), "speculation": None, **options})


@pytest.fixture(scope="module")
def cold(path: Path) -> Iterator[LLM]:
    with loaded(path) as llm:
        yield llm


def ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 90, count).tolist()
    return found


_answers: WeakKeyDictionary[LLM, dict[str, Completion]] = WeakKeyDictionary()


def cold_answer(cold: LLM, prompt: list[int], **asked: Any) -> Completion:
    """What a model says that has computed nothing of the prompt before; asked once for each question."""
    known, question = _answers.setdefault(cold, {}), repr((prompt, asked))
    if question not in known:
        cold.clear_cache()
        known[question] = cold.complete(prompt, **asked)
        assert known[question].stats.cached_tokens == 0
    return known[question]


def check(cold: LLM, llm: LLM, prompt: list[int], cached: int | None = None, **options: Any) -> Completion:
    """An answer equal to a cold one, to the last bit of every log probability."""
    asked = {"max_tokens": 8, **OPTIONS, **options}
    found = llm.complete(prompt, **asked)
    wanted = cold_answer(cold, prompt, **{name: value for name, value in asked.items() if name != "prediction"})
    assert found.token_ids == wanted.token_ids and found.logprobs == wanted.logprobs
    assert cached in (None, found.stats.cached_tokens)
    return found


def test_bits_are_those_of_a_cold_start(path: Path, cold: LLM, tmp_path: Path):
    first = ids(150)
    disk = {"disk_cache": True, "disk_cache_folder": tmp_path}
    with loaded(path, threads=2, **disk) as llm:
        reply = check(cold, llm, first, 0, max_tokens=24).token_ids
        second = [*first, *reply, *ids(20, 1)]
        check(cold, llm, second, 173)
        check(cold, llm, [*first, *reply, *ids(20, 2)], 173)
        check(cold, llm, first, 149, **SEEDED)
        check(cold, llm, [*first[:70], *ids(9, 3)])
        assert check(cold, llm, [*first[:70], *ids(9, 4)]).stats.cached_tokens == 70
        many = llm.complete_many(first, n=2, max_tokens=8, **SEEDED)
        for index, one in enumerate(many):
            wanted = cold_answer(cold, first, max_tokens=8, **{**SEEDED, "seed": 5 + index})
            assert one.token_ids == wanted.token_ids and one.logprobs == wanted.logprobs
        streams = [llm.stream(ids(30 + seed, seed), max_tokens=8, **OPTIONS) for seed in range(7)]
        rounds = list(zip(*streams, llm.stream(second, max_tokens=8, **OPTIONS), strict=True))
        for index, prompt in enumerate([*(ids(30 + seed, seed) for seed in range(7)), second]):
            wanted = cold_answer(cold, prompt, max_tokens=8, **OPTIONS)
            assert [events[index].token_id for events in rounds] == wanted.token_ids
            assert [events[index].logprobs for events in rounds] == wanted.logprobs
        stats = llm.snapshot_stats
        assert stats is not None and stats.held == stats.taken - stats.evicted > 4 and stats.hits > 6
        llm.save_session(tmp_path / "session", second)
    with loaded(path, **disk) as llm:
        check(cold, llm, [*second, 3], len(second) - 1)
    with loaded(path) as llm:
        assert llm.load_session(tmp_path / "session") == second[:-1]
        check(cold, llm, [*second, 3], len(second) - 1)
        page_bytes = engine_of(llm).pool.page_bytes
    assert (page_bytes == 0) == (path.name.split(".")[0] in WITHOUT_PAGES)


def test_chunks_drafts_and_little_memory_change_no_bit(path: Path, cold: LLM):
    prompt = ids(100)
    wanted, parts = cold.logits(prompt), []
    engine = engine_of(cold)
    with engine.exclusive_cache() as cache:
        sequence = cache.open()
        for start in range(0, 100, 7):
            chunk = np.array(prompt[start : start + 7], np.int32)
            rows = np.arange(chunk.size, dtype=np.int32)
            parts.append(forward(engine.program.run, (sequence,), (chunk,), rows).copy())
        sequence.close()
    assert (np.concatenate(parts).view(np.uint32) == wanted.view(np.uint32)).all()
    kv_type = kv_type_of(path)
    drafter = DraftModel(load_model(path, threads=1, kv_type=kv_type), target_vocab_size=cold.vocab_size)
    for drafting in (speculation(NgramDrafter()), speculation(None, drafter)):
        with LLM(load_model(path, threads=1, kv_type=kv_type), speculation=drafting) as llm:
            for options in (OPTIONS, SEEDED):
                reply = cold_answer(cold, prompt, max_tokens=24, **options).token_ids
                wrong = [token if index % 6 else 5 for index, token in enumerate(reply)]
                drafted = check(cold, llm, prompt, max_tokens=24, prediction=wrong, **options)
                assert drafted.token_ids == reply and drafted.stats.accepted_tokens > 4
                check(cold, llm, [*prompt, *reply, 4])
    pool = engine.pool
    memory = 12 * pool.page_bytes + 4 * pool.states.slot_bytes
    with loaded(path, kv_memory=memory) as llm:
        for seed in (1, 2, 3, 1, 2):
            check(cold, llm, ids(200, seed))
        assert engine_of(llm).pool.allocated_bytes <= memory
        stats = llm.snapshot_stats
        assert stats is not None and stats.evicted > 0


def test_window_is_exact_until_it_evicts_and_leaves_nothing_else_behind(path: Path, cold: LLM):
    with loaded(path, kv_window=128) as llm:
        has_pages = engine_of(llm).pool.page_bytes > 0
        prompt = ids(100)
        check(cold, llm, prompt, 0)
        check(cold, llm, prompt, 99)
        long = [*prompt, *ids(250, 1)]
        if has_pages:
            # Which pages it drops, it may choose by what was cached.
            llm.complete(long, max_tokens=40, **OPTIONS)
        else:
            check(cold, llm, long, 99, max_tokens=40)
            check(cold, llm, long, 349)
        check(cold, llm, [*prompt[:90], *ids(20, 2)])
        check(cold, llm, prompt, 99)

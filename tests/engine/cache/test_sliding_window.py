"""Windowed layers keep what going on needs and no more: the rule, the memory it bounds, and what is found again."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.apps.bench.measured_model import MeasuredModel
from localinfer.engine.cache.block_pool import PagePool, SlidingWindow
from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.llm import LLM
from localinfer.models.decoder.decoder import kv_layer_shapes
from localinfer.models.load import loader
from tests.engine.fakes import FakeLayout
from tests.models.arch_models import build_model, skeletons, write_skeleton
from tests.support.inside import engine_of

RULE = SlidingWindow(tokens=10, page_tokens=4)
LAYOUT = FakeLayout(page_tokens=4, page_bytes=64, windowed_bytes=128, window=10)
BATCH = 8


def usable(windowed: str, length: int, rule: SlidingWindow = RULE) -> int:
    return rule.usable_length(np.array([mark == "x" for mark in windowed], np.bool_), length)


PLACES = {
    "xxxxx": {20: 20},
    "..xxx": {20: 20, 17: 17, 16: 0},
    "...xx": {20: 0},
    "xx...": {20: 8},
    "xx": {7: 7},
    ".xxx.": {20: 16},
    ".xxx.x": {22: 16},
    "x.xxxx.xx": {33: 24},
    "....": {16: 0},
    "": {0: 0},
}
"""By which pages have their windowed part: where a text of so many tokens goes on from."""


@pytest.mark.parametrize(
    ("windowed", "length", "wanted"), [(parts, *place) for parts, places in PLACES.items() for place in places.items()]
)
def test_sequence_goes_on_from_the_longest_place_whose_whole_window_is_there(windowed: str, length: int, wanted: int):
    assert usable(windowed, length) == wanted
    seen = [position // 4 for position in range(max(0, wanted - 9), wanted)]
    assert all(windowed[page] == "x" for page in seen)


def test_longest_place_is_what_a_search_finds():
    generator = np.random.default_rng(0)
    for _ in range(3000):
        rule = SlidingWindow(int(generator.integers(1, 20)), 4)
        windowed = generator.random(generator.integers(1, 14)) < generator.choice([0.5, 0.8, 0.95])
        length = int(generator.integers(4 * windowed.size - 3, 4 * windowed.size + 1))
        places = range(length + 1)
        good = [p for p in places if all(windowed[q // 4] for q in range(max(0, p - rule.tokens + 1), p))]
        # A page that is gone on in is copied with all its parts.
        good = [p for p in good if p % 4 == 0 or windowed[p // 4]]
        found = rule.usable_length(windowed, length)
        assert found in good and found >= max(p for p in good if p % 4 == 0 or p == length)


def test_what_is_kept_suffices_for_the_place_and_the_page_before_it():
    for window in range(1, 20):
        rule = SlidingWindow(window, 4)
        for length in range(60):
            kept = rule.kept(15, length)
            for back in range(min(length, 4) + 1):
                assert rule.usable_length(kept[: -(-(length - back) // 4)], length - back) == length - back
            assert kept[: -(-length // 4)].sum() <= -(-window // 4) + 2


def test_model_without_windows_keeps_everything():
    rule = SlidingWindow(0, 4)
    assert (
        rule.kept(5, 20).all() and rule.usable_length(np.zeros(5, np.bool_), 20) == 20 and rule.most_pages(20, 1) == 5
    )


def test_long_text_holds_as_many_windowed_parts_as_the_rule_says():
    cache = PrefixCache(LAYOUT, max_bytes=None, context_length=4000, batch_tokens=BATCH)
    ids, pool = np.arange(3000, dtype=np.int32), cache.pool
    sequence, use = cache.admit(ids[:2000], CacheHints(system_tokens=100)).sequence, CacheHints(system_tokens=100)
    while sequence.length < 2000:
        sequence.reserve(sequence.length + BATCH)
        sequence.commit(sequence.length + BATCH)
        assert pool.num_windowed <= 3 * 5 + 3
        cache.publish(sequence, ids, use)
    for length in range(2001, 3001):
        sequence.reserve(length)
        sequence.commit(length)
        assert pool.num_windowed <= 3 * 5 + 2
    assert pool.num_windowed <= pool.sliding.most_pages(3000, BATCH)
    cache.retire(sequence, ids, use)
    # Before the system prefix's end, the prompt's and the text's.
    assert pool.num_windowed <= 3 * 5 and pool.num_pages - pool.num_free_pages == 750
    held = cache.tree.match(ids).windowed
    assert [cache.tree.match(ids[:length]).usable for length in (100, 2000, 3000)] == [100, 2000, 3000]
    assert not held[30:490].any() and cache.tree.match(ids[:1500]).usable == 100


def test_memory_that_one_kind_has_over_goes_to_the_other():
    # Room for 32 whole pages; a long text takes far more pages than windowed parts.
    cache = PrefixCache(LAYOUT, max_bytes=32 * 192, context_length=4000, batch_tokens=BATCH)
    for seed in range(12):
        ids = np.random.default_rng(seed).integers(0, 99, 8).astype(np.int32)
        fill(cache, ids)
    assert cache.pool.allocated_bytes > 20 * 192 and cache.pool.num_windowed == 24
    long = np.arange(200, dtype=np.int32)
    cache.check_fits(200)
    fill(cache, long)
    assert cache.pool.num_pages - cache.pool.num_free_pages >= 50 and cache.pool.allocated_bytes <= 32 * 192
    assert cache.tree.match(long).usable == 200
    for seed in range(12):
        fill(cache, np.random.default_rng(seed).integers(0, 99, 8).astype(np.int32))
    assert cache.pool.num_windowed >= 24 and cache.pool.allocated_bytes <= 32 * 192


def fill(cache: PrefixCache, ids: np.ndarray) -> None:
    """Compute a text and leave it to the cache."""
    sequence = cache.admit(ids, CacheHints()).sequence
    while sequence.length < ids.size:
        length = min(ids.size, sequence.length + BATCH)
        sequence.reserve(length)
        sequence.commit(length)
    cache.retire(sequence, ids, CacheHints())


def test_copies_and_forks_carry_their_windowed_parts():
    pool = PagePool(LAYOUT)
    sequence = SequenceCache(pool, max_length=100)
    sequence.reserve(30)
    sequence.commit(30)
    for page in sequence.pages.tolist():
        pool.windowed_view(page)[:] = page
    twin = sequence.fork()
    twin.reserve(31)
    copied, original = int(twin.pages[-1]), int(sequence.pages[-1])
    assert copied != original and (pool.windowed_view(copied) == original).all()
    assert twin.windowed.tolist() == [False] * 4 + [True] * 4 and sequence.windowed.all()
    sequence.close()
    assert pool.num_windowed == 4
    twin.close()
    assert pool.num_windowed == pool.num_pages - pool.num_free_pages == 0


OPTIONS = {"temperature": 1.5, "seed": 3, "ignore_eos": True}


def loaded(path: Path, **options: object) -> LLM:
    return localinfer.load(path, threads=1, speculation=None, **options)  # type: ignore[arg-type]


def answer(llm: LLM, prompt: list[int], count: int) -> localinfer.Completion:
    return llm.complete(prompt, max_tokens=count, **OPTIONS)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "kv_type"), [("gemma3-gqa", "q8_0/q4_0"), ("gpt-oss-moe", "f16")])
def test_texts_are_the_same_warm_edited_evicted_and_from_disk(name: str, kv_type: str, tmp_path: Path):
    path = build_model(tmp_path, name).path
    disk = {"disk_cache": True, "disk_cache_folder": tmp_path / "disk"}
    with loaded(path, kv_type=kv_type) as cold:

        def check(llm: LLM, prompt: list[int], cached: int, count: int = 6) -> localinfer.Completion:
            cold.clear_cache()
            wanted, found = answer(cold, prompt, count), answer(llm, prompt, count)
            assert found.token_ids == wanted.token_ids and found.stats.cached_tokens == cached
            return found

        first = np.random.default_rng(0).integers(0, cold.vocab_size, 130).tolist()
        with loaded(path, kv_type=kv_type, **disk) as llm:
            pool = engine_of(llm).pool
            assert pool.sliding.tokens == 32 and pool.windowed_bytes > 0
            second = [*first, *check(llm, first, 0, 40).token_ids[:-1], *range(5, 15)]
            check(llm, second, 130 + 39, 20)
            # Each place: before the prompt's end and the text's one page more than the window, and the last turn's.
            assert pool.num_windowed < pool.num_pages
            check(llm, first, 129)
            check(llm, [*second[:165], 7, 8], 165)
            edited = [*first[:80], 9, 9]
            miss = check(llm, edited, 0).stats.cache_miss
            assert miss is not None and "of tokens 0 to 80 the model's sliding-window layers keep nothing" in miss
            # Where texts part, more of them may.
            check(llm, [*first[:80], 7], 80)
        with loaded(path, kv_type=kv_type, **disk) as llm:
            check(llm, [*second, 1, 2], len(second))
            check(llm, [*edited, 3], len(edited))
            check(llm, [*first[:40], 1], 40)
    with loaded(path, kv_type=kv_type, kv_memory=8 * (pool.page_bytes + pool.windowed_bytes)) as llm:
        with loaded(path, kv_type=kv_type) as other:
            whole = answer(other, second, 6).token_ids
        assert answer(llm, second, 6).token_ids == whole
        for seed in range(3):
            answer(llm, np.random.default_rng(seed).integers(0, llm.vocab_size, 150).tolist(), 6)
        again = answer(llm, second, 6)
        assert again.token_ids == whole and again.stats.cache_miss is not None and "evicted" in again.stats.cache_miss


def test_session_file_carries_what_going_on_needs(tmp_path: Path):
    path = build_model(tmp_path, "gemma3-gqa").path
    with loaded(path) as llm:
        prompt = list(range(3, 100)) * 2
        reply = answer(llm, prompt, 10)
        llm.save_session(tmp_path / "session")
        longer = [*prompt, *reply.token_ids[:-1], 5]
        wanted = answer(llm, longer, 6).token_ids
        pool = engine_of(llm).pool
        num_pages = pool.num_pages_for(203)
        most = num_pages * pool.page_bytes + 4 * pool.windowed_bytes + 8000
        assert num_pages * pool.page_bytes < (tmp_path / "session").stat().st_size < most
    with loaded(path) as llm:
        llm.load_session(tmp_path / "session")
        again = answer(llm, longer, 6)
        assert again.token_ids == wanted and again.stats.cached_tokens == 203
        assert answer(llm, [*prompt[:60], 5], 6).stats.cached_tokens == 0


def test_speculation_goes_back_within_windowed_layers(tmp_path: Path):
    path = build_model(tmp_path, "gemma3-gqa").path
    prompt = [5, 6, 7, 8] * 40
    with loaded(path) as plain, localinfer.load(path, threads=1) as drafting:
        options = {**OPTIONS, "temperature": 0.4}
        wanted = plain.complete(prompt, max_tokens=60, **options)  # type: ignore[arg-type]
        assert drafting.complete(prompt, max_tokens=60, **options).token_ids == wanted.token_ids  # type: ignore[arg-type]


def windowed_everywhere(folder: Path) -> Path:
    """A model all of whose layers have a window, so that its pages hold nothing else."""
    skeleton = deepcopy(skeletons()["phi3-dense"])
    skeleton["kv"].append(["phi3.attention.sliding_window", "UINT32", None, 40])
    write_skeleton(skeleton, folder / "model.gguf")
    return folder / "model.gguf"


def test_model_whose_layers_all_have_windows_keeps_its_conversations(tmp_path: Path):
    path = windowed_everywhere(tmp_path)
    options = {"kv_memory": 1 << 20, "disk_cache": True, "disk_cache_folder": tmp_path / "disk"}
    prompt = np.random.default_rng(2).integers(0, 100, 150).tolist()
    with loaded(path) as cold:
        with loaded(path, **options) as llm:
            assert engine_of(llm).pool.page_bytes == 0
            first = answer(llm, prompt, 20)
            second = [*prompt, *first.token_ids[:-1], 7]
            wanted = answer(cold, second, 8).token_ids
            for seed in range(3, 9):
                answer(llm, np.random.default_rng(seed).integers(0, 100, 200).tolist(), 4)
            assert engine_of(llm).pool.allocated_bytes <= 1 << 20
            assert answer(llm, second, 8).token_ids == wanted
            llm.save_session(tmp_path / "session")
        with loaded(path, **options) as llm:
            again = answer(llm, second, 8)
            assert again.token_ids == wanted and again.stats.cached_tokens == len(second) - 1
        with loaded(path) as llm:
            llm.load_session(tmp_path / "session")
            assert answer(llm, second, 8).token_ids == wanted


@pytest.mark.parametrize("options", [{}, {"kv_window": 128}, {"kv_window": 128, "kv_type": "q8_0"}])
def test_pages_in_two_parts_change_no_text(options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = build_model(tmp_path, "gemma3-gqa").path
    prompt = np.random.default_rng(2).integers(0, 100, 190).tolist()
    with loaded(path, **options) as llm:
        assert engine_of(llm).pool.sliding.tokens == 32
        found = [answer(llm, prompt[:count], 50).token_ids for count in (190, 100, 120)]
        vector = llm.embed(prompt)
    monkeypatch.setattr(loader, "kv_layer_shapes", lambda config, **_: kv_layer_shapes(config))
    with loaded(path, **options) as llm:
        assert engine_of(llm).pool.sliding.tokens == 0
        assert found == [answer(llm, prompt[:count], 50).token_ids for count in (190, 100, 120)]
        assert (llm.embed(prompt) == vector).all()


def test_eviction_leaves_nothing_that_nobody_could_go_on_from():
    cache = PrefixCache(LAYOUT, max_bytes=None, context_length=4000, batch_tokens=BATCH)
    ids = np.arange(203, dtype=np.int32)
    fill(cache, ids[:103])
    fill(cache, ids)
    assert cache.tree.match(ids).usable == 203
    # One page is more than going on from the end needs.
    assert cache.tree.evict(1) == 1 and cache.tree.match(ids).usable == 200
    # Then all is of no use up to where the second turn began.
    assert cache.tree.evict(1) == 24
    assert cache.tree.match(ids).length == cache.tree.match(ids).usable == 104
    assert cache.tree.num_pages == 26 and cache.pool.num_windowed <= 5
    cache.tree.clear()
    assert cache.pool.num_windowed == cache.pool.num_pages - cache.pool.num_free_pages == 0


def test_measuring_may_go_back_anywhere(tmp_path: Path):
    path = build_model(tmp_path, "gemma3-gqa").path
    ids = np.random.default_rng(2).integers(0, 100, 200).tolist()
    with MeasuredModel(path, threads=1) as model:
        model.compute(0, ids)
        again = model.compute(60, ids[60:100]).copy()
        assert (again == model.compute(0, ids[:100])).all()


def test_prompts_at_once_that_part_where_nothing_is_kept_compute_what_they_share_at_most_twice():
    cache, use = PrefixCache(LAYOUT, max_bytes=None, context_length=100, batch_tokens=62), CacheHints()
    prompts = [np.array([*range(42), *range(50 + 20 * index, 70 + 20 * index)], np.int32) for index in range(4)]
    sequences = [cache.admit(prompt, use).sequence for prompt in prompts]
    found = []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        found.append(cache.extend(sequence, prompt))
        sequence.reserve(62)
        sequence.commit(62)
        cache.publish(sequence, prompt, use)
    assert found == [0, 0, 40, 40]

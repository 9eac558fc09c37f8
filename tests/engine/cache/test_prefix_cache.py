"""What one generation computed, the next does not compute again; and where it must, it is said why."""

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.engine.cache.prefix_tree import CachedPath
from localinfer.engine.cache.stats import CacheMiss
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.sampler import SamplingParams
from localinfer.engine.scheduler import Generation
from localinfer.errors import OutOfMemoryError
from tests.engine.fakes import PAGE_BYTES, ByteTokenizer, FakeModel, fake_model, hashed_logits
from tests.support.limits import seconds

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3)


def run(engine: Engine, prompt: list[int], count: int = 10, **options: object) -> tuple[list[int], Generation]:
    generation = engine.generate(prompt, SEEDED, max_tokens=count, **options)  # type: ignore[arg-type]
    return [event.token_id for event in generation], generation


def numbers(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 250, count).tolist()
    return ids


def computed_tokens(model: FakeModel) -> int:
    return sum(model.program.batch_sizes)


def test_same_prompt_again_computes_one_token_and_gives_the_same_text():
    model = fake_model()
    engine = Engine(model)
    cold, first = run(engine, numbers(23))
    before = computed_tokens(model)
    warm, second = run(engine, numbers(23))
    assert warm == cold
    assert (first.record.cached_tokens, second.record.cached_tokens) == (0, 22)
    assert computed_tokens(model) - before == 1 + 9


def test_ctrl_c_while_a_text_is_left_to_the_cache_frees_its_memory(monkeypatch: pytest.MonkeyPatch):
    engine = Engine(fake_model())
    cold, _ = run(engine, numbers(23))

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._cache.tree, "insert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine, numbers(23, seed=1))
    monkeypatch.undo()
    with engine.exclusive_cache() as cache:
        cache.clear()
    assert not engine.pool.counts.any() and run(engine, numbers(23))[0] == cold


@pytest.mark.parametrize("new_tokens", [1, 3, 4, 11])
def test_second_turn_computes_new_tokens_only(new_tokens: int):
    model = fake_model()
    engine = Engine(model)
    reply, _ = run(engine, numbers(13))
    prompt = numbers(13) + reply + numbers(new_tokens, seed=1)
    before = computed_tokens(model)
    warm, generation = run(engine, prompt, 1)
    # The last token of the reply was sampled, but never computed.
    assert computed_tokens(model) - before == new_tokens + 1
    assert generation.record.cached_tokens == 13 + len(reply) - 1 and generation.record.miss is None
    assert warm == run(Engine(fake_model()), prompt, 1)[0]


@pytest.mark.parametrize("shared", range(1, 14))
def test_text_after_any_shared_prefix_is_that_of_a_cold_run(shared: int):
    engine = Engine(fake_model())
    run(engine, numbers(14))
    prompt = numbers(14)[:shared] + numbers(9, seed=5)
    warm, generation = run(engine, prompt)
    assert warm == run(Engine(fake_model()), prompt)[0]
    assert generation.record.cached_tokens == shared


def test_text_is_the_same_after_eviction_and_computing_again():
    engine = Engine(fake_model(), kv_memory=10 * PAGE_BYTES)
    cold, _ = run(engine, numbers(20))
    run(engine, numbers(20, seed=1))
    evicted, generation = run(engine, numbers(20))
    assert generation.record.miss == CacheMiss("evicted", generation.record.cached_tokens)
    assert evicted == cold == run(engine, numbers(20))[0]
    with engine.exclusive_cache() as cache:
        assert cache.counters.misses["evicted"] == 1 and cache.tree.evicted_tokens > 0


def test_interrupted_prefill_keeps_what_it_computed():
    model = fake_model()
    engine = Engine(model)
    model.program.fails_at = {12}
    with pytest.raises(MemoryError):
        run(engine, numbers(20))
    model.program.fails_at = set()
    text, generation = run(engine, numbers(20))
    assert generation.record.cached_tokens == 10
    assert text == run(Engine(fake_model()), numbers(20))[0]


def test_cancelled_generation_keeps_what_it_computed():
    engine = Engine(fake_model())
    generation = engine.generate(numbers(9), SEEDED)
    reply = [next(generation).token_id for _ in range(5)]
    generation.close()
    assert run(engine, numbers(9) + reply + [1])[1].record.cached_tokens == 9 + 4


def test_generations_that_run_together_share_a_prompt():
    model = fake_model()
    engine = Engine(model)
    prompts = [numbers(42) + [index] for index in range(8)]
    generations = [engine.generate(prompt, SEEDED, max_tokens=4) for prompt in prompts]
    texts = list(zip(*(map(lambda event: event.token_id, generation) for generation in generations), strict=True))
    with engine.exclusive_cache() as cache:
        prefix = cache.tree.match(np.array(prompts[0][:40], np.int32))
        assert prefix.length == 40
        # The prompt's ten full pages once, and two more pages per conversation.
        assert cache.tree.num_pages == 10 + 8 * 2
    for index in range(8):
        alone = run(Engine(fake_model()), prompts[index], 4)[0]
        assert [row[index] for row in texts] == alone
    # One that has ended already leaves more than its full pages.
    assert sum(model.program.batch_sizes) <= 43 + 7 * 3 + 8 * 3


def test_threads_with_one_prompt_compute_little_of_it_twice():
    model = fake_model(context_length=600)
    engine = Engine(model)
    prompt = numbers(300)
    texts: dict[int, list[int]] = {}

    def generate(index: int) -> None:
        texts[index] = run(engine, [*prompt, index], 3)[0]

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds(15))
    assert computed_tokens(model) < 300 + 4 * 20
    assert texts == {index: run(Engine(fake_model(context_length=600)), [*prompt, index], 3)[0] for index in range(4)}


def test_prompt_that_can_never_fit_is_refused_at_once_with_both_numbers():
    engine = Engine(fake_model(), kv_memory=3 * PAGE_BYTES)
    with pytest.raises(OutOfMemoryError, match="13 tokens take 256 bytes of key-value cache, which may use 192"):
        engine.generate(numbers(13), SEEDED)
    with pytest.raises(OutOfMemoryError, match="13 tokens take 256 bytes"):
        engine.logits(numbers(13))


def test_cache_never_costs_a_sequence_the_memory_it_would_have_alone():
    engine = Engine(fake_model(), kv_memory=3 * PAGE_BYTES)
    run(engine, numbers(6), 4)
    text, generation = run(engine, numbers(6)[:5] + numbers(2, seed=1), 6)
    assert len(text) == 6 and generation.record.cached_tokens in (4, 5)


def test_a_paused_sequence_is_preempted_for_another_and_continues_with_the_same_tokens():
    engine = Engine(fake_model(), kv_memory=6 * PAGE_BYTES)
    paused = engine.generate(numbers(15), SEEDED, max_tokens=8)
    reply = [next(paused).token_id]
    other, _ = run(engine, numbers(15, seed=1), 8)
    assert other == run(Engine(fake_model()), numbers(15, seed=1), 8)[0]
    reply += [event.token_id for event in paused]
    assert reply == run(Engine(fake_model()), numbers(15), 8)[0]


@pytest.mark.parametrize(
    ("use", "kept"), [(CacheHints(), 0), (CacheHints(system_tokens=8), 8), (CacheHints(is_pinned=True), 11)]
)
def test_system_prefixes_and_pinned_texts_are_evicted_last(use: CacheHints, kept: int):
    engine = Engine(fake_model(), kv_memory=8 * PAGE_BYTES)
    run(engine, numbers(8), 4, cache_hints=use)
    for seed in range(1, 5):
        run(engine, numbers(16, seed), 1)
    with engine.exclusive_cache() as cache:
        assert cache.tree.match(np.array(numbers(8), np.int32)).length == min(kept, 8)


def test_misses_are_explained_by_the_first_difference_on_both_sides():
    engine = Engine(fake_model())
    old, new = list(b"system: 09:41. Be kind."), list(b"system: 09:42. Be kind.")
    nothing = run(engine, old)[1].record.miss
    assert nothing is not None and nothing.describe(None) == "nothing was cached yet"
    miss = run(engine, new)[1].record.miss
    assert miss == CacheMiss("different", 12, tuple(b"em: 09:4"), tuple(b"1. Be ki"), tuple(b"2. Be ki"))
    assert miss.describe(ByteTokenizer()) == (  # type: ignore[arg-type]
        "the text differs at token 12, after 'em: 09:4': cached '1. Be ki', now '2. Be ki'"
    )
    assert miss.describe(None).endswith("now [50, 46, 32, 66, 101, 32, 107, 105]")
    assert run(engine, new)[1].record.miss is None


def test_counters_add_up():
    engine = Engine(fake_model())
    for prompt in (numbers(10), numbers(10), numbers(5) + [7, 7], numbers(3, seed=9)):
        run(engine, prompt, 1)
    with engine.exclusive_cache() as cache:
        counters = cache.counters
        assert (counters.prompts, counters.hits, counters.prompt_tokens, counters.cached_tokens) == (4, 2, 30, 14)
        assert counters.misses == {"empty": 1, "different": 2}


class Shelf:
    """A tier that keeps token ids and puts pages back, as the disk does."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.stored: list[tuple[NDArray[np.int32], list[bytes]]] = []
        self.refusal: str | None = None
        self.evictions: list[int] = []

    def restore(self, token_ids: NDArray[np.int32], cached_tokens: int, salt: bytes) -> str | None:
        pool, tree = self.cache.pool, self.cache.tree
        for ids, contents in self.stored:
            pages = pool.acquire(len(contents))
            for page, content in zip(pages.tolist(), contents, strict=True):
                pool.view(page)[:] = np.frombuffer(content, np.uint8)
            tree.insert(ids, pages)
            pool.release(pages)
        return self.refusal

    def on_evict(self, path: CachedPath, kept_tokens: int) -> None:
        self.evictions.append(path.token_ids.size - kept_tokens)

    def on_idle(self, token_ids: NDArray[np.int32], salt: bytes) -> None:
        pool, tree = self.cache.pool, self.cache.tree
        match = tree.match(token_ids, salt)
        assert match.length == token_ids.size
        self.stored.append((token_ids, [pool.view(page).tobytes() for page in match.pages.tolist()]))


def test_tier_gets_what_ends_and_gives_it_back():
    engine = Engine(fake_model())
    with engine.exclusive_cache() as cache:
        shelf = Shelf(cache)
        cache.set_tier(shelf)
    cold, _ = run(engine, numbers(14))
    with engine.exclusive_cache() as cache:
        cache.clear()
    assert sum(shelf.evictions) == 14 + 9
    warm, generation = run(engine, numbers(14))
    assert warm == cold and generation.record.cached_tokens == 13
    shelf.stored.clear()
    shelf.refusal = "its kv_type is q8_0, this model's is f16"
    miss = run(engine, [9, 9, 9])[1].record.miss
    assert miss is not None and miss.describe(None) == (
        "what is stored cannot be used: its kv_type is q8_0, this model's is f16"
    )


def test_context_shift_goes_on_with_system_tokens_and_the_recent_half():
    engine = Engine(fake_model(context_length=20))
    generation = engine.generate(
        numbers(12), GREEDY, max_tokens=40, context_shift=True, cache_hints=CacheHints(system_tokens=4)
    )
    text = [event.token_id for event in generation]
    context, dropped, expected = numbers(12), 0, []
    while len(expected) < 40:
        if len(context) > 20:
            context, dropped = context[:4] + context[-8:], dropped + len(context) - 12
        expected.append(int(np.argmax(hashed_logits(np.array(context, np.int32), 260))))
        context.append(expected[-1])
    assert text == expected
    assert generation.record.dropped_tokens == dropped > 0
    with engine.exclusive_cache() as cache:
        assert cache.counters.prompts == 1


def test_context_shift_shortens_an_over_long_prompt_too():
    engine = Engine(fake_model(context_length=20))
    use = CacheHints(system_tokens=4)
    text, generation = run(engine, numbers(50), 3, context_shift=True, cache_hints=use)
    assert generation.record.dropped_tokens == 50 - 12
    assert len(text) == 3
    greedy = engine.generate(numbers(50), GREEDY, max_tokens=1, context_shift=True, cache_hints=use)
    assert next(greedy).token_id == np.argmax(hashed_logits(np.array(numbers(50)[:4] + numbers(50)[-8:]), 260))


def test_context_shift_leaves_at_most_half_a_context_to_the_system_tokens():
    engine = Engine(fake_model(context_length=8))
    text, _ = run(engine, numbers(30), 40, context_shift=True, cache_hints=CacheHints(system_tokens=29))
    assert len(text) == 40


def test_an_interrupted_admission_leaves_no_page_held(monkeypatch: pytest.MonkeyPatch):
    engine = Engine(fake_model())  # type: ignore[arg-type]
    list(engine.generate(list(range(10)), SamplingParams(temperature=0), max_tokens=1))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with engine.exclusive_cache() as cache:
        with monkeypatch.context() as patch:
            patch.setattr(cache.pool, "acquire", interrupted)
            # Six tokens are cached: a page is shared, and for the half one a copy is wanted.
            with pytest.raises(KeyboardInterrupt):
                cache.admit(np.arange(7, dtype=np.int32), CacheHints())
        cache.clear()
        assert cache.pool.num_free_pages == cache.pool.num_pages

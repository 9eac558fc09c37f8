"""A sequence of bounded memory keeps its first, its heavy and its recent pages, and never enters the cache as exact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.engine.cache.sequence import LEAST_KV_WINDOW, KVEviction, SequenceCache
from localinfer.errors import OutOfMemoryError, RequestError
from localinfer.llm import LLM
from localinfer.loading.memory.limit import window_of
from tests.engine.fakes import FakeLayout
from tests.models.arch_models import build_model
from tests.support.inside import engine_of, model_of

WINDOW = KVEviction(tokens=128, page_tokens=16, batch_tokens=32)
LAYOUT = FakeLayout(page_tokens=16, page_bytes=64)


def grow(sequence: SequenceCache, length: int, attention_sums: NDArray[np.float32] | None = None) -> None:
    """Compute so many positions, and have every page get some attention."""
    sequence.reserve(length)
    segment = sequence.segment(length - sequence.length)
    assert segment.attention_sums is not None and segment.attention_sums.size == sequence.pages.size
    if attention_sums is not None:
        segment.attention_sums[:] += attention_sums[: segment.attention_sums.size]
    sequence.commit(length)


def test_least_attended_pages_between_the_first_and_the_recent_ones_go():
    attention_sums = np.array([0, 5, 1, 4, 2, 3, 9, 9, 9, 9], np.float32)
    assert WINDOW.num_pages == 8 and WINDOW.recent_pages == 4
    assert WINDOW.surplus(attention_sums).tolist() == [2, 4]
    assert WINDOW.surplus(np.zeros(10, np.float32)).tolist() == [1, 2]
    assert WINDOW.surplus(attention_sums[:8]).size == 0


def test_sequence_holds_no_more_than_its_window_and_one_batch():
    pool = PagePool(LAYOUT)
    sequence = SequenceCache(pool, max_length=4096, window=WINDOW)
    generator, most = np.random.default_rng(0), pool.num_pages_for(WINDOW.max_tokens)
    length = 0
    for _ in range(200):
        length += int(generator.integers(1, 33))
        grow(sequence, length, generator.random(40).astype(np.float32))
        assert sequence.pages.size <= most
        assert pool.num_pages - pool.num_free_pages == sequence.pages.size
    assert sequence.length == length > 2000 and not sequence.is_exact
    sequence.reserve(length + 1)
    assert sequence.pages.size <= WINDOW.num_pages + 1
    sequence.close()
    assert pool.num_free_pages == pool.num_pages


def test_pages_that_stay_keep_their_order_and_their_mass():
    pool = PagePool(LAYOUT)
    sequence = SequenceCache(pool, max_length=4096, window=WINDOW)
    grow(sequence, 128, np.array([0, 5, 1, 4, 2, 3, 6, 7], np.float32))
    first = sequence.pages
    grow(sequence, 150)
    assert sequence.is_exact
    sequence.reserve(151)
    assert sequence.pages.tolist() == [*np.delete(first, [2, 4]).tolist(), *sequence.pages[-2:].tolist()]
    segment = sequence.segment(1)
    assert (segment.start_position, segment.dropped_tokens) == (150, 32)
    assert segment.attention_sums is not None
    assert segment.attention_sums.tolist() == [0, 5, 4, 3, 6, 7, 0, 0]


def test_drafts_can_be_taken_back_after_pages_were_dropped():
    pool = PagePool(LAYOUT)
    sequence = SequenceCache(pool, max_length=4096, window=WINDOW)
    grow(sequence, 160)
    for length in range(161, 400):
        grow(sequence, length + 16)
        sequence.truncate(length)
        assert sequence.length == length
        assert sequence.pages.size == pool.num_pages_for(length - sequence.segment(1).dropped_tokens)
    twin = sequence.fork()
    grow(twin, 410)
    assert (twin.length, sequence.length) == (410, 399) and not twin.is_exact
    twin.close()
    sequence.close()
    assert pool.num_free_pages == pool.num_pages


def test_what_was_computed_without_all_pages_never_enters_the_cache():
    cache = PrefixCache(LAYOUT, max_bytes=40 * 64, context_length=4096, window=WINDOW)
    ids = np.arange(300, dtype=np.int32)
    sequence = cache.admit(ids, CacheHints()).sequence
    grow(sequence, 140)
    cache.publish(sequence, ids, CacheHints())
    assert cache.tree.match(ids).length == 128
    for length in range(141, 300):
        grow(sequence, length)
        cache.publish(sequence, ids, CacheHints())
    cache.retire(sequence, ids, CacheHints())
    assert cache.tree.match(ids).length == 128
    again = cache.admit(ids, CacheHints())
    assert (again.cached_tokens, again.miss, again.sequence.is_exact) == (128, None, True)
    assert cache.extend(again.sequence, ids) == 0
    again.sequence.close()


def test_prompt_longer_than_memory_fits_with_a_window():
    layout, prompt = FakeLayout(page_tokens=16, page_bytes=64), 1000
    bounded = PrefixCache(layout, max_bytes=12 * 64, context_length=4096, window=WINDOW)
    bounded.check_fits(prompt)
    with pytest.raises(OutOfMemoryError, match="1000 tokens take 4,032 bytes"):
        PrefixCache(layout, max_bytes=12 * 64, context_length=4096).check_fits(prompt)


@pytest.mark.parametrize("window", [64, 100_000_000, 2**70])
def test_a_window_as_long_as_the_context_is_none_and_says_so(window: int, caplog: pytest.LogCaptureFixture):
    options: Any = {"temperature": 0, "max_tokens": 30}
    with localinfer.load(context_length=64, threads=1) as llm:
        wanted = llm.complete("Once", **options).token_ids
    with localinfer.load(context_length=64, threads=1, kv_window=window) as llm:
        assert llm.complete("Once", **options).token_ids == wanted
        assert llm.complete("Once", **options).stats.cached_tokens > 0
    assert f"kv_window is {window} tokens, but the context ends after 64" in caplog.text


def test_windows_that_cannot_be_are_refused(tmp_path: Path):
    with pytest.raises(RequestError, match=f"kv_window is 127 tokens; it must be at least {LEAST_KV_WINDOW}"):
        KVEviction(127, 32, 512)
    with pytest.raises(RequestError, match="kv_window is True"):
        localinfer.load(kv_window=True)
    with pytest.raises(RequestError, match="leave out one of them"):
        localinfer.load(kv_window=256, draft="small.gguf")
    local = build_model(tmp_path, "gemma3-gqa").path
    with localinfer.load(local, kv_window=LEAST_KV_WINDOW, speculation=None) as llm:
        wide = replace(model_of(llm), config=replace(model_of(llm).config, sliding_window=100))  # type: ignore[type-var]
        with pytest.raises(RequestError, match="see the last 100 of them; give it at least 264"):
            window_of(wide, LEAST_KV_WINDOW)  # type: ignore[arg-type]
    chunked = build_model(tmp_path, "llama4-moe").path
    with pytest.raises(RequestError, match="chunks of fixed positions"):
        localinfer.load(chunked, kv_window=LEAST_KV_WINDOW)


NUM_WORDS, HIDDEN = 8, 32
"""Of the model below: words 0 to 7, and as many announcements of a word."""


def write_remembering_model(path: Path) -> Path:
    """A model of one layer that says, from an announcement on, the word announced: attention finds it, and it alone."""
    words, kinds = range(NUM_WORDS), 2 * NUM_WORDS
    constant, meaning, place = kinds, kinds + 1, HIDDEN - 2
    embedding, head = np.zeros((kinds, HIDDEN), np.float32), np.zeros((kinds, HIDDEN), np.float32)
    embedding[:, :kinds], embedding[:, constant] = np.eye(kinds), 1
    query, key, value, output = (np.zeros((HIDDEN, HIDDEN), np.float32) for _ in range(4))
    query[place, constant] = 3
    for word in words:
        key[place, NUM_WORDS + word] = 3
        value[word, NUM_WORDS + word] = output[meaning + word, word] = 2
        head[word, meaning + word] = 4
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(kinds)
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e9)
    nothing, ones = np.zeros((HIDDEN, HIDDEN), np.float32), np.ones(HIDDEN, np.float32)
    for name, tensor in {"q": query, "k": key, "v": value, "output": output}.items():
        writer.add_tensor(f"blk.0.attn_{name}.weight", tensor)
    for name in ("gate", "up", "down"):
        writer.add_tensor(f"blk.0.ffn_{name}.weight", nothing)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", ones)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def perplexity(llm: LLM, text: NDArray[np.int32], wanted: int) -> float:
    """Of the last thousand positions, at each of which one word is right."""
    logits = llm.logits(text)[-1000:].astype(np.float64)
    return float(np.exp((np.log(np.exp(logits).sum(axis=1)) - logits[:, wanted]).mean()))


@pytest.mark.parametrize("kv_type", ["f32", "q8_0/q4_0"])
def test_text_longer_than_the_window_keeps_what_is_attended_to(tmp_path: Path, kv_type: str):
    path = write_remembering_model(tmp_path / "model.gguf")
    text = np.random.default_rng(0).integers(0, NUM_WORDS, 1500).astype(np.int32)
    text[150] = NUM_WORDS + 5
    found = {}
    for kept in ("all", "heavy", "first and recent", "recent"):
        window = None if kept == "all" else 128
        with localinfer.load(path, threads=1, kv_type=kv_type, kv_window=window) as llm:
            with engine_of(llm).exclusive_cache() as cache:
                assert cache.window == (None if window is None else window_of(model_of(llm), 128))  # type: ignore[arg-type]
                if kept in ("first and recent", "recent"):
                    cache.window = KVEviction(128, 32, 512, sink_pages=int(kept != "recent"), recent_share=1)
            found[kept] = perplexity(llm, text, 5)
    assert found["all"] < 1.01 and found["heavy"] == pytest.approx(found["all"], rel=1e-3)
    assert found["first and recent"] > 10 and found["recent"] > 10


def test_generation_past_the_window_remembers_in_bounded_memory_and_leaves_nothing_behind(tmp_path: Path):
    path = write_remembering_model(tmp_path / "model.gguf")
    prompt = [1, 2, 3] * 20 + [NUM_WORDS + 5] + [4, 6] * 300
    with localinfer.load(path, threads=1, kv_window=128, disk_cache=True, disk_cache_folder=tmp_path) as llm:
        completion = llm.complete(prompt, temperature=0, max_tokens=400)
        assert completion.token_ids == [5] * 400
        pool, window = engine_of(llm).pool, window_of(model_of(llm), 128)  # type: ignore[arg-type]
        assert pool.num_pages <= 2 * pool.num_pages_for(window.max_tokens)
        again = llm.complete([*prompt, *completion.token_ids], temperature=0, max_tokens=4)
        assert again.stats.cached_tokens == 128 and again.token_ids == [5] * 4
    with localinfer.load(path, threads=1, disk_cache=True, disk_cache_folder=tmp_path) as llm:
        exact = llm.complete([*prompt, *completion.token_ids], temperature=0, max_tokens=4)
        # What was exact may come back, and nothing else.
        assert 128 <= exact.stats.cached_tokens <= len(prompt) and exact.token_ids == [5] * 4

"""Real models say the same, word for word, whether their prompt was computed now or long ago."""

from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.generation.stream import Completion
from localinfer.llm import LLM
from tests.models.arch_models import build_model
from tests.support.inside import engine_of

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw"
SAMPLED = {"temperature": 1.2, "seed": 7, "max_tokens": 30}


def stories(**options: object) -> LLM:
    return localinfer.load(threads=2, **options)  # type: ignore[arg-type]


def answer(llm: LLM, prompt: list[int]) -> Completion:
    return llm.complete(prompt, **SAMPLED)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_type", ["f16", "f32", "q8_0/q4_0"])
def test_second_turn_says_what_a_cold_run_says(kv_type: str) -> None:
    with stories(kv_type=kv_type) as llm, stories(kv_type=kv_type) as cold:
        first = llm.tokenizer.encode(STORY)
        second = first + answer(llm, first).token_ids[:-1] + llm.tokenizer.encode(" The end. Then", add_special=False)
        warm = answer(llm, second)
        assert warm.stats.cached_tokens == len(first) + 29
        assert warm.token_ids == answer(cold, second).token_ids
        for length in (1, 31, 32, 33, 50) if kv_type == "f16" else (33,):
            parted = second[:length] + llm.tokenizer.encode(" a big dog", add_special=False)
            cold.clear_cache()
            again, anew = answer(llm, parted), answer(cold, parted)
            assert again.stats.cached_tokens >= length > anew.stats.cached_tokens == 0
            assert again.token_ids == anew.token_ids


def test_text_is_the_same_after_eviction_and_computing_again() -> None:
    with stories() as llm:
        page_bytes = engine_of(llm).pool.page_bytes
    with stories(kv_memory=6 * page_bytes) as llm:
        prompt = llm.tokenizer.encode(STORY)
        before = answer(llm, prompt).token_ids
        for seed in range(3):
            answer(llm, np.random.default_rng(seed).integers(3, 500, 90).tolist())
        again = answer(llm, prompt)
        assert again.stats.cache_miss is not None and "evicted" in again.stats.cache_miss
        assert again.token_ids == before == answer(llm, prompt).token_ids


def test_eight_conversations_hold_the_pages_of_their_system_prompt_once() -> None:
    with localinfer.load(threads=2) as llm:
        system = np.random.default_rng(0).integers(3, 4000, 1000).tolist()
        for index in range(8):
            stats = llm.complete([*system, 10 + index, *range(20, 35)], max_tokens=3, ignore_eos=True).stats
            assert stats.cached_tokens == (1000 if index else 0)
        with engine_of(llm).exclusive_cache() as cache:
            # 31 full pages once; of each conversation the page in which it begins, which has room for the rest.
            assert cache.tree.num_pages == 1000 // 32 + 8 * (-(-(1000 % 32 + 1 + 15 + 2) // 32))


@pytest.mark.parametrize("name", ["gemma3-gqa", "gpt-oss-moe", "cohere2-dense", "llama4-moe", "deepseek2-moe"])
def test_windows_chunks_sinks_and_latent_attention_hit_the_same_bits(tmp_path: Path, name: str) -> None:
    path = build_model(tmp_path, name).path
    with localinfer.load(path, threads=1) as llm, localinfer.load(path, threads=1) as cold:
        count = min(100, llm.context_length - 20)
        prompt = np.random.default_rng(1).integers(0, llm.vocab_size, count).tolist()
        options = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3, "ignore_eos": True}
        first = llm.complete(prompt[: count // 2], max_tokens=4, **options)  # type: ignore[arg-type]
        assert first.stats.cached_tokens == 0
        warm = llm.complete(prompt, max_tokens=16, **options)  # type: ignore[arg-type]
        assert warm.stats.cached_tokens == count // 2
        assert warm.token_ids == cold.complete(prompt, max_tokens=16, **options).token_ids  # type: ignore[arg-type]

"""Greedy text of a real model, word for word what llama.cpp writes, however it is computed."""

import json
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer import LLM

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent.parent / "golden" / "stories260k.json").read_text("utf-8"))
"""Prompt to the 200 tokens llama-cpp-python gave for ../shared/models/stories260K.gguf at temperature 0."""


@pytest.fixture(scope="module")
def stories(shared: Path) -> LLM:
    return localinfer.load(shared / "models" / "stories260K.gguf", threads=2)


@pytest.mark.parametrize("prompt", GOLDEN)
def test_greedy_text_equals_the_peers(stories: LLM, prompt: str) -> None:
    assert stories.complete(prompt, max_tokens=200, temperature=0).text == GOLDEN[prompt]


@pytest.mark.parametrize("kv_type", ["f16", "f32", "q8_0", "q4_0", "q8_0/q4_0"])
def test_logits_are_the_same_bits_at_once_in_chunks_and_with_any_thread_count(shared: Path, kv_type: str) -> None:
    path = shared / "models" / "stories260K.gguf"
    digests = set()
    for threads in (1, 2):
        with localinfer.load(path, threads=threads, kv_type=kv_type) as llm:
            token_ids = llm.tokenizer.encode(GOLDEN["Once upon a time"])[:150]
            whole = llm.logits(token_ids)
            digests.add(whole.tobytes())
            for length in (1, 64, 149):
                assert np.array_equal(llm.logits(token_ids[:length]), whole[:length])
    assert len(digests) == 1


def test_seeded_text_does_not_depend_on_threads_or_repetition(shared: Path) -> None:
    path = shared / "models" / "stories260K.gguf"
    texts = set()
    for threads in (1, 2):
        with localinfer.load(path, threads=threads) as llm:
            texts |= {llm.complete("One day", max_tokens=60, seed=11, temperature=0.9).text for _ in range(2)}
            assert llm.complete("One day", max_tokens=60, seed=12, temperature=0.9).text not in texts
    assert len(texts) == 1

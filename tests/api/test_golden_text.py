"""Greedy text of a real model, word for word what llama.cpp writes, however it is computed."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.llm import LLM
from localinfer.models import demo

GOLDEN: dict[str, dict[str, str]] = {
    name: json.loads((Path(__file__).parents[1] / "golden" / f"{name}.json").read_text("utf-8"))
    for name in ("demo", "stories260k")
}
"""By model and prompt the 200 tokens that llama-cpp-python gave at temperature 0, with float32 weights and cache: of
the model that ships, and of ../shared/models/stories260K.gguf."""


DEMO = Path(demo.__file__).parent / "demo-f16.gguf"


@pytest.fixture(scope="module", params=GOLDEN)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, dict[str, str]]]:
    """A model and its golden texts."""
    path = DEMO if request.param == "demo" else request.getfixturevalue("shared") / "models" / "stories260K.gguf"
    with localinfer.load(path, threads=2) as llm:
        yield llm, GOLDEN[request.param]


def test_greedy_texts_equal_the_peers(model: tuple[LLM, dict[str, str]]) -> None:
    llm, golden = model
    assert len(golden) >= 5
    for prompt, text in golden.items():
        assert llm.complete(prompt, max_tokens=200, temperature=0).text == text


@pytest.mark.parametrize("kv_type", ["f16", "f32", "q8_0", "q4_0", "q8_0/q4_0"])
def test_logits_are_the_same_bits_at_once_in_chunks_and_with_any_thread_count(kv_type: str) -> None:
    digests = set()
    for threads in (1, 2):
        with localinfer.load(DEMO, threads=threads, kv_type=kv_type) as llm:
            token_ids = llm.tokenizer.encode(GOLDEN["demo"]["Once upon a time"])[:110]
            whole = llm.logits(token_ids)
            digests.add(whole.tobytes())
            for length in (1, 64, 109):
                assert np.array_equal(llm.logits(token_ids[:length]), whole[:length])
    assert len(digests) == 1


def test_seeded_text_does_not_depend_on_threads_or_repetition() -> None:
    texts = set()
    for threads in (1, 2):
        with localinfer.load(DEMO, threads=threads) as llm:
            texts |= {llm.complete("One day", max_tokens=60, seed=11, temperature=0.9).text for _ in range(2)}
            assert llm.complete("One day", max_tokens=60, seed=12, temperature=0.9).text not in texts
    assert len(texts) == 1

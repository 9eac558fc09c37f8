"""Beam search against one that keeps whole texts in lists and computes every position anew."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.filters import log_total
from localinfer.errors import ContextLengthError, ModelFileError, RequestError
from localinfer.generation.beam_search import search_beams
from localinfer.llm import LLM
from localinfer.types import Beam
from tests.engine.fakes import fake_model, hashed_logits, text_model

PROMPT = [3, 1, 4]
VOCABULARY = 11


def sharp_logits(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
    return np.float32(0.5) * hashed_logits(history, vocab_size)


def log_softmax(text: tuple[int, ...]) -> list[float]:
    row = sharp_logits(np.array([*PROMPT, *text], np.int32), VOCABULARY)
    total = log_total(row)
    return [float(value) - total for value in row]


def search_by_lists(num_beams: int, max_tokens: int, penalty: float, stops: set[int]) -> list[Beam]:
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Beam] = []

    def finish(logprob: float, text: tuple[int, ...], reason: Any) -> None:
        finished.append(Beam(text, logprob, logprob / math.pow(len(text), penalty), reason))

    for _ in range(max_tokens):
        grown = [
            (logprob + value, (*text, token)) for logprob, text in live for token, value in enumerate(log_softmax(text))
        ]
        grown.sort(key=lambda candidate: -candidate[0])
        for logprob, text in grown[:num_beams]:
            if text[-1] in stops:
                finish(logprob, text, "stop")
        live = [(logprob, text) for logprob, text in grown if text[-1] not in stops][:num_beams]
    for logprob, text in live:
        finish(logprob, text, "length")
    return sorted(finished, key=lambda beam: -beam.score)[:num_beams]


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("num_beams", [1, 2, 3, 7, 15])
def test_beams_are_those_of_the_search_by_lists(num_beams: int, penalty: float) -> None:
    engine = Engine(fake_model(sharp_logits, vocab_size=VOCABULARY))
    for max_tokens in (1, 2, 9):
        for stops in (set[int](), {5}, {0, 2, 9}, set(range(9))):
            found = search_beams(
                engine, PROMPT, num_beams=num_beams, max_tokens=max_tokens, length_penalty=penalty, stop_token_ids=stops
            )
            assert found == search_by_lists(num_beams, max_tokens, penalty, stops)
    engine.close()


def test_width_of_the_vocabulary_finds_the_likeliest_text_of_two_tokens() -> None:
    engine = Engine(fake_model(sharp_logits, vocab_size=VOCABULARY))
    best = search_beams(engine, PROMPT, num_beams=VOCABULARY, max_tokens=2)[0]
    sums = {(a, b): log_softmax(())[a] + log_softmax((a,))[b] for a in range(VOCABULARY) for b in range(VOCABULARY)}
    assert best.token_ids == max(sums, key=lambda text: sums[text])
    assert math.isclose(best.logprob, max(sums.values()))


def test_one_beam_is_greedy() -> None:
    engine = Engine(fake_model(sharp_logits, vocab_size=VOCABULARY))
    text: list[int] = []
    for _ in range(12):
        text.append(int(np.argmax(log_softmax(tuple(text)))))
    assert search_beams(engine, PROMPT, num_beams=1, max_tokens=12)[0].token_ids == tuple(text)


def test_no_page_is_held_afterwards_and_the_prompt_is_cached() -> None:
    engine = Engine(fake_model(sharp_logits, vocab_size=VOCABULARY, context_length=200))
    long_prompt = [index % VOCABULARY for index in range(70)]
    search_beams(engine, long_prompt, num_beams=4, max_tokens=40)
    with engine.exclusive_cache() as cache:
        admission = cache.admit(np.array(long_prompt, np.int32), CacheHints())
        assert admission.cached_tokens == 68
        admission.sequence.close()
        cache.clear()
        assert engine.pool.num_free_pages == engine.pool.num_pages > 0
    engine.close()


def test_end_of_the_context_ends_the_beams() -> None:
    engine = Engine(fake_model(sharp_logits, vocab_size=VOCABULARY, context_length=8))
    beams = search_beams(engine, PROMPT, num_beams=2)
    assert [(len(beam.token_ids), beam.finish_reason) for beam in beams] == [(5, "length")] * 2
    with pytest.raises(ContextLengthError):
        search_beams(engine, PROMPT * 3, num_beams=2)
    assert search_beams(engine, PROMPT, num_beams=2, max_tokens=0) == []


def test_ruled_out_tokens_are_in_no_beam() -> None:
    def only_two(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        row = np.full(vocab_size, -np.inf, np.float32)
        row[[2, 7]] = 1.0
        return row

    engine = Engine(fake_model(only_two, vocab_size=VOCABULARY))
    beams = search_beams(engine, PROMPT, num_beams=8, max_tokens=2)
    assert {beam.token_ids for beam in beams} == {(2, 2), (2, 7), (7, 2), (7, 7)}


def test_an_error_leaves_the_engine_usable() -> None:
    model = fake_model(sharp_logits, vocab_size=VOCABULARY)
    engine = Engine(model)
    model.program.fails_at = {5}
    with pytest.raises(MemoryError):
        search_beams(engine, PROMPT, num_beams=3, max_tokens=9)
    model.program.fails_at = set()
    assert search_beams(engine, PROMPT, num_beams=3, max_tokens=9) == search_by_lists(3, 9, 1.0, set())
    damaged = Engine(fake_model(lambda history, size: np.full(size, np.nan, np.float32), vocab_size=VOCABULARY))
    with pytest.raises(ModelFileError, match="not finite for position 3"):
        search_beams(damaged, PROMPT, num_beams=3, max_tokens=9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 0),
        ("num_beams", 65),
        ("num_beams", True),
        ("max_tokens", -1),
        ("length_penalty", -0.1),
        ("length_penalty", "1"),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    engine = Engine(fake_model(sharp_logits, vocab_size=VOCABULARY))
    options: Any = {"num_beams": 2, "max_tokens": 3} | {name: value}
    with pytest.raises(RequestError, match=name):
        search_beams(engine, PROMPT, **options)
    with pytest.raises(RequestError, match="no tokens"):
        search_beams(engine, [], num_beams=2)


def test_text_of_a_beam_ends_before_its_end_token() -> None:
    llm = LLM(text_model("hello", prompt_length=3))  # type: ignore[arg-type]
    best = llm.beam_search("ab", num_beams=2, max_tokens=20)[0]
    assert (best.text, best.beam.token_ids, best.beam.finish_reason) == ("hello", (*b"hello", 257), "stop")

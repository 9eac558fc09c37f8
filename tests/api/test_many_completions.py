"""Several completions of one prompt are those that their seeds give alone, and share its computation."""

from typing import Any

import pytest

from localinfer.errors import RequestError
from localinfer.generation.stream import Completion
from localinfer.llm import LLM
from tests.engine.fakes import FakeTemplate, fake_model

WILD: dict[str, Any] = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 12}
PROMPT = "x" * 80


def wild_llm() -> LLM:
    model = fake_model(context_length=200)
    model.chat_template = FakeTemplate()
    return LLM(model)  # type: ignore[arg-type]


def mean(completion: Completion) -> float:
    assert completion.logprobs is not None
    return sum(told.logprob for told in completion.logprobs) / len(completion.logprobs)


def test_each_completion_is_that_of_its_own_seed():
    several = wild_llm().complete_many(PROMPT, n=4, seed=2**64 - 2, **WILD)
    alone = [wild_llm().complete(PROMPT, seed=seed, **WILD) for seed in (2**64 - 2, 2**64 - 1, 0, 1)]
    assert [one.token_ids for one in several] == [one.token_ids for one in alone]
    assert [one.text for one in several] == [one.text for one in alone]
    assert len({one.text for one in several}) == 4


def test_the_prompt_is_computed_once():
    model = fake_model(context_length=200)
    several = LLM(model).complete_many(PROMPT, n=3, seed=1, **WILD)  # type: ignore[arg-type]
    assert [one.stats.cached_tokens for one in several] == [0, 80, 80]
    assert [one.stats.prompt_tokens for one in several] == [81, 81, 81]


def test_drawn_seeds_follow_each_other():
    several = wild_llm().complete_many(PROMPT, n=3, **WILD)
    first = several[0].stats.seed
    assert [one.stats.seed for one in several] == [first, first + 1, first + 2]


def test_best_of_returns_the_likeliest_first():
    llm = wild_llm()
    every = llm.complete_many(PROMPT, n=6, seed=5, logprobs=0, **WILD)
    best = llm.complete_many(PROMPT, n=2, best_of=6, seed=5, **WILD)
    expected = sorted(every, key=mean, reverse=True)[:2]
    assert [one.token_ids for one in best] == [one.token_ids for one in expected]
    assert [one.logprobs for one in best] == [None, None]
    told = llm.complete_many(PROMPT, n=2, best_of=6, seed=5, logprobs=3, **WILD)
    assert [[len(each.top) for each in one.logprobs or []] for one in told] == [
        [3] * len(one.token_ids) for one in told
    ]


def test_chats_are_answered_in_several_ways():
    messages = [{"role": "user", "content": "hello"}]
    several = wild_llm().chat_many(messages, n=2, seed=3, **WILD)
    assert [one.text for one in several] == [wild_llm().chat(messages, seed=seed, **WILD).text for seed in (3, 4)]


def test_nothing_wanted_is_nothing_made():
    options = WILD | {"max_tokens": 0}
    assert [one.text for one in wild_llm().complete_many(PROMPT, n=2, best_of=3, **options)] == ["", ""]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 1000}, "n is 1000"),
        ({"n": True}, "n is True"),
        ({"n": 3, "best_of": 2}, "best_of is 2; it must be a whole number from 3"),
        ({"n": 2, "seed": -1}, "seed"),
        ({"n": 2, "temperature": -1}, "temperature"),
    ],
)
def test_wrong_values_are_refused_by_name(options: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message):
        wild_llm().complete_many(PROMPT, **options)


def test_an_error_closes_every_stream():
    model = fake_model(context_length=200)
    llm = LLM(model)  # type: ignore[arg-type]
    model.program.fails_at = {90}
    with pytest.raises(MemoryError):
        llm.complete_many(PROMPT, n=3, seed=1, **WILD)
    model.program.fails_at = set()
    assert len(llm.complete_many(PROMPT, n=3, seed=1, **WILD)) == 3

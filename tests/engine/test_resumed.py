"""Texts that another process has begun: their tokens come first, and then what would follow there."""

import pytest

from localinfer.engine.engine import Engine
from localinfer.engine.request import TokenEvent
from localinfer.engine.sampling.sampler import SamplingParams
from localinfer.errors import RequestError, SessionMismatchError
from tests.engine.fakes import fake_model
from tests.engine.generations import GREEDY, PARAMS, SEEDED, alone, numbers, wide_model

LOGPROBS = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3, logprobs=2)
MIROSTAT = SamplingParams(temperature=1.5, seed=3, mirostat=2)


def resumed(prompt: list[int], params: SamplingParams, ids: list[int], **options: object) -> list[TokenEvent]:
    return list(Engine(wide_model()).generate(prompt, params, resumed=ids, **options))


@pytest.mark.parametrize("params", [*PARAMS, LOGPROBS, MIROSTAT])
@pytest.mark.parametrize("count", [0, 1, 7, 24, 25])
def test_events_are_those_of_an_undisturbed_generation(params: SamplingParams, count: int):
    prompt = numbers(11)
    whole = alone(prompt, params, max_tokens=25)
    assert resumed(prompt, params, [event.token_id for event in whole[:count]], max_tokens=25) == whole


def test_tokens_are_read_with_the_prompt_in_one_prefill():
    ids = [event.token_id for event in alone(numbers(11), GREEDY, max_tokens=8)]
    model = wide_model()
    list(Engine(model).generate(numbers(11), GREEDY, max_tokens=10, resumed=ids))
    assert model.program.batch_sizes == [19, 1]


def test_text_that_had_ended_costs_nothing():
    prompt = numbers(11)
    whole = alone(prompt, SEEDED, max_tokens=9)
    model = wide_model()
    engine = Engine(model)
    assert list(engine.generate(prompt, SEEDED, max_tokens=9, resumed=[event.token_id for event in whole])) == whole
    stop = whole[4].token_id
    ended = engine.generate(
        prompt, SEEDED, max_tokens=9, stop_token_ids=[stop], resumed=[e.token_id for e in whole[:5]]
    )
    assert [event.finish_reason for event in ended] == [None] * 4 + ["stop"]
    assert model.program.batch_sizes == []
    assert engine.stats.waiting == engine.stats.running == 0


@pytest.mark.parametrize("prompt_length", [11, 96])
@pytest.mark.parametrize("params", [SEEDED, LOGPROBS])
def test_context_is_shifted_where_it_was(params: SamplingParams, prompt_length: int):
    prompt = numbers(prompt_length)
    whole = alone(prompt, params, max_tokens=150, context_shift=True)
    for count in (60, 85, 86, 87, 130, 149):
        ids = [event.token_id for event in whole[:count]]
        assert resumed(prompt, params, ids, max_tokens=150, context_shift=True) == whole


def test_other_tokens_are_refused_where_each_is_chosen_again():
    wrong = [event.token_id ^ 1 for event in alone(numbers(11), LOGPROBS, max_tokens=5)]
    with pytest.raises(SessionMismatchError, match="goes on otherwise here, from position 11 on"):
        resumed(numbers(11), LOGPROBS, wrong, max_tokens=25)


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(RequestError, match="not in the vocabulary"):
        Engine(fake_model()).generate([1], GREEDY, resumed=[100_000])

"""Texts that another process has begun: their tokens come first, and then what would follow there."""

from collections.abc import Iterator
from typing import Any

import pytest

from localinfer.engine.engine import Engine
from localinfer.engine.request import TokenEvent
from localinfer.engine.sampling.sampler import SamplingParams
from localinfer.engine.scheduler import Generation
from localinfer.errors import RequestError, SessionMismatchError
from localinfer.generation.resumption import resume
from tests.engine.fakes import PAGE_BYTES, fake_model
from tests.engine.generations import GREEDY, PARAMS, SEEDED, alone, numbers, wide_model

LOGPROBS = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3, logprobs=2)
MIROSTAT = SamplingParams(temperature=1.5, seed=3, mirostat=2)


def resume_on(
    engine: Engine, prompt: list[int], params: SamplingParams, ids: list[int], **options: Any
) -> tuple[Generation, Iterator[TokenEvent]]:
    return resume(engine, engine.check_prompt(prompt), engine.plan(params), ids, **options)


def resumed(prompt: list[int], params: SamplingParams, ids: list[int], **options: Any) -> list[TokenEvent]:
    return list(resume_on(Engine(wide_model()), prompt, params, ids, **options)[1])


@pytest.mark.parametrize("params", [*PARAMS, LOGPROBS, MIROSTAT])
@pytest.mark.parametrize("count", [0, 1, 7, 24, 25])
def test_events_are_those_of_an_undisturbed_generation(params: SamplingParams, count: int):
    prompt = numbers(11)
    whole = alone(prompt, params, max_tokens=25)
    assert resumed(prompt, params, [event.token_id for event in whole[:count]], max_tokens=25) == whole


def test_tokens_are_read_with_the_prompt_in_one_prefill():
    ids = [event.token_id for event in alone(numbers(11), GREEDY, max_tokens=8)]
    model = wide_model()
    list(resume_on(Engine(model), numbers(11), GREEDY, ids, max_tokens=10)[1])
    assert model.program.batch_sizes == [19, 1]


def test_text_that_had_ended_costs_nothing():
    prompt = numbers(11)
    whole = alone(prompt, SEEDED, max_tokens=9)
    model = wide_model()
    engine = Engine(model)
    ids = [event.token_id for event in whole]
    assert list(resume_on(engine, prompt, SEEDED, ids, max_tokens=9)[1]) == whole
    _, ended = resume_on(engine, prompt, SEEDED, ids[:7], max_tokens=9, stop_token_ids=frozenset(ids[4:5]))
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
    with pytest.raises(SessionMismatchError, match="continues differently here, from position 11 on"):
        resumed(numbers(11), LOGPROBS, wrong, max_tokens=25)


@pytest.mark.parametrize("params", [GREEDY, LOGPROBS])
def test_ids_outside_the_vocabulary_are_refused(params: SamplingParams):
    with pytest.raises(RequestError, match="not in the vocabulary"):
        resume_on(Engine(fake_model()), [1], params, [100_000])


@pytest.mark.parametrize("params", [GREEDY, LOGPROBS])
def test_a_cancelled_text_ends_among_the_tokens_that_it_began_with(params: SamplingParams):
    ids = [event.token_id for event in alone(numbers(11), params, max_tokens=8)]
    generation, events = resume_on(Engine(wide_model()), numbers(11), params, ids, max_tokens=10)
    assert next(events).token_id == ids[0]
    generation.cancel()
    assert [event.finish_reason for event in events] == ["cancelled"]


def test_memory_that_ends_after_them_is_no_error(monkeypatch: pytest.MonkeyPatch):
    ids = [event.token_id for event in alone(numbers(11), GREEDY, max_tokens=8)]
    engine = Engine(wide_model(), kv_memory=6 * PAGE_BYTES)
    generation, events = resume_on(engine, numbers(11), GREEDY, ids)
    assert [event.finish_reason for event in events][-1] == "length"
    assert "for lack of memory" in generation.record.notices[0]

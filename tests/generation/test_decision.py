"""Decisions of the demo model: the same bits in any order, company, cache and number of threads."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.engine.sampling.filters import log_total
from localinfer.errors import ContextLengthError, MessageError, RequestError
from localinfer.generation.questions import (
    MOST_LEVELS,
    MOST_OPTIONS,
    Choice,
    ChoiceAnswer,
    Question,
    Score,
    ScoreAnswer,
    YesNo,
    YesNoAnswer,
    read_question,
)
from tests.support.seeing_model import picture_file, seeing_demo

STATE = {"message": "The cat lost its red ball in the park. Tom wants to help.", "day": 3}
QUESTIONS: dict[str, Question] = {
    "lost": YesNo(instructions="Is something lost?"),
    "described": YesNo(yes="There is a cat.", no={"or": ["a dog"]}),
    "who": Choice(instructions="Who helps?", options={"Tom": "a boy", "Lily": None, "der Hund \N{DOG FACE}": ["x", 1]}),
    "many": Choice(options={f"option {index}": None for index in range(30)}),
    "mood": Score(instructions=["How", "sad?"], levels=["not", {"a": "little"}, "very"]),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[localinfer.LLM]:
    with localinfer.load(context_length=4096) as loaded:
        yield loaded


def test_answers_depend_on_nothing_but_the_state_and_their_question(llm: localinfer.LLM) -> None:
    found = llm.decide(STATE, QUESTIONS)
    assert list(found.answers) == list(QUESTIONS)
    again = llm.decide(STATE, dict(reversed(QUESTIONS.items())))
    assert again.answers == found.answers and again.cached_tokens > 0
    for name, question in QUESTIONS.items():
        llm.clear_cache()
        alone = llm.decide(STATE, {"other name": question})
        assert alone.answers["other name"] == found.answers[name]
        assert alone.cached_tokens == 0
    with localinfer.load(context_length=4096, threads=2) as other:
        assert other.decide(STATE, QUESTIONS).answers == found.answers


def test_probabilities_are_those_of_the_labels_behind_the_prompt(llm: localinfer.LLM) -> None:
    question = QUESTIONS["lost"]
    assert isinstance(question, YesNo)
    text = f'{{"message": "{STATE["message"]}", "day": 3}}\n\n{question.instructions}\n\nAnswer with Yes or No.'
    messages = [{"role": "user", "content": text}]
    prompt = llm.render_chat(messages)
    begun = llm.tokenizer.encode(prompt, parse_special=True)
    weights = []
    for label in ("Yes", "No"):
        ids = llm.tokenizer.encode(prompt + label, parse_special=True)
        assert ids[: len(begun)] == begun
        rows = llm.logits(ids)[len(begun) - 1 : -1]
        weights.append(
            math.exp(sum(float(row[one]) - log_total(row) for row, one in zip(rows, ids[len(begun) :], strict=True)))
        )
    answer = llm.decide(STATE, {"lost": question}).answers["lost"]
    assert isinstance(answer, YesNoAnswer)
    assert answer.probability == pytest.approx(weights[0] / sum(weights), rel=1e-12)
    assert answer.label_mass == pytest.approx(sum(weights), rel=1e-12)


def test_further_questions_cost_their_own_tokens(llm: localinfer.LLM) -> None:
    state = " ".join(f"Day {day}: the cat slept." for day in range(80))
    llm.clear_cache()
    first = llm.decide(state, {"slept": YesNo(instructions="Did the cat sleep?")})
    assert first.cached_tokens == 0 and first.computed_tokens >= first.prompt_tokens
    later = llm.decide(state, {"woke": YesNo(instructions="Did the cat wake up?")})
    own = later.prompt_tokens - later.state_tokens
    assert later.state_tokens - later.cached_tokens <= 32, "at most a page of the state is read again"
    assert later.computed_tokens <= own + 32 + 4
    together = llm.decide(state, {str(index): YesNo(instructions=f"Is it day {index}?") for index in range(20)})
    assert together.cached_tokens >= together.state_tokens - 32
    assert together.prompt_tokens < together.state_tokens + 20 * 60
    assert llm.decide(state, {"slept": YesNo(instructions="Did the cat sleep?")}, cache_salt="mine").cached_tokens == 0


def test_orders_are_averaged(llm: localinfer.LLM) -> None:
    options = {"Tom": None, "Lily": None, "Max": None}
    turned = [dict(list(options.items())[turn:] + list(options.items())[:turn]) for turn in range(3)]
    answers = [llm.decide(STATE, {"": Choice(options=one)}).answers[""] for one in turned]
    found = [dict(answer.probabilities) for answer in answers if isinstance(answer, ChoiceAnswer)]
    answer = llm.decide(STATE, {"": Choice(options=options)}, orders=3).answers[""]
    assert isinstance(answer, ChoiceAnswer)
    for name in options:
        assert answer.probabilities[name] == pytest.approx(sum(one[name] for one in found) / 3, rel=1e-12)
    again = llm.decide(STATE, {"": Choice(options=turned[1])}, orders=3).answers[""]
    assert isinstance(again, ChoiceAnswer)
    assert dict(again.probabilities) == pytest.approx(dict(answer.probabilities), rel=1e-12)


@pytest.mark.parametrize("count", [2, 26, 27, 100, MOST_OPTIONS])
def test_as_many_options_as_promised(llm: localinfer.LLM, count: int) -> None:
    options = {f"{index}": None for index in range(count)}
    answer = llm.decide("A", {"": Choice(options=options)}).answers[""]
    assert isinstance(answer, ChoiceAnswer)
    probabilities = list(answer.probabilities.values())
    assert list(answer.probabilities) == list(options) and math.isclose(sum(probabilities), 1)
    assert answer.probabilities[answer.choice] == max(probabilities)
    assert 0 <= answer.confidence <= 1 and 0 < answer.label_mass <= 1


@pytest.mark.parametrize("count", range(2, MOST_LEVELS + 1))
def test_as_many_levels_as_promised(llm: localinfer.LLM, count: int) -> None:
    answer = llm.decide("A", {"": Score(levels=[f"level {index}" for index in range(count)])}).answers[""]
    assert isinstance(answer, ScoreAnswer)
    assert math.isclose(sum(answer.probabilities), 1)
    assert math.isclose(answer.score, float(np.arange(count) @ np.array(answer.probabilities)))
    assert 0 <= answer.confidence <= 1


def test_a_conversation_is_decided_about_with_its_pictures(tmp_path: Path) -> None:
    picture = picture_file()
    with localinfer.load(seeing_demo(tmp_path), context_length=512) as seeing:
        parts: list[dict[str, Any]] = [{"type": "image", "image": picture}, {"type": "text", "text": "Look at it."}]
        conversation = [{"role": "user", "content": parts}]
        found = seeing.decide(None, {"a": QUESTIONS["lost"], "b": QUESTIONS["mood"]}, messages=conversation)
        for name, question in (("a", QUESTIONS["lost"]), ("b", QUESTIONS["mood"])):
            seeing.clear_cache()
            assert seeing.decide(None, {name: question}, messages=conversation).answers[name] == found.answers[name]
        without = seeing.decide("Look at it.", {"a": QUESTIONS["lost"]})
        assert without.answers["a"] != found.answers["a"]
        replied = [*conversation, {"role": "assistant", "content": "A cat."}]
        assert seeing.decide(None, {"a": QUESTIONS["lost"]}, messages=replied).cached_tokens > 0


WRONG: list[tuple[Any, Any, dict[str, Any], str]] = [
    (None, QUESTIONS, {}, "a state or messages"),
    ("A", QUESTIONS, {"messages": [{"role": "user", "content": "B"}]}, "one of them"),
    ("A", {}, {}, "at least one"),
    ("A", [], {}, "by name"),
    ({"a": object()}, QUESTIONS, {}, "JSON"),
    ({"a": math.nan}, QUESTIONS, {}, "JSON"),
    ("A", {"a": "b"}, {}, "YesNo, Choice or Score"),
    ("A", {"a": YesNo()}, {}, "needs instructions"),
    ("A", {"a": Choice(options={"one": None})}, {}, "1 options; give 2"),
    ("A", {"a": Choice(options={str(one): None for one in range(256)})}, {}, "256 options"),
    ("A", {"a": Choice(options={"": None, "b": None})}, {}, "name of an option"),
    ("A", {"a": Choice(options=["b", "c"])}, {}, "descriptions by name"),  # type: ignore[arg-type]
    ("A", {"a": Score(levels=["b"])}, {}, "1 levels; give 2"),
    ("A", {"a": Score(levels=["b"] * 11)}, {}, "11 levels"),
    ("A", {"a": Score(levels=["b", None])}, {}, "is None"),
    ("A", {"a": Score(levels="bc")}, {}, "list of descriptions"),
    ("A", QUESTIONS, {"orders": 0}, "orders"),
    ("A", QUESTIONS, {"cache_salt": ""}, "cache_salt"),
]


@pytest.mark.parametrize(("state", "questions", "options", "words"), WRONG)
def test_wrong_questions_are_refused(
    llm: localinfer.LLM, state: Any, questions: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        llm.decide(state, questions, **options)


def test_what_is_too_long_or_cannot_be_seen_is_refused(llm: localinfer.LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.decide("cat " * 5000, QUESTIONS)
    picture = [{"role": "user", "content": [{"type": "image", "image": picture_file()}]}]
    with pytest.raises(MessageError):
        llm.decide(None, QUESTIONS, messages=picture)


def test_questions_are_read_from_json() -> None:
    assert read_question({"type": "noul", "instructions": "So?", "criteria": {"true": "a"}}) == YesNo(
        instructions="So?", yes="a"
    )
    assert read_question({"type": "yes_no", "criteria": {"false": ["b"]}}) == YesNo(no=["b"])
    assert read_question({"type": "noul", "criteria": {"no": "b", "true": "a"}}) == YesNo(yes="a", no="b")
    assert read_question({"type": "noul", "criteria": {"yes": None, "no": "b"}}) == YesNo(no="b")
    assert read_question({"type": "choice", "criteria": {"a": None, "b": "c"}}) == Choice(options={"a": None, "b": "c"})
    assert read_question({"type": "score", "instructions": {"a": 1}, "criteria": ["b", "c"]}) == Score(
        levels=["b", "c"], instructions={"a": 1}
    )
    for field, wrong in itertools.chain(
        (("type", {"type": kind}) for kind in (None, "box", 3)),
        (("instructions", {"type": kind, "instructions": 3}) for kind in ("noul", "choice", "score")),
        (("criteria", {"type": "noul", "criteria": one}) for one in ("a", [], ["yes"], {"maybe": "a"})),
        (("criteria", {"type": "noul", "criteria": {"true": "a", key: "b"}}) for key in ("yes", "maybe")),
        (("criteria", {"type": "choice", "criteria": one}) for one in (None, "a", [], {}, {"a": None})),
        (("criteria", {"type": "score", "criteria": one}) for one in (None, "a", {"0": "a", "1": "b"}, ["a"])),
    ):
        with pytest.raises(RequestError) as caught:
            read_question(wrong)
        assert caught.value.field == field, wrong


async def decided(llm: localinfer.LLM) -> object:
    return (await llm.adecide(STATE, QUESTIONS)).answers


def test_a_task_may_wait_for_decisions(llm: localinfer.LLM) -> None:
    import asyncio

    assert asyncio.run(decided(llm)) == llm.decide(STATE, QUESTIONS).answers

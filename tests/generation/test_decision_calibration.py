"""Calibration of decisions against what is known of temperatures and of isotonic regression."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.errors import RequestError
from localinfer.generation.decision_calibration import (
    METHODS,
    Calibration,
    DecisionCalibration,
    Example,
    FittedQuestion,
    cross_measure,
    fit,
    isotonic,
    measure,
    question_digest,
    right_answer,
)
from localinfer.generation.questions import Choice, Question, Score, YesNo, answer_of, probabilities_of
from localinfer.llm import LLM

CHOICE = Choice(options={"a": None, "b": None, "c": None})


def sampled(temperature: float, count: int, seed: int) -> list[Example]:
    """Examples whose right answers follow probabilities that were sharpened by a temperature afterwards."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
        logits = rng.normal(0, 2, 3)
        true = np.exp(logits - logits.max())
        true /= true.sum()
        told = np.exp((logits - logits.max()) * temperature)
        told /= told.sum()
        examples.append(Example(told.tolist(), int(rng.choice(3, p=true))))
    return examples


def nearest_rising(pairs: list[tuple[float, float]]) -> list[float]:
    """Isotonic regression by its min-max formula."""
    values = [value for _, value in sorted(pairs)]
    size = len(values)
    return [
        max(min(float(np.mean(values[i : j + 1])) for j in range(k, size)) for i in range(k + 1)) for k in range(size)
    ]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_a_temperature_is_found_again(temperature: float) -> None:
    examples = sampled(temperature, 1500, 3)
    assert fit(examples, "temperature").temperature == pytest.approx(temperature, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_isotonic_is_the_nearest_rising_map(seed: int) -> None:
    rng = np.random.default_rng(seed)
    places = rng.permutation(30)[:20] / 30
    pairs = [(float(place), float(rng.random() < place)) for place in places]
    corners = isotonic(pairs)
    assert corners == sorted(corners) and [one for _, one in corners] == sorted(one for _, one in corners)
    found = Calibration(points=tuple(corners))
    for (place, _), wanted in zip(sorted(pairs), nearest_rising(pairs), strict=True):
        assert found._mapped(place) == pytest.approx(wanted)
    assert len(isotonic([(0.5, 1.0), (0.5, 0.0), (0.5, 0.0)])) == 1, "one place has one value"


@pytest.mark.parametrize("method", METHODS)
def test_overconfident_answers_are_mended(method: str) -> None:
    examples = sampled(4.0, 800, 5)
    before, after = measure(examples), cross_measure(examples, method)
    assert after.error < before.error / 3 and after.log_loss < before.log_loss
    assert sum(tenth.num_answers for tenth in after.tenths) == len(examples)
    if method == "temperature":
        assert after.accuracy == before.accuracy


def test_measures_by_hand() -> None:
    report = measure([Example([0.8, 0.2], 0), Example([0.6, 0.4], 1), Example([0.3, 0.7], 1), Example([1.0, 0.0], 1)])
    assert report.accuracy == 0.5
    assert report.log_loss == pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.7) + math.log(1e-12)) / 4)
    assert report.error == pytest.approx((0.2 + 0.6 + 0.3 + 1.0) / 4)
    assert [tenth.num_answers for tenth in report.tenths] == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_calibrated_answers_are_answers() -> None:
    answer = answer_of(CHOICE, [0.6, 0.3, 0.1], 0.5)
    flat = Calibration(temperature=2.0).answer(CHOICE, answer)
    weights = np.sqrt([0.6, 0.3, 0.1])
    assert probabilities_of(flat) == pytest.approx((weights / weights.sum()).tolist())
    assert flat.label_mass == 0.5
    assert probabilities_of(Calibration(points=((0.0, 0.0), (1.0, 0.0))).answer(CHOICE, answer)) == [1 / 3] * 3
    certain = answer_of(YesNo(instructions="a"), [1.0, 0.0], 1.0)
    assert probabilities_of(Calibration(temperature=0.1).answer(YesNo(instructions="a"), certain)) == [1.0, 0.0]


def test_calibrations_are_kept_as_json(tmp_path: Path) -> None:
    fitted = {
        "a": FittedQuestion(Calibration(0.5), question_digest(CHOICE), 3, 17),
        "b \N{CAT}": FittedQuestion(Calibration(points=((0.1, 0.2), (0.3, 0.4))), "x"),
    }
    kept, path = DecisionCalibration("abc", fitted), tmp_path / "kept.json"
    kept.save(path)
    assert DecisionCalibration.load(path) == kept
    value = kept.to_json()
    one = value["questions"]["a"]

    def changed(**members: object) -> dict[str, object]:
        return {**value, "questions": {"a": {**one, **members}}}

    less = {name: part for name, part in one.items() if name != "points"}
    wrong: list[object] = [[], {"a": 1}, {**value, "questions": {"a": less}}, {**value, "questions": 3}]
    for told, wrongs in {
        "no calibration": [*wrong, changed(temperature="x")],
        "cannot be": [
            *(changed(temperature=one) for one in (0, math.inf, math.nan)),
            *(changed(points=one) for one in ([[0.3, 0.1], [0.2, 0.4]], [[0.3, 7]], [[math.nan, 0.5]])),
        ],
        "version": [{**value, "version": 2}],
        "wrongly": [changed(orders=-1), changed(question=3), changed(num_examples=True), {**value, "model": None}],
    }.items():
        for bad in wrongs:
            with pytest.raises(RequestError, match=told):
                DecisionCalibration.from_json(bad)
    for text in ("{", "[1]"):
        path.write_text(text)
        with pytest.raises(RequestError, match=r"kept\.json"):
            DecisionCalibration.load(path)
    with pytest.raises(RequestError, match=r"none\.json"):
        DecisionCalibration.load(tmp_path / "none.json")


def test_a_question_is_known_by_all_that_it_says() -> None:
    base: list[Question] = [
        YesNo(instructions="a"),
        YesNo(yes="a"),
        YesNo(no="a"),
        YesNo(instructions={"a": 1}),
        YesNo(instructions='{"a": 1}'),
        Choice(options={"a": None, "b": None}, instructions="a"),
        Choice(options={"b": None, "a": None}, instructions="a"),
        Choice(options={"a": "x", "b": None}, instructions="a"),
        Score(levels=["a", "b"]),
        Score(levels=["a", "b"], instructions="a"),
    ]
    assert len({question_digest(one) for one in base}) == len(base)
    assert question_digest(YesNo(instructions="a")) == question_digest(base[0])


STATES = ["The dog ran.", "Tom was sad.", "They played.", "It rained.", "A cat sat.", "The sun shone."]
ASKED = {
    "far": YesNo(instructions="Did it run?"),
    "who": Choice(options={"the dog": None, "Tom": "a boy", "none": None}),
    "mood": Score(levels=["sad", "so", "happy"]),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localinfer.load(context_length=2048) as loaded:
        yield loaded


@pytest.mark.parametrize("method", METHODS)
def test_a_model_answers_calibrated(llm: LLM, tmp_path: Path, method: str) -> None:
    right = [{"far": index % 2 == 0, "who": "Tom", "mood": index % 3} for index in range(len(STATES))]
    del right[3]["who"]
    fitted = DecisionCalibration.fit(llm, ASKED, zip(STATES, right, strict=True), method=method)
    assert {name: one.num_examples for name, one in fitted.questions.items()} == {"far": 6, "who": 5, "mood": 6}
    fitted.save(tmp_path / "kept.json")
    raw = llm.decide(STATES[0], ASKED)
    found = llm.decide(STATES[0], ASKED, calibration=fitted)
    assert (found.uncalibrated, raw.uncalibrated, found.model) == (raw.answers, {}, fitted.model)
    for name, question in ASKED.items():
        assert found.answers[name] == fitted.questions[name].calibration.answer(question, raw.answers[name])
        assert found.answers[name] != raw.answers[name]
        alone = llm.decide(STATES[0], {name: question}, calibration=str(tmp_path / "kept.json"))
        assert alone.answers[name] == found.answers[name]
    again = asyncio.run(llm.adecide(STATES[0], {**ASKED, "new": YesNo(yes="a")}, calibration=tmp_path / "kept.json"))
    assert {name: again.answers[name] for name in ASKED} == found.answers
    assert again.uncalibrated == raw.answers, "a question without a calibration stays as it is"


def test_a_calibration_of_something_else_is_refused(llm: LLM) -> None:
    model = llm.decide(STATES[0], ASKED).model
    fitted = {"who": FittedQuestion(Calibration(2.0), question_digest(ASKED["who"]))}
    other = {**ASKED, "who": Choice(options={"the dog": None, "Tom": "a girl", "none": None})}
    for calibration, questions, orders, told in (
        (DecisionCalibration("0" * 32, fitted), ASKED, 1, "another model"),
        (DecisionCalibration(model, fitted), other, 1, "other words"),
        (DecisionCalibration(model, fitted), ASKED, 2, "2 are asked for"),
        (3, ASKED, 1, "calibration is 3"),
    ):
        with pytest.raises(RequestError, match=told):
            llm.decide(STATES[0], questions, orders=orders, calibration=calibration)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no question here"):
        DecisionCalibration.fit(llm, ASKED, [("a", {"what": True})])
    with pytest.raises(RequestError, match="no examples"):
        DecisionCalibration.fit(llm, ASKED, [("a", {})])


def test_expected_answers_are_read() -> None:
    question = YesNo(instructions="a")
    assert [right_answer(question, one) for one in (True, "yes", False, "No")] == [0, 0, 1, 1]
    assert right_answer(CHOICE, "c") == 2
    assert right_answer(Score(levels=["a", "b"]), 1) == 1
    for wrong_question, value in (
        (question, 1),
        (question, "maybe"),
        (CHOICE, "d"),
        (CHOICE, 1),
        (Score(levels=["a", "b"]), 2),
        (Score(levels=["a", "b"]), True),
    ):
        with pytest.raises(RequestError, match="expected answer"):
            right_answer(wrong_question, value)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(RequestError, match="method"):
        fit([Example([0.5, 0.5], 0)], "platt")
    with pytest.raises(RequestError, match="no examples"):
        fit([], "temperature")
    with pytest.raises(RequestError, match="at least 4"):
        cross_measure([Example([0.5, 0.5], 0)] * 3, "temperature")

"""Calibration of decisions against what is known of temperatures and of isotonic regression."""

import json
import math

import numpy as np
import pytest

from localinfer.errors import RequestError
from localinfer.generation.decision_calibration import (
    METHODS,
    Calibration,
    Example,
    cross_measure,
    fit,
    from_json,
    isotonic,
    measure,
    right_answer,
    to_json,
)
from localinfer.generation.questions import Choice, Score, YesNo, answer_of, probabilities_of

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


def test_calibrations_are_kept_as_json() -> None:
    kept = {"a": Calibration(0.5), "b": Calibration(points=((0.1, 0.2), (0.3, 0.4)))}
    assert from_json(json.loads(json.dumps(to_json(kept)))) == kept
    for wrong in ([], {"a": 1}, {"a": {"temperature": 1}}, {"a": {"temperature": "x", "points": []}}):
        with pytest.raises(RequestError, match="no calibration"):
            from_json(wrong)
    for temperature, points in ((0, []), (math.inf, []), (1, [[0.3, 0.1], [0.2, 0.4]])):
        with pytest.raises(RequestError, match="cannot be"):
            from_json({"a": {"temperature": temperature, "points": points}})


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

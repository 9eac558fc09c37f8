"""Calibration of decisions: probabilities that are as often right as they say, fitted on labelled examples.

A temperature divides all log probabilities (Guo et al., On Calibration of Modern Neural Networks, arXiv 1706.04599):
the likeliest answer stays the likeliest. Isotonic regression maps each answer's probability to how often such a
probability was right, by pool adjacent violators (Zadrozny and Elkan, Transforming Classifier Scores into Accurate
Multiclass Probability Estimates, KDD 2002): it bends as it needs to, and needs more examples.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from localinfer.arguments import shown
from localinfer.errors import RequestError
from localinfer.generation.questions import Answer, Choice, Question, YesNo, answer_of, num_answers, probabilities_of

METHODS = ("temperature", "isotonic")
LEAST_EXAMPLES = 4
"""Of each question, so that either half has two."""
_LEAST_TEMPERATURE, _LARGEST_TEMPERATURE, _STEPS = 1 / 32, 32.0, 40
_LEAST_PROBABILITY = 1e-12


@dataclass(frozen=True)
class Calibration:
    """Change of the probabilities of one question's answers."""

    temperature: float = 1.0
    """Divides log probabilities; above 1 answers become less certain."""
    points: tuple[tuple[float, float], ...] = ()
    """Pairs of a probability and the one in its place, both rising, with lines in between; empty for no such map."""

    def apply(self, probabilities: Sequence[float]) -> list[float]:
        """The calibrated probabilities, which sum to 1 again."""
        if self.points:
            made = [self._mapped(one) for one in probabilities]
        else:
            largest = math.log(max(*probabilities, _LEAST_PROBABILITY))
            made = [
                math.exp((math.log(max(one, _LEAST_PROBABILITY)) - largest) / self.temperature) for one in probabilities
            ]
        total = sum(made)
        return [one / total for one in made] if total > 0 else [1 / len(made)] * len(made)

    def answer(self, question: Question, answer: Answer) -> Answer:
        """The answer with calibrated probabilities."""
        return answer_of(question, self.apply(probabilities_of(answer)), answer.label_mass)

    def _mapped(self, probability: float) -> float:
        places = [place for place, _ in self.points]
        after = bisect_left(places, probability)
        if after == 0 or after == len(places):
            return self.points[min(after, len(places) - 1)][1]
        (low, left), (high, right) = self.points[after - 1], self.points[after]
        return left + (right - left) * (probability - low) / (high - low)


class Example(NamedTuple):
    """Probabilities of a question's answers, and the index of the right one."""

    probabilities: Sequence[float]
    right: int


class Reliability(NamedTuple):
    """Answers whose probability was in one tenth: how many, their mean probability, and the share that was right."""

    num_answers: int
    probability: float
    share: float


@dataclass(frozen=True)
class CalibrationReport:
    """Quality of probabilities on labelled examples."""

    accuracy: float
    """Share of examples whose likeliest answer was right."""
    log_loss: float
    """Mean of the negative logarithm of the right answer's probability."""
    error: float
    """Expected calibration error: mean distance of probability and share over tenths, by their counts."""
    tenths: tuple[Reliability, ...]
    """The tenths from 0 to 1."""


def fit(examples: Sequence[Example], method: str) -> Calibration:
    """Fit a calibration to one question's examples. Raises: RequestError for too few, or another method."""
    if method not in METHODS:
        raise RequestError(f"method is {shown(method)}; give {' or '.join(METHODS)}")
    if not examples:
        raise RequestError("there are no examples to fit a calibration to; give some with their right answers")
    if method == "isotonic":
        pairs = [
            (one, float(index == example.right))
            for example in examples
            for index, one in enumerate(example.probabilities)
        ]
        return Calibration(points=tuple(isotonic(pairs)))

    def loss(log_temperature: float) -> float:
        made = Calibration(math.exp(log_temperature))
        return measure([Example(made.apply(one.probabilities), one.right) for one in examples]).log_loss

    return Calibration(math.exp(_lowest(loss, math.log(_LEAST_TEMPERATURE), math.log(_LARGEST_TEMPERATURE))))


def measure(examples: Sequence[Example]) -> CalibrationReport:
    """Measure probabilities on examples, at least one."""
    hits = []
    for probabilities, right in examples:
        best = max(range(len(probabilities)), key=lambda index: probabilities[index])
        hits.append((probabilities[best], best == right))
    tenths = []
    for tenth in range(10):
        inside = [hit for hit in hits if min(9, int(hit[0] * 10)) == tenth]
        count = len(inside)
        mean, share = (sum(column) / count for column in zip(*inside, strict=True)) if inside else (0.0, 0.0)
        tenths.append(Reliability(count, mean, share))
    losses = [-math.log(max(probabilities[right], _LEAST_PROBABILITY)) for probabilities, right in examples]
    return CalibrationReport(
        accuracy=sum(is_right for _, is_right in hits) / len(hits),
        log_loss=sum(losses) / len(losses),
        error=sum(one.num_answers * abs(one.probability - one.share) for one in tenths) / len(hits),
        tenths=tuple(tenths),
    )


def cross_measure(examples: Sequence[Example], method: str) -> CalibrationReport:
    """Measure a calibration on examples that it was not fitted to: each half by the other.

    Raises: RequestError for fewer than `LEAST_EXAMPLES`.
    """
    if len(examples) < LEAST_EXAMPLES:
        raise RequestError(f"there are {len(examples)} examples; give at least {LEAST_EXAMPLES} of each question")
    halves = examples[::2], examples[1::2]
    made = []
    for fitted, measured in (halves, halves[::-1]):
        calibration = fit(fitted, method)
        made += [Example(calibration.apply(one.probabilities), one.right) for one in measured]
    return measure(made)


def right_answer(question: Question, value: Any) -> int:
    """The index of an expected answer: yes or no as a boolean or text, an option's name, or a level's number.

    Raises: RequestError for what is none of its answers.
    """
    if isinstance(question, YesNo):
        found = (
            {True: 0, False: 1, "yes": 0, "no": 1, "Yes": 0, "No": 1}.get(value)
            if isinstance(value, bool | str)
            else None
        )
        wanted = "true or false"
    elif isinstance(question, Choice):
        names = list(question.options)
        found, wanted = (names.index(value) if value in names else None), "the name of an option"
    else:
        is_level = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_answers(question)
        found, wanted = (value if is_level else None), f"a level from 0 to {num_answers(question) - 1}"
    if found is None:
        raise RequestError(f"the expected answer is {shown(value)}; give {wanted}")
    return found


def to_json(calibrations: Mapping[str, Calibration]) -> dict[str, Any]:
    """Calibrations by question as JSON holds them."""
    return {name: {"temperature": one.temperature, "points": list(one.points)} for name, one in calibrations.items()}


def from_json(value: Any) -> dict[str, Calibration]:
    """Read what `to_json` wrote. Raises: RequestError for anything else."""
    made = {}
    try:
        for name, one in value.items():
            points = tuple((float(place), float(probability)) for place, probability in one["points"])
            made[name] = Calibration(float(one["temperature"]), points)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RequestError("this is no calibration of questions; write one with `localinfer decide --fit`") from None
    if any(not 0 < one.temperature < math.inf or list(one.points) != sorted(one.points) for one in made.values()):
        raise RequestError("a calibration has a temperature or points that cannot be; fit it anew")
    return made


def isotonic(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The rising map that is nearest to pairs of a place and a value, by squares: its corners in order.

    Pool adjacent violators: blocks whose means fall are joined until all rise.
    """
    blocks: list[tuple[float, float, float, int]] = []
    for place, value in sorted(pairs):
        blocks.append((place, place, value, 1))
        while len(blocks) > 1 and (
            blocks[-2][2] * blocks[-1][3] >= blocks[-1][2] * blocks[-2][3] or blocks[-2][1] == blocks[-1][0]
        ):
            _, last, total, count = blocks.pop()
            first, _, former, others = blocks.pop()
            blocks.append((first, last, former + total, others + count))
    corners: list[tuple[float, float]] = []
    for first, last, total, count in blocks:
        corners += [(first, total / count)] if first == last else [(first, total / count), (last, total / count)]
    return corners


def _lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """The argument at which a function with one valley is lowest, by golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(_STEPS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2

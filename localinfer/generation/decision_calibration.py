"""Calibration of decisions: probabilities that are as often right as they say, fitted on labelled examples.

A temperature divides all log probabilities (Guo et al., On Calibration of Modern Neural Networks, arXiv 1706.04599):
the likeliest answer stays the likeliest. Isotonic regression maps each answer's probability to how often such a
probability was right, by pool adjacent violators (Zadrozny and Elkan, Transforming Classifier Scores into Accurate
Multiclass Probability Estimates, KDD 2002): it bends as it needs to, and needs more examples.

A calibration holds for one model, one question and one number of orders: of any other it would say numbers that were
never measured, so it is refused there.
"""

import hashlib
import json
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, TypedDict

from localinfer.arguments import shown
from localinfer.errors import RequestError
from localinfer.generation.questions import (
    Answer,
    Choice,
    Content,
    Decisions,
    Messages,
    Question,
    YesNo,
    answer_of,
    checked_question,
    num_answers,
    probabilities_of,
    written,
)
from localinfer.system.files import OutputFile, read_bounded

METHODS = ("temperature", "isotonic")
LEAST_EXAMPLES = 4
"""Of each question, so that either half has two."""
_LEAST_TEMPERATURE, _LARGEST_TEMPERATURE, _STEPS = 1 / 32, 32.0, 40
_LEAST_PROBABILITY = 1e-12
_VERSION = 1
"""Of the file of a calibration."""
_MOST_FILE_BYTES = 16 << 20


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


def fit_each(
    questions: Mapping[str, Question], examples: Mapping[str, Sequence[Example]], *, method: str, orders: int = 1
) -> "dict[str, FittedQuestion]":
    """Fit a calibration to the examples of each question. Raises: RequestError as of `fit`."""
    if not examples:
        raise RequestError("there are no examples to fit a calibration to; give some with their right answers")
    return {
        name: FittedQuestion(fit(measured, method), question_digest(questions[name]), orders, len(measured))
        for name, measured in examples.items()
    }


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


class Deciding(Protocol):
    """A model that decides, as `localinfer.LLM` does."""

    def decide(self, state: Content, questions: Mapping[str, Question], *, orders: int = 1) -> Decisions:
        """See `LLM.decide`."""
        ...


@dataclass(frozen=True)
class FittedQuestion:
    """The calibration of one question."""

    calibration: Calibration
    """Change of its answers' probabilities."""
    question: str
    """Digest of its kind, instructions and criteria."""
    orders: int = 1
    """Number of orders in which it was asked."""
    num_examples: int = 0
    """Labelled examples that it was fitted to."""


@dataclass(frozen=True)
class DecisionCalibration:
    """Calibrations of one model's answers, by the names of their questions."""

    model: str
    """`Decisions.model` of the model that was measured."""
    questions: Mapping[str, FittedQuestion]
    """Calibrations by the questions' names."""

    @classmethod
    def fit(
        cls,
        llm: Deciding,
        questions: Mapping[str, Question],
        examples: Iterable[tuple[Content, Mapping[str, Any]]],
        *,
        method: str = "temperature",
        orders: int = 1,
    ) -> Self:
        """Ask a model about labelled states, and fit a calibration to each question that some of them answer.

        examples: states, and right answers by the questions' names: true or false, an option's name, a level's number.
        method: "temperature" or "isotonic". Raises: what `LLM.decide` raises; RequestError for no examples, an answer
            that is none, or another method.
        """
        found: dict[str, list[Example]] = {}
        model = ""
        for state, expected in examples:
            if unknown := [name for name in expected if name not in questions]:
                raise RequestError(f"an example expects an answer to {unknown[0]!r}, which is no question here")
            asked = {name: questions[name] for name in expected}
            right = {name: right_answer(checked_question(asked[name]), expected[name]) for name in expected}
            if not asked:
                continue
            decided = llm.decide(state, asked, orders=orders)
            model = decided.model
            for name, answer in decided.answers.items():
                found.setdefault(name, []).append(Example(probabilities_of(answer), right[name]))
        return cls(model, fit_each(questions, found, method=method, orders=orders))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file of JSON. Raises: OSError, and RequestError for a path that cannot be written."""
        with OutputFile(path) as output:
            output.write(f"{json.dumps(self.to_json(), indent=1, ensure_ascii=False)}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` or `localinfer decide --fit` wrote. Raises: RequestError for any other."""
        try:
            return cls.from_json(json.loads(read_bounded(path, _MOST_FILE_BYTES)))
        except (OSError, ValueError) as error:
            raise RequestError(f"{os.fspath(path)} is no calibration that can be read ({error})") from None
        except RequestError as error:
            raise RequestError(f"{os.fspath(path)}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """The calibration as JSON holds it."""
        questions = {
            name: {
                "question": one.question,
                "orders": one.orders,
                "num_examples": one.num_examples,
                "temperature": one.calibration.temperature,
                "points": [list(point) for point in one.calibration.points],
            }
            for name, one in self.questions.items()
        }
        return {"version": _VERSION, "model": self.model, "questions": questions}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what `to_json` made. Raises: RequestError for anything else."""
        try:
            version, model, fitted = value["version"], value["model"], {}
            for name, one in value["questions"].items():
                points = tuple((float(place), float(probability)) for place, probability in one["points"])
                calibration = Calibration(float(one["temperature"]), points)
                fitted[name] = FittedQuestion(calibration, one["question"], one["orders"], one["num_examples"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise RequestError(
                "this is no calibration of a model's answers; write one with `localinfer decide --fit` or "
                "DecisionCalibration.fit"
            ) from None
        if version != _VERSION:
            raise RequestError(f"this calibration has version {shown(version)}; wanted {_VERSION}: fit it anew")
        texts = (model, *(one.question for one in fitted.values()))
        counts = [count for one in fitted.values() for count in (one.orders, one.num_examples)]
        if not all(isinstance(text, str) for text in texts) or not all(
            type(count) is int and count >= 0 for count in counts
        ):
            raise RequestError("a calibration names its model, question, orders or examples wrongly; fit it anew")
        for calibration in (one.calibration for one in fitted.values()):
            values = [number for point in calibration.points for number in point]
            is_rising = list(calibration.points) == sorted(calibration.points)
            if not 0 < calibration.temperature < math.inf or not is_rising or not all(0 <= one <= 1 for one in values):
                raise RequestError("a calibration has a temperature or points that cannot be; fit it anew")
        return cls(model, fitted)

    def check(self, model: str, questions: Mapping[str, Question], orders: int) -> None:
        """Check that the calibration is of this model, and of those of these questions that it names.

        Raises: RequestError naming what differs.
        """
        if self.model != model:
            raise RequestError(
                f"the calibration was fitted to another model ({self.model:.12}, this one is {model:.12}); fit one to "
                "this model"
            )
        for name in questions.keys() & self.questions.keys():
            fitted = self.questions[name]
            if fitted.question != question_digest(questions[name]):
                raise RequestError(
                    f"the calibration of {name!r} was fitted to a question of other words; fit it anew, or give this "
                    "question another name"
                )
            if fitted.orders != orders:
                raise RequestError(
                    f"the calibration of {name!r} was fitted to {fitted.orders} orders, and {orders} are asked for; "
                    f"ask for {fitted.orders}, or fit it anew"
                )

    def apply(self, decisions: Decisions, questions: Mapping[str, Question]) -> Decisions:
        """The decisions with calibrated answers to those questions that the calibration names."""
        answers, uncalibrated = dict(decisions.answers), {}
        for name in answers.keys() & self.questions.keys():
            uncalibrated[name] = answers[name]
            answers[name] = self.questions[name].calibration.answer(questions[name], answers[name])
        return replace(decisions, answers=answers, uncalibrated=uncalibrated)


class DecisionOptions(TypedDict, total=False):
    """Keyword options of `decide`.

    messages: a conversation in place of the state, with parts as of `chat`, behind which each question is asked.
    orders: ask a `Choice` in so many orders of its options, each shifted by an equal part, and average: small models
        prefer what stands first. 1 by default.
    cache_salt: as of `complete`.
    on_encoded: called before anything is computed with how many tokens the prompts have, their common beginning once;
        may raise.
    calibration: a `DecisionCalibration`, or its file, that changes the probabilities of the questions that it names;
        one of another model or question is refused.
    """

    messages: Messages | None
    orders: int
    cache_salt: str | None
    on_encoded: Callable[[int], object] | None
    calibration: DecisionCalibration | str | os.PathLike[str] | None


def question_digest(question: Question) -> str:
    """Digest of a question's kind, instructions and criteria."""
    match question:
        case YesNo():
            criteria: list[Any] = [question.yes, question.no]
        case Choice():
            criteria = list(question.options.items())
        case _:
            criteria = list(question.levels)
    said = written([type(question).__name__, question.instructions, criteria])
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:32]


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

"""Questions of a decision and their answers: records, and questions as JSON writes them.

Confidence is that of the System One API: the distance of the likeliest option from a guess, and for levels the mean
distance from the likeliest level, as shares of what they can be.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localinfer.arguments import shown
from localinfer.errors import RequestError

Content = str | Mapping[str, Any] | Sequence[Any] | None
"""Text, or what JSON may hold, which is written as JSON; None for nothing."""
Messages = Sequence[Mapping[str, Any]]

MOST_OPTIONS = 255
MOST_LEVELS = 10
_YES_NO_KEYS = (("true", "yes"), ("false", "no"))
"""Names in JSON of the description of yes, and of no; llama.cpp reads the second of each for `lfm2-d1-omni`."""


@dataclass(frozen=True, kw_only=True)
class YesNo:
    """A question whose answer is yes or no, or a statement that is true or not."""

    instructions: Content = None
    """The question or statement; may be None where an answer is described."""
    yes: Content = None
    """Description of what counts as yes."""
    no: Content = None
    """Description of what counts as no."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A question that chooses one of 2 to 255 options."""

    options: Mapping[str, Content]
    """Descriptions by the names of the options, None for a name that says enough."""
    instructions: Content = None
    """The question."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A question that rates by 2 to 10 levels in order."""

    levels: Sequence[Content]
    """Descriptions of the levels, the lowest first; each counts as much as its index."""
    instructions: Content = None
    """The question."""


Question = YesNo | Choice | Score


@dataclass(frozen=True, kw_only=True)
class YesNoAnswer:
    """The answer to a `YesNo`."""

    probability: float
    """Probability of yes."""
    label_mass: float
    """Probability that the model answers with a label at all; near 0 it does not understand the question so."""


@dataclass(frozen=True, kw_only=True)
class ChoiceAnswer:
    """The answer to a `Choice`."""

    choice: str
    """The likeliest option, the first of equal ones."""
    probabilities: Mapping[str, float]
    """Probabilities by option, in order."""
    confidence: float
    """0 if all options are equally likely, 1 if one is certain."""
    label_mass: float
    """As of `YesNoAnswer`."""


@dataclass(frozen=True, kw_only=True)
class ScoreAnswer:
    """The answer to a `Score`."""

    score: float
    """The mean of the levels, by their probabilities."""
    probabilities: tuple[float, ...]
    """Probabilities of the levels."""
    confidence: float
    """1 if one level is certain, less the farther from the likeliest level others are."""
    label_mass: float
    """As of `YesNoAnswer`."""


Answer = YesNoAnswer | ChoiceAnswer | ScoreAnswer


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Answers, and what they cost."""

    answers: Mapping[str, Answer]
    """The answers by the names of their questions."""
    state_tokens: int
    """Tokens before the first question, which all share."""
    prompt_tokens: int
    """Those and the tokens of all questions."""
    cached_tokens: int
    """Tokens of the state that were not computed again."""
    computed_tokens: int
    """Rows that the model computed."""
    uncalibrated: Mapping[str, Answer] = field(default_factory=dict)
    """The answers as the model gave them, of those questions whose answers a calibration changed."""
    model: str = ""
    """Digest of the model, to which calibrations are tied."""


def check_request(
    state: Content,
    questions: Mapping[str, Question],
    messages: Messages | None,
    on_encoded: Callable[[int], object] | None,
    *,
    may_lack_state: bool = False,
) -> None:
    """Check what every way of deciding is asked with, but for the questions themselves. Raises: RequestError."""
    if (state is None) == (messages is None) and not (may_lack_state and state is None):
        found = "a state or messages are needed, and one of them; give what is to be decided about"
        raise RequestError(found, field="state")
    if not isinstance(questions, Mapping) or not questions:
        raise RequestError(f"questions is {shown(questions)}; give at least one, by name", field="questions")
    if on_encoded is not None and not callable(on_encoded):
        raise RequestError(f"{shown(on_encoded)} is no function that takes a number of tokens; give one, or None")


def checked_question(question: Question) -> Question:
    """Return a question that can be asked. Raises: RequestError with the `field` at fault."""
    if isinstance(question, YesNo):
        if question.instructions is None and question.yes is None and question.no is None:
            raise RequestError(
                "a yes/no question needs instructions, or an answer that is described", field="instructions"
            )
    elif isinstance(question, Choice):
        if not isinstance(question.options, Mapping):
            raise RequestError(f"options is {shown(question.options)}; give descriptions by name", field="criteria")
        if not 2 <= len(question.options) <= MOST_OPTIONS:
            found = f"a choice has {len(question.options)} options; give 2 to {MOST_OPTIONS}"
            raise RequestError(found, field="criteria")
        if wrong := [name for name in question.options if not isinstance(name, str) or not name]:
            raise RequestError(f"the name of an option is {shown(wrong[0])}; give a text", field="criteria")
    elif isinstance(question, Score):
        if isinstance(question.levels, str | Mapping) or not isinstance(question.levels, Sequence):
            raise RequestError(f"levels is {shown(question.levels)}; give a list of descriptions", field="criteria")
        if not 2 <= len(question.levels) <= MOST_LEVELS:
            found = f"a score has {len(question.levels)} levels; give 2 to {MOST_LEVELS}"
            raise RequestError(found, field="criteria")
        if None in question.levels:
            raise RequestError("a level of a score is None; describe it", field="criteria")
    else:
        raise RequestError(f"a question is {shown(question)}; give a YesNo, Choice or Score")
    return question


def read_question(value: Mapping[str, Any]) -> Question:
    """Read a question as JSON writes it: {"type", "instructions", "criteria"}, where the criteria are {"true", "false"}
    (or {"yes", "no"}) for type "noul" (or "yes_no"), descriptions by name for "choice", and a list for "score".

    Raises: RequestError with the `field` at fault.
    """
    if not isinstance(value, Mapping):
        raise RequestError(f"a question is {shown(value)}; give an object with a type")
    kind, instructions, criteria = (value.get(name) for name in ("type", "instructions", "criteria"))
    if not isinstance(instructions, str | Mapping | list | None):
        raise RequestError(
            f"instructions is {shown(instructions)}; give text, an object or a list", field="instructions"
        )
    match kind:
        case "noul" | "yes_no":
            named = {} if criteria is None else criteria
            given = [[key for key in keys if key in named] for keys in _YES_NO_KEYS if isinstance(named, Mapping)]
            if not given or sum(map(len, given)) < len(named) or max(map(len, given)) > 1:
                found = f'criteria is {shown(criteria)}; give {{"true": ..., "false": ...}}, or nothing'
                raise RequestError(found, field="criteria")
            yes, no = (named[keys[0]] if keys else None for keys in given)
            return checked_question(YesNo(instructions=instructions, yes=yes, no=no))
        case "choice":
            return checked_question(Choice(options=criteria, instructions=instructions))  # type: ignore[arg-type]
        case "score":
            return checked_question(Score(levels=criteria, instructions=instructions))  # type: ignore[arg-type]
    raise RequestError(f"type is {shown(kind)}; give noul, choice or score", field="type")


def written(content: Content) -> str:
    """Content as the model reads it. Raises: RequestError for what JSON cannot hold."""
    if isinstance(content, str):
        return content
    try:
        if not isinstance(content, Mapping | Sequence):
            raise TypeError
        return json.dumps(content, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise RequestError(f"{shown(content)} is neither text nor what JSON holds; give one of them") from None


def num_answers(question: Question) -> int:
    """Number of answers that a question has."""
    match question:
        case YesNo():
            return 2
        case Choice():
            return len(question.options)
        case Score():
            return len(question.levels)


def answer_of(question: Question, probabilities: Sequence[float], label_mass: float) -> Answer:
    """The answer that the probabilities of a question's answers make, in order; yes comes before no."""
    if isinstance(question, YesNo):
        return YesNoAnswer(probability=probabilities[0], label_mass=label_mass)
    size, best = len(probabilities), max(range(len(probabilities)), key=lambda index: probabilities[index])
    if isinstance(question, Choice):
        named = dict(zip(question.options, probabilities, strict=True))
        confidence = max(0.0, (probabilities[best] - 1 / size) / (1 - 1 / size))
        choice = list(named)[best]
        return ChoiceAnswer(choice=choice, probabilities=named, confidence=confidence, label_mass=label_mass)
    spread = sum(one * abs(level - best) for level, one in enumerate(probabilities))
    uniform = sum(abs(level - (size - 1) / 2) for level in range(size)) / size
    return ScoreAnswer(
        score=sum(level * one for level, one in enumerate(probabilities)),
        probabilities=tuple(probabilities),
        confidence=max(0.0, 1 - spread / uniform),
        label_mass=label_mass,
    )


def probabilities_of(answer: Answer) -> list[float]:
    """The probabilities that an answer was made of, as `answer_of` takes them."""
    match answer:
        case YesNoAnswer():
            return [answer.probability, 1 - answer.probability]
        case ChoiceAnswer():
            return list(answer.probabilities.values())
        case ScoreAnswer():
            return list(answer.probabilities)

"""Decisions: typed questions about a state, answered by the probabilities of labels, without generating text.

A question is asked behind the state, in the last message of the user, and names a label for each of its answers: "Yes"
and "No", letters or numbers. The answer's probabilities are those that the model gives to the labels where its reply
begins, scaled to sum to 1. The state comes first, so it is read once, for all questions and for later calls; questions
do not see each other, so an answer depends on the state, its own question and the model only.

Confidence is that of the System One API: the distance of the likeliest option from a guess, and for levels the mean
distance from the likeliest level, as shares of what they can be.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import check_number, shown
from localinfer.engine.cache.block_hashes import salt_of
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.errors import RequestError
from localinfer.generation.chat.media_parts import Segments
from localinfer.generation.chat.reply import ReplyRequest
from localinfer.generation.chat_model import ChatHistory, ChatModel
from localinfer.generation.label_scores import Label, LabelPrompt, score_labels

if TYPE_CHECKING:
    from localinfer.generation.media import MediaReader
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.storage.chats import EncodedChat

Content = str | Mapping[str, Any] | Sequence[Any] | None
"""Text, or what JSON may hold, which is written as JSON; None for nothing."""
Messages = Sequence[Mapping[str, Any]]

MOST_OPTIONS = 255
MOST_LEVELS = 10
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_YES_NO = ("Yes", "No")
_PROBE = "?"
"""A question that begins like no other: what it shares with others is the state."""


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


class DecisionOptions(TypedDict, total=False):
    """Keyword options of `decide`.

    messages: a conversation in place of the state, with parts as of `chat`, behind which each question is asked.
    orders: ask a `Choice` in so many orders of its options, each shifted by an equal part, and average: small models
        prefer what stands first. 1 by default.
    cache_salt: as of `complete`.
    on_encoded: called before anything is computed with how many tokens the prompts have, their common beginning once;
        may raise.
    """

    messages: Messages | None
    orders: int
    cache_salt: str | None
    on_encoded: Callable[[int], object] | None


class DecisionModel:
    """Answers questions with one model; threads may share it."""

    def __init__(
        self, engine: Engine, chats: ChatModel, tokenizer: "Tokenizer", media: "MediaReader | None" = None
    ) -> None:
        self._engine = engine
        self._chats = chats
        self._tokenizer = tokenizer
        # Of its own and never told of a reply: equal messages are equal ids, whatever was said before.
        self._history = ChatHistory(chats.template, tokenizer, media=media)
        self._labels: dict[str, Label] = {}

    def decide(
        self,
        state: Content,
        questions: Mapping[str, Question],
        *,
        messages: Messages | None = None,
        orders: int = 1,
        cache_salt: str | None = None,
        on_encoded: Callable[[int], object] | None = None,
    ) -> Decisions:
        """Answer questions, given by name. Raises: RequestError, MessageError, ContextLengthError, ClosedError."""
        orders = check_number("orders", orders, 1, MOST_OPTIONS)
        if (state is None) == (messages is None):
            raise RequestError("a state or messages are needed, and one of them; give what is to be decided about")
        if not isinstance(questions, Mapping) or not questions:
            raise RequestError(f"questions is {shown(questions)}; give at least one, by name", field="questions")
        salt = salt_of(cache_salt)
        asked = [{"role": "user", "content": written(state)}] if messages is None else messages
        request = self._chats.formats.request({"thinking": False}, salt)
        forms = [form for question in questions.values() for form in _forms(checked_question(question), orders)]
        chats = [self._encode(request, asked, form.text) for form in forms]
        probe = self._encode(request, asked, _PROBE)
        state_tokens = min(_shared(probe.token_ids, chat.token_ids) for chat in chats)
        prompt_tokens = state_tokens + sum(chat.token_ids.size - state_tokens for chat in chats)
        if on_encoded is not None:
            on_encoded(prompt_tokens)
        scores = score_labels(
            self._engine,
            [
                LabelPrompt(chat.token_ids, tuple(map(partial(self._label, request), form.labels)))
                for chat, form in zip(chats, forms, strict=True)
            ],
            CacheHints(system_tokens=state_tokens, branch_tokens=(state_tokens,), salt=salt),
            chats[0].media,
        )
        found = iter(zip(forms, scores.logprobs, strict=True))
        answers = {name: _answer(question, found, orders) for name, question in questions.items()}
        return Decisions(
            answers=answers,
            state_tokens=state_tokens,
            prompt_tokens=prompt_tokens,
            cached_tokens=min(scores.cached_tokens, state_tokens),
            computed_tokens=scores.computed_tokens,
        )

    def _encode(self, request: ReplyRequest, messages: Messages, question: str, label: str = "") -> "EncodedChat":
        """The prompt in which a question is asked, up to the label of its answer, or with one."""

        def begin(text: str) -> Segments:
            reasoning = request.format.reasoning
            is_open = reasoning is not None and request.format_after(text).state == "open"
            closing = [(f"{reasoning.closing}\n\n", True)] if reasoning is not None and is_open else []
            return [*closing, *([(label, False)] if label else [])]

        read, _held = self._chats.read(_with_question(messages, question))
        return self._history.encode(
            request.split(read)[0],
            request.template_tools or None,
            request.variables,
            begin=begin,
            max_tokens=self._engine.context_length,
        )

    def _label(self, request: ReplyRequest, label: str) -> Label:
        """The ids of a label where a reply begins."""
        found = self._labels.get(label)
        if found is None:
            probe: Messages = [{"role": "user", "content": ""}]
            without, ids = (self._encode(request, probe, _PROBE, one).token_ids for one in ("", label))
            begins = _shared(without, ids) == without.size
            found = (
                tuple(map(int, ids[without.size :]))
                if begins
                else tuple(self._tokenizer.encode(label, add_special=False))
            )
            self._labels[label] = found
        return found


@dataclass(frozen=True)
class _Form:
    """A question as it is asked once."""

    text: str
    labels: tuple[str, ...]
    order: tuple[int, ...]
    """Index of the answer that each label stands for."""


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
    for type "noul" (or "yes_no"), descriptions by name for "choice", and a list of them for "score".

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
            if criteria is not None and not (isinstance(criteria, Mapping) and criteria.keys() <= {"true", "false"}):
                found = f'criteria is {shown(criteria)}; give {{"true": ..., "false": ...}}, or nothing'
                raise RequestError(found, field="criteria")
            yes, no = (None if criteria is None else criteria.get(name) for name in ("true", "false"))
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
        return json.dumps(content, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise RequestError(f"{shown(content)} is neither text nor what JSON holds; give one of them") from None


def _forms(question: Question, orders: int) -> list[_Form]:
    if isinstance(question, YesNo):
        described = [(label, one) for label, one in zip(_YES_NO, (question.yes, question.no), strict=True)]
        lines = [f"{label}: {written(one)}" for label, one in described if one is not None]
        return [_Form(_asked(question, "Is it so?", lines, "Answer with Yes or No."), _YES_NO, (0, 1))]
    if isinstance(question, Score):
        labels = tuple(map(str, range(len(question.levels))))
        lines = [f"{label}. {written(level)}" for label, level in zip(labels, question.levels, strict=True)]
        text = _asked(question, "Which level fits best?", lines, "Answer with the number of one level.")
        return [_Form(text, labels, tuple(range(len(labels))))]
    options = list(question.options.items())
    count = len(options)
    if count <= len(_LETTERS):
        labels, kind = tuple(_LETTERS[:count]), "letter"
    else:
        # Of one length, so that none is the beginning of another.
        labels, kind = tuple(f"{number:0{len(str(count))}}" for number in range(1, count + 1)), "number"
    forms = []
    for turn in range(min(orders, count)):
        first = turn * count // min(orders, count)
        order = tuple((first + place) % count for place in range(count))
        lines = [
            f"{label}. {options[index][0]}" + ("" if options[index][1] is None else f": {written(options[index][1])}")
            for label, index in zip(labels, order, strict=True)
        ]
        text = _asked(question, "Which option fits best?", lines, f"Answer with the {kind} of one option.")
        forms.append(_Form(text, labels, order))
    return forms


def _asked(question: Question, usual: str, lines: Sequence[str], ending: str) -> str:
    instructions = usual if question.instructions is None else written(question.instructions)
    return "\n\n".join((instructions, *(["\n".join(lines)] if lines else []), ending))


def _with_question(messages: Messages, question: str) -> Messages:
    """Messages with a question at their end: in the last one, if it is the user's."""
    if not messages or messages[-1].get("role") != "user":
        return [*messages, {"role": "user", "content": question}]
    *former, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*former, {**last, "content": f"{content}\n\n{question}" if content else question}]
    parts = content if isinstance(content, list | tuple) else [content]
    return [*former, {**last, "content": [*parts, {"type": "text", "text": f"\n\n{question}"}]}]


def _shared(first: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many leading ids two prompts share."""
    most = min(first.size, other.size)
    differs = np.flatnonzero(first[:most] != other[:most])
    return int(differs[0]) if differs.size else most


def _answer(question: Question, found: Any, orders: int) -> Answer:
    """The answer, from the log probabilities of the labels in each of its forms."""
    match question:
        case YesNo():
            size = len(_YES_NO)
        case Choice():
            size = len(question.options)
        case Score():
            size = len(question.levels)
    num_forms = min(orders, size) if isinstance(question, Choice) else 1
    total, mass = np.zeros(size), 0.0
    for _ in range(num_forms):
        form, logprobs = next(found)
        best = float(logprobs.max())
        weights = np.exp(logprobs - best)
        total[list(form.order)] += weights / weights.sum()
        mass += float(np.exp(best) * weights.sum())
    probabilities, mass = [float(one) for one in total / num_forms], min(1.0, mass / num_forms)
    if isinstance(question, YesNo):
        return YesNoAnswer(probability=probabilities[0], label_mass=mass)
    best_index = int(np.argmax(probabilities))
    if isinstance(question, Choice):
        names = list(question.options)
        confidence = (probabilities[best_index] - 1 / size) / (1 - 1 / size)
        return ChoiceAnswer(
            choice=names[best_index],
            probabilities=dict(zip(names, probabilities, strict=True)),
            confidence=max(0.0, confidence),
            label_mass=mass,
        )
    levels = np.arange(size)
    spread = float((np.array(probabilities) * np.abs(levels - best_index)).sum())
    uniform = float(np.abs(levels - (size - 1) / 2).mean())
    return ScoreAnswer(
        score=float((levels * np.array(probabilities)).sum()),
        probabilities=tuple(probabilities),
        confidence=max(0.0, 1 - spread / uniform),
        label_mass=mass,
    )

"""Models made for decisions: prompts, labels and temperatures as their files say, in place of questions in a chat.

A GGUF file with `<architecture>.decision.type` brings the prompt it was trained with, a template of its own, and a
temperature for each kind of question. Most types score an option by a label of one token, read where the prompt ends,
so they share the machinery of every other model; others have a head (`decision_heads`); the rest is refused by name.
The formats are those of llama.cpp's `/v1/systemone` (tools/server, from b11361 on).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from string import ascii_letters, ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import shown
from localinfer.engine.cache.block_hashes import common_length, salt_of
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.errors import RequestError, UnsupportedFormatError
from localinfer.generation.chat.media_parts import Segments, read_media_part
from localinfer.generation.label_scores import Label, LabelPrompt, LabelScores, score_labels
from localinfer.generation.questions import (
    MOST_OPTIONS,
    Answer,
    Choice,
    Content,
    Decisions,
    Messages,
    Question,
    Score,
    YesNo,
    answer_of,
    check_request,
    checked_question,
    written,
)

if TYPE_CHECKING:
    from localinfer.generation.decision_heads import DecisionHead, HeadPrompt, HeadScores
    from localinfer.models.text.chat_template import ChatTemplate
    from localinfer.models.text.tokenizer import Tokenizer

TEMPLATE_KEY = "tokenizer.chat_template.systemone"
_CODES = (*ascii_uppercase, *(first + second for first in ascii_uppercase for second in ascii_uppercase))
"""Labels of most types: those that are one token, in this order."""
_YES_NO_SPELLINGS = {"true": ("yes", "Yes", "YES"), "false": ("no", "No", "NO")}
_FURTHER_CODES = (
    *ascii_uppercase,
    *(f"{number:02}" for number in range(100)),
    *ascii_lowercase,
    *(f"#{number}" for number in range(200)),
    *_CODES[len(ascii_uppercase) :],
)
"""Labels of `lfm2-d1` in place of those that are several tokens."""


@dataclass(frozen=True)
class Readout:
    """Rules by which a type of model is asked, and the meaning of its labels."""

    codes: tuple[str, ...] = _CODES
    """Labels, in order; those of more than one token are left out."""
    names_labels: bool = True
    """True if the template is told them; otherwise it writes them itself, and all have to be single tokens."""
    true_first: bool = False
    """True if a yes/no question shows true before false."""
    num_ratings: int | None = None
    """Labels of a yes/no question from certainly no to certainly yes; None: it has two."""
    reverses_choices: bool = False
    """True if a choice is asked once more with its options in the reverse order, and averaged."""
    sorts_keys: bool = False
    """True if keys of objects are sorted, as in training."""
    sorts_choices: bool = False
    """True if a choice shows its options in the order of their names."""
    lists_questions: bool = False
    """True if each prompt lists all questions of the request."""
    flattens: bool = False
    """True if the template takes texts only, as which objects and lists are written, line by line."""
    labels_each: bool = False
    """True if labels depend on the question, and an answer has several spellings, of which the likeliest counts."""
    knows_labels_only: bool = False
    """True if the output matrix has zeros for every token but the labels."""
    may_lack_state: bool = False
    """True if a question may be asked about nothing."""
    buckets: tuple[tuple[int, str], ...] = ((2, "2"), (5, "3_5"), (10, "6_10"), (MOST_OPTIONS, "11"))
    """Names of temperatures by the most options that they are for."""


READOUTS = {
    "openjev": Readout(codes=(*ascii_uppercase, *ascii_lowercase), names_labels=False, true_first=True),
    "lev": Readout(
        num_ratings=9,
        reverses_choices=True,
        sorts_keys=True,
        buckets=((8, "small"), (26, "mid"), (MOST_OPTIONS, "large")),
    ),
    "nimble": Readout(lists_questions=True),
    "pplx-decider": Readout(knows_labels_only=True),
    "lfm2-d1": Readout(codes=(), true_first=True, labels_each=True, may_lack_state=True),
}
"""The types that are read by labels."""
HEADS = {
    "kev": Readout(codes=(), flattens=True),
    "laya": Readout(codes=()),
    "lfm2-d1-omni": Readout(codes=(), may_lack_state=True),
}
"""The types that have a head."""
JOINT = {"clef": Readout(codes=(), true_first=True, sorts_choices=True, knows_labels_only=True)}
"""The types whose head reads all questions at once."""
FOLDERS = {name: Readout(codes=()) for name in ("transformers", "transformers-jev")}
"""Those of transformers' folders, whose settings are their own."""

_OMNI_MARK = "<<d1omni:"
_OMNI_STATE, _OMNI_QUESTION, _OMNI_OPTION = (f"{_OMNI_MARK}{name}>>" for name in ("state", "question", "option"))
"""Given to the template: what it writes between pieces, and before those that have a length of their own."""
_MOST_TOKENS = 16384
_LEAST_BUDGET, _BUDGET_OF_OPTION, _SPARED = 96, 24, 32
_LEAST_QUESTION, _LEAST_OPTION, _TOKENS_AROUND_OPTION = 16, 2, 3
"""Tokens: of a prompt; of all options at least, for each of them, and besides; of a question and of an option at least;
around each option."""
_PROBE = YesNo(instructions="?")
"""A question that begins like no other: what it shares with others is the state."""
_SPACES = " \t\n\r"
_SPECIAL = re.compile(r"<\|([A-Za-z0-9_]+)\|>")


def decision_type(metadata: Mapping[str, object]) -> str | None:
    """The type of a model made for decisions, None for any other."""
    found = metadata.get(f"{metadata.get('general.architecture')}.decision.type")
    return found if isinstance(found, str) else None


def is_run(metadata: Mapping[str, object]) -> bool:
    """Return False for a model made for decisions of a type that is not run."""
    kind = decision_type(metadata)
    return kind is None or kind in READOUTS | HEADS | JOINT | FOLDERS


@dataclass(frozen=True)
class Prompt:
    """A question as it is asked once."""

    token_ids: NDArray[np.int32]
    labels: tuple[Label, ...]
    """Ids of each label; none where a head reads options."""
    groups: tuple[int, ...] | None
    """Labels that mean each answer; None for one each."""
    read: "HeadPrompt | None"
    """The same for a head."""
    num_outputs: int
    temperature: float
    is_reversed: bool = False


class TrainedDecisionModel:
    """Answers questions with a model made for it; threads may share it. Raises: UnsupportedFormatError."""

    _continues = False
    """True if each question's prompt continues that of the one before."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: "Tokenizer",
        template: "ChatTemplate",
        metadata: Mapping[str, object],
        head: "DecisionHead | None" = None,
    ) -> None:
        """template: that of `TEMPLATE_KEY`. head: the model's, for types that have one."""
        kind = decision_type(metadata)
        readout = (READOUTS | JOINT | FOLDERS if head is None else HEADS | FOLDERS).get(str(kind))
        if readout is None:
            raise UnsupportedFormatError(
                f"this model decides by a head of type {kind!r}, which is not run; wanted "
                f"{', '.join((*READOUTS, *HEADS, *JOINT))}, or any chat model"
            )
        if template.is_fallback:
            raise UnsupportedFormatError(
                f"this model's file has no prompt for decisions that compiles ({TEMPLATE_KEY}); convert it again with "
                "a current converter"
            )
        self._engine, self._tokenizer, self._template, self._readout = engine, tokenizer, template, readout
        self._head, self._temperatures = head, _temperatures(metadata)
        self._spelled: dict[str, tuple[int, ...]] = {}
        encoded = [(code, tokenizer.encode(code, add_special=False, parse_special=False)) for code in readout.codes]
        singles = [(code, ids[0]) for code, ids in encoded if len(ids) == 1]
        needed = len(readout.codes) if not readout.names_labels else max(2, readout.num_ratings or 0)
        if readout.codes and len(singles) < needed:
            raise UnsupportedFormatError(
                f"{len(singles)} labels of type {kind!r} are single tokens of this vocabulary; wanted {needed} or more"
            )
        self._labels = singles[:MOST_OPTIONS]
        self._most_options = len(self._labels) if readout.codes else MOST_OPTIONS

    def close(self) -> None:
        """Give up memory, once the engine is closed."""
        if self._head is not None:
            self._head.close()

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
        """As `DecisionModel.decide`; messages are the state, as JSON. Raises: RequestError for `orders`, too: the model
        was trained for its own."""
        check_request(state, questions, messages, on_encoded, may_lack_state=self._readout.may_lack_state)
        if orders != 1:
            raise RequestError(f"orders is {orders}, but this model shows options as it was trained; leave it out")
        salt = salt_of(cache_salt)
        about = state if messages is None else _without_media(messages)
        return self._decide(about, questions, salt, on_encoded or (lambda num_tokens: None))

    def _decide(
        self, about: Any, questions: Mapping[str, Question], salt: bytes, on_encoded: Callable[[int], object]
    ) -> Decisions:
        """Answer questions of a request that was checked; about: its state, or its messages as JSON."""
        prompts = {name: self._prompts(about, name, questions) for name in questions}
        every = [prompt for of_question in prompts.values() for prompt in of_question]
        first, probe = every[0].token_ids, np.array(self._encode(about, "?", _PROBE, questions), np.int32)
        state_tokens = min(common_length(first, ids) for ids in (probe, *(prompt.token_ids for prompt in every)))
        sizes = [prompt.token_ids.size for prompt in every]
        prompt_tokens = max(sizes) if self._continues else state_tokens + sum(size - state_tokens for size in sizes)
        on_encoded(prompt_tokens)
        hints = CacheHints(system_tokens=state_tokens, branch_tokens=(state_tokens,), salt=salt)
        # A prompt that continues the one before finds that in the cache.
        together = [[one] for one in every] if self._continues else [every]
        scores = [self._score(some, hints) for some in together]
        found = chain.from_iterable(one.logprobs if isinstance(one, LabelScores) else one.scores for one in scores)
        answers = {name: self._answer(questions[name], prompts[name], found) for name in questions}
        return Decisions(
            answers=answers,
            state_tokens=state_tokens,
            prompt_tokens=prompt_tokens,
            cached_tokens=min(scores[0].cached_tokens, state_tokens),
            computed_tokens=sum(one.computed_tokens for one in scores),
        )

    def _score(self, prompts: Sequence[Prompt], hints: CacheHints) -> "LabelScores | HeadScores":
        if self._head is None:
            return score_labels(self._engine, [LabelPrompt(one.token_ids, one.labels) for one in prompts], hints)
        return self._head.score([one.read for one in prompts if one.read is not None], hints)

    def _prompts(self, state: Any, name: str, questions: Mapping[str, Question]) -> list[Prompt]:
        """The prompts of one question."""
        question = checked_question(questions[name])
        options, readout = self._options(question), self._readout
        if len(options) > self._most_options:
            raise RequestError(
                f"{name!r} has {len(options)} options, this model has labels for {self._most_options}; leave some out",
                field="criteria",
            )
        outputs = readout.num_ratings if isinstance(question, YesNo) and readout.num_ratings else len(options)
        named: list[tuple[str, tuple[int, ...]]] = [(label, (token_id,)) for label, token_id in self._labels[:outputs]]
        named = self._own_labels(question) if readout.labels_each else named
        labels = tuple((token_id,) for _, spellings in named for token_id in spellings)
        groups = tuple(len(spellings) for _, spellings in named) if readout.labels_each else None
        prompts = []
        for is_reversed in (False, True)[: 1 + (readout.reverses_choices and isinstance(question, Choice))]:
            ids = self._encode(state, name, question, questions, is_reversed=is_reversed)
            read = None if self._head is None else self._head.lay_out(ids, len(options), kind_of(question))
            token_ids = np.array(ids, np.int32) if read is None else read.token_ids
            temperature = self._temperature(question, len(options))
            prompts.append(Prompt(token_ids, labels, groups, read, outputs, temperature, is_reversed))
        return prompts

    def _encode(
        self,
        state: Any,
        name: str,
        question: Question,
        questions: Mapping[str, Question],
        *,
        is_reversed: bool = False,
    ) -> list[int]:
        """The ids of a question as it is asked beside all those of the request."""
        readout = self._readout
        values = {"state": state, **self._asked(name, question, is_reversed=is_reversed)}
        if readout.flattens:
            values |= {name: flat_text(values[name]) for name in ("state", "instructions")}
        if self._head is not None and self._head.marker:
            values = replaced(values, self._head.marker, " ")
        if readout.lists_questions:
            values["questions"] = [self._asked(other, checked_question(one)) for other, one in questions.items()]
        values = sorted_keys(values) if readout.sorts_keys else values
        segments = self._template.render_segments(
            [], self._tokenizer.special_spellings, add_generation_prompt=True, **values, images=[]
        )
        return self._tokenizer.encode_segments(segments, max_tokens=self._engine.context_length)

    def _asked(self, name: str, question: Question, *, is_reversed: bool = False) -> dict[str, Any]:
        """A question as the template reads it."""
        if question.instructions is None:
            raise RequestError(f"{name!r} has no instructions, which this model needs; give them", field="instructions")
        shown_options = self._options(question)[:: -1 if is_reversed else 1]
        labels = [label for label, _ in (self._own_labels(question) if self._readout.labels_each else self._labels)]
        options = []
        for index, (key, description) in enumerate(shown_options):
            label = {"label": labels[index]} if self._readout.names_labels and index < len(labels) else {}
            if self._readout.flattens:
                key, description = flat_text(key), None if description is None else flat_text(description)
            options.append({"key": key, "description": description, **label})
        return {"id": name, "type": kind_of(question), "instructions": question.instructions, "options": options}

    def _options(self, question: Question) -> list[tuple[str, Any]]:
        """Names and descriptions in the order of the labels."""
        match question:
            case YesNo():
                both = [("false", question.no), ("true", question.yes)]
                return both[::-1] if self._readout.true_first else both
            case Choice():
                options = list(question.options.items())
                return sorted(options, key=lambda one: one[0]) if self._readout.sorts_choices else options
            case Score():
                return [(str(index), level) for index, level in enumerate(question.levels)]

    def _own_labels(self, question: Question) -> list[tuple[str, tuple[int, ...]]]:
        """The label of each answer, and the tokens that spell it, the plainest first.

        Those of a choice are its options where all are letters, otherwise letters, or from 27 options on numbers; what
        is more than one token, or a label already, gives way to the first of `_FURTHER_CODES` that is not.
        Raises: RequestError for more options than labels; UnsupportedFormatError for a vocabulary without those of
        other questions.
        """
        keys = [key for key, _ in self._options(question)]
        if not isinstance(question, Choice):
            spelled = [(key, self._singles(_YES_NO_SPELLINGS.get(key, (key,)))) for key in keys]
            for key, tokens in spelled:
                if not tokens:
                    raise UnsupportedFormatError(
                        f"no spelling of the label {key!r} is a single token of this vocabulary; wanted one. Use "
                        "another copy of the model."
                    )
            return spelled
        if all(len(key) == 1 and key in ascii_letters for key in keys):
            codes = keys
        else:
            letters = ascii_uppercase[: len(keys)]
            codes = list(letters) if len(letters) == len(keys) else [f"{n:02}" for n in range(len(keys))]
        found: list[tuple[str, tuple[int, ...]]] = []
        used: set[int] = set()
        for code in codes:
            singles = ((one, self._singles((one,))) for one in (code, *_FURTHER_CODES))
            label, ids = next(((one, ids) for one, ids in singles if ids and ids[0] not in used), (None, ()))
            if label is None:
                raise RequestError(
                    f"this model's vocabulary has labels for {len(found)} of {len(keys)} options; leave some out",
                    field="criteria",
                )
            used.add(ids[0])
            found.append((label, self._singles((label, f" {label}"))))
        return found

    def _singles(self, spellings: Sequence[str]) -> tuple[int, ...]:
        """The tokens of spellings that are one token, each once."""
        for one in spellings:
            if one not in self._spelled:
                self._spelled[one] = tuple(self._tokenizer.encode(one, add_special=False, parse_special=False))
        return tuple(dict.fromkeys(self._spelled[one][0] for one in spellings if len(self._spelled[one]) == 1))

    def _temperature(self, question: Question, num_options: int) -> float:
        bucket = next(name for most, name in self._readout.buckets if num_options <= most)
        kind = kind_of(question)
        return self._temperatures.get(f"{kind}.{bucket}", self._temperatures.get(kind, 1.0))

    def _answer(self, question: Question, prompts: list[Prompt], found: Iterator[NDArray[np.float64]]) -> Answer:
        """The answer, from log probabilities of labels, or scores, of each of a question's prompts."""
        total, mass = np.zeros(prompts[0].num_outputs), 0.0
        for prompt in prompts:
            logprobs = next(found)
            # A head cannot answer anything else.
            has_others = self._head is None and not self._readout.knows_labels_only
            mass += float(np.exp(logprobs).sum()) if has_others else 1.0
            if prompt.groups is not None:
                logprobs = np.maximum.reduceat(logprobs, np.cumsum((0, *prompt.groups[:-1])))
            weights = np.exp((logprobs - logprobs.max()) / prompt.temperature)
            total += (weights / weights.sum())[:: -1 if prompt.is_reversed else 1]
        probabilities = total / len(prompts)
        if isinstance(question, YesNo):
            if self._readout.num_ratings is not None:
                yes = float(probabilities @ np.arange(probabilities.size)) / (probabilities.size - 1)
            else:
                yes = float(probabilities[0 if self._readout.true_first else 1])
            probabilities = np.array([yes, 1 - yes])
        elif isinstance(question, Choice) and self._readout.sorts_choices:
            shown_at = {key: index for index, (key, _) in enumerate(self._options(question))}
            probabilities = probabilities[[shown_at[key] for key in question.options]]
        return answer_of(question, probabilities.tolist(), min(1.0, mass / len(prompts)))


class OmniDecisionModel(TrainedDecisionModel):
    """Answers questions with `lfm2-d1-omni`: prompts of pieces that are encoded, and cut, one by one.

    Its pictures and sounds, which texts see and which see no text, are not read.
    """

    def _encode(
        self,
        state: Any,
        name: str,
        question: Question,
        questions: Mapping[str, Question],
        *,
        is_reversed: bool = False,
    ) -> list[int]:
        """See `TrainedDecisionModel`; the state gets the room that the question and the options leave."""
        asked = self._asked(name, question)
        values = without_specials({"state": state, **asked, "audio": False})
        count = len(asked["options"])
        budget = max(_LEAST_BUDGET, min(_BUDGET_OF_OPTION * count + _SPARED, _MOST_TOKENS // 2))
        most = {
            _OMNI_QUESTION: max(_LEAST_QUESTION, budget),
            _OMNI_OPTION: max(_LEAST_OPTION, (budget - _TOKENS_AROUND_OPTION * count) // count),
        }
        pieces = [
            (mark, self._tokenizer.encode_segments(piece)[: most.get(mark)])
            for mark, piece in rendered_pieces(
                self._template, self._tokenizer, values, _OMNI_MARK, ("state", "question", "option")
            )
        ]
        if [mark for mark, _ in pieces if mark] != [_OMNI_STATE, _OMNI_QUESTION, *[_OMNI_OPTION] * count]:
            raise UnsupportedFormatError(
                f"the prompt marks {[mark for mark, _ in pieces if mark]}; wanted the state, the question and each of "
                f"{count} options. Convert the model again with a current converter."
            )
        room = max(0, _MOST_TOKENS - sum(len(ids) for mark, ids in pieces if mark != _OMNI_STATE))
        return list(chain.from_iterable(ids[:room] if mark == _OMNI_STATE else ids for mark, ids in pieces))


def kind_of(question: Question) -> str:
    """The System One API's name of a question's type."""
    return {YesNo: "noul", Choice: "choice", Score: "score"}[type(question)]


def _without_media(messages: Messages) -> list[dict[str, Any]]:
    """Messages as JSON. Raises: RequestError for pictures and sounds, which no model made for decisions reads here."""
    found = [dict(message) for message in messages]
    written(found)
    for number, message in enumerate(found):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list | tuple) else ()):
            if read_media_part(part, f"messages[{number}].content[{index}]") is not None:
                raise RequestError(
                    f"messages[{number}].content[{index}] is a picture or a sound, and models made for decisions read "
                    "texts alone here; describe it, or decide with a chat model that takes it"
                )
    return found


def _temperatures(metadata: Mapping[str, object]) -> dict[str, float]:
    """Temperatures by the end of their keys. Raises: UnsupportedFormatError naming a key."""
    prefix = f"{metadata.get('general.architecture')}.decision.temperature."
    found = {}
    for key, value in metadata.items():
        if key.startswith(prefix):
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise UnsupportedFormatError(f"{key} is {shown(value)}; wanted a number above 0")
            found[key.removeprefix(prefix)] = float(value)
    return found


def sorted_keys(value: Any) -> Any:
    """JSON with the keys of every object in order."""
    if isinstance(value, Mapping):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [sorted_keys(one) for one in value]
    return value


def replaced(value: Any, text: str, by: str) -> Any:
    """JSON with another text in place of one, in keys too."""
    if isinstance(value, str):
        return value.replace(text, by)
    if isinstance(value, Mapping):
        return {replaced(key, text, by): replaced(one, text, by) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(one, text, by) for one in value]
    return value


def rendered_pieces(
    template: "ChatTemplate", tokenizer: "Tokenizer", values: Mapping[str, Any], marker: str, names: Sequence[str]
) -> Iterator[tuple[str, Segments]]:
    """Render a template that is given its separator and marks, and cut it; see `pieces_of`.

    values: what else it is given; what they spell of a mark is broken. marker: how marks begin. names: of the marks,
    each the template's `mark_NAME`.
    """
    separator, marks = f"{marker}sep>>", {f"mark_{name}": f"{marker}{name}>>" for name in names}
    given = {**replaced(values, marker, f"{marker[:-1]} "), "images": [], "sep": separator, **marks}
    segments = template.render_segments([], tokenizer.special_spellings, add_generation_prompt=True, **given)
    return pieces_of(segments, separator, tuple(marks.values()))


def pieces_of(
    segments: Segments, separator: str, marks: Sequence[str] = (), *, of_template: bool = False
) -> Iterator[tuple[str, Segments]]:
    """Cut segments at a separator, into pieces that are encoded apart, each with the mark that it begins with, if any.

    of_template: only what the template writes is cut.
    """
    pieces: list[list[tuple[str, bool]]] = [[]]
    for text, is_template in segments:
        first, *others = text.split(separator) if is_template or not of_template else [text]
        pieces[-1].append((first, is_template))
        pieces += [[(one, is_template)] for one in others]
    for (text, is_template), *behind in filter(None, pieces):
        is_cut = is_template or not of_template
        mark = next((mark for mark in marks if is_cut and text.startswith(mark)), "")
        yield mark, [(text.removeprefix(mark), is_template), *behind]


def without_specials(value: Any) -> Any:
    """JSON whose texts and keys spell no special token: its bars are broken."""
    if isinstance(value, str):
        return _SPECIAL.sub("<\u00a6\\1\u00a6>", value)
    if isinstance(value, Mapping):
        return {without_specials(key): without_specials(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return list(map(without_specials, value))
    return value


def flat_text(value: Any) -> str:
    """JSON as lines of text, whose special tokens are spelled so that none of them is one."""
    return str(without_specials(_flattened(value, "")))


def _flattened(value: Any, indent: str) -> str:
    """Keys stand before what they hold, and dashes before what a list holds; what is nested is indented."""
    deeper = f"{indent}  "
    match value:
        case None:
            return ""
        case str():
            return value
        case bool():
            return str(value)
        case Mapping():
            parted = [(key, one, isinstance(one, Mapping | list | tuple)) for key, one in value.items()]
            return "\n".join(
                f"{indent}{key}:\n{_flattened(one, deeper)}" if nested else f"{indent}{key}: {_flattened(one, '')}"
                for key, one, nested in parted
            )
        case list() | tuple():
            return "\n".join(f"{indent}- {_flattened(one, deeper).lstrip(_SPACES)}" for one in value)
    return written([value])[1:-1]

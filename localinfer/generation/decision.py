"""Decisions: typed questions about a state, answered by the probabilities of labels, without generating text.

A question is asked behind the state, in the last message of the user, and names a label for each of its answers: "Yes"
and "No", letters or numbers. The answer's probabilities are those that the model gives to the labels where its reply
begins, scaled to sum to 1. The state comes first, so it is read once, for all questions and for later calls; questions
do not see each other, so an answer depends on the state, its own question and the model only.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import check_number, shown
from localinfer.engine.cache.block_hashes import common_length, salt_of
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.errors import RequestError, UnsupportedFormatError
from localinfer.generation.chat.media_parts import Segments, check_spells_none
from localinfer.generation.chat.reply import ReplyRequest
from localinfer.generation.chat_model import ChatHistory, ChatModel
from localinfer.generation.label_scores import Label, LabelPrompt, score_labels
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
    num_answers,
    written,
)

if TYPE_CHECKING:
    from localinfer.generation.decision_calibration import DecisionCalibration
    from localinfer.generation.decision_readouts import TrainedDecisionModel
    from localinfer.generation.media import MediaReader
    from localinfer.models.load.loader import Model
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.quant.checkpoint.model_file import ModelFile
    from localinfer.storage.chats import EncodedChat

_YES_NO = ("Yes", "No")
_SAMPLE_BYTES = 256
"""Of a tensor at each of three places, for a model's digest."""
_PROBE = "?"
"""A question that begins like no other: what it shares with others is the state."""


def decision_model(
    engine: Engine, model: "Model", chats: Callable[[], ChatModel], media: "MediaReader | None" = None
) -> "CalibratedDecisionModel":
    """The way to decide with a model: its own, if it was made for decisions, otherwise by questions in a chat.

    chats: gives the model's chats, if it generates.
    Raises: UnsupportedFormatError for one that was made to decide in a way that is not run.
    """
    from localinfer.generation.decision_heads import decision_head
    from localinfer.generation.decision_readouts import (
        FOLDERS,
        JOINT,
        TEMPLATE_KEY,
        OmniDecisionModel,
        TrainedDecisionModel,
        decision_type,
    )
    from localinfer.models.text.chat_template import ChatTemplate

    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UnsupportedFormatError("this model's file has no tokenizer, which decisions need; load another copy")
    kind = decision_type(model.file.metadata)
    if kind is None and "decisions" not in model.capabilities:
        return CalibratedDecisionModel(DecisionModel(engine, chats(), tokenizer, media), model.file)
    template = ChatTemplate.from_metadata(model.file.metadata, tokenizer, key=TEMPLATE_KEY)
    metadata = model.file.metadata
    if kind in JOINT:
        from localinfer.generation.decision_joint import JointDecisionModel, JointHead

        trained: TrainedDecisionModel = JointDecisionModel(
            engine, tokenizer, template, metadata, JointHead(engine, model)
        )
    elif kind in FOLDERS:
        from localinfer.generation.decision_folders import FolderDecisionModel

        trained = FolderDecisionModel(engine, model, template, str(kind))
    else:
        maker = OmniDecisionModel if kind == "lfm2-d1-omni" else TrainedDecisionModel
        trained = maker(engine, tokenizer, template, metadata, decision_head(str(kind), engine, model))
    return CalibratedDecisionModel(trained, model.file)


class CalibratedDecisionModel:
    """Answers questions with a model, and has a calibration change their probabilities; threads may share it."""

    def __init__(self, model: "DecisionModel | TrainedDecisionModel", file: "ModelFile") -> None:
        self._model, self._digest = model, _digest(file)

    def close(self) -> None:
        """Give up memory, once the engine is closed."""
        self._model.close()

    def decide(
        self,
        state: Content,
        questions: Mapping[str, Question],
        *,
        calibration: "DecisionCalibration | str | os.PathLike[str] | None" = None,
        **options: Any,
    ) -> Decisions:
        """Answer questions, see `DecisionModel.decide`. Raises: RequestError, too, for a calibration of another model,
        another question or other orders."""
        if calibration is None:
            return replace(self._model.decide(state, questions, **options), model=self._digest)
        from localinfer.generation.decision_calibration import DecisionCalibration

        if isinstance(calibration, str | os.PathLike):
            calibration = DecisionCalibration.load(calibration)
        if not isinstance(calibration, DecisionCalibration):
            raise RequestError(f"calibration is {shown(calibration)}; give a DecisionCalibration, or its file")
        asked = questions if isinstance(questions, Mapping) else {}
        checked = {name: checked_question(question) for name, question in asked.items()}
        calibration.check(self._digest, checked, options.get("orders", 1))
        found = replace(self._model.decide(state, questions, **options), model=self._digest)
        return calibration.apply(found, checked)


def _digest(file: "ModelFile") -> str:
    """Digest of a model's settings, vocabulary and templates, and of bytes at three places of each of its tensors."""
    from localinfer.storage.fingerprint import described_file

    digest = hashlib.sha256(repr(described_file(file)).encode())
    for name in sorted(file.tensors):
        data = file.tensor_bytes(name)
        for start in (0, data.size // 2, max(0, data.size - _SAMPLE_BYTES)):
            digest.update(data[start : start + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()[:32]


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

    def close(self) -> None:
        """Give up memory, once the engine is closed."""
        self._labels.clear()

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
        check_request(state, questions, messages, on_encoded)
        salt = salt_of(cache_salt)
        asked = [{"role": "user", "content": written(state)}] if messages is None else messages
        # Read once for all questions; what their pictures stand for is held until the last one is encoded.
        read, _held = self._chats.read(asked, salt)
        request = self._chats.formats.request({"thinking": False}, salt)
        forms = [form for question in questions.values() for form in _forms(checked_question(question), orders)]
        chats = [self._encode(request, read, form.text) for form in forms]
        probe = self._encode(request, read, _PROBE)
        state_tokens = min(common_length(probe.token_ids, chat.token_ids) for chat in chats)
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
        """The prompt in which a question is asked, up to the label of its answer, or with one; messages as they were
        read."""

        def begin(text: str) -> Segments:
            reasoning = request.format.reasoning
            is_open = reasoning is not None and request.format_after(text).state == "open"
            closing = [(f"{reasoning.closing}\n\n", True)] if reasoning is not None and is_open else []
            return [*closing, *([(label, False)] if label else [])]

        check_spells_none(question, "questions")
        return self._history.encode(
            request.split(_with_question(messages, question))[0],
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
            without, ids = (self._encode(request, probe, _PROBE, label=one).token_ids for one in ("", label))
            begins = common_length(without, ids) == without.size
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
    if count <= len(ascii_uppercase):
        labels, kind = tuple(ascii_uppercase[:count]), "letter"
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
    """Messages that were read, with a question at their end: in the last one, if it is the user's."""
    if messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": question}]
    *former, last = messages
    content = last["content"]
    return [*former, {**last, "content": f"{content}\n\n{question}" if content else question}]


def _answer(question: Question, found: Iterator[tuple[_Form, NDArray[np.float64]]], orders: int) -> Answer:
    """The answer, from the log probabilities of the labels in each of its forms."""
    size = num_answers(question)
    num_forms = min(orders, size) if isinstance(question, Choice) else 1
    total, mass = np.zeros(size), 0.0
    for form, logprobs in islice(found, num_forms):
        best = float(logprobs.max())
        weights = np.exp(logprobs - best)
        total[list(form.order)] += weights / weights.sum()
        mass += float(np.exp(best) * weights.sum())
    return answer_of(question, (total / num_forms).tolist(), min(1.0, mass / num_forms))

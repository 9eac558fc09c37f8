"""Folders of transformers made for decisions: prompts by their template, scores by labels or by a linear head.

The template asks one question a prompt, or all of them, and marks the place behind the token that each is read at; as
models here see only what stands before it, a question's prompt ends there. Source: transformers 5.24, its `decision`
package and `JevForDecision`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import shown
from localinfer.engine.engine import Engine
from localinfer.errors import RequestError, UnsupportedFormatError
from localinfer.generation.decision_heads import KINDS, HeadPrompt, PointerHead, head_tensor
from localinfer.generation.decision_readouts import Prompt, TrainedDecisionModel, kind_of, pieces_of
from localinfer.generation.questions import Question, checked_question
from localinfer.models.text.tokenizer import SpellingFinder
from localinfer.types import FloatArray, is_finite_number

if TYPE_CHECKING:
    from localinfer.models.load.loader import Model
    from localinfer.models.text.chat_template import ChatTemplate

_MARK, _SPLIT = "<|mark|>", "<|split|>"
"""Marks of a template: behind the token that is read, and between texts that are encoded apart; neither has an id."""
_KNOWN = frozenset(("labels", "temperature", "noul_options", "sanitize_control_tokens", "adapter", "sort_choices"))
"""Settings of decision.json; transformers ignores the last."""
_ORDERS = (["true", "false"], ["false", "true"])
_USUAL_LABELS = {"noul": ["Yes", "No"]}
_WAY_OUT = "Use another model, or run this one with transformers."


class FolderDecisionModel(TrainedDecisionModel):
    """Answers questions with a model of such a folder; threads may share it. Raises: UnsupportedFormatError."""

    def __init__(self, engine: Engine, model: "Model", template: "ChatTemplate", kind: str) -> None:
        found = _read(model.file.metadata, f"{model.config.architecture}.decision.settings")
        settings = found.get("settings", {})
        _check(found, settings, template)
        head = _LinearHead(engine, model, found.get("head", {})) if kind == "transformers-jev" else None
        assert model.tokenizer is not None, "a model that decides has one"
        super().__init__(engine, model.tokenizer, template, model.file.metadata, head)
        self._linear = head
        self._continues = template.reads("questions")
        is_true_first = settings.get("noul_options", _ORDERS[0]) == _ORDERS[0]
        self._readout = replace(self._readout, true_first=is_true_first)
        temperatures = settings.get("temperature", {})
        self._temperatures = {name: float(temperatures.get(name, 1.0)) for name in KINDS}
        given = settings.get("labels", {})
        self._named = {name: given.get(name) or _USUAL_LABELS.get(name, list(ascii_uppercase)) for name in KINDS}
        special = dict(model.tokenizer.special_ids)
        self._spellings = SpellingFinder({_MARK: -1, _SPLIT: -1, **special})

    def _prompts(self, state: Any, name: str, questions: Mapping[str, Question]) -> list[Prompt]:
        question = checked_question(questions[name])
        kind, count = kind_of(question), len(self._options(question))
        known = self._named[kind] if self._linear is None else self._named[kind][: self._linear.most_options(kind)]
        if count > len(known):
            raise RequestError(
                f"{name!r} has {count} options, this model has labels for {len(known)} of a question of type {kind!r}; "
                "leave some out",
                field="criteria",
            )
        ids = self._encode(state, name, question, questions)
        temperature = self._temperature(question, count)
        if self._linear is None:
            labels = self._label_ids(known[:count])
            return [Prompt(np.array(ids, np.int32), labels, None, None, count, temperature)]
        read = self._linear.lay_out(ids, count, kind)
        return [Prompt(read.token_ids, (), None, read, count, temperature)]

    def _label_ids(self, labels: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token of each label."""
        found = [tuple(self._tokenizer.encode(label, add_special=False)) for label in labels]
        tokens = {ids for ids in found if len(ids) == 1 and ids[0] != self._tokenizer.unknown_token_id}
        if len(tokens) != len(found):
            raise UnsupportedFormatError(
                f"decision.json: labels {shown(list(labels))} are not each another token of this vocabulary; wanted "
                f"labels of one token. {_WAY_OUT}"
            )
        return tuple(found)

    def _encode(
        self,
        state: Any,
        name: str,
        question: Question,
        questions: Mapping[str, Question],
        *,
        is_reversed: bool = False,
    ) -> list[int]:
        """The ids before the question's mark; what a request spells of control tokens and marks is text."""
        asked = questions if self._continues and name in questions else {name: question}
        every = [self._described(one, checked_question(other)) for one, other in asked.items()]
        segments = self._template.render_segments(
            [{"role": "user", "content": ""}],
            self._spellings,
            enable_thinking=False,
            state=state,
            question=every[0],
            questions=every,
        )
        # What a mark parts is encoded apart, too.
        cut = [
            (text.replace(_MARK, _SPLIT + _MARK) if is_template else text, is_template)
            for text, is_template in segments
        ]
        ids: list[int] = []
        place, marks = list(asked).index(name), 0
        for mark, part in pieces_of(cut, _SPLIT, (_MARK,), of_template=True):
            marks += bool(mark)
            if marks > place:
                break
            # A part begins as text behind a control token does.
            continues = bool(ids) and self._tokenizer.adds_space_once
            ids += self._tokenizer.encode_segments(
                part, continues_run=continues, max_tokens=self._engine.context_length
            )
        if not ids or (len(asked) > 1 and marks <= place):
            raise UnsupportedFormatError(
                f"the decision template writes nothing before {_MARK} number {place + 1}; wanted a question there. "
                f"{_WAY_OUT}"
            )
        return ids

    def _described(self, name: str, question: Question) -> dict[str, Any]:
        options, kind = self._options(question), kind_of(question)
        return {
            "name": name,
            "type": kind,
            "instructions": question.instructions,
            "options": [key for key, _ in options],
            "labels": self._named[kind][: len(options)],
            "descriptions": [description for _, description in options],
        }


class _LinearHead(PointerHead):
    """A matrix over the state of the last token before the mark, with a row for each label of each type."""

    def __init__(self, engine: Engine, model: "Model", settings: Mapping[str, Any]) -> None:
        """Read a model's head. Raises: CorruptFileError, UnsupportedFormatError for settings without a meaning."""
        self._begin(engine, model)
        self._weight = head_tensor(model, "decision.proj.weight").astype(np.float64)
        rows = len(self._weight)
        self._offsets = settings.get("offsets") or {"noul": 0, "score": 2, "choice": 8}
        self._softcap = settings.get("softcap")
        is_offset = isinstance(self._offsets, dict) and all(
            type(self._offsets.get(name)) is int and 0 <= self._offsets[name] < rows for name in KINDS
        )
        is_cap = self._softcap is None or (is_finite_number(self._softcap) and self._softcap > 0)
        if self._weight.shape != (rows, model.config.hidden_size) or not is_offset or not is_cap:
            raise UnsupportedFormatError(
                f"proj.weight has shape {self._weight.shape}, offsets are {shown(self._offsets)}, softcap is "
                f"{shown(self._softcap)}; wanted rows of {model.config.hidden_size}, a row of them for each type of "
                f"question, and a number above 0 or none. {_WAY_OUT}"
            )
        self._bias = head_tensor(model, "decision.proj.bias", (rows,)).astype(np.float64)

    def most_options(self, kind: str) -> int:
        """Rows from the first of a type of question on."""
        return len(self._bias) - int(self._offsets[kind])

    def lay_out(self, token_ids: Sequence[int], num_options: int, kind: str) -> HeadPrompt:
        """See `DecisionHead`."""
        return HeadPrompt(np.array(token_ids, np.int32), (), KINDS.index(kind), num_options)

    def _products(self, states: FloatArray, prompt: HeadPrompt) -> NDArray[np.float64]:
        first = int(self._offsets[KINDS[prompt.kind]])
        rows = slice(first, first + prompt.num_options)
        scores = (self._weight[rows] * states[-1].astype(np.float64)).sum(axis=1) + self._bias[rows]
        if self._softcap is None:
            return np.asarray(scores)
        return np.array([self._softcap * math.tanh(one / self._softcap) for one in scores.tolist()])


def _read(metadata: Mapping[str, object], key: str) -> dict[str, Any]:
    """The settings that a folder's files hold."""
    try:
        found = json.loads(str(metadata.get(key)))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("settings"), dict):
        raise UnsupportedFormatError(f"{key} is {shown(metadata.get(key))}; wanted a folder's settings. {_WAY_OUT}")
    return found


def _check(found: Mapping[str, Any], settings: Mapping[str, Any], template: "ChatTemplate") -> None:
    """Refuse what would change answers and is not run."""

    def refuse(complaint: str, wanted: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(f"this folder's decisions are not run: {complaint}; wanted {wanted}. {_WAY_OUT}")

    if found.get("other_files"):
        raise refuse(
            f"it has {', '.join(found['other_files'])}",
            "decision.json and all weights in one form, as save_pretrained of transformers' JevForDecision writes them "
            "(of an adapter, once it is merged into the weights)",
        )
    if found.get("is_causal") is not True:
        raise refuse("config.json: is_causal is false", "a text model that sees what is before a token")
    for name in sorted(settings.keys() - _KNOWN):
        raise refuse(f"decision.json: {name} is not known", f"{', '.join(sorted(_KNOWN))} alone")
    if settings.get("adapter"):
        raise refuse(f"decision.json: adapter is {shown(settings['adapter'])}", "one that is merged into the weights")
    if settings.get("sanitize_control_tokens", True) is not True:
        raise refuse("decision.json: sanitize_control_tokens is not true", "control tokens of a request to be text")
    if settings.get("noul_options", _ORDERS[0]) not in _ORDERS:
        raise refuse(f"decision.json: noul_options is {shown(settings['noul_options'])}", '"true" and "false"')
    labels, temperatures = settings.get("labels", {}), settings.get("temperature", {})
    if not isinstance(labels, dict) or not all(
        isinstance(one, list) and all(isinstance(label, str) for label in one) for one in labels.values()
    ):
        raise refuse(f"decision.json: labels is {shown(labels)}", "a list of texts for each type of question")
    if not isinstance(temperatures, dict) or not all(
        is_finite_number(one) and one > 0 for one in temperatures.values()
    ):
        raise refuse(f"decision.json: temperature is {shown(temperatures)}", "numbers above 0 by types of questions")
    if template.source is None:
        raise refuse("it has no decision_template.jinja", "one; transformers asks by a prompt of its own without")

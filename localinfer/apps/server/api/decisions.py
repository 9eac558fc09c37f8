"""`/v1/systemone` and `/v1/decisions`: typed questions about a state or a conversation, answered by probabilities.

The first has the shape of TypeSafe's System One API: questions by name, whose kinds are noul (yes or no), choice and
score; what is more than that begins with `x_`. The second has the shape of OpenAI's Decisions API: a list of questions,
whose kinds are predicate, choice and score. Any model that generates answers both.
"""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.responses_items import InputItem, item_messages
from localinfer.apps.server.operation.observation import record_of
from localinfer.apps.server.replies.clients import salt_options
from localinfer.apps.server.replies.media_fields import decoded
from localinfer.apps.server.replies.message_fields import ChatMessage, template_messages
from localinfer.apps.server.replies.service import prepared, read_body, read_parted, reserve_prompts, service_of
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import ApiError, json_response, unsupported
from localinfer.apps.server.transport.known_fields import DECISIONS
from localinfer.arguments import shown
from localinfer.errors import RequestError, UnsupportedFormatError
from localinfer.generation.chat.media_parts import MediaSource
from localinfer.generation.questions import (
    Answer,
    Choice,
    ChoiceAnswer,
    Decisions,
    Question,
    Score,
    YesNo,
    YesNoAnswer,
    checked_question,
    read_question,
    written,
)

_ALIASES = ("jev-latest", "jev-preview")
"""Models that clients of the System One API ask for by themselves; the one that is served by default answers."""
_MOST_QUESTIONS = 400
_FORMATS = ("png", "jpg", "jpeg")


class SystemOneRequest(msgspec.Struct):
    """A state, and questions about it by name.

    state: null only where the model needs none.
    assets: pictures by texts that stand for them in the state, as base64, or as parts of a form.
    orders: as of `llm.decide`; this server's own.
    """

    known_fields: ClassVar = DECISIONS

    state: str | dict[str, Any] | list[Any] | None
    questions: dict[str, dict[str, Any]]
    model: str | None = None
    assets: dict[str, Any] | None = None
    orders: int = 1
    cache_salt: str | None = None


class DecisionRequest(msgspec.Struct):
    """An input, and questions about it in order."""

    known_fields: ClassVar = DECISIONS

    input: str | list[InputItem]
    questions: list[dict[str, Any]]
    model: str | None = None
    orders: int = 1
    cache_salt: str | None = None


async def system_one(request: Request) -> Response:
    """Answers by the names of their questions."""
    body, files = await read_parted(request, SystemOneRequest)
    pictures = _assets(body.assets, files)
    _check_count(body.questions)
    questions: dict[str, Question] = {}
    for name, question in body.questions.items():
        if not name:
            raise ApiError(400, "a question has an empty name; give it one", param="questions")
        try:
            questions[name] = read_question(question)
        except RequestError as error:
            raise ApiError(400, str(error), param=f"questions.{name}.{error.field or ''}".rstrip(".")) from None
    model = None if body.model in _ALIASES else body.model
    if pictures:
        _check_placed(body.questions, pictures)
        parts = await prepared(request, _with_pictures, body.state, pictures)
        messages = template_messages([ChatMessage(role="user", content=parts)])
        work = partial(_decide, request, model, None, messages=messages)
    else:
        work = partial(_decide, request, model, body.state)
    model_id, found = await work(questions=questions, orders=body.orders)
    answers = {name: _system_one_answer(questions[name], answer) for name, answer in found.answers.items()}
    usage = {
        "input_tokens": found.prompt_tokens,
        "output_tokens": 0,
        "x_state_tokens": found.state_tokens,
        "x_cached_tokens": found.cached_tokens,
        "x_computed_tokens": found.computed_tokens,
    }
    return json_response({"model": model_id, "answers": answers, "usage": usage})


async def decisions(request: Request) -> Response:
    """Answers in the order of the questions."""
    body = await read_body(request, DecisionRequest)
    _check_count(body.questions)
    asked = [_asked(question, f"questions[{index}]") for index, question in enumerate(body.questions)]
    questions = {str(index): question for index, (question, _) in enumerate(asked)}
    if not body.input:
        raise ApiError(400, "input is empty; send a text or messages to decide about", param="input")
    if isinstance(body.input, str):
        work = partial(_decide, request, body.model, body.input)
    else:
        messages = template_messages(item_messages(map(_as_text, body.input), "input[{}]".format))
        work = partial(_decide, request, body.model, None, messages=messages)
    model_id, found = await work(questions=questions, orders=body.orders)
    answers = [
        _openai_answer(given, values, answer)
        for given, (_, values), answer in zip(body.questions, asked, found.answers.values(), strict=True)
    ]
    usage = {
        "input_tokens": found.prompt_tokens,
        "input_tokens_details": {"cached_tokens": found.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": found.prompt_tokens,
    }
    return json_response({"object": "decision", "model": model_id, "answers": answers, "usage": usage})


def _assets(assets: Mapping[str, Any] | None, files: Mapping[str, bytes]) -> dict[str, MediaSource]:
    """The pictures of a request by the texts that stand for them. files: parts of its form. Raises: ApiError."""
    if assets is not None and not assets:
        raise ApiError(400, "assets is empty; give pictures by their placeholders, or leave it out", param="assets")
    made: dict[str, MediaSource] = {}
    unused = set(files)
    for name, asset in (assets or {}).items():
        path = f"assets.{name}"
        if not name.strip():
            raise ApiError(400, "an asset has an empty placeholder; name each", param="assets")
        if not isinstance(asset, Mapping) or asset.get("type", "image") not in ("image", None):
            raise ApiError(400, f"{path} is {shown(asset)}; give an object of type image", param=path)
        part = asset.get("part")
        if part is None:
            if asset.get("format") not in (*_FORMATS, None):
                found = shown(asset["format"])
                raise ApiError(400, f"{path}.format is {found}; give one of {', '.join(_FORMATS)}", param=path)
            text = asset.get("data_base64")
            if not isinstance(text, str) or not text:
                raise ApiError(400, f"{path} has no data_base64, and no part of a form; give one of them", param=path)
            made[name] = MediaSource("image", decoded(text, f"{path}.data_base64", path), path)
            continue
        if not isinstance(part, str) or part not in unused:
            found = "is another asset's" if part in files else "is not in the body"
            raise ApiError(400, f"{path} names the part {shown(part)}, which {found}; send one for each", param=path)
        unused.remove(part)
        made[name] = MediaSource("image", files[part], path)
    if unused:
        raise ApiError(400, f"the part {min(unused)!r:.80} is no asset's; name it in assets", param="assets")
    return made


def _check_placed(questions: Mapping[str, Any], pictures: Mapping[str, MediaSource]) -> None:
    """Raise ApiError for a question with a picture: it is read after the state, as text."""
    for name, question in questions.items():
        for member in ("instructions", "criteria"):
            text = json.dumps(question.get(member), ensure_ascii=False)
            if any(json.dumps(one, ensure_ascii=False)[1:-1] in text for one in pictures):
                raise ApiError(
                    400,
                    f"questions.{name}.{member} has a picture, and pictures are read in the state only here; put it "
                    "there, and say in words which one is meant",
                    code="unsupported_parameter",
                    param=f"questions.{name}.{member}",
                )


def _with_pictures(state: Any, pictures: Mapping[str, MediaSource]) -> list[Any]:
    """A state as parts of a message, with pictures in place of what stands for them."""
    is_text = isinstance(state, str)
    named = {name if is_text else json.dumps(name, ensure_ascii=False)[1:-1]: one for name, one in pictures.items()}
    # The longest first: one may be the beginning of another.
    pattern = "|".join(map(re.escape, sorted(named, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", written(state))
    texts = [{"type": "text", "text": text} for text in pieces]
    parts = [named[piece] if index % 2 else texts[index] for index, piece in enumerate(pieces)]
    return [part for part in parts if isinstance(part, MediaSource) or part["text"]]


def _check_count(questions: Mapping[str, Any] | Sequence[Any]) -> None:
    if not 1 <= len(questions) <= _MOST_QUESTIONS:
        raise ApiError(400, f"there are {len(questions)} questions; send 1 to {_MOST_QUESTIONS}", param="questions")


async def _decide(
    request: Request, model: str | None, state: Any, questions: Mapping[str, Question], **options: Any
) -> tuple[str, Decisions]:
    """The name of the model that answered, and its answers. Raises: ApiError for one made to decide in another way."""
    began = time.perf_counter()
    with await service_of(request).lease(request, model) as lease:
        reserve = partial(reserve_prompts, request)
        ask = partial(lease.llm.decide, state, questions, on_encoded=reserve, **options, **salt_options(request))
        try:
            found = await unless_gone(request.receive, asyncio.to_thread(ask))
        except UnsupportedFormatError as error:
            raise unsupported(str(error), "model") from None
    record_of(request.scope).input_tokens = found.prompt_tokens
    service_of(request).totals.count_prompts(found.computed_tokens, time.perf_counter() - began)
    return lease.model_id, found


def _system_one_answer(question: Question, answer: Answer) -> dict[str, Any]:
    if isinstance(answer, YesNoAnswer):
        return {"type": "noul", "noul": answer.probability, "x_label_mass": answer.label_mass}
    measured = {"confidence": answer.confidence, "x_label_mass": answer.label_mass}
    if isinstance(answer, ChoiceAnswer):
        return {"type": "choice", "choice": answer.choice, "probabilities": dict(answer.probabilities), **measured}
    assert isinstance(question, Score), "an answer is of its question's kind"
    return {
        "type": "score",
        "score": answer.score,
        "legend": {str(index): level for index, level in enumerate(question.levels)},
        "probabilities": {str(index): one for index, one in enumerate(answer.probabilities)},
        **measured,
    }


def _openai_answer(given: Mapping[str, Any], values: Sequence[Any], answer: Answer) -> dict[str, Any]:
    """An answer in OpenAI's shape. given: its question. values: its choices or the labels of its levels."""
    name = given.get("name")
    if isinstance(answer, YesNoAnswer):
        return {"type": "predicate", "name": name, "probability": answer.probability}
    if isinstance(answer, ChoiceAnswer):
        found = list(answer.probabilities.values())
        told = [{"value": value, "probability": one} for value, one in zip(values, found, strict=True)]
        best = values[found.index(max(found))]
        return {
            "type": "choice",
            "name": name,
            "choice": best,
            "confidence": answer.confidence,
            "probabilities": told,
        }
    return {
        "type": "score",
        "name": name,
        "score": answer.score,
        "confidence": answer.confidence,
        "probabilities": [
            {"value": index, "label": label, "probability": one}
            for index, (label, one) in enumerate(zip(values, answer.probabilities, strict=True))
        ],
    }


def _asked(question: Mapping[str, Any], path: str) -> tuple[Question, list[Any]]:
    """A question in OpenAI's shape, and the values that its answer names. Raises: ApiError."""
    kind, name = question.get("type"), question.get("name")
    if name is not None and not isinstance(name, str):
        raise ApiError(400, f"{path}.name is {name!r:.80}; give a text, or leave it out", param=f"{path}.name")
    instructions = _instructions(question.get("instructions"), f"{path}.instructions")
    made: Question
    values: list[Any] = []
    match kind:
        case "predicate":
            made = YesNo(instructions=instructions)
        case "choice":
            values, described = _entries(question.get("choices"), "value", (str, bool), f"{path}.choices")
            # A boolean and the text of its name are two choices, which are written in one way each.
            names = [value if isinstance(value, str) else json.dumps(value) for value in values]
            if len(set(names)) < len(names):
                names = [json.dumps(value) for value in values]
            if len(set(names)) < len(names):
                raise ApiError(400, f"{path}.choices has a value twice; give each once", param=f"{path}.choices")
            made = Choice(options=dict(zip(names, described, strict=True)), instructions=instructions)
        case "score":
            values, described = _entries(question.get("levels"), "label", (str,), f"{path}.levels")
            levels = [label if one is None else f"{label}: {one}" for label, one in zip(values, described, strict=True)]
            made = Score(levels=levels, instructions=instructions)
        case _:
            raise ApiError(400, f"{path}.type is {kind!r:.80}; give predicate, choice or score", param=f"{path}.type")
    try:
        return checked_question(made), values
    except RequestError as error:
        raise ApiError(400, f"{path}: {error}", param=path) from None


def _entries(entries: Any, member: str, kinds: tuple[type, ...], path: str) -> tuple[list[Any], list[str | None]]:
    """The values of choices or levels, and their descriptions."""
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ApiError(400, f"{path} is no list of objects; give each with its {member}", param=path)
    for index, one in enumerate(entries):
        if not isinstance(one.get(member), kinds) or one[member] == "":
            raise ApiError(400, f"{path}[{index}] has no {member}; give one", param=f"{path}[{index}].{member}")
        if not isinstance(one.get("description"), str | None):
            raise ApiError(400, f"{path}[{index}].description is no text", param=f"{path}[{index}].description")
    return [one[member] for one in entries], [one.get("description") for one in entries]


def _instructions(value: Any, path: str) -> str:
    """The text of a question. Raises: ApiError for what is none."""
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise ApiError(400, f"{path} is no text; give the question, or its parts", param=path)
    return "\n".join(_json_text(part, f"{path}[{index}]")["text"] for index, part in enumerate(value))


def _as_text(item: InputItem) -> InputItem:
    """An item whose parts of JSON are text."""
    if not isinstance(item.content, list):
        return item
    parts = [_json_text(part, "input") if part.get("type") == "input_json" else part for part in item.content]
    return msgspec.structs.replace(item, content=parts)


def _json_text(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A part of text, or of JSON as text. Raises: ApiError for another kind."""
    match part:
        case {"type": "input_json", "data": dict() | list() as data}:
            return {"type": "input_text", "text": json.dumps(data, ensure_ascii=False)}
        case {"type": "input_text", "text": str() as text}:
            return {"type": "input_text", "text": text}
    raise ApiError(400, f"{path} is of type {part.get('type')!r:.80}; give input_text or input_json", param=path)

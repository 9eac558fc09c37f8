"""Members that no record has: left unread with a notice at every depth of every route, refused if misspelled.

Clients are newer than the server, so this is what breaks them most often.
"""

import inspect as signatures
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from local_servers import STORY
from msgspec import inspect

from localinfer.apps.server.replies.fields import StructuredOutputs
from localinfer.apps.server.routes import BODIES
from localinfer.apps.server.transport.http import ApiError, decode_json
from localinfer.apps.server.transport.known_fields import HEADER, collecting, notice
from localinfer.generation.chat_model import ChatHistory
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.reply_learning import Trials

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
UNKNOWN = "member_of_next_year"


def sample(kind: inspect.Type) -> Any:
    """The shortest value of a type that JSON can say."""
    match kind:
        case inspect.Metadata():
            return sample(kind.type)
        case inspect.UnionType():
            return sample(kind.types[0])
        case inspect.StructType():
            return {one.encode_name: sample(one.type) for one in kind.fields if one.required}
        case inspect.ListType():
            return [sample(kind.item_type)]
        case inspect.DictType():
            return {}
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.BoolType():
            return True
        case inspect.NoneType():
            return None
    return "a"


def with_unknown(kind: inspect.Type, path: str = "") -> Iterator[tuple[Any, str]]:
    """Values of a type, each with one member at one place that its record has not, and the path of it.

    Not of forms, whose unknown kinds are refused.
    """
    match kind:
        case inspect.Metadata():
            yield from with_unknown(kind.type, path)
        case inspect.UnionType():
            for one in kind.types:
                yield from with_unknown(one, path)
        case inspect.ListType():
            for value, place in with_unknown(kind.item_type, f"{path}[0]"):
                yield [value], place
        case inspect.StructType():
            at = f"{path}." if path else ""
            if kind.cls is StructuredOutputs:
                return
            yield {**sample(kind), UNKNOWN: {"a": 1}}, f"{at}{UNKNOWN}"
            for one in kind.fields:
                for value, place in with_unknown(one.type, f"{at}{one.encode_name}"):
                    yield {**sample(kind), one.encode_name: value}, place


def misspelled(name: str) -> str:
    return f"{name[:-2]}{name[-1]}{name[-2]}" if name[-1] != name[-2] else f"{name}s"


@pytest.mark.parametrize("path", sorted(BODIES))
def test_unknown_member_is_left_unread_with_a_notice_at_every_depth(path):
    record = BODIES[path]
    places = set()
    for value, place in with_unknown(inspect.type_info(record)):
        with collecting() as notices:
            decode_json(json.dumps(value).encode(), record)
        assert notices == [f"{place} was not read: this route has no such member"], value
        places.add(place)
    assert UNKNOWN in places and (path != CHAT or len(places) > 8)


@pytest.mark.parametrize("path", sorted(BODIES))
def test_misspelled_member_is_refused_and_the_meant_one_named(path):
    record = BODIES[path]
    body = sample(inspect.type_info(record))
    names = [field.encode_name for field in msgspec.structs.fields(record) if len(field.encode_name) > 10]
    for name in names:
        with pytest.raises(ApiError, match=f"did you mean {name}") as refused:
            decode_json(json.dumps({**body, misspelled(name): 1}).encode(), record)
        assert (refused.value.status, refused.value.param) == (400, misspelled(name))


def test_many_unknown_members_are_a_few_short_notices():
    body = {"messages": STORY, **{f"{index}\n\u2028é" * 40: index for index in range(200)}}
    with collecting() as notices:
        decode_json(json.dumps(body).encode(), BODIES[CHAT])
        notice("x" * 10_000)
    assert len(notices) == 16 and all(len(one) <= 1000 and "\n" not in one for one in notices)


@pytest.mark.parametrize(
    ("path", "asked", "told"),
    [
        (CHAT, {"messages": STORY, "max_tokens": 1}, lambda reply: reply["timings"]),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, lambda reply: reply["timings"]),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}, lambda reply: reply["timings"]),
        (MESSAGES, {"messages": STORY, "max_tokens": 1}, lambda reply: reply["timings"]),
        ("/completion", {"prompt": "a", "n_predict": 1}, lambda reply: reply),
        ("/v1/embeddings", {"input": "a"}, None),
        ("/tokenize", {"content": "a"}, None),
    ],
)
def test_answers_say_what_was_not_read(tcp, path, asked, told):
    answer = tcp.post(path, json={**asked, UNKNOWN: 1, "größe": [2]})
    assert answer.status_code == 200, answer.text
    assert f"{UNKNOWN} was not read" in answer.headers[HEADER] and r"gr\xf6\xdfe" in answer.headers[HEADER]
    if told is not None:
        assert told(answer.json())["notices"][0].startswith(UNKNOWN)
    assert HEADER not in tcp.post(path, json=asked).headers


def test_ollama_says_it_in_warnings(tcp):
    asked = {"model": "demo", "messages": STORY, "stream": False, "options": {"num_predict": 1, UNKNOWN: 1}}
    answer = tcp.post("/api/chat", json=asked).json()
    assert answer["warnings"] == [f"options.{UNKNOWN} was not read: this route has no such member"]


def test_tools_parts_and_forms_take_unknown_members(tcp):
    parts = [{"type": "text", "text": "a", UNKNOWN: 1}]
    tool = {"type": "function", UNKNOWN: 1, "function": {"name": "f", UNKNOWN: 1}}
    form = {"type": "json_schema", UNKNOWN: 1, "json_schema": {"name": "a", "schema": {"enum": [1]}, UNKNOWN: 1}}
    asked = {"messages": [{"role": "user", "content": parts, UNKNOWN: 1}], "max_tokens": 4, "response_format": form}
    reply = tcp.post(CHAT, json={**asked, "tools": [tool], "tool_choice": "none"}).json()
    assert reply["choices"][0]["message"]["content"] == "1"
    assert len(reply["timings"]["notices"]) == 6


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "create", "previous": None}, None])
def test_new_thread_is_none(tcp, thread):
    asked = {"messages": STORY, "max_tokens": 1}
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        assert tcp.post(path, json={**asked, "thread": thread}).status_code == 200


@pytest.mark.parametrize("thread", [{"type": "continue", "previous_message_id": "msg_1"}, {"type": "create", "a": 1}])
def test_thread_that_goes_on_is_refused_as_clients_expect_it(tcp, thread):
    answer = tcp.post(MESSAGES, json={"messages": STORY, "max_tokens": 1, "thread": thread})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"]["error_code"] == "thread_unsupported_request"


def renderer_parameters() -> list[str]:
    """Every name by which a function takes something on a chat's way into its template."""
    functions = (
        *(ChatTemplate.render, ChatTemplate.render_segments, ChatTemplate.encode, Trials.render),
        *(ChatTemplate._render, ChatTemplate._render_once, ChatHistory.encode, ChatHistory._encode_chat),
    )
    return sorted({name for one in functions for name in signatures.signature(one).parameters})


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/input_tokens", "/apply-template"])
def test_template_variables_may_have_the_names_of_parameters(tcp, path):
    names = renderer_parameters()
    assert {"self", "messages", "spellings", "tokenizer", "variables"} <= {*names}
    for name in names:
        body = {"messages": STORY, "max_tokens": 1, "chat_template_kwargs": {name: 1}}
        answer = tcp.post(path, json=body)
        taken = name in ("messages", "tools", "add_generation_prompt")
        assert answer.status_code == (400 if taken else 200), (name, answer.text)

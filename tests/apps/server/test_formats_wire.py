"""Calls and reasoning of newer formats as they leave each route, from models that say them letter by letter."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from event_frames import named_events, post_stream, text_of
from local_servers import serving
from scripted_models import scripted_model, scripted_sources

from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.models.text.chat_template import ChatTemplate
from tests.engine.fakes import FakeTemplate
from tests.models.text.newer_templates import NEWER_FAMILIES

PATH = "/v1/chat/completions"
ASK = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (("look", {"at": {"type": "string"}}), ("count", {"to": {"type": "array"}}))
]
CALLS = [("look", {"at": "b \"x\" 'y' <"}), ("count", {"to": [1, {"a": None}]})]
# What each says: the name of its template, reasoning, text, and both calls, or the first.
SAID = {
    "own-notation": (
        '<|channel>thought\nHm.\n<channel|>I look.<|call>call:look{at:<|"|>b "x" \'y\' <<|"|>}<call|>'
        "<|call>call:count{to:[1,{a:null}]}<call|>"
    ),
    "python-calls": ("I look.<|call_start|>[look(at='b \"x\" \\'y\\' <'), count(to=[1, {\"a\": null}])]<|call_end|>"),
    "named-ids": (
        'I look.<|calls_begin|><|call_begin|>functions.look:0<|call_argument_begin|>{"at": "b \\"x\\" \'y\' <"}'
        '<|call_end|><|call_begin|>functions.count:1<|call_argument_begin|>{"to": [1, {"a": null}]}<|call_end|>'
        "<|calls_end|>"
    ),
    "channels": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
        '{"at": "b \\"x\\" \'y\' <"}'
    ),
}


def template_of(name: str) -> type[FakeTemplate]:
    """A template that shows how its family writes, and asks the scripted model in its own way."""
    written = NEWER_FAMILIES[name].source
    for end in NEWER_FAMILIES[name].ends:
        written = written.replace(end, "<end>")
    real = ChatTemplate(written)

    class FamilyTemplate(FakeTemplate):
        source = written

        def render(self, messages: Sequence[Mapping[str, Any]], *options: Any, **more: Any) -> str:
            return real.render(messages, *options, **more)

    return FamilyTemplate


@pytest.fixture(scope="module")
def families(runtime_folder: Path) -> Iterator[httpx.Client]:
    """A client of a server whose models say SAID."""

    def load(source: Any) -> Any:
        return scripted_model(SAID[source.id].encode(), template_of(source.id))

    settings = ServerSettings(port=0)
    with serving(settings, sources=scripted_sources(*SAID), load=load) as running, running.client() as client:
        yield client


def expected(name: str) -> tuple[str, list[tuple[str, Any]]]:
    return ("Hm." if "Hm." in SAID[name] else ""), CALLS[: 1 if name == "channels" else 2]


@pytest.mark.parametrize("name", SAID)
def test_chat_completions_stream_reasoning_text_and_calls(families: httpx.Client, name: str) -> None:
    reasoning, calls = expected(name)
    body = {"model": name, "messages": ASK, "temperature": 0, "tools": TOOLS}
    chunks = post_stream(families, PATH, body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == reasoning
    assert text_of(chunks) == "I look." and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    told = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["function"]["name"] for call in told if "id" in call] == [called for called, _ in calls]
    texts = ["".join(c["function"]["arguments"] for c in told if c["index"] == index) for index in range(len(calls))]
    assert [json.loads(text) for text in texts] == [arguments for _, arguments in calls]
    message = families.post(PATH, json=body).json()["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == texts
    assert (message["content"], message.get("reasoning_content") or "") == ("I look.", reasoning)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Sun."} for call in message["tool_calls"]]
    again = families.post(PATH, json={**body, "messages": [*ASK, message, *results]})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("name", SAID)
def test_responses_and_messages_have_the_same_parts(families: httpx.Client, name: str) -> None:
    reasoning, calls = expected(name)
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body: dict[str, Any] = {"model": name, "input": "hi", "temperature": 0, "tools": flat}
    items = families.post("/v1/responses", json=body).json()["output"]
    kinds = ["reasoning"] * bool(reasoning) + ["message"] + ["function_call"] * len(calls)
    assert [item["type"] for item in items] == kinds
    made = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
    assert made == calls
    streamed = named_events(families.post("/v1/responses", json={**body, "stream": True}))[-1]["response"]["output"]
    assert [item["type"] for item in streamed] == kinds
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    body = {"model": name, "messages": ASK, "temperature": 0, "tools": tools, "max_tokens": 999}
    blocks = families.post("/v1/messages", json=body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking"] * bool(reasoning) + ["text"] + ["tool_use"] * len(calls)
    assert [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"] == calls
    events = named_events(families.post("/v1/messages", json={**body, "stream": True}))
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == [block["type"] for block in blocks]


def test_an_answer_loses_its_frame_without_tools_too(families: httpx.Client) -> None:
    body = {"model": "channels", "messages": ASK, "temperature": 0, "max_tokens": 100}
    message = families.post(PATH, json=body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
    assert text_of(post_stream(families, PATH, body)) == "I look."

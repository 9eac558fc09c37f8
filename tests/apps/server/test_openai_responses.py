"""OpenAI's own client, unmodified, on what the API of responses keeps, and on each of its events."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client_imports import import_or_skip
from event_frames import named_events
from local_servers import serving
from scripted_models import ThinkingTemplate, scripted_model, scripted_sources

from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.models.text.tokenizer import SpellingFinder

# Other people's packages warn of each other; what they send and read is what is tested.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_leftovers")]

ASK = {"model": "demo", "input": "Tell me a story.", "max_output_tokens": 8, "temperature": 0}
PATCH_TEXT = '*** Begin\n+a "quoted" \\ line 😀\n*** End'
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "patch", "description": "Changes files."}
TOOLS = [PATCH, {"type": "namespace", "name": "garden", "description": "In the garden.", "tools": [LOOK, PATCH]}]


class ReasonedTemplate(ThinkingTemplate):
    """Writes former reasoning where the model wrote it."""

    def render_segments(self, messages: Any, spellings: SpellingFinder, *_: Any, **__: Any) -> list[tuple[str, bool]]:
        told = []
        for message in messages:
            reasoning = message.get("reasoning_content")
            thought = "" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n"
            told.append({**message, "content": thought + (message["content"] or "")})
        return super().render_segments(told, spellings)


def calls_of(*calls: tuple[str, dict[str, Any]]) -> bytes:
    written = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "".join(f"<tool_call>\n{call}\n</tool_call>\n" for call in written).rstrip("\n").encode()


SCRIPTS = {
    "thinks": b"<think>\nHm, well.\n</think>\n\nYes.",
    "patches": calls_of(("patch", {"input": PATCH_TEXT}), ("garden__look", {}), ("garden__patch", {"input": ""})),
    "words": b"<think>\nHm.\n</think>\n\nI look.\n" + calls_of(("patch", {"input": "x"})),
}


@pytest.fixture(scope="module")
def scripts() -> Iterator[httpx.Client]:
    def load(source: Any) -> Any:
        return scripted_model(list(SCRIPTS[source.id]), ReasonedTemplate)

    settings = ServerSettings(port=0)
    with serving(settings, sources=scripted_sources(*SCRIPTS), load=load) as running, running.client() as client:
        yield client


def client_of(http: httpx.Client) -> Any:
    openai = import_or_skip("openai")
    return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture
def client(tcp: httpx.Client) -> Any:
    return client_of(tcp)


def checked_events(http: httpx.Client, **asked: Any) -> list[dict[str, Any]]:
    """The events of a response, each of which has every member that its type in the client's package asks for."""
    types = import_or_skip("openai.types.responses")
    pydantic = import_or_skip("pydantic")
    events = named_events(http.post("/v1/responses", json={**asked, "stream": True}))
    adapter = pydantic.TypeAdapter(types.ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_events_have_the_members_of_the_clients_types(tcp, scripts):
    checked_events(tcp, **ASK, instructions="Be brief.")
    kinds = [
        event["type"].removeprefix("response.")
        for event in checked_events(scripts, model="words", input="hi", tools=TOOLS)
    ]
    order = [kind for index, kind in enumerate(kinds) if kinds[index - 1 : index] != [kind]]
    assert order == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]


def test_calls_of_custom_tools_are_text_and_those_of_namespaces_keep_their_names(scripts):
    events = checked_events(scripts, model="patches", input="hi", tools=TOOLS)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == PATCH_TEXT
    output = client_of(scripts).responses.create(model="patches", input="hi", tools=TOOLS).output
    assert [(item.type, item.name, item.namespace) for item in output] == [
        ("custom_tool_call", "patch", None),
        ("function_call", "look", "garden"),
        ("custom_tool_call", "patch", "garden"),
    ]
    assert output[0].input == PATCH_TEXT
    assert output[2].input == ""


def test_outputs_of_custom_tools_come_back_by_id_and_as_items(scripts):
    client = client_of(scripts)
    first = client.responses.create(model="patches", input="hi", tools=TOOLS)
    results = [{"type": f"{item.type}_output", "call_id": item.call_id, "output": "done"} for item in first.output]
    by_id = client.responses.create(model="patches", input=results, tools=TOOLS, previous_response_id=first.id)
    items = [
        {"role": "user", "content": "hi"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        *results,
    ]
    whole = client.responses.create(model="patches", input=items, tools=TOOLS, store=False)
    assert by_id.usage.input_tokens == whole.usage.input_tokens


def test_custom_tool_is_called_as_its_regex_says_and_by_name(client):
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{2} (cats|dogs)"}
    tools = [{**PATCH, "format": form}, LOOK]
    asked = {**ASK, "max_output_tokens": 100, "tools": tools, "parallel_tool_calls": False}
    choices = (
        {"type": "custom", "name": "patch"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]},
    )
    for choice in choices:
        (call,) = client.responses.create(**asked, tool_choice=choice).output
        number, animal = call.input.split()
        assert len(number) == 2
        assert number.isdigit()
        assert animal in ("cats", "dogs")
    openai = import_or_skip("openai")
    with pytest.raises(openai.BadRequestError, match="no custom tool"):
        client.responses.create(**asked, tool_choice={"type": "custom", "name": "look"})
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"+'}
    reply = client.responses.create(**{**asked, "tools": [{**PATCH, "format": lark}]}, tool_choice="required")
    assert reply.output[0].type == "custom_tool_call"
    assert reply.tools[0].format.definition == lark["definition"]


@pytest.mark.parametrize("form", ["as it came", "by id", "encrypted only"])
def test_reasoning_goes_out_and_comes_back(scripts, form):
    client = client_of(scripts)
    first = client.responses.create(
        model="thinks", input=form, include=["reasoning.encrypted_content"], store=form == "by id"
    )
    reasoning, message = first.output
    assert reasoning.content[0].text == "Hm, well."
    if form == "by id":
        second = client.responses.create(model="thinks", input="Why?", previous_response_id=first.id)
    else:
        sent = reasoning.model_dump(exclude_none=True)
        if form == "encrypted only":
            del sent["content"]
        items = [{"role": "user", "content": form}, sent, message.model_dump(exclude_none=True)]
        second = client.responses.create(model="thinks", input=[*items, {"role": "user", "content": "Why?"}])
    # The prompt and all of the reply but its last token, as the reasoning stands in the prompt again.
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert client.responses.create(model="thinks", input="hi").output[0].encrypted_content is None


def test_reasoning_that_another_server_encrypted_is_passed_over(client):
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABo"}
    items = [{"role": "user", "content": "hi"}, reasoning, {"role": "assistant", "content": "Yes."}]
    asked = {**ASK, "input": [*items, {"role": "user", "content": "Why?"}]}
    plain = {**ASK, "input": [items[0], *asked["input"][2:]]}
    assert client.responses.create(**asked).output_text == client.responses.create(**plain).output_text


def test_client_continues_retrieves_lists_and_deletes(client):
    openai = import_or_skip("openai")
    first = client.responses.create(**ASK, metadata={"a": "b"})
    second = client.responses.create(**{**ASK, "input": "Go on."}, previous_response_id=first.id)
    assert client.responses.retrieve(second.id) == second
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in listed] == ["user", "assistant", "user"]
    assert listed[1].content[0].text == first.output_text
    count = client.responses.input_tokens.count(model="demo", input="Go on.", previous_response_id=first.id)
    assert count.input_tokens == second.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_client_keeps_a_conversation(client):
    openai = import_or_skip("openai")
    conversation = client.conversations.create(items=[{"role": "user", "content": "I am Tom."}], metadata={"a": "b"})
    reply = client.responses.create(**ASK, conversation=conversation.id)
    assert reply.conversation.id == conversation.id
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=1))
    assert [item.role for item in items] == ["user", "user", "assistant"]
    added = client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "And?"}])
    assert client.conversations.items.retrieve(added.data[0].id, conversation_id=conversation.id) == added.data[0]
    client.conversations.items.delete(added.data[0].id, conversation_id=conversation.id)
    assert client.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_client_looks_after_what_is_made_in_the_background(client):
    asked = {**ASK, "max_output_tokens": 2000, "background": True, "extra_body": {"ignore_eos": True}}
    begun = client.responses.create(**asked)
    assert begun.status == "in_progress"
    assert client.responses.cancel(begun.id).status == "cancelled"
    with client.responses.create(**{**asked, "max_output_tokens": 30}, stream=True) as stream:
        seen = [next(stream) for _ in range(4)]
    rest = list(client.responses.retrieve(seen[0].response.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in rest] == list(range(4, 4 + len(rest)))
    assert rest[-1].response.usage.output_tokens == 30


def test_names_are_written_as_openai_and_anthropic_write_them(tcp, client):
    assert client.responses.create(**ASK).id.startswith("resp_")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert tcp.post("/v1/messages", json=body).json()["id"].startswith("msg_")
    assert tcp.post("/v1/chat/completions", json=body).json()["id"].startswith("chatcmpl-")

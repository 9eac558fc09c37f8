"""OpenAI's own client, unmodified, on what the API of responses keeps, and on each of its events."""

import json
import re
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


DIFF = '@@ def f():\n-    "a"\n+    *** End\n *** End Patc\n'
UPDATE = f"*** Begin Patch\n*** Update File: a b.py\n{DIFF}*** End Patch"
DELETE = "*** Begin Patch\n*** Delete File: c\n*** End Patch"
CLIENT_TOOLS = [{"type": kind} for kind in ("apply_patch", "shell", "local_shell")]
LINE = "the same line\n"
SCRIPTS = {
    "loops": (LINE * 20).encode(),
    "letters": b"abc",
    "works": calls_of(
        ("apply_patch", {"input": UPDATE}),
        ("apply_patch", {"input": DELETE}),
        ("shell", {"commands": ["ls", "cat a"], "timeout_ms": 5}),
        ("local_shell", {"command": ["ls", "-l"], "env": {"A": "b"}}),
    ),
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
        if not event["type"].startswith("response.apply_patch_call"):  # in OpenAI's reference, and not in its package
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


def test_tools_that_clients_run_have_items_of_their_own_and_come_back(scripts):
    events = checked_events(scripts, model="works", input="hi", tools=CLIENT_TOOLS)
    deltas = [event["delta"] for event in events if event["type"] == "response.apply_patch_call_operation_diff.delta"]
    assert len(deltas) > 20
    assert "".join(deltas) == DIFF
    client = client_of(scripts)
    first = client.responses.create(model="works", input="hi", tools=CLIENT_TOOLS)
    update, delete, shell, local = first.output
    assert update.operation.model_dump() == {"type": "update_file", "path": "a b.py", "diff": DIFF}
    assert (delete.operation.type, delete.operation.path) == ("delete_file", "c")
    assert (shell.action.commands, shell.action.timeout_ms) == (["ls", "cat a"], 5)
    assert (local.action.type, local.action.command, local.action.env) == ("exec", ["ls", "-l"], {"A": "b"})
    assert {item.status for item in first.output} == {"completed"}
    told = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    members = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in told]
    assert [item["type"] for item in members] == [item.type for item in first.output]
    ran = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    outputs = ["done", "done", ran, "a"]
    results = [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": output}
        for item, output in zip(first.output, outputs, strict=True)
    ]
    items = [{"role": "user", "content": "hi"}, *told, *results]
    again = client.responses.create(model="works", input=items, tools=CLIENT_TOOLS, store=False, max_output_tokens=1)
    # All of the reply but its last token stands in the prompt again.
    assert again.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 12


def test_call_that_is_cut_off_is_no_call_that_could_be_run(scripts):
    cut_off = set()
    for model in ("works", "patches"):
        asked = {"model": model, "input": "hi", "tools": [*CLIENT_TOOLS, *TOOLS]}
        wanted = scripts.post("/v1/responses", json=asked).json()["output"]
        script = SCRIPTS[model]
        for cut in (20, 140, *(found.end() + 45 for found in re.finditer(b'"name": ', script))):
            reply = scripts.post("/v1/responses", json={**asked, "max_output_tokens": cut}).json()
            assert (reply["status"], reply["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
            for index, (item, whole) in enumerate(zip(reply["output"], wanted, strict=False)):
                is_last = index == len(reply["output"]) - 1
                assert item["status"] == "completed" or is_last
                if item["status"] == "completed":
                    assert item.keys() == whole.keys()
                    for member in ("operation", "action", "input", "arguments"):
                        assert item.get(member) == whole.get(member)
                else:
                    cut_off.add(item["type"])
                    assert not item.get("action", {}).get("commands")
    assert cut_off >= {"apply_patch_call", "shell_call", "local_shell_call", "custom_tool_call"}


def test_calls_of_tools_that_another_server_ran_are_shown_as_text(client):
    hosted = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "cats"}},
        {"type": "code_interpreter_call", "id": "ci_1", "status": "completed", "code": "1+1", "outputs": None},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="},
        {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "n", "arguments": "{}", "output": "x"},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": "x"}},
    ]
    ask = [{"role": "user", "content": "hi"}]
    counts = [
        client.responses.create(**{**ASK, "input": [*ask, *items], "max_output_tokens": 1}).usage.input_tokens
        for items in ([], hosted[:1], hosted[:2], hosted[:3], hosted[:4], hosted)
    ]
    assert sorted(set(counts)) == counts


def test_calls_are_parallel_where_they_may_be_and_streamed_as_they_are_written(scripts):
    user = {"messages": [{"role": "user", "content": "hi"}]}
    flat = [{**LOOK, "name": name} for name in ("patch", "garden__look", "garden__patch")]
    wrapped = [{"type": "function", "function": tool} for tool in flat]
    shapes = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in flat]
    for path, asked, off, kind in (
        ("/v1/chat/completions", {**user, "tools": wrapped}, {"parallel_tool_calls": False}, '"arguments":'),
        ("/v1/responses", {"input": "hi", "tools": flat}, {"parallel_tool_calls": False}, "arguments.delta"),
        (
            "/v1/messages",
            {**user, "tools": shapes, "max_tokens": 999},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "input_json_delta",
        ),
    ):
        asked = {"model": "patches", **asked, "stream": True}
        counts = []
        for more in ({}, off):
            frames = scripts.post(path, json={**asked, **more}).text.split("\n\n")
            counts.append(sum(name in frame for frame in frames for name in ('"content_block_start"', "item.added")))
            counts[-1] += sum('"tool_calls"' in frame and '"name"' in frame for frame in frames)
            pieces = sum(kind in frame for frame in frames)
            # One for each token, which is a letter here.
            assert pieces > 0.9 * len(json.dumps({"input": PATCH_TEXT}, ensure_ascii=False)), (path, pieces)
        assert counts == [3, 1], (path, counts)


def test_loop_is_ended_and_not_the_reply_and_said_in_each_api(scripts):
    for path, ask, tools in (
        ("/v1/responses", {"input": "hi"}, [LOOK]),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, [LOOK]),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 999},
            [{"name": "look", "input_schema": {"type": "object"}}],
        ),
    ):
        asked = {"model": "loops", **ask, "tools": tools, "temperature": 0}
        ended = scripts.post(path, json=asked).json()
        assert json.dumps(LINE * 12)[1:-1] in json.dumps(ended)
        assert json.dumps(LINE * 13)[1:-1] not in json.dumps(ended)
        assert "he same line" in json.dumps(ended).split(json.dumps(LINE * 12)[1:-1])[1]
        assert any("a loop was ended" in notice for notice in ended["timings"]["notices"])
        for more in ({"loop_stop": False}, {"tools": []}):
            whole = scripts.post(path, json={**asked, **more}).json()
            assert json.dumps(LINE * 19)[1:-1] in json.dumps(whole)
            assert not whole["timings"].get("notices")


def test_call_that_came_three_times_with_one_result_is_noted_and_not_made_again(scripts):
    call = {"type": "function_call", "name": "garden__look", "arguments": "{}"}
    items: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for number in range(4):
        result = {"type": "function_call_output", "call_id": f"c{number}", "output": "none"}
        items += [{**call, "call_id": f"c{number}"}, result]
    counts = []
    for size in (5, 7, 9):
        asked = {"model": "letters", "input": items[:size], "tools": [LOOK], "max_output_tokens": 1}
        told = [scripts.post("/v1/responses", json={**asked, **more}).json() for more in ({}, {"loop_stop": False})]
        first, other = (reply["usage"]["input_tokens"] for reply in told)
        counts.append(first - other)
        notices = told[0]["timings"].get("notices", [])
        assert bool(notices) == (size > 5), notices
    assert counts[0] == 0 < counts[1] < counts[2]


def test_chats_call_custom_tools_by_their_input(scripts):
    client = client_of(scripts)
    grammar = {"syntax": "lark", "definition": "start: /(?s:.*)/"}
    tools = [
        {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}},
        {"type": "function", "function": {"name": "garden__look"}},
        {"type": "custom", "custom": {"name": "garden__patch"}},
    ]
    asked = {"model": "patches", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    message = client.chat.completions.create(**asked).choices[0].message
    patch, look, empty = message.tool_calls
    assert (patch.type, patch.custom.name, patch.custom.input) == ("custom", "patch", PATCH_TEXT)
    assert (look.type, look.function.arguments, empty.custom.input) == ("function", "{}", "")
    pieces = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.index == 0:
                pieces.append((call.type, call.custom["input"]))
    assert pieces[0] == ("custom", "")
    assert len(pieces) > 5
    assert "".join(text for _, text in pieces) == PATCH_TEXT
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls]
    history = [*asked["messages"], message.model_dump(exclude_none=True), *results]
    again = client.chat.completions.create(**{**asked, "messages": history, "max_tokens": 1})
    assert again.usage.prompt_tokens_details.cached_tokens > len(PATCH_TEXT)


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
    wrong = {"type": "grammar", "syntax": "lark", "definition": 'start: a\na: "x" /(?=y)/'}
    with pytest.raises(openai.BadRequestError, match="rule 'a', line 2") as caught:
        client.responses.create(**{**asked, "tools": [LOOK, {**PATCH, "format": wrong}]})
    assert caught.value.param == "tools[1].format.definition"
    with pytest.raises(openai.BadRequestError, match="no custom tool"):
        client.responses.create(**asked, tool_choice={"type": "custom", "name": "look"})
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"+'}
    reply = client.responses.create(**{**asked, "tools": [{**PATCH, "format": lark}]}, tool_choice="required")
    assert reply.output[0].type == "custom_tool_call"
    assert set(reply.output[0].input) == {"x"}
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

"""Tools and reasoning as they leave each route, from a model that is made to call."""

import json

import pytest
from event_frames import post_stream
from local_servers import STORY

PATH = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Say it.", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "weather"}}
BODY = {
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 100,
    "seed": 3,
}


def check_call(name: str, arguments: str) -> None:
    assert name == "weather"
    found = json.loads(arguments)
    assert found["city"] in ("Rome", "Oslo")
    assert 1 <= found["days"] <= 9


def test_call_has_a_name_an_id_and_arguments_as_text(http):
    (choice,) = http.post(PATH, json=BODY).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"]
    check_call(call["function"]["name"], call["function"]["arguments"])


def test_streamed_call_tells_its_name_once_and_every_byte_of_its_arguments_once(http):
    chunks = post_stream(http, PATH, BODY)
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    first, *later = deltas
    assert first["type"] == "function"
    assert first["id"]
    assert first["function"] == {"name": "weather", "arguments": ""}
    assert all(set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"} for delta in later)
    assert {delta["index"] for delta in deltas} == {0}
    check_call("weather", "".join(delta["function"]["arguments"] for delta in deltas))
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    whole = http.post(PATH, json=BODY).json()["choices"][0]["message"]["tool_calls"][0]["function"]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == whole["arguments"]


def test_named_tool_is_called_and_none_calls_none(tcp):
    reply = tcp.post(PATH, json={**BODY, "tool_choice": NAMED}).json()["choices"][0]
    assert reply["message"]["tool_calls"][0]["function"]["name"] == "weather"
    reply = tcp.post(PATH, json={**BODY, "tool_choice": "none", "max_tokens": 8}).json()["choices"][0]
    assert "tool_calls" not in reply["message"]


@pytest.mark.parametrize(
    ("choice", "count"),
    [
        ("any", 1),
        ({"type": "required"}, 1),
        ({"type": "function", "name": "weather"}, 1),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, 1),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}, 1),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, 0),
        ({"type": "none"}, 0),
    ],
    ids=json.dumps,
)
def test_choices_have_the_shapes_of_every_api(tcp, choice, count):
    response = tcp.post(PATH, json={**BODY, "tool_choice": choice, "max_tokens": 100 if count else 4})
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"][0]["message"].get("tool_calls", ())) == count


def test_named_tool_is_called_once_though_calls_may_be_parallel(tcp):
    chunks = post_stream(tcp, PATH, {**BODY, "tool_choice": NAMED, "parallel_tool_calls": True})
    indices = {call["index"] for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])}
    assert indices == {0}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    flat = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    body = {"input": "How is the weather?", "tools": flat, "max_output_tokens": 100, "seed": 3}
    named = {"type": "function", "name": "weather"}
    for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named, {"type": "web_search"}]}):
        reply = tcp.post("/v1/responses", json={**body, "tool_choice": choice, "parallel_tool_calls": False})
        assert [item["type"] for item in reply.json()["output"]] == ["function_call"], reply.text
    tool = {"name": "weather", "input_schema": PARAMETERS}
    body = {"messages": BODY["messages"], "max_tokens": 100, "tools": [tool]}
    reply = tcp.post("/v1/messages", json={**body, "tool_choice": {"type": "tool", "name": "weather"}}).json()
    assert [block["type"] for block in reply["content"]] == ["tool_use"]


def test_results_come_back(tcp):
    call = tcp.post(PATH, json=BODY).json()["choices"][0]["message"]
    messages = [
        *BODY["messages"],
        call,
        {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "Sun."},
    ]
    reply = tcp.post(PATH, json={**BODY, "messages": messages, "tool_choice": "none", "max_tokens": 8})
    assert reply.status_code == 200, reply.text


def test_log_probabilities_come_with_calls_too(tcp):
    chunks = post_stream(tcp, PATH, {**BODY, "logprobs": True, "top_logprobs": 2})
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    whole = tcp.post(PATH, json={**BODY, "logprobs": True, "top_logprobs": 2}).json()
    entries = [entry for logprobs in told for entry in logprobs["content"]]
    assert entries == whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]


def test_responses_and_messages_call_too(tcp):
    flat = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    body = {"input": "How is the weather?", "tools": [flat, {"type": "web_search"}], "tool_choice": "required"}
    reply = tcp.post("/v1/responses", json={**body, "max_output_tokens": 100, "seed": 3}).json()
    (item,) = reply["output"]
    assert item["type"] == "function_call"
    assert item["call_id"]
    check_call(item["name"], item["arguments"])
    tool = {"name": "weather", "input_schema": PARAMETERS}
    body = {"messages": BODY["messages"], "max_tokens": 100, "tools": [tool]}
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    reply = tcp.post("/v1/messages", json=body).json()
    assert reply["stop_reason"] == "tool_use"
    (block,) = reply["content"]
    assert block["type"] == "tool_use"
    check_call(block["name"], json.dumps(block["input"]))
    cut = tcp.post("/v1/messages", json={**body, "max_tokens": 12}).json()
    assert cut["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    "members",
    [
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
        {"tool_choice": "sometimes"},
        {"tool_choice": {"type": "custom", "name": "weather"}},
        {"tool_choice": {"type": "allowed_tools"}},
        {"tool_choice": {"type": "allowed_tools", "mode": "never", "tools": [NAMED]}},
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
        {"tools": "weather"},
        {"functions": [{"name": "f"}]},
    ],
    ids=lambda members: json.dumps(members)[:40],
)
def test_tools_that_mean_nothing_are_refused(tcp, members):
    assert tcp.post(PATH, json={**BODY, **members}).status_code == 400


def test_thinking_may_be_asked_for_in_every_way(tcp):
    for members in (
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        # A model that does not reason answers without.
        {"enable_thinking": True},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"reasoning_effort": "high"},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "adaptive"}},
        {"thinking_budget": 5},
    ):
        for path in (PATH, f"{PATH}/input_tokens", "/apply-template"):
            response = tcp.post(path, json={"messages": STORY, "max_tokens": 2, **members})
            assert response.status_code == 200, response.text

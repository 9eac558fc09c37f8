"""Streams of what no small model says on demand: characters of many bytes, reasoning, several calls, and faults."""

import json

import pytest
from event_frames import DONE, named_events, post_stream, text_of

PATH = "/v1/chat/completions"
ASK = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (("look", {"at": {"type": "string"}}), ("count", {"to": {"type": "integer"}}))
]


def body(model: str, **members) -> dict:
    return {"model": model, "messages": ASK, "temperature": 0, **members}


def deltas_of(chunks: list[dict]) -> list[dict]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def test_every_token_is_a_chunk_of_its_own(scripted):
    chunks = post_stream(scripted, PATH, body("letters"))
    assert [delta["content"] for delta in deltas_of(chunks) if "content" in delta] == ["", *"abcdefghijkl"]


def test_characters_of_several_tokens_come_whole(scripted):
    chunks = post_stream(scripted, PATH, body("unicode"))
    letters = [delta["content"] for delta in deltas_of(chunks) if delta.get("content")]
    assert "".join(letters) == "Grüße 😀 日本."
    assert {"ü", "ß", "😀", "日", "本"} <= set(letters)
    raw = scripted.post(PATH, json=body("unicode", stream=True)).text
    assert "😀" in raw and "\\u" not in raw and "\ufffd" not in raw


@pytest.mark.parametrize("most", [3, 4, 5, 9, 11, 13])
def test_a_character_that_is_cut_short_is_told_alike_streamed_and_whole(scripted, most):
    whole = scripted.post(PATH, json=body("unicode", max_tokens=most)).json()["choices"][0]
    assert text_of(post_stream(scripted, PATH, body("unicode", max_tokens=most))) == whole["message"]["content"]
    assert whole["finish_reason"] == "length"


def test_only_what_may_become_a_stop_text_is_held_back_and_all_of_it_told_in_the_end(scripted):
    chunks = post_stream(scripted, PATH, body("stops", stop=["ENDING", "it.."]))
    letters = [delta["content"] for delta in deltas_of(chunks) if delta.get("content")]
    assert letters == [*"One two ", "END ", *"of ", "it."]
    stopped = post_stream(scripted, PATH, body("stops", stop=["END", "never"]))
    assert text_of(stopped) == "One two "
    assert stopped[-1]["choices"][0]["finish_reason"] == "stop"


def test_usage_runs_along_only_where_asked_to(scripted):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = post_stream(scripted, PATH, body("letters", stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 13
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 13
    assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks)
    chunks = post_stream(
        scripted, "/v1/completions", {"model": "letters", "prompt": "a|", "temperature": 0, "stream_options": options}
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:2]] == [1, 2]
    alone = post_stream(scripted, PATH, body("letters", stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in alone)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({}, {"reasoning_content", "reasoning"}),
        ({"reasoning_format": "both"}, {"reasoning_content", "reasoning"}),
        ({"reasoning_format": "reasoning_content"}, {"reasoning_content"}),
        ({"reasoning_format": "reasoning"}, {"reasoning"}),
        ({"reasoning_format": "none"}, set()),
    ],
)
def test_reasoning_comes_apart_under_the_names_that_are_wanted(scripted, asked, names):
    reply = scripted.post(PATH, json=body("thinking", **asked)).json()
    message = reply["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert {name: message[name] for name in message if name.startswith("reasoning")} == dict.fromkeys(
        names, "Hm, well."
    )
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    chunks = post_stream(scripted, PATH, body("thinking", **asked))
    for name in ("reasoning_content", "reasoning"):
        told = "".join(delta.get(name, "") for delta in deltas_of(chunks))
        assert told == ("Hm, well." if name in names else "")
    assert text_of(chunks) == "Yes."


def test_parallel_calls_are_numbered_and_told_once_each(scripted):
    asked = body("calls", tools=TOOLS)
    chunks = post_stream(scripted, PATH, asked)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    calls = [call for delta in deltas_of(chunks) for call in delta.get("tool_calls", [])]
    firsts = [call for call in calls if "id" in call]
    assert [(call["index"], call["function"]) for call in firsts] == [
        (0, {"name": "look", "arguments": ""}),
        (1, {"name": "count", "arguments": ""}),
    ]
    told = ["".join(call["function"]["arguments"] for call in calls if call["index"] == index) for index in range(2)]
    assert told == ['{"at": "b"}', '{"to": 3}']
    message = scripted.post(PATH, json=asked).json()["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == told
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert message["content"] == text_of(chunks) == "I look."


def test_error_after_the_start_is_a_frame_before_the_end(scripted):
    response = scripted.post(PATH, json=body("failing", stream=True))
    assert response.status_code == 200
    *frames, last = response.text.removesuffix("\n\n").split("\n\n")
    assert last == f"data: {DONE}"
    error = json.loads(frames[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert {"message", "type", "param", "code"} <= set(error)
    assert text_of([json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]) == "abc"
    completion = scripted.post("/v1/completions", json={"model": "failing", "prompt": "a|", "stream": True})
    assert completion.text.split("\n\n")[-2] == f"data: {DONE}"
    assert "server_error" in completion.text.split("\n\n")[-3]


def test_fault_of_the_server_tells_its_request_and_nothing_else(scripted):
    response = scripted.post(PATH, json=body("failing"))
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "server_error"
    assert response.headers["x-request-id"] in error["message"]
    assert response.headers["x-should-retry"] == "false"
    assert "secret" not in response.text and "home" not in response.text and "Traceback" not in response.text
    assert scripted.post(PATH, json=body("letters")).status_code == 200


def test_fault_after_the_start_is_an_event_of_the_other_routes_too(scripted):
    response = scripted.post("/v1/messages", json=body("failing", max_tokens=9, stream=True))
    assert named_events(response)[-1]["error"]["type"] == "api_error"
    response = scripted.post("/v1/responses", json={"model": "failing", "input": "hi", "stream": True})
    *events, error, failed = named_events(response)
    assert (error["type"], error["sequence_number"]) == ("error", len(events))
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert "secret" not in response.text


def test_message_with_thinking_text_and_calls_is_streamed_block_by_block(scripted):
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": " Be kind."}]
    asked = body("calls", max_tokens=999, tools=tools, system=system)
    events = named_events(scripted.post("/v1/messages", json={**asked, "stream": True}))
    kinds = [event["type"] for event in events]
    order = [kind for index, kind in enumerate(kinds) if kinds[index - 1 : index] != [kind]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", *block * 4, "message_delta", "message_stop"]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    deltas = {}
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            deltas.setdefault((event["index"], delta["type"]), []).append(
                next(v for k, v in delta.items() if k != "type")
            )
    assert {key: "".join(texts) for key, texts in deltas.items()} == {
        (0, "thinking_delta"): "Hm.",
        (1, "text_delta"): "I look.",
        (2, "input_json_delta"): '{"at": "b"}',
        (3, "input_json_delta"): '{"to": 3}',
    }
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    whole = scripted.post("/v1/messages", json=asked).json()
    assert [block["type"] for block in whole["content"]] == starts
    assert [block["input"] for block in whole["content"][2:]] == [{"at": "b"}, {"to": 3}]
    assert whole["content"][0] == {"type": "thinking", "thinking": "Hm.", "signature": ""}


@pytest.mark.parametrize(
    ("model", "members", "reason", "sequence"),
    [
        ("letters", {}, "end_turn", None),
        ("letters", {"max_tokens": 3}, "max_tokens", None),
        ("letters", {"stop_sequences": ["zz", "de"]}, "stop_sequence", "de"),
        ("letters", {"stop_sequences": ["zz"]}, "end_turn", None),
    ],
)
def test_message_tells_why_it_stopped(scripted, model, members, reason, sequence):
    asked = body(model, **{"max_tokens": 99, **members})
    whole = scripted.post("/v1/messages", json=asked).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    streamed = named_events(scripted.post("/v1/messages", json={**asked, "stream": True}))
    assert streamed[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_response_with_reasoning_text_and_calls_is_streamed_item_by_item(scripted):
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"model": "calls", "input": "hi", "temperature": 0, "tools": [*flat, {"type": "web_search"}]}
    events = named_events(scripted.post("/v1/responses", json={**asked, "stream": True}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    order = [kind for index, kind in enumerate(kinds) if kinds[index - 1 : index] != [kind]]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert order == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["arguments"] for item in final["output"][2:]] == ['{"at": "b"}', '{"to": 3}']
    assert [e["output_index"] for e in events if e["type"].endswith("output_item.added")] == [0, 1, 2, 3]
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert (final["status"], final["incomplete_details"], final["error"]) == ("completed", None, None)
    assert [tool["type"] for tool in final["tools"]] == ["function", "function"]
    whole = scripted.post("/v1/responses", json=asked).json()
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in final["output"]]

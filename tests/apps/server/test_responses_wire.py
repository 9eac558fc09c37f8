"""What leaves `/v1/responses` and `/v1/messages`, and the routes that only look at text."""

import pytest
from event_frames import named_events
from local_servers import STORY

ASK = {"input": "Tell me a story.", "max_output_tokens": 6, "temperature": 0}
MESSAGE = {"messages": STORY, "max_tokens": 6, "temperature": 0}


def test_response_is_streamed_as_numbered_events(http):
    events = named_events(http.post("/v1/responses", json={**ASK, "stream": True}))
    kinds = [event["type"].removeprefix("response.") for event in events]
    middle = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * middle,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert middle > 2
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event for event in events if event["type"].endswith("delta")]
    assert all(delta["output_index"] == delta["content_index"] == 0 and delta["logprobs"] == [] for delta in deltas)
    text = "".join(delta["delta"] for delta in deltas)
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == text
    assert final["usage"]["output_tokens"] == 6
    assert events[0]["response"]["output"] == []


def test_whole_response_is_the_last_event(http):
    whole = http.post("/v1/responses", json=ASK).json()
    streamed = named_events(http.post("/v1/responses", json={**ASK, "stream": True}))[-1]["response"]
    assert whole["output"][0]["content"] == streamed["output"][0]["content"]
    assert whole["status"] == streamed["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert {"input_tokens_details", "output_tokens_details"} <= set(whole["usage"])


def test_response_to_items_is_that_to_their_chat(tcp):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Once."}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"role": "user", "content": "Go on."},
    ]
    reply = tcp.post("/v1/responses", json={**ASK, "input": items, "instructions": "Be brief."})
    assert reply.status_code == 200, reply.text
    assert reply.json()["instructions"] == "Be brief."


@pytest.mark.parametrize(("role", "kind"), [("assistant", "output_text"), ("user", "input_text")])
def test_parts_of_a_reply_were_one_text_and_those_of_others_are_lines(tcp, role, kind):
    def num_tokens(*texts: str) -> int:
        said = {"role": role, "content": [{"type": kind, "text": text} for text in texts]}
        asked = {"input": [said, {"role": "user", "content": "Go on."}]}
        return tcp.post("/v1/responses/input_tokens", json=asked).json()["input_tokens"]

    assert num_tokens("Once upon", " a time.") == num_tokens(
        "Once upon a time." if role == "assistant" else "Once upon\n a time."
    )
    assert num_tokens("Once upon a time.") != num_tokens("Once upon\n a time.")


def test_unknown_items_are_refused_by_place(tcp):
    response = tcp.post("/v1/responses", json={**ASK, "input": [{"type": "no_such_item"}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input[0]"


def test_message_is_streamed_as_anthropic_does(http):
    events = named_events(http.post("/v1/messages", json={**MESSAGE, "stream": True}))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0]["message"]["usage"]["input_tokens"] == 14
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    whole = http.post("/v1/messages", json=MESSAGE).json()
    assert whole["content"] == [{"type": "text", "text": text}]
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 14
    assert usage["output_tokens"] == 6


def test_stop_sequence_is_named(tcp):
    text = tcp.post("/v1/messages", json={**MESSAGE, "max_tokens": 30}).json()["content"][0]["text"]
    word = text.split()[2]
    reply = tcp.post("/v1/messages", json={**MESSAGE, "max_tokens": 30, "stop_sequences": [word]}).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", word)
    assert reply["content"][0]["text"] == text[: text.index(word)]


def test_blocks_of_a_conversation_are_read(tcp):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "t", "name": "look", "input": {"at": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a cat"}]},
    ]
    body = {**MESSAGE, "messages": messages, "system": [{"type": "text", "text": "Be brief."}]}
    assert tcp.post("/v1/messages", json=body).status_code == 200
    counted = tcp.post("/v1/messages/count_tokens", json={"messages": messages}).json()["input_tokens"]
    assert counted > 14
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    refused = tcp.post("/v1/messages", json={**MESSAGE, "messages": image})
    assert refused.json()["error"]["param"] == "messages[0].content[0]"


def test_text_goes_to_tokens_and_back(http):
    text = "Once upon a time, größer."
    counted = http.post("/tokenize", json={"content": text}).json()
    assert counted["count"] == len(counted["tokens"])
    assert http.post("/detokenize", json={"tokens": counted["tokens"]}).json()["content"] == text
    pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == counted["tokens"]


def test_template_is_applied_and_counted(http):
    prompt = http.post("/apply-template", json={"messages": STORY}).json()["prompt"]
    assert prompt == "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    counted = http.post("/v1/chat/completions/input_tokens", json={"messages": STORY}).json()
    assert counted["input_tokens"] == 14

"""Messages of every shape through every route that takes chats: read as Python's methods read them."""

import pytest

from tests.support.message_shapes import READ, REFUSED

ROLES = ("system", "user", "assistant", "tool")


@pytest.mark.parametrize("shape", READ)
def test_routes_read_what_methods_read(tcp, llm, shape):
    sent, _ = READ[shape]
    asked = {"messages": sent, "add_generation_prompt": True}
    assert tcp.post("/apply-template", json=asked).json() == {"prompt": llm.render_chat(sent)}
    reply = tcp.post("/v1/chat/completions", json={**asked, "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    counted = tcp.post("/v1/chat/completions/input_tokens", json=asked)
    assert counted.json()["input_tokens"] == llm.count_chat_tokens(sent) == reply.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("shape", REFUSED)
def test_routes_refuse_what_methods_refuse(tcp, shape):
    sent, place = REFUSED[shape]
    for path in ("/v1/chat/completions", "/apply-template", "/v1/chat/completions/input_tokens"):
        reply = tcp.post(path, json={"messages": sent, "max_tokens": 1})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert (error["param"] or "").startswith(place.split(".")[0].split("[")[0])


def as_items(messages):
    """A chat as the input of a response, where one call is one item."""
    items = []
    for message in messages:
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": "a1", "output": message["content"]})
        elif message.get("tool_calls"):
            items += [
                {"type": "function_call", "call_id": "a1", "name": "weather", "arguments": '{"city": "Bonn"}'}
                for _ in message["tool_calls"]
            ]
        else:
            items.append({"role": message["role"], "content": message["content"]})
    return items


def as_blocks(messages):
    """A chat in Anthropic's shape."""
    made = []
    for message in messages:
        if message["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": "a1", "content": message["content"]}]
            made.append({"role": "user", "content": blocks})
        elif message.get("tool_calls"):
            blocks = [{"type": "tool_use", "id": "a1", "name": "weather", "input": {"city": "Bonn"}}]
            made.append({"role": "assistant", "content": blocks})
        else:
            made.append({"role": message["role"], "content": message["content"]})
    return made


@pytest.mark.parametrize(
    "shape", ["text", "calls without content", "a result", "a result without content", "a refusal"]
)
def test_other_apis_count_the_same_prompt(tcp, llm, shape):
    read = [*READ[shape][1], {"role": "user", "content": "And now?"}]
    expected = llm.count_chat_tokens(read)
    reply = tcp.post("/v1/responses", json={"input": as_items(read), "max_output_tokens": 1})
    assert reply.json()["usage"]["input_tokens"] == expected, reply.text
    reply = tcp.post("/v1/messages/count_tokens", json={"messages": as_blocks(read)})
    assert reply.json()["input_tokens"] == expected, reply.text

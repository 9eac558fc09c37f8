"""What Anthropic's clients send beside text: documents and tools of their maker; how they read errors."""

import pytest
from client_imports import import_or_skip
from local_servers import STORY

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
OWN = {"name": "look", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
DOCUMENT = {
    "type": "document",
    "title": "Notes",
    "context": "Of Tom.",
    "source": {"type": "text", "media_type": "text/plain", "data": "A cat."},
    "citations": {"enabled": False},
}


def prompt_tokens(client, messages, **more):
    response = client.post(COUNT, json={"messages": messages, **more})
    assert response.status_code == 200, response.text
    return response.json()["input_tokens"]


def user(*blocks):
    return [{"role": "user", "content": list(blocks)}]


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (DOCUMENT, "Notes\nOf Tom.\nA cat."),
        ({"type": "document", "source": {"type": "text", "data": "A cat."}}, "A cat."),
        (
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "A cat."}]}},
            "A cat.",
        ),
        (
            {
                "type": "search_result",
                "source": "a.example",
                "title": "T",
                "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
            },
            "T\na.example\nA\nB",
        ),
    ],
    ids=["document", "untitled", "content", "search_result"],
)
def test_documents_of_text_are_read(tcp, llm, block, text):
    question = {"type": "text", "text": "Who?"}
    expected = llm.count_chat_tokens([{"role": "user", "content": f"{text}\nWho?"}])
    assert prompt_tokens(tcp, user(block, question)) == expected
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]}
    results = [
        [*STORY, used, *user({"type": "tool_result", "tool_use_id": "a", "content": content})]
        for content in ([block], text)
    ]
    assert prompt_tokens(tcp, results[0]) == prompt_tokens(tcp, results[1])


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "application/pdf", "data": "aaaa"},
        {"type": "url", "url": "https://a.example/a.pdf"},
        {"type": "file", "file_id": "f"},
    ],
    ids=lambda source: source["type"],
)
def test_other_documents_are_refused_by_their_place(tcp, source):
    response = tcp.post(PATH, json={"messages": user({"type": "document", "source": source}), "max_tokens": 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[0].source")
    assert "plain text" in error["message"]


def test_tools_that_a_server_runs_are_left_out_whatever_is_chosen(tcp):
    with_search = prompt_tokens(tcp, STORY, tools=[OWN, SEARCH])
    assert with_search == prompt_tokens(tcp, STORY, tools=[OWN])
    assert prompt_tokens(tcp, STORY, tools=[SEARCH]) == prompt_tokens(tcp, STORY)
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "any"}):
        asked = {"messages": STORY, "max_tokens": 1, "tools": [SEARCH], "tool_choice": choice}
        assert tcp.post(PATH, json=asked).status_code == 200
    assert tcp.post(PATH, json={"messages": STORY, "max_tokens": 1, "tools": [SEARCH]}).status_code == 200


@pytest.mark.parametrize(
    ("kind", "name"),
    [("bash_20250124", "bash"), ("text_editor_20250728", "str_replace_based_edit_tool"), ("memory_20250818", "memory")],
)
def test_tools_of_the_client_without_a_schema_are_called_with_their_own(tcp, kind, name):
    asked = {"messages": STORY, "max_tokens": 60, "tools": [{"type": kind, "name": name}], "temperature": 0}
    reply = tcp.post(PATH, json={**asked, "tool_choice": {"type": "tool", "name": name}}).json()
    (call,) = [block for block in reply["content"] if block["type"] == "tool_use"][:1]
    assert call["name"] == name
    assert prompt_tokens(tcp, STORY, tools=asked["tools"]) > prompt_tokens(tcp, STORY) + 20


@pytest.mark.parametrize("path", [PATH, COUNT, "/messages", "/v1/messages/"])
def test_errors_have_the_shape_of_this_api(tcp, path):
    error = tcp.post(path, json={"messages": [], "max_tokens": 1}).json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    refused = tcp.post(path, json={}, headers={"origin": "https://evil.example"}).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "permission_error")
    large = tcp.post(path, content=b'"' + b"x" * (5 << 20) + b'"', headers={"content-type": "application/json"}).json()
    assert (large["type"], large["error"]["type"]) == ("error", "request_too_large")
    assert "type" not in tcp.post("/v1/chat/completions", json={"messages": []}).json()


def test_failure_of_a_stream_has_it_too(scripted):
    body = {"messages": STORY, "model": "failing", "max_tokens": 9}
    assert scripted.post(PATH, json=body).json()["error"]["type"] == "api_error"
    streamed = scripted.post(PATH, json={**body, "stream": True}).text
    assert 'event: error\ndata: {"type":"error","error":{' in streamed
    assert '"type":"api_error"' in streamed


def test_reasoning_may_be_left_out(scripted):
    body = {"messages": STORY, "model": "thinking", "max_tokens": 60}
    shown, omitted = (
        scripted.post(PATH, json={**body, "thinking": {"type": "adaptive", "display": display}}).json()["content"]
        for display in ("summarized", "omitted")
    )
    assert [block["type"] for block in shown] == [block["type"] for block in omitted] == ["thinking", "text"]
    assert (shown[0]["thinking"], omitted[0]["thinking"]) == ("Hm, well.", "")
    streamed = scripted.post(PATH, json={**body, "stream": True, "thinking": {"type": "enabled", "display": "omitted"}})
    assert "well" not in streamed.text and "thinking_delta" in streamed.text
    assert shown[1] == omitted[1]
    # How reasoning is to be shown is told by words that newer clients have more of.
    newer = scripted.post(PATH, json={**body, "thinking": {"type": "adaptive", "display": "updates"}})
    assert newer.json()["content"] == shown


def test_official_client_raises_its_own_errors_by_their_type(served):
    anthropic = import_or_skip("anthropic")
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(model="demo", max_tokens=1, messages=user({"type": "image", "source": {}}))
        assert refused.value.body["type"] == "error"
        reply = client.messages.create(model="demo", max_tokens=3, messages=user(DOCUMENT), tools=[OWN, SEARCH])
        assert reply.usage.output_tokens <= 3

"""Members of requests and what they do: refusals by name, prompts that are too long, and what is counted."""

import pytest
from local_servers import STORY

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "member", "param"),
    [
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        (CHAT, {"regex": "(?=a)"}, "regex"),
        (CHAT, {"grammar": "root ::= missing"}, "grammar"),
        (CHAT, {"tools": [{"function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]}, "tools"),
        ("/v1/responses", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/responses", {"include": ["message.output_text.logprobs"]}, "include"),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, "prompt"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
    ids=repr,
)
def test_what_cannot_be_had_is_refused_by_name(tcp, path, member, param):
    asked = {"input": "a"} if path.endswith("responses") else {"messages": STORY, "max_tokens": 1}
    response = tcp.post(path, json={**asked, **member})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "one two " * 2000}]}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "one two " * 2000}], "max_tokens": 1}, "messages"),
        ("/v1/responses", {"input": "one two " * 2000}, "input"),
        ("/v1/completions", {"prompt": "one two " * 2000}, "prompt"),
        ("/v1/embeddings", {"input": "one two " * 2000}, "input"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_long_prompts_are_refused_with_both_numbers_and_never_cut(tcp, path, body, param):
    for more in [{}] if path.endswith("embeddings") else [{}, {"stream": True}]:
        response = tcp.post(path, json={**body, **more})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert error["n_ctx"] == 1024 < 2000 < error["n_prompt_tokens"]
        assert str(error["n_prompt_tokens"]) in error["message"].replace(",", "")


def test_count_of_a_prompt_is_what_its_reply_reports_tools_included(tcp):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    plain = tcp.post(f"{CHAT}/input_tokens", json={"messages": STORY}).json()["input_tokens"]
    counted = tcp.post(f"{CHAT}/input_tokens", json={"messages": STORY, "tools": [tool]}).json()["input_tokens"]
    reply = tcp.post(CHAT, json={"messages": STORY, "tools": [tool], "max_tokens": 1}).json()
    assert plain < counted == reply["usage"]["prompt_tokens"]
    own = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
    asked = {"messages": STORY, "tools": own}
    counted = tcp.post("/v1/messages/count_tokens", json=asked).json()["input_tokens"]
    usage = tcp.post("/v1/messages", json={**asked, "max_tokens": 1}).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"] > plain
    prompt = tcp.post("/apply-template", json={"messages": STORY, "tools": [tool]}).json()["prompt"]
    assert '"look"' in prompt


def test_message_takes_a_form(tcp):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}, "effort": "low"}
    reply = tcp.post("/v1/messages", json={"messages": STORY, "max_tokens": 40, "output_config": form}).json()
    assert reply["content"][0]["text"] in ('{"ok": true}', '{"ok": false}')


def test_cached_tokens_are_counted_to_the_token(tcp):
    # Its first letter too: other tests ask the same server, in any order.
    body = {"messages": [{"role": "user", "content": "¿A question that nobody asked before?"}], "max_tokens": 1}
    first, second = (tcp.post(CHAT, json=body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] < 5
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1


def test_choices_compute_their_prompt_once(tcp):
    def counters() -> dict[str, float]:
        lines = (
            line.rpartition(" ") for line in tcp.get("/metrics").text.splitlines() if "prompt_tokens_total" in line
        )
        return {name: float(value) for name, _, value in lines if not name.startswith("#")}

    before = counters()
    body = {"messages": [{"role": "user", "content": "Nobody ever asked this."}], "max_tokens": 2, "n": 4}
    prompt = tcp.post(CHAT, json=body).json()["usage"]["prompt_tokens"]
    made = {name: value - before[name] for name, value in counters().items()}
    assert made['localinfer_prompt_tokens_total{model="demo"}'] == 4 * prompt
    assert made['localinfer_cached_prompt_tokens_total{model="demo"}'] >= 3 * (prompt - 1)

"""What leaves `/v1/chat/completions`, byte by byte where clients are known to break."""

import json

import pytest
from event_frames import post_stream, text_of
from local_servers import STORY, serving_drafting

PATH = "/v1/chat/completions"
GREEDY = {"messages": STORY, "max_tokens": 12, "temperature": 0}


def test_every_chunk_has_the_same_envelope(http):
    chunks = post_stream(http, PATH, GREEDY)
    envelopes = [{name: chunk[name] for name in ("id", "object", "created", "model")} for chunk in chunks]
    assert envelopes.count(envelopes[0]) == len(chunks) > 3
    assert envelopes[0]["id"].startswith("chatcmpl-")
    assert envelopes[0]["object"] == "chat.completion.chunk"
    assert envelopes[0]["model"] == "demo"
    assert len({chunk["system_fingerprint"] for chunk in chunks}) == 1


def test_first_chunk_has_the_role_and_no_text(http):
    choice = post_stream(http, PATH, GREEDY)[0]["choices"][0]
    assert choice == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }


def test_later_chunks_have_no_role_and_every_choice_its_index_and_finish_reason(tcp):
    chunks = post_stream(tcp, PATH, GREEDY)
    for chunk in chunks[1:]:
        (choice,) = chunk["choices"]
        assert choice["index"] == 0
        assert "finish_reason" in choice
        assert "role" not in choice["delta"]


def test_finish_is_a_chunk_of_its_own(tcp):
    chunks = post_stream(tcp, PATH, GREEDY)
    assert chunks[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


def test_streamed_text_is_the_whole_text(http):
    whole = http.post(PATH, json=GREEDY).json()
    assert text_of(post_stream(http, PATH, GREEDY)) == whole["choices"][0]["message"]["content"] != ""


def test_usage_chunk_comes_only_when_asked(tcp):
    chunks = post_stream(tcp, PATH, GREEDY)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    asked = post_stream(tcp, PATH, {**GREEDY, "stream_options": {"include_usage": True}})
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in asked[:-1])


def test_usage_counts_every_kind_of_token(tcp):
    tcp.post(PATH, json=GREEDY)
    reply = tcp.post(PATH, json=GREEDY).json()
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    assert set(usage["completion_tokens_details"]) == {
        "reasoning_tokens",
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
    }
    timings = reply["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == 12


def test_streams_tell_what_they_cost_at_their_end(tcp):
    assert post_stream(tcp, PATH, GREEDY)[-1]["timings"]["predicted_n"] == 12


def test_whole_reply_has_the_documented_shape(http):
    reply = http.post(PATH, json=GREEDY).json()
    assert reply["object"] == "chat.completion"
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None


def test_stop_text_never_leaves_the_server(tcp):
    text = tcp.post(PATH, json={**GREEDY, "max_tokens": 40}).json()["choices"][0]["message"]["content"]
    word = text.split()[3]
    for stop in (word, [word, "never"]):
        body = {**GREEDY, "max_tokens": 40, "stop": stop}
        reply = tcp.post(PATH, json=body).json()["choices"][0]
        assert reply["finish_reason"] == "stop"
        assert reply["message"]["content"] == text[: text.index(word)]
        assert text_of(post_stream(tcp, PATH, body)) == reply["message"]["content"]


def test_n_choices_share_their_prompt_and_differ(tcp):
    body = {"messages": STORY, "max_tokens": 12, "temperature": 1.0, "seed": 7, "n": 3}
    reply = tcp.post(PATH, json=body).json()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    alone = tcp.post(PATH, json={**body, "n": 1}).json()
    assert alone["choices"][0]["message"]["content"] == texts[0]
    assert reply["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    streamed = post_stream(tcp, PATH, body)
    assert [text_of(streamed, index) for index in range(3)] == texts


def test_same_seed_gives_the_same_text(http):
    body = {"messages": STORY, "max_tokens": 16, "temperature": 1.2, "seed": 11}
    first, second = (http.post(PATH, json=body).json()["choices"][0]["message"]["content"] for _ in range(2))
    assert first == second


def test_max_completion_tokens_wins_and_null_is_no_limit(tcp):
    body = {**GREEDY, "max_tokens": 9, "max_completion_tokens": 3}
    assert tcp.post(PATH, json=body).json()["usage"]["completion_tokens"] == 3
    body = {**GREEDY, "max_tokens": None, "max_completion_tokens": None, "stop": ["."]}
    assert tcp.post(PATH, json=body).json()["choices"][0]["finish_reason"] == "stop"


def test_context_overflow_is_refused_with_both_numbers_before_the_stream(tcp):
    body = {"messages": [{"role": "user", "content": "one two three " * 1000}], "stream": True}
    response = tcp.post(PATH, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["n_ctx"] == 1024 < error["n_prompt_tokens"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story."}]},
        {"role": "developer", "content": "Be kind."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": None, "function": {"name": "f"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "Hm.", "reasoning_content": "I think.", "reasoning": "I think."},
    ],
    ids=["parts", "developer", "null content and id", "tool", "reasoning"],
)
def test_messages_of_every_kind_are_taken(tcp, message):
    response = tcp.post(PATH, json={"messages": [*STORY, message], "max_tokens": 2})
    assert response.status_code == 200, response.text


def test_parts_are_read_as_one_text(tcp):
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story."}]
    reply = tcp.post(PATH, json={**GREEDY, "messages": [{"role": "user", "content": parts}]}).json()
    assert reply["choices"][0]["message"] == tcp.post(PATH, json=GREEDY).json()["choices"][0]["message"]


def test_images_are_refused_by_name(tcp):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    response = tcp.post(PATH, json={"messages": [{"role": "user", "content": [part]}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0]"


def test_what_changes_nothing_is_ignored(tcp):
    more = {
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "verbosity": "low",
        "something_new": None,
    }
    assert tcp.post(PATH, json={**GREEDY, **more}).status_code == 200


def test_any_model_name_reaches_the_only_model(tcp):
    for name in ("gpt-4o", "openai/demo", "demo", None):
        assert tcp.post(PATH, json={**GREEDY, "model": name}).json()["model"] == "demo"


def test_logit_bias_bends_the_choice(tcp):
    plain = tcp.post(PATH, json=GREEDY).json()["choices"][0]["message"]["content"]
    banned = {str(token_id): -100 for token_id in range(500, 700)}
    bent = tcp.post(PATH, json={**GREEDY, "logit_bias": banned}).json()["choices"][0]["message"]["content"]
    assert bent != plain


def test_prediction_changes_no_text_and_is_counted(tcp):
    body = {**GREEDY, "max_tokens": 48}
    text = tcp.post(PATH, json=body).json()["choices"][0]["message"]["content"]
    with serving_drafting() as drafting, drafting.client() as client:
        for content in (text, [{"type": "text", "text": text}]):
            predicted = {**body, "prediction": {"type": "content", "content": content}}
            reply = client.post(PATH, json=predicted).json()
            assert reply["choices"][0]["message"]["content"] == text
            # By a server that drafts where it pays.
            assert tcp.post(PATH, json=predicted).json()["choices"][0]["message"]["content"] == text
    details = reply["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0


def test_stop_inside_of_what_was_predicted_ends_there(tcp):
    text = tcp.post(PATH, json={**GREEDY, "max_tokens": 40}).json()["choices"][0]["message"]["content"]
    word = text.split()[4]
    body = {**GREEDY, "max_tokens": 40, "stop": word, "frequency_penalty": 0.0}
    guess = {"prediction": {"type": "content", "content": text}}
    plain, guessed = (tcp.post(PATH, json={**body, **more}).json()["choices"] for more in ({}, guess))
    assert plain == guessed
    assert guessed[0]["message"]["content"] == text[: text.index(word)]
    penalised = {**GREEDY, "max_tokens": 40, "frequency_penalty": 1.5}
    plain, guessed = (tcp.post(PATH, json={**penalised, **more}).json()["choices"] for more in ({}, guess))
    assert plain == guessed


def test_text_outside_ascii_is_not_escaped(tcp):
    response = tcp.post(PATH, json={"messages": [{"role": "user", "content": [{"type": "größe"}]}]})
    assert "größe" in response.content.decode("utf-8")


def test_paths_are_found_with_and_without_version_and_slash(http):
    for path in ("/v1/chat/completions", "/chat/completions", "/v1/chat/completions/", "/chat/completions/"):
        assert http.post(path, json={**GREEDY, "max_tokens": 1}).status_code == 200
    for path in ("/health", "/v1/health", "/version", "/models", "/v1/models/", "/v1/models/demo"):
        assert http.get(path).status_code == 200


def test_models_tell_what_clients_read(http):
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card == http.get("/v1/models/demo").json()
    assert (card["id"], card["object"], card["owned_by"]) == ("demo", "model", "localinfer")
    assert card["created"] > 0
    assert card["max_model_len"] == card["context_length"] == card["meta"]["n_ctx"] == 1024
    assert "/" not in json.dumps(card["id"])

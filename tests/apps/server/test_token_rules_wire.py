"""vLLM's rules about single tokens, and what other servers' clients send beside them, over a socket."""

import json

import pytest
from local_servers import STORY

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}


def completed(client, **more):
    response = client.post(COMPLETIONS, json={**GREEDY, **more})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def ids_of(client, text):
    return client.post("/tokenize", json={"content": text, "add_special": False}).json()["tokens"]


def test_token_ids_are_told_whole_and_in_streams(tcp):
    choice = completed(tcp, return_token_ids=True)
    assert choice["prompt_token_ids"] == client_prompt(tcp) and len(choice["token_ids"]) == 12
    assert tcp.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["content"] == choice["text"]
    for path, asked in ((COMPLETIONS, GREEDY), (CHAT, {"messages": STORY, "temperature": 0, "max_tokens": 12})):
        asked = {**asked, "return_token_ids": True}
        whole = tcp.post(path, json=asked).json()
        lines = tcp.post(path, json={**asked, "stream": True}).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        streamed = [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", ())]
        assert streamed == whole["choices"][0]["token_ids"]
        prompts = [chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
        (told,) = (one for one in prompts if one)
        assert told == (whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"])


def client_prompt(client):
    return client.post("/tokenize", json={"content": GREEDY["prompt"], "add_special": True}).json()["tokens"]


def test_stop_tokens_and_stop_texts(tcp):
    plain = completed(tcp, return_token_ids=True)
    stop = plain["token_ids"][5]
    first = plain["token_ids"].index(stop)
    ended = completed(tcp, stop_token_ids=[stop], return_token_ids=True)
    assert (ended["finish_reason"], ended["token_ids"]) == ("stop", plain["token_ids"][: first + 1])
    assert completed(tcp, stop_token_ids=[stop], ignore_eos=True)["text"] == ended["text"]
    word = plain["text"].split()[3]
    without = completed(tcp, stop=[word])["text"]
    assert completed(tcp, stop=[word], include_stop_str_in_output=True)["text"] == without + word


def test_bad_words_and_allowed_tokens(tcp):
    plain = completed(tcp)["text"]
    word = plain.split()[2]
    other = completed(tcp, bad_words=[word])["text"]
    assert word not in other and other != plain
    allowed = ids_of(tcp, " the cat")
    choice = completed(tcp, allowed_token_ids=allowed, return_token_ids=True)
    assert {*choice["token_ids"]} <= {*allowed}
    for wrong, param in (
        (({"allowed_token_ids": [10**6]}), "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
    ):
        error = tcp.post(COMPLETIONS, json={**GREEDY, **wrong})
        assert (error.status_code, error.json()["error"]["param"]) == (400, param), error.text


def test_replies_are_at_least_as_long_as_is_asked_for(tcp, llm):
    ends = {str(token_id): 100 for token_id in llm.tokenizer.eog_token_ids}
    asked = {"messages": STORY, "temperature": 0, "max_tokens": 40, "logit_bias": ends}
    for least in (0, 7):
        reply = tcp.post(CHAT, json={**asked, "min_tokens": least}).json()
        assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("stop", least + 1)
    # A form that is at its end ends the reply.
    reply = tcp.post(CHAT, json={**asked, "grammar": 'root ::= "a"', "min_tokens": 20}).json()
    assert reply["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"reasoning": {"effort": "low", "exclude": True, "enabled": None, "max_tokens": 5}}),
        (CHAT, {"reasoning": {"enabled": False}}),
        (CHAT, {"usage": {"include": True}}),
        (CHAT, {"reasoning_format": "auto"}),
        (CHAT, {"reasoning_format": "deepseek"}),
        (CHAT, {"reasoning_budget_tokens": -1, "t_max_prompt_ms": 0, "thinking_forced_open": False}),
        (CHAT, {"separate_reasoning": True, "stream_reasoning": True}),
        (CHAT, {"min_tokens": 0, "stop_token_ids": [], "bad_words": [], "allowed_token_ids": None}),
        (CHAT, {"include_stop_str_in_output": False, "skip_special_tokens": True, "add_generation_prompt": True}),
        (CHAT, {"spaces_between_special_tokens": True, "return_token_ids": False, "echo": False, "best_of": 1}),
        (
            CHAT,
            {"n": 1, "logprobs": False, "top_logprobs": None, "store": False, "stream_options": None, "metadata": {}},
        ),
        (
            CHAT,
            {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "stop": None, "seed": None, "user": ""},
        ),
        (
            CHAT,
            {"modalities": ["text"], "parallel_tool_calls": True, "tools": None, "tool_choice": None, "audio": None},
        ),
        (CHAT, {"service_tier": "auto", "verbosity": "medium", "reasoning_effort": None, "prediction": None}),
        (CHAT, {"top_k": 40, "min_p": 0.05, "typical_p": 1.0, "tfs_z": 1.0, "mirostat": 0, "n_keep": 0, "min_keep": 0}),
        (CHAT, {"dynatemp_range": 0.0, "xtc_probability": 0.0, "dry_multiplier": 0.0, "t_max_predict_ms": -1}),
        (CHAT, {"cache_prompt": True, "id_slot": -1, "samplers": [], "response_fields": [], "lora": [], "n_probs": 0}),
        (
            CHAT,
            {"length_penalty": 1.0, "use_beam_search": False, "truncate_prompt_tokens": None, "prompt_logprobs": None},
        ),
        (CHAT, {"guided_json": None, "guided_regex": None, "guided_choice": None, "guided_decoding_backend": None}),
        (
            CHAT,
            {
                "structured_outputs": None,
                "priority": 0,
                "request_id": None,
                "cache_salt": None,
                "mm_processor_kwargs": None,
            },
        ),
        (CHAT, {"chat_template_kwargs": None, "documents": None, "chat_template": None, "kv_transfer_params": None}),
        (CHAT, {"provider": {"order": []}, "route": "fallback", "plugins": [], "transforms": [], "models": []}),
        (CHAT, {"ttl": 60, "draft_model": None, "repeat_penalty": 1.0, "repetition_penalty": 1.0, "top_a": 0.0}),
        (COMPLETIONS, {"best_of": 1, "echo": False, "suffix": None, "logprobs": None, "n": 1, "user": None}),
        (COMPLETIONS, {"min_tokens": 0, "add_special_tokens": True, "return_token_ids": None, "bad_words": None}),
        ("/v1/responses", {"truncation": "disabled", "parallel_tool_calls": True, "store": True, "background": False}),
        ("/v1/responses", {"reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}}}),
        ("/v1/responses", {"tool_choice": "auto", "tools": [], "metadata": None, "top_logprobs": None, "include": []}),
        ("/v1/messages", {"stop_sequences": [], "stream": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        ("/v1/messages", {"service_tier": "auto", "thinking": {"type": "disabled"}, "tools": [], "metadata": {}}),
        ("/v1/embeddings", {"encoding_format": None, "dimensions": None, "user": None, "truncate": None}),
        ("/v1/embeddings", {"encoding_format": "float", "truncate_prompt_tokens": None, "priority": 0}),
        ("/v1/rerank", {"top_n": None, "return_documents": None, "max_tokens_per_doc": None}),
        ("/tokenize", {"add_special": None, "with_pieces": None, "model": None}),
        (
            "/completion",
            {"n_predict": -1, "n_keep": 0, "stream": False, "cache_prompt": True, "logit_bias": [], "min_keep": 0},
        ),
        (
            "/api/generate",
            {"suffix": "", "images": [], "format": "", "options": {}, "system": "", "template": "", "raw": False},
        ),
        ("/api/chat", {"tools": [], "format": "", "options": {"mirostat": 0, "num_keep": 5, "seed": 0}, "think": None}),
        ("/api/embed", {"truncate": True, "options": None, "keep_alive": None, "dimensions": None}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_documented_defaults_of_clients_pass_on_every_route(tcp, path, more):
    base = {
        CHAT: {"messages": STORY, "max_tokens": 1},
        COMPLETIONS: {"prompt": "a", "max_tokens": 1},
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
        "/v1/messages": {"messages": STORY, "max_tokens": 1},
        "/v1/embeddings": {"input": "a"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
        "/tokenize": {"content": "a"},
        "/completion": {"prompt": "a", "stop": ["e"]},
        "/api/generate": {"model": "demo", "prompt": "a", "stream": False, "options": {"num_predict": 1}},
        "/api/chat": {"model": "demo", "messages": STORY, "stream": False, "options": {"num_predict": 1}},
        "/api/embed": {"model": "demo", "input": "a"},
    }[path]
    response = tcp.post(path, json={**base, **more})
    # The demo model is no reranker, which it says when it has read all.
    assert response.status_code == 200 or "no reranker" in response.text, response.text
    assert "was not read" not in response.text and "x-localinfer-notices" not in response.headers


def test_usage_that_is_asked_for_comes_at_the_end_of_a_stream(tcp):
    asked = {"messages": STORY, "max_tokens": 1, "stream": True, "usage": {"include": True}}
    lines = tcp.post(CHAT, json=asked).text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["usage"]["completion_tokens"] == 1

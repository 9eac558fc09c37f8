"""Values that other servers take and clients send: no limit as -1, nothing as an empty text, 3 as 3.0."""

import json

import pytest
from local_servers import STORY

from localinfer.apps.server.transport.known_fields import with_whole_numbers

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GREEDY = {"messages": STORY, "temperature": 0, "max_tokens": 6}


def answer(client, **more):
    response = client.post(CHAT, json={**GREEDY, **more})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ""},
        {"stop": [""]},
        {"stop": ["", "never said"]},
        {"grammar": ""},
        {"regex": ""},
        {"json_schema": ""},
        {"guided_json": ""},
        {"guided_regex": ""},
        {"guided_grammar": ""},
        {"repetition_penalty": 0},
        {"repeat_penalty": 0.0},
        {"top_k": -1},
        {"max_tokens": 6.0},
        {"max_completion_tokens": 6e0},
        {"n": 1.0},
        {"repetition_last_n": 64.0, "mirostat": 0.0},
        {"logprobs": False, "top_logprobs": 0.0},
        {"seed": -1.0},
        {"thinking_budget": -1.0},
        {"tools": [], "tool_choice": "auto"},
    ],
    ids=lambda more: json.dumps(more),
)
def test_value_that_others_take_changes_nothing(tcp, more):
    assert answer(tcp, **more)["message"]["content"] == answer(tcp)["message"]["content"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_limit_is_the_end_of_the_reply(tcp, name):
    asked = {"messages": STORY, "temperature": 0, "grammar": 'root ::= "a" "b" "c" "d" "e" "f" "g" "h"'}
    for value in (-1, -1.0, None):
        reply = tcp.post(CHAT, json={**asked, name: value}).json()["choices"][0]
        assert (reply["message"]["content"], reply["finish_reason"]) == ("abcdefgh", "stop")
    reply = tcp.post(COMPLETIONS, json={"prompt": "a", "grammar": asked["grammar"], "max_tokens": -1}).json()
    assert reply["choices"][0]["text"] == "abcdefgh"


def test_top_k_of_minus_one_keeps_every_token(tcp):
    asked = {"temperature": 2.0, "top_p": 1, "min_p": 0, "seed": 4, "max_tokens": 20}
    assert answer(tcp, **asked, top_k=-1) == answer(tcp, **asked, top_k=0)
    assert answer(tcp, **asked, top_k=-1) != answer(tcp, **asked)


def test_whole_numbers_are_taken_at_every_depth_and_others_refused(tcp):
    ids = tcp.post("/tokenize", json={"content": "Once upon", "add_special": True}).json()["tokens"]
    asked = {"prompt": [float(one) for one in ids], "max_tokens": 4, "temperature": 0}
    said = tcp.post(COMPLETIONS, json=asked).json()["choices"][0]["text"]
    assert said == tcp.post(COMPLETIONS, json={**asked, "prompt": ids}).json()["choices"][0]["text"]
    for value in (3.5, 1e300, -0.5):
        refused = tcp.post(CHAT, json={**GREEDY, "max_tokens": value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert (
        tcp.post("/detokenize", json={"tokens": [5.0]}).json() == tcp.post("/detokenize", json={"tokens": [5]}).json()
    )
    own = {"messages": STORY, "max_tokens": 4.0, "top_k": -1, "stop_sequences": [""]}
    assert tcp.post("/v1/messages", json=own).status_code == 200
    assert tcp.post("/v1/messages", json={**own, "max_tokens": -1}).json()["error"]["param"] == "max_tokens"


def test_texts_keep_their_numbers():
    body = b'{"a": "3.0 \\" 4.0", "b": [1.0, -2.50e1, 2.5, 1e400, 9007199254740994.0], "c": 7}'
    assert with_whole_numbers(body) == (b'{"a": "3.0 \\" 4.0", "b": [1, -25, 2.5, 1e400, 9007199254740994.0], "c": 7}')


def test_choices_are_as_many_as_the_server_makes_at_a_time(tcp):
    reply = tcp.post(CHAT, json={**GREEDY, "max_tokens": 1, "n": 12}).json()
    assert len(reply["choices"]) == 12
    for path, asked in ((CHAT, GREEDY), (COMPLETIONS, {"prompt": "a"})):
        error = tcp.post(path, json={**asked, "n": 65}).json()["error"]
        assert error["param"] == "n"
        assert "64" in error["message"] and "--max-generations" in error["message"]

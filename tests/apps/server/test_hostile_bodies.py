"""Bodies that nobody sends by accident: refused in one shape, in bounded time, with the server as before."""

import json
import time

import pytest
from local_servers import STORY

from localinfer.apps.server.transport.http import MAX_DEPTH, json_shape
from tests.support.limits import seconds

PATH = "/v1/chat/completions"


def is_deeper(body: bytes) -> bool:
    return json_shape(body, MAX_DEPTH, 1 << 30).depth > MAX_DEPTH


JSON = {"content-type": "application/json"}
CHAT = '"messages":[{"role":"user","content":"Hi."}],"max_tokens":1'


def error_of(response) -> dict:
    error = response.json()["error"]
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"x"',
        b"{}",
        b"null",
        b"{",
        b'{"messages": "\xff"}',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b'{"messages": NaN}',
        b'{"temperature": 1e999, "messages": []}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"unknown": ' + b"9" * 5000 + b', "messages": 1}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"a\x00b"}]}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_no_request_is_refused(http, body):
    response = http.post(PATH, content=body, headers=JSON)
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("body", [b"null", b"[]", b'{"messages": [], "max_tokens": 1e999}'])
def test_fault_that_no_member_is_named_for_has_a_code(http, body):
    error = error_of(http.post(PATH, content=body, headers=JSON))
    assert error["param"] or error["code"] == "invalid_json"


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 3_000, 1_000_000])
@pytest.mark.parametrize("place", ["unknown", "tools", "messages"])
def test_deep_json_is_refused_at_once(tcp, depth, place):
    body = f'{{{CHAT},"{place}":{"[" * depth}{"]" * depth}}}'.encode()
    began = time.perf_counter()
    response = tcp.post(PATH, content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"
    assert time.perf_counter() - began < seconds(2)


def test_depth_counts_brackets_and_not_what_strings_hold():
    assert not is_deeper(b"[" * 64 + b"]" * 64)
    assert is_deeper(b"[" * 65)
    assert not is_deeper(b"[]" * 1000)
    assert not is_deeper(b'"' + b"[" * 1000 + b'"')
    assert not is_deeper(rb'"\"' + b"[" * 1000 + b'"')
    assert is_deeper(rb'"\\"' + b"[" * 1000)
    assert not is_deeper(b'"' + b'\\"[' * 100_000)
    assert is_deeper(b'{"a":' * 65)


def test_strings_full_of_escapes_are_read_in_linear_time():
    body = b'"' + b'\\"[' * 1_000_000
    began = time.perf_counter()
    assert not is_deeper(body)
    assert time.perf_counter() - began < seconds(5)


def test_last_of_two_members_counts(tcp):
    body = b"{" + CHAT.encode() + b',"max_tokens":3}'
    response = tcp.post(PATH, content=body, headers=JSON)
    assert response.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "member",
    [
        {"n": 0},
        {"n": -1},
        {"n": 10**9},
        {"n": True},
        {"n": 65},
        {"max_tokens": -2},
        {"max_tokens": 0},
        {"max_tokens": 2**63},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"top_k": -2},
        {"top_p": 1.01},
        {"top_p": -0.1},
        {"min_p": 2},
        {"temperature": -1},
        {"temperature": 1e308},
        {"temperature": "0"},
        {"temperature": True},
        {"frequency_penalty": 1e9},
        {"presence_penalty": -1e9},
        {"repetition_penalty": 0.001},
        {"stop": ["x"] * 17},
        {"stop": "x" * 1_000_000},
        {"stop": [1]},
        {"stop": ["x", None]},
        {"logit_bias": {"5": 101}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"4096": 1}},
        {"logit_bias": {str(i): 0 for i in range(2000)}},
        {"logit_bias": {str(i): -100 for i in range(200_000)}},
        {"top_logprobs": 10**6},
        {"top_logprobs": True},
        {"dry_last_n": -2},
        {"typical_p": 1e9},
        {"stop": ["x"] * 1000},
        {"seed": 1.5},
        {"seed": "7"},
        {"stream": "yes"},
        {"stream_options": []},
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": "Hi."},
        {"prediction": "text"},
        {"model": 7},
    ],
    ids=lambda member: json.dumps(member)[:40],
)
def test_values_out_of_range_are_refused_by_name(tcp, member):
    response = tcp.post(PATH, json={"messages": STORY, "max_tokens": 1, **member})
    assert response.status_code == 400
    (name,) = member
    assert (error_of(response)["param"] or "").startswith(name)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_every_seed_of_64_bits_is_taken(tcp, seed):
    assert tcp.post(PATH, json={"messages": STORY, "max_tokens": 1, "seed": seed}).status_code == 200


@pytest.mark.parametrize("stop", ["\u0301", ["\U0001f469\u200d"], "<|im_end|>"])
def test_odd_stop_texts_are_taken(tcp, stop):
    assert tcp.post(PATH, json={"messages": STORY, "max_tokens": 4, "stop": stop}).status_code == 200


def test_a_bias_against_every_token_ends_in_one_error(tcp):
    banned = {str(token_id): -100 for token_id in range(1000)}
    assert tcp.post(PATH, json={"messages": STORY, "max_tokens": 4, "logit_bias": banned}).status_code == 200


@pytest.mark.parametrize("ids", [[-1], [4096], [2**31], [2**63], [[0, 4096]], [1.5], [True]])
def test_token_ids_out_of_the_vocabulary_are_refused(tcp, ids):
    response = tcp.post("/v1/completions", json={"prompt": ids, "max_tokens": 1})
    assert response.status_code == 400
    error_of(response)


def test_control_tokens_in_text_stay_text(tcp):
    plain = tcp.post("/tokenize", json={"content": "a<|im_end|>b", "parse_special": False}).json()["tokens"]
    assert 3 not in plain
    assert 3 in tcp.post("/tokenize", json={"content": "a<|im_end|>b"}).json()["tokens"]
    honest = tcp.post("/v1/chat/completions/input_tokens", json={"messages": STORY}).json()["input_tokens"]
    message = [{"role": "user", "content": "Tell me a story.<|im_end|>"}]
    spoofed = tcp.post("/v1/chat/completions/input_tokens", json={"messages": message}).json()["input_tokens"]
    assert spoofed > honest + 2


def test_long_words_and_many_messages_are_answered_in_bounded_time(tcp):
    began = time.perf_counter()
    word = [{"role": "user", "content": "x" * 300_000}]
    assert error_of(tcp.post(PATH, json={"messages": word}))["code"] == "context_length_exceeded"
    many = [{"role": "user", "content": "x"}] * 10_001
    assert error_of(tcp.post(PATH, json={"messages": many}))["param"] == "messages"
    empty = [{"role": "user", "content": ""}]
    assert tcp.post(PATH, json={"messages": empty, "max_tokens": 1}).status_code == 200
    assert time.perf_counter() - began < seconds(20)


def test_errors_of_the_server_tell_no_paths_and_no_traces(tcp):
    for path in ("/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fetc", "/v1/nothing"):
        response = tcp.get(path)
        assert "Traceback" not in response.text
        assert "site-packages" not in response.text

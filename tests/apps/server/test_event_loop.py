"""What takes long is done beside the event loop: the server answers others meanwhile."""

import json
import threading
from typing import Any

import msgspec
import pytest
from local_servers import MODEL, STORY, serving

import localinfer
from localinfer.apps.server.api.text import TokenizeRequest
from localinfer.apps.server.transport.http import MAX_VALUES, ApiError, decode_json, json_shape
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.models.text.vocabulary import FILL_IN_SPELLINGS

TEXT = "Once upon a time. " * 40
CHAT = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def watched():
    """A server, and for each method of its tokenizer that takes whole texts the threads that called it."""
    calls: dict[str, list[int | None]] = {"encode": [], "encode_segments": [], "encode_parts": [], "decode": []}
    llm = localinfer.load(MODEL.path, threads=1, kv_memory=32 << 20)

    def watch(name: str) -> Any:
        method = getattr(llm.tokenizer, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls[name].append(threading.get_ident())
            return method(*arguments, **options)

        return call

    for name in calls:
        setattr(llm.tokenizer, name, watch(name))
    for position, spellings in enumerate(FILL_IN_SPELLINGS):
        llm.tokenizer.special_ids[spellings[0]] = 3 + position
    with serving(ServerSettings(port=0), load=lambda source: llm) as running, running.client() as client:
        yield running, client, calls


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": TEXT}),
        ("/tokenize", {"content": TEXT, "with_pieces": True}),
        ("/detokenize", {"tokens": [5, 6, 7] * 100}),
        ("/apply-template", {"messages": CHAT}),
        ("/v1/chat/completions/input_tokens", {"messages": CHAT}),
        ("/v1/messages/count_tokens", {"messages": CHAT}),
        ("/v1/embeddings", {"input": [TEXT, TEXT]}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
        ("/v1/completions", {"prompt": TEXT, "suffix": TEXT, "max_tokens": 1}),
        ("/v1/completions", {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 0}),
        ("/v1/completions", {"prompt": [5, 6, 7], "echo": True, "logprobs": 2, "max_tokens": 0, "stream": True}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": STORY, "stop": [TEXT[:1000]], "max_tokens": 1}),
        ("/v1/responses", {"input": TEXT, "max_output_tokens": 1}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_texts_are_encoded_and_decoded_beside_the_event_loop(watched, path, body):
    running, client, calls = watched
    for threads in calls.values():
        threads.clear()
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert running.thread.ident not in {thread for threads in calls.values() for thread in threads}


def test_pieces_are_those_of_every_place(watched, llm):
    _, client, _ = watched
    reply = client.post("/tokenize", json={"content": TEXT * 50, "with_pieces": True}).json()
    ids = llm.tokenizer.encode(TEXT * 50, False, False)
    assert reply["count"] == len(ids) == len(reply["tokens"])
    assert reply["tokens"] == [{"id": i, "piece": llm.tokenizer.token_bytes(i).decode()} for i in ids]
    plain = client.post("/tokenize", json={"content": TEXT * 50}).json()
    assert plain == {"tokens": ids, "count": len(ids), "max_model_len": llm.context_length}


def test_text_under_two_names_is_refused(tcp):
    response = tcp.post("/tokenize", json={"content": "a", "prompt": "b"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_bodies_of_too_many_values_are_refused_before_they_are_read():
    items = ",".join(["1"] * (MAX_VALUES + 1))
    body = f'{{"content": "a", "unknown": [{items}]}}'.encode()
    with pytest.raises(ApiError) as refused:
        decode_json(body, TokenizeRequest)
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")


def test_commas_and_brackets_of_texts_are_no_values():
    text = '[{,"\\' * 1000
    assert json_shape(json.dumps({"a": text}).encode(), 64, 10) == (1, 1, 1, 1)
    assert decode_json(json.dumps({"content": text}).encode(), TokenizeRequest).content == text
    for count in range(1, 8):
        body = msgspec.json.encode([[{"a": 1}] * count])
        assert json_shape(body, 64, 1000) == (3, 2 * count + 1, count + 2, 1)

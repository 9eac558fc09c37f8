"""Log probabilities in both of OpenAI's formats, against the model's own logits."""

import numpy as np
import pytest
from event_frames import post_stream
from local_servers import STORY

CHAT = "/v1/chat/completions"
PATH = "/v1/completions"
PROMPT = "Once upon a time there was"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    return (
        exact
        - np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        - exact.max(axis=1, keepdims=True)
    )


def test_chat_tells_each_token_and_the_likeliest(http):
    body = {"messages": STORY, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    content = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 3
        assert bytes(entry["bytes"]).decode() == entry["token"]
    chunks = post_stream(http, CHAT, body)
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in told if logprobs for entry in logprobs["content"]] == content


def test_nothing_is_told_unless_asked(tcp):
    assert tcp.post(CHAT, json={"messages": STORY, "max_tokens": 2}).json()["choices"][0]["logprobs"] is None
    assert tcp.post(PATH, json={"prompt": "a", "max_tokens": 2}).json()["choices"][0]["logprobs"] is None


def test_echo_scores_the_prompt_as_the_model_does(http, llm):
    ids = llm.tokenizer.encode(PROMPT)
    wanted = log_softmax(llm.logits(ids))
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2}
    found = http.post(PATH, json=body).json()["choices"][0]
    assert found["text"] == PROMPT
    logprobs = found["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for position in range(1, len(ids)):
        assert logprobs["token_logprobs"][position] == pytest.approx(wanted[position - 1, ids[position]], abs=1e-4)
        assert len(logprobs["top_logprobs"][position]) == 2
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(ids)


def test_evaluation_harness_finds_what_it_reads(tcp, llm):
    context, continuation = PROMPT, " a little girl named Lily"
    ids = llm.tokenizer.encode(context + continuation)
    start = len(llm.tokenizer.encode(context))
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    logprobs = tcp.post(PATH, json=body).json()["choices"][0]["logprobs"]
    scored = logprobs["token_logprobs"][start:-1]
    wanted = log_softmax(llm.logits(ids))
    exact = [wanted[position - 1, ids[position]] for position in range(start, len(ids))]
    assert sum(scored) == pytest.approx(sum(exact), abs=1e-4)
    for token, top in zip(logprobs["tokens"][start:-1], logprobs["top_logprobs"][start:-1], strict=True):
        assert max(top.values()) <= 0
        assert isinstance(token, str)


def test_streamed_and_whole_log_probabilities_agree(tcp):
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 1}
    whole = tcp.post(PATH, json=body).json()["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in post_stream(tcp, PATH, body)]
    assert len(whole["tokens"]) > 5
    for name, values in whole.items():
        assert [value for part in parts for value in part[name]] == values


def test_best_of_keeps_the_likeliest(tcp):
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 1.2, "seed": 1, "logprobs": 0}
    every = tcp.post(PATH, json={**body, "n": 4}).json()["choices"]
    best = tcp.post(PATH, json={**body, "best_of": 4, "n": 2}).json()["choices"]
    means = sorted((np.mean(choice["logprobs"]["token_logprobs"]) for choice in every), reverse=True)
    assert [np.mean(choice["logprobs"]["token_logprobs"]) for choice in best] == pytest.approx(means[:2])
    assert [choice["index"] for choice in best] == [0, 1]


@pytest.mark.parametrize(
    "members",
    [{"logprobs": 21}, {"logprobs": -1}, {"logprobs": True}, {"best_of": 2, "stream": True}, {"best_of": 1, "n": 2}],
)
def test_wrong_numbers_are_refused(tcp, members):
    assert tcp.post(PATH, json={"prompt": "a", "max_tokens": 1, **members}).status_code == 400

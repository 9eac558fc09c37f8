"""What leaves `/v1/embeddings`, and what is in it."""

import base64

import numpy as np
import pytest
from local_servers import serving

from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import UnsupportedFormatError
from localinfer.models.decoder.block_config import Pooling, read_pooling
from tests.support.inside import engine_of, model_of

PATH = "/v1/embeddings"


def vector_of(client, text, **members) -> np.ndarray:
    response = client.post(PATH, json={"input": text, **members})
    assert response.status_code == 200, response.text
    return np.array(response.json()["data"][0]["embedding"], np.float32)


def test_numbers_and_base64_are_the_same_bits(http):
    numbers = vector_of(http, "A cat sat on a mat.", encoding_format="float")
    written = http.post(PATH, json={"input": "A cat sat on a mat.", "encoding_format": "base64"}).json()
    found = np.frombuffer(base64.b64decode(written["data"][0]["embedding"]), "<f4")
    assert numbers.tobytes() == found.tobytes()
    assert numbers.shape == (256,)
    assert np.linalg.norm(numbers) == pytest.approx(1, abs=1e-6)


def test_texts_and_token_ids_give_the_same_vectors_in_order(tcp):
    texts = ["A cat sat.", "The dog ran far away and was happy."]
    ids = [tcp.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"] for text in texts]
    both = tcp.post(PATH, json={"input": texts}).json()
    assert [item["index"] for item in both["data"]] == [0, 1]
    assert both["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert tcp.post(PATH, json={"input": ids}).json()["data"] == both["data"]
    assert np.array_equal(vector_of(tcp, ids[0]), np.array(both["data"][0]["embedding"], np.float32))
    assert both["data"][0]["embedding"] != both["data"][1]["embedding"]


def test_texts_that_exceed_the_context_together_are_embedded_in_order(tcp):
    texts = [f"Story {index}: the cat sat on the mat and was happy all day. " * 12 for index in range(9)]
    reply = tcp.post(PATH, json={"input": texts}).json()
    assert reply["usage"]["prompt_tokens"] > 1024
    assert [item["index"] for item in reply["data"]] == list(range(9))
    for index in (0, 5, 8):
        assert np.array_equal(vector_of(tcp, texts[index]), np.array(reply["data"][index]["embedding"], np.float32))


def test_vector_is_the_mean_of_what_the_head_reads(llm):
    ids = llm.tokenizer.encode("Once upon a time there was a little girl. " * 20)
    assert len(ids) > 128
    vector = llm.embed(ids)
    before = llm.logits(ids)
    program = model_of(llm).text_program(Pooling.NONE)
    hidden = hidden_states(llm, program, ids)
    mean = hidden.mean(axis=0, dtype=np.float64)
    assert np.allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)
    assert np.array_equal(llm.logits(ids), before)
    assert np.array_equal(llm.embed(ids), vector)


def hidden_states(llm, program, ids) -> np.ndarray:
    tokens = np.array(ids, np.int32)
    return np.concatenate([rows for _, rows in engine_of(llm).outputs(program, tokens)])


def test_scores_are_the_logits_normalised(llm):
    ids = llm.tokenizer.encode("Once upon a time there was a little girl. " * 9)
    scores = llm.score(ids, top=3)
    logits = llm.logits(ids).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert scores[0] is None
    assert len(scores) == len(ids)
    for position in range(1, len(ids)):
        found = scores[position]
        assert found.logprob == pytest.approx(logprobs[position - 1, ids[position]], abs=1e-6)
        assert found.top[0][0] == logits[position - 1].argmax()


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": [[]]},
        {"input": "a", "dimensions": 257},
        {"input": "a", "dimensions": 0},
        {"input": "a", "encoding_format": "int8"},
        {"input": [99999]},
        {"input": "a " * 3000},
        {},
    ],
    ids=repr,
)
def test_wrong_input_is_refused(tcp, body):
    assert tcp.post(PATH, json=body).status_code == 400


def test_every_route_pools_as_the_server_says(llm):
    text = "A cat sat on a mat."
    want, plain = llm.embed(text, pooling="last"), llm.embed(text, pooling="last", normalize=False)
    assert not np.array_equal(want, llm.embed(text))
    with serving(ServerSettings(port=0, pooling="last")) as running, running.client() as client:
        assert np.array_equal(vector_of(client, text), want)
        found = client.post("/embedding", json={"content": text}).json()[0]["embedding"]
        assert np.array_equal(np.array(found, np.float32), want[None])
        found = client.post("/api/embed", json={"model": "any", "input": text}).json()["embeddings"]
        assert np.array_equal(np.array(found, np.float32), want[None])
        found = client.post("/api/embeddings", json={"model": "any", "prompt": text}).json()["embedding"]
        assert np.array_equal(np.array(found, np.float32), plain)


def test_pooling_is_read_from_the_file():
    assert read_pooling({"general.architecture": "qwen3", "qwen3.pooling_type": 3}) is Pooling.LAST
    assert read_pooling({"general.architecture": "llama"}) is Pooling.MEAN
    assert read_pooling({"general.architecture": "bert", "bert.pooling_type": 4}) is Pooling.RANK
    with pytest.raises(UnsupportedFormatError, match="pooling_type"):
        read_pooling({"general.architecture": "bert", "bert.pooling_type": 5})

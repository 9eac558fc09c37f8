"""What leaves `/v1/rerank`, and what servers of encoders answer."""

import httpx
import numpy as np
import pytest
from client_imports import import_or_skip

from localinfer.llm import LLM

DOCUMENTS = ["the cat", "hello world", "a dog and the cat", "un re un re"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked_as_by_the_library(path: str, encoders: httpx.Client, ranker: LLM) -> None:
    wanted = ranker.rerank("the cat", DOCUMENTS)
    written = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    reply = encoders.post(path, json={"model": "ranker", "query": "the cat", "documents": written}).json()
    assert reply["object"] == "list" and reply["model"] == "ranker"
    assert reply["results"] == [{"index": one.index, "relevance_score": one.score} for one in wanted]
    count = sum(one.num_tokens for one in wanted)
    assert reply["usage"] == {"prompt_tokens": count, "total_tokens": count}
    body = {"model": "ranker", "query": "the cat", "documents": written, "top_n": 2, "return_documents": True}
    short = encoders.post(path, json=body).json()
    assert [one["document"]["text"] for one in short["results"]] == [DOCUMENTS[one.index] for one in wanted[:2]]
    assert [one["index"] for one in short["results"]] == [one.index for one in wanted[:2]]


def test_pairs_are_scored_in_vllms_shape(encoders: httpx.Client, ranker: LLM) -> None:
    wanted = {one.index: one.score for one in ranker.rerank("the cat", DOCUMENTS)}
    reply = encoders.post("/score", json={"model": "ranker", "text_1": "the cat", "text_2": DOCUMENTS}).json()
    assert [(one["index"], one["score"]) for one in reply["data"]] == sorted(wanted.items())
    one = encoders.post("/v1/score", json={"model": "ranker", "text_1": "the cat", "text_2": DOCUMENTS[0]}).json()
    assert [pair["score"] for pair in one["data"]] == [wanted[0]] and one["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": [1]}, "documents"),
        ({"documents": [{"title": "a"}]}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"query": ["a"]}, "query"),
        ({"documents": ["dog " * 3000]}, "documents"),
        ({"model": "embedder"}, None),
        ({"max_chunks_per_doc": 3}, "max_chunks_per_doc"),
    ],
)
def test_wrong_bodies_are_refused(more: dict[str, object], param: str | None, encoders: httpx.Client) -> None:
    body = {"model": "ranker", "query": "the cat", "documents": DOCUMENTS, **more}
    reply = encoders.post("/v1/rerank", json=body)
    assert reply.status_code == 400, reply.text
    assert param is None or (reply.json()["error"]["param"] or "").startswith(param)


def test_long_documents_are_cut_on_request(encoders: httpx.Client) -> None:
    body = {"model": "ranker", "query": "the", "documents": ["dog " * 3000], "truncate": True}
    assert encoders.post("/v1/rerank", json=body).json()["usage"]["prompt_tokens"] == 2048
    body = {"model": "embedder", "input": "dog " * 3000}
    assert encoders.post("/v1/embeddings", json=body).json()["error"]["code"] == "context_length_exceeded"
    assert encoders.post("/v1/embeddings", json={**body, "truncate": True}).json()["usage"]["prompt_tokens"] == 2048


def test_encoders_say_what_they_can_and_refuse_the_rest(encoders: httpx.Client) -> None:
    for name in ("ranker", "embedder"):
        reply = encoders.post("/v1/completions", json={"model": name, "prompt": "the", "max_tokens": 2})
        assert reply.status_code == 400 and "encoder" in reply.json()["error"]["message"]
        reply = encoders.post(
            "/v1/chat/completions", json={"model": name, "messages": [{"role": "user", "content": "a"}]}
        )
        assert reply.status_code == 400 and "encoder" in reply.json()["error"]["message"]
    assert encoders.post("/v1/embeddings", json={"model": "ranker", "input": "a"}).status_code == 400
    vectors = encoders.post(
        "/v1/embeddings", json={"model": "embedder", "input": ["the", "cat"], "dimensions": 8}
    ).json()
    assert [len(one["embedding"]) for one in vectors["data"]] == [8, 8]
    cards = {card["id"]: card["capabilities"] for card in encoders.get("/v1/models").json()["data"]}
    assert cards == {"ranker": ["rerank"], "embedder": ["embeddings"]}


@pytest.mark.filterwarnings("ignore")
def test_openais_client_embeds_with_fewer_dimensions(encoders: httpx.Client) -> None:
    openai = import_or_skip("openai")
    with openai.OpenAI(base_url=f"{str(encoders.base_url).rstrip('/')}/v1", api_key="none", max_retries=0) as client:
        options = {"model": "embedder", "input": ["the cat", "hello"], "dimensions": 16}
        packed = client.embeddings.create(**options).data
        plain = client.embeddings.create(**options, encoding_format="float").data
    for one, other in zip(packed, plain, strict=True):
        assert len(one.embedding) == 16
        assert np.float32(one.embedding).tobytes() == np.float32(other.embedding).tobytes()
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)

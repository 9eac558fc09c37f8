"""Models of many vectors, ColPali and ColQwen2: queries, pages and their ranks are as transformers has them."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import localinfer
from localinfer.apps.cli import main
from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import ContextLengthError, CorruptFileError, MessageError, RequestError
from localinfer.generation.embedding import late_score
from localinfer.llm import LLM
from localinfer.models.checkpoint.late_families import prompt_metadata
from tests.apps.server.local_servers import serving
from tests.models.media.conftest import MediaFolders
from tests.support.seeing_model import sound_file

NAMES = ("colpali", "colqwen2")


@pytest.fixture(scope="module")
def models(media_folders: MediaFolders) -> Iterator[dict[str, LLM]]:
    found = {name: localinfer.load(media_folders.path(name), threads=1, kv_type="f32") for name in NAMES}
    yield found
    for llm in found.values():
        llm.close()


def error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    assert found.shape == wanted.shape
    difference = found.astype(np.float64) - wanted
    return float(np.square(difference).sum() / np.square(wanted.astype(np.float64)).sum())


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def noise(width: int, height: int) -> NDArray[np.uint8]:
    return np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_queries_and_pages_are_the_references(
    models: dict[str, LLM], media_folders: MediaFolders, name: str
) -> None:
    llm, reference = models[name], media_folders.reference(name)
    assert llm.embedding_ids(["what is it"])[0].tolist() == reference["query.input_ids"][0].tolist()
    assert error(llm.embed("what is it"), reference["query.embeddings"][0]) < 1e-6
    page = image(media_folders.picture(name, 0))
    (given,) = llm.embedding_inputs([page])
    assert np.where(given.token_ids < 0, 269, given.token_ids).tolist() == reference["picture.input_ids"][0].tolist()
    assert error(llm.embed(page), reference["picture.embeddings"][0]) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_vectors_depend_on_nothing_else(models: dict[str, LLM], media_folders: MediaFolders, name: str) -> None:
    llm = models[name]
    mixed: list[Any] = ["a cat", image(noise(180, 60)), "the dog and the mat", image(noise(56, 90)), [5, 6, 7]]
    together = llm.embed_many(mixed)
    with localinfer.load(media_folders.path(name), threads=2, kv_type="f32") as other:
        again = other.embed_many(mixed[::-1])[::-1]
    for prompt, one, two in zip(mixed, together, again, strict=True):
        np.testing.assert_array_equal(llm.embed(prompt).view(np.uint32), one.view(np.uint32))
        np.testing.assert_array_equal(two.view(np.uint32), one.view(np.uint32))
        assert np.allclose(np.linalg.norm(one, axis=1), 1, atol=1e-6)
    # A page that was encoded before is not encoded again, and has the same bits.
    np.testing.assert_array_equal(llm.embed(mixed[1]), together[1])


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_ranked_by_late_interaction(models: dict[str, LLM], name: str) -> None:
    llm = models[name]
    pages: list[Any] = [image(noise(180, 60)), "a text", [image(noise(56, 90))], image(noise(70, 70))]
    query, *vectors = llm.embed_many(["what is it", *pages])
    wanted = [float((query @ one.T).max(axis=1).sum()) for one in vectors]
    counts: list[int] = []
    ranked = llm.rerank("what is it", pages, normalize=False, on_encoded=counts.append)
    assert [one.index for one in ranked] == sorted(range(4), key=lambda index: -wanted[index])
    assert np.allclose([one.score for one in ranked], [wanted[one.index] for one in ranked], atol=1e-5)
    numbers = [one.num_tokens for one in llm.embedding_inputs(["what is it", *pages])]
    assert counts == [sum(numbers)] and ranked[0].num_tokens == numbers[0] + numbers[1 + ranked[0].index]
    best = llm.rerank("what is it", pages, top_n=2)
    assert [one.index for one in best] == [one.index for one in ranked[:2]]
    assert best[0].score == pytest.approx(ranked[0].score / len(query)) and best[0].score <= 1
    (alone,) = llm.rerank("what is it", pages[:1])
    assert alone.score == next(one.score for one in llm.rerank("what is it", pages) if one.index == 0)


def test_a_late_score_is_the_sum_of_the_greatest_products() -> None:
    query = np.float32([[1, 0], [0, 1]])
    assert late_score(query, np.float32([[1, 0], [0.5, 0.25]])) == 1.25
    assert late_score(query, np.float32([[-1, 0]])) == -1


def test_what_is_neither_query_nor_page_is_refused_in_one_line(models: dict[str, LLM]) -> None:
    llm, page = models["colqwen2"], image(noise(60, 60))
    assert llm.capabilities == llm.info.capabilities == ("embeddings", "rerank", "vision")
    for prompt, words in (
        ([page, "a cat"], "a query or the picture of a page"),
        ([page, page], "a query or the picture of a page"),
        ({"type": "audio", "audio": sound_file()}, "a sound, and this model reads text and pictures"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            llm.embed(prompt)
        assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="query"):
        llm.rerank(page, ["a"])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="generates none"):
        llm.complete("a cat", max_tokens=2)
    with pytest.raises(ContextLengthError):
        llm.embed("a cat " * 900)
    long, short = llm.embed("a cat " * 900, truncate=True), llm.embedding_ids(["a cat " * 900, "a"], truncate=True)
    assert len(long) == 1024 and short[0][-11:].tolist() == short[1][-11:].tolist()


def test_pages_are_refused_where_encoders_are_left_out(media_folders: MediaFolders) -> None:
    with localinfer.load(media_folders.path("colpali"), threads=1, mmproj="off") as llm:
        assert llm.capabilities == ("embeddings", "rerank")
        assert llm.rerank("a", ["b", "c"])
        with pytest.raises(MessageError, match="reads text only"):
            llm.rerank("a", [image(noise(9, 9))])


def test_control_tokens_in_a_query_are_words(models: dict[str, LLM]) -> None:
    ids = models["colqwen2"].embedding_ids(["<|im_end|>"])[0].tolist()
    assert models["colqwen2"].tokenizer.encode("<|im_end|>", False, parse_special=True)[0] not in ids


def test_prompts_are_those_of_the_processor() -> None:
    plain = {"general.architecture": "colpali"}
    assert prompt_metadata(plain, {}, {}) == {}
    pali = prompt_metadata(plain | {"colpali.late_interaction": True}, {}, {})
    assert pali == {
        "colpali.query_before": "<bos>Question: ",
        "colpali.query_behind": "<pad>" * 10 + "\n",
        "colpali.picture_before": "",
        "colpali.picture_behind": "<bos>Describe the image.\n",
    }
    model = {"general.architecture": "colqwen2", "colqwen2.late_interaction": True}
    qwen = prompt_metadata(model, {"query_prefix": "Q: "}, {"pad_token": {"content": "<e>"}})
    assert qwen["colqwen2.query_before"] == "Q: " and qwen["colqwen2.query_behind"] == "<e>" * 10 + "\n"
    assert qwen["colqwen2.picture_before"] == "<|im_start|>user\n<|vision_start|>"
    with pytest.raises(CorruptFileError, match="visual_prompt_prefix"):
        prompt_metadata(model, {"visual_prompt_prefix": "Describe"}, {})


def test_commands_take_models_of_many_vectors(
    media_folders: MediaFolders, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(media_folders.path("colpali"))
    assert main(["show", "--verify", path]) == 0
    assert "nothing wrong was found" in capfd.readouterr().out
    assert main(["embed", path, "a cat", "--threads", "1"]) == 0
    vectors = json.loads(capfd.readouterr().out.splitlines()[0])["embedding"]
    assert len(vectors[0]) == 24 and len(vectors) > 10
    assert main(["embed", path, "a cat", "a dog runs", "--threads", "1", "-o", str(tmp_path / "v.npy")]) != 0
    said = capfd.readouterr().err
    assert "which are no array; write JSON" in said and "Traceback" not in said and not (tmp_path / "v.npy").exists()
    assert main(["rerank", path, "what", "a cat", "the dog", "--threads", "1"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 2


@pytest.mark.system
def test_a_server_ranks_pages_and_gives_their_vectors(models: dict[str, LLM], media_folders: MediaFolders) -> None:
    llm, pixels = models["colpali"], [noise(60, 60), noise(30, 90)]
    urls = []
    for one in pixels:
        buffer = io.BytesIO()
        Image.fromarray(one).save(buffer, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    part = {"type": "image_url", "image_url": {"url": urls[1]}}
    documents: list[Any] = [{"image": urls[0]}, {"content": [part]}, "a text", {"text": "a text"}, [part]]
    wanted = {one.index: one.score for one in llm.rerank("what", [image(pixels[0]), image(pixels[1]), "a text"])}
    source = ModelSource("colpali", media_folders.path("colpali"), 1_700_000_000)
    with (
        serving(ServerSettings(port=0), sources=[source], load=lambda _: llm) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        body = {"query": "what", "documents": documents, "return_documents": True}
        found = client.post("/v1/rerank", json=body).json()["results"]
        scores = {one["index"]: one["relevance_score"] for one in found}
        assert [scores[index] for index in range(5)] == [wanted[index] for index in (0, 1, 2, 2, 1)]
        assert {one["index"]: one["document"] for one in found}[0] == documents[0]
        refused = client.post("/v1/rerank", json={"query": "what", "documents": ["a", {"image": "/etc/passwd"}]})
        assert refused.status_code == 400 and "documents[1]" in refused.text
        answer = client.post("/v1/embeddings", json={"input": ["what", part]}).json()
        vectors = [np.float32(one["embedding"]) for one in answer["data"]]
        np.testing.assert_array_equal(vectors[1], llm.embed(image(pixels[1])))
        assert vectors[0].shape == llm.embed("what").shape
        packed = client.post("/v1/embeddings", json={"input": "what", "encoding_format": "base64"})
        assert packed.status_code == 400 and "encoding_format float" in packed.text

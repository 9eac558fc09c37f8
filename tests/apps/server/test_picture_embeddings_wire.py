"""Vectors of pictures at `/v1/embeddings`, beside those of texts."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from client_imports import import_or_skip
from PIL import Image

import localinfer
from localinfer.apps.server.router.model_folder import model_source
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.llm import LLM
from tests.apps.server.local_servers import serving
from tests.support.comparing_model import write_clip
from tests.support.seeing_model import sound_file

pytestmark = pytest.mark.system
PATH = "/v1/embeddings"
PIXELS = np.random.default_rng(1).integers(0, 256, (40, 30, 3), np.uint8)


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "PNG")
    return buffer.getvalue()


DATA = base64.b64encode(_png()).decode()
PART = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, LLM]]:
    """A client of a server of a CLIP model, and the model."""
    source = model_source(write_clip(tmp_path_factory.mktemp("folders") / "clip"))
    assert source is not None
    llm = localinfer.load(source.path, threads=1, disk_cache=False)
    with (
        llm,
        serving(ServerSettings(port=0), sources=[source], load=lambda _: llm) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        yield client, llm


def vectors(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.float32([one["embedding"] for one in answer.json()["data"]])


def test_a_picture_comes_in_every_shape(clip: tuple[httpx.Client, LLM]) -> None:
    client, llm = clip
    wanted = llm.embed({"type": "image", "image": PIXELS})
    for one in (
        PART,
        [PART],
        {"type": "input_image", "image_url": PART["image_url"]["url"]},  # type: ignore[index]
        {"image": DATA},
        {"content": [PART]},
    ):
        # A list of parts is one prompt where it is an item, and several where it is the input.
        found = vectors(client.post(PATH, json={"input": [one]}))
        np.testing.assert_array_equal(found, wanted[None])
    np.testing.assert_array_equal(vectors(client.post(PATH, json={"input": PART})), wanted[None])


def test_texts_and_pictures_are_embedded_in_order_and_counted(clip: tuple[httpx.Client, LLM]) -> None:
    client, llm = clip
    ids = llm.tokenizer.encode("a dog")
    items: list[Any] = ["a cat", PART, ids, {"text": "a dog"}, [{"type": "text", "text": "a "}, "cat"], "a cat"]
    answer = client.post(PATH, json={"input": items})
    cat, picture, first, second, joined, again = vectors(answer)
    assert np.array_equal(cat, again) and np.array_equal(cat, joined) and np.array_equal(first, second)
    np.testing.assert_array_equal(picture, llm.embed({"type": "image", "image": PIXELS}))
    given = llm.embedding_inputs(["a cat", "a dog", {"type": "image", "image": PIXELS}])
    numbers = [one.num_tokens for one in given]
    assert answer.json()["usage"]["prompt_tokens"] == 3 * numbers[0] + 2 * numbers[1] + numbers[2]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}, "--allow-media-urls"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "no base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "unknown format"),
        ([PART, {"type": "text", "text": "a cat"}], "one text or of one picture"),
        ([{"type": "video_url"}], "neither a text nor a picture"),
        ({"type": "input_audio", "input_audio": {"data": base64.b64encode(sound_file()).decode()}}, "a sound"),
    ],
)
def test_what_has_no_vector_is_refused_with_its_place(clip: tuple[httpx.Client, LLM], item: Any, words: str) -> None:
    answer = clip[0].post(PATH, json={"input": ["a", item]})
    assert answer.status_code == 400 and words in answer.text
    assert "input[1]" in answer.text or "prompts[1]" in answer.text


def test_what_a_model_embeds_is_told(clip: tuple[httpx.Client, LLM]) -> None:
    (model,) = clip[0].get("/v1/models").json()["data"]
    assert model["capabilities"] == ["embeddings", "vision"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("own_leftovers")
def test_openai_python_sends_pictures(clip: tuple[httpx.Client, LLM]) -> None:
    openai = import_or_skip("openai")
    client, llm = clip
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as one:
        found = one.embeddings.create(model="clip", input=["a cat", [PART]]).data
    wanted = llm.embed_many(["a cat", {"type": "image", "image": PIXELS}])
    np.testing.assert_array_equal(np.float32([item.embedding for item in found]), wanted)

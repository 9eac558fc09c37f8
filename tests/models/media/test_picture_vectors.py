"""Vectors of pictures and of the texts that they are compared with are transformers': CLIP, SigLIP and SigLIP 2."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import localinfer
from localinfer.errors import ContextLengthError, MessageError, RequestError
from localinfer.generation.chat.media_parts import MediaSource
from localinfer.generation.embedding_inputs import TextRules
from localinfer.llm import LLM
from localinfer.models.checkpoint.contrastive_families import reading_metadata
from tests.models.media.conftest import MediaFolders
from tests.support.seeing_model import sound_file

NAMES = ("clip", "siglip", "siglip2")
SIZES = ((1, 1), (300, 20), (17, 240), (56, 56))


@pytest.fixture(scope="module")
def models(media_folders: MediaFolders) -> Iterator[dict[str, LLM]]:
    found = {name: localinfer.load(media_folders.path(name), threads=1, kv_type="f32") for name in NAMES}
    yield found
    for llm in found.values():
        llm.close()


def error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    difference = found.astype(np.float64) - wanted
    return float(np.square(difference).sum() / np.square(wanted.astype(np.float64)).sum())


def unit(vectors: NDArray[Any]) -> NDArray[Any]:
    return vectors / np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def noise(width: int, height: int) -> NDArray[np.uint8]:
    return np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_the_references(models: dict[str, LLM], media_folders: MediaFolders, name: str) -> None:
    llm, reference = models[name], media_folders.reference(name)
    pictures = reference["pictures.image_embeddings"]
    for number, wanted in enumerate(pictures):
        picture = image(media_folders.picture(name, number))
        assert error(llm.embed(picture, normalize=False), wanted) < 1e-6
        assert error(llm.embed(picture), unit(wanted)) < 1e-6
    # CLIP's text has padding before it, which is hidden from its words.
    text = llm.embed(reference["text.input_ids"][0], normalize=False)
    assert error(text, reference["text.text_embeddings"][0]) < 1e-6


@pytest.mark.parametrize("name", ["siglip", "siglip2"])
def test_texts_are_filled_up_as_the_processor_does(
    models: dict[str, LLM], media_folders: MediaFolders, name: str
) -> None:
    reference = media_folders.reference(name)
    (ids,) = models[name].embedding_ids(["a cat sat"])
    assert ids.tolist() == reference["text.input_ids"][0].tolist()
    with pytest.raises(ContextLengthError):
        models[name].embed("a cat sat " * 40)
    assert models[name].embedding_ids(["a cat sat " * 40], truncate=True)[0].size == 64


def test_the_words_of_clip_see_none_after_them_and_end_with_the_pooled_token(models: dict[str, LLM]) -> None:
    llm = models["clip"]
    text = llm.tokenizer.encode("a cat sat")
    end = int(np.argmax(text))
    assert llm.embedding_ids([text])[0].tolist() == text[: end + 1]
    whole, cut, other = (llm.embed(ids) for ids in (text, text[: end + 1], [*text[: end + 1], 5, 6]))
    np.testing.assert_array_equal(whole, cut)
    np.testing.assert_array_equal(whole, other)
    assert not np.array_equal(llm.embed([*text[:end], 7, text[end]]), whole)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_depend_on_nothing_else(models: dict[str, LLM], media_folders: MediaFolders, name: str) -> None:
    llm = models[name]
    pictures = [image(noise(*size)) for size in SIZES]
    mixed = ["a cat", pictures[0], [5, 6, 7], pictures[1], "the dog", *pictures[2:]]
    together = llm.embed_many(mixed)
    assert all(abs(np.linalg.norm(vector) - 1) < 1e-6 for vector in together)
    with localinfer.load(media_folders.path(name), threads=2, kv_type="f32") as other:
        again = other.embed_many(mixed[::-1])[::-1]
    for prompt, one, two in zip(mixed, together, again, strict=True):
        np.testing.assert_array_equal(llm.embed(prompt).view(np.uint32), one.view(np.uint32))
        np.testing.assert_array_equal(two.view(np.uint32), one.view(np.uint32))


def test_texts_of_a_batch_hide_their_own_padding_alone(models: dict[str, LLM]) -> None:
    llm = models["clip"]
    texts = [[0, 0, 0, 1, 67, 223, 268], [1, 67, 223, 268], [0, 1, 80, 90, 267], [1, 67, 268]]
    for ids, found in zip(texts, llm.embed_many(texts), strict=True):
        np.testing.assert_array_equal(llm.embed(ids), found)
    # Positions count from the padding on, as in the reference.
    assert not np.array_equal(llm.embed(texts[0]), llm.embed(texts[1]))


def test_pictures_come_in_every_form(models: dict[str, LLM], tmp_path: Path) -> None:
    llm, pixels = models["siglip2"], noise(70, 40)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    data = base64.b64encode(buffer.getvalue()).decode()
    forms = [
        image(pixels),
        image(Image.fromarray(pixels)),
        image(buffer.getvalue()),
        image(tmp_path / "a.png"),
        image(str(tmp_path / "a.png")),
        [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}],
        MediaSource("image", buffer.getvalue(), "here"),
    ]
    first, *others = llm.embed_many(forms)
    assert all(np.array_equal(other, first) for other in others)
    assert llm.embed([{"type": "text", "text": "a "}, "cat"]).tobytes() == llm.embed("a cat").tobytes()
    assert llm.embed(forms[0], dimensions=8).shape == (8,)
    (given,) = llm.embedding_inputs([forms[0]])
    assert given.num_tokens == given.num_patches > 1 and given.token_ids.size == 0


def test_what_has_no_vector_is_refused_in_one_line(models: dict[str, LLM]) -> None:
    clip = models["clip"]
    assert clip.capabilities == clip.info.capabilities == ("embeddings", "vision")
    picture = image(noise(9, 9))
    refused: list[tuple[Any, str]] = [
        ({"type": "audio", "audio": sound_file()}, "a sound, and this model reads text and pictures"),
        ([picture, "a cat"], "of one text or of one picture"),
        ([picture, picture], "has 2 parts"),
        (image(b"no picture"), "prompts.0."),
        ({"type": "video"}, "prompts.0."),
        ({"type": "image"}, "holds nothing"),
    ]
    for prompt, words in refused:
        with pytest.raises(RequestError, match=words) as caught:
            clip.embed(prompt)
        assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="generates none"):
        clip.chat([{"role": "user", "content": [picture]}])
    with localinfer.load(threads=1) as blind, pytest.raises(MessageError, match="reads text only"):
        blind.embed(picture)


def test_folders_without_the_encoders_packages_or_tower_embed_texts(media_folders: MediaFolders) -> None:
    with localinfer.load(media_folders.path("siglip"), threads=1, mmproj="off") as llm:
        assert llm.capabilities == ("embeddings",)
        assert llm.embed("a cat").shape == (32,)
        with pytest.raises(MessageError, match="reads text only"):
            llm.embed(image(noise(5, 5)))


def test_texts_are_filled_up_and_spelled_as_their_tokenizer_does() -> None:
    model: dict[str, object] = {"general.architecture": "siglip-text", "siglip-text.padded_length": 5}
    model["tokenizer.ggml.padding_token_id"] = 9
    assert reading_metadata({"general.architecture": "bert"}, {}) == {}
    sides = {
        "SiglipTokenizer": ([1, 2, 9, 9, 9], "a cat sat"),
        "Siglip2Tokenizer": ([9, 9, 9, 1, 2], "a  cat, sat!"),
        "PreTrainedTokenizerFast": ([1, 2, 9, 9, 9], "A  cat, sat!"),
    }
    for name, (ids, text) in sides.items():
        rules = TextRules.of_model(model | reading_metadata(model, {"tokenizer_class": name}))
        assert rules.filled([1, 2]) == ids and rules.filled([1] * 7) == [1] * 7
        assert rules.spelled("A  cat, sat!") == text
    given = reading_metadata(model, {"tokenizer_class": "SiglipTokenizer", "padding_side": "left"})
    assert TextRules.of_model(model | given).filled([1]) == [9, 9, 9, 9, 1]
    rules = TextRules(pools_end=True, end_id=4)
    assert rules.ended(np.int32([0, 0, 3, 4, 5, 4])).token_ids.tolist() == [0, 0, 3, 4]
    assert rules.ended(np.int32([0, 0, 3, 4])).num_hidden == 2
    assert rules.ended(np.int32([3, 5])).token_ids.tolist() == [3, 5]
    assert TextRules(pools_end=True).ended(np.int32([3, 8, 5, 8])).token_ids.tolist() == [3, 8]

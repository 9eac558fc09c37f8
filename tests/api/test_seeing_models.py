"""A model that sees, as a program uses it: pictures in every form, the cache, sessions, restarts, errors."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.errors import ContextLengthError, MessageError, MissingPackageError, ModelFileError, RequestError
from localinfer.generation.chat.media_parts import MediaSource
from localinfer.llm import LLM
from localinfer.system import extras
from tests.support.seeing_model import PICTURE_ROWS, picture_file, seeing_demo, write_mmproj

pytest.importorskip("PIL", reason="Pillow is an optional package")
PIXELS = np.random.default_rng(5).integers(0, 256, (30, 50, 3), np.uint8)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_demo(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with localinfer.load(model, threads=1, disk_cache=False) as loaded:
        yield loaded


def asked(*parts: Any, text: str = "What is it?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def test_a_model_that_sees_says_so(llm: LLM, model: Path) -> None:
    assert "vision" in llm.capabilities and "vision" in llm.info.capabilities
    assert llm.info.memory_bytes == localinfer.availability(model).memory_bytes
    for off in ("off", "auto"):
        path = model if off == "off" else None
        with localinfer.load(path, threads=1, mmproj=off, disk_cache=False) as blind:
            assert "vision" not in blind.capabilities
            with pytest.raises(MessageError, match="reads text only"):
                blind.chat(asked(image(PIXELS)))


def test_a_picture_changes_the_answer_and_is_read_once(llm: LLM) -> None:
    text = llm.count_chat_tokens([{"role": "user", "content": "What is it?"}])
    assert llm.count_chat_tokens(asked(image(PIXELS))) == text + PICTURE_ROWS
    first = llm.chat(asked(image(PIXELS)), logprobs=3, **GREEDY)
    again = llm.chat(asked(image(PIXELS)), logprobs=3, **GREEDY)
    assert again.token_ids == first.token_ids and again.logprobs == first.logprobs
    assert again.stats.cached_tokens == again.stats.prompt_tokens - 1
    other = llm.chat(asked(image(PIXELS[::-1])), logprobs=3, **GREEDY)
    assert other.logprobs != first.logprobs
    assert "picture 1 of message 1 has changed" in str(other.stats.cache_miss)
    two = llm.chat(asked(image(PIXELS), image(PIXELS[::-1])), **GREEDY)
    assert two.stats.prompt_tokens == first.stats.prompt_tokens + PICTURE_ROWS
    assert two.stats.cached_tokens >= PICTURE_ROWS


def test_a_prompt_without_a_template_may_have_pictures_between_texts(llm: LLM) -> None:
    source = MediaSource("image", picture_file(seed=3), "prompt[1]")
    ids = [llm.tokenizer.encode("One", True), llm.tokenizer.encode(" two", False)]
    prompt = llm.encode_prompt(["One", source, " two"])
    words = [token_id for token_id in prompt.token_ids if token_id >= 0]
    assert words == [*ids[0], *ids[1]] and len(prompt.token_ids) == len(words) + PICTURE_ROWS
    first, again = (llm.complete(prompt, **GREEDY) for _ in range(2))
    assert first.token_ids == again.token_ids and again.stats.cached_tokens == again.stats.prompt_tokens - 1
    assert llm.encode_prompt(["One", " two"]).token_ids == llm.tokenizer.encode("One two")
    with pytest.raises(MessageError, match="stands for a picture"):
        llm.encode_prompt([source.marker, source])
    with pytest.raises(MessageError, match="is a sound"):
        llm.encode_prompt([MediaSource("audio", b"RIFF", "prompt[0]")])
    with localinfer.load(threads=1, disk_cache=False) as blind:
        assert blind.encode_prompt(["One", " two"]).token_ids == blind.tokenizer.encode("One two")
        with pytest.raises(MessageError, match="reads text only"):
            blind.encode_prompt(["One", source])


def test_the_encoder_runs_once_for_a_picture_in_any_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    media = llm._media
    assert media is not None
    calls: list[str] = []

    def counted(name: str) -> None:
        real = getattr(media, name)
        monkeypatch.setattr(media, name, lambda *given, **more: (calls.append(name), real(*given, **more))[1])

    counted("prepare")
    counted("encode")
    picture = picture_file(seed=77)
    for text in ("One", "Two", "Three"):
        llm.chat([{"role": "system", "content": text}, *asked(image(picture))], **GREEDY)
    assert calls == ["prepare", "encode"]


def test_a_picture_in_progress_is_stopped_with_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    media: Any = llm._media
    picture, real, shares = picture_file(seed=78), media._encoder.encode, []
    stream = llm.stream_chat(asked(image(picture)), **GREEDY)

    def encode(piece: Any, check: Callable[[], None]) -> Any:
        def counted() -> None:
            shares.append(1)
            if len(shares) == 3:
                stream.cancel()
            check()

        return real(piece, counted)

    with monkeypatch.context() as patch:
        patch.setattr(media._encoder, "encode", encode)
        assert [event.finish_reason for event in stream][-1] == "cancelled"
    assert len(shares) == 3
    first = llm.chat(asked(image(picture)), logprobs=2, **GREEDY)
    llm.clear_cache()
    assert llm.chat(asked(image(picture)), logprobs=2, **GREEDY).logprobs == first.logprobs


def test_the_same_pixels_in_another_file_are_the_same_picture(llm: LLM, tmp_path: Path) -> None:
    from PIL import Image

    results = []
    for suffix in ("png", "bmp"):
        path = tmp_path / f"photo.{suffix}"
        Image.fromarray(PIXELS).save(path)
        results.append(llm.chat(asked(image(path), text="Say"), **GREEDY))
    assert results[0].token_ids == results[1].token_ids
    assert results[1].stats.cached_tokens == results[1].stats.prompt_tokens - 1


def test_a_session_goes_on_about_its_picture_and_is_saved_with_it(llm: LLM) -> None:
    session = llm.session(**GREEDY)
    first = session.ask([image(PIXELS), "What is it?"])
    second = session.ask("And what else?")
    assert second.stats.cached_tokens >= first.stats.prompt_tokens
    text = session.to_json()
    restored = localinfer.Session.from_json(llm, text, **GREEDY)
    third, same = session.ask("More?"), restored.ask("More?")
    assert third.token_ids == same.token_ids and third.stats.prompt_tokens == same.stats.prompt_tokens
    fork = session.fork()
    fork.edit(0, [image(PIXELS[::-1]), "What is it?"])
    assert len(fork.messages) == 1 and fork.ask().stats.prompt_tokens == first.stats.prompt_tokens


@pytest.mark.parametrize("threads", [1, 2])
def test_a_restart_computes_new_tokens_only(model: Path, tmp_path: Path, threads: int) -> None:
    def loaded() -> LLM:
        return localinfer.load(model, threads=threads, disk_cache=True, disk_cache_folder=tmp_path)

    pictures = [image(PIXELS), image(PIXELS[::-1]), image(PIXELS)]
    with loaded() as llm:
        first = llm.chat(asked(*pictures, text="What are they? " * 8), **GREEDY)
    with loaded() as llm:
        assert llm._media is not None
        llm._media.encode = llm._media.prepare = None  # type: ignore[method-assign, assignment]
        again = llm.chat(asked(*pictures, text="What are they? " * 8), **GREEDY)
    assert again.token_ids == first.token_ids
    assert again.stats.cached_tokens == again.stats.prompt_tokens - 1


def test_errors_name_the_part_and_the_file(llm: LLM, model: Path, tmp_path: Path) -> None:
    with pytest.raises(MessageError, match=r"messages\[0\]\.content\[1\].*unknown format"):
        llm.chat(asked(image(PIXELS), image(b"no picture")))
    with pytest.raises(MessageError, match="is a sound, and this model reads text and pictures"):
        llm.chat(asked({"type": "audio", "audio": b"RIFF"}))
    with pytest.raises(ContextLengthError):
        llm.chat(asked(*[image(PIXELS)] * 200))
    with pytest.raises(RequestError, match=r"embeddings of 33 numbers, and .* takes"):
        localinfer.load(model, mmproj=write_mmproj(tmp_path / "mmproj-other.gguf", 33), disk_cache=False)
    with pytest.raises(ModelFileError, match="wanted 'clip'"):
        localinfer.load(model, mmproj=model, disk_cache=False)
    with pytest.raises(RequestError, match="mmproj"):
        localinfer.load(model, mmproj=5)  # type: ignore[arg-type]


def test_packages_that_are_missing_are_named_at_loading_and_when_a_picture_comes(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extras, "_found", set())
    monkeypatch.setattr(extras, "_is_there", lambda name: name != "PIL")
    with localinfer.load(model, threads=1, disk_cache=False) as llm:
        assert "reading pictures needs pillow" in caplog.text
        assert llm.chat([{"role": "user", "content": "Hi"}], max_tokens=1).token_ids
        with pytest.raises(MissingPackageError, match=r"pip install 'localinfer\[media\]'"):
            llm.chat(asked(image(picture_file(9))))

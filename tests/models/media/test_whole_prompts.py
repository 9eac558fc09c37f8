"""Prompts that see themselves, pictures and words alike (PaliGemma), from their folder to the answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.engine.media import MediaRun
from localinfer.generation.chat.media_parts import MediaSource, read_media_part
from localinfer.generation.whole_prompts import WholeSight, framed, whole_run
from localinfer.llm import LLM
from tests.models.media.conftest import MediaFolders

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "logprobs": 3}


@pytest.fixture(scope="module")
def folder(media_folders: MediaFolders) -> Path:
    """The folder, whose sliding window of twelve is shorter than its prompts."""
    return media_folders.path("paligemma")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with localinfer.load(folder, threads=1, kv_type="f32", disk_cache=False) as found:
        yield found


def image(pixels: NDArray[np.uint8]) -> MediaSource:
    found = read_media_part({"type": "image", "image": pixels}, "prompt[0]")
    assert found is not None
    return found


def test_logits_are_the_references(llm: LLM, media_folders: MediaFolders) -> None:
    reference = media_folders.reference("paligemma")
    prompt = llm.encode_prompt([image(media_folders.picture("paligemma", 0)), "Look now"])
    assert len(prompt.token_ids) == reference["one.input_ids"].shape[1]
    found = llm.logits(prompt)[reference["one.logit_rows"]][:, ::3].astype(np.float64)
    wanted = reference["one.logits"]
    assert np.square(found - wanted).sum() / np.square(wanted.astype(np.float64)).sum() < 1e-11


def test_every_word_changes_every_row(llm: LLM, media_folders: MediaFolders) -> None:
    picture = image(media_folders.picture("paligemma", 0))
    first, other = (llm.logits(llm.encode_prompt([picture, text])) for text in ("Look now", "Look nor"))
    assert first.shape == other.shape and (np.abs(first - other).max(axis=1) > 1e-4).all()


def test_answers_are_the_same_bits_in_any_company_and_after_a_restart(
    llm: LLM, folder: Path, media_folders: MediaFolders, tmp_path: Path
) -> None:
    pictures = [image(media_folders.picture("paligemma", number)) for number in (0, 1)]
    prompts = [llm.encode_prompt([one, "Look now"]) for one in pictures]
    alone = [llm.complete(prompt, **GREEDY) for prompt in prompts]
    assert alone[0].logprobs != alone[1].logprobs
    again = llm.complete(prompts[0], **GREEDY)
    assert again.logprobs == alone[0].logprobs
    llm.complete("Look at words before", max_tokens=3)
    streams = [llm.stream(prompt, **GREEDY) for prompt in (*prompts, "Look")]
    together = [stream.result() for stream in streams]
    assert [one.logprobs for one in together[:2]] == [one.logprobs for one in alone]
    for _ in range(2):
        with localinfer.load(folder, threads=2, kv_type="f32", disk_cache=True, disk_cache_folder=tmp_path) as other:
            prompt = other.encode_prompt([pictures[0], "Look now"])
            assert other.complete(prompt, **GREEDY).logprobs == alone[0].logprobs
    # A prompt that only begins alike shares nothing: its rows have seen another end.
    longer = llm.complete(llm.encode_prompt([pictures[0], "Look now and then"]), **GREEDY)
    assert longer.stats.cached_tokens == 0


def test_a_chat_is_one_prompt_of_pictures_and_words(llm: LLM, media_folders: MediaFolders) -> None:
    pixels = media_folders.picture("paligemma", 0)
    part = {"type": "image", "image": pixels}
    answer = llm.chat([{"role": "user", "content": [part, {"type": "text", "text": "Look now"}]}], **GREEDY)
    prompt = llm.encode_prompt([image(pixels), "Look now"])
    assert answer.stats.prompt_tokens == len(prompt.token_ids)
    assert answer.logprobs == llm.complete(prompt, **GREEDY).logprobs
    turns = [
        {"role": "user", "content": [part, {"type": "text", "text": "Look now"}]},
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "And?"},
    ]
    assert llm.chat(turns, **GREEDY).logprobs == llm.chat(turns, **GREEDY).logprobs
    assert llm.chat([{"role": "user", "content": "Look"}], **GREEDY).stats.prompt_tokens > 1


def test_the_words_begin_behind_the_last_picture() -> None:
    first, second = (MediaSource("image", data, "").marker for data in (b"1", b"2"))
    sight = WholeSight("<s>", "\n", lambda ids: np.repeat(ids[:, None], 2, 1).astype(np.float32))
    segments = [(f"see {first} or ", True), (f"{second} best", False)]
    assert framed(segments, sight) == [
        (f"see {first} or ", True),
        (second, False),
        ("<s>", True),
        (" best", False),
        ("\n", False),
    ]
    picture = MediaRun(np.array([-3, -2], np.int32), lambda check: np.full((2, 2), 9, np.float32), None, 2, False)
    run = whole_run([-3, -2, *[5] * 8], [picture], sight, b"encoders")
    assert run.sees_itself and run.passes_windows and run.num_positions == 10
    np.testing.assert_array_equal(run.embed(lambda: None)[:, 0], [9] * 2 + [5] * 8)

"""Folders of models that see and hear answer as the published implementation: from pixels and sounds to logits."""

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

import localinfer
from localinfer.engine.engine import Engine
from localinfer.engine.media import media_ids
from localinfer.errors import MessageError
from localinfer.generation.chat.media_parts import MediaSource, flattened
from localinfer.generation.chat.messages import read_messages
from localinfer.generation.chat_model import ChatHistory
from localinfer.generation.media import MediaReader
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.loading.media import LoadedMedia
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.load.loader import load_model
from localinfer.models.media.encoder import MediaEncoder
from localinfer.models.media.folder_media import FolderMedia, open_folder_media
from localinfer.models.media.folder_processors import expand
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.quant.checkpoint.folder import open_folder
from tests.models.media.conftest import Asked, MediaFolders
from tests.support.checkpoint_files import safetensors_bytes

NAMES = (
    "aya_vision cohere2_vision gemma3 gemma4 glm4v glm4v_moe glm_ocr granite_speech idefics3 internvl kimi_k25 lfm2_vl"
    " lighton_ocr llama4 llava llava_next llava_onevision minicpmv4_6 ministral3 mistral3 ovis2 paddleocr_vl pixtral"
    " qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe smolvlm"
    " voxtral"
).split()


DROPPED_SCALES = {"granite_speech": 2.0}
"""Divisors of logits that transformers 5.24 drops, and the model that it was made of applies."""


def _prompts(
    reference: Mapping[str, NDArray[Any]], folders: MediaFolders, name: str, media: FolderMedia
) -> dict[str, tuple[str | EncoderInput, ...]]:
    found = {}
    for label, numbers in (("one", (0,)), ("two", (1, 2))):
        if f"{label}.prompt" in reference and media.pictures is not None:
            seen = [media.pictures.lay_out(folders.picture(name, number), at) for at, number in enumerate(numbers)]
            prompt = media.pictures.complete(str(reference[f"{label}.prompt"]))
            found[label] = expand(prompt, [(media.pictures.token, seen)])
    if "heard.logits" in reference and media.sounds is not None:
        heard = media.sounds.lay_out(folders.sound(0))
        found["heard"] = expand(f"Hear {media.sounds.alone} now", [(media.sounds.token, [heard])])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_prompts_are_the_references(media_folders: MediaFolders, name: str) -> None:
    reference, path = media_folders.reference(name), media_folders.path(name)
    pool = ThreadPool(1)
    model = load_model(path, threads=1, kv_type="f32", takes_media=True, verify=False, batch_rows=192)
    engine = Engine(model)
    with open_folder(path) as folder:
        tokenizer = model.tokenizer
        assert tokenizer is not None
        media = open_folder_media(folder, tokenizer.token_id)
        encoder = MediaEncoder(media.config, media.file, pool)
        asked = Asked(media, encoder)
        prompts = _prompts(reference, media_folders, name, media)
        assert prompts
        for label, pieces in prompts.items():
            rows, wanted = reference[f"{label}.logit_rows"], reference[f"{label}.logits"]
            logits = asked.logits(engine, tokenizer, pieces)
            assert len(logits) == reference[f"{label}.input_ids"].shape[1]
            found = logits[rows][:, ::3].astype(np.float64) * DROPPED_SCALES.get(name, 1.0)
            # Rows that end lines of Pixtral's pictures are words there.
            error = np.square(found - wanted).sum() / np.square(wanted.astype(np.float64)).sum()
            assert error < 1e-6, (label, error)
        encoder.close()
    engine.close()
    pool.close()


def test_words_have_the_same_bits_where_the_factor_is_of_sounds_too(media_folders: MediaFolders) -> None:
    """Granite multiplies all rows by a factor, which words without sound have from the look-up."""
    found = []
    for takes_media in (False, True):
        model = load_model(
            media_folders.path("granite_speech"), threads=1, kv_type="f32", takes_media=takes_media, verify=False
        )
        engine = Engine(model)
        found.append(engine.logits([5, 60, 7, 80, 9, 100, 11]).copy())
        engine.close()
    assert found[0].tobytes() == found[1].tobytes()


def test_pictures_are_numbered_over_the_whole_prompt_where_their_family_does(media_folders: MediaFolders) -> None:
    reference, path = media_folders.reference("minicpmv4_6"), media_folders.path("minicpmv4_6")
    with open_checkpoint(path) as file, open_folder(path) as folder:
        tokenizer = Tokenizer.from_metadata(file.metadata)
        template = ChatTemplate.from_metadata(file.metadata, tokenizer)
        processor = open_folder_media(folder, tokenizer.token_id).pictures
    assert processor is not None
    pictures = {bytes([number]): media_folders.picture("minicpmv4_6", number) for number in (1, 2)}
    model: Any = SimpleNamespace(
        kinds=("image",),
        tokens={"image": processor.token},
        number_prefix=processor.number_prefix,
        alone={"image": processor.token},
        whole=None,
        identity=b"",
        sees_itself=lambda piece: False,
        prepare=lambda kind, data, is_alone: (processor.lay_out(pictures[data], is_alone=is_alone), ()),
    )
    first, second = (MediaSource("image", data, "messages[0].content[0]") for data in pictures)
    reader = MediaReader(model, tokenizer, template)
    held = reader.read([first, second])
    # The prompt of the reference, with two pictures among words.
    words = str(reference["two.prompt"]).split(processor.token)
    ids = np.array(reader.encode_parts([words[0], first, words[1], second, words[2]], parse_special=True).token_ids)
    wanted = reference["two.input_ids"][0]
    is_row = wanted == json.loads((path / "config.json").read_text())["image_token_id"]
    np.testing.assert_array_equal(ids < 0, is_row)
    np.testing.assert_array_equal(ids[ids >= 0], wanted[~is_row])
    # Chats, of which a later turn brings the second, or the first again: what came before stays as it was.
    history = ChatHistory(template, tokenizer, media=reader)

    def chat(*sent: MediaSource) -> Any:
        turns: list[dict[str, Any]] = []
        for one in sent:
            turns += [{"role": "user", "content": [one, {"type": "text", "text": "Which?"}]}]
            turns += [{"role": "assistant", "content": "A cat."}]
        return history.encode(flattened(read_messages(turns))[0])

    alone, both, twice = chat(first), chat(first, second), chat(first, first)
    for encoded, count in ((alone, 1), (both, 2), (twice, 2)):
        text = tokenizer.decode([token for token in encoded.token_ids.tolist() if token >= 0], skip_special=False)
        assert [text.count(f"<image_id>{number}</image_id>") for number in range(3)] == [1] * count + [0] * (3 - count)
        assert len(encoded.media) == count * len(held[0].held.runs) or encoded is both
    size = alone.token_ids.size - 8
    assert both.token_ids[:size].tolist() == twice.token_ids[:size].tolist() == alone.token_ids[:size].tolist()
    assert len(both.media) == sum(len(one.held.runs) for one in held)


@pytest.mark.parametrize("name", NAMES)
def test_chats_are_those_of_the_template_and_the_processor(media_folders: MediaFolders, name: str) -> None:
    """Also where the template writes line ends or texts around a picture, which join the words beside it."""
    reference, path = media_folders.reference(name), media_folders.path(name)
    if "chat.text" not in reference:
        pytest.skip("its processor has no chat template")
    with open_checkpoint(path) as file, open_folder(path) as folder:
        tokenizer = Tokenizer.from_metadata(file.metadata)
        template = ChatTemplate.from_metadata(file.metadata, tokenizer)
        media = open_folder_media(folder, tokenizer.token_id)
        encoder: Any = SimpleNamespace(config=media.config, width=64)
        pool: Any = None
        model = LoadedMedia(
            encoder,
            pool,
            media,
            close=lambda: None,
            text_size=64,
            context_length=1 << 20,
            identity=lambda: b"",
            has_token=lambda text: False,
        )
        reader = MediaReader(model, tokenizer, template)
        text = str(reference["chat.text"])
        shown: list[tuple[str, list[PreparedMedia]]] = []
        parts: list[Any] = []
        if media.pictures is not None and media.pictures.token in text:
            shown.append((media.pictures.token, [media.pictures.lay_out(media_folders.picture(name, 0))]))
            parts.append({"type": "image", "image": media_folders.picture(name, 0)})
        if media.sounds is not None and media.sounds.token in text:
            sound = io.BytesIO()
            soundfile.write(sound, media_folders.sound(0), 16000, format="WAV", subtype="FLOAT")
            shown.append((media.sounds.token, [media.sounds.lay_out(media_folders.sound(0))]))
            parts.append({"type": "audio", "audio": sound.getvalue()})
        asked = [*parts, {"type": "text", "text": "What is in it?"}]
        messages, sources = flattened(
            read_messages(
                [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": "A cat."},
                    {"role": "user", "content": "Sure?"},
                ]
            )
        )
        held = reader.read(sources)
        assert len(held) == len(parts)
        chat = ChatHistory(template, tokenizer, media=reader).encode(messages)
        expected: list[int] = []
        for piece in expand(text, shown):
            if isinstance(piece, str):
                expected += tokenizer.encode(piece, False, parse_special=True)
            else:
                digest = PreparedMedia.from_pieces([piece]).digest
                expected += media_ids(b"", digest, piece.num_rows).tolist()
        begins = [tokenizer.bos_token_id] if tokenizer.adds_bos and expected[0] != tokenizer.bos_token_id else []
        assert chat.token_ids.tolist() == [*begins, *expected]
        assert len(chat.media) == sum(not isinstance(piece, str) for _, one in shown for piece in one[0].pieces)


def _asked(picture: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]}]


def test_a_folder_that_sees_is_loaded_with_its_towers(media_folders: MediaFolders) -> None:
    path = media_folders.path("qwen3_vl")
    picture = media_folders.picture("qwen3_vl", 0)
    with localinfer.load(path, threads=1, disk_cache=False) as llm:
        assert "vision" in llm.capabilities
        words = llm.count_chat_tokens([{"role": "user", "content": "What is it?"}])
        rows = llm.count_chat_tokens(_asked(picture)) - words
        embedded = len(media_folders.reference("qwen3_vl")["one.image_embeddings"])
        assert rows == embedded + 2, "embeddings, and the tokens around them"
        answers = [llm.chat(_asked(one), logprobs=2, max_tokens=2, temperature=0) for one in (picture, picture[::-1])]
        assert answers[0].logprobs != answers[1].logprobs
    with localinfer.load(path, threads=1, disk_cache=False, mmproj="off") as blind:
        assert "vision" not in blind.capabilities
        with pytest.raises(MessageError, match="reads text only"):
            blind.chat(_asked(picture))


def test_a_folder_whose_towers_do_not_run_answers_texts(
    media_folders: MediaFolders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(media_folders.path("llava"), tmp_path / "vipllava")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "vipllava"}))
    with localinfer.load(folder, threads=1, disk_cache=False, context_length=64) as llm:
        assert not {"vision", "audio"} & set(llm.capabilities)
        assert llm.complete("The cat", max_tokens=1, temperature=0).token_ids
    assert "reads text only: config.json: model_type" in caplog.text


def test_a_folder_without_the_tensors_of_its_towers_answers_texts(
    media_folders: MediaFolders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = media_folders.path("qwen2_vl")
    folder = tmp_path / "text"
    shutil.copytree(source, folder)
    with open_folder(source) as opened:
        kept = {name: opened.array(name) for name in opened.tensors if not name.startswith("visual.")}
        (folder / "model.safetensors").write_bytes(safetensors_bytes(kept))
    with localinfer.load(folder, threads=1, disk_cache=False, context_length=64) as llm:
        assert "vision" not in llm.capabilities
        assert llm.complete("The cat", max_tokens=1, temperature=0).token_ids
    assert "reads text only" in caplog.text

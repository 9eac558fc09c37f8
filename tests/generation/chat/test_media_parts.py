"""Pictures and sounds in messages: every form that callers give them in, markers in text, and ids in a prompt."""

import base64
import io
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.engine.media import FEWEST_ROWS, Check, media_ids
from localinfer.errors import MessageError
from localinfer.generation.chat.media_parts import (
    MediaSource,
    flattened,
    joined_parts,
    read_media_part,
    split_at_markers,
)
from localinfer.generation.chat.messages import check_no_media, checked_content, read_messages, read_turns
from localinfer.generation.chat_model import ChatHistory
from localinfer.generation.media import MediaReader
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.models.text.chat_template import ChatTemplate

IMAGE = pytest.importorskip("PIL.Image", reason="Pillow is an optional package")
PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
DATA = b"\x89PNG not really"
ENCODED = base64.b64encode(DATA).decode()


def forms(folder: Path) -> dict[str, dict[str, Any]]:
    """Parts of one picture, by how it is given."""
    file = folder / "photo.png"
    file.write_bytes(DATA)
    return {
        "bytes": {"type": "image", "image": DATA},
        "bytearray": {"type": "image", "data": bytearray(DATA)},
        "path": {"type": "image", "path": file},
        "path as text": {"type": "image", "image": str(file)},
        "base64": {"type": "image", "data": ENCODED},
        "data URL": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ENCODED}"}},
        "data URL alone": {"type": "input_image", "image_url": f"data:image/png;base64,{ENCODED}"},
        "url": {"type": "image", "url": f"data:image/png;base64,{ENCODED}"},
    }


def test_every_form_of_a_picture_is_the_same_picture(tmp_path: Path) -> None:
    found = {name: read_media_part(part, "p") for name, part in forms(tmp_path).items()}
    assert {source and (source.kind, source.data) for source in found.values()} == {("image", DATA)}
    assert len({source and source.marker for source in found.values()}) == 1
    sound = read_media_part({"type": "input_audio", "input_audio": {"data": ENCODED, "format": "wav"}}, "p")
    assert sound is not None and (sound.kind, sound.data) == ("audio", DATA)
    assert sound.marker != MediaSource("image", DATA, "p").marker


@pytest.mark.parametrize("shape", [(4, 5, 3), (4, 5, 4), (4, 5)])
def test_an_array_and_a_pil_image_keep_every_pixel(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    for value in (pixels, IMAGE.fromarray(pixels)):
        source = read_media_part({"type": "image", "image": value}, "p")
        assert source is not None
        np.testing.assert_array_equal(np.asarray(IMAGE.open(io.BytesIO(source.data))), pixels)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image"}, "holds nothing"),
        ({"type": "image", "image": "https://example.com/a.png"}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "nothing is fetched"),
        ({"type": "image", "image": "no such file.png"}, "cannot be read"),
        ({"type": "image", "data": "%%%"}, "no base64"),
        ({"type": "image", "image": PIXELS.astype(np.float32)}, "uint8"),
        ({"type": "image", "image": PIXELS[:, :, :2]}, "uint8"),
        ({"type": "image", "image": 5}, "PIL image"),
        ({"type": "audio", "audio": PIXELS}, "path or the bytes"),
    ],
)
def test_what_is_no_picture_is_refused_with_its_part(part: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError, match=words) as error:
        read_media_part(part, "messages[1].content[2]")
    assert error.value.path == "messages[1].content[2]"


def test_parts_are_joined_without_line_ends_beside_a_picture() -> None:
    picture = MediaSource("image", DATA, "p")
    text = joined_parts(["a", "b", picture, "c", picture, picture, "d", "e"], "user")
    assert text.replace(picture.marker, "*") == "a\nb*c**d\ne"
    assert split_at_markers(text)[:3] == ["a\nb", picture.marker, "c"]
    assert "".join(split_at_markers(text)) == text


def test_messages_are_flattened_and_kept_as_plain_data() -> None:
    sent = [{"role": "user", "content": [{"type": "image", "image": DATA}, {"type": "text", "text": "What is it?"}]}]
    read = read_messages(sent)
    assert read_messages(read) == read
    flat, sources = flattened(read)
    assert flat == [{"role": "user", "content": f"{sources[0].marker}What is it?"}]
    assert sources[0].path == "messages[0].content[0]"
    (turn,) = read_turns(sent)
    assert turn["content"][0] == {"type": "image", "data": ENCODED}
    assert flattened(read_messages([turn]))[0] == flat
    assert checked_content([{"type": "image", "image": DATA}, "What is it?"]) == turn["content"]
    with pytest.raises(MessageError, match="reads text only") as error:
        check_no_media(read)
    assert error.value.is_unsupported


@pytest.mark.parametrize("place", ["content", "name", "tool_calls"])
def test_a_text_that_spells_a_marker_is_refused(place: str) -> None:
    marker = MediaSource("image", DATA, "p").marker
    message: dict[str, Any] = {"role": "user", "content": "a"}
    message[place] = [{"function": {"name": "f", "arguments": {"a": [marker]}}}] if place == "tool_calls" else marker
    with pytest.raises(MessageError, match=re.escape(f"messages[0].{place}")):
        flattened([message])


def test_ids_tell_rows_pictures_and_encoders_apart() -> None:
    first = media_ids(b"encoder", b"picture", 1000)
    assert first.dtype == np.int32 and (first < 0).all()
    np.testing.assert_array_equal(media_ids(b"encoder", b"picture", 300), first[:300])
    for others in (media_ids(b"encoder2", b"picture", 1000), media_ids(b"encoder", b"pictures", 1000)):
        assert (others != first).sum() > 990
    assert np.unique(first[:FEWEST_ROWS]).size == FEWEST_ROWS


class FakeModel:
    """Lays a picture out as two tiles with text between, of as many rows as its file has bytes."""

    kinds = ("image",)
    identity = preparation = b"fake"
    number_prefix = ""
    whole = None
    gives_vectors = False
    tokens: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self.prepared: list[bytes] = []
        self.encoded = 0

    def prepare(self, kind: str, data: bytes, *, is_alone: bool = True) -> tuple[PreparedMedia, tuple[str, ...]]:
        self.prepared.append(data)
        tile = EncoderInput(
            False, np.frombuffer(data, np.uint8).reshape(1, -1, 1), len(data), (1, len(data)), len(data)
        )
        return PreparedMedia.from_pieces(["<|im_start|>", tile, "x", tile, "<|im_end|>"]), ()

    def encode(self, piece: EncoderInput, check: Check | None = None) -> np.ndarray:
        self.encoded += 1
        return np.full((piece.num_rows, 2), piece.values.sum(), np.float32)

    def sees_itself(self, piece: EncoderInput) -> bool:
        return False


def test_a_chat_with_pictures_is_the_ids_of_its_texts_and_pictures() -> None:
    tokenizer = localinfer.load_tokenizer()
    template = ChatTemplate("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    model = FakeModel()
    reader = MediaReader(model, tokenizer)
    history = ChatHistory(template, tokenizer, media=reader)

    def encoded(*contents: Any) -> Any:
        messages, sources = flattened(read_messages([{"role": "user", "content": content} for content in contents]))
        held = reader.read(sources)
        assert len(held) == len(sources)
        return history.encode(messages)

    picture = {"type": "image", "image": DATA}
    chat = encoded([{"type": "text", "text": "What"}, picture, {"type": "text", "text": "is it?"}])
    words = tokenizer.encode_segments
    rows = media_ids(b"fake", PreparedMedia.from_pieces([model.prepare("image", DATA)[0].pieces[1]]).digest, len(DATA))
    around = [
        tokenizer.encode(text, parse_special=True, add_special=False) for text in ("<|im_start|>", "x", "<|im_end|>")
    ]
    expected = [
        *words([("<|im_start|>What", True)]), *around[0], *rows.tolist(), *around[1], *rows.tolist(), *around[2],
        *words([("is it?<|im_end|>", True)]),
    ]  # fmt: skip
    begins = [tokenizer.bos_token_id] if tokenizer.adds_bos and expected[0] != tokenizer.bos_token_id else []
    assert chat.token_ids.tolist() == [*begins, *expected]
    assert [run.ids.tolist() for run in chat.media] == [rows.tolist()] * 2
    model.prepared.clear()
    # A later message: the same picture is not read again, a reply keeps its ids, another picture is another.
    history.remember(chat, [5, 6, 7])
    reply = "".join(tokenizer.decode([5, 6, 7], skip_special=False))
    later = encoded([{"type": "text", "text": "What"}, picture, {"type": "text", "text": "is it?"}], reply)
    assert not model.prepared and not model.encoded
    assert later.token_ids.tolist()[: chat.token_ids.size] == chat.token_ids.tolist()
    other = encoded([{"type": "text", "text": "What"}, {"type": "image", "image": DATA + b"!"}])
    assert (
        len(model.prepared) == 1
        and (other.token_ids[: chat.token_ids.size] != chat.token_ids[: other.token_ids.size]).any()
    )
    # What another owner sent is not known, and reads the same.
    model.prepared.clear()
    source = MediaSource("image", DATA, "messages[0].content[0]")
    for salt in (b"alice", b"bob", b"alice"):
        assert [run.ids.tolist() for run in reader.read([source], salt)[0].held.runs] == [rows.tolist()] * 2
    assert len(model.prepared) == 2
    np.testing.assert_array_equal(chat.media[1].embed(lambda: None), np.full((len(DATA), 2), sum(DATA), np.float32))
    with pytest.raises(MessageError, match="is a sound"):
        encoded([{"type": "audio", "audio": DATA}])

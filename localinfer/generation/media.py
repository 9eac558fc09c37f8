"""Pictures and sounds of conversations as one loaded model reads them: token ids, and embeddings when a request has to
compute them.

A picture that came before, in whatever message, is known by the digest of its bytes: it is neither decoded nor prepared
again, with a disk cache nor after a restart, and its encoder runs only if its rows are not in the prefix cache.
"""

import hashlib
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.engine.media import Check, MediaRun, media_content, media_ids
from localinfer.errors import ContextLengthError, MessageError, RequestError, TemplateError
from localinfer.generation.chat.media_parts import (
    MediaKind,
    MediaSource,
    Segments,
    check_spells_none,
    cut_segments,
    is_marker,
    kind_of,
    numbered,
    split_at_markers,
    split_number,
)
from localinfer.generation.text_generation import EncodedPrompt
from localinfer.generation.whole_prompts import WholeSight, framed, has_markers, whole_run
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.types import FloatArray

if TYPE_CHECKING:
    from localinfer.kernels.cpu.program import ThreadPool
    from localinfer.models.text.chat_template import ChatTemplate
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.storage.media_files import MediaFiles

_MESSAGE = re.compile(r"messages\[(\d+)\]")
_MOST_KNOWN = 4096
"""Pictures and sounds whose layout is remembered; each takes some kilobytes."""
_MOST_WHOLE = 64
"""Prompts that see themselves whose runs are kept between their encoding and their use."""
_MOST_PREPARED_BYTES = 128 << 20
"""Prepared pixels and features that are kept for their encoder, which reads a picture tile by tile."""


class MediaModel(Protocol):
    """The encoders of a model, and how it wants pictures and sounds prepared. Threads may share it."""

    kinds: tuple[MediaKind, ...]
    """Kinds that it reads."""
    whole: WholeSight | None
    """Properties of a model whose prompts with pictures see themselves; None for others."""
    gives_vectors: bool
    """True if each picture becomes a vector beside those of texts, and none is part of a prompt."""
    pool: "ThreadPool"
    """Threads of its own, so that the model may take steps meanwhile."""

    @property
    def width(self) -> int:
        """Numbers of an embedding."""
        ...

    @property
    def tokens(self) -> Mapping[MediaKind, str]:
        """By kind the text that stands for media where a chat template writes what is around them; none for files whose
        layouts bring all of it."""
        ...

    @property
    def number_prefix(self) -> str:
        """Text before a picture's number in its layout, which is 0 there and counts in a prompt; empty for none."""
        ...

    @property
    def alone(self) -> Mapping[MediaKind, str]:
        """By kind that text with what stands around it in prompts that no template writes."""
        ...

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Tasks of the model that come with the encoders."""
        ...

    @property
    def identity(self) -> bytes:
        """Identity of the encoders' weights and settings: embeddings of another one are others."""
        ...

    @property
    def preparation(self) -> bytes:
        """Identity of all that prepares pictures and sounds: another one may make others of the same file."""
        ...

    def prepare(self, kind: MediaKind, data: bytes, *, is_alone: bool = True) -> tuple[PreparedMedia, tuple[str, ...]]:
        """Decode and lay out the bytes of a file; also what was left out, in words.

        is_alone: no template writes the texts around it. Raises: RequestError for what cannot be read.
        """

    def encode(self, piece: EncoderInput, check: Check | None = None) -> FloatArray:
        """Return the embeddings, float32[num_rows, width]; check: called now and then, and ends it by raising."""

    def count_patches(self, piece: EncoderInput) -> int:
        """Patches that the encoder computes of a picture."""

    def sees_itself(self, piece: EncoderInput) -> bool:
        """True if the decoder's rows of this input see each other in both directions."""

    def close(self) -> None:
        """Release weights and threads."""


@dataclass(frozen=True)
class _Stretch:
    """One encoder input in a prompt, without its pixels."""

    ids: NDArray[np.int32]
    """Of its rows."""
    digest: bytes
    """Of its content."""
    index: int
    """Its number among the pieces of what was prepared."""
    grid: tuple[int, int] | None
    num_positions: int
    sees_itself: bool


@dataclass(frozen=True)
class _Layout:
    """A picture or sound in a prompt."""

    pieces: "tuple[str | _Stretch, ...]"
    """Texts of special tokens and rows, in order."""
    notices: tuple[str, ...]
    """Parts of it that were left out, in words."""

    @classmethod
    def of(cls, prepared: PreparedMedia, notices: tuple[str, ...], model: MediaModel) -> Self:
        """The layout of what a model has prepared."""
        pieces: list[str | _Stretch] = []
        for index, piece in enumerate(prepared.pieces):
            if isinstance(piece, str):
                pieces.append(piece)
                continue
            digest = PreparedMedia.from_pieces([piece]).digest
            ids = media_ids(model.identity, digest, piece.num_rows)
            pieces.append(_Stretch(ids, digest, index, piece.grid, piece.num_positions, model.sees_itself(piece)))
        return cls(tuple(pieces), notices)

    def to_fields(self) -> dict[str, Any]:
        """The layout as plain data that JSON can hold."""
        pieces = [
            piece
            if isinstance(piece, str)
            else [piece.digest.hex(), piece.ids.size, piece.grid, piece.num_positions, piece.sees_itself]
            for piece in self.pieces
        ]
        return {"pieces": pieces, "notices": self.notices}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], identity: bytes) -> Self:
        """The record of `to_fields`. identity: of the encoders. Raises: ValueError, LookupError, TypeError for else."""
        pieces: list[str | _Stretch] = []
        for index, piece in enumerate(fields["pieces"]):
            if isinstance(piece, str):
                pieces.append(piece)
                continue
            hexadecimal, num_rows, grid, num_positions, sees_itself = piece
            digest = bytes.fromhex(hexadecimal)
            size = None if grid is None else (int(grid[0]), int(grid[1]))
            ids = media_ids(identity, digest, int(num_rows))
            pieces.append(_Stretch(ids, digest, index, size, int(num_positions), bool(sees_itself)))
        return cls(tuple(pieces), tuple(map(str, fields["notices"])))


@dataclass(frozen=True, eq=False)
class _Held:
    """A picture or sound that some request reads."""

    layout: _Layout
    runs: tuple[MediaRun, ...]


@dataclass(frozen=True)
class ReadMedia:
    """A picture or sound of a request; to be held as long as its marker may be read."""

    held: _Held
    words: str
    """Its place in the conversation, such as "picture 2 of message 5"."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Parts of it that were left out, in words."""
        return tuple(f"{self.words}: {notice}" for notice in self.held.layout.notices)


def named_runs(runs: Sequence[MediaRun], media: Sequence[ReadMedia]) -> tuple[MediaRun, ...]:
    """Runs of a prompt with the places of their pictures in the conversation, for reasons of cache misses."""
    places = [(run, one.words) for one in media for run in one.held.runs]
    named = []
    for run in runs:
        # A template may leave some out.
        found = next((place for place in places if place[0] is run), None)
        if found is not None:
            places.remove(found)
        named.append(run if found is None else replace(run, name=found[1]))
    return tuple(named)


class MediaReader:
    """Reads the pictures and sounds of one loaded model's conversations. Threads may share it.

    files: where set, keeps layouts over restarts.
    """

    def __init__(self, model: MediaModel, tokenizer: "Tokenizer", template: "ChatTemplate | None" = None) -> None:
        """Read for a model; template: of its chats, which may write what stands around pictures by itself."""
        self._model = model
        self._tokenizer = tokenizer
        self._tokens = dict(model.tokens) if template is not None and _writes_tokens(template, model.tokens) else {}
        self.files: MediaFiles | None = None
        self._lock = threading.Lock()
        self._layouts: OrderedDict[tuple[bytes, str], _Layout] = OrderedDict()
        self._prepared: OrderedDict[tuple[bytes, str], tuple[PreparedMedia, tuple[str, ...]]] = OrderedDict()
        self._held: WeakValueDictionary[str, _Held] = WeakValueDictionary()
        self._whole: OrderedDict[str, MediaRun] = OrderedDict()

    def read(self, sources: Sequence[MediaSource], salt: bytes = NO_SALT) -> list[ReadMedia]:
        """Make the markers of pictures and sounds readable, as long as the result is held.

        salt: what is known of a picture, another's prompt shows by its time; so none of another salt is known.

        Raises: MessageError for a kind that the model does not read; RequestError for what cannot be decoded.
        """
        numbers: Counter[tuple[str, str]] = Counter()
        media = []
        for source in sources:
            message, _, _ = source.path.partition(".content")
            numbers[message, source.kind] += 1
            media.append(ReadMedia(self._hold(source, salt), _place(source, message, numbers[message, source.kind])))
        return media

    def encode_parts(
        self,
        parts: Sequence[str | MediaSource],
        salt: bytes = NO_SALT,
        *,
        parse_special: bool = False,
        max_tokens: int | None = None,
    ) -> EncodedPrompt:
        """Encode a prompt of texts, and of pictures and sounds between them; the first token begins a text.

        Options: as of `Tokenizer.encode` and `read`. Raises: as `read`; ContextLengthError for a long text of more than
        `max_tokens`.
        """
        media = self.read([part for part in parts if isinstance(part, MediaSource)], salt)
        segments: list[tuple[str, bool]] = []
        for part in parts:
            if isinstance(part, str):
                check_spells_none(part, "the prompt")
                segments.append((part, parse_special))
                continue
            # What a chat template writes around it is missing here.
            token = self._tokens.get(part.kind, "")
            before, _, behind = self._model.alone[part.kind].partition(token) if token else ("", "", "")
            segments += [(before, True), (part.marker, False), (behind, True)]
        if self._model.number_prefix:
            segments = list(self._numbered(segments))
        bos, is_whole = self._tokenizer.bos_token_id, self._model.whole is not None and bool(media)
        first = [bos] if self._tokenizer.adds_bos and bos is not None and not is_whole else []
        runs = [run for one in media for run in one.held.runs]
        if is_whole:
            run = self._whole_run(segments)
            ids, runs = run.ids.tolist(), [run]
        else:
            ids = self.encode_segments(segments, max_tokens=max_tokens)
        return EncodedPrompt(
            [*first, *ids],
            len(first),
            media=named_runs(runs, media),
            notices=tuple(notice for one in media for notice in one.notices),
        )

    def encode_framed(
        self, source: MediaSource, before: str, behind: str, salt: bytes = NO_SALT
    ) -> tuple[list[int], tuple[MediaRun, ...]]:
        """The ids of a picture or sound between two texts of special tokens, and its runs. Raises: as `read`."""
        (held,) = (one.held for one in self.read([source], salt))
        return self.encode_segments([(before, True), (source.marker, False), (behind, True)]), held.runs

    def encode_segments(
        self, segments: Segments, *, continues_run: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of texts in a row, with those of the pictures and sounds that were read for their markers.

        Options: as of `Tokenizer.encode_segments`.
        """
        text = "".join(part for part, _ in segments)
        if self.sees_whole(text):
            return [int(token_id) for token_id in self._whole_run(segments).ids]
        return self._encode_pieces(segments, continues_run=continues_run, max_tokens=max_tokens)

    def sees_whole(self, text: str) -> bool:
        """True for a prompt, with markers, all of which sees itself."""
        return self._model.whole is not None and has_markers(text)

    def begins_whole(self, token_ids: Sequence[int]) -> bool:
        """True for the ids of such a prompt, before which nothing belongs."""
        return self._model.whole is not None and bool(token_ids) and token_ids[0] < 0

    def _whole_run(self, segments: Segments) -> MediaRun:
        """A prompt that sees itself, as one run; kept for `runs`, which the text of a prompt asks for."""
        assert self._model.whole is not None, "prompts of this model see themselves"
        text = "".join(part for part, _ in segments)
        ids = self._encode_pieces(framed(segments, self._model.whole))
        run = whole_run(ids, self._runs_of_pieces(text), self._model.whole, self._model.identity)
        with self._lock:
            self._whole[text] = run
            while len(self._whole) > _MOST_WHOLE:
                self._whole.popitem(last=False)
        return run

    def _encode_pieces(
        self, segments: Segments, *, continues_run: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        # Runtimes of GGUF files tokenize each text alone; processors of folders those between two runs as one.
        joins_texts = bool(self._model.tokens)
        texts: list[list[tuple[str, bool]]] = [[]]
        runs: list[NDArray[np.int32]] = []
        position = 0
        for piece in split_at_markers("".join(text for text, _ in segments)):
            end = position + len(piece)
            if not is_marker(piece):
                texts[-1] += cut_segments(segments, position, end)
            for part in self._pieces(piece) if is_marker(piece) else ():
                if not isinstance(part, str) or not joins_texts:
                    texts.append([])
                    runs.append(part.ids if not isinstance(part, str) else self._special_ids(part))
                else:
                    texts[-1].append((part, True))
            position = end
        ids: list[int] = []
        for index, text in enumerate(texts):
            if text:
                ids += self._tokenizer.encode_segments(
                    text, continues_run=continues_run and not index, max_tokens=max_tokens
                )
            ids += runs[index].tolist() if index < len(runs) else []
        return ids

    def _pieces(self, marker: str) -> Sequence[str | _Stretch]:
        """The pieces of a picture or sound, with its number in the prompt."""
        plain, number = split_number(marker)
        pieces, prefix = self._held[plain].layout.pieces, self._model.number_prefix
        first = pieces[0] if number and prefix else None
        if not isinstance(first, str) or not first.startswith(f"{prefix}0"):
            return pieces
        return f"{prefix}{number}{first[len(prefix) + 1 :]}", *pieces[1:]

    def _special_ids(self, text: str) -> NDArray[np.int32]:
        return np.array(self._tokenizer.encode(text, add_special=False, parse_special=True), np.int32)

    def as_parts(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Messages as the chat template reads them: with lists of parts, if it writes what is around pictures."""
        return [_with_parts(message) for message in messages] if self._tokens else messages

    def with_markers(self, segments: Segments, messages: Sequence[Mapping[str, Any]]) -> Segments:
        """Rendered segments with a marker in place of each token that the template wrote for a picture or sound, and
        the number of each picture where the model is told them.

        messages: those that were rendered, before `as_parts`. Raises: TemplateError if it wrote fewer or more.
        """
        placed = self._placed(segments, messages) if self._tokens else segments
        return self._numbered(placed) if self._model.number_prefix else placed

    def _numbered(self, segments: Segments) -> Segments:
        found, number = [], 0
        for text, is_open in segments:
            text, number = numbered(text, "image", number)
            found.append((text, is_open))
        return found

    def _placed(self, segments: Segments, messages: Sequence[Mapping[str, Any]]) -> Segments:
        markers = [
            piece
            for message in messages
            if isinstance(content := message.get("content"), str)
            for piece in split_at_markers(content)
            if is_marker(piece)
        ]
        if not markers:
            return segments
        left = {kind: [marker for marker in markers if kind_of(marker) == kind] for kind in self._tokens}
        kinds = {token: kind for kind, token in self._tokens.items()}
        pattern = re.compile("|".join(map(re.escape, sorted(kinds, key=len, reverse=True))))

        def marker_of(match: re.Match[str]) -> str:
            waiting = left[kinds[match[0]]]
            if not waiting:
                raise TemplateError(
                    f"the chat template wrote {match[0]!r:.40} more often than there are pictures for it"
                )
            return waiting.pop(0)

        replaced = [(pattern.sub(marker_of, text) if is_open else text, is_open) for text, is_open in segments]
        if any(left.values()):
            raise TemplateError(
                f"the chat template left {sum(map(len, left.values()))} of {len(markers)} pictures or sounds out; send "
                "them in messages of the role user"
            )
        return replaced

    def runs(self, text: str) -> tuple[MediaRun, ...]:
        """The runs of all pictures and sounds of a text with markers, in order; of one that sees itself, its own."""
        if self.sees_whole(text):
            with self._lock:
                known = self._whole.get(text)
            return () if known is None else (known,)
        return self._runs_of_pieces(text)

    def _runs_of_pieces(self, text: str) -> tuple[MediaRun, ...]:
        found = (self._held.get(split_number(piece)[0]) for piece in split_at_markers(text))
        return tuple(run for one in found if one is not None for run in one.runs)

    def _hold(self, source: MediaSource, salt: bytes) -> _Held:
        check_kind(source, self._model.kinds)
        marker = source.marker
        with self._lock:
            held = self._held.get(marker)
            layout = self._layouts.get((salt, marker))
            if layout is not None:
                self._layouts.move_to_end((salt, marker))
        if layout is None:
            layout = self._lay_out(source, salt)
        elif held is not None:
            return held
        stretches = [piece for piece in layout.pieces if not isinstance(piece, str)]
        runs = tuple(
            MediaRun(
                one.ids,
                partial(self._embed, source, one.index, salt),
                one.grid,
                one.num_positions,
                one.sees_itself,
                content=media_content(self._model.identity, one.digest),
            )
            for one in stretches
        )
        with self._lock:
            self._layouts[salt, marker] = layout
            while len(self._layouts) > _MOST_KNOWN:
                self._layouts.popitem(last=False)
            return self._held.setdefault(marker, _Held(layout, runs))

    def _lay_out(self, source: MediaSource, salt: bytes) -> _Layout:
        """The layout of a source, from disk if it is there, so that nothing is decoded."""
        files, key = self.files, b""
        if files is not None:
            is_alone = not self._tokens
            parts = (salt, self._model.identity, self._model.preparation, source.marker.encode(), bytes([is_alone]))
            key = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
            stored = files.find_layout(key)
            if stored is not None:
                with suppress(ValueError, LookupError, TypeError):
                    return _Layout.from_fields(stored, self._model.identity)
        layout = _Layout.of(*self._prepare(source, salt), self._model)
        if files is not None:
            files.add_layout(key, layout.to_fields())
        return layout

    def _embed(self, source: MediaSource, index: int, salt: bytes, check: Check) -> FloatArray:
        """The embeddings of one piece of what a source is prepared to."""
        piece = self._prepare(source, salt)[0].pieces[index]
        assert not isinstance(piece, str), "runs are made of encoder inputs"
        check()
        return self._model.encode(piece, check)

    def _prepare(self, source: MediaSource, salt: bytes) -> tuple[PreparedMedia, tuple[str, ...]]:
        key = salt, source.marker
        with self._lock:
            known = self._prepared.get(key)
            if known is not None:
                self._prepared.move_to_end(key)
                return known
        made = prepared(self._model, source, is_alone=not self._tokens)
        with self._lock:
            self._prepared[key] = made
            while len(self._prepared) > 1 and sum(map(_num_bytes, self._prepared.values())) > _MOST_PREPARED_BYTES:
                self._prepared.popitem(last=False)
        return made


def check_kind(source: MediaSource, kinds: Sequence[MediaKind]) -> None:
    """Raise MessageError for a picture or sound that a model does not read. kinds: those that it does."""
    if source.kind not in kinds:
        raise MessageError(
            f"{source.path} is {'a picture' if source.kind == 'image' else 'a sound'}, and this model reads "
            f"{' and '.join(('text', *map(_named, kinds)))}; leave it out, or load a model that does",
            source.path,
            is_unsupported=True,
        )


def prepared(model: MediaModel, source: MediaSource, *, is_alone: bool = True) -> tuple[PreparedMedia, tuple[str, ...]]:
    """A picture or sound as a model prepares it, and what was left out. Raises: MessageError naming its part;
    ContextLengthError."""
    try:
        return model.prepare(source.kind, source.data, is_alone=is_alone)
    except ContextLengthError:
        raise
    except RequestError as error:
        raise MessageError(f"{source.path}: {error}", source.path) from None


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    pieces = split_at_markers(content) if isinstance(content, str) else []
    if not any(map(is_marker, pieces)):
        return message
    parts = [{"type": kind_of(one)} if is_marker(one) else {"type": "text", "text": one} for one in pieces]
    return {**message, "content": parts}


def _writes_tokens(template: "ChatTemplate", tokens: Mapping[MediaKind, str]) -> bool:
    """True if a template writes the token of each kind once for a part of it."""
    for kind, token in tokens.items():
        message = {"role": "user", "content": [{"type": kind}, {"type": "text", "text": "?"}]}
        try:
            if not token or template.render([message]).count(token) != 1:
                return False
        except TemplateError:
            return False
    return bool(tokens)


def _num_bytes(prepared: tuple[PreparedMedia, tuple[str, ...]]) -> int:
    return sum(piece.values.nbytes for piece in prepared[0].pieces if not isinstance(piece, str))


def _place(source: MediaSource, message: str, number: int) -> str:
    """The words for a picture's place: its number among those of its message."""
    found = _MESSAGE.fullmatch(message)
    where = message if found is None else f"message {int(found[1]) + 1}"
    return f"{'picture' if source.kind == 'image' else 'sound'} {number} of {where}"


def _named(kind: MediaKind) -> str:
    return "pictures" if kind == "image" else "sounds"

"""Pictures and sounds of conversations as one loaded model reads them: token ids, and embeddings when a request has to
compute them.

A picture that came before, in whatever message, is known by the digest of its bytes: it is neither decoded nor prepared
again, and its encoder runs only if its rows are not in the prefix cache.
"""

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.media import MediaRun, media_ids
from localinfer.errors import ContextLengthError, MessageError, RequestError
from localinfer.generation.chat.media_parts import (
    MediaKind,
    MediaSource,
    Segments,
    cut_segments,
    is_marker,
    split_at_markers,
)
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.types import FloatArray

if TYPE_CHECKING:
    from localinfer.kernels.cpu.program import ThreadPool
    from localinfer.models.text.tokenizer import Tokenizer

_MESSAGE = re.compile(r"messages\[(\d+)\]")
_MOST_KNOWN = 4096
"""Pictures and sounds whose layout is remembered; each takes some kilobytes."""
_MOST_PREPARED_BYTES = 128 << 20
"""Prepared pixels and features that are kept for their encoder, which reads a picture tile by tile."""


class MediaModel(Protocol):
    """The encoders of a model, and how it wants pictures and sounds prepared. Threads may share it."""

    kinds: tuple[MediaKind, ...]
    """Kinds that it reads."""
    pool: "ThreadPool"
    """Threads of its own, so that the model may take steps meanwhile."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Tasks of the model that come with the encoders."""
        ...

    @property
    def identity(self) -> bytes:
        """Identity of the encoders' weights and settings: embeddings of another one are others."""
        ...

    def prepare(self, kind: MediaKind, data: bytes) -> tuple[PreparedMedia, tuple[str, ...]]:
        """Decode and lay out the bytes of a file; also what was left out, in words.

        Raises: RequestError for what cannot be read.
        """

    def encode(self, piece: EncoderInput) -> FloatArray:
        """Return the embeddings, float32[num_rows, width]."""

    def sees_itself(self, piece: EncoderInput) -> bool:
        """True if the decoder's rows of this input see each other in both directions."""

    def close(self) -> None:
        """Release weights and threads."""


@dataclass(frozen=True)
class _Stretch:
    """One encoder input in a prompt, without its pixels."""

    ids: NDArray[np.int32]
    index: int
    """Its number among the pieces of what was prepared."""
    grid: tuple[int, int] | None
    num_positions: int
    sees_itself: bool


@dataclass(frozen=True)
class _Layout:
    """A picture or sound in a prompt."""

    ids: tuple[int, ...]
    """All of them, those of the text around included."""
    stretches: tuple[_Stretch, ...]
    notices: tuple[str, ...]
    """What was left out of it, in words."""


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
        """What was left out of it, in words."""
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
    """Reads the pictures and sounds of one loaded model's conversations. Threads may share it."""

    def __init__(self, model: MediaModel, tokenizer: "Tokenizer") -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._layouts: OrderedDict[str, _Layout] = OrderedDict()
        self._prepared: OrderedDict[str, tuple[PreparedMedia, tuple[str, ...]]] = OrderedDict()
        self._held: WeakValueDictionary[str, _Held] = WeakValueDictionary()

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """Kinds that the model reads."""
        return self._model.kinds

    def read(self, sources: Sequence[MediaSource]) -> list[ReadMedia]:
        """Make the markers of pictures and sounds readable, as long as the result is held.

        Raises: MessageError for a kind that the model does not read; RequestError for what cannot be decoded.
        """
        numbers: Counter[tuple[str, str]] = Counter()
        media = []
        for source in sources:
            message, _, _ = source.path.partition(".content")
            numbers[message, source.kind] += 1
            media.append(ReadMedia(self._hold(source), _place(source, message, numbers[message, source.kind])))
        return media

    def encode_segments(
        self, segments: Segments, *, continues_run: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of texts in a row, with those of the pictures and sounds that were read for their markers.

        Options: as of `Tokenizer.encode_segments`.
        """
        ids: list[int] = []
        position = 0
        for piece in split_at_markers("".join(text for text, _ in segments)):
            end = position + len(piece)
            if is_marker(piece):
                ids += self._held[piece].layout.ids
            else:
                ids += self._tokenizer.encode_segments(
                    cut_segments(segments, position, end),
                    continues_run=continues_run and not position,
                    max_tokens=max_tokens,
                )
            position = end
        return ids

    def runs(self, text: str) -> tuple[MediaRun, ...]:
        """The runs of all pictures and sounds of a text with markers, in order."""
        found = (self._held.get(piece) for piece in split_at_markers(text))
        return tuple(run for one in found if one is not None for run in one.runs)

    def _hold(self, source: MediaSource) -> _Held:
        if source.kind not in self._model.kinds:
            raise MessageError(
                f"{source.path} is {'a picture' if source.kind == 'image' else 'a sound'}, and this model reads "
                f"{' and '.join(('text', *map(_named, self._model.kinds)))}; leave it out, or load a model that does",
                source.path,
                is_unsupported=True,
            )
        marker = source.marker
        with self._lock:
            held = self._held.get(marker)
            layout = self._layouts.get(marker)
            if layout is not None:
                self._layouts.move_to_end(marker)
        if held is not None:
            return held
        if layout is None:
            layout = self._lay_out(source)
        runs = tuple(
            MediaRun(
                stretch.ids,
                partial(self._embed, source, stretch.index),
                stretch.grid,
                stretch.num_positions,
                stretch.sees_itself,
            )
            for stretch in layout.stretches
        )
        with self._lock:
            self._layouts[marker] = layout
            while len(self._layouts) > _MOST_KNOWN:
                self._layouts.popitem(last=False)
            return self._held.setdefault(marker, _Held(layout, runs))

    def _lay_out(self, source: MediaSource) -> _Layout:
        ids: list[int] = []
        stretches = []
        prepared, notices = self._prepare(source)
        for index, piece in enumerate(prepared.pieces):
            if isinstance(piece, str):
                ids += self._tokenizer.encode(piece, add_special=False, parse_special=True)
                continue
            rows = media_ids(self._model.identity, PreparedMedia.from_pieces([piece]).digest, piece.num_rows)
            ids += rows.tolist()
            stretches.append(_Stretch(rows, index, piece.grid, piece.num_positions, self._model.sees_itself(piece)))
        return _Layout(tuple(ids), tuple(stretches), notices)

    def _embed(self, source: MediaSource, index: int) -> FloatArray:
        """The embeddings of one piece of what a source is prepared to."""
        piece = self._prepare(source)[0].pieces[index]
        assert not isinstance(piece, str), "runs are made of encoder inputs"
        return self._model.encode(piece)

    def _prepare(self, source: MediaSource) -> tuple[PreparedMedia, tuple[str, ...]]:
        with self._lock:
            known = self._prepared.get(source.marker)
            if known is not None:
                self._prepared.move_to_end(source.marker)
                return known
        try:
            made = self._model.prepare(source.kind, source.data)
        except ContextLengthError:
            raise
        except RequestError as error:
            raise MessageError(f"{source.path}: {error}", source.path) from None
        with self._lock:
            self._prepared[source.marker] = made
            while len(self._prepared) > 1 and sum(map(_num_bytes, self._prepared.values())) > _MOST_PREPARED_BYTES:
                self._prepared.popitem(last=False)
        return made


def _num_bytes(prepared: tuple[PreparedMedia, tuple[str, ...]]) -> int:
    return sum(piece.values.nbytes for piece in prepared[0].pieces if not isinstance(piece, str))


def _place(source: MediaSource, message: str, number: int) -> str:
    """The words for a picture's place: its number among those of its message."""
    found = _MESSAGE.fullmatch(message)
    where = message if found is None else f"message {int(found[1]) + 1}"
    return f"{'picture' if source.kind == 'image' else 'sound'} {number} of {where}"


def _named(kind: MediaKind) -> str:
    return "pictures" if kind == "image" else "sounds"

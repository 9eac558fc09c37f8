"""Prompts with pictures and sounds, and a scripted model that reads them.

What it keeps of a row is a digest of all that a batch says of it, so that a wrong embedding, position or sight shows as
other tokens.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localinfer.engine.engine import Engine
from localinfer.engine.media import Check, MediaRun, join_pieces, media_content, media_ids
from localinfer.engine.request import TokenEvent
from localinfer.engine.sampling.params import SamplingParams
from localinfer.kernels.program import Batch, Segment
from localinfer.types import FloatArray, TokenIds
from tests.engine.fakes import FakeConfig, FakeModel, FakeProgram

WIDTH = 3
Pieces = Sequence[list[int] | MediaRun]


class MediaProgram(FakeProgram):
    """Keeps the id of a word at its own position, and of everything else a digest."""

    def stored(self, batch: Batch, segment: Segment, row: int, offset: int) -> int:
        position, token_id, media = segment.start_position + offset, int(batch.token_ids[row]), segment.media
        end = position + 1 if segment.key_ends is None else int(segment.key_ends[offset])
        assert position < end <= segment.start_position + segment.num_rows, "a row sees what the batch does not hold"
        given = () if media is None else media.embeddings
        found = [rows[offset - first] for first, rows in given if 0 <= offset - first < len(rows)]
        assert len(found) == (token_id < 0), "a row has an embedding, or a token"
        axes = (position,) * 3 if media is None or media.positions is None else tuple(media.positions[offset].tolist())
        first = position if segment.window_starts is None else int(segment.window_starts[offset])
        assert segment.start_position <= first <= position, "a row sees what its window may have lost"
        if token_id >= 0 and axes == (position,) * 3:
            return token_id
        what = found[0].tobytes() if found else str(token_id).encode()
        text = what + repr((tuple(axis - position for axis in axes), end - position, position - first)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "little", signed=True)


def unstopped() -> None:
    """A check that ends nothing."""


def media_model(*, context_length: int = 96, max_batch_rows: int = 24, max_output_rows: int = 12) -> FakeModel:
    program = MediaProgram(260, max_batch_rows=max_batch_rows, max_output_rows=max_output_rows)
    return FakeModel(program, FakeConfig(260, context_length, takes_media=True))


@dataclass
class Encoder:
    """Makes runs, and counts the embeddings that are asked for."""

    asked: list[str] = field(default_factory=list)

    def picture(
        self,
        name: str,
        rows: int,
        columns: int,
        *,
        sees_itself: bool = False,
        has_grid: bool = True,
        embed: Callable[[Check], FloatArray] | None = None,
        passes_windows: bool = False,
    ) -> MediaRun:
        """A picture whose content is its name and size."""
        count, digest = rows * columns, f"{name} {rows} {columns}".encode()

        def encode(check: Check) -> FloatArray:
            self.asked.append(name)
            return np.random.default_rng(list(digest)).random((count, WIDTH), np.float32)

        grid, taken = ((rows, columns), max(rows, columns)) if has_grid else (None, count)
        ids, content = media_ids(b"encoder", digest, count), media_content(b"encoder", digest)
        return MediaRun(ids, embed or encode, grid, taken, sees_itself, name, passes_windows, content)

    def sound(self, name: str, rows: int) -> MediaRun:
        """A sound, whose rows have a position each."""
        return self.picture(name, rows, 1, has_grid=False)


def random_pieces(encoder: Encoder, rng: np.random.Generator, *, sees_itself: bool, has_grid: bool) -> Pieces:
    """Words, pictures and sounds of few contents, so that texts share beginnings."""
    pieces: list[list[int] | MediaRun] = []
    for _ in range(int(rng.integers(1, 6))):
        kind = int(rng.integers(0, 4))
        if kind == 0:
            pieces.append(encoder.sound(f"sound {rng.integers(2)}", int(rng.integers(1, 8))))
        elif kind < 3:
            rows, columns = (int(side) for side in rng.integers(2, 4, 2))
            name = f"picture {rng.integers(3)}"
            pieces.append(
                encoder.picture(name, rows, columns, sees_itself=sees_itself, has_grid=has_grid and not sees_itself)
            )
        pieces.append(rng.integers(0, 4, int(rng.integers(1, 9))).tolist())
    return pieces


def tokens(engine: Engine, pieces: Pieces, params: SamplingParams, **options: Any) -> list[TokenEvent]:
    """All events of a prompt's completion."""
    ids, runs = join_pieces(pieces)
    return list(engine.generate(ids, params, media=runs, **{"max_tokens": 8, **options}))


def cold(pieces: Pieces, params: SamplingParams, **options: Any) -> list[TokenEvent]:
    """The events of an engine that has seen nothing, and computes a prompt at once."""
    return tokens(Engine(media_model(max_batch_rows=96)), pieces, params, **options)


def ids_of(pieces: Pieces) -> TokenIds:
    return join_pieces(pieces)[0]

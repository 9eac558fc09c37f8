"""Records of prepared pictures and sounds: what encoders read, and how it stands in a prompt."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class EncoderInput:
    """One picture, tile or stretch of sound as its encoder reads it; every one is encoded alone."""

    is_sound: bool
    values: NDArray[Any]
    """Picture: uint8 [height, width, 3], RGB after resizing and before normalisation. Sound: float32, features as
    [frames, mels] or raw samples as [frames, samples]."""
    num_rows: int
    """Embeddings that come of it."""
    grid: tuple[int, int] | None
    """Rows and columns of its embeddings, for decoders with rotary positions in several dimensions; None elsewhere."""
    num_positions: int
    """Positions that it takes in the decoder: num_rows, or the greater side of the grid under M-RoPE."""
    kept: tuple[int, int] | None = None
    """Rows and columns of patches that are kept, from the middle of a picture whose tiles are one input; else None."""
    num_valid: int | None = None
    """Frames of a sound that its encoder's rows attend to; None: all."""
    marks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Numbers of the encoder's marks whose rows stand before and behind the others, and are among `num_rows`."""


@dataclass(frozen=True)
class PreparedMedia:
    """A picture or sound as it stands in a prompt: text of special tokens and inputs of the encoder, in order."""

    pieces: tuple[str | EncoderInput, ...]
    """Each text is tokenized alone, special tokens parsed, without BOS."""
    digest: bytes
    """SHA-256 of the pieces (texts, values, shapes, grids): the identity of the content."""

    @classmethod
    def from_pieces(cls, pieces: Sequence[str | EncoderInput]) -> Self:
        """The record of these pieces, with their digest."""
        digest = hashlib.sha256()
        for piece in pieces:
            if isinstance(piece, str):
                data = memoryview(piece.encode())
                header = f"text {len(data)}"
            else:
                data = np.ascontiguousarray(piece.values).reshape(-1).view(np.uint8).data
                header = f"{piece.values.dtype.str} {piece.values.shape} {piece.is_sound} {piece.num_rows} {piece.grid}"
                header += f" {piece.kept} {piece.num_valid}" if piece.kept or piece.num_valid is not None else ""
                header += f" {piece.marks}" if any(piece.marks) else ""
            digest.update(f"{header} {len(data)}\n".encode())
            digest.update(data)
        return cls(tuple(pieces), digest.digest())

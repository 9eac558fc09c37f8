"""Embeddings of a picture that was cut into tiles and is one again behind its encoder (LLaVA-NeXT, LLaVA-OneVision).

Tiles lie side by side as they were cut; rows and columns of padding are left out, and a learned row ends each line.
Source: LLaVA-NeXT, https://llava-vl.github.io/blog/2024-01-30-llava-next; LLaVA-OneVision, arXiv 2408.03326, section 3.
"""

from collections.abc import Callable
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.models.media.patch_positions import Grid, Resize, resized_table
from localinfer.types import FloatArray

_ENOUGH = 1.1
"""Embeddings are made fewer where their grid has so many times the side that it may have."""

Encode = Callable[[NDArray[np.uint8]], FloatArray]
"""Embeddings of one tile."""


def encode_tiles(
    pixels: NDArray[np.uint8], side: int, kept: Grid, line_end: FloatArray, most_tiles: int, encode: Encode
) -> FloatArray:
    """Embeddings [rows, width] of a picture whose sides are whole tiles.

    side: of a tile in pixels. kept: rows and columns of embeddings that are no padding, in the middle. line_end: put
    behind each line. most_tiles: if the embeddings are more than those of so many tiles, they are made fewer; 0: never.
    """
    height, width = pixels.shape[:2]
    if height % side or width % side or not height or not width:
        raise RequestError(
            f"a picture of {width} x {height} pixels was given to the encoder; wanted tiles of {side}: let its "
            "layout be made first"
        )
    lines = [
        np.concatenate(
            [_square(encode(pixels[top : top + side, left : left + side])) for left in range(0, width, side)], 1
        )
        for top in range(0, height, side)
    ]
    found = np.concatenate(lines)
    if kept[0] > found.shape[0] or kept[1] > found.shape[1] or min(kept) < 1:
        raise RequestError(f"{kept[0]} x {kept[1]} of {found.shape[0]} x {found.shape[1]} embeddings were to be kept")
    top, left = (found.shape[0] - kept[0]) // 2, (found.shape[1] - kept[1]) // 2
    found = np.ascontiguousarray(found[top : top + kept[0], left : left + kept[1]])
    rows, columns = fewer(kept, len(lines[0]), most_tiles)
    found = resized_table(found, (rows, columns), Resize.LINEAR).reshape(rows, columns, -1)
    ends = np.broadcast_to(line_end, (rows, 1, len(line_end)))
    return np.concatenate([found, ends], axis=1).reshape(rows * (columns + 1), -1)


def fewer(grid: Grid, side: int, most_tiles: int) -> Grid:
    """Rows and columns that a grid is shrunk to, if it has more than so many tiles of side x side have."""
    ratio = sqrt(grid[0] * grid[1] / (most_tiles * side**2)) if most_tiles else 0.0
    return (int(grid[0] // ratio), int(grid[1] // ratio)) if ratio > _ENOUGH else grid


def _square(rows: FloatArray) -> FloatArray:
    side = round(len(rows) ** 0.5)
    return rows.reshape(side, side, -1)

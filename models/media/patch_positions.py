"""Places of patches: their order, tables of learned positions brought to a picture's size, and angles of rotation.

All of this is small next to the products, so it is computed here in float64, by gathers and sums in one order.
"""

from collections.abc import Callable
from enum import Enum
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.ops import Pairing
from localinfer.types import FloatArray

Grid = tuple[int, int]
"""Rows and columns."""
Indices = NDArray[np.int64]
Float64Array = NDArray[np.float64]

NOTHING = -1
"""Instead of the number of a row: zeros."""


def blocks_order(grid: Grid, size: int) -> Indices:
    """Numbers in raster order of patches that are grouped by blocks of size x size; rows and columns are multiples."""
    rows, columns = grid
    numbers = np.arange(rows * columns).reshape(rows // size, size, columns // size, size)
    return numbers.transpose(0, 2, 1, 3).reshape(-1)


def joined_patches(grid: Grid, size: int, *, is_transposed: bool = False) -> Indices:
    """Numbers in raster order [blocks, size * size] of the patches of each block; NOTHING beyond the edge.

    is_transposed: blocks follow each other down, not across.
    """
    rows, columns = (-(-side // size) for side in grid)
    numbers = np.full((rows * size, columns * size), NOTHING, np.int64)
    numbers[: grid[0], : grid[1]] = np.arange(grid[0] * grid[1]).reshape(grid)
    blocks = numbers.reshape(rows, size, columns, size).transpose(0, 2, 1, 3)
    return (blocks.transpose(1, 0, 2, 3) if is_transposed else blocks).reshape(rows * columns, size * size)


def window_order(grid: Grid, size: int, side: int) -> tuple[Indices, Indices]:
    """Patches by windows of side x side blocks, and in a window by blocks of size x size, and where each window ends.

    Windows begin at the top left; those at the right and bottom edges are smaller.
    """
    rows, columns = grid[0] // size, grid[1] // size
    blocks = blocks_order(grid, size).reshape(rows, columns, size * size)
    pieces = [
        blocks[top : top + side, left : left + side].reshape(-1)
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces])


def inverse_order(order: Indices) -> Indices:
    """Places of numbers in an order of all of them."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


def gathered(rows: FloatArray, numbers: Indices) -> FloatArray:
    """Rows [len(numbers), count * width] joined of count rows each; zeros where a number is NOTHING.

    numbers: [rows, count]. Rows that are all there in order are not copied.
    """
    width = rows.shape[1]
    flat = numbers.reshape(-1)
    if len(flat) == len(rows) and np.array_equal(flat, np.arange(len(flat))):
        return np.ascontiguousarray(rows).reshape(len(numbers), -1)
    found = rows[np.maximum(flat, 0)]
    found[flat == NOTHING] = 0.0
    return found.reshape(len(numbers), numbers.shape[1] * width)


class Resize(Enum):
    """Ways to bring a table of positions to another size, axis by axis."""

    CORNERS = "corners"
    """Linear, the corners of both on each other (torch's align_corners)."""
    LINEAR = "linear"
    """Linear between the two nearest entries, their middles on each other's, also where the table shrinks."""
    ANTIALIAS = "antialias"
    """Linear, over a support as wide as the step where the table shrinks."""
    BICUBIC = "bicubic"
    """Cubic convolution with a = -0.75 over four entries, which repeat at the edges."""


def _corners(size: int, wanted: int) -> tuple[Indices, Float64Array]:
    x = np.arange(wanted) * ((size - 1) / max(wanted - 1, 1))
    low = np.minimum(x.astype(np.int64), size - 1)
    share = x - low
    return np.stack([low, np.minimum(low + 1, size - 1)], axis=1), np.stack([1.0 - share, share], axis=1)


def _linear(size: int, wanted: int) -> tuple[Indices, Float64Array]:
    x = np.maximum((np.arange(wanted) + 0.5) * (size / wanted) - 0.5, 0.0)
    low = np.minimum(x.astype(np.int64), size - 1)
    share = x - low
    return np.stack([low, np.minimum(low + 1, size - 1)], axis=1), np.stack([1.0 - share, share], axis=1)


def _antialias(size: int, wanted: int) -> tuple[Indices, Float64Array]:
    step = size / wanted
    x, support = (np.arange(wanted) + 0.5) * step, max(1.0, step)
    first = np.maximum((x - support + 0.5).astype(np.int64), 0)
    end = np.minimum((x + support + 0.5).astype(np.int64), size)
    numbers = first[:, None] + np.arange(int((end - first).max()))
    weights = np.maximum(1.0 - np.abs(numbers + 0.5 - x[:, None]) / support, 0.0)
    weights[numbers >= end[:, None]] = 0.0
    return np.minimum(numbers, size - 1), weights / weights.sum(axis=1, keepdims=True)


def _bicubic(size: int, wanted: int) -> tuple[Indices, Float64Array]:
    a = -0.75
    x = (np.arange(wanted) + 0.5) * (size / wanted) - 0.5
    low = np.floor(x).astype(np.int64)
    numbers = low[:, None] + np.arange(-1, 3)
    distance = np.abs(x[:, None] - numbers)
    near = ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0
    far = ((a * distance - 5.0 * a) * distance + 8.0 * a) * distance - 4.0 * a
    return np.clip(numbers, 0, size - 1), np.where(distance <= 1.0, near, far)


_AXES: dict[Resize, Callable[[int, int], tuple[Indices, Float64Array]]] = {
    Resize.CORNERS: _corners,
    Resize.LINEAR: _linear,
    Resize.ANTIALIAS: _antialias,
    Resize.BICUBIC: _bicubic,
}


def resized_table(table: FloatArray, grid: Grid, resize: Resize) -> FloatArray:
    """A table [rows, columns, width] at another size, [rows * columns, width] in raster order; as it is at its own."""
    found: Float64Array | FloatArray = table
    for axis, wanted in enumerate(grid):
        size = table.shape[axis]
        if size == wanted:
            continue
        numbers, weights = _AXES[resize](size, wanted)
        lines = np.moveaxis(found, axis, 0)
        total = np.zeros((wanted, *lines.shape[1:]))
        for tap in range(numbers.shape[1]):
            total += weights[:, tap, None, None] * lines[numbers[:, tap]]
        found = np.moveaxis(total, 0, axis)
    return np.ascontiguousarray(found, np.float32).reshape(grid[0] * grid[1], -1)


class Rotary(Enum):
    """Ways to rotate attention's heads by rows and columns."""

    NONE = "none"
    QWEN = "qwen"
    """Pairs (i, i + d / 2): the first half of them by the row, the second by the column, base 10000."""
    PIXTRAL = "pixtral"
    """Neighbours: the first half by the row at even powers, the second by the column at odd ones, base 10000."""
    COLUMN_FIRST = "column first"
    """Neighbours: the first half by the column, the second by the row, at the same powers, base 10000."""
    GEMMA = "gemma"
    """As COLUMN_FIRST of base 100, with pairs (i, i + d / 4) inside each half of a head."""

    @property
    def pairing(self) -> Pairing:
        """Elements that rotate together."""
        return Pairing.HALVES if self in (Rotary.QWEN, Rotary.GEMMA) else Pairing.ADJACENT

    @property
    def num_parts(self) -> int:
        """Parts of a head that are rotated each by itself."""
        return 2 if self is Rotary.GEMMA else 1


def rotary_angles(
    rotary: Rotary, rows: Indices, columns: Indices, head_size: int, base: float = 0.0
) -> list[FloatArray]:
    """Cosines, then sines, of every pair [patches, 2 * pairs] of each part of a head; base: 0 for the kind's."""
    quarter = head_size // 4
    base = base or (100.0 if rotary is Rotary.GEMMA else 10000.0)
    frequencies = base ** (-4.0 * np.arange(quarter) / head_size)
    by_row, by_column = rows[:, None] * frequencies, columns[:, None] * frequencies
    if rotary is Rotary.PIXTRAL:
        by_column = by_column * base ** (-2.0 / head_size)
    in_order = (by_row, by_column) if rotary in (Rotary.QWEN, Rotary.PIXTRAL) else (by_column, by_row)
    parts = in_order if rotary.num_parts == 2 else (np.concatenate(in_order, axis=1),)
    return [np.concatenate([np.cos(part), np.sin(part)], axis=1).astype(np.float32) for part in parts]


_ENOUGH = 1.1
"""Embeddings are made fewer where their grid has so many times the side that it may have."""

Encode = Callable[[NDArray[np.uint8]], FloatArray]
"""Embeddings of one tile."""


def encode_tiles(
    pixels: NDArray[np.uint8], side: int, kept: Grid, line_end: FloatArray, most_tiles: int, encode: Encode
) -> FloatArray:
    """Embeddings [rows, width] of a picture that is cut into tiles for the encoder and is one again behind it.

    Rows and columns of padding are left out, and a learned row ends each line (LLaVA-NeXT; LLaVA-OneVision, arXiv
    2408.03326, section 3).
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

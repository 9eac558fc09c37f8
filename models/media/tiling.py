"""Tiles: how families cut large pictures, each part of which is encoded alone, beside an overview of the whole.

Sizes are (width, height), and computed in float32 as llama.cpp does it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from localinfer.errors import RequestError
from localinfer.models.media.resizing import (
    Filter,
    Fit,
    Pixels,
    Size,
    pad,
    round_half_away,
    smart_size,
    stretch,
)

_f32 = np.float32
_MOST_SLICES = 9
_LFM2_TILE, _LFM2_TILES, _LFM2_TOLERANCE = 512, range(2, 11), 2


@dataclass(frozen=True)
class Tiling:
    """Parts of a picture that are encoded."""

    whole: tuple[Fit, ...]
    """Steps from the picture to its overview, or to all that there is of it."""
    canvas: tuple[Fit, ...] = ()
    """Steps from the picture to what is cut into tiles; none without tiles."""
    columns: int = 0
    """Tiles across."""
    rows: int = 0
    """Tiles down."""

    @property
    def whole_size(self) -> Size:
        """Size of the overview."""
        return self.whole[-1].canvas

    @property
    def tile_size(self) -> Size:
        """Size of each tile."""
        width, height = self.canvas[-1].canvas
        return width // self.columns, height // self.rows

    def cut(self, picture: Pixels) -> tuple[Pixels, list[Pixels]]:
        """Return the overview of a picture, and its tiles row by row."""
        if not self.canvas:
            return _run(self.whole, picture), []
        canvas = _run(self.canvas, picture)
        shared = len(self.canvas) if self.whole[: len(self.canvas)] == self.canvas else 0
        whole = _run(self.whole[shared:], canvas if shared else picture)
        width, height = self.tile_size
        places = ((row * height, column * width) for row in range(self.rows) for column in range(self.columns))
        return whole, [canvas[top : top + height, left : left + width] for top, left in places]


def _run(steps: Iterable[Fit], picture: Pixels) -> Pixels:
    for step in steps:
        picture = step.apply(picture)
    return picture


def best_candidate(source: Size, candidates: Iterable[Size]) -> Size | None:
    """The candidate that keeps most of a picture's pixels, then the one with the fewest unused, then the first."""
    best, most, least_waste = None, 0, math.inf
    for size in candidates:
        scale = min(_f32(size[0]) / _f32(source[0]), _f32(size[1]) / _f32(source[1]))
        kept = min(int(_f32(source[0]) * scale) * int(_f32(source[1]) * scale), source[0] * source[1])
        waste = size[0] * size[1] - kept
        if kept > most or (kept == most and waste < least_waste):
            best, most, least_waste = size, kept, waste
    return best


def tile_candidate(source: Size, tile: int, candidates: Iterable[Size], filter: Filter) -> Tiling:
    """Tiles of the best candidate, and the overview stretched to a square; the overview alone of what fits one tile."""
    whole = (stretch((tile, tile), filter),)
    best = best_candidate(source, candidates) if max(source) > tile else None
    if best is None:
        return Tiling(whole)
    return Tiling(whole, (pad(source, best, filter),), best[0] // tile, best[1] // tile)


def square_candidates(most: int) -> Iterator[tuple[int, int]]:
    """Columns and rows up to a number a side, without a single tile."""
    return ((columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1) if columns * rows > 1)


def area_candidates(least: int, most: int) -> Iterator[tuple[int, int]]:
    """Columns and rows of InternVL, `least` to `most` tiles in all, and a side."""
    for columns in range(least, most + 1):
        for rows in range(max(-(-least // columns), least), min(most // columns, most) + 1):
            yield columns, rows


def tile_slices(source: Size, side: int, align: int, *, enlarges: bool = False) -> Tiling:
    """MiniCPM-V's slices: a grid near the picture's shape, each cell about as large as a square of this side.

    enlarges: a picture whose area is at most that square's becomes one overview of about its area.
    """
    width, height = source
    if enlarges and _f32(width) * _f32(height) / _f32(side * side) <= 1.0:
        return Tiling((stretch(_of_area(source, side, align, always=True), "bicubic"),))
    if max(source) <= side:
        return Tiling((stretch((side, side), "bicubic"),))
    whole = (stretch(_of_area(source, side, align, always=False), "bicubic"),)
    columns, rows = _slice_grid(source, side)
    cell = _to_multiple(width, columns) // columns, _to_multiple(height, rows) // rows
    cell = _of_area(cell, side, align, always=True)
    canvas = pad(source, (cell[0] * columns, cell[1] * rows), "bicubic")
    return Tiling(whole, (canvas,), columns, rows)


def _of_area(size: Size, side: int, align: int, *, always: bool) -> Size:
    """Multiples of `align` in the shape of a size, of about a square's area; unless `always` only if that is less."""
    width, height = size
    if always or width * height > side * side:
        ratio = _f32(width) / _f32(height)
        height = int(_f32(side) / np.sqrt(ratio))
        width = int(_f32(height) * ratio)
    return _to_multiple(width, align), _to_multiple(height, align)


def _to_multiple(length: int, step: int) -> int:
    return max(int(_f32(round_half_away(_f32(length) / _f32(step))) * _f32(step)), step)


def _slice_grid(source: Size, side: int) -> tuple[int, int]:
    """Columns and rows of the slices: nearly as many as squares have the picture's area, nearest to its shape."""
    area = _f32(source[0]) * _f32(source[1]) / _f32(side * side)
    wanted = min(math.ceil(area), _MOST_SLICES)
    shape = float(_f32(math.log(_f32(source[0]) / _f32(source[1]))))
    best, least = (1, 1), _f32(math.inf)
    for count in (wanted - 1, wanted, wanted + 1):
        if count == 1 or count > _MOST_SLICES:
            continue
        for columns in (number for number in range(1, count + 1) if count % number == 0):
            error = _f32(abs(shape - math.log(columns / (count // columns))))
            if error < least:
                best, least = (columns, count // columns), error
    return best


def tile_lfm2(source: Size, patch: int, align: int, min_pixels: int, max_pixels: int) -> Tiling:
    """LFM2's tiles of a fixed side beside a thumbnail, for pictures of more than twice the greatest area."""
    whole = (stretch(smart_size(source, align, min_pixels, max_pixels), "bilinear"),)
    # Python rounds halves to even, as is done there.
    sides = [max(patch, round(side / align) * align) for side in source]
    if sides[0] * sides[1] <= _LFM2_TOLERANCE * max_pixels:
        return Tiling(whole)
    shape, area = _f32(source[0]) / _f32(source[1]), source[0] * source[1]
    best, least = (1, 1), _f32(math.inf)
    most = _LFM2_TILES[-1]
    grids = ((columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1))
    for columns, rows in sorted((one for one in grids if one[0] * one[1] in _LFM2_TILES), key=math.prod):
        distance = abs(shape - _f32(columns) / _f32(rows))
        is_large = area > 0.5 * _LFM2_TILE * _LFM2_TILE * columns * rows
        if distance < least or (distance == least and is_large):
            best, least = (columns, rows), distance
    canvas = pad(source, (best[0] * _LFM2_TILE, best[1] * _LFM2_TILE), "bilinear")
    return Tiling(whole, (canvas,), *best)


def tile_idefics3(source: Size, tile: int, longest_edge: int, min_pixels: int, max_pixels: int) -> Tiling:
    """Idefics 3's tiles, of which there is always one at least; the overview is made of what is cut.

    Without a longest edge (old files), or with limits of area, the picture is padded to a grid of the nearest size.
    """
    if not longest_edge or min_pixels or max_pixels:
        size = smart_size(source, tile, min_pixels, max_pixels, longest_edge)
        canvas = pad(source, size, "bicubic")
        return Tiling((stretch((tile, tile), "bicubic"),), (canvas,), size[0] // tile, size[1] // tile)
    aspect = source[0] / source[1]
    if source[0] >= source[1]:
        height = int(longest_edge / aspect)
        scaled = longest_edge, height + height % 2
    else:
        width = int(longest_edge * aspect)
        scaled = width + width % 2, longest_edge
    if not min(scaled):
        raise RequestError(
            f"a picture of {source[0]} x {source[1]} pixels would have no pixels in one direction at this model's size "
            f"of {longest_edge}; wanted sides that differ by less: crop it, or set a limit of tokens",
            field="image",
        )
    columns, rows = (-(-side // tile) for side in scaled)
    steps = stretch(scaled, "lanczos"), stretch((columns * tile, rows * tile), "lanczos")
    return Tiling((*steps, stretch((tile, tile), "lanczos")), steps, columns, rows)

"""Sizes and tiles that the processors of Hugging Face folders choose for a picture, from its width and height alone.

Every pair is width and height, or columns and rows. Roundings are those of the published processors: half to even
where they call `round`, and double precision but where it is said.
Source: the models' processors in transformers 5.24, which answer the same numbers.
"""

from collections.abc import Iterable, Sequence
from math import ceil, floor, inf, log, sqrt

import numpy as np

from localinfer.errors import RequestError

Size = tuple[int, int]

_MOST_RATIO = 200
_NAFLEX_STEP = 1e-5
_NAFLEX_SCALE = 100.0
_COVERED = 0.9
_LONGEST = 4096
"""Side that Idefics 3 exceeds under no setting."""


def refuse(width: int, height: int, wanted: str) -> RequestError:
    """An error, to be raised by the caller, about a picture whose shape its model cannot read."""
    return RequestError(f"a picture has {width} x {height} pixels; wanted {wanted}. Cut or resize the picture")


def area_between(width: int, height: int, factor: int, least: int, most: int, frames: int = 1) -> Size:
    """Sides in multiples of a factor, the aspect kept as far as that goes, whose area is within limits (Qwen's rule).

    frames: the area counts so many times (GLM).
    """
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise refuse(width, height, f"a side at most {_MOST_RATIO} times the other")
    sides = [round(side / factor) * factor for side in (width, height)]
    area = frames * sides[0] * sides[1]
    if area > most:
        scale = sqrt(frames * width * height / most)
        return _pair(max(factor, floor(side / scale / factor) * factor) for side in (width, height))
    if area < least:
        scale = sqrt(least / (frames * width * height))
        return _pair(ceil(side * scale / factor) * factor for side in (width, height))
    return _pair(sides)


def at_least(width: int, height: int, side: int) -> Size:
    """A picture with a side below a limit, enlarged until it has none (GLM)."""
    if min(width, height) >= side:
        return width, height
    scale = max(side / height, side / width)
    return int(width * scale), int(height * scale)


def at_least_rounded(width: int, height: int, side: int) -> Size:
    """A picture with a side below a limit, enlarged until it has none, the height before the width (PaddleOCR)."""
    if height < side:
        width, height = round(width * side / height), side
    if width < side:
        width, height = side, round(height * side / width)
    return width, height


def filling_budget(width: int, height: int, unit: int, budget: int) -> Size:
    """Sides in multiples of a unit that fill a budget of units as far as the aspect lets them (Gemma 4)."""
    scale = sqrt(budget * unit * unit / (width * height))
    columns, rows = floor(scale * width / unit), floor(scale * height / unit)
    if rows == 0 == columns:
        raise refuse(width, height, "a picture that fills one unit of its model")
    if rows == 0:
        rows, columns = 1, min(width // height, budget)
    elif columns == 0:
        columns, rows = 1, min(height // width, budget)
    if columns * rows > budget:
        raise refuse(width, height, f"a picture of at most {budget} embeddings")
    return columns * unit, rows * unit


def below_edge(width: int, height: int, edge: Size, unit: int) -> Size:
    """A picture shrunk to a longest edge where it is larger, and its sides then taken up to multiples (Pixtral)."""
    ratio = max(width / edge[0], height / edge[1])
    if ratio > 1:
        across, down = floor(width / ratio), floor(height / ratio)
        if not across or not down:
            raise refuse(width, height, "a picture that keeps a pixel of its shorter side when it is resized")
        width, height = across, down
    return _pair(((side - 1) // unit + 1) * unit for side in (width, height))


def longest_edge(width: int, height: int, edge: int) -> Size:
    """A picture with this longest edge, the other side made even (Idefics 3)."""
    aspect = width / height
    if width >= height:
        width, height = edge, int(edge / aspect)
        height += height % 2
    else:
        width, height = int(edge * aspect), edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if max(width, height) <= _LONGEST:
        return width, height
    if width >= height:
        return _LONGEST, max(int(_LONGEST / aspect), 1)
    return max(int(_LONGEST * aspect), 1), _LONGEST


def up_to_tiles(width: int, height: int, tile: int) -> Size:
    """Sides in whole tiles, the longer first, so that the other follows from it (Idefics 3)."""
    aspect = width / height
    if width >= height:
        width = ceil(width / tile) * tile
        return width, ceil(int(width / aspect) / tile) * tile
    height = ceil(height / tile) * tile
    return ceil(int(height * aspect) / tile) * tile, height


def shortest_edge(width: int, height: int, edge: int) -> Size:
    """A picture with this shortest edge (CLIP)."""
    return (edge, int(edge * height / width)) if width <= height else (int(edge * width / height), edge)


def grids(least: int, most: int) -> list[Size]:
    """Columns and rows of so many tiles: fewer tiles first, and fewer columns first among equals."""
    pairs = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return sorted((pair for pair in pairs if pair[0] * pair[1] >= least), key=lambda pair: pair[0] * pair[1])


def nearest_aspect(width: int, height: int, candidates: Iterable[Size], tile: Size) -> Size:
    """The grid whose aspect is nearest; of equal ones a larger, if the picture has half its pixels (InternVL)."""
    best, least = (1, 1), inf
    for columns, rows in candidates:
        difference = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * tile[0] * tile[1] * columns * rows
        if difference < least or (difference == least and is_filled):
            best, least = (columns, rows), difference
    return best


def least_enlarged(width: int, height: int, candidates: Sequence[Size], tile: int) -> Size:
    """The grid into which a picture fits with the least enlargement; the least shrunk if none (Command-A Vision)."""
    scales = [min(columns * tile / width, rows * tile / height) for columns, rows in candidates]
    if all(scale < 1 for scale in scales):
        return candidates[scales.index(max(scales))]
    enlarged = [scale if scale >= 1 else inf for scale in scales]
    return candidates[enlarged.index(min(enlarged))]


def covering_grid(width: int, height: int, candidates: Sequence[Size], tile: int) -> Size:
    """The fewest tiles that cover nine tenths of a picture without shrinking, else those that cover most (Ovis 2).

    The published code cuts rows by a candidate's first number, and reads the result as columns; so does this.
    """
    found = []
    for candidate in candidates:
        rows, columns = candidate
        heights = [height // rows] * (rows - 1) + [height - height // rows * (rows - 1)]
        widths = [width // columns] * (columns - 1) + [width - width // columns * (columns - 1)]
        covered = sum(_covered(one, other, tile) for other in heights for one in widths) / (width * height)
        found.append((candidate, covered))
    enough = [(grid, covered) for grid, covered in found if covered > _COVERED]
    if enough:
        return min(enough, key=lambda one: (one[0][0] * one[0][1], -one[1]))[0]
    return min(found, key=lambda one: (-one[1], one[0][0] * one[0][1]))[0]


def _covered(width: int, height: int, side: int) -> float:
    longer, shorter = max(width, height), min(width, height)
    return longer * shorter if longer <= side else side * (shorter / longer * side)


def canvases(most: int) -> list[Size]:
    """Columns and rows of all canvases of up to so many tiles, in the order in which Llama 4 compares them."""
    by_aspect: dict[float, list[Size]] = {}
    for count in range(most, 0, -1):
        for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
            by_aspect.setdefault(rows / (count // rows), []).append((count // rows, rows))
    return [canvas for same in by_aspect.values() for canvas in same]


def best_canvas(width: int, height: int, candidates: Sequence[Size], tile: int, takes_largest: bool) -> Size:
    """The canvas on which a picture is least enlarged, or least shrunk; the smallest of several (Llama 4)."""
    # Published code compares in single precision, where different canvases can be equal.
    sides = np.array(candidates, np.float32) * np.float32(tile)
    scales = np.minimum(sides[:, 0] / np.float32(width), sides[:, 1] / np.float32(height))
    enlarged = scales[scales >= 1]
    wanted = scales.max() if takes_largest or not len(enlarged) else enlarged.min()
    chosen = [canvas for canvas, scale in zip(candidates, scales, strict=True) if scale == wanted]
    return min(chosen, key=lambda canvas: canvas[0] * canvas[1])


def inside(width: int, height: int, canvas: Size, largest: Size | None) -> Size:
    """The largest size of the same aspect inside a canvas, and inside `largest` if given, rounded down (Llama 4).

    Published code has the canvas's sides in single precision, where a product may fall below a whole number.
    """
    limits = canvas if largest is None else largest
    sides = min(limits[0], canvas[0]), min(limits[1], canvas[1])
    is_single = [largest is None or limit > side for limit, side in zip(limits, canvas, strict=True)]
    across, down = (
        _quotient(side, length, single) for side, length, single in zip(sides, (width, height), is_single, strict=True)
    )
    is_wide = np.float32(across) < np.float32(down) if any(is_single) else across < down
    if is_wide:
        return max(sides[0], 1), max(min(floor(_product(height, across, is_single[0])), sides[1]), 1)
    return max(min(floor(_product(width, down, is_single[1])), sides[0]), 1), max(sides[1], 1)


def _quotient(a: int, b: int, is_single: bool) -> float:
    return float(np.float32(a) / np.float32(b)) if is_single else a / b


def _product(a: int, b: float, is_single: bool) -> float:
    return float(np.float32(a) * np.float32(b)) if is_single else a * b


def inside_rounded_up(width: int, height: int, frame: Size) -> Size:
    """The same rounded up (LLaVA-NeXT)."""
    across, down = frame[0] / width, frame[1] / height
    if across < down:
        return frame[0], min(ceil(height * across), frame[1])
    return min(ceil(width * down), frame[0]), frame[1]


def best_pinpoint(width: int, height: int, candidates: Iterable[Size]) -> Size:
    """The size that keeps most of a picture's pixels, and of these wastes fewest of its own (LLaVA-NeXT)."""
    best, most, least = (0, 0), 0, inf
    for across, down in candidates:
        scale = min(across / width, down / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = across * down - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = (across, down), kept, wasted
    if not most:
        raise refuse(width, height, "a picture that keeps a pixel of its shorter side when it is resized")
    return best


def unpadded(width: int, height: int, grid: Size) -> Size:
    """Columns and rows of a grid of patches that are of the picture in its middle (LLaVA-NeXT)."""
    columns, rows = grid
    if width / height > columns / rows:
        return columns, rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2
    return columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2, rows


def never_enlarged(width: int, height: int, patch: int, most_patches: int, side_patches: int) -> Size:
    """A picture shrunk until its patches and those of its sides are within limits (Kimi)."""
    patches = max(1, width // patch) * max(1, height // patch)
    limit = side_patches * patch
    scale = min(1.0, sqrt(most_patches / patches), limit / height, limit / width)
    return _pair(min(max(1, int(side * scale)), limit) for side in (width, height))


def aligned(width: int, height: int, unit: int) -> Size:
    """Sides taken up to multiples of a unit."""
    return _pair(-(-side // unit) * unit for side in (width, height))


def overview(width: float, height: float, side: int, unit: int, may_enlarge: bool) -> Size:
    """A picture of about the area of a square where it is larger, or may be enlarged, in multiples (MiniCPM-V)."""
    if width * height > side * side or may_enlarge:
        aspect = width / height
        height = int(side / sqrt(aspect))
        width = int(height * aspect)
    return _pair(max(round(one / unit) * unit, unit) for one in (width, height))


def slices(width: int, height: int, most: int, side: int) -> Size | None:
    """Columns and rows of slices, by the least difference of the aspects' logarithms; None for one (MiniCPM-V)."""
    count = min(ceil(width * height / (side * side)), most)
    if count <= 1:
        return None
    best, least = (1, 1), inf
    for number in (count - 1, count, count + 1):
        if number == 1 or number > most:
            continue
        for rows in (rows for rows in range(1, number + 1) if number % rows == 0):
            difference = abs(log(width / height) - log(number // rows / rows))
            if difference < least or (difference == least and rows > best[1]):
                best, least = (number // rows, rows), difference
    return best


def slice_canvas(width: int, height: int, grid: Size, side: int, unit: int) -> Size:
    """The size that is cut into a grid of slices, each of about the area of a square (MiniCPM-V)."""
    cell = [
        max(round(length / count) * count, count) / count for length, count in zip((width, height), grid, strict=True)
    ]
    found = overview(cell[0], cell[1], side, unit, True)
    return found[0] * grid[0], found[1] * grid[1]


def most_patches(width: int, height: int, patch: int, most: int) -> Size:
    """The largest scale, found by halving, at which a picture has so many patches at most (SigLIP 2)."""

    def scaled(scale: float) -> Size:
        return _pair(max(patch, ceil(side * scale / patch) * patch) for side in (width, height))

    low, high = _NAFLEX_STEP / 10, _NAFLEX_SCALE
    while high - low >= _NAFLEX_STEP:
        middle = (low + high) / 2
        across, down = scaled(middle)
        if (across // patch) * (down // patch) <= most:
            low = middle
        else:
            high = middle
    return scaled(low)


def crops(width: int, height: int, least_side: int, most: int, least_ratio: float) -> list[tuple[int, int, int, int]]:
    """Boxes (left, top, width, height) into which a long picture is cut along it; none for others (Gemma 3)."""
    longer, shorter = max(width, height), min(width, height)
    if longer / shorter < least_ratio:
        return []
    count = min(max(2, min(longer // least_side, floor(longer / shorter + 0.5))), most)
    length = ceil(longer / count)
    if min(length, shorter) < least_side:
        return []
    starts = [length * index for index in range(count)]
    spans = [(start, max(0, min(length, longer - start))) for start in starts]
    if width >= height:
        return [(start, 0, span, height) for start, span in spans]
    return [(0, start, width, span) for start, span in spans]


def _pair(values: Iterable[int]) -> Size:
    first, second = values
    return first, second

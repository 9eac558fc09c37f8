"""Resizing of pictures to the byte as Pillow resizes, and the sizes that encoders of free sizes ask for.

Sizes are (width, height). They are computed in float32, step by step as llama.cpp does it, because pictures have to
become as many rows as there. Every step works on bytes and rounds to bytes.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.system.extras import require

Size = tuple[int, int]
"""Width and height in pixels."""
Color = tuple[int, int, int]
"""Red, green and blue."""
Pixels = NDArray[np.uint8]
"""RGB of shape [height, width, 3]."""
Filter = Literal["bilinear", "bicubic", "lanczos"]
"""Names of Pillow's filters, which average when they shrink; bicubic with a = -0.5."""

BLACK: Color = (0, 0, 0)
_MAX_SIDE = 1 << 16
_MAX_AREA = 1 << 28
_PIXELS_A_STRIPE, _NUM_THREADS = 1 << 20, 2
_f32 = np.float32


def check_resized(size: Size, most: int = _MAX_AREA) -> None:
    """Refuse a size that a picture would be resized to, with sides of more than `most` pixels or too large an area.

    Raises: RequestError.
    """
    width, height = size
    if not (0 < width <= most and 0 < height <= most and width * height <= _MAX_AREA):
        raise RequestError(
            f"the picture would be resized to {width} x {height} pixels for this model; wanted sides of 1 to {most} "
            f"and at most {_MAX_AREA} pixels: crop it to a less extreme shape, or lower the limits of tokens",
            field="image",
        )


@dataclass(frozen=True)
class Fit:
    """A step: a picture is resized, and laid on a canvas where that is larger."""

    content: Size
    """Size that the picture is resized to."""
    canvas: Size
    """Size of the result."""
    offset: tuple[int, int]
    """Left and top edge of the picture on the canvas."""
    filter: Filter
    """Kind of resizing."""
    color: Color = BLACK
    """Of the canvas around the picture."""

    def __post_init__(self) -> None:
        for size in (self.content, self.canvas):
            check_resized(size, _MAX_SIDE)

    def apply(self, picture: Pixels) -> Pixels:
        """Resize a picture, and lay it on the canvas."""
        resized = resize(picture, self.content, self.filter)
        if self.canvas == self.content:
            return resized
        (left, top), (width, height) = self.offset, self.content
        result = np.empty((self.canvas[1], self.canvas[0], 3), np.uint8)
        result[:] = self.color
        result[top : top + height, left : left + width] = resized
        return result


def resize(picture: Pixels, size: Size, filter: Filter) -> Pixels:
    """Resize to a size without regard to the shape, first the columns and then the rows."""
    height, width = picture.shape[:2]
    if (width, height) == size:
        return picture
    require("media", "Resizing a picture", ("PIL",))
    from PIL import Image

    resampling = Image.Resampling[filter.upper()]

    def resized(pixels: Pixels, width: int, height: int) -> Pixels:
        return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), resampling))

    # One call may do the rows first, which rounds to other bytes. Rows of their own can be done at the same time.
    step = max(1, _PIXELS_A_STRIPE // width)
    stripes = [picture[start : start + step] for start in range(0, height, step)]
    if len(stripes) == 1:
        return resized(resized(picture, size[0], height), *size)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        narrow = list(threads.map(lambda stripe: resized(stripe, size[0], len(stripe)), stripes))
    return resized(np.concatenate(narrow), *size)


def stretch(size: Size, filter: Filter) -> Fit:
    """The step to a size without regard to the shape."""
    return Fit(size, size, (0, 0), filter)


def pad(source: Size, size: Size, filter: Filter, color: Color = BLACK) -> Fit:
    """The step to the middle of a canvas, as large as fits.

    Sides are rounded up, so one of them may exceed the shape by a pixel.
    """
    scale = min(_f32(size[0]) / _f32(source[0]), _f32(size[1]) / _f32(source[1]))
    width, height = (min(math.ceil(_f32(side) * scale), most) for side, most in zip(source, size, strict=True))
    return Fit((width, height), size, ((size[0] - width) // 2, (size[1] - height) // 2), filter, color)


def round_half_away(value: Any) -> int:
    """Round halves away from zero, of a float32 without its half being rounded."""
    return int(math.floor(float(value) + 0.5))


def smart_size(source: Size, align: int, min_pixels: int, max_pixels: int, longest_edge: int = 0) -> Size:
    """The nearest size of multiples of `align` within limits of area, by "smart resize"; a limit of 0 is none.

    longest_edge: sides are first scaled, also up, so that the longer one has this length, and rounded up.
    Nothing bounds the shape: a thin picture exceeds the greatest area, as no side is less than `align`.
    """
    step, (width, height) = _f32(align), (_f32(side) for side in source)
    if longest_edge:
        scale = min(_f32(longest_edge) / width, _f32(longest_edge) / height)
        sides = [math.ceil(side * scale / step) * align for side in (width, height)]
    else:
        sides = [max(align, round_half_away(side / step) * align) for side in (width, height)]
    if max_pixels and sides[0] * sides[1] > max_pixels:
        shrink = np.sqrt(height * width / _f32(max_pixels))
        sides = [max(align, math.floor(side / shrink / step) * align) for side in (width, height)]
    elif min_pixels and sides[0] * sides[1] < min_pixels:
        grow = np.sqrt(_f32(min_pixels) / (height * width))
        sides = [math.ceil(side * grow / step) * align for side in (width, height)]
    return sides[0], sides[1]


def top_left_fit(source: Size, align: int, min_pixels: int, max_pixels: int, filter: Filter) -> Fit:
    """The step of GLM-5V: at the top left of a canvas of multiples of `align` within limits of area, in float64.

    The picture is made larger only if its own area is below the least.
    """
    width, height = source

    def aligned(*size: int) -> Size:
        return -(-size[0] // align) * align, -(-size[1] // align) * align

    canvas = aligned(width, height)
    if canvas[0] * canvas[1] < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        canvas = aligned(math.ceil(width * grow), math.ceil(height * grow))
    if canvas[0] * canvas[1] > max_pixels:
        canvas, low, high = (align, align), 1, height
        while low <= high:
            middle = (low + high) // 2
            tried = aligned(max(1, width * middle // height), middle)
            if tried[0] * tried[1] <= max_pixels:
                canvas, low = tried, middle + 1
            else:
                high = middle - 1
    scale = min(canvas[1] / height, canvas[0] / width)
    if height * width >= min_pixels:
        scale = min(1.0, scale)
    content = [max(1, min(most, math.floor(side * scale))) for side, most in zip(source, canvas, strict=True)]
    return Fit((content[0], content[1]), canvas, (0, 0), filter)

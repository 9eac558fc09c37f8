"""Pieces of a picture as encoders read them: what is done to the whole for each, known from its size alone.

Processors resize by Pillow or by torch, both with an average over what shrinks. Torch's weights have 15 bits and its
passes go over columns and then rows, so that its bytes are others, by a few levels where one side shrinks and the other
grows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.models.media.folder_sizes import Size
from localinfer.models.media.records import EncoderInput
from localinfer.models.media.resizing import check_resized
from localinfer.system.extras import require

Box = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""


@dataclass(frozen=True)
class Canvas:
    """A black picture on which another is put."""

    size: Size
    """Its width and height."""
    offset: tuple[int, int]
    """Left top corner of the other; negative: so much of it is cut off."""


@dataclass(frozen=True)
class Cut:
    """One input of an encoder, made of a picture by these steps in their order."""

    resizes: tuple[Size, ...]
    """Widths and heights to resize to, one after the other."""
    num_rows: int
    """Embeddings that come of it."""
    part: Box | None = None
    """Box that is cut out first; None: all."""
    canvas: Canvas | None = None
    """Ground that the resized picture is put on; None: none."""
    tile: Box | None = None
    """Box that is cut out last; None: all."""
    grid: Size | None = None
    """Columns and rows of its embeddings, for decoders with positions in several dimensions."""
    kept: Size | None = None
    """Columns and rows of patches that are kept of several tiles, from their middle."""
    marks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Numbers of the encoder's marks before and behind it, whose rows count as its own."""

    def __post_init__(self) -> None:
        for size in self.resizes if self.canvas is None else (*self.resizes, self.canvas.size):
            check_resized(size)
        if self.num_rows < 1:
            raise RequestError(
                "no embedding would come of a picture by the sizes in the model's processor; wanted one at least. "
                "Download the folder again",
                field="image",
            )

    @property
    def size(self) -> Size:
        """Width and height of the input."""
        if self.tile is not None:
            return self.tile[2:]
        if self.canvas is not None:
            return self.canvas.size
        assert self.resizes or self.part is not None, "an input is of a size that its family gives"
        return self.resizes[-1] if self.resizes else self.part[2:]  # type: ignore[index]


Plan = Callable[[int, int, int], tuple[str | Cut, ...]]
"""The pieces of a picture of a width and height, the first of a prompt being number 0."""
Resize = Callable[[NDArray[np.uint8], int, int], NDArray[np.uint8]]
"""A picture resized to a width and height."""


@dataclass
class Workbench:
    """Makes the cuts of one picture, each common step of theirs once."""

    picture: NDArray[np.uint8]
    """RGB, [height, width, 3]."""
    resize: Resize
    """The family's filter."""
    _resized: dict[tuple[Box | None, tuple[Size, ...]], NDArray[np.uint8]] = field(default_factory=dict)

    def make(self, cut: Cut) -> NDArray[np.uint8]:
        """The picture of a cut."""
        found = self._after(cut.part, cut.resizes)
        if cut.canvas is not None:
            found = _placed(found, cut.canvas)
        return np.ascontiguousarray(found if cut.tile is None else _boxed(found, cut.tile))

    def _after(self, part: Box | None, resizes: tuple[Size, ...]) -> NDArray[np.uint8]:
        if not resizes:
            return self.picture if part is None else _boxed(self.picture, part)
        found = self._resized.get((part, resizes))
        if found is None:
            width, height = resizes[-1]
            found = self.resize(self._after(part, resizes[:-1]), width, height)
            self._resized[part, resizes] = found
        return found


BILINEAR, BICUBIC = 2, 3
"""Pillow's numbers of the filters that torch has for bytes."""
_MOST_BITS = 22


def resize_as_pillow(picture: NDArray[np.uint8], width: int, height: int, *, resample: int) -> NDArray[np.uint8]:
    """A picture resized in one call of Pillow, whose numbers of filters the files have."""
    require("media", "Resizing a picture", ("PIL",))
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(picture))
    return np.asarray(image.resize((width, height), Image.Resampling(resample)))


def resize_as_torch(picture: NDArray[np.uint8], width: int, height: int, *, resample: int) -> NDArray[np.uint8]:
    """A picture resized to torch's bytes; by Pillow for a filter that torch has not."""
    if resample not in (BILINEAR, BICUBIC):
        return resize_as_pillow(picture, width, height, resample=resample)
    return _resized_axis(_resized_axis(picture, 1, width, resample), 0, height, resample)


def _resized_axis(picture: NDArray[np.uint8], axis: int, wanted: int, resample: int) -> NDArray[np.uint8]:
    size = picture.shape[axis]
    if size == wanted:
        return picture
    numbers, weights, bits = _whole_weights(size, wanted, resample)
    lines = np.moveaxis(picture, axis, 0)
    total = np.full((wanted, *lines.shape[1:]), 1 << (bits - 1), np.int32)
    for tap in range(numbers.shape[1]):
        total += weights[:, tap, None, None] * lines[numbers[:, tap]]
    return np.ascontiguousarray(np.moveaxis(np.clip(total >> bits, 0, 255).astype(np.uint8), 0, axis))


def _whole_weights(size: int, wanted: int, resample: int) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """The entries that each result is made of, their weights as whole numbers, and the bits that these are shifted."""
    step = size / wanted
    stretch = max(step, 1.0)
    support = (1.0 if resample == BILINEAR else 2.0) * stretch
    centers = step * (np.arange(wanted) + 0.5)
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centers + support + 0.5).astype(np.int64), size)
    numbers = first[:, None] + np.arange(int((end - first).max()))
    distance = np.abs((numbers - centers[:, None] + 0.5) / stretch)
    weights = np.maximum(1.0 - distance, 0.0) if resample == BILINEAR else _cubic(distance)
    weights[numbers >= end[:, None]] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    greatest, bits = weights.max(), 0
    while bits < _MOST_BITS and int(0.5 + greatest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    scaled = weights * (1 << bits)
    whole = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32)
    return np.minimum(numbers, size - 1), whole, bits


def _cubic(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cubic convolution with a = -0.5 (Keys, 1981)."""
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
    return np.where(distance < 1.0, near, np.where(distance < 2.0, far, 0.0))


def encoder_input(cut: Cut, values: NDArray[np.uint8]) -> EncoderInput:
    """The input of an encoder that a cut makes."""
    columns, rows = cut.grid or (0, 0)
    return EncoderInput(
        is_sound=False,
        values=values,
        num_rows=cut.num_rows,
        grid=None if cut.grid is None else (rows, columns),
        num_positions=cut.num_rows if cut.grid is None else max(cut.grid),
        kept=None if cut.kept is None else (cut.kept[1], cut.kept[0]),
        marks=cut.marks,
    )


def tiles(
    resizes: tuple[Size, ...], grid: Size, tile: Size, num_rows: int, canvas: Canvas | None = None
) -> list[list[Cut]]:
    """The tiles of a resized picture, rows of columns."""
    columns, rows = grid
    return [
        [
            Cut(resizes, num_rows, canvas=canvas, tile=(column * tile[0], row * tile[1], *tile))
            for column in range(columns)
        ]
        for row in range(rows)
    ]


def num_embeddings(pieces: Sequence[str | Cut]) -> int:
    """Embeddings of all inputs among the pieces."""
    return sum(piece.num_rows for piece in pieces if isinstance(piece, Cut))


def _boxed(picture: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
    left, top, width, height = box
    return picture[top : top + height, left : left + width]


def _placed(picture: NDArray[np.uint8], canvas: Canvas) -> NDArray[np.uint8]:
    height, width = picture.shape[:2]
    found = np.zeros((canvas.size[1], canvas.size[0], 3), np.uint8)
    left, top = canvas.offset
    across, down = slice(max(0, -left), canvas.size[0] - left), slice(max(0, -top), canvas.size[1] - top)
    seen = picture[down, across]
    found[max(0, top) : max(0, top) + seen.shape[0], max(0, left) : max(0, left) + seen.shape[1]] = seen
    return found

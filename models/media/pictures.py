"""Pictures from files, bytes, images of Pillow and arrays, as RGB bytes, within limits.

A file's size is known, and refused if it is too large, before anything of it is decoded. What is transparent is shown
on white; orientations that cameras note are applied; of several frames the first is taken.
"""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import OutOfMemoryError, RequestError
from localinfer.models.media.picture_headers import PictureHeader, read_header, read_orientation
from localinfer.models.media.resizing import Pixels
from localinfer.models.media.sources import Source, read_bytes
from localinfer.system.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

PictureSource: TypeAlias = "Source | NDArray[Any] | Image"
"""A path, bytes, an open file, an image of Pillow, or an array: uint8 or uint16, of shape [height, width] or with 1, 3
or 4 channels."""

# Classes of Pillow by format. Its own choice of a class would take those of other packages, too.
_DECODERS = {
    "PNG": ("PngImagePlugin", "PngImageFile"),
    "JPEG": ("JpegImagePlugin", "JpegImageFile"),
    "WEBP": ("WebPImagePlugin", "WebPImageFile"),
    "GIF": ("GifImagePlugin", "GifImageFile"),
    "BMP": ("BmpImagePlugin", "BmpImageFile"),
}
_MOST_PASSES = 16
"""Over as many pixels as a picture may have: progressive JPEG files can ask for any number."""
_PIXELS_AT_ONCE = 1 << 20
_WHITE = 255


@dataclass(frozen=True)
class PictureLimits:
    """Greatest sizes of a picture as it is given."""

    max_bytes: int = 64 << 20
    """Bytes of its file."""
    max_pixels: int = 1 << 26
    """Pixels; 67 million by default."""
    max_side: int = 65_535
    """Pixels across or down."""

    def check(self, width: int, height: int) -> None:
        """Refuse a size. Raises: RequestError."""
        if max(width, height) > self.max_side or width * height > self.max_pixels:
            raise RequestError(
                f"the picture has {width} x {height} pixels; wanted at most {self.max_pixels} in all, and "
                f"{self.max_side} a side: make it smaller, or raise the limit",
                field="image",
            )


@dataclass(frozen=True)
class Picture:
    """A decoded picture."""

    pixels: Pixels
    """RGB, uint8 [height, width, 3]."""
    notices: tuple[str, ...] = ()
    """Parts that were left out, in words."""


@dataclass(frozen=True)
class OpenedPicture:
    """A picture whose size is known, and which may not be decoded yet."""

    width: int
    """Pixels across when it is upright."""
    height: int
    """Pixels down."""
    decode: Callable[[], Picture]
    """Decodes it. Raises: RequestError for a damaged file; MissingPackageError, OutOfMemoryError."""


def read_picture(source: PictureSource, limits: PictureLimits | None = None) -> Picture:
    """Read and decode a picture. Raises: as `open_picture` and `OpenedPicture.decode`."""
    return open_picture(source, limits).decode()


def open_picture(source: PictureSource, limits: PictureLimits | None = None) -> OpenedPicture:
    """Find out a picture's size. Raises: RequestError for what is no picture, exceeds the limits or cannot be read."""
    limits = limits or PictureLimits()
    if isinstance(source, np.ndarray):
        pixels = _from_array(source)
        limits.check(*pixels.shape[1::-1])
        return OpenedPicture(pixels.shape[1], pixels.shape[0], lambda: Picture(pixels))
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(source, pillow.Image):
        return _open_image(source, limits)
    header = read_header(read_bytes(source, "image", limits.max_bytes))  # type: ignore[arg-type]
    width, height = header.size
    limits.check(width, height)
    if header.num_passes * width * height > _MOST_PASSES * limits.max_pixels:
        raise RequestError(
            f"the picture has {width} x {height} pixels in {header.num_passes} scans; wanted fewer scans of so many "
            "pixels: save it as a baseline JPEG file",
            field="image",
        )
    return OpenedPicture(width, height, lambda: _decode(header))


def _open_image(image: Any, limits: PictureLimits) -> OpenedPicture:
    """An image of Pillow, perhaps of a file that is not decoded yet."""
    exif = image.info.get("exif")
    orientation = read_orientation(exif) if isinstance(exif, bytes) else 1
    width, height = image.size[::-1] if orientation >= 5 else image.size
    if not (width and height):
        raise RequestError("the picture is an image without pixels; wanted at least one", field="image")
    limits.check(width, height)
    kind = "Pillow's image"
    return OpenedPicture(width, height, lambda: Picture(_upright(_guarded(kind, lambda: _to_rgb(image)), orientation)))


def _decode(header: PictureHeader) -> Picture:
    require("media", "Reading a picture", ("PIL",))
    module, name = _DECODERS[header.format]

    def run() -> tuple[Pixels, bool]:
        with getattr(import_module(f"PIL.{module}"), name)(io.BytesIO(header.data)) as image:
            if image.size != (header.stored_width, header.stored_height):
                raise ValueError(f"its parts give sizes of {image.size}")
            image.load()
            return _to_rgb(image), bool(getattr(image, "is_animated", False))

    pixels, has_frames = _guarded(f"the {header.format} picture", run)
    notice = "the picture is animated: its first frame is used"
    return Picture(_upright(pixels, header.orientation), (notice,) if has_frames or header.has_frames else ())


def _guarded(what: str, run: Callable[[], Any]) -> Any:
    """Run a decoder; its errors are raised in our words."""
    try:
        return run()
    except MemoryError as error:
        raise OutOfMemoryError(f"{what} needs more memory than there is to be decoded: make it smaller") from error
    except RequestError:
        raise
    # Decoders raise errors of many kinds for damaged files.
    except Exception as error:
        if type(error).__name__.startswith("DecompressionBomb"):
            raise RequestError(
                f"{what} has more pixels than Pillow takes in this program (PIL.Image.MAX_IMAGE_PIXELS); wanted fewer: "
                "make it smaller, or raise that limit",
                field="image",
            ) from error
        reason = ascii(str(error))[1:-1]
        raise RequestError(
            f"{what} cannot be decoded ({type(error).__name__}: {reason:.200}); wanted a whole file: save or send it "
            "again",
            field="image",
        ) from error


def _to_rgb(image: Any) -> Pixels:
    """The bytes of an image in any of Pillow's modes."""
    mode = image.mode
    if mode.startswith("I;16") or mode == "I":
        # Pillow opens 16 bits as either; their upper halves are what it takes of 16 bits in color.
        return _with_channels(np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8))
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        alpha = image if mode == "RGBA" else image.convert("RGBA")
        if alpha.getextrema()[3] != (_WHITE, _WHITE):
            return _on_white(np.asarray(alpha))
    return np.asarray(image if mode == "RGB" else image.convert("RGB"))


def _on_white(rgba: NDArray[np.uint8]) -> Pixels:
    """Colors over white, rounded to the nearest byte."""
    height, width = rgba.shape[:2]
    result = np.empty((height, width, 3), np.uint8)
    step = max(1, _PIXELS_AT_ONCE // width)
    for start in range(0, height, step):
        rows = rgba[start : start + step].astype(np.uint16)
        alpha = rows[..., 3:]
        result[start : start + step] = (rows[..., :3] * alpha + _WHITE * (_WHITE - alpha) + _WHITE // 2) // _WHITE
    return result


def _with_channels(grey: NDArray[np.uint8]) -> Pixels:
    return np.repeat(grey[..., None], 3, axis=2)


def _from_array(array: NDArray[Any]) -> Pixels:
    channels = array.shape[2] if array.ndim == 3 else 1
    if (
        array.dtype not in (np.uint8, np.uint16)
        or array.ndim not in (2, 3)
        or channels not in (1, 3, 4)
        or not array.size
    ):
        raise RequestError(
            f"the picture is an array of {array.dtype} {list(array.shape)}; wanted uint8 [height, width, 3], or with 1 "
            "or 4 channels: convert it",
            field="image",
        )
    pixels = array if array.dtype == np.uint8 else (array >> 8).astype(np.uint8)
    if channels == 1:
        return _with_channels(pixels.reshape(pixels.shape[:2]))
    return _on_white(pixels) if channels == 4 else np.ascontiguousarray(pixels)


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Mirror and turn as EXIF's orientation says."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)

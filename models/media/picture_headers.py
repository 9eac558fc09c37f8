"""Headers of picture files: format, size and orientation, read before anything is decoded.

Five formats are read, those that models' users send: PNG, JPEG, WebP, GIF and BMP. What is left of PNG and JPEG files
for the decoder has no metadata, so that no text, profile or thumbnail in them is parsed or unpacked.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localinfer.errors import RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read."""

_OTHERS = (
    (b"II*\0", "a TIFF picture"),
    (b"MM\0*", "a TIFF picture"),
    (b"8BPS", "a Photoshop picture"),
    (b"\0\0\1\0", "an icon"),
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL picture"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 picture"),
    (b"%PDF", "a PDF document"),
    (b"<", "text such as SVG or HTML"),
    (b"RIFF", "a WAV or AVI file"),
    (b"OggS", "an Ogg sound"),
    (b"fLaC", "a FLAC sound"),
    (b"ID3", "an MP3 sound"),
)
_FILE_TYPES = {b"avif": "an AVIF picture", b"heic": "a HEIC picture", b"mif1": "a HEIC picture"}
_ORIENTATION = 0x0112
_KEPT_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_KEPT_SEGMENTS = frozenset((0xE0, 0xEE))
"""JPEG's own application segments: JFIF, and Adobe's, which says how colors are stored."""


@dataclass(frozen=True)
class PictureHeader:
    """Facts about a picture file that is not decoded yet."""

    format: str
    """One of `FORMATS`."""
    stored_width: int
    """Pixels across, as they are stored."""
    stored_height: int
    """Pixels down."""
    orientation: int
    """EXIF's: 1 upright, 2 to 8 mirrored or turned."""
    has_frames: bool
    """True if the header says that it is animated."""
    num_passes: int
    """Times that the decoder goes over all pixels."""
    data: bytes
    """The file, of PNG and JPEG without metadata."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the picture when it is upright."""
        size = self.stored_width, self.stored_height
        return size[::-1] if self.orientation >= 5 else size


def read_header(data: bytes) -> PictureHeader:
    """Read the header of a file. Raises: RequestError naming what else it is."""
    for is_of, read in _READERS:
        if is_of(data):
            try:
                header = read(data)
            except (struct.error, IndexError):
                header = None
            if header is None or not (header.stored_width and header.stored_height):
                raise RequestError(
                    f"the picture's header is damaged ({len(data)} bytes, which begin as a picture's); wanted a whole "
                    "file: save or send it again",
                    field="image",
                )
            return header
    raise RequestError(
        f"the picture is {_other_name(data)}; wanted {', '.join(FORMATS[:-1])} or {FORMATS[-1]}: convert it",
        field="image",
    )


def read_orientation(exif: bytes) -> int:
    """The orientation in an EXIF block; 1 where it has none, or cannot be read."""
    block = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(f"{order}I", block, 4)
        (count,) = struct.unpack_from(f"{order}H", block, start)
        for place in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", block, place)
            if tag == _ORIENTATION and kind == 3:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


def _other_name(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return _FILE_TYPES.get(data[8:12], "a film, or a picture in a film's format")
    found = next((name for mark, name in _OTHERS if data.lstrip()[:16].startswith(mark) or data.startswith(mark)), "")
    return found or f"of an unknown format ({len(data)} bytes, which begin with {data[:8].hex(' ')})"


def _read_png(data: bytes) -> PictureHeader | None:
    if data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    kept, orientation, has_frames = [data[:8]], 1, False
    for kind, start, end in _png_chunks(data):
        if kind in _KEPT_CHUNKS:
            kept.append(data[start:end])
        elif kind == b"eXIf":
            orientation = read_orientation(data[start + 8 : end - 4])
        elif kind == b"acTL":
            has_frames = data[start + 8 : start + 12] > b"\0\0\0\1"
    # Adam7 goes over the rows seven times, over all pixels once.
    return PictureHeader("PNG", width, height, orientation, has_frames, 1, b"".join(kept))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, begin and end of each chunk, with its length and check sum."""
    place = 8
    while place + 8 <= len(data):
        (length,) = struct.unpack_from(">I", data, place)
        yield data[place + 4 : place + 8], place, place + length + 12
        place += length + 12


def _read_jpeg(data: bytes) -> PictureHeader | None:
    kept, place, orientation, size = [data[:2]], 2, 1, None
    while True:
        while data[place + 1] == 0xFF:
            place += 1
        mark, kind = data[place], data[place + 1]
        if mark != 0xFF or kind == 0xD9:
            return None
        if kind == 0xDA:
            break
        (length,) = struct.unpack_from(">H", data, place + 2)
        segment = data[place : place + 2 + length]
        if kind in _FRAME_MARKERS:
            height, width = struct.unpack_from(">HH", segment, 5)
            size = width, height
        if kind == 0xE1 and segment[4:10] == b"Exif\0\0" and orientation == 1:
            orientation = read_orientation(segment[4:])
        if not 0xE0 <= kind <= 0xEF or kind in _KEPT_SEGMENTS:
            kept.append(segment)
        place += 2 + length
    if size is None:
        return None
    num_scans = data.count(b"\xff\xda", place)
    return PictureHeader("JPEG", *size, orientation, False, num_scans, b"".join([*kept, data[place:]]))


def _read_webp(data: bytes) -> PictureHeader | None:
    kind = data[12:16]
    if kind == b"VP8X":
        flags = data[20]
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        exif = next((data[start:end] for name, start, end in _riff_chunks(data) if name == b"EXIF"), b"")
        return PictureHeader("WEBP", width, height, read_orientation(exif), bool(flags & 2), 1, data)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return PictureHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1, False, 1, data)
    if kind == b"VP8 ":
        width, height = (number & 0x3FFF for number in struct.unpack_from("<HH", data, 26))
        return PictureHeader("WEBP", width, height, 1, False, 1, data)
    return None


def _riff_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and end of the content of each chunk."""
    place = 12
    while place + 8 <= len(data):
        (length,) = struct.unpack_from("<I", data, place + 4)
        yield data[place : place + 4], place + 8, place + 8 + length
        place += 8 + length + length % 2


def _read_gif(data: bytes) -> PictureHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (6 << (flags & 7) if flags & 0x80 else 0)
    while data[place] == 0x21:
        place += 2
        while data[place]:
            place += data[place] + 1
        place += 1
    if data[place] == 0x2C:
        # A frame may be larger than the screen that it is to be shown on.
        left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, place + 1)
        width, height = max(width, left + frame_width), max(height, top + frame_height)
    return PictureHeader("GIF", width, height, 1, False, 1, data)


def _read_bmp(data: bytes) -> PictureHeader:
    (header_size,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header_size == 12 else "<ii", data, 18)
    return PictureHeader("BMP", max(width, 0), abs(height), 1, False, 1, data)


_READERS: tuple[tuple[Callable[[bytes], bool], Callable[[bytes], PictureHeader | None]], ...] = (
    (lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"), _read_png),
    (lambda data: data.startswith(b"\xff\xd8\xff"), _read_jpeg),
    (lambda data: data.startswith(b"RIFF") and data[8:12] == b"WEBP", _read_webp),
    (lambda data: data.startswith((b"GIF87a", b"GIF89a")), _read_gif),
    (lambda data: data.startswith(b"BM") and len(data) > 26, _read_bmp),
)

"""Files of pictures and sounds: every format that is read, changed by bytes, by the numbers of headers, and cut.

An input is a file. It is read as a picture, or where it is none, as a sound; what comes of it is within the limits.
"""

import io
import random
import struct
import zlib
from pathlib import Path

import numpy as np

from localinfer.errors import LocalinferError, RequestError
from localinfer.models.media.picture_headers import FORMATS
from localinfer.models.media.pictures import PictureLimits, open_picture
from localinfer.models.media.sounds import SoundLimits, read_sound
from tests.proof.fuzz.mutation import mutate_bytes, near
from tests.proof.fuzz.target import Limits, Target, refused

_PICTURES = PictureLimits(max_bytes=1 << 20, max_pixels=1 << 20, max_side=4096)
_SOUNDS = SoundLimits(max_bytes=1 << 20, max_seconds=20.0)
_HEADER_BYTES = 100


def corpus() -> list[bytes]:
    """Small pictures and sounds of every format and of several modes."""
    from PIL import Image
    from soundfile import write

    rng = np.random.default_rng(11)
    color = Image.fromarray(rng.integers(0, 256, (12, 19, 3), np.uint8))
    kinds = [color, color.convert("L"), color.convert("P"), color.convert("1"), color.convert("RGBA")]
    exif = Image.Exif()
    exif[0x0112] = 6
    found = []

    def save(image: Image.Image, format: str, **options: object) -> None:
        file = io.BytesIO()
        image.save(file, format, **options)
        found.append(file.getvalue())

    for kind in kinds:
        save(kind, "PNG", exif=exif)
    for format in FORMATS:
        save(color, format)
    save(color, "JPEG", progressive=True, exif=exif)
    save(color.convert("CMYK"), "JPEG")
    save(color, "WEBP", lossless=True, exif=exif)
    for format in ("GIF", "PNG", "WEBP"):
        save(kinds[2] if format == "GIF" else color, format, save_all=True, append_images=[color.rotate(90)])
    samples = rng.uniform(-0.5, 0.5, (1500, 2))
    for format, subtype, rate in (
        ("WAV", "PCM_16", 16_000),
        ("WAV", "FLOAT", 44_100),
        ("WAV", "MS_ADPCM", 8000),
        ("FLAC", "PCM_16", 22_050),
        ("OGG", "VORBIS", 16_000),
        ("OGG", "OPUS", 48_000),
        ("MP3", "MPEG_LAYER_III", 32_000),
        ("AIFF", "PCM_24", 16_000),
    ):
        file = io.BytesIO()
        write(file, samples, rate, format=format, subtype=subtype)
        found.append(file.getvalue())
    return found


def mutate(generator: random.Random, data: bytes, corpus: list[bytes]) -> bytes:
    """Change bytes, numbers of the header, and check sums back so that what is changed is decoded."""
    for _ in range(generator.choice((1, 1, 1, 2, 4, 8))):
        if generator.random() < 0.4 and len(data) > 4:
            data = _other_number(generator, data)
        else:
            data = mutate_bytes(generator, data, corpus)
    return _with_right_sums(data) if generator.random() < 0.8 else data


def _other_number(generator: random.Random, data: bytes) -> bytes:
    """Another number in the first bytes, of either order and two or four bytes."""
    kind = generator.choice(("<H", ">H", "<I", ">I"))
    size = struct.calcsize(kind)
    place = generator.randrange(min(len(data), _HEADER_BYTES) - size + 1) if len(data) >= size else 0
    (number,) = struct.unpack_from(kind, data, place) if len(data) >= size else (0,)
    changed = near(generator, number) % (1 << 8 * size)
    return data[:place] + struct.pack(kind, changed) + data[place + size :]


def _with_right_sums(data: bytes) -> bytes:
    """A PNG file with check sums that fit its chunks; others as they are."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    changed, place = bytearray(data), 8
    while place + 12 <= len(changed):
        (length,) = struct.unpack_from(">I", changed, place)
        end = place + 8 + length
        if end + 4 > len(changed):
            break
        struct.pack_into(">I", changed, end, zlib.crc32(changed[place + 4 : end]))
        place = end + 4
    return bytes(changed)


def run(data: bytes, folder: Path) -> str:
    """Read a file. Returns the outcome; raises what is a finding."""
    try:
        opened = open_picture(data, _PICTURES)
    except RequestError as error:
        if "wanted PNG" not in str(error):
            return refused(error)
    else:
        try:
            picture = opened.decode()
        except LocalinferError as error:
            return refused(error)
        assert picture.pixels.shape == (opened.height, opened.width, 3), "another size than its header's"
        assert picture.pixels.dtype == np.uint8 and picture.pixels.flags.c_contiguous
        return "picture"
    try:
        samples = read_sound(data, limits=_SOUNDS)
    except LocalinferError as error:
        return refused(error)
    assert samples.dtype == np.float32 and samples.ndim == 1 and np.isfinite(samples).all()
    assert 0 < len(samples) <= _SOUNDS.max_seconds * 16_000 + 1, "longer than the limit"
    return "sound"


def _prepare() -> None:
    for data in corpus():
        run(data, Path())


TARGET = Target("media", corpus, mutate, run, Limits(memory_constant=128 << 20), _prepare)

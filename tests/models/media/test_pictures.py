"""Pictures from files, bytes, Pillow and arrays: every format and mode, orientations, limits, and damage."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import LocalinferError, MissingPackageError, OutOfMemoryError, RequestError
from localinfer.models.media.picture_headers import FORMATS, read_header, read_orientation
from localinfer.models.media.pictures import PictureLimits, open_picture, read_picture
from localinfer.system import extras

Image = pytest.importorskip("PIL.Image", reason="pictures are read with Pillow, which is not installed")
ImageOps = pytest.importorskip("PIL.ImageOps")

PIXELS: NDArray[np.uint8] = np.random.default_rng(7).integers(0, 256, (11, 17, 3), np.uint8)
LOSSLESS: dict[str, dict[str, Any]] = {"PNG": {}, "WEBP": {"lossless": True}, "BMP": {}}


def encoded(image: Any, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def pixels_of(image: Any, format: str, **options: Any) -> NDArray[np.uint8]:
    return read_picture(encoded(image, format, **options)).pixels


def picture_bytes(format: str) -> bytes:
    return encoded(Image.fromarray(PIXELS), format)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of_size(width: int, height: int, content: bytes = b"") -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + content + png_chunk(b"IDAT", zlib.compress(b"")) + png_chunk(b"IEND", b"")


def exif_block(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    block: bytes = exif.tobytes()
    return block


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_pillows_bytes(format: str) -> None:
    data = picture_bytes(format)
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    found = read_picture(data)
    assert found.pixels.dtype == np.uint8 and np.array_equal(found.pixels, wanted) and found.notices == ()
    assert format not in LOSSLESS or np.array_equal(
        pixels_of(Image.fromarray(PIXELS), format, **LOSSLESS[format]), PIXELS
    )


def test_all_kinds_of_sources_give_the_same_picture(tmp_path: Path) -> None:
    data = picture_bytes("PNG")
    path = tmp_path / "a picture.png"
    path.write_bytes(data)
    image = Image.open(path)
    sources: list[Any] = [str(path), path, data, bytearray(data), memoryview(data), io.BytesIO(data), image, PIXELS]
    for source in sources:
        opened = open_picture(source)
        assert (opened.width, opened.height) == (17, 11)
        assert np.array_equal(opened.decode().pixels, PIXELS)
    image.close()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_orientations_are_applied_as_pillow_applies_them(format: str, orientation: int) -> None:
    data = encoded(Image.fromarray(PIXELS), format, exif=exif_block(orientation))
    with Image.open(io.BytesIO(data)) as image:
        wanted = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        opened = open_picture(data)
        assert (opened.height, opened.width) == wanted.shape[:2]
        assert np.array_equal(opened.decode().pixels, wanted)
        assert np.array_equal(read_picture(image).pixels, wanted)
        # An image that is upright already is not turned again.
        assert np.array_equal(read_picture(ImageOps.exif_transpose(image)).pixels, wanted)


def test_an_orientation_behind_the_pixels_counts() -> None:
    data = picture_bytes("PNG")
    end = data.index(b"IEND") - 4
    exif = png_chunk(b"eXIf", exif_block(6).removeprefix(b"Exif\0\0"))
    assert read_picture(data[:end] + exif + data[end:]).pixels.shape == (17, 11, 3)


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x09\0\0",
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x01\0\x06\0\0",
    ],
)
def test_a_damaged_orientation_is_none(block: bytes) -> None:
    assert read_orientation(block) == 1


def test_transparency_is_shown_on_white() -> None:
    alpha = np.random.default_rng(1).integers(0, 256, PIXELS.shape[:2], np.uint8)
    exact = PIXELS.astype(float) * (alpha[..., None] / 255.0) + 255.0 * (1.0 - alpha[..., None] / 255.0)
    wanted = np.floor(exact + 0.5)
    rgba = np.dstack([PIXELS, alpha])
    assert np.array_equal(pixels_of(Image.fromarray(rgba), "PNG"), wanted)
    assert np.array_equal(read_picture(rgba).pixels, wanted)
    grey = np.dstack([PIXELS[..., 0], alpha])
    found = pixels_of(Image.fromarray(grey), "PNG")
    assert np.array_equal(found, np.repeat(wanted[..., :1], 3, axis=2))


def test_transparent_colors_of_palettes_and_of_others_are_white() -> None:
    flat = Image.new("P", (6, 4))
    flat.putpalette([10, 20, 30, 40, 50, 60])
    flat.paste(1, (0, 0, 3, 4))
    whole = np.zeros((4, 6, 3), np.uint8)
    whole[:, :3], whole[:, 3:] = (40, 50, 60), (10, 20, 30)
    with_hole = whole.copy()
    with_hole[:, 3:] = 255
    for format in ("PNG", "GIF"):
        assert np.array_equal(pixels_of(flat, format), whole)
        assert np.array_equal(pixels_of(flat, format, transparency=0), with_hole)
    half = whole.copy()
    half[:, 3:] = np.floor(np.array([10, 20, 30]) * (128 / 255) + 255 * (127 / 255) + 0.5)
    assert np.array_equal(pixels_of(flat, "PNG", transparency=bytes([128, 255])), half)
    assert np.array_equal(pixels_of(Image.fromarray(whole), "PNG", transparency=(10, 20, 30)), with_hole)
    assert np.array_equal(pixels_of(Image.fromarray(whole[..., 0]), "PNG", transparency=10)[:, 3:], with_hole[:, 3:])


def test_grey_black_and_white_and_ink_become_rgb() -> None:
    grey = PIXELS[..., 0]
    assert np.array_equal(pixels_of(Image.fromarray(grey), "PNG"), np.repeat(grey[..., None], 3, axis=2))
    for format in ("PNG", "BMP"):
        found = pixels_of(Image.fromarray(grey > 127), format)
        assert np.array_equal(found, np.repeat(np.where(grey > 127, 255, 0)[..., None], 3, axis=2))
    ink = Image.fromarray(PIXELS).convert("CMYK")
    for source in (encoded(ink, "JPEG", quality=100, subsampling=0), ink):
        difference = read_picture(source).pixels.astype(int) - PIXELS
        assert np.abs(difference).mean() < 6


def test_sixteen_bits_keep_their_upper_halves() -> None:
    deep = np.arange(65536, dtype=np.uint16)[:: 65536 // 187][:187].reshape(11, 17)
    wanted = np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, axis=2)
    assert np.array_equal(pixels_of(Image.fromarray(deep), "PNG"), wanted)
    assert np.array_equal(read_picture(Image.fromarray(deep.astype(np.int32))).pixels, wanted)
    assert np.array_equal(read_picture(deep).pixels, wanted)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_of_frames_the_first_is_taken_with_a_notice(format: str) -> None:
    frames = [Image.fromarray(np.roll(PIXELS, shift, axis=0)) for shift in range(3)]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **LOSSLESS.get(format, {}))
    found = read_picture(data)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(found.pixels, np.asarray(image.convert("RGB")))
    (notice,) = found.notices
    assert "first frame" in notice


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_cut_short_is_refused(format: str) -> None:
    data = picture_bytes(format)
    for size in (1, 4, 12, 30, len(data) // 2, len(data) - 60):
        with pytest.raises(RequestError) as caught:
            read_picture(data[:size])
        message = str(caught.value)
        assert "wanted" in message and len(message) < 400 and message.isprintable(), (size, message)
        assert caught.value.field == "image"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"II*\0....", "TIFF"),
        (b"%PDF-1.7", "PDF"),
        (b"  <svg xmlns=''/>", "SVG"),
        (b"\0\0\0\x18ftypheic....", "HEIC"),
        (b"\0\0\0\x18ftypavif....", "AVIF"),
        (b"RIFF\0\0\0\0WAVE", "WAV"),
        (b"\x01\x02\x03\x04 nothing", "unknown format"),
    ],
)
def test_other_formats_are_refused_by_name(data: bytes, name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}.*wanted PNG, JPEG, WEBP, GIF or BMP"):
        open_picture(data)


@pytest.mark.parametrize(
    "size", [(100_000, 1), (1, 100_000), (30_000, 30_000), (65_535, 65_535), (2**31 - 1, 2**31 - 1)]
)
def test_too_many_pixels_are_refused_before_anything_is_decoded(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localinfer.models.media.pictures.import_module", lambda name: pytest.fail(f"{name} decodes"))
    width, height = size
    with pytest.raises(RequestError, match=f"{width} x {height} pixels; wanted at most 67108864"):
        open_picture(png_of_size(width, height))
    bmp = bytearray(picture_bytes("BMP"))
    struct.pack_into("<ii", bmp, 18, width, -height)
    with pytest.raises(RequestError, match=f"{width} x {height} pixels"):
        open_picture(bytes(bmp))


def test_sizes_of_all_formats_are_known_from_their_headers() -> None:
    for format in FORMATS:
        data = picture_bytes(format)
        assert read_header(data).size == (17, 11), format
    lossy_with_alpha = encoded(Image.fromarray(np.dstack([PIXELS, PIXELS[..., 0]])), "WEBP")
    for data in (encoded(Image.fromarray(PIXELS), "WEBP", lossless=True), lossy_with_alpha):
        assert read_header(data).size == (17, 11)


def test_limits_of_pillow_that_a_program_has_lowered_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    for format in FORMATS:
        try:
            assert read_picture(picture_bytes(format)).pixels.shape == PIXELS.shape
        except RequestError as error:
            assert "more pixels than Pillow takes in this program" in str(error)


def test_a_frame_beyond_its_screen_counts() -> None:
    data = bytearray(encoded(Image.fromarray(PIXELS[..., 0]), "GIF"))
    struct.pack_into("<HH", data, 6, 3, 3)
    assert open_picture(bytes(data)).decode().pixels.shape[:2] == (11, 17)
    place = data.index(b"\x2c", 13)
    struct.pack_into("<HHHH", data, place + 1, 0, 0, 65_535, 65_535)
    with pytest.raises(RequestError, match="65535 x 65535 pixels"):
        open_picture(bytes(data))


def test_a_file_of_too_many_bytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RequestError, match="1099511627776 bytes.*wanted at most 67108864"):
        open_picture(path)

    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return bytes(min(size, 1000))

    with pytest.raises(RequestError, match="5001 bytes or more; wanted at most 5000"):
        open_picture(Endless(), PictureLimits(max_bytes=5000))  # type: ignore[arg-type]


def test_scans_without_end_are_refused() -> None:
    data = encoded(Image.fromarray(PIXELS), "JPEG", progressive=True)
    start = data.index(b"\xff\xda")
    limits = PictureLimits(max_pixels=200)
    assert read_picture(data, limits).pixels.shape == PIXELS.shape
    with pytest.raises(RequestError, match="scans; wanted fewer"):
        open_picture(data[:-2] + data[start:-2] * 40 + b"\xff\xd9", limits)


def test_metadata_is_neither_parsed_nor_unpacked() -> None:
    text = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1 << 22)))
    profile = png_chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 22)))
    data = picture_bytes("PNG")
    assert np.array_equal(read_picture(data[:33] + text + profile + data[33:]).pixels, PIXELS)
    photo = picture_bytes("JPEG")
    broken = b"\xff\xe1\0\x12Exif\0\0II*\0\xff\xff\xff\xff\0\0" + b"\xff\xe2\0\x08MPF\0II"
    assert np.array_equal(read_picture(photo[:2] + broken + photo[2:]).pixels, read_picture(photo).pixels)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    data = picture_bytes("WEBP")
    longer = b"VP8X" + struct.pack("<IB3x", 10, 0) + (30).to_bytes(3, "little") + (40).to_bytes(3, "little")
    with pytest.raises(RequestError, match="cannot be decoded"):
        read_picture(data[:12] + longer + data[12:])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", "no bytes"),
        ("missing.png", "'missing.png' cannot be read"),
        ("a\0b.png", "cannot be read"),
        ("x" * 5000, "cannot be read"),
        (".", "no file of bytes"),
        ("https://example.com/a.png", "read it first"),
        ("data:image/png;base64,AAAA", "read it first"),
        (12, "of type int"),
        (None, "of type NoneType"),
        (io.StringIO("text"), "gives str"),
        (np.zeros((4, 4, 3), np.float32), r"array of float32 \[4, 4, 3\]"),
        (np.zeros((4, 4, 2), np.uint8), r"array of uint8 \[4, 4, 2\]"),
        (np.zeros((0, 4, 3), np.uint8), r"array of uint8 \[0, 4, 3\]"),
        (np.zeros(4, np.uint8), r"array of uint8 \[4\]"),
    ],
)
def test_what_is_no_picture_is_refused_in_words(source: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        open_picture(source)
    assert len(str(caught.value)) < 500


def test_arrays_keep_to_the_limits_and_are_not_changed() -> None:
    flipped = PIXELS[:, ::-1]
    found = read_picture(flipped).pixels
    assert found.flags.c_contiguous and np.array_equal(found, flipped)
    assert np.array_equal(read_picture(PIXELS[..., :1]).pixels, np.repeat(PIXELS[..., :1], 3, axis=2))
    for source in (PIXELS, Image.fromarray(PIXELS)):
        with pytest.raises(RequestError, match="17 x 11 pixels; wanted at most 100"):
            open_picture(source, PictureLimits(max_pixels=100))


def test_missing_pillow_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture_bytes("PNG")
    monkeypatch.setattr(extras, "_found", set())
    monkeypatch.setattr(extras, "_is_there", lambda module: module != "PIL")
    opened = open_picture(data)
    assert (opened.width, opened.height) == (17, 11)
    with pytest.raises(MissingPackageError, match=r"needs pillow.*pip install 'localinfer\[media\]'") as caught:
        opened.decode()
    assert caught.value.extra == "media"


def test_memory_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(image: object) -> None:
        raise MemoryError

    monkeypatch.setattr("localinfer.models.media.pictures._to_rgb", fail)
    with pytest.raises(OutOfMemoryError, match="PNG picture needs more memory"):
        read_picture(picture_bytes("PNG"))


@pytest.mark.parametrize("format", FORMATS)
def test_every_flipped_byte_is_read_or_refused(format: str) -> None:
    data = picture_bytes(format)
    rng = np.random.default_rng(3)
    limits = PictureLimits(max_pixels=10_000)
    for _ in range(150):
        changed = bytearray(data)
        place = int(rng.integers(0, len(data)))
        changed[place] ^= int(rng.integers(1, 256))
        try:
            pixels = read_picture(bytes(changed), limits).pixels
        except LocalinferError as error:
            assert isinstance(error, RequestError) and str(error).isprintable()
        else:
            assert pixels.dtype == np.uint8 and pixels.ndim == 3

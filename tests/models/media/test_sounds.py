"""Sounds from files, bytes and arrays: every format, rates, channels, limits, and damage."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import LocalinferError, MissingPackageError, OutOfMemoryError, RequestError
from localinfer.models.media.sounds import SoundLimits, read_sound
from localinfer.system import extras

soundfile = pytest.importorskip("soundfile", reason="sounds are read with soundfile, which is not installed")
soxr = pytest.importorskip("soxr", reason="sounds are resampled with soxr, which is not installed")

FILES = [
    ("WAV", "PCM_16", 1e-4),
    ("WAV", "PCM_24", 1e-6),
    ("WAV", "PCM_U8", 1e-2),
    ("WAV", "ULAW", 2e-2),
    ("WAV", "FLOAT", 0.0),
    ("WAVEX", "PCM_16", 1e-4),
    ("FLAC", "PCM_16", 1e-4),
    ("AIFF", "PCM_16", 1e-4),
    ("OGG", "VORBIS", 0.1),
    ("OGG", "OPUS", 0.1),
    ("MP3", "MPEG_LAYER_III", 0.1),
]


def tone(count: int, rate: int = 16000, frequency: float = 440.0) -> NDArray[np.float32]:
    return (0.4 * np.sin(2 * np.pi * frequency * np.arange(count) / rate)).astype(np.float32)


def encoded(samples: NDArray[Any], rate: int = 16000, format: str = "WAV", subtype: str = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(("format", "subtype", "error"), FILES)
def test_every_format_is_read(format: str, subtype: str, error: float) -> None:
    samples = tone(24_000)
    found = read_sound(encoded(samples, 16000, format, subtype))
    assert found.dtype == np.float32 and found.ndim == 1
    assert abs(len(found) - len(samples)) <= (0 if error < 0.05 else 2400)
    middle = slice(8000, 16_000)
    # A coder's delay moves all samples, so that only their strength is compared.
    if error < 0.05:
        assert np.abs(found - samples).max() <= error
    else:
        assert np.abs(found[middle]).max() == pytest.approx(0.4, abs=error)


def test_all_kinds_of_sources_give_the_same_sound(tmp_path: Path) -> None:
    samples = tone(1000)
    data = encoded(samples)
    path = tmp_path / "a sound.wav"
    path.write_bytes(data)
    for source in (str(path), path, data, bytearray(data), io.BytesIO(data)):
        assert np.array_equal(read_sound(source), samples)
    for array in (samples, samples.astype(np.float64), samples[:, None], np.stack([samples, samples], axis=1)):
        assert np.array_equal(read_sound(array, rate=16000), samples)


def test_integers_are_scaled_to_one() -> None:
    assert read_sound(np.array([-32768, 0, 16384], np.int16), rate=16000).tolist() == [-1.0, 0.0, 0.5]
    assert read_sound(np.array([-(2**31), 2**30], np.int32), rate=16000).tolist() == [-1.0, 0.5]


def test_channels_are_averaged() -> None:
    parts = np.stack([tone(500), tone(500, frequency=900.0), np.zeros(500, np.float32)], axis=1)
    wanted = (parts.astype(np.float64).sum(axis=1) / 3).astype(np.float32)
    assert np.array_equal(read_sound(encoded(parts)), wanted)
    assert np.array_equal(read_sound(parts, rate=16000), wanted)


@pytest.mark.parametrize("rate", [8000, 11_025, 44_100, 48_000, 96_000])
def test_other_rates_are_resampled(rate: int) -> None:
    samples = tone(rate, rate)
    found = read_sound(encoded(samples, rate))
    assert len(found) == 16_000
    assert np.abs(found - tone(16_000))[1000:-1000].max() < 2e-3
    assert np.array_equal(found, read_sound(samples, rate=rate))


def test_a_sound_does_not_depend_on_how_much_is_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    samples = rng.uniform(-0.5, 0.5, (30_000, 2)).astype(np.float32)
    whole = read_sound(encoded(samples, 44_100))
    monkeypatch.setattr("localinfer.models.media.sounds._NUMBERS_AT_ONCE", 1234)
    assert np.array_equal(read_sound(encoded(samples, 44_100)), whole)
    assert np.array_equal(read_sound(samples, rate=44_100), whole)


def test_a_sound_that_lasts_too_long_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(np.zeros(32_000, np.float32), format="FLAC", subtype="PCM_16")
    assert len(read_sound(data, limits=SoundLimits(max_seconds=2.0))) == 32_000
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("it is decoded"))
    with pytest.raises(RequestError, match=r"lasts 2\.0 s or more; wanted at most 1\.9"):
        read_sound(data, limits=SoundLimits(max_seconds=1.9))
    with pytest.raises(RequestError, match=r"lasts 3\.0 s or more"):
        read_sound(np.zeros(48_000), rate=16000, limits=SoundLimits(max_seconds=1.9))


def test_a_length_that_is_not_known_is_bounded_while_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(tone(200_000))
    monkeypatch.setattr(soundfile.SoundFile, "frames", (1 << 63) - 1)
    monkeypatch.setattr("localinfer.models.media.sounds._NUMBERS_AT_ONCE", 16_000)
    with pytest.raises(RequestError, match=r"lasts 2\.0 s or more; wanted at most 1"):
        read_sound(data, limits=SoundLimits(max_seconds=1.0))


def test_too_many_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.wav"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RequestError, match="1099511627776 bytes.*wanted at most 268435456") as caught:
        read_sound(path)
    assert caught.value.field == "audio"


@pytest.mark.parametrize(("rate", "channels"), [(999, 1), (192_001, 1), (16_000, 9)])
def test_rates_and_channels_beyond_the_usual_are_refused(rate: int, channels: int) -> None:
    with pytest.raises(RequestError, match=f"{channels} channels at {rate} Hz; wanted 1 to 8 at 1000 to 192000 Hz"):
        read_sound(encoded(np.zeros((2000, channels), np.float32), rate))
    with pytest.raises(RequestError, match=f"{channels} channels at {rate} Hz"):
        read_sound(np.zeros((2000, channels)), rate=rate)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300, 3e38, -1e5])
def test_samples_that_are_no_numbers_or_far_too_large_are_refused(value: float) -> None:
    samples = np.zeros(100)
    samples[50] = value
    for rate in (16_000, 8000):
        with pytest.raises(RequestError, match="no numbers, or beyond 65536"):
            read_sound(samples, rate=rate)


@pytest.mark.parametrize(
    ("source", "rate", "words"),
    [
        (b"", None, "no bytes"),
        (b"\x89PNG\r\n\x1a\n0123456789", None, "unknown format.*wanted WAV"),
        (b".snd" + bytes(40), None, "unknown format"),
        (b"RIFF\0\0\0\0WEBPVP8 ", None, "cannot be decoded"),
        (b"ID3" + bytes(100), None, "cannot be decoded"),
        ("missing.wav", None, "'missing.wav' cannot be read"),
        (np.zeros(10), None, "without a rate"),
        (np.zeros(10, np.int64), 16000, "array of int64"),
        (np.zeros((2, 2, 2)), 16000, "array of float64"),
        (np.zeros(0), 16000, "no samples"),
        (np.zeros((0, 2)), 16000, "no samples"),
        (7, None, "of type int"),
    ],
)
def test_what_is_no_sound_is_refused_in_words(source: Any, rate: int | None, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        read_sound(source, rate=rate)
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()


def test_a_sound_without_samples_is_refused() -> None:
    with pytest.raises(RequestError, match="no samples"):
        read_sound(encoded(np.zeros(0, np.float32)))


def test_a_file_that_ends_early_is_heard_as_far_as_it_goes() -> None:
    samples = tone(1000)
    data = encoded(samples)
    assert np.array_equal(read_sound(data[:-2000]), samples[:500])


@pytest.mark.parametrize("module", ["soundfile", "soxr"])
def test_missing_packages_are_named_with_the_line_that_installs_them(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(tone(100, 8000), 8000)
    monkeypatch.setattr(extras, "_found", set())
    monkeypatch.setattr(extras, "_is_there", lambda name: name != module)
    with pytest.raises(MissingPackageError, match=rf"needs {module}.*pip install 'localinfer\[media\]'"):
        read_sound(data)


def test_memory_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(block: object) -> None:
        raise MemoryError

    monkeypatch.setattr("localinfer.models.media.sounds._mono", fail)
    with pytest.raises(OutOfMemoryError, match="sound needs more memory"):
        read_sound(encoded(tone(100)))


@pytest.mark.parametrize(("format", "subtype"), [("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")])
def test_every_flipped_byte_is_read_or_refused(format: str, subtype: str) -> None:
    data = encoded(tone(2000), 16000, format, subtype)
    rng = np.random.default_rng(3)
    for _ in range(100):
        changed = bytearray(data)
        changed[int(rng.integers(0, min(len(data), 200)))] ^= int(rng.integers(1, 256))
        try:
            samples = read_sound(bytes(changed), limits=SoundLimits(max_seconds=10.0))
        except LocalinferError as error:
            assert isinstance(error, RequestError) and str(error).isprintable()
        else:
            assert samples.dtype == np.float32 and np.isfinite(samples).all()


def test_a_header_that_promises_more_than_there_is_costs_no_memory() -> None:
    data = bytearray(encoded(tone(100), 16000, "WAV", "PCM_16"))
    place = data.index(b"data")
    struct.pack_into("<I", data, place + 4, 0xFFFFFFF0)
    assert len(read_sound(bytes(data))) == 100

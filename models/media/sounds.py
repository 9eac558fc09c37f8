"""Sounds from files, bytes and arrays, as float32 mono samples at 16 kHz, within limits.

A file's length is known, and refused if it is too long, before anything of it is decoded; where its header does not say
it, no more is decoded than may be. Channels are averaged and other rates resampled as they are decoded, so that
memory is bounded by the result. A file that ends early is heard as far as it goes.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import LocalinferError, MissingPackageError, OutOfMemoryError, RequestError
from localinfer.models.media.sources import Source, read_bytes
from localinfer.models.media.spectrograms import RATE, Samples
from localinfer.system.extras import require

SoundSource: TypeAlias = "Source | NDArray[Any]"
"""A path, bytes, an open file, or an array [samples] or [samples, channels] of floats, or of int16 or int32, whose rate
is then given."""

FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "AIFF")
"""Formats that are read, by libsndfile's names; OGG with Vorbis or Opus."""

_MIN_RATE, _MAX_RATE, _MAX_CHANNELS = 1000, 192_000, 8
_MAX_SAMPLE = 1 << 16
_NUMBERS_AT_ONCE = 1 << 18
_HEADERS = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"FORM", b"ID3", b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2")


@dataclass(frozen=True)
class SoundLimits:
    """Greatest sizes of a sound as it is given."""

    max_bytes: int = 256 << 20
    """Bytes of its file."""
    max_seconds: float = 1800.0
    """Seconds that it lasts."""

    def check(self, num_samples: int, rate: int) -> None:
        """Refuse a length. Raises: RequestError."""
        if num_samples > self.max_seconds * rate:
            raise RequestError(
                f"the sound lasts {num_samples / rate:.1f} s or more; wanted at most {self.max_seconds:g}: cut it, or "
                "raise the limit",
                field="audio",
            )


def is_sound(data: bytes) -> bool:
    """True for bytes that begin as a file of sound does."""
    return data.startswith(_HEADERS) and data[8:12] != b"WEBP"


def read_sound(source: SoundSource, *, rate: int | None = None, limits: SoundLimits | None = None) -> Samples:
    """Read and decode a sound: float32 [samples] at 16 kHz.

    rate: samples a second of an array. Raises: RequestError for what is no sound, exceeds the limits or is damaged;
    MissingPackageError, OutOfMemoryError.
    """
    limits = limits or SoundLimits()
    try:
        if isinstance(source, np.ndarray):
            return _from_array(source, rate, limits)
        return _decode(read_bytes(source, "audio", limits.max_bytes), limits)
    except LocalinferError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError("the sound needs more memory than there is to be decoded: make it shorter") from error
    # What libsndfile and its wrapper raise for damaged files is of many kinds.
    except Exception as error:
        reason = ascii(getattr(error, "error_string", "") or str(error))[1:-1]
        raise RequestError(
            f"the sound cannot be decoded ({type(error).__name__}: {reason:.200}); wanted a whole file: save or send "
            "it again",
            field="audio",
        ) from error


def _from_array(array: NDArray[Any], rate: int | None, limits: SoundLimits) -> Samples:
    is_known = array.dtype.kind == "f" or array.dtype in (np.int16, np.int32)
    if not is_known or array.ndim not in (1, 2):
        raise RequestError(
            f"the sound is an array of {array.dtype} {list(array.shape)}; wanted floats, int16 or int32, [samples] or "
            "[samples, channels]: convert it",
            field="audio",
        )
    if rate is None:
        raise RequestError(
            f"the sound is an array without a rate; wanted its samples a second: give rate={RATE} or another",
            field="audio",
        )
    samples = array.reshape(len(array), -1) if array.size else array.reshape(0, 1)
    _check_shape(samples.shape[1], rate)
    limits.check(len(samples), rate)
    scale = 1.0 if array.dtype.kind == "f" else 0.5 ** (8 * array.dtype.itemsize - 1)
    step = max(1, _NUMBERS_AT_ONCE // samples.shape[1])
    blocks = (samples[start : start + step] * scale for start in range(0, len(samples), step))
    return _collect(blocks, rate, limits)


def _decode(data: bytes, limits: SoundLimits) -> Samples:
    require("media", "Reading a sound", ("soundfile",))
    if not data.startswith(_HEADERS):
        raise RequestError(
            f"the sound is of an unknown format ({len(data)} bytes, which begin with {data[:8].hex(' ')}); wanted WAV, "
            "FLAC, Ogg (Vorbis or Opus), MP3 or AIFF: convert it",
            field="audio",
        )
    try:
        import soundfile
    except OSError as error:
        raise MissingPackageError(
            f"Reading a sound needs libsndfile, which soundfile does not find ({error}); install that library, or type "
            "`pip install --force-reinstall soundfile`",
            extra="media",
        ) from error
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        if file.format not in FORMATS:
            raise RequestError(
                f"the sound is of the format {ascii(file.format)}; wanted one of {', '.join(FORMATS)}: convert it",
                field="audio",
            )
        _check_shape(file.channels, file.samplerate)
        # A length that the header does not know is the greatest number there is.
        limits.check(file.frames if file.frames < 1 << 62 else 0, file.samplerate)
        return _collect(_blocks(file), file.samplerate, limits)


def _blocks(file: Any) -> Iterator[NDArray[Any]]:
    """All samples of an open file, [samples, channels] at a time."""
    step = max(1, _NUMBERS_AT_ONCE // file.channels)
    while len(block := file.read(step, dtype="float32", always_2d=True)):
        yield block


def _check_shape(num_channels: int, rate: int) -> None:
    if not (0 < num_channels <= _MAX_CHANNELS and _MIN_RATE <= rate <= _MAX_RATE):
        raise RequestError(
            f"the sound has {num_channels} channels at {rate} Hz; wanted 1 to {_MAX_CHANNELS} at {_MIN_RATE} to "
            f"{_MAX_RATE} Hz: mix it down, or resample it",
            field="audio",
        )


def _collect(blocks: Iterator[NDArray[Any]], rate: int, limits: SoundLimits) -> Samples:
    """Blocks as one sound of one channel at 16 kHz."""
    resampler = _resampler(rate)
    parts: list[Samples] = []
    num_samples = 0
    for block in blocks:
        mono = _mono(block)
        if not (np.abs(mono) <= _MAX_SAMPLE).all():
            raise RequestError(
                f"the sound has samples that are no numbers, or beyond {_MAX_SAMPLE}; wanted numbers from -1 to 1: "
                "scale it, or save it again",
                field="audio",
            )
        num_samples += len(mono)
        limits.check(num_samples, rate)
        parts.append(mono if resampler is None else resampler.resample_chunk(mono))
    if resampler is not None:
        parts.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    result = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if not result.size:
        raise RequestError("the sound has no samples; wanted at least one: record it again", field="audio")
    return result


def _resampler(rate: int) -> Any:
    """A stream that resamples to 16 kHz; None at that rate."""
    if rate == RATE:
        return None
    require("media", f"Resampling a sound of {rate} Hz", ("soxr",))
    import soxr

    return soxr.ResampleStream(rate, RATE, 1, dtype="float32", quality="HQ")


def _mono(block: NDArray[Any]) -> Samples:
    """The mean of the channels, which are added in their order."""
    total = np.zeros(len(block))
    for channel in range(block.shape[1]):
        total += block[:, channel]
    # Numbers beyond float32 become infinite, and are refused as such.
    with np.errstate(over="ignore"):
        mono: Samples = (total / block.shape[1]).astype(np.float32)
    return mono

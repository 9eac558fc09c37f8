"""Sounds as GGUF's families of encoders read them: log-mel spectrograms, or raw samples, in stretches.

Samples are float32 mono at 16 kHz. Features are computed in float64 and rounded to float32 once; sums have a fixed
order, so that they do not depend on threads. A family is a record; its settings are fixed, as in llama.cpp's code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError, ShapeError
from localinfer.models.media.mmproj import MediaConfig, SoundConfig
from localinfer.models.media.records import EncoderInput, PreparedMedia

RATE = 16_000
"""Samples a second."""
HOP = 160
"""Samples from one frame to the next."""
_WHISPER_STRETCH, _QWEN3_STRETCH, _QWEN3_UNIT = 3000, 800, 100
_QWEN3_UNIT_ROWS = 13
_CHUNK = 30 * RATE
_SAMPLES_A_FRAME = 640
_FRAMES_AT_ONCE = 2048

Samples = NDArray[np.float32]
Features = NDArray[np.float64]


@dataclass(frozen=True)
class Spectrogram:
    """Settings of a log-mel spectrogram with steps of 160 samples."""

    fft_size: int
    """Samples of a Fourier transform."""
    window_size: int
    """Samples of its Hann window."""
    window_offset: int
    """Zeros before the window."""
    is_symmetric: bool
    """True if the window ends with the number that it begins with."""
    is_power: bool
    """True for squares of magnitudes."""
    is_htk: bool
    """True for HTK's mel scale and triangles of height 1; False for Slaney's, of area 1."""

    def mel(self, samples: Features, num_mels: int) -> Features:
        """Spectrum of [frames, mels], of as many frames as fit."""
        filters, window = _mel_filters(num_mels, self.fft_size, self.is_htk), _window(self)
        num_frames = max(len(samples) - self.fft_size + HOP, 0) // HOP
        frames = np.lib.stride_tricks.as_strided(
            samples, (num_frames, self.fft_size), (samples.strides[0] * HOP, samples.strides[0]), writeable=False
        )
        result = np.empty((num_frames, num_mels))
        for start in range(0, num_frames, _FRAMES_AT_ONCE):
            stop = min(start + _FRAMES_AT_ONCE, num_frames)
            spectrum = np.fft.rfft(frames[start:stop] * window, axis=1)
            power = spectrum.real**2 + spectrum.imag**2
            # One row of bins a frame: a sum over rows adds them in their order, on any processor.
            bins = np.ascontiguousarray((power if self.is_power else np.sqrt(power)).T)
            for index, (first, weights) in enumerate(filters):
                result[start:stop, index] = (bins[first : first + len(weights)] * weights[:, None]).sum(axis=0)
        return result


_WHISPER = Spectrogram(400, 400, 0, is_symmetric=False, is_power=True, is_htk=False)
_GEMMA4 = Spectrogram(512, 320, 0, is_symmetric=False, is_power=False, is_htk=True)
_LFM2 = Spectrogram(512, 400, 56, is_symmetric=True, is_power=True, is_htk=False)
_FLOOR = 2.0**-24
_GEMMA4_FLOOR = 0.001
_EMPHASIS = 0.97


@cache
def _window(settings: Spectrogram) -> Features:
    size = settings.window_size
    steps = np.arange(size) / (size - 1 if settings.is_symmetric else size)
    result = np.zeros(settings.fft_size)
    result[settings.window_offset : settings.window_offset + size] = 0.5 - 0.5 * np.cos(2.0 * np.pi * steps)
    return result


@cache
def _mel_filters(num_mels: int, fft_size: int, is_htk: bool) -> tuple[tuple[int, Features], ...]:
    """Triangles over the bins of a spectrum from 0 to 8 kHz: the first bin and the weights of each."""
    if is_htk:
        top = 2595.0 * np.log10(1.0 + 0.5 * RATE / 700.0)
        corners = 700.0 * (10.0 ** (np.linspace(0.0, top, num_mels + 2) / 2595.0) - 1.0)
    else:
        step = np.log(6.4) / 27.0
        mels = np.linspace(0.0, 15.0 + np.log(0.5 * RATE / 1000.0) / step, num_mels + 2)
        corners = np.where(mels < 15.0, mels * 200.0 / 3.0, 1000.0 * np.exp((mels - 15.0) * step))
    bins = np.arange(fft_size // 2 + 1) * RATE / fft_size
    filters = []
    for left, center, right in zip(corners, corners[1:], corners[2:], strict=False):
        weights = np.minimum((bins - left) / (center - left), (right - bins) / (right - center)).clip(0.0)
        if not is_htk:
            weights *= 2.0 / (right - left)
        inside = np.flatnonzero(weights)
        first, last = (inside[0], inside[-1] + 1) if inside.size else (0, 1)
        filters.append((int(first), weights[first:last]))
    return tuple(filters)


def _reflected(samples: Features, before: int, behind: int) -> Features:
    """Samples with their mirror images at the ends, zeros where there are too few."""
    count = len(samples)
    result = np.zeros(before + count + behind)
    result[before : before + count] = samples
    head, tail = samples[1 : before + 1], samples[max(count - 1 - behind, 0) : count - 1]
    result[before - len(head) : before] = head[::-1]
    result[before + count : before + count + len(tail)] = tail[::-1]
    return result


def _whisper_scale(mel: Features) -> Features:
    """Logarithms within 8 decades of the greatest."""
    logs = np.log10(np.maximum(mel, _FLOOR))
    scaled: Features = (np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0
    return scaled


def _whisper(samples: Features, num_mels: int) -> Iterator[Features]:
    """Stretches of 30 s; what follows the last whole one is silence that was put behind the sound."""
    half = _WHISPER.fft_size // 2
    if len(samples) <= half:
        samples = np.concatenate((samples, np.zeros(half + 1 - len(samples))))
    padded = np.concatenate((_reflected(samples, half, 0), np.zeros(_CHUNK + half)))
    frames = _whisper_scale(_WHISPER.mel(padded, num_mels))
    for start in range(0, len(frames) - _WHISPER_STRETCH + 1, _WHISPER_STRETCH):
        yield frames[start : start + _WHISPER_STRETCH]


def _qwen3(samples: Features, num_mels: int) -> Iterator[Features]:
    """Stretches of 8 s, filled with zeros up to whole seconds."""
    half = _WHISPER.fft_size // 2
    frames = _whisper_scale(_WHISPER.mel(_reflected(samples, half, half), num_mels))
    frames = frames[: len(samples) // HOP + 1]
    for start in range(0, len(frames), _QWEN3_STRETCH):
        stretch = frames[start : start + _QWEN3_STRETCH]
        yield np.pad(stretch, ((0, -len(stretch) % _QWEN3_UNIT), (0, 0)))


def _gemma4(samples: Features, num_mels: int) -> Iterator[Features]:
    """Stretches of 30 s, with the zeros before each that its first frame reaches back to."""
    before = _GEMMA4.window_size // 2
    for start in range(0, len(samples), _CHUNK):
        stretch = samples[start : start + _CHUNK]
        num_frames = max((len(stretch) + before - _GEMMA4.window_size - 1) // HOP, 0) + 1
        needed = (num_frames - 1) * HOP + _GEMMA4.fft_size
        behind = max(needed - before - len(stretch), 0)
        padded = np.concatenate((np.zeros(before), stretch, np.zeros(behind)))
        yield np.log(np.maximum(_GEMMA4.mel(padded, num_mels)[:num_frames], _GEMMA4_FLOOR))


def _gemma4_samples(samples: Features, _: int) -> Iterator[Features]:
    """Samples themselves, 40 ms a frame whatever the file says."""
    yield np.pad(samples, (0, -len(samples) % _SAMPLES_A_FRAME)).reshape(-1, _SAMPLES_A_FRAME)


def _lfm2(samples: Features, num_mels: int) -> Iterator[Features]:
    """One stretch, each mel row of mean 0 and deviation 1."""
    num_frames = len(samples) // HOP
    if num_frames < 2:
        raise RequestError(
            f"the sound has {len(samples)} samples at {RATE} Hz; wanted at least {2 * HOP} for this model: give a "
            "longer sound",
            field="audio",
        )
    half = _LFM2.fft_size // 2
    raised = np.concatenate((samples[:1], samples[1:] - _EMPHASIS * samples[:-1]))
    logs = np.log(_LFM2.mel(np.pad(raised, half), num_mels) + _FLOOR)
    heard = logs[:num_frames]
    result = np.zeros_like(logs)
    result[:num_frames] = (heard - heard.mean(axis=0)) / (heard.std(axis=0, ddof=1) + 1e-5)
    yield result


def _halved(count: int, times: int) -> int:
    for _ in range(times):
        count = (count + 1) // 2
    return count


@dataclass(frozen=True)
class SoundFamily:
    """A family of encoders of sounds."""

    stretches: Callable[[Features, int], Iterator[Features]]
    """From samples and the values of a frame to the frames of each stretch that is encoded alone."""
    num_rows: Callable[[int, SoundConfig], int]
    """Embeddings that come of a number of frames."""
    begin: str = ""
    """Special token before a sound."""
    end: str = ""
    """Special token after it."""


SOUND_FAMILIES: dict[str, SoundFamily] = {
    # Whole groups of rows only: an incomplete one is dropped.
    "ultravox": SoundFamily(_whisper, lambda frames, config: frames // 2 // config.merge),
    "voxtral": SoundFamily(_whisper, lambda frames, config: frames // 4 // config.merge, begin="[BEGIN_AUDIO]"),
    "qwen2a": SoundFamily(_whisper, lambda frames, _: frames // 4, "<|audio_bos|>", "<|audio_eos|>"),
    "qwen3a": SoundFamily(
        _qwen3, lambda frames, _: frames // _QWEN3_UNIT * _QWEN3_UNIT_ROWS, "<|audio_start|>", "<|audio_end|>"
    ),
    "gemma4a": SoundFamily(_gemma4, lambda frames, _: _halved(frames, 2), "<|audio>", "<audio|>"),
    "gemma4ua": SoundFamily(_gemma4_samples, lambda frames, _: frames, "<|audio>", "<audio|>"),
    "lfm2a": SoundFamily(_lfm2, lambda frames, _: _halved(frames, 3)),
}
"""Families by `projector_type`."""


def lay_out_sound(samples: Samples, config: MediaConfig) -> PreparedMedia:
    """Prepare a sound, float32 [samples] at 16 kHz. Raises: RequestError for one that the model cannot hear."""
    sound = config.sound
    if sound is None:
        raise RequestError(
            "the model's mmproj file has no encoder of sounds; wanted text or pictures: use another model",
            field="audio",
        )
    if samples.ndim != 1 or samples.dtype != np.float32 or not samples.size:
        raise ShapeError(f"the sound is {samples.dtype} {list(samples.shape)}; wanted float32 [samples], at least one")
    family = SOUND_FAMILIES[sound.projector]
    pieces: list[str | EncoderInput] = [family.begin] if family.begin else []
    for frames in family.stretches(samples.astype(np.float64), sound.num_mel_bins):
        num_rows = family.num_rows(len(frames), sound)
        pieces.append(EncoderInput(True, frames.astype(np.float32), num_rows, None, num_rows))
    return PreparedMedia.from_pieces([*pieces, *([family.end] if family.end else [])])

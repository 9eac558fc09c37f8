"""Families of Hugging Face folders that hear: the features of a sound, its inputs for the encoder, the text around.

A sound is float32, mono, 16,000 samples a second. Features are computed in double precision; which frames exist, and
which of them are the sound's, follows the published feature extractors.
Source: the feature extractors and processors of transformers 5.24, and torchaudio's for Granite Speech.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.models.media.folder_settings import PartSettings, ProcessorSettings
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.models.media.spectrograms import HOP, RATE, Spectrogram

Features = Callable[[NDArray[np.float32]], list["EncoderInput | str"]]
"""The pieces of a sound."""


@dataclass(frozen=True)
class HearingFamily:
    """A family: its way of preparing sounds, and what stands for one in a prompt."""

    features: Callable[[ProcessorSettings], Features]
    """Reads the settings, those of the class included."""
    defaults: Mapping[str, Any]
    """Settings of the class, for those that a folder leaves out."""
    token: tuple[str, str]
    """Name and usual text of the special token that stands for a sound in a prompt and in a rendered template."""
    around: tuple[tuple[str, str], tuple[str, str]] = (("", ""), ("", ""))
    """Names and usual texts of the tokens around that one where no template puts it into a prompt."""


class SoundProcessor:
    """Prepares sounds as the processor of a folder does; `token` and `alone` as in those of pictures."""

    token: str
    alone: str

    def __init__(self, settings: ProcessorSettings, family: HearingFamily) -> None:
        sound = settings.sound.over(family.defaults)
        settings = ProcessorSettings(
            settings.model_type, settings.config, settings.processor, settings.picture, sound, settings.tokens
        )
        if sound.integer("sampling_rate", high=1 << 20) != RATE:
            raise sound.unsupported("sampling_rate", f"{RATE} samples a second")
        if sound.number("dither", low=0.0):
            raise sound.unsupported("dither", "features without noise")
        self._features = family.features(settings)
        self.token = settings.token(*family.token)
        self._around = [settings.token(*name) if name[0] else name[1] for name in family.around]
        self.alone = self.token.join(self._around)

    def lay_out(self, samples: NDArray[np.float32], *, is_alone: bool = False) -> PreparedMedia:
        """Prepare a sound; is_alone: no template writes the texts around it, so they are part of it.

        Raises: RequestError if it has no samples, or more than the model reads.
        """
        if not len(samples):
            raise RequestError("a sound has no samples; wanted some. Send a sound with samples")
        before, behind = self._around if is_alone else ("", "")
        pieces = self._features(samples)
        return PreparedMedia.from_pieces([*([before] if before else ()), *pieces, *([behind] if behind else ())])


def _whisper(settings: ProcessorSettings) -> Callable[[NDArray[np.float32], int], NDArray[np.float32]]:
    """Whisper's features of a sound padded to a number of samples, on the side that the file says: [frames, mels]."""
    sound, pads_left = settings.sound, _pads_left(settings)
    size, num_mels = sound.integer("n_fft", low=2), sound.integer("feature_size")
    spectrogram = Spectrogram(size, size, 0, is_symmetric=False, is_power=True, is_htk=False)
    _check_hop(sound)

    def features(samples: NDArray[np.float32], length: int) -> NDArray[np.float32]:
        if length <= size // 2:
            raise _too_short(length, size // 2)
        padded = np.zeros(length)
        padded[length - len(samples) if pads_left else 0 :][: len(samples)] = samples
        # The last frame is left out.
        return _compressed(spectrogram.mel(np.pad(padded, size // 2, mode="reflect"), num_mels)[: length // HOP])

    return features


def _pads_left(settings: ProcessorSettings) -> bool:
    """True if silence is put before a sound."""
    side = settings.sound.text("padding_side", "right")
    if side not in ("left", "right"):
        raise settings.sound.wrong("padding_side", "'left' or 'right'")
    return side == "left"


def _padded_right(settings: ProcessorSettings) -> Callable[[NDArray[np.float32], int], NDArray[np.float32]]:
    """Whisper's features for a model that reads a sound from its first frame on."""
    if _pads_left(settings):
        raise settings.sound.unsupported("padding_side", "'right'")
    return _whisper(settings)


def _check_hop(settings: PartSettings) -> None:
    if settings.integer("hop_length") != HOP:
        raise settings.unsupported("hop_length", f"frames every {HOP} samples")


def _compressed(energies: NDArray[np.float64]) -> NDArray[np.float32]:
    """Whisper's logarithm: eight decades below the greatest, in quarters."""
    decades = np.log10(np.maximum(energies, 1e-10))
    values: NDArray[np.float64] = (np.maximum(decades, decades.max() - 8) + 4) / 4
    return values.astype(np.float32)


def _longest(settings: ProcessorSettings, samples: NDArray[np.float32]) -> int:
    """The samples that a model reads at once. Raises: RequestError if a sound has more."""
    longest = settings.sound.integer("chunk_length", high=1 << 16) * RATE
    if len(samples) > longest:
        raise _too_long(len(samples), longest)
    return longest


def _too_short(num_samples: int, least: int) -> RequestError:
    return RequestError(
        f"a sound has {num_samples} samples; wanted more than {least}, for a frame of this model's. Send a longer one"
    )


def _too_long(num_samples: int, most: int) -> RequestError:
    return RequestError(
        f"a sound lasts {num_samples / RATE:.1f} s; this model reads {most // RATE} s at most. Cut the sound"
    )


def _qwen2_audio(settings: ProcessorSettings) -> Features:
    """The sound filled with silence to the longest; what lies behind it is not attended to."""
    features = _padded_right(settings)

    def pieces(samples: NDArray[np.float32]) -> list[EncoderInput | str]:
        values = features(samples, _longest(settings, samples))
        num_frames = min(ceil(len(samples) / HOP), len(values))
        # The convolutions look two frames further.
        return [_input(values[: num_frames + 2], _halved_twice(num_frames), num_frames)]

    return pieces


def _audioflamingo3(settings: ProcessorSettings) -> Features:
    """Stretches of the longest length, each filled with silence that is not attended to."""
    features, longest = _padded_right(settings), settings.sound.integer("chunk_length", high=1 << 16) * RATE
    most = settings.processor.over({"max_audio_len": 600}).integer("max_audio_len") * RATE // longest * longest

    def pieces(samples: NDArray[np.float32]) -> list[EncoderInput | str]:
        if len(samples) > most:
            raise _too_long(len(samples), most)
        found: list[EncoderInput | str] = []
        for start in range(0, len(samples), longest):
            stretch = samples[start : start + longest]
            values = features(stretch, longest)
            num_frames = min(ceil(len(stretch) / HOP), len(values))
            found.append(_input(values[: num_frames + 2], _halved_twice(num_frames), num_frames))
        return found

    return pieces


def _qwen2_omni(settings: ProcessorSettings) -> Features:
    """The frames of the sound alone; their level is that of the sound filled with silence to the longest."""
    features, pads_left = _whisper(settings), _pads_left(settings)

    def pieces(samples: NDArray[np.float32]) -> list[EncoderInput | str]:
        length = _longest(settings, samples)
        values = features(samples, length)
        values = values[ceil((length - len(samples)) / HOP) :] if pads_left else values[: ceil(len(samples) / HOP)]
        return [_input(values, _halved_twice(len(values)))]

    return pieces


def _halved_twice(num_frames: int) -> int:
    num_rows = ((num_frames - 1) // 2 + 1 - 2) // 2 + 1
    if num_rows < 1:
        raise RequestError(
            f"a sound has {num_frames} frames; wanted so many that the model makes an embedding of them, four. Send a "
            "longer one"
        )
    return num_rows


def _qwen3_omni(settings: ProcessorSettings) -> Features:
    """The frames of the sound alone."""
    features = _whisper(settings)
    piece = 2 * settings.part("audio_config").over({"n_window": 50}).integer("n_window")

    def pieces(samples: NDArray[np.float32]) -> list[EncoderInput | str]:
        values = features(samples, len(samples))
        whole, rest = divmod(len(values), piece)
        num_rows = whole * _thrice_halved(piece) + _thrice_halved(rest)
        return [_input(values, num_rows)]

    return pieces


def _qwen3_asr(settings: ProcessorSettings) -> Features:
    """The frames of the sound, which the last of them fill up to whole pieces with zeros before they are convolved."""
    features = _whisper(settings)
    piece = 2 * settings.part("audio_config").over({"n_window": 50}).integer("n_window")
    least = settings.sound.integer("min_length", low=0, high=1 << 30)

    def pieces(samples: NDArray[np.float32]) -> list[EncoderInput | str]:
        values = features(samples, max(len(samples), least))
        whole, rest = divmod(len(values), piece)
        num_rows = whole * _thrice_halved(piece) + _thrice_halved(rest)
        padded = np.pad(values, ((0, -len(values) % piece), (0, 0)))
        return [_input(padded, num_rows, len(values))]

    return pieces


def _thrice_halved(count: int) -> int:
    for _ in range(3):
        count = (count + 1) // 2
    return count


def _voxtral(settings: ProcessorSettings) -> Features:
    """Stretches of the longest length, the last filled with silence; their level is that of the whole."""
    features, sound = _whisper(settings), settings.sound
    stretch = sound.integer("chunk_length", high=1 << 16) * RATE
    num_frames = stretch // HOP
    audio = settings.part("audio_config").over({"hidden_size": 1280, "intermediate_size": 5120})
    joined = audio.integer("intermediate_size") // audio.integer("hidden_size")
    num_rows = -(-num_frames // 2) // joined

    def pieces(samples: NDArray[np.float32]) -> list[EncoderInput | str]:
        count = ceil(len(samples) / stretch)
        values = features(samples, count * stretch)
        return [_input(values[index * num_frames : (index + 1) * num_frames], num_rows) for index in range(count)]

    return pieces


def _gemma4(settings: ProcessorSettings) -> Features:
    """Magnitudes of frames whose first stands half before the sound; those that end behind it are left out."""
    sound = settings.sound
    length, size, num_mels = sound.integer("frame_length"), sound.integer("fft_length"), sound.integer("feature_size")
    if length > size:
        raise sound.wrong("frame_length", f"at most fft_length, {size}")
    _check_hop(sound)
    floor = sound.number("mel_floor", low=1e-12)
    for key in ("preemphasis", "min_frequency"):
        if sound.number(key):
            raise sound.unsupported(key, "0")
    for key in ("per_bin_mean", "per_bin_stddev"):
        if key in sound:
            raise sound.unsupported(key, "features that are not normalised")
    for key, wanted in (("input_scale_factor", 1.0), ("max_frequency", RATE / 2)):
        if sound.number(key) != wanted:
            raise sound.unsupported(key, f"{wanted:g}")
    spectrogram = Spectrogram(size, length, 0, is_symmetric=False, is_power=False, is_htk=True)
    start, end = settings.token("boa_token", "<|audio>"), settings.token("eoa_token", "<audio|>")
    longest, multiple = 480_000, 128

    def pieces(samples: NDArray[np.float32]) -> list[EncoderInput | str]:
        if len(samples) > longest:
            raise _too_long(len(samples), longest)
        before = length // 2
        num_samples = before + -(-len(samples) // multiple) * multiple
        # Zeros behind the last frame's window, up to the transform's size.
        padded = np.zeros(num_samples + size - length)
        padded[before : before + len(samples)] = samples
        num_frames = (num_samples - length - 1) // HOP + 1
        # A frame counts if the sample behind it is the sound's.
        num_valid = min(max(0, (before + len(samples) - 1 - length) // HOP + 1), num_frames)
        if num_valid < 1:
            raise _too_short(len(samples), length - before)
        # Those that do not count are zero in the published code, as all frames behind the end are.
        values = np.log(spectrogram.mel(padded, num_mels)[:num_valid] + floor).astype(np.float32)
        return [start, _input(values, (num_valid + 3) // 4), end]

    return pieces


def _gemma4_unified(settings: ProcessorSettings) -> Features:
    """Frames of samples, the last filled up with silence."""
    size = settings.sound.integer("audio_samples_per_token")
    start, end = settings.token("boa_token", "<|audio>"), settings.token("eoa_token", "<audio|>")

    def pieces(samples: NDArray[np.float32]) -> list[EncoderInput | str]:
        frames = np.pad(samples, (0, -len(samples) % size)).reshape(-1, size)
        return [start, _input(frames, len(frames)), end]

    return pieces


def _granite(settings: ProcessorSettings) -> Features:
    """Two frames joined to one; an odd one is left out."""
    sound = settings.sound
    record = sound.get("melspec_kwargs")
    spec = PartSettings(
        f"{sound.file}: melspec_kwargs",
        record if isinstance(record, dict) else {},
        {"n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 80},
    )
    size, length, num_mels = (spec.integer(key) for key in ("n_fft", "win_length", "n_mels"))
    if length > size:
        raise spec.wrong("win_length", f"at most n_fft, {size}")
    _check_hop(spec)
    offset = (size - length) // 2
    spectrogram = Spectrogram(size, length, offset, is_symmetric=False, is_power=True, is_htk=True)
    block = sound.integer("projector_window_size")
    queries = block // sound.integer("projector_downsample_rate")

    def pieces(samples: NDArray[np.float32]) -> list[EncoderInput | str]:
        if len(samples) <= size // 2:
            raise _too_short(len(samples), size // 2)
        reflected = np.pad(samples.astype(np.float64), size // 2, mode="reflect")
        num_frames = len(samples) // HOP + 1
        values = _compressed(spectrogram.mel(reflected, num_mels)[:num_frames])
        joined = values[: num_frames // 2 * 2].reshape(num_frames // 2, -1)
        return [_input(joined, -(-len(joined) // block) * queries)]

    return pieces


def _input(values: NDArray[np.float32], num_rows: int, num_valid: int | None = None) -> EncoderInput:
    return EncoderInput(True, np.ascontiguousarray(values), num_rows, None, num_rows, num_valid=num_valid)


_RATE = {"sampling_rate": RATE, "dither": 0.0}
_WHISPER = _RATE | {"feature_size": 80, "n_fft": 400, "hop_length": 160, "chunk_length": 30}
_BOS, _EOS = ("audio_bos_token", "<|audio_bos|>"), ("audio_eos_token", "<|audio_eos|>")
_QWEN2_OMNI = HearingFamily(_qwen2_omni, _WHISPER | {"chunk_length": 300}, ("audio_token", "<|AUDIO|>"), (_BOS, _EOS))
_QWEN3_OMNI = HearingFamily(
    _qwen3_omni,
    _WHISPER,
    ("audio_token", "<|audio_pad|>"),
    (("audio_bos_token", "<|audio_start|>"), ("audio_eos_token", "<|audio_end|>")),
)

SOUND_FAMILIES: dict[str, HearingFamily] = {
    "qwen2_audio": HearingFamily(_qwen2_audio, _WHISPER, ("audio_token", "<|AUDIO|>"), (_BOS, _EOS)),
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), _QWEN2_OMNI),
    **dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_thinker"), _QWEN3_OMNI),
    "qwen3_asr": HearingFamily(
        _qwen3_asr, _WHISPER | {"feature_size": 128, "min_length": 8000}, _QWEN3_OMNI.token, _QWEN3_OMNI.around
    ),
    "audioflamingo3": HearingFamily(_audioflamingo3, _WHISPER | {"feature_size": 128}, ("audio_token", "<sound>")),
    "voxtral": HearingFamily(
        _voxtral, _WHISPER, ("audio_token", "[AUDIO]"), (("begin_audio_token", "[BEGIN_AUDIO]"), ("", ""))
    ),
    "gemma4": HearingFamily(
        _gemma4,
        _RATE
        | {"feature_size": 128, "frame_length": 320, "hop_length": 160, "fft_length": 512, "mel_floor": 1e-3}
        | {"preemphasis": 0.0, "input_scale_factor": 1.0, "min_frequency": 0.0, "max_frequency": 8000.0},
        ("audio_token", "<|audio|>"),
    ),
    "gemma4_unified": HearingFamily(
        _gemma4_unified, _RATE | {"audio_samples_per_token": 640}, ("audio_token", "<|audio|>")
    ),
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus"),
        HearingFamily(
            _granite,
            _RATE | {"projector_window_size": 15, "projector_downsample_rate": 5},
            ("audio_token", "<|audio|>"),
        ),
    ),
}
"""Families by `model_type`."""

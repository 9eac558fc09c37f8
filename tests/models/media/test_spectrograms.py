"""Sounds of every family of GGUF files: frames, rows and texts as llama.cpp's, and features from their definitions."""

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import RequestError, ShapeError
from localinfer.models.media.mmproj import MediaConfig, SoundConfig
from localinfer.models.media.picture_layouts import lay_out
from localinfer.models.media.records import EncoderInput
from localinfer.models.media.spectrograms import SOUND_FAMILIES, lay_out_sound
from tests.models.media import fixtures

CASES = [(name, count) for name, family in fixtures.skeletons().items() for count in family.get("sounds") or []]
MIXED = [name for name, family in fixtures.skeletons().items() if family.get("sounds") and family.get("pictures")]
FLOOR = 2.0**-24


def sound_config(projector: str, num_mels: int = 80, merge: int = 8) -> MediaConfig:
    return MediaConfig(None, SoundConfig(projector, 48, 96, 2, 3, 1e-5, merge, 64, 0, num_mels))


def hear(projector: str, samples: NDArray[np.float32], num_mels: int = 80) -> list[NDArray[np.float32]]:
    pieces = lay_out_sound(samples, sound_config(projector, num_mels)).pieces
    return [piece.values for piece in pieces if isinstance(piece, EncoderInput)]


def noise(count: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (0.3 * np.sin(np.arange(count) * 0.2) + 0.1 * rng.standard_normal(count)).astype(np.float32)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(("name", "count"), CASES)
def test_sounds_are_laid_out_as_llama_cpp_does(name: str, count: int) -> None:
    answers, key = fixtures.answers(), f"{name}.{count}."
    media = lay_out_sound(fixtures.builder().sound(count, fixtures.SEED), fixtures.config(name))
    chunks = fixtures.chunks(name, str(count), [media])
    frames = [len(chunk.values) for chunk in chunks if isinstance(chunk, EncoderInput)]
    assert frames == answers[key + "frames"].tolist()
    assert_equal(chunks, key)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("name", MIXED)
def test_a_sound_and_a_picture_stand_in_one_prompt(name: str) -> None:
    builder, config = fixtures.builder(), fixtures.config(name)
    (count,), size = fixtures.cases(name, "mixed")
    sound = lay_out_sound(builder.sound(count, fixtures.SEED), config)
    chunks = fixtures.chunks(name, "mixed", [sound, lay_out(builder.picture(*size, fixtures.SEED), config)])
    assert_equal(chunks, f"{name}.mixed.")


def assert_equal(chunks: list[list[int] | EncoderInput], key: str) -> None:
    answers = fixtures.answers()
    kinds = [1 + chunk.is_sound if isinstance(chunk, EncoderInput) else 0 for chunk in chunks]
    assert kinds == answers[key + "kinds"].tolist()
    counts = [chunk.num_rows if isinstance(chunk, EncoderInput) else len(chunk) for chunk in chunks]
    assert counts == answers[key + "counts"].tolist()
    taken = [chunk.num_positions if isinstance(chunk, EncoderInput) else len(chunk) for chunk in chunks]
    assert taken == answers[key + "n_pos"].tolist()
    tokens = [token for chunk in chunks if isinstance(chunk, list) for token in chunk]
    assert tokens == answers[key + "tokens"].tolist()
    assert np.array_equal(fixtures.positions(chunks), answers[key + "positions"])


def triangle(frequency: float, corners: NDArray[np.float64], index: int, is_htk: bool) -> float:
    left, center, right = corners[index : index + 3]
    height = 1.0 if is_htk else 2.0 / (right - left)
    if left < frequency <= center:
        return float(height * (frequency - left) / (center - left))
    return float(height * (right - frequency) / (right - center)) if center < frequency < right else 0.0


def corner_frequencies(num_mels: int, is_htk: bool) -> NDArray[np.float64]:
    def to_mel(f: float) -> float:
        if is_htk:
            return float(2595 * np.log10(1 + f / 700))
        return 3 * f / 200 if f < 1000 else float(15 + 27 * np.log(f / 1000) / np.log(6.4))

    # By bisection, so that no inverse of the formula is written twice.
    found = []
    for wanted in np.linspace(0.0, to_mel(8000.0), num_mels + 2):
        low, high = 0.0, 8001.0
        for _ in range(80):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if to_mel(middle) < wanted else (low, middle)
        found.append(0.5 * (low + high))
    return np.array(found)


def frame_energies(frame: NDArray[np.float64], window: NDArray[np.float64], num_mels: int, is_htk: bool) -> list[float]:
    """The mel energies of one frame by sums of cosines and sines; of magnitudes with HTK's scale."""
    size = len(frame)
    steps = np.arange(size)
    corners = corner_frequencies(num_mels, is_htk)
    energies = []
    for bin in range(size // 2 + 1):
        angle = 2 * np.pi * bin * steps / size
        power = np.sum(frame * window * np.cos(angle)) ** 2 + np.sum(frame * window * np.sin(angle)) ** 2
        energies.append(np.sqrt(power) if is_htk else power)
    return [
        sum(energies[k] * triangle(k * 16000 / size, corners, mel, is_htk) for k in range(len(energies)))
        for mel in range(num_mels)
    ]


def hann(size: int, divisor: int) -> NDArray[np.float64]:
    return np.array([0.5 * (1 - np.cos(2 * np.pi * index / divisor)) for index in range(size)])


@pytest.mark.parametrize("frame", [0, 1, 7])
def test_whisper_features_are_those_of_their_definition(frame: int) -> None:
    samples = noise(1700)
    exact = samples.astype(np.float64)
    padded = np.concatenate([exact[200:0:-1], exact, np.zeros(480_200)])
    (found,) = hear("ultravox", samples, 20)
    logs = np.log10(
        np.maximum(frame_energies(padded[frame * 160 : frame * 160 + 400], hann(400, 400), 20, False), FLOOR)
    )
    # The greatest of the whole sound is in these features, too.
    top = found.max() * 4.0 - 4.0
    assert np.allclose(found[frame], (np.maximum(logs, top - 8.0) + 4.0) / 4.0, rtol=0, atol=3e-7)
    assert found.shape == (3000, 20) and found.dtype == np.float32


def test_qwen3_features_are_whispers_with_reflections_and_zeros_behind() -> None:
    samples = noise(1500)
    exact = samples.astype(np.float64)
    padded = np.concatenate([exact[200:0:-1], exact, exact[-2:-202:-1]])
    (found,) = hear("qwen3a", samples, 20)
    (whisper,) = hear("ultravox", samples, 20)
    assert found.shape == (100, 20) and not found[10:].any()
    assert np.array_equal(found[:7], whisper[:7])
    logs = np.log10(np.maximum(frame_energies(padded[1440:1840], hann(400, 400), 20, False), FLOOR))
    assert np.allclose(found[9], (logs + 4.0) / 4.0, rtol=0, atol=3e-7)


def test_gemma4_features_are_those_of_their_definition() -> None:
    samples = noise(1000)
    exact = samples.astype(np.float64)
    padded = np.concatenate([np.zeros(160), exact, np.zeros(1000)])
    window = np.concatenate([hann(320, 320), np.zeros(192)])
    (found,) = hear("gemma4a", samples, 16)
    assert found.shape == (6, 16)
    for frame in (0, 5):
        energies = frame_energies(padded[frame * 160 : frame * 160 + 512], window, 16, True)
        assert np.allclose(found[frame], np.log(np.maximum(energies, 0.001)), rtol=0, atol=2e-6)


def test_lfm2_features_are_those_of_their_definition() -> None:
    samples = noise(900)
    exact = samples.astype(np.float64)
    raised = np.array([exact[0], *(exact[index] - 0.97 * exact[index - 1] for index in range(1, 900))])
    padded = np.concatenate([np.zeros(256), raised, np.zeros(256)])
    window = np.concatenate([np.zeros(56), hann(400, 399), np.zeros(56)])
    rows = [
        np.log(np.array(frame_energies(padded[frame * 160 : frame * 160 + 512], window, 12, False)) + FLOOR)
        for frame in range(5)
    ]
    wanted = (rows - np.mean(rows, axis=0)) / (np.std(rows, axis=0, ddof=1) + 1e-5)
    (found,) = hear("lfm2a", samples, 12)
    assert found.shape == (6, 12) and not found[5].any()
    assert np.allclose(found[:5], wanted, rtol=0, atol=1e-6)


def test_raw_samples_are_cut_into_frames() -> None:
    samples = noise(1300)
    (found,) = hear("gemma4ua", samples, 128)
    assert found.shape == (3, 640)
    assert np.array_equal(found.reshape(-1)[:1300], samples) and not found.reshape(-1)[1300:].any()


@pytest.mark.parametrize(("count", "stretches"), [(1, 1), (200, 1), (479_839, 1), (479_840, 2), (960_000, 3)])
def test_whisper_has_stretches_of_thirty_seconds(count: int, stretches: int) -> None:
    found = hear("qwen2a", noise(count), 4)
    assert [len(frames) for frames in found] == [3000] * stretches


@pytest.mark.parametrize(
    ("projector", "count", "frames"),
    [
        ("gemma4a", 1, [1]),
        ("gemma4a", 480_001, [2999, 1]),
        ("qwen3a", 1, [100]),
        ("qwen3a", 127_999, [800]),
        ("qwen3a", 128_000, [800, 100]),
        ("gemma4ua", 1, [1]),
        ("lfm2a", 320, [3]),
    ],
)
def test_stretches_at_the_edges(projector: str, count: int, frames: list[int]) -> None:
    found = hear(projector, noise(count), 4)
    assert [len(one) for one in found] == frames
    assert all(np.isfinite(one).all() for one in found)


@pytest.mark.parametrize("projector", SOUND_FAMILIES)
def test_silence_has_finite_features(projector: str) -> None:
    assert all(np.isfinite(one).all() for one in hear(projector, np.zeros(4000, np.float32), 8))


def test_features_do_not_depend_on_how_many_frames_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = noise(12_345)
    whole = hear("gemma4a", samples, 16)
    monkeypatch.setattr("localinfer.models.media.spectrograms._FRAMES_AT_ONCE", 7)
    assert all(np.array_equal(one, other) for one, other in zip(hear("gemma4a", samples, 16), whole, strict=True))


def test_sounds_that_cannot_be_heard_are_refused() -> None:
    with pytest.raises(RequestError, match="319 samples.*at least 320"):
        hear("lfm2a", noise(319))
    with pytest.raises(RequestError, match="no encoder of sounds"):
        lay_out_sound(noise(100), MediaConfig(None, None))
    for samples in (np.zeros(0, np.float32), np.zeros((2, 5), np.float32), np.zeros(5)):
        with pytest.raises(ShapeError, match=r"wanted float32 \[samples\]"):
            lay_out_sound(samples, sound_config("ultravox"))

"""Encoders of sounds: every family against float64 formulas, bits on any number of threads, and broken files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import CorruptFileError, RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.models.media.encoder import MediaEncoder, read_mmproj
from localinfer.models.media.records import EncoderInput
from localinfer.models.media.spectrograms import lay_out_sound
from localinfer.quant.gguf.reader import read_gguf
from localinfer.types import FloatArray
from tests.models.media import fixtures

FAMILIES = [name for name, family in fixtures.skeletons().items() if family.get("sounds")]

pytestmark = pytest.mark.skipif(not FAMILIES, reason="the data folder ../shared has no models that hear")


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[ThreadPool, ThreadPool]]:
    """One thread, and two."""
    pools = ThreadPool(1), ThreadPool(2)
    yield pools
    for pool in pools:
        pool.close()


def opened(name: str, folder: Path, pool: ThreadPool, left_out: str = "") -> MediaEncoder:
    skeleton = dict(fixtures.skeletons()[name]["mmproj"])
    skeleton["tensors"] = [(tensor, shape) for tensor, shape in skeleton["tensors"] if tensor != left_out]
    path = folder / f"mmproj-{name}.gguf"
    fixtures.builder().write(skeleton, path, fixtures.SEED)
    with read_gguf(path) as file:
        return MediaEncoder(read_mmproj(file), file, pool)


def encoded(encoder: MediaEncoder, name: str, samples: int) -> FloatArray:
    prepared = lay_out_sound(fixtures.builder().sound(samples, fixtures.SEED), fixtures.config(name))
    return np.concatenate([encoder.encode(piece) for piece in prepared.pieces if isinstance(piece, EncoderInput)])


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_equal_the_formulas_on_any_number_of_threads(
    name: str, tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]
) -> None:
    alone, together = (opened(name, tmp_path, pool) for pool in pools)
    assert alone.weight_bytes > 0 and alone.sound_bytes(300) > 0 and alone.kernels
    for samples in sorted(fixtures.skeletons()[name]["sounds"]):
        wanted = fixtures.answers()[f"{name}.{samples}.embeddings_exact"]
        found = encoded(together, name, samples)
        error = float(((found - wanted) ** 2).sum() / (wanted**2).sum())
        assert error <= 1e-11, f"{samples}: {error}"
        assert found.shape[1] == alone.width
        assert np.array_equal(encoded(alone, name, samples), found), samples


def test_one_file_encodes_pictures_and_sounds(tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]) -> None:
    encoder = opened("gemma4-both", tmp_path, pools[1])
    assert encoder.config.picture is not None and encoder.config.sound is not None
    assert encoder.width == 64


def test_a_longer_sound_leaves_the_bits_of_a_shorter_one(tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]) -> None:
    # Graphs of this family are written again for more rows, after the file was closed.
    encoder = opened("lfm2a", tmp_path, pools[1])
    first = encoded(encoder, "lfm2a", 29333)
    encoder.encode(EncoderInput(True, np.zeros((800, 128), np.float32), 100, None, 100))
    assert np.array_equal(encoded(encoder, "lfm2a", 29333), first)
    with pytest.raises(RequestError, match="give a shorter one"):
        encoder.encode(EncoderInput(True, np.zeros((80_000, 128), np.float32), 10_000, None, 10_000))


def test_frames_of_another_layout_are_refused(tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]) -> None:
    encoder = opened("ultravox", tmp_path, pools[0])
    for values, message in (
        (np.zeros((3000, 79), np.float32), r"wanted float32 \[frames, 80\]"),
        (np.zeros((3000, 80), np.float64), "wanted float32"),
        (np.zeros((0, 80), np.float32), "wanted float32"),
        (np.zeros((3002, 80), np.float32), "which has 1500 positions"),
        (np.zeros((2000, 80), np.float32), "its layout says 187"),
    ):
        with pytest.raises(RequestError, match=message):
            encoder.encode(EncoderInput(True, values, 187, None, 187))
    with pytest.raises(RequestError, match="wanted a multiple of 100"):
        opened("qwen3a", tmp_path, pools[0]).encode(EncoderInput(True, np.zeros((150, 128), np.float32), 26, None, 26))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("ultravox", "mm.a.norm_mid.weight"),
        ("qwen3a", "a.conv2d.2.weight"),
        ("gemma4a", "a.blk.1.attn_k_rel.weight"),
        ("lfm2a", "a.blk.0.pos_bias_v"),
    ],
)
def test_a_missing_tensor_is_named(
    name: str, tensor: str, tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]
) -> None:
    with pytest.raises(CorruptFileError, match=f"no tensor '{tensor}'"):
        opened(name, tmp_path, pools[0], left_out=tensor)

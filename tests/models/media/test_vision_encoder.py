"""Encoders of pictures: every family against float64 formulas, bits on any number of threads, and broken files."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import (
    ClosedError,
    CorruptFileError,
    LocalinferError,
    ModelFileError,
    RequestError,
    UnsupportedFormatError,
)
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.models.media.encoder import MediaEncoder, read_mmproj
from localinfer.models.media.picture_layouts import lay_out
from localinfer.models.media.records import EncoderInput
from localinfer.quant.gguf.reader import read_gguf
from localinfer.types import FloatArray
from tests.models.media import fixtures
from tests.support.samples import by_turns

FAMILIES = [name for name, family in fixtures.skeletons().items() if family.get("pictures")]
MOST_ERROR = {"qwen2.5vl-q8_0": 1e-3}
"""Normalised squared error where weights have eight bits, and so have what they are multiplied by."""

pytestmark = pytest.mark.skipif(not FAMILIES, reason="the data folder ../shared has no models that see")


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[ThreadPool, ThreadPool]]:
    """One thread, and two."""
    pools = ThreadPool(1), ThreadPool(2)
    yield pools
    for pool in pools:
        pool.close()


def mmproj(name: str, folder: Path, change: dict[str, Any] | None = None) -> Path:
    """An mmproj file of a family. change: tensors with other shapes, None for those that are left out."""
    skeleton = dict(fixtures.skeletons()[name]["mmproj"])
    tensors = {tensor: shape for tensor, shape in skeleton["tensors"]} | (change or {})
    skeleton["tensors"] = [(tensor, shape) for tensor, shape in tensors.items() if shape is not None]
    path = folder / f"mmproj-{name}.gguf"
    fixtures.builder().write(skeleton, path, fixtures.SEED)
    return path


def opened(name: str, path: Path, pool: ThreadPool) -> MediaEncoder:
    with read_gguf(path) as file:
        return MediaEncoder(read_mmproj(file, has_mrope=fixtures.config(name).has_mrope), file, pool)


def inputs(name: str, size: tuple[int, int]) -> list[EncoderInput]:
    pixels: NDArray[np.uint8] = fixtures.builder().picture(*size, fixtures.SEED)
    prepared = lay_out(pixels, fixtures.config(name))
    return [piece for piece in prepared.pieces if isinstance(piece, EncoderInput)]


def encoded(encoder: MediaEncoder, name: str, size: tuple[int, int]) -> FloatArray:
    return np.concatenate([encoder.encode(piece) for piece in inputs(name, size)])


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_equal_the_formulas_on_any_number_of_threads(
    name: str, tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]
) -> None:
    path, sizes = mmproj(name, tmp_path), [tuple(size) for size in fixtures.skeletons()[name]["pictures"]]
    alone, together = (opened(name, path, pool) for pool in pools)
    assert alone.weight_bytes > 0 and alone.picture_bytes(64) > 0 and alone.kernels
    found = {size: encoded(together, name, size) for size in sizes}
    # After larger pictures, which leave their rows in the buffers.
    for size in reversed(sizes):
        wanted = fixtures.answers()[f"{name}.{size[0]}x{size[1]}.embeddings_exact"]
        error = float(((found[size] - wanted) ** 2).sum() / (wanted**2).sum())
        assert error <= MOST_ERROR.get(name, 1e-11), f"{size}: {error}"
        assert found[size].shape[1] == alone.width
        assert np.array_equal(encoded(alone, name, size), found[size]), size
    for encoder in (alone, together):
        encoder.close()


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5vl-q8_0", "minicpmv4.6", "minicpmv", "gemma4-unified"])
def test_a_plan_knows_sizes_and_kernels_without_threads(
    name: str, tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]
) -> None:
    path = mmproj(name, tmp_path)
    loaded = opened(name, path, pools[0])
    with read_gguf(path) as file:
        plan = MediaEncoder(read_mmproj(file), file, None)
    assert plan.weight_bytes == loaded.weight_bytes and plan.kernels == loaded.kernels
    assert plan.picture_bytes(256) == loaded.picture_bytes(256)
    with pytest.raises(ClosedError):
        plan.encode(inputs(name, (56, 56))[0])


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5vl", "qwen2.5vl-q8_0", "qwen3vl"])
def test_a_picture_takes_the_bytes_that_were_planned(
    name: str, tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]
) -> None:
    encoder, config = opened(name, mmproj(name, tmp_path), pools[0]), fixtures.config(name).picture
    assert config is not None
    side, rows = 16 * config.patch_size, 256 // config.merge**2
    encoder.encode(EncoderInput(False, np.zeros((side, side, 3), np.uint8), rows, None, rows))
    assert encoder._pictures is not None
    held = encoder._pictures._pages._memory.nbytes
    for graph in encoder._pictures.graphs:
        assert graph._program is not None
        memory = graph._program.tape.memory
        held += sum(array.nbytes for array in (*memory.buffers, *memory._shared.values()))
    # What programs return is not asked of these, so there is room for one row of it.
    assert held - (1 << 11) <= encoder.picture_bytes(256) <= held


@pytest.mark.parametrize("name", ["qwen2.5vl", "gemma3"])
def test_a_caller_can_end_an_encoding(name: str, tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]) -> None:
    encoder, piece = opened(name, mmproj(name, tmp_path), pools[1]), inputs(name, (56, 56))[0]
    wanted, calls = encoder.encode(piece), []

    def end() -> None:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encoder.encode(piece, end)
    assert np.array_equal(encoder.encode(piece), wanted)


@pytest.mark.parametrize("name", ["llava1.5", "llava-next", "internvl"])
def test_the_class_row_may_come_first_as_in_the_published_models(
    name: str, tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]
) -> None:
    with read_gguf(mmproj(name, tmp_path)) as file:
        config = read_mmproj(file)
        assert config.picture is not None
        config = replace(config, picture=replace(config.picture, is_class_first=True))
        encoder = MediaEncoder(config, file, pools[1])
    for size in fixtures.skeletons()[name]["pictures"]:
        wanted = fixtures.answers()[f"{name}.{size[0]}x{size[1]}.embeddings_original"]
        found = encoded(encoder, name, tuple(size))
        assert float(((found - wanted) ** 2).sum() / (wanted**2).sum()) <= 1e-11


def test_blocks_whose_outputs_are_taken_are_joined(tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]) -> None:
    # Granite's files name the blocks; the projector's first matrix is as wide as all of them.
    path = mmproj("llava1.5", tmp_path, {"mm.0.weight": [64, 96]})
    found = []
    for layers in ((1, 3), (3, 1), (2, 3)):
        with read_gguf(path) as file:
            config = read_mmproj(file)
            assert config.picture is not None
            config = replace(config, picture=replace(config.picture, feature_layers=layers))
            encoder = MediaEncoder(config, file, pools[1])
        found.append(encoded(encoder, "llava1.5", (56, 56)))
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])


def test_a_closed_encoder_and_wrong_pictures_are_refused(tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]) -> None:
    encoder = opened("qwen2.5vl", mmproj("qwen2.5vl", tmp_path), pools[0])
    piece = inputs("qwen2.5vl", (56, 56))[0]
    for values, message in (
        (np.zeros((60, 56, 3), np.uint8), "both sides multiples of 14"),
        (np.zeros((56, 56, 3), np.float32), "wanted uint8"),
        (np.zeros((0, 56, 3), np.uint8), "both sides multiples of 14"),
        (np.zeros((42, 56, 3), np.uint8), "wanted multiples of 2"),
        (np.zeros((56, 112, 3), np.uint8), "its layout says"),
    ):
        with pytest.raises(RequestError, match=message):
            encoder.encode(EncoderInput(False, values, piece.num_rows, None, piece.num_rows))
    with pytest.raises(RequestError, match="no encoder for it"):
        encoder.encode(EncoderInput(True, np.zeros((10, 80), np.float32), 1, None, 1))
    encoder.close()
    with pytest.raises(ClosedError):
        encoder.encode(piece)
    fixed = opened("gemma3", mmproj("gemma3", tmp_path), pools[0])
    with pytest.raises(RequestError, match="which has 256 positions"):
        fixed.encode(EncoderInput(False, np.zeros((56, 56, 3), np.uint8), 1, None, 1))


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("gemma3", {"v.blk.1.attn_k.weight": None}, CorruptFileError, r"no tensor 'v\.blk\.1\.attn_k\.weight'"),
        (
            "gemma3",
            {"v.blk.1.ffn_up.bias": [95]},
            CorruptFileError,
            r"'v\.blk\.1\.ffn_up\.bias' is \[95\]; wanted \[96\]",
        ),
        ("gemma3", {"v.patch_embd.weight": [48, 3, 14, 15]}, CorruptFileError, r"wanted \[48, 3, 14, 14\]"),
        ("gemma3", {"v.position_embd.weight": [255, 48]}, CorruptFileError, r"wanted \[256, 48\]"),
        ("gemma3", {"v.position_embd.weight": [256, 47]}, CorruptFileError, r"wanted \[256, 48\]"),
        ("gemma3", {"mm.soft_emb_norm.weight": None}, CorruptFileError, r"no tensor 'mm\.soft_emb_norm\.weight'"),
        ("gemma3", {"v.blk.1.attn_gate.weight": [48]}, UnsupportedFormatError, r"v\.blk\.1\.attn_gate\.weight"),
        ("qwen3vl", {"v.position_embd.weight": [145, 64]}, CorruptFileError, "wanted a square"),
        ("qwen3vl", {"v.deepstack.2.fc2.weight": [64, 255]}, CorruptFileError, r"deepstack\.2\.fc2"),
        ("minicpmv", {"resampler.attn.k.weight": [127, 128]}, CorruptFileError, r"resampler\.attn\.k"),
        ("gemma4", {"v.blk.0.attn_q.input_min": [2]}, CorruptFileError, r"attn_q\.input_min"),
    ],
)
def test_a_wrong_tensor_is_named(
    name: str,
    change: dict[str, Any],
    error: type[LocalinferError],
    message: str,
    tmp_path: Path,
    pools: tuple[ThreadPool, ThreadPool],
) -> None:
    with pytest.raises(error, match=message) as raised:
        opened(name, mmproj(name, tmp_path, change), pools[0])
    assert "\n" not in str(raised.value)


NUMBERS = (0, 1, 2, 3, 7, 1 << 16, (1 << 32) - 1, -1)
"""Values that a file may claim."""


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5vl", "qwen3vl", "minicpmv", "minicpmv4.6", "gemma4-both", "lfm2a"])
def test_any_number_in_a_file_is_obeyed_or_refused(
    name: str, tmp_path: Path, pools: tuple[ThreadPool, ThreadPool]
) -> None:
    with read_gguf(mmproj(name, tmp_path)) as file:
        given = file.metadata
        keys = [key for key in given if type(given[key]) is int]
        cases = [(key, number) for turn, key in enumerate(keys) for number in by_turns(NUMBERS, turn, 2)]
        for key, number in cases:
            file.metadata = given.with_values({key: number})
            # Numbers that were set are an argument's fault.
            with contextlib.suppress(ModelFileError, RequestError):
                encoder = MediaEncoder(read_mmproj(file), file, pools[0])
                assert encoder.kernels and encoder.width > 0
                if encoder.config.picture is not None and max(NUMBERS) not in (
                    encoder.config.picture.image_size,
                    number,
                ):
                    side = encoder.config.picture.patch_size * encoder.config.picture.merge
                    pixels = np.zeros((side, side, 3), np.uint8)
                    encoder.encode(EncoderInput(False, pixels, 1, None, 1))


def test_a_file_of_another_architecture_is_refused(shared: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    family = fixtures.skeletons()["gemma3"]
    fixtures.builder().write(family["text"], path, fixtures.SEED, family["specials"])
    with read_gguf(path) as file, pytest.raises(CorruptFileError, match="architecture 'gemma3'; wanted 'clip'"):
        read_mmproj(file)

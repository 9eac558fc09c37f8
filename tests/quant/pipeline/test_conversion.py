"""Every type that kernels of a device do not read, converted and decoded again, against what the file means."""

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, ShapeError, UnsupportedFormatError
from localinfer.kernels.layouts import CUDA_LAYOUTS, GGUF_LAYOUTS, Layout
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType, block_bytes, block_dtype, block_size
from localinfer.quant.pipeline import conversion
from localinfer.quant.pipeline.conversion import conversion_note, convert, layout_of, runs_directly
from tests.quant.random_blocks import random_blocks

ACTIVATIONS = {TensorType.Q8_1, TensorType.Q8_K}
EXACT = {
    TensorType.IQ4_NL: Layout.Q8_0,
    TensorType.MXFP4: Layout.Q5_0,
    TensorType.Q3_K: Layout.Q6_K,
    TensorType.TQ1_0: Layout.Q4_0,
    TensorType.TQ2_0: Layout.Q4_0,
    TensorType.Q1_0: Layout.Q4_0,
    TensorType.Q2_0: Layout.Q4_0,
    TensorType.IQ1_S: Layout.Q6_K,
    TensorType.IQ1_M: Layout.Q6_K,
    TensorType.I8: Layout.F32,
    TensorType.I16: Layout.F32,
}
# Largest difference over the largest weight of 32 neighbours.
ROUNDED = {
    TensorType.IQ4_XS: 5e-4,
    **{
        type: 5e-3
        for type in (
            *(TensorType.Q2_K, TensorType.NVFP4, TensorType.IQ2_XXS, TensorType.IQ2_XS, TensorType.IQ2_S),
            *(TensorType.IQ3_XXS, TensorType.IQ3_S),
        )
    },
}
PLAIN = {TensorType.F64, TensorType.I32, TensorType.I64}
DIRECT = [TensorType[layout.name] for layout in GGUF_LAYOUTS if layout in CUDA_LAYOUTS]
"""What kernels of both devices read; those of a GPU read no other type of GGUF."""
ON_CPU = [TensorType[layout.name] for layout in GGUF_LAYOUTS]


def random_tensor(type: TensorType, num_blocks: int, seed: int) -> NDArray[np.uint8]:
    """Random bytes in every field, except that scales are finite and of ordinary size."""
    generator = np.random.default_rng(seed)
    raw, blocks = random_blocks(type, num_blocks, generator, scale=0.1)
    if type is TensorType.MXFP4:
        blocks["e"] = generator.integers(104, 144, num_blocks)
    if type is TensorType.IQ1_M:
        # The upper four bits of its words are one float16 scale: 0.1 is 0x2E66.
        blocks["scales"] = blocks["scales"] & 0x0FFF | np.array([6, 6, 14, 2], np.uint16) << 12
    return raw


def convert_and_decode(
    type: TensorType, raw: NDArray[np.uint8], rows: int
) -> tuple[Layout, NDArray[np.float32], NDArray[np.float32]]:
    """The layout, the weights after conversion and the weights before."""
    shape = (rows, raw.size // rows // block_bytes(type) * block_size(type))
    layout, converted = convert(raw, type, shape, layouts=CUDA_LAYOUTS)
    return layout, dequantize(converted, TensorType[layout.name], shape), dequantize(raw, type, shape)


@pytest.mark.parametrize("type", TensorType, ids=lambda type: type.name)
def test_every_type_has_one_way_to_run(type: TensorType) -> None:
    ways = [type in EXACT, type in ROUNDED, type in PLAIN, type in DIRECT, type in ACTIVATIONS]
    assert sum(ways) == 1
    assert runs_directly(type, CUDA_LAYOUTS) == (type in DIRECT)
    assert runs_directly(type) == (type in ON_CPU)
    if type not in ACTIVATIONS:
        for layouts in (GGUF_LAYOUTS, CUDA_LAYOUTS):
            note = conversion_note(type, layouts)
            assert type.name in note
            assert layout_of(type, layouts).name in note
            assert layout_of(type, layouts) in layouts
            assert "bits per weight" in note
            assert "\n" not in note
            assert ("on a GPU" in note) == (layouts is CUDA_LAYOUTS and type in ON_CPU and type not in DIRECT)


@pytest.mark.parametrize("type", ON_CPU, ids=lambda type: type.name)
def test_convert_returns_the_bytes_of_a_direct_type_without_a_copy(type: TensorType) -> None:
    raw = random_tensor(type, 3, seed=1)
    layout, converted = convert(raw, type, (3, block_size(type)))
    assert layout.name == type.name == layout_of(type).name
    assert np.shares_memory(converted, raw)


@pytest.mark.parametrize("type", EXACT, ids=lambda type: type.name)
def test_convert_keeps_every_weight_where_it_says_so(type: TensorType) -> None:
    layout, found, wanted = convert_and_decode(type, random_tensor(type, 7 * 3, seed=int(type)), rows=7)
    assert layout is EXACT[type] is layout_of(type, CUDA_LAYOUTS)
    np.testing.assert_array_equal(found, wanted)
    if type not in {TensorType.I8, TensorType.I16}:
        assert re.search("exactly|stay the same", conversion_note(type, CUDA_LAYOUTS))


@pytest.mark.parametrize("type", [TensorType.IQ1_S, TensorType.IQ1_M], ids=lambda type: type.name)
def test_convert_rounds_weights_of_iq1_with_small_scales_as_little_as_it_says(type: TensorType) -> None:
    raw = random_tensor(type, 7 * 64, seed=6)
    scales = (np.random.default_rng(7).standard_normal(7 * 64) * 3e-4).astype(np.float16)
    blocks = raw.view(block_dtype(type))
    if type is TensorType.IQ1_S:
        blocks["d"] = scales
    else:
        nibbles = scales.view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16)
        blocks["scales"] = blocks["scales"] & 0x0FFF | nibbles << 12
    _, found, wanted = convert_and_decode(type, raw, rows=7)
    difference = np.abs(found - wanted)
    assert 0 < difference.max() <= 4.1e-6
    assert "0.000004" in conversion_note(type)


def test_convert_keeps_ternary_weights_at_two_bits_where_kernels_read_them() -> None:
    raw, shape = random_tensor(TensorType.TQ1_0, 21, seed=8), (7, 3 * 256)
    layout, converted = convert(raw, TensorType.TQ1_0, shape)
    assert layout is Layout.TQ2_0 is layout_of(TensorType.TQ1_0)
    wanted = dequantize(raw, TensorType.TQ1_0, shape)
    np.testing.assert_array_equal(dequantize(converted, TensorType.TQ2_0, shape), wanted)


@pytest.mark.parametrize("type", ROUNDED, ids=lambda type: type.name)
def test_convert_rounds_within_the_budget(type: TensorType) -> None:
    layout, found, wanted = convert_and_decode(type, random_tensor(type, 7 * 3, seed=int(type)), rows=7)
    assert layout is Layout.Q8_0 is layout_of(type, CUDA_LAYOUTS)
    difference = np.abs(found - wanted).reshape(-1, 32).max(axis=1)
    largest = np.abs(wanted).reshape(-1, 32).max(axis=1)
    assert (difference <= ROUNDED[type] * largest).all()
    assert "rounded" in conversion_note(type, CUDA_LAYOUTS)


@pytest.mark.parametrize("type", PLAIN, ids=lambda type: type.name)
def test_convert_takes_plain_numbers_to_float32(type: TensorType) -> None:
    _, found, wanted = convert_and_decode(type, random_tensor(type, 33, seed=int(type)), rows=3)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("exponent", [0, 60, 103, 144, 250])
def test_convert_gives_mxfp4_beyond_float16_the_wider_layout(exponent: int) -> None:
    raw = random_tensor(TensorType.MXFP4, 12, seed=2)
    raw.view(block_dtype(TensorType.MXFP4))["e"][5] = exponent
    layout, found, wanted = convert_and_decode(TensorType.MXFP4, raw, rows=4)
    assert layout is Layout.BF16
    np.testing.assert_array_equal(found, wanted)


def test_convert_ignores_the_scale_of_an_mxfp4_block_of_zeros() -> None:
    raw = random_tensor(TensorType.MXFP4, 12, seed=3)
    blocks = raw.view(block_dtype(TensorType.MXFP4))
    blocks["e"][5], blocks["qs"][5] = 0, 0x80
    layout, found, wanted = convert_and_decode(TensorType.MXFP4, raw, rows=4)
    assert layout is Layout.Q5_0
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("type", [TensorType.Q3_K, TensorType.Q2_K, TensorType.Q1_0, TensorType.MXFP4, TensorType.F64])
def test_convert_gives_the_same_in_chunks_of_any_size(type: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, shape = random_tensor(type, 30, seed=4), (3, 2, 5 * block_size(type))
    layout, whole = convert(raw, type, shape, layouts=CUDA_LAYOUTS)
    monkeypatch.setattr(conversion, "WEIGHTS_PER_CHUNK", 512)
    for num_threads in (1, 3):
        starts, ends = list[int](), list[int]()

        def done(start: int, end: int, starts: list[int] = starts, ends: list[int] = ends) -> None:
            starts.append(start)
            ends.append(end)

        again, parts = convert(raw, type, shape, done, CUDA_LAYOUTS, num_threads)
        assert again is layout
        np.testing.assert_array_equal(parts, whole)
        assert [*starts, raw.size] == [0, *ends]


def test_convert_ends_with_what_its_callback_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "WEIGHTS_PER_CHUNK", 256)
    told: list[int] = []

    def stop(start: int, end: int) -> None:
        told.append(start)
        raise KeyboardInterrupt

    raw = random_tensor(TensorType.TQ1_0, 64, seed=9)
    with pytest.raises(KeyboardInterrupt):
        convert(raw, TensorType.TQ1_0, (64, 256), stop, num_threads=2)
    assert told == [0]


def test_convert_takes_read_only_bytes_of_a_map() -> None:
    raw = np.frombuffer(random_tensor(TensorType.IQ4_NL, 4, seed=5).tobytes(), np.uint8)
    assert convert(raw, TensorType.IQ4_NL, (2, 64), layouts=CUDA_LAYOUTS)[1].size == 4 * 34


def test_convert_refuses_bytes_that_do_not_fit_the_shape() -> None:
    with pytest.raises(ShapeError, match="wanted uint8\\[110\\]"):
        convert(np.zeros(109, np.uint8), TensorType.Q3_K, (1, 256))


def test_convert_refuses_weights_that_it_cannot_round() -> None:
    raw = random_tensor(TensorType.Q2_K, 2, seed=6)
    raw.view(block_dtype(TensorType.Q2_K))["d"][1] = np.nan
    with pytest.raises(CorruptFileError, match="Q2_K"):
        convert(raw, TensorType.Q2_K, (1, 512), layouts=CUDA_LAYOUTS)


@pytest.mark.parametrize("type", ACTIVATIONS, ids=lambda type: type.name)
def test_activation_types_have_no_way_to_run(type: TensorType) -> None:
    with pytest.raises(UnsupportedFormatError, match=type.name):
        convert(np.zeros(block_bytes(type), np.uint8), type, (block_size(type),))
    with pytest.raises(UnsupportedFormatError, match=type.name):
        layout_of(type)

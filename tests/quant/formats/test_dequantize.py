"""The oracle against the gguf package, and against the written formulas where that one is mute."""

import gguf
import numpy as np
import pytest
from gguf import quants
from numpy.typing import NDArray

from localinfer.errors import RequestError, ShapeError, UnsupportedFormatError
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.types import (
    TensorType,
    block_bytes,
    block_dtype,
    block_size,
    pack_bits,
    pack_k_scales,
    row_bytes,
    unpack_bits,
    unpack_k_scales,
)
from tests.quant.random_blocks import random_blocks

NOT_IN_THE_PACKAGE = {"Q1_0", "Q2_0"}
PLAIN_NUMBERS = {"F64", "I8", "I16", "I32", "I64"}
ACTIVATIONS = {"Q8_1", "Q8_K"}
WEIGHT_TYPES = [t.name for t in TensorType if t.name not in PLAIN_NUMBERS | ACTIVATIONS]
BY_THE_PACKAGE = [name for name in WEIGHT_TYPES if name not in NOT_IN_THE_PACKAGE]
BLOCKS_OF_32 = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
# Relative L2 error of the plain encoders on normally distributed weights.
ERROR_BUDGET = {
    "F32": 0.0,
    "F16": 3e-4,
    "BF16": 2.5e-3,
    "Q8_0": 0.007,
    "Q4_0": 0.1,
    "Q4_1": 0.085,
    "Q5_0": 0.05,
    "Q5_1": 0.04,
    "Q4_K": 0.085,
    "Q5_K": 0.045,
    "Q6_K": 0.025,
}


def finite_blocks(type: TensorType, num_blocks: int, seed: int) -> NDArray[np.uint8]:
    """Random blocks that hold no infinity."""
    raw, blocks = random_blocks(type, num_blocks, np.random.default_rng(seed))
    if type is TensorType.BF16:
        blocks["value"] &= 0xBFFF
    if type is TensorType.IQ1_M:
        blocks["scales"][:, 3] &= 0xBFFF  # the float16 scale's top bits: no infinity or NaN
    return raw


def assert_same_bits(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    assert found.dtype == wanted.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("name", BY_THE_PACKAGE)
def test_dequantize_equals_the_gguf_package_bit_for_bit(name: str) -> None:
    type = TensorType[name]
    rows, columns = 7, 3 * block_size(type)
    raw = finite_blocks(type, rows * 3, seed=int(type))
    wanted = quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType(int(type)))
    assert_same_bits(dequantize(raw, type, (rows, columns)), np.ascontiguousarray(wanted))


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_every_byte_decodes_without_a_warning(name: str) -> None:
    type = TensorType[name]
    raw = np.zeros((256, block_bytes(type)), dtype=np.uint8) + np.arange(256, dtype=np.uint8)[:, None]
    result = dequantize(raw, type, (256, block_size(type)))
    assert result.shape == (256, block_size(type))


def test_q1_0_sets_the_sign_by_the_bit() -> None:
    raw = finite_blocks(TensorType.Q1_0, 3, seed=1)
    blocks = raw.view(block_dtype(TensorType.Q1_0))
    wanted = [
        float(block["d"]) * (1 if block["qs"][e // 8] >> e % 8 & 1 else -1) for block in blocks for e in range(128)
    ]
    assert dequantize(raw, TensorType.Q1_0, (384,)).tolist() == wanted


def test_q2_0_subtracts_one_from_two_bits() -> None:
    raw = finite_blocks(TensorType.Q2_0, 3, seed=2)
    blocks = raw.view(block_dtype(TensorType.Q2_0))
    wanted = [
        float(block["d"]) * (int(block["qs"][e // 4] >> 2 * (e % 4) & 3) - 1) for block in blocks for e in range(64)
    ]
    assert dequantize(raw, TensorType.Q2_0, (192,)).tolist() == wanted


def test_plain_integers_decode_to_their_value() -> None:
    values = np.array([[-3, 0, 7]], dtype="<i2")
    decoded = dequantize(values.view(np.uint8), TensorType.I16, (1, 3))
    assert decoded.tolist() == [[-3.0, 0.0, 7.0]]


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_types_are_refused(name: str) -> None:
    type = TensorType[name]
    with pytest.raises(UnsupportedFormatError, match=name):
        dequantize(np.zeros(block_bytes(type), np.uint8), type, (block_size(type),))


def test_dequantize_refuses_bytes_that_do_not_fit_the_shape() -> None:
    with pytest.raises(ShapeError, match="wanted uint8\\[36\\]"):
        dequantize(np.zeros(35, np.uint8), TensorType.Q4_0, (2, 32))
    with pytest.raises(ShapeError, match="blocks of 32"):
        dequantize(np.zeros(36, np.uint8), TensorType.Q4_0, (4, 16))


@pytest.mark.parametrize("name", ["F16", "BF16", *BLOCKS_OF_32])
def test_quantize_equals_the_gguf_package_bit_for_bit(name: str) -> None:
    type = TensorType[name]
    values = weights(seed=5)
    wanted = quants.quantize(values, gguf.GGMLQuantizationType(int(type))).view(np.uint8)
    np.testing.assert_array_equal(quantize(values, type), wanted.reshape(len(values), -1))


@pytest.mark.parametrize("name", ERROR_BUDGET)
def test_quantize_then_dequantize_stays_inside_the_error_budget(name: str) -> None:
    type = TensorType[name]
    values = weights(seed=6)
    packed = quantize(values, type)
    assert packed.shape == (len(values), row_bytes(type, values.shape[1]))
    decoded = dequantize(packed, type, values.shape)
    error = np.linalg.norm(decoded - values) / np.linalg.norm(values)
    assert error <= ERROR_BUDGET[name]


@pytest.mark.parametrize("name", ERROR_BUDGET)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-39, -1.0, 3.5])
def test_quantize_takes_constant_rows(name: str, value: float) -> None:
    type = TensorType[name]
    values = np.full((1, 256), value, dtype=np.float32)
    decoded = dequantize(quantize(values, type), type, values.shape)
    np.testing.assert_allclose(decoded, values, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "F16"])
def test_quantize_refuses_what_the_type_cannot_hold(name: str) -> None:
    type = TensorType[name]
    with pytest.raises(RequestError, match="NaN"):
        quantize(np.full((1, 256), np.nan, dtype=np.float32), type)
    with pytest.raises(RequestError, match="65504"):
        quantize(np.full((1, 256), 3e38, dtype=np.float32), type)


def test_quantize_refuses_types_without_a_plain_encoder() -> None:
    with pytest.raises(UnsupportedFormatError, match="IQ2_XXS.*wanted one of F32"):
        quantize(np.zeros((1, 256), np.float32), TensorType.IQ2_XXS)


def test_quantize_refuses_broken_rows() -> None:
    with pytest.raises(ShapeError, match="blocks of 256"):
        quantize(np.zeros((2, 32), np.float32), TensorType.Q4_K)
    with pytest.raises(ShapeError, match="float32"):
        quantize(np.zeros((2, 32), np.float64), TensorType.Q4_0)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 4, 16])
def test_pack_bits_undoes_unpack_bits(bits: int, stride: int) -> None:
    packed = np.random.default_rng(7).integers(0, 256, (5, 32), dtype=np.uint8)
    np.testing.assert_array_equal(pack_bits(unpack_bits(packed, bits, stride), bits, stride), packed)


def test_pack_k_scales_undoes_unpack_k_scales() -> None:
    packed = np.random.default_rng(8).integers(0, 256, (64, 12), dtype=np.uint8)
    np.testing.assert_array_equal(pack_k_scales(*unpack_k_scales(packed)), packed)


def weights(seed: int) -> NDArray[np.float32]:
    """Normal weights, with a row of zeros, a positive, a negative and a tiny one."""
    values = np.random.default_rng(seed).normal(size=(9, 768)).astype(np.float32)
    values[2, :256] = 0
    values[3] = np.abs(values[3])
    values[4] = -np.abs(values[4])
    values[5] *= 1e-4
    return values

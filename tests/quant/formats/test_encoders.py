"""The encoders' oracle against digests of ggml's own bytes, and what its bytes mean."""

import hashlib

import numpy as np
import pytest

from localinfer.errors import RequestError, ShapeError
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.reference_encoders import ENCODABLE_TYPES, quantize
from localinfer.quant.formats.types import TensorType
from tests.quant.formats.encoder_inputs import COLUMNS, GOLDEN, hard_weights, importances

PLAIN = {TensorType.F32, TensorType.F16, TensorType.BF16}
QUANTIZED = [type for type in ENCODABLE_TYPES if type not in PLAIN]
EACH_TYPE = pytest.mark.parametrize("type", QUANTIZED, ids=lambda type: type.name)


@EACH_TYPE
def test_quantize_gives_the_bytes_of_ggml(type: TensorType) -> None:
    """All weights, with one importance each, another for each type; compiled encoders meet all pairs."""
    kinds = list(importances().items())
    for number, (weights, values) in enumerate(hard_weights().items(), QUANTIZED.index(type)):
        importance, given = kinds[number % len(kinds)]
        found = hashlib.sha256(quantize(values, type, given)).hexdigest()[:16]
        assert found == GOLDEN[type.name][f"{weights}, {importance}"], f"{weights}, {importance}"


@EACH_TYPE
def test_importance_lowers_the_weighted_error(type: TensorType) -> None:
    values, importance = hard_weights()["heavy tails"], importances()["unequal"]
    assert importance is not None

    def error(raw: np.ndarray) -> float:
        return float((importance * (dequantize(raw, type, values.shape) - values) ** 2).sum())

    with_importance, without = error(quantize(values, type, importance)), error(quantize(values, type))
    assert with_importance <= without
    assert (with_importance < without) is (type not in (TensorType.Q8_0, TensorType.MXFP4))


@EACH_TYPE
def test_numbers_too_small_for_a_scale_decode_to_almost_nothing(type: TensorType) -> None:
    values = hard_weights()["even"] * np.float32(1e-38)
    for importance in importances().values():
        decoded = dequantize(quantize(values, type, importance), type, values.shape)
        assert np.abs(decoded).max() < 1e-6


def test_importance_may_differ_by_row() -> None:
    values = hard_weights()["even"][:2]
    given = np.stack([importance for importance in importances().values() if importance is not None])
    found = quantize(values, TensorType.Q4_K, given)
    for row in range(2):
        np.testing.assert_array_equal(found[row], quantize(values[row], TensorType.Q4_K, given[row]))


def test_quantize_refuses_importance_that_makes_no_sense() -> None:
    values = np.ones((2, COLUMNS), np.float32)
    with pytest.raises(ShapeError, match="one number a column"):
        quantize(values, TensorType.Q4_0, np.ones(COLUMNS - 1, np.float32))
    with pytest.raises(ShapeError, match="float64"):
        quantize(values, TensorType.Q4_0, np.ones(COLUMNS))  # type: ignore[arg-type]
    for wrong in (-1, np.nan, np.inf):
        with pytest.raises(RequestError, match="mean squares"):
            quantize(values, TensorType.Q4_K, np.full(COLUMNS, wrong, np.float32))

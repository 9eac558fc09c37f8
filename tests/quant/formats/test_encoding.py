"""Compiled encoders against digests of ggml's own bytes and against the oracle, byte for byte."""

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest

from localinfer.errors import RequestError, ShapeError
from localinfer.kernels.cpu.encoding import ENCODERS, prepare_encoders
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.encoding import encode, source_rows
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.types import TensorType, block_size
from tests.quant.formats.encoder_inputs import COLUMNS, GOLDEN, hard_weights, importances

EACH_TYPE = pytest.mark.parametrize("type", [TensorType[name] for name in ENCODERS], ids=lambda type: type.name)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    prepare_encoders(ENCODERS)
    with_two = ThreadPool(2)
    yield with_two
    with_two.close()


@EACH_TYPE
def test_encode_equals_the_oracle_on_weights_that_ggml_has_no_digest_of(type: TensorType, pool: ThreadPool) -> None:
    weights = {
        "heavy tails": hard_weights()["heavy tails"],
        "denormal": hard_weights()["even"] * np.float32(1e-39),
        "negative zeros": np.full((3, COLUMNS), -0.0, np.float32),
    }
    for what, values in weights.items():
        for kind, importance in importances().items():
            found, wanted = encode(pool, values, type, importance), quantize(values, type, importance)
            assert (found == wanted).all(), f"{what}, importance {kind}"


@EACH_TYPE
def test_encode_gives_the_bytes_of_ggml(type: TensorType, pool: ThreadPool) -> None:
    found = {
        f"{weights}, {importance}": hashlib.sha256(encode(pool, values, type, given)).hexdigest()[:16]
        for weights, values in hard_weights().items()
        for importance, given in importances().items()
    }
    assert found == GOLDEN[type.name]


@EACH_TYPE
@pytest.mark.parametrize("source_type", [TensorType.F16, TensorType.BF16, TensorType.Q8_0], ids=lambda type: type.name)
def test_encode_takes_rows_of_any_type(source_type: TensorType, type: TensorType, pool: ThreadPool) -> None:
    raw = quantize(hard_weights()["heavy tails"], source_type)
    source = source_rows(raw.reshape(-1), source_type, COLUMNS)
    wanted = quantize(dequantize(raw, source_type, source.shape), type)
    np.testing.assert_array_equal(encode(pool, source, type), wanted)


@EACH_TYPE
def test_one_thread_gives_the_same_bytes(type: TensorType, pool: ThreadPool) -> None:
    values = np.tile(hard_weights()["heavy tails"], (5, 1))
    alone = ThreadPool(1)
    np.testing.assert_array_equal(encode(alone, values, type), encode(pool, values, type))
    alone.close()


@EACH_TYPE
@pytest.mark.parametrize("rows", [1, 15, 16, 17])
def test_encode_writes_every_row_and_nothing_else(rows: int, type: TensorType, pool: ThreadPool) -> None:
    values = hard_weights()["even"][:rows, : block_size(type)]
    np.testing.assert_array_equal(encode(pool, values, type), quantize(np.ascontiguousarray(values), type))


@EACH_TYPE
def test_encode_refuses_what_the_type_cannot_hold(type: TensorType, pool: ThreadPool) -> None:
    for wrong in (np.nan, np.inf, -np.inf):
        values = np.ones((37, COLUMNS), np.float32)
        values[30, 700] = wrong
        with pytest.raises(RequestError, match="NaN or infinity"):
            encode(pool, values, type)
    with pytest.raises(RequestError, match="65504"):
        encode(pool, np.full((3, COLUMNS), 3e38, np.float32), type)


def test_encode_writes_plain_numbers_too(pool: ThreadPool) -> None:
    values = hard_weights()["even"]
    for type in (TensorType.F32, TensorType.F16, TensorType.BF16):
        np.testing.assert_array_equal(encode(pool, values, type), quantize(values, type))


def test_encode_refuses_arrays_it_cannot_read(pool: ThreadPool) -> None:
    with pytest.raises(ShapeError, match="wanted a matrix"):
        encode(pool, np.zeros(256, np.float32), TensorType.Q4_0)
    with pytest.raises(ShapeError, match="float64"):
        encode(pool, np.zeros((1, 256)), TensorType.Q4_0)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="blocks of 256"):
        encode(pool, np.zeros((1, 288), np.float32), TensorType.Q4_K)
    with pytest.raises(ShapeError, match="wanted float32\\[256\\]"):
        encode(pool, np.zeros((1, 256), np.float32), TensorType.Q4_K, np.ones(255, np.float32))
    with pytest.raises(RequestError, match="mean squares"):
        encode(pool, np.zeros((1, 256), np.float32), TensorType.Q4_K, np.full(256, -1, np.float32))

"""torch's products, factors and columns against NumPy's and the kernel's, with torch's CPU in a GPU's place."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localinfer.apps.quantize import quantize
from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.models import demo
from localinfer.quant.formats.reference_encoders import quantize as encode
from localinfer.quant.formats.types import TensorType
from localinfer.quant.methods.gptq import factor, quantize_with_feedback
from localinfer.quant.methods.workers import TorchWorkers, Workers

torch = pytest.importorskip("torch")
MODEL = Path(demo.__file__).parent / "demo-f16.gguf"


@pytest.fixture
def both() -> Iterator[tuple[Workers, TorchWorkers]]:
    with Workers(2) as workers, TorchWorkers(2, "cpu") as others:
        yield workers, others


def inputs(tokens: int, columns: int) -> np.ndarray:
    generator = np.random.default_rng(1)
    mixing = generator.standard_normal((columns, columns)) / np.arange(1, columns + 1)
    return (generator.standard_normal((tokens, columns)) @ mixing).astype(np.float32)


def test_products_are_those_of_numpy(both: tuple[Workers, TorchWorkers]) -> None:
    x, weight = inputs(1100, 300), np.random.default_rng(2).standard_normal((77, 300)).astype(np.float32)
    for name, arguments in (("product", (x, weight)), ("gram", (x,)), ("cross", (x[:, :130], x))):
        first, second = (getattr(one, name)(*arguments) for one in both)
        np.testing.assert_allclose(first, second, atol=1e-5 * np.abs(first).max())
    np.testing.assert_array_equal(both[1].gram(x), both[1].gram(x).T)


def test_what_has_no_factor_is_damped_or_refused(both: tuple[Workers, TorchWorkers]) -> None:
    for workers in both:
        with pytest.raises(np.linalg.LinAlgError):
            workers.factor(-np.eye(8))
    x = inputs(900, 320)
    factors = [factor(one.gram(x), len(x), one) for one in both]
    assert factors[0] is not None and factors[1] is not None
    np.testing.assert_array_equal(factors[0].order, factors[1].order)
    np.testing.assert_allclose(factors[0].upper, factors[1].upper, atol=1e-5 * np.abs(factors[0].upper).max())


@pytest.mark.parametrize("type", [TensorType.Q4_0, TensorType.Q4_K, TensorType.IQ4_NL])
def test_columns_are_rounded_alike(type: TensorType, both: tuple[Workers, TorchWorkers]) -> None:
    x, target = inputs(2000, 256), np.random.default_rng(3).standard_normal((40, 256)).astype(np.float32)
    rounded = encode(target, type, np.square(x).mean(axis=0))
    found = factor(both[0].gram(x), len(x), both[0])
    assert found is not None
    first, second = (quantize_with_feedback(target, rounded, type, found, one) for one in both)
    # A value between two levels may fall to either side, and what follows answers for it.
    assert (first[1] == second[1]).mean() > 0.97
    assert first[2] == pytest.approx(second[2], rel=1e-3)


def test_a_model_calibrated_on_torch_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"type": "Q4_0", "method": "gptq", "calibration_tokens": 64, "threads": 2}
    plain = quantize(MODEL, tmp_path / "plain.gguf", **options)  # type: ignore[arg-type]
    monkeypatch.setattr("localinfer.apps.quantize.calibration_device", lambda device: "cpu")
    other = quantize(MODEL, tmp_path / "torch.gguf", **options)  # type: ignore[arg-type]
    for first, second in zip(plain.tensors, other.tensors, strict=True):
        if first.is_calibrated:
            assert first.relative_error == pytest.approx(second.relative_error, rel=0.02), first.name


def test_devices_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="torch finds no GPU"):
        quantize(MODEL, tmp_path / "x.gguf", device="cuda")
    with pytest.raises(RequestError, match="no device 'tpu'"):
        quantize(MODEL, tmp_path / "x.gguf", device="tpu")

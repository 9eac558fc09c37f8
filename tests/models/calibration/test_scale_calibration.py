"""Scales chosen on a text: kept only where a layer loses less, never where nothing is rounded."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.models.calibration import scales as scale_calibration
from localinfer.models.calibration.scales import choose_scales, fold
from localinfer.models.calibration.weights import RoundedWeights
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.methods.awq import Rounding, TensorFactors
from localinfer.quant.methods.imatrix import LinearProduct
from localinfer.quant.methods.workers import Workers
from tests.models.arch_models import build_model

BLOCK = 32


def rounded(weights: NDArray[np.float32], importance: NDArray[np.float32]) -> NDArray[np.float32]:
    return dequantize(quantize(weights, TensorType.Q4_0), TensorType.Q4_0, weights.shape)


def coarsened(weights: NDArray[np.float32], importance: NDArray[np.float32]) -> NDArray[np.float32]:
    """Quicker than any block format."""
    steps = np.abs(weights).max(axis=1, keepdims=True) / np.float32(7)
    return np.rint(weights / steps) * steps


def rounding_of(name: str) -> Rounding | None:
    return coarsened if name.endswith("weight") and "gate_inp" not in name else None


def sequences(seed: int, vocab_size: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(3, vocab_size, (3, 64)).astype(np.int32)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(1) as one:
        yield one


def test_scales_are_kept_where_they_bring_layers_closer(
    shared: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_calibration, "THOROUGH_LAYER_WEIGHTS", 0)
    stages: list[tuple[str, int, int]] = []
    with read_gguf(shared / "models" / "stories260K.gguf") as file:

        def narrow(name: str) -> Rounding | None:
            return rounded if file.tensor(name).shape[-1] % BLOCK == 0 else None

        found = choose_scales(file, sequences(0, 512), workers, narrow, progress=lambda *stage: stages.append(stage))
        with Workers(2) as two:
            again = choose_scales(file, sequences(0, 512), two, narrow)
        folded = fold(file, found)
        assert {name for name, record in folded.tensors.items() if record != file.tensors[name]} == {
            part for one in found for part in (*one.group.readers, *(writer.tensor for writer in one.group.writers))
        }
    assert len(found) >= 5
    assert all(one.loss_ratio < 0.995 for one in found)
    # A matrix that stays as it is has nothing to gain, and what writes it nothing to give.
    assert not any("ffn_down" in reader for one in found for reader in one.group.readers)
    assert stages == [("choosing scales", layer, 5) for layer in range(5)]
    for first, second in zip(found, again, strict=True):
        np.testing.assert_array_equal(first.scales, second.scales)


@pytest.mark.parametrize("name", ["llama-moe", "phi3-dense", "deci-mixed"])
def test_scales_are_chosen_for_every_kind_of_model(
    name: str, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_calibration, "THOROUGH_LAYER_WEIGHTS", 0)
    with read_gguf(build_model(tmp_path, name).path) as file:
        vocab_size = file.tensor("token_embd.weight").shape[0]

        def narrow(tensor: str) -> Rounding | None:
            return rounding_of(tensor) if file.tensor(tensor).shape[-1] % BLOCK == 0 else None

        choices = choose_scales(file, sequences(1, vocab_size)[:, :24], workers, narrow)
        assert choices
        for one in choices:
            assert one.scales.shape == (one.group.num_channels,)
            assert (one.scales > 0).all() and one.loss_ratio < 1


def test_no_scales_are_chosen_where_nothing_is_rounded(shared: Path, workers: Workers) -> None:
    with read_gguf(shared / "models" / "stories260K.gguf") as file:
        assert choose_scales(file, sequences(2, 512), workers, lambda name: None) == []


class OffBy:
    """A visitor whose matrices are all off by an amount."""

    def __init__(self, amount: float) -> None:
        self._amount = np.float32(amount)

    def visit(self, product: LinearProduct) -> Sequence[NDArray[np.float32] | None]:
        return [part.values + self._amount for part in product.matrices]


@pytest.mark.parametrize(("amounts", "is_kept"), [((1e-3, 1e-2), False), ((1e-2, 1e-4), True)])
def test_scales_are_dropped_where_the_final_method_loses_more_with_them(
    amounts: tuple[float, float], is_kept: bool, shared: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_calibration, "THOROUGH_LAYER_WEIGHTS", 0)
    # One visitor for a layer without its scales, then one for the layer with them.
    turns = itertools.cycle(amounts)
    with read_gguf(shared / "models" / "stories260K.gguf") as file:

        def narrow(name: str) -> Rounding | None:
            return rounded if file.tensor(name).shape[-1] % BLOCK == 0 else None

        found = choose_scales(file, sequences(0, 512)[:1], workers, narrow, final=lambda: OffBy(next(turns)))
    assert bool(found) is is_kept


def test_rounded_weights_scale_columns_before_rounding_and_rows_after(shared: Path) -> None:
    name, calls = "blk.0.attn_q.weight", []

    def counted(weights: NDArray[np.float32], importance: NDArray[np.float32]) -> NDArray[np.float32]:
        calls.append(importance)
        return rounded(weights, importance)

    with read_gguf(shared / "models" / "stories260K.gguf") as file:
        values = dequantize(file.tensor_bytes(name), file.tensor(name).type, file.tensor(name).shape)
        num_rows, num_columns = values.shape
        squares = np.arange(1, num_columns + 1, dtype=np.float32)
        weights = RoundedWeights(file, lambda tensor: counted, {(name, 0): squares})
        columns, rows = np.linspace(0.5, 2, num_columns), np.linspace(1, 3, num_rows)
        weights.scale({name: TensorFactors(columns=columns)})
        plain = weights.linear(name).packed.matrix()
        np.testing.assert_array_equal(plain, rounded(values * columns.astype(np.float32), squares))
        np.testing.assert_allclose(calls[0], squares / columns**2, rtol=1e-6)
        weights.scale({name: TensorFactors(rows=rows, columns=columns.copy())})
        found = weights.linear(name).packed.matrix()
        np.testing.assert_array_equal(found, plain * rows[:, None].astype(np.float32))
        assert len(calls) == 1
        weights.scale({})
        np.testing.assert_array_equal(weights.linear(name).packed.matrix(), rounded(values, squares))

"""Ternary matrices of BitNet folders: packed, as numbers with a factor, and rounded when loaded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.quant.checkpoint.bitnet import BitNetReader
from localinfer.quant.checkpoint.folder import open_folder
from localinfer.quant.checkpoint.groups import GroupedMatrix
from localinfer.types import FloatArray
from tests.models.checkpoint.checkpoint_oracle import oracle_logits
from tests.models.checkpoint.published_models import TOKEN_IDS, read_cases, weights
from tests.support.checkpoint_files import write_folder

CODES = np.random.default_rng(1).integers(-1, 2, (24, 64)).astype(np.int8)
MODULE = "model.layers.0.mlp.up_proj"


def packed(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Four rows to a byte, row by row as the published layout says."""
    step = len(codes) // 4
    found = np.zeros((step, codes.shape[1]), np.uint8)
    for row, values in enumerate(codes):
        found[row % step] |= (values + 1).astype(np.uint8) << np.uint8(2 * (row // step))
    return found


def read(folder: Path, tensors: dict[str, NDArray[Any]], settings: dict[str, Any]) -> FloatArray:
    with open_folder(write_folder(folder, tensors, {})) as found:
        reader = BitNetReader(found, settings)
        assert reader.codes_leaf(MODULE) == "weight" and reader.shape(MODULE) == CODES.shape
        matrix = reader.matrix(MODULE)
        assert isinstance(matrix, GroupedMatrix)
        order, found = np.array([23, 0, 7]), matrix.dequantize()
        assert np.array_equal(matrix.rows(order).dequantize(), found[order])
        return found


@pytest.mark.parametrize(("linear_class", "factor"), [("bitlinear", 0.25), ("autobitlinear", 4.0)])
@pytest.mark.parametrize("is_packed", [True, False])
def test_ternary_weights_are_read_exactly(linear_class: str, factor: float, is_packed: bool, tmp_path: Path) -> None:
    weight = packed(CODES) if is_packed else CODES.astype(np.float32)
    tensors = {f"{MODULE}.weight": weight, f"{MODULE}.weight_scale": np.array([4.0], np.float32)}
    settings = {"linear_class": linear_class, "quantization_mode": "offline"}
    assert np.array_equal(read(tmp_path, tensors, settings), CODES * np.float32(factor))


def test_numbers_are_rounded_by_their_mean_magnitude_when_loaded(tmp_path: Path) -> None:
    values = np.random.default_rng(2).standard_normal(CODES.shape).astype(np.float32)
    scale = np.abs(values).mean(dtype=np.float64)
    found = read(
        tmp_path, {f"{MODULE}.weight": values}, {"linear_class": "autobitlinear", "quantization_mode": "online"}
    )
    assert np.allclose(found, np.clip(np.rint(values / scale), -1, 1) * scale, rtol=1e-6)


def test_what_is_not_ternary_is_refused(tmp_path: Path) -> None:
    scale = {f"{MODULE}.weight_scale": np.array([1.0], np.float32)}
    broken = {
        "codes of 0, 1 and 2": {f"{MODULE}.weight": np.full((6, 64), 3, np.uint8), **scale},
        "of -1, 0 and 1": {f"{MODULE}.weight": np.full((24, 64), 0.5, np.float32), **scale},
        "weight_scale beside": {f"{MODULE}.weight": np.zeros((6, 64), np.uint8)},
        "one positive number": {
            f"{MODULE}.weight": np.zeros((6, 64), np.uint8),
            f"{MODULE}.weight_scale": np.array([0.0], np.float32),
        },
    }
    for index, (message, tensors) in enumerate(broken.items()):
        with (
            open_folder(write_folder(tmp_path / str(index), tensors, {})) as folder,
            pytest.raises(CorruptFileError, match=message),
        ):
            BitNetReader(folder, {}).matrix(MODULE).dequantize()
    with open_folder(tmp_path / "0") as folder, pytest.raises(UnsupportedFormatError, match="use_rms_norm"):
        BitNetReader(folder, {"use_rms_norm": True})


def test_packed_folder_and_rounded_one_give_the_logits_of_their_numbers(tmp_path: Path) -> None:
    case = read_cases()["bitnet"]
    plain, stored = weights(case["shapes"]), {}
    rounded = dict(plain)
    for name, values in plain.items():
        if values.ndim == 2 and "_proj" in name:
            scale = np.abs(values).mean(dtype=np.float64)
            codes = np.clip(np.rint(values / scale), -1, 1).astype(np.int8)
            rounded[name] = codes * np.float32(scale)
            stored[name] = packed(codes)
            stored[f"{name}_scale"] = np.array([scale], np.float32)
        else:
            stored[name] = values
    config = case["config"]
    method = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    folders = {
        "plain": (rounded, config),
        "packed": (stored, {**config, "quantization_config": {**method, "quantization_mode": "offline"}}),
        "online": (plain, {**config, "quantization_config": {**method, "quantization_mode": "online"}}),
    }
    wanted = None
    for name, (tensors, settings) in folders.items():
        folder = write_folder(tmp_path / name, tensors, settings)
        with open_checkpoint(folder) as file:
            assert file.unknown_settings == ()
            assert any("block" in notice for notice in file.notices) == (name != "plain")
        found = oracle_logits(folder, TOKEN_IDS)
        wanted = found if wanted is None else wanted
        # Factors are rounded to float16.
        assert ((found - wanted) ** 2).sum() <= 1e-5 * (wanted**2).sum(), name

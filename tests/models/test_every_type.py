"""Every tensor type a file can have, loaded and run: wherever it stands, and however the file is cut."""

import re
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.kernels.ops import Batch, FloatArray, Segment
from localinfer.models.decoder import write_decoder
from localinfer.quant.conversion import layout_of, runs_directly
from localinfer.quant.formats import TensorType, block_bytes, block_dtype, block_size
from localinfer.quant.gguf import read_gguf
from localinfer.quant.presets import PRESETS
from tests.conftest import REPOSITORY
from tests.models.arch_models import read_config
from tests.oracle import NumpyTape, NumpyWeights
from tests.typed_models import VOCAB, WEIGHT_TYPES, TypedModel, make_model

TOKEN_IDS = np.random.default_rng(4).integers(0, VOCAB, 9).astype(np.int32)
CONVERTED = [type for type in WEIGHT_TYPES if not runs_directly(type)]
INT8_ERROR = 4e-2
"""Of logits: activations are rounded to int8 in every product with blocks, and weights to Q8_0 where no kernel reads
their type."""
FLOAT_ERROR = 1e-5


def run(path: Path, threads: int = 1) -> FloatArray:
    with localinfer.load(path, threads=threads, kv_type="f32", device="cpu") as llm:
        return llm.logits(TOKEN_IDS)


def oracle_logits(path: Path) -> FloatArray:
    """What a file of plain numbers gives with exact activations."""
    program = write_decoder(read_config(path), NumpyWeights(path), NumpyTape())
    rows = np.arange(len(TOKEN_IDS), dtype=np.int32)
    return program.run(Batch(TOKEN_IDS, [Segment(0, len(TOKEN_IDS), np.arange(1, 5))], rows))


def check_model(model: TypedModel, folder: Path, num_parts: int = 1) -> None:
    """The logits are the bits that the converted weights give, and near those of the numbers they stand for."""
    found = run(model.write(folder / "model.gguf", num_parts))
    np.testing.assert_array_equal(found, run(model.as_converted().write(folder / "converted.gguf")))
    wanted = oracle_logits(model.as_float().write(folder / "float.gguf"))
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    is_float = all(layout_of(weight.type).name in ("F32", "F16", "BF16") for weight in model.weights.values())
    assert error <= (FLOAT_ERROR if is_float else INT8_ERROR)


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda type: type.name)
def test_model_in_any_type_runs_as_its_weights_say(type: TensorType, tmp_path: Path) -> None:
    check_model(make_model(type), tmp_path)


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda type: type.name)
def test_split_model_of_experts_in_any_type_runs_as_its_weights_say(type: TensorType, tmp_path: Path) -> None:
    check_model(make_model(type, num_experts=3, is_tied=False), tmp_path, num_parts=3)

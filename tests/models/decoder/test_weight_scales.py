"""Factors beside matrices (`.scale`), as files of NVFP4 blocks have them: one per matrix, or one per expert."""

import re
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import UnsupportedFormatError
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf
from tests.kernels.cpu.device import CpuDevice
from tests.models.arch_models import ArchModel, Device, build_model, normalized_error, run_logits
from tests.models.numpy_device import NumpyDevice
from tests.support.typed_models import TypedModel, Weight, read_model

# A part of the name before `.weight`.
MATRICES = r"(attn_(q|k|v|qkv|output|gate)|ffn_(gate|up|down)(_exps|_shexp)?|ffn_gate_up_exps|ssm_(in|out|alpha|beta))$"


def as_weight(values: np.ndarray) -> Weight:
    values = np.ascontiguousarray(values, np.float32)
    return Weight(TensorType.F32, values.shape, values.reshape(-1).view(np.uint8))


def scaled_models(path: Path, folder: Path) -> tuple[Path, Path]:
    """The file with a factor beside each matrix, and the same with them multiplied into the matrix; biases stay."""
    generator = np.random.default_rng(7)
    with read_gguf(path) as file:
        model = read_model(file)
    scaled, folded = dict(model.weights), dict(model.weights)
    for name, weight in model.weights.items():
        stem = name.removesuffix(".weight")
        if not re.search(MATRICES, stem) and stem != "output":
            continue
        factors = generator.uniform(0.5, 2.0, weight.shape[:-2] or 1).astype(np.float32)
        factors = scaled[f"{stem}.scale"].blocks.view(np.float32) if f"{stem}.scale" in scaled else factors
        scaled[f"{stem}.scale"] = as_weight(factors)
        if f"{stem}.scale" not in model.weights:
            values = weight.blocks.view(np.float32).reshape(weight.shape)
            folded[name] = as_weight(values * factors.reshape(-1, 1, 1) if values.ndim == 3 else values * factors)
    assert len(scaled) > len(model.weights)
    paths = folder / "scaled.gguf", folder / "folded.gguf"
    for target, weights in zip(paths, (scaled, folded), strict=True):
        TypedModel(model.metadata, weights).write(target)
    return paths


@pytest.mark.parametrize(
    "name",
    "llama-moe qwen35moe-mtp qwen35moe-hybrid nemotron_h_moe-mtp gemma4-moe mimo2-mtp falcon-h1-hybrid gemma3n-altup "
    "lfm2moe-hybrid mistral4-mla gpt-oss-gqa qwen2-gqa".split(),
)
def test_factors_beside_matrices_are_multiplied_with_their_products(name: str, folder: Path, tmp_path: Path) -> None:
    model = build_model(folder, name)
    scaled, folded = scaled_models(model.path, tmp_path)
    ids = model.token_ids[:9]

    def logits(path: Path, device: Device) -> np.ndarray:
        return run_logits(ArchModel(name, path, ids, model.logits), device)

    wanted = logits(folded, NumpyDevice())
    assert normalized_error(wanted, model.logits[:9]) > 1e-4
    assert normalized_error(logits(scaled, NumpyDevice()), wanted) <= 1e-8
    found = logits(scaled, CpuDevice(1))
    assert normalized_error(found, wanted) <= 1e-8


def test_factors_of_zero_and_those_that_are_no_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    for name, tensor, factors, message in (
        ("llama-gqa", "blk.1.ffn_down.scale", [np.nan], "a scale of nan beside blk.1.ffn_down"),
        ("qwen35moe-hybrid", "blk.0.attn_qkv.scale", [0.0], "a scale of 0.0 beside blk.0.attn_qkv"),
        ("gpt-oss-gqa", "blk.0.ffn_up_exps.scale", [1.5, 0.0], "a scale of 0.0 beside blk.0.ffn_up_exps"),
    ):
        model = build_model(folder, name)
        with read_gguf(model.path) as file:
            typed = read_model(file)
        weights = typed.weights | {tensor: as_weight(np.array(factors))}
        path = TypedModel(typed.metadata, weights).write(tmp_path / "x.gguf")
        with pytest.raises(UnsupportedFormatError, match=message):
            run_logits(ArchModel(name, path, model.token_ids, model.logits), NumpyDevice())

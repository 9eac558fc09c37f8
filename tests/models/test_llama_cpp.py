"""What we write, in llama.cpp: its reader, its quantizer, its logits. Needs llama-cpp-python."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.apps.quantize import quantize
from localinfer.models import demo
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import encode_value
from localinfer.quant.methods.imatrix import Importance, write_imatrix
from tests.models.arch_models import ArchModel, run_logits
from tests.models.numpy_device import NumpyDevice
from tests.support.typed_models import TypedModel, Weight, check_model, make_model, read_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
MODEL = Path(demo.__file__).parent / "demo-f16.gguf"
PEER_FILES = Path(__file__).parent.parent / "bench" / "peer_files.py"
NEW_TOKENS = 40

LOGITS_APART = 0.05
"""Root mean square difference of logits over their own spread. Both engines round activations to 8 bits, one scale for
32 columns here and for 256 there, so theirs are further from the exact ones; 0.02 was measured."""
TIES_APART = 4
"""Likeliest tokens may differ where the exact logits of both are closer than so many times that difference."""


def peer(*words: object) -> str:
    """Run it; return what it printed."""
    command = [sys.executable, str(PEER_FILES), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("type", "method"), [("Q4_K_M", "gptq"), ("Q4_0", "awq")])
def test_llama_cpp_computes_the_logits_of_calibrated_files(tmp_path: Path, type: str, method: str) -> None:
    path, answers = tmp_path / "small.gguf", tmp_path / "logits.npy"
    quantize(MODEL, path, type=type, method=method, calibration_tokens=256, threads=2)  # type: ignore[arg-type]
    with localinfer.load(path, speculation=None, threads=2) as llm:
        prompt = llm.tokenizer.encode("Once upon a time")
        ids = [*prompt, *llm.complete(prompt, temperature=0.0, max_tokens=NEW_TOKENS).token_ids]
        ours = llm.logits(np.array(ids, np.int32))
    peer("logits", path, " ".join(map(str, ids)), answers)
    theirs = np.load(answers)
    exact = run_logits(ArchModel(path.name, path, np.array(ids, np.int32), ours), NumpyDevice())

    def difference(first: np.ndarray, second: np.ndarray) -> float:
        return float(np.sqrt(np.square(first - second, dtype=np.float64).mean()))

    assert difference(ours, theirs) < LOGITS_APART * exact.std()
    assert difference(ours, exact) < difference(theirs, exact)
    for row, first, second in zip(exact, ours.argmax(axis=1), theirs.argmax(axis=1), strict=True):
        assert abs(row[first] - row[second]) < TIES_APART * difference(ours, theirs)


@pytest.mark.parametrize(
    ("rope", "theirs"),
    [
        ({"scaling": "linear", "scale": 4.0}, ["rope_scaling_type=1", "rope_freq_scale=0.25"]),
        ({"frequency_scale": 0.5}, ["rope_freq_scale=0.5"]),
        ({"base": 1e5}, ["rope_freq_base=100000.0"]),
        ({"scaling": "yarn", "scale": 2.0}, ["rope_scaling_type=2", "rope_freq_scale=0.5"]),
        (
            {"scaling": "yarn", "scale": 8.0, "yarn_original_context": 256},
            ["rope_scaling_type=2", "rope_freq_scale=0.125", "yarn_orig_ctx=256"],
        ),
        (
            {"scaling": "yarn", "scale": 4.0, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0},
            ["rope_scaling_type=2", "rope_freq_scale=0.25", "yarn_beta_fast=8.0", "yarn_beta_slow=2.0"],
        ),
        (
            {"scaling": "yarn", "scale": 4.0, "yarn_extrapolation_factor": 0.5},
            ["rope_scaling_type=2", "rope_freq_scale=0.25", "yarn_ext_factor=0.5"],
        ),
    ],
)
def test_llama_cpp_rotates_positions_alike(tmp_path: Path, rope: dict[str, Any], theirs: list[str]) -> None:
    """Beyond the context that was trained for; the engines differ far less than the rotations do."""
    length, text = 1200, (Path(__file__).parents[1] / "demo" / "dialogues.py").read_text("utf-8")
    logits = []
    for options in (localinfer.RopeOptions(**rope), None):
        with localinfer.load(MODEL, speculation=None, threads=2, context_length=length, rope=options) as llm:
            ids = llm.tokenizer.encode(text)[:length]
            logits.append(llm.logits(ids))
    answers = tmp_path / "logits.npy"
    peer("logits", MODEL, " ".join(map(str, ids)), answers, f"n_ctx={length + 80}", *theirs)
    apart, rotated = (float(np.square(ours - np.load(answers), dtype=np.float64).mean()) for ours in logits)
    assert apart < rotated / 1000


def test_llama_cpp_quantizes_by_the_imatrix_we_write(tmp_path: Path) -> None:
    imatrix, ours, theirs = tmp_path / "imatrix.gguf", tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    quantize(MODEL, ours, method="imatrix", calibration_tokens=256, save_imatrix=imatrix, threads=2)
    quantize(MODEL, ours, imatrix=imatrix, threads=2)
    peer("quantize", MODEL, theirs, 15, imatrix)
    with read_gguf(ours) as first, read_gguf(theirs) as second:
        assert first.tensors.keys() == second.tensors.keys()
        for name, info in first.tensors.items():
            assert info.type is second.tensor(name).type, name
            np.testing.assert_array_equal(first.tensor_bytes(name), second.tensor_bytes(name), name)


def test_files_of_llama_cpp_run_in_every_type_it_writes(tmp_path: Path) -> None:
    source, imatrix = tmp_path / "source.gguf", tmp_path / "imatrix.gguf"
    model = make_model(TensorType.F32, unit=256, is_tied=False)
    model.write(source)
    generator = np.random.default_rng(2)
    squares = {
        name: generator.uniform(0.5, 1.5, (1, weight.shape[-1])).astype(np.float32)
        for name, weight in model.weights.items()
        if len(weight.shape) > 1
    }
    write_imatrix(imatrix, Importance("random", squares, "none", 1), 128)
    written = peer("quantize-all", source, tmp_path, imatrix).split()
    types = set()
    for name in written:
        with read_gguf(tmp_path / f"{name}.gguf") as file:
            found = read_model(file)
        types |= {weight.type.name for weight in found.weights.values()}
        check_model(found, tmp_path)
    assert types >= {"F16", "Q8_0", "Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0"}
    assert types >= {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}


def with_experts(model: TypedModel, num_experts: int) -> TypedModel:
    """Every feed forward as so many, each times another factor, of which two are chosen."""
    generator = np.random.default_rng(3)
    metadata = model.metadata | {
        "llama.expert_count": encode_value(num_experts),
        "llama.expert_used_count": encode_value(2),
    }
    weights = {}
    for name, weight in model.weights.items():
        if ".ffn_" not in name or "norm" in name:
            weights[name] = weight
            continue
        values = dequantize(weight.blocks, weight.type, weight.shape)
        stack = np.stack([values * np.float32(0.8 + 0.1 * number) for number in range(num_experts)])
        expert_name = name.replace(".weight", "_exps.weight")
        weights[expert_name] = Weight(TensorType.F32, stack.shape, stack.reshape(-1).view(np.uint8))
        if ".ffn_gate." in name:
            router = generator.standard_normal((num_experts, weight.shape[-1])).astype(np.float32)
            router_name = name.replace("ffn_gate", "ffn_gate_inp")
            weights[router_name] = Weight(TensorType.F32, router.shape, router.reshape(-1).view(np.uint8))
    return TypedModel(metadata, weights)


@pytest.mark.parametrize(("type", "file_type"), [("F16", 1), ("BF16", 32), ("MXFP4_MOE", 38)])
def test_llama_cpp_writes_and_continues_plain_numbers_and_mxfp4_alike(
    tmp_path: Path, type: str, file_type: int
) -> None:
    source, imatrix = tmp_path / "source.gguf", tmp_path / "imatrix.gguf"
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    with read_gguf(MODEL) as file:
        model = read_model(file)
    model = with_experts(model, 4) if type == "MXFP4_MOE" else model.as_float()
    model.write(source)
    quantize(source, ours, type=type, threads=2)
    squares = {"none": np.ones((1, 32), np.float32)}
    write_imatrix(imatrix, Importance("none", squares, "none", 1), 128)
    peer("quantize", source, theirs, file_type, imatrix)
    with read_gguf(ours) as first, read_gguf(theirs) as second:
        assert first.tensors.keys() == second.tensors.keys()
        assert first.metadata["general.file_type"] == second.metadata["general.file_type"] == file_type
        for name, info in first.tensors.items():
            assert info.type is second.tensor(name).type, name
            np.testing.assert_array_equal(first.tensor_bytes(name), second.tensor_bytes(name), name)
    with localinfer.load(ours, speculation=None, threads=2, device="cpu") as llm:
        prompt = llm.tokenizer.encode("Once upon a time")
        found = list(llm.complete(prompt, temperature=0.0, max_tokens=16).token_ids)
    assert peer("continue", ours, " ".join(map(str, prompt)), len(found)).split() == [str(token) for token in found]

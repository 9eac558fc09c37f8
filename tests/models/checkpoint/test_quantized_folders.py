"""Folders of GPTQ, AWQ and compressed-tensors weights: the logits of the numbers they state, however they run."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import localinfer
from localinfer.apps.quantize import quantize
from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf
from tests.models.checkpoint.checkpoint_oracle import oracle_logits
from tests.support import quantized_checkpoints as packing
from tests.support.checkpoint_files import (
    LAYERS,
    LLAMA_CONFIG,
    MODULES,
    TOKEN_IDS,
    Array,
    Stored,
    llama_weights,
    write_folder,
)

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4}

# Settings, what the codes are like, and how they are packed.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "gptq-symmetric-32": (GPTQ, {"group_size": 32, "is_symmetric": True}, packing.gptq_tensors),
    "gptq-symmetric-128": (GPTQ, {"group_size": 128, "is_symmetric": True}, packing.gptq_tensors),
    "gptq-64": (GPTQ, {"group_size": 64}, packing.gptq_tensors),
    "gptq-128-v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        {"group_size": 128},
        lambda codes: packing.gptq_tensors(codes, 2),
    ),
    "gptq-rows": (GPTQ, {"group_size": -1}, packing.gptq_tensors),
    "gptq-16": (GPTQ, {"group_size": 16}, packing.gptq_tensors),
    "gptq-8-bit": ({**GPTQ, "bits": 8}, {"group_size": 32, "bits": 8, "is_symmetric": True}, packing.gptq_tensors),
    "gptq-8-bit-zeros": ({**GPTQ, "bits": 8}, {"group_size": 64, "bits": 8}, packing.gptq_tensors),
    "gptq-act-order": ({**GPTQ, "desc_act": True}, {"group_size": 64, "is_act_order": True}, packing.gptq_tensors),
    "awq-gemm-64": (AWQ, {"group_size": 64}, packing.awq_tensors),
    "awq-gemm-128": ({**AWQ, "version": "GEMM"}, {"group_size": 128}, packing.awq_tensors),
    "awq-gemv-128": ({**AWQ, "version": "gemv"}, {"group_size": 128}, lambda codes: packing.awq_tensors(codes, "gemv")),
    "packed-128": (
        packing.packed_settings(4, 128, False),
        {"group_size": 128},
        lambda codes: packing.packed_tensors(codes, is_symmetric=False),
    ),
}


def write_variants(folder: Path, name: str, **changes: Any) -> tuple[Path, Path]:
    """Write the tiny Llama with its matrices quantized, and as the plain numbers they then are."""
    settings, codes_like, pack = VARIANTS[name]
    generator = np.random.default_rng(3)
    plain: dict[str, Array] = llama_weights()
    stored: dict[str, Stored] = dict(plain)
    for layer in range(LAYERS):
        inputs: dict[int, Array] = {}
        for module, shape in MODULES.items():
            codes = packing.random_codes(generator, shape, **codes_like)
            if settings["quant_method"] == "compressed-tensors":
                scales = (codes.scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
                codes = packing.Codes(codes.bits, codes.codes, scales, codes.zeros, codes.groups)
            if codes_like.get("is_act_order") and module != "self_attn.o_proj":
                # Matrices that share an input share its order.
                groups = inputs.setdefault(shape[1], codes.groups)
                codes = packing.Codes(codes.bits, codes.codes, codes.scales, codes.zeros, groups)
            path = f"model.layers.{layer}.{module}"
            plain[f"{path}.weight"] = codes.weights32
            del stored[f"{path}.weight"]
            stored.update(packing.in_module(path, pack(codes)))
    settings = {"group_size": codes_like["group_size"], **settings, **changes}
    quantized = write_folder(folder / name, stored, {**LLAMA_CONFIG, "quantization_config": settings})
    return quantized, write_folder(folder / f"{name}-plain", plain)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_folder_gives_the_logits_of_its_weights(name: str, tmp_path: Path) -> None:
    quantized, plain = write_variants(tmp_path, name)
    wanted = oracle_logits(plain, TOKEN_IDS)
    np.testing.assert_allclose(oracle_logits(quantized, TOKEN_IDS), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    results = []
    for threads in (1, 2):
        with localinfer.load(quantized, threads=threads, kv_type="f32") as llm:
            results.append(llm.logits(TOKEN_IDS))
            for length in (1, 7):
                np.testing.assert_array_equal(llm.logits(TOKEN_IDS[:length]), results[-1][:length])
    np.testing.assert_array_equal(results[0], results[1])
    # Activations are rounded to int8 in every product of two layers.
    assert np.linalg.norm(results[0] - wanted) <= 4e-2 * np.linalg.norm(wanted)


def test_every_packing_of_the_same_codes_runs_to_the_same_bits(tmp_path: Path) -> None:
    found = []
    for name in ("gptq-128-v2", "awq-gemm-128", "awq-gemv-128"):
        quantized, _ = write_variants(tmp_path, name)
        with localinfer.load(quantized, threads=1, kv_type="f32") as llm:
            found.append(llm.logits(TOKEN_IDS))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.parametrize("name", ["gptq-symmetric-128", "gptq-64", "gptq-rows", "gptq-8-bit", "packed-128"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_folder_gives_the_same_bits_as_the_gguf_file_of_its_blocks(name: str, tmp_path: Path) -> None:
    quantized, _ = write_variants(tmp_path, name)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    with open_checkpoint(quantized) as model:
        for key, value in model.metadata.items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            if key.startswith("llama."):
                add(key, value)
        for info in model.tensors.values():
            raw = model.tensor_bytes(info.name).reshape(*info.shape[:-1], -1)
            writer.add_tensor(info.name, raw, raw_dtype=gguf.GGMLQuantizationType[info.type.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = []
    for path in (quantized, tmp_path / "model.gguf"):
        with localinfer.load(path, threads=1, kv_type="f32") as llm:
            found.append(llm.logits(TOKEN_IDS))
    np.testing.assert_array_equal(found[0], found[1])


def test_a_file_made_from_symmetric_gptq_of_32_keeps_every_code(tmp_path: Path) -> None:
    quantized, plain = write_variants(tmp_path, "gptq-symmetric-32")
    quantize(quantized, tmp_path / "model.gguf", type="Q4_0", method="rtn", threads=1)
    with read_gguf(tmp_path / "model.gguf") as made, open_checkpoint(plain) as numbers:
        for name in (f"blk.{layer}.{kind}.weight" for layer in range(LAYERS) for kind in ("attn_v", "ffn_down")):
            info = made.tensor(name)
            assert info.type is TensorType.Q4_0
            found = dequantize(made.tensor_bytes(name), info.type, info.shape)
            np.testing.assert_array_equal(found.ravel(), numbers.tensor_bytes(name).view(np.float32))


def test_symmetric_gptq_of_32_is_q4_0_with_its_codes_unchanged(tmp_path: Path) -> None:
    quantized, plain = write_variants(tmp_path, "gptq-symmetric-32")
    with open_checkpoint(quantized) as model, open_checkpoint(plain) as numbers:
        for layer in range(LAYERS):
            name = f"blk.{layer}.attn_k.weight"
            info = model.tensor(name)
            assert info.type is TensorType.Q4_0
            assert info.num_bytes == model.tensor_bytes(name).size
            found = dequantize(model.tensor_bytes(name), info.type, info.shape)
            wanted = numbers.tensor_bytes(name).view(np.float32).reshape(info.shape)
            np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_marlin_is_refused_with_a_way_out(tmp_path: Path) -> None:
    quantized, _ = write_variants(tmp_path, "awq-gemm-128", version="marlin")
    with pytest.raises(UnsupportedFormatError, match=r"'marlin'.*gemm and gemv"):
        localinfer.load(quantized, threads=1)


def test_settings_that_are_missing_or_belong_to_another_method_are_refused(tmp_path: Path) -> None:
    quantized, _ = write_variants(tmp_path, "gptq-64", quant_method="compressed-tensors", config_groups=None)
    with pytest.raises(CorruptFileError, match="config_groups"):
        open_checkpoint(quantized)
    config = {key: value for key, value in LLAMA_CONFIG.items() if key != "quantization_config"}
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormatError, match="qweight"):
        open_checkpoint(quantized)


def test_module_that_is_both_quantized_and_plain_is_refused(tmp_path: Path) -> None:
    codes = packing.random_codes(np.random.default_rng(1), (128, 128))
    tensors = {**llama_weights(), **packing.in_module("model.layers.0.self_attn.q_proj", packing.gptq_tensors(codes))}
    config = {**LLAMA_CONFIG, "quantization_config": {**GPTQ, "group_size": 32}}
    with pytest.raises(CorruptFileError, match="both quantized and as plain numbers"):
        open_checkpoint(write_folder(tmp_path, tensors, config))

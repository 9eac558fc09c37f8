"""FP8, FP4, int8, bitsandbytes and HQQ matrices: the weights the formats state, in the smallest type near enough."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.errors import CorruptFileError, ModelFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.folder import open_folder
from localinfer.quant.checkpoint.module_reader import StoredMatrix
from localinfer.quant.checkpoint.quantization import open_quantization
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType, row_bytes
from tests.support import scaled_checkpoints as writers
from tests.support.checkpoint_files import Array, Stored, bfloat16, write_folder
from tests.support.quantized_checkpoints import (
    Codes,
    gptq_tensors,
    in_module,
    packed_settings,
    packed_tensors,
    random_codes,
)
from tests.support.scaled_checkpoints import Written

MODULE = "model.layers.0.self_attn.q_proj"
SHAPE = (33, 512)


def generator() -> np.random.Generator:
    return np.random.default_rng(11)


def values(shape: tuple[int, int] = SHAPE) -> Array:
    return writers.normal(generator(), shape)


def open_matrix(folder: Path, tensors: dict[str, Stored], settings: dict[str, Any]) -> StoredMatrix:
    write_folder(folder, in_module(MODULE, tensors), {"quantization_config": settings})
    reader = open_quantization(open_folder(folder))
    assert reader is not None
    assert reader.codes_leaf(MODULE) is not None
    matrix = reader.matrix(MODULE)
    assert reader.shape(MODULE) == matrix.shape
    return matrix


def difference(found: Array, wanted: Array) -> float:
    """Normalized squared error."""
    return float(((found - wanted) ** 2).sum() / (wanted**2).sum())


def check(matrix: StoredMatrix, wanted: Array, type: TensorType, limit: float) -> None:
    """The numbers are those stated but for float32; in blocks they are within the limit, in any order of rows."""
    assert matrix.shape == wanted.shape
    np.testing.assert_allclose(matrix.dequantize(), wanted, rtol=1e-6, atol=1e-7 * np.abs(wanted).max())
    assert matrix.gguf_type() is type
    found = dequantize(matrix.gguf_bytes(type), type, matrix.shape)
    assert difference(found, wanted) <= limit
    assert bool(matrix.change) == (limit > 0)
    order = np.array([7, 0, 31])
    chosen = matrix.rows(order)
    assert difference(dequantize(chosen.gguf_bytes(type), type, chosen.shape), wanted[order]) <= limit


def schemes(**weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", **weights}
    format = weights.pop("format", "float-quantized")
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": scheme}}


BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def with_scale_shape(written: Written, shape: tuple[int, ...]) -> Written:
    scale = np.asarray(written.tensors["weight_scale"]).reshape(shape)
    return Written({**written.tensors, "weight_scale": scale}, written.weights)


FP8: dict[str, tuple[dict[str, Any], Callable[[], Written]]] = {
    "per tensor": (schemes(strategy="tensor"), lambda: writers.fp8(values(), *SHAPE, inner=1)),
    "per row": (schemes(), lambda: writers.fp8(values(), 1, 512)),
    "naive": (schemes(format="naive-quantized"), lambda: writers.fp8(values(), 1, 512)),
    "block": (schemes(strategy="block", block_structure=[16, 64]), lambda: writers.fp8(values(), 16, 64)),
    "DeepSeek's blocks": (BLOCK, lambda: writers.fp8(values((300, 200)), 128, 128, leaf="weight_scale_inv")),
    "AutoFP8": ({"quant_method": "fp8"}, lambda: writers.fp8(values(), *SHAPE, inner=0)),
    "FBGEMM": ({"quant_method": "fbgemm_fp8"}, lambda: writers.fp8(values(), 1, 512)),
    "E5M2": (schemes(strategy="tensor"), lambda: writers.fp8(values(), *SHAPE, table=writers.E5M2, inner=0)),
    "modelopt": (MODELOPT, lambda: writers.fp8(values(), *SHAPE, inner=0)),
    "modelopt's blocks": (
        {**MODELOPT, "quant_algo": "fp8_pb_wo"},
        lambda: with_scale_shape(writers.fp8(values((256, 512)), 128, 128), (2, 1, 4, 1)),
    ),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static"},
        lambda: writers.fp8(values(), 1, 512, inner=1),
    ),
}


@pytest.mark.parametrize("name", FP8)
def test_fp8_runs_as_q8_0_within_1e_4(name: str, tmp_path: Path) -> None:
    settings, write = FP8[name]
    written = write()
    type = TensorType.Q8_0 if written.weights.shape[1] % 32 == 0 else TensorType.BF16
    check(open_matrix(tmp_path, written.tensors, settings), written.weights, type, 1e-4)


def test_fp8_with_powers_of_two_as_scales_is_read(tmp_path: Path) -> None:
    groups = values().reshape(33, 16, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=2))).astype(int) - 8
    codes = writers.nearest(groups / 2.0 ** exponents[..., None], writers.E4M3)
    weights = (writers.E4M3[codes] * 2.0 ** exponents[..., None]).reshape(SHAPE)
    for dtype in ("U8", "F8_E8M0"):
        tensors: dict[str, Stored] = {
            "weight": ("F8_E4M3", codes.reshape(SHAPE)),
            "weight_scale": (dtype, (exponents + 127).astype(np.uint8)),
        }
        settings = schemes(format="mxfp8-quantized", strategy="group", group_size=32)
        check(open_matrix(tmp_path / dtype, tensors, settings), weights, TensorType.Q8_0, 1e-4)


def test_matrix_too_small_for_scales_of_float16_becomes_bfloat16(tmp_path: Path) -> None:
    written = writers.fp8(1e-4 * values(), 1, 512)
    check(open_matrix(tmp_path, written.tensors, schemes()), written.weights, TensorType.BF16, 1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_int8_elements_are_exact_but_for_float32_scales(bits: int, tmp_path: Path) -> None:
    written = writers.int8(generator(), SHAPE, bits)
    settings = schemes(type="int", num_bits=bits, format="int-quantized")
    type = TensorType.Q8_0 if bits == 8 else TensorType.Q4_0
    check(open_matrix(tmp_path / "float32", written.tensors, settings), written.weights, type, 1e-6)
    scale = written.tensors["weight_scale"]
    assert not isinstance(scale, tuple)
    rounded = (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    weights = written.weights * (rounded.astype(np.float64) / scale)
    tensors = {**written.tensors, "weight_scale": bfloat16(rounded)}
    check(open_matrix(tmp_path / "bfloat16", tensors, settings), weights, type, 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_int8_elements_with_zero_points_are_read(bits: int, tmp_path: Path) -> None:
    written = writers.int8(generator(), SHAPE, bits, has_zeros=True)
    settings = schemes(type="int", num_bits=bits, symmetric=False, format="int-quantized")
    matrix = open_matrix(tmp_path, written.tensors, settings)
    type = TensorType.F32 if bits == 8 else TensorType.Q5_0
    np.testing.assert_allclose(matrix.dequantize(), written.weights, rtol=1e-6)
    assert matrix.gguf_type() is type


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("is_padded", [True, False])
def test_pack_quantized_of_other_widths_is_exact(
    bits: int, is_symmetric: bool, is_padded: bool, tmp_path: Path
) -> None:
    codes = random_codes(generator(), (40, 512), bits=bits, group_size=64, is_symmetric=is_symmetric)
    scales = (codes.scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    codes = Codes(bits, codes.codes, scales, codes.zeros, codes.groups)
    tensors = packed_tensors(codes, is_symmetric=is_symmetric)
    if not is_padded:
        tensors["weight_packed"] = running_words(codes.codes, bits)
        if not is_symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(running_words(codes.zeros.T, bits).T)
    narrow = TensorType.Q4_0 if bits < 4 else TensorType.Q5_0 if bits == 5 and is_symmetric else TensorType.Q8_0
    check(open_matrix(tmp_path, tensors, packed_settings(bits, 64, is_symmetric)), codes.weights, narrow, 0)


def running_words(codes: Array, bits: int) -> Array:
    """Codes of each row as one stream of bits, lowest first, in whole words."""
    stream = np.zeros((len(codes), -(-codes.shape[1] * bits // 32) * 32), np.uint8)
    for index in range(codes.shape[1]):
        for bit in range(bits):
            stream[:, index * bits + bit] = codes[:, index] >> bit & 1
    return np.packbits(stream, axis=1, bitorder="little").view(np.int32)


def test_six_bits_with_a_scale_per_row_are_q6_k_exactly(tmp_path: Path) -> None:
    codes = random_codes(generator(), (40, 512), bits=6, group_size=-1, is_symmetric=True)
    scales = (codes.scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    codes = Codes(6, codes.codes, scales, codes.zeros, codes.groups)
    tensors = {**packed_tensors(codes, is_symmetric=True), "weight_packed": running_words(codes.codes, 6)}
    check(open_matrix(tmp_path, tensors, packed_settings(6, -1, True)), codes.weights, TensorType.Q6_K, 0)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_of_three_bits_is_exact(version: int, tmp_path: Path) -> None:
    codes = random_codes(generator(), (64, 512), bits=3, group_size=64)
    stored = (codes.zeros + (7 if version == 1 else 0)) % 8
    tensors: dict[str, Stored] = {
        **gptq_tensors(codes, 2),
        "qweight": running_words(codes.codes, 3).T,
        "qzeros": running_words(stored.T, 3),
    }
    settings = {
        "quant_method": "gptq",
        "bits": 3,
        "group_size": 64,
        "checkpoint_format": ["gptq", "gptq_v2"][version - 1],
    }
    check(open_matrix(tmp_path, tensors, settings), codes.weights, TensorType.Q4_0, 0)


@pytest.mark.parametrize("is_modelopt", [False, True])
def test_mxfp4_keeps_every_code(is_modelopt: bool, tmp_path: Path) -> None:
    written = writers.mxfp4(values())
    settings = schemes(num_bits=4, group_size=32, strategy="group", format="mxfp4-pack-quantized")
    tensors = dict(written.tensors)
    if is_modelopt:
        settings, tensors["weight"] = {**MODELOPT, "quant_algo": "W4A8_MXFP4_FP8"}, tensors.pop("weight_packed")
    check(open_matrix(tmp_path, tensors, settings), written.weights, TensorType.MXFP4, 0)


def test_mxfp6_is_q8_0_exactly(tmp_path: Path) -> None:
    written = writers.mxfp6(values())
    settings = schemes(num_bits=6, group_size=32, strategy="group", format="mxfp6-pack-quantized")
    check(open_matrix(tmp_path, written.tensors, settings), written.weights, TensorType.Q8_0, 0)


@pytest.mark.parametrize("is_modelopt", [False, True])
@pytest.mark.parametrize(("columns", "type"), [(512, TensorType.Q6_K), (96, TensorType.Q8_0), (48, TensorType.BF16)])
def test_nvfp4_keeps_every_code_in_q6_k(columns: int, type: TensorType, is_modelopt: bool, tmp_path: Path) -> None:
    written = writers.nvfp4(values((33, columns)), is_modelopt=is_modelopt)
    settings = schemes(num_bits=4, group_size=16, strategy="tensor_group", format="nvfp4-pack-quantized")
    settings = {**MODELOPT, "quant_algo": "NVFP4"} if is_modelopt else settings
    limit = 1e-6 if type is TensorType.Q6_K else 1e-4
    check(open_matrix(tmp_path, written.tensors, settings), written.weights, type, limit)


def test_factors_of_the_input_move_into_the_columns(tmp_path: Path) -> None:
    written = writers.nvfp4(values(), is_modelopt=True)
    factors = generator().uniform(0.5, 2.0, 512).astype(np.float32)
    settings = {**MODELOPT, "quant_algo": "NVFP4_AWQ"}
    tensors: dict[str, Stored] = {**written.tensors, "pre_quant_scale": factors}
    check(open_matrix(tmp_path, tensors, settings), written.weights * factors, TensorType.Q8_0, 1e-4)
    with pytest.raises(CorruptFileError, match="pre_quant_scale has shape"):
        open_matrix(tmp_path, {**tensors, "pre_quant_scale": factors[1:]}, settings)


def test_nvfp4_scales_of_any_size_in_one_super_block_are_near(tmp_path: Path) -> None:
    written = writers.nvfp4(values() * np.repeat(2.0 ** generator().uniform(-12, 0, (33, 32)), 16, axis=1))
    settings = schemes(num_bits=4, group_size=16, strategy="tensor_group", format="nvfp4-pack-quantized")
    check(open_matrix(tmp_path, written.tensors, settings), written.weights, TensorType.Q6_K, 3e-5)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_four_bits_of_bitsandbytes_are_read(kind: str, is_nested: bool, tmp_path: Path) -> None:
    for shape in ((33, 512), (40, 96)):
        written = writers.bitsandbytes(values(shape), kind, is_nested=is_nested)
        settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        matrix = open_matrix(tmp_path / str(shape[1]), written.tensors, settings)
        check(matrix, written.weights, TensorType.Q8_0, 1e-4)


def test_int8_of_bitsandbytes_is_read(tmp_path: Path) -> None:
    written = writers.int8(generator(), SHAPE, 8)
    scale = written.tensors["weight_scale"]
    assert not isinstance(scale, tuple)
    tensors: dict[str, Stored] = {
        "weight": written.tensors["weight"],
        "SCB": (scale * np.float32(127)).reshape(-1),
        "weight_format": np.array(0, np.uint8),
    }
    matrix = open_matrix(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    check(matrix, written.weights, TensorType.Q8_0, 1e-6)
    tensors["weight_format"] = np.array(2, np.uint8)
    with pytest.raises(UnsupportedFormatError, match="weight_format is not 0"):
        open_matrix(tmp_path, tensors, {"quant_method": "bitsandbytes"})


@pytest.mark.parametrize(
    ("bits", "axis", "size", "is_whole", "type", "limit"),
    [
        (4, 1, 64, False, TensorType.Q4_1, 1e-6),
        (4, 1, 64, True, TensorType.Q5_0, 0),
        (3, 1, 64, False, TensorType.Q4_1, 1e-6),
        (2, 1, 32, False, TensorType.Q4_1, 1e-6),
        (1, 1, 64, False, TensorType.Q4_1, 1e-6),
        (4, 1, 16, False, TensorType.Q8_0, 1e-4),
        (8, 1, 64, False, TensorType.Q8_0, 1e-4),
        (4, 0, 64, False, TensorType.Q8_0, 1e-4),
        (3, 0, 64, False, TensorType.Q8_0, 1e-4),
    ],
)
def test_hqq_is_read(
    bits: int, axis: int, size: int, is_whole: bool, type: TensorType, limit: float, tmp_path: Path
) -> None:
    written = writers.hqq(generator(), (40, 512), bits, size, axis, is_whole=is_whole)
    check(open_matrix(tmp_path, written.tensors, {"quant_method": "hqq"}), written.weights, type, limit)


PER_ROW = writers.fp8(values(), 1, 512).tensors
NVFP4 = writers.nvfp4(values()).tensors
MXFP4 = writers.mxfp4(values()).tensors
NF4 = writers.bitsandbytes(values(), "nf4", is_nested=True).tensors
HQQ = writers.hqq(generator(), (40, 512), 4, 64, 1).tensors
STATE = "weight.quant_state.bitsandbytes__nf4"
FP4 = schemes(num_bits=4, group_size=16, strategy="tensor_group", format="nvfp4-pack-quantized")
BNB = {"quant_method": "bitsandbytes"}
NOT_FINITE = np.full(SHAPE, 0x7F, np.uint8)


@pytest.mark.parametrize(
    ("tensors", "settings", "words"),
    [
        (PER_ROW, schemes(strategy="row"), "strategy is 'row'"),
        (PER_ROW, schemes(num_bits=5), "float of 5 bits.*int of 2 to 8"),
        (PER_ROW, schemes(type="int", num_bits=1), "int of 1 bits"),
        (PER_ROW, schemes(type="complex"), "complex of 8 bits"),
        (PER_ROW, schemes(format="sparse-24-bitmask"), "format is 'sparse-24-bitmask'"),
        (PER_ROW, {**MODELOPT, "quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ'.*NVFP4"),
        (HQQ, {"quant_method": "auto-round", "packing_format": "auto_round:marlin"}, "packing_format is .*marlin"),
        (HQQ, {"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type is 'mx_fp'"),
        ({**HQQ, "view_as_float": np.array(1, np.uint8)}, {"quant_method": "hqq"}, "view_as_float is set"),
        ({**HQQ, "nbits": np.array(6, np.int32)}, {"quant_method": "hqq"}, "has 6 bits"),
    ],
)
def test_scheme_that_is_not_read_is_refused_by_name(
    tensors: dict[str, Stored], settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedFormatError, match=words):
        open_matrix(tmp_path, tensors, settings)


@pytest.mark.parametrize(
    ("tensors", "settings", "words"),
    [
        ({"weight": PER_ROW["weight"]}, schemes(), r"no tensor .*q_proj\.weight_scale"),
        ({"weight": PER_ROW["weight"]}, BLOCK, r"no tensor .*q_proj\.weight_scale"),
        (PER_ROW, {**BLOCK, "weight_block_size": [0, 128]}, "a block is"),
        (PER_ROW, {**BLOCK, "weight_block_size": 128}, "a block is"),
        ({**PER_ROW, "weight_scale": np.ones((32, 1), np.float32)}, schemes(), r"weight_scale has shape \(32, 1\)"),
        ({**PER_ROW, "weight_scale": np.ones((33, 7), np.float32)}, schemes(), r"weight_scale has shape \(33, 7\)"),
        ({**PER_ROW, "weight_scale": np.ones((33, 8), np.float32)}, schemes(group_size=32), r"shape \(33, 8\)"),
        ({**PER_ROW, "weight_scale": np.zeros((33, 0), np.float32)}, schemes(), "weight_scale is F32"),
        ({**PER_ROW, "weight_scale": np.ones((33, 1), np.int32)}, schemes(), "weight_scale is I32"),
        ({**PER_ROW, "weight_scale": np.full((33, 1), np.nan, np.float32)}, schemes(), "infinite or NaN"),
        ({**PER_ROW, "weight": ("F8_E4M3", NOT_FINITE)}, schemes(), "a weight is infinite or NaN"),
        ({**PER_ROW, "weight": ("F8_E4M3", np.zeros(512, np.uint8))}, schemes(), "wanted a matrix of"),
        (writers.int8(generator(), SHAPE, 8).tensors, schemes(type="int", num_bits=4), "as num_bits is 4"),
        (
            {**writers.int8(generator(), SHAPE, 8).tensors, "weight_zero_point": ("I8", np.zeros((5, 1), np.int8))},
            schemes(type="int"),
            "weight_zero_point has shape",
        ),
        ({**NVFP4, "weight_scale": ("F8_E4M3", np.zeros((33, 31), np.uint8))}, FP4, "weight_scale has shape"),
        ({**NVFP4, "weight_scale": ("F8_E4M3", np.full((33, 32), 127, np.uint8))}, FP4, "a scale is NaN"),
        ({**NVFP4, "weight_global_scale": np.zeros(1, np.float32)}, FP4, "other than zero"),
        ({**NVFP4, "weight_global_scale": np.ones(2, np.float32)}, FP4, "wanted one finite number"),
        ({**MXFP4, "weight_scale": np.full((33, 16), 255, np.uint8)}, FP4, "a scale is NaN"),
        ({**MXFP4, "weight_scale": np.full((33, 17), 1, np.uint8)}, FP4, "groups of 32"),
        ({**NF4, STATE: np.frombuffer(b"{", np.uint8)}, BNB, "not sound JSON"),
        ({**NF4, STATE: np.frombuffer(b"[1]", np.uint8)}, BNB, "wanted a shape"),
        ({**NF4, STATE: np.frombuffer(b'{"shape": [33, 511], "blocksize": 64}', np.uint8)}, BNB, "weight has shape"),
        ({**NF4, "weight.absmax": np.zeros(7, np.uint8)}, BNB, "absmax has shape"),
        ({**NF4, "weight.quant_map": np.zeros(15, np.float32)}, BNB, "quant_map has shape"),
        ({**NF4, "weight.nested_quant_map": np.zeros(15, np.float32)}, BNB, "absmax has shape"),
        ({**HQQ, "W_q": np.zeros((5, 64), np.uint8)}, {"quant_method": "hqq"}, "W_q has shape"),
        ({**HQQ, "shape": np.array([40, -1])}, {"quant_method": "hqq"}, "shape is"),
        ({**HQQ, "group_size": np.array(63, np.int32)}, {"quant_method": "hqq"}, "do not split into groups of 63"),
        ({**HQQ, "zero": np.zeros((1, 1), np.float16)}, {"quant_method": "hqq"}, "zero has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tensors: dict[str, Stored], settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptFileError, match=words):
        matrix = open_matrix(tmp_path, tensors, settings)
        matrix.gguf_bytes(matrix.gguf_type())


WHOLE: dict[str, tuple[dict[str, Stored], dict[str, Any]]] = {
    "fp8": (PER_ROW, schemes()),
    "int8": (writers.int8(generator(), SHAPE, 8, has_zeros=True).tensors, schemes(type="int")),
    "nvfp4": (NVFP4, FP4),
    "modelopt": (writers.nvfp4(values(), is_modelopt=True).tensors, {**MODELOPT, "quant_algo": "NVFP4"}),
    "mxfp4": (MXFP4, FP4),
    "nf4": (NF4, BNB),
    "hqq": (HQQ, {"quant_method": "hqq"}),
}
OTHERS: list[Stored] = [
    np.zeros((0, 4), np.uint8),
    np.zeros((1, 1), np.uint8),
    np.full((33, 512), 255, np.uint8),
    np.array(7, np.int32),
    np.full((40, 8), -1, np.int32),
    np.full(2, 1 << 40, np.int64),
    np.full((33, 1), np.inf, np.float32),
    np.zeros((2, 2, 2), np.float16),
    ("F8_E4M3", np.full((33, 512), 1, np.uint8)),
    ("I8", np.full((33, 512), -128, np.int8)),
    ("BF16", np.full((33, 32), 0x7FC0, np.uint16)),
]


@pytest.mark.parametrize("name", WHOLE)
def test_no_tensor_whatever_stands_in_its_place_ends_in_another_error(name: str, tmp_path: Path) -> None:
    tensors, settings = WHOLE[name]
    for leaf in tensors:
        for other in OTHERS:
            folder = write_folder(
                tmp_path, in_module(MODULE, {**tensors, leaf: other}), {"quantization_config": settings}
            )
            with closing(open_folder(folder)) as opened:
                try:
                    reader = open_quantization(opened)
                    assert reader is not None
                    if reader.codes_leaf(MODULE) is not None:
                        matrix = reader.matrix(MODULE)
                        assert reader.shape(MODULE) == matrix.shape
                        type = matrix.gguf_type()
                        blocks = matrix.gguf_bytes(type)
                        assert blocks.size == matrix.shape[0] * row_bytes(type, matrix.shape[1])
                except ModelFileError:
                    pass

"""GPTQ, AWQ and compressed-tensors matrices: exactly the weights the formats state, in every variant."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.folder import open_folder
from localinfer.quant.checkpoint.groups import GroupedMatrix
from localinfer.quant.checkpoint.module_reader import common_type
from localinfer.quant.checkpoint.quantization import open_quantization
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType
from tests.support.checkpoint_files import Stored, write_folder
from tests.support.quantized_checkpoints import (
    Codes,
    awq_tensors,
    gptq_tensors,
    in_module,
    packed_settings,
    packed_tensors,
    random_codes,
)

MODULE = "model.layers.0.self_attn.q_proj"
SHAPE = (24, 256)


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


def read(folder: Path, tensors: dict[str, Stored], settings: dict[str, Any] | None) -> GroupedMatrix:
    config = {} if settings is None else {"quantization_config": settings}
    write_folder(folder, in_module(MODULE, tensors), config)
    opened = open_folder(folder)
    reader = open_quantization(opened)
    assert reader is not None
    matrix = reader.matrix(MODULE)
    assert reader.shape(MODULE) == matrix.shape
    return matrix


def check(found: GroupedMatrix, wanted: Codes, type: TensorType) -> None:
    """The weights are those stated, bit for bit, as numbers and as blocks; so are some of its rows, reordered."""
    np.testing.assert_array_equal(found.dequantize(), wanted.weights32)
    assert found.gguf_type() is type
    blocks = found.gguf_bytes(type)
    np.testing.assert_array_equal(dequantize(blocks, type, found.shape), wanted.weights32)
    order = np.array([5, 0, 17])
    np.testing.assert_array_equal(found.rows(order).dequantize(), wanted.weights32[order])


def gptq_settings(bits: int = 4, group_size: int = 32, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **others}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_gptq_of_four_bits_is_exact(version: int, group_size: int, is_symmetric: bool, tmp_path: Path) -> None:
    wanted = random_codes(generator(), SHAPE, group_size=group_size, is_symmetric=is_symmetric)
    label = {1: "gptq", 2: "gptq_v2"}[version]
    settings = gptq_settings(4, group_size, sym=is_symmetric, checkpoint_format=label)
    found = read(tmp_path, gptq_tensors(wanted, version), settings)
    check(found, wanted, TensorType.Q4_0 if is_symmetric else TensorType.Q5_0)


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_gptq_of_other_widths_is_exact(bits: int, version: int, is_symmetric: bool, tmp_path: Path) -> None:
    wanted = random_codes(generator(), (32, 256), bits=bits, group_size=64, is_symmetric=is_symmetric)
    label = {1: "gptq", 2: "gptq_v2"}[version]
    found = read(tmp_path, gptq_tensors(wanted, version), gptq_settings(bits, 64, checkpoint_format=label))
    wide = TensorType.Q8_0 if is_symmetric else TensorType.F32
    check(found, wanted, TensorType.Q4_0 if bits == 2 else wide)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("version", "label"), [(1, "gptq_v2"), (2, "gptq")])
def test_words_of_symmetric_gptq_overrule_a_wrong_label(bits: int, version: int, label: str, tmp_path: Path) -> None:
    wanted = random_codes(generator(), SHAPE, bits=bits, is_symmetric=True)
    found = read(tmp_path, gptq_tensors(wanted, version), gptq_settings(bits, sym=True, checkpoint_format=label))
    check(found, wanted, TensorType.Q4_0 if bits == 4 else TensorType.Q8_0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_act_order_is_exact_and_sorts_into_whole_groups(bits: int, is_symmetric: bool, tmp_path: Path) -> None:
    wanted = random_codes(generator(), SHAPE, bits=bits, group_size=64, is_symmetric=is_symmetric, is_act_order=True)
    found = read(tmp_path, gptq_tensors(wanted), gptq_settings(bits, 64, desc_act=True))
    assert not found.is_in_order
    check(found, wanted, TensorType.F32)
    order, ordered = found.in_group_order()
    assert ordered.is_in_order
    np.testing.assert_array_equal(ordered.dequantize(), wanted.weights32[:, order])
    type = ordered.gguf_type()
    assert bits == 8 or type is (TensorType.Q4_0 if is_symmetric else TensorType.Q5_0)
    blocks = dequantize(ordered.gguf_bytes(type), type, SHAPE)
    np.testing.assert_array_equal(blocks, wanted.weights32[:, order])


def test_gptq_without_g_idx_has_its_groups_in_order(tmp_path: Path) -> None:
    wanted = random_codes(generator(), SHAPE)
    check(read(tmp_path, gptq_tensors(wanted, has_groups=False), gptq_settings()), wanted, TensorType.Q5_0)


@pytest.mark.parametrize(("columns", "group_size"), [(256, 16), (248, 32), (200, 48)])
def test_groups_that_end_inside_a_block_become_plain_numbers(columns: int, group_size: int, tmp_path: Path) -> None:
    wanted = random_codes(generator(), (24, columns), group_size=group_size)
    found = read(tmp_path, gptq_tensors(wanted), gptq_settings(4, group_size))
    check(found, wanted, TensorType.F32)


def test_first_pattern_that_fits_a_module_changes_its_settings(tmp_path: Path) -> None:
    wanted = random_codes(generator(), SHAPE, bits=8, group_size=64, is_symmetric=True)
    dynamic = {"-:.*k_proj": {}, r"+:.*\.0\..*q_proj": {"bits": 8, "group_size": 64}, ".*": {"bits": 2}}
    check(read(tmp_path, gptq_tensors(wanted), gptq_settings(4, 128, dynamic=dynamic)), wanted, TensorType.Q8_0)


def test_settings_in_a_file_of_their_own_are_found(tmp_path: Path) -> None:
    wanted = random_codes(generator(), SHAPE)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    check(read(tmp_path, gptq_tensors(wanted), None), wanted, TensorType.Q5_0)
    (tmp_path / "quantize_config.json").unlink()
    (tmp_path / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 32, "zero_point": true}')
    check(read(tmp_path, awq_tensors(wanted), None), wanted, TensorType.Q5_0)


@pytest.mark.parametrize("version", ["gemm", "GEMM", "gemv"])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_awq_is_exact(version: str, group_size: int, tmp_path: Path) -> None:
    wanted = random_codes(generator(), SHAPE, group_size=group_size)
    settings = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": version, "zero_point": True}
    check(read(tmp_path, awq_tensors(wanted, version.lower()), settings), wanted, TensorType.Q5_0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_pack_quantized_is_exact(bits: int, group_size: int, is_symmetric: bool, tmp_path: Path) -> None:
    wanted = random_codes(generator(), SHAPE, bits=bits, group_size=group_size, is_symmetric=is_symmetric)
    scales = (wanted.scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    wanted = Codes(bits, wanted.codes, scales, wanted.zeros, wanted.groups)
    tensors = packed_tensors(wanted, is_symmetric=is_symmetric)
    narrow = TensorType.Q4_0 if is_symmetric else TensorType.Q5_0
    wide = TensorType.Q8_0 if is_symmetric else TensorType.F32
    settings = packed_settings(bits, group_size, is_symmetric)
    check(read(tmp_path, tensors, settings), wanted, narrow if bits == 4 else wide)


def test_pack_quantized_with_groups_by_activation_and_odd_columns_is_exact(tmp_path: Path) -> None:
    wanted = random_codes(generator(), (24, 60), group_size=20, is_symmetric=True, is_act_order=True)
    scales = (wanted.scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    wanted = Codes(4, wanted.codes, scales, wanted.zeros, wanted.groups)
    tensors = packed_tensors(wanted, is_symmetric=True, has_groups=True)
    check(read(tmp_path, tensors, packed_settings(4, 20, True)), wanted, TensorType.F32)


def test_scale_that_float16_cannot_hold_makes_plain_numbers(tmp_path: Path) -> None:
    wanted = random_codes(generator(), SHAPE, is_symmetric=True)
    scales = np.full_like(wanted.scales, 2.0**-20 * 1.25)
    wanted = Codes(4, wanted.codes, scales, wanted.zeros, wanted.groups)
    settings = packed_settings(4, 32, True)
    check(read(tmp_path, packed_tensors(wanted, is_symmetric=True), settings), wanted, TensorType.Q4_0)
    wanted = Codes(4, wanted.codes, scales * np.float32(2.0**-5), wanted.zeros, wanted.groups)
    check(read(tmp_path, packed_tensors(wanted, is_symmetric=True), settings), wanted, TensorType.F32)


def test_stack_of_different_matrices_has_a_type_that_holds_all(tmp_path: Path) -> None:
    even = random_codes(generator(), SHAPE, is_symmetric=True)
    odd = random_codes(generator(), SHAPE)
    first = read(tmp_path / "a", gptq_tensors(even), gptq_settings())
    second = read(tmp_path / "b", gptq_tensors(odd), gptq_settings())
    assert common_type([first, first]) is TensorType.Q4_0
    assert common_type([first, second]) is TensorType.Q5_0
    blocks = dequantize(first.gguf_bytes(TensorType.Q5_0), TensorType.Q5_0, SHAPE)
    np.testing.assert_array_equal(blocks, even.weights32)
    assert common_type([first, second.in_group_order()[1], first]) is TensorType.Q5_0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "awq", "version": "marlin"}, "AWQ version is 'marlin'"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "AWQ version is 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 8}, "AWQ of 8 bits"),
        ({"quant_method": "vptq"}, "quantized by 'vptq'"),
        (gptq_settings(bits=5), "has 5 bits"),
        (gptq_settings(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
        (gptq_settings(is_marlin_format=True), "checkpoint_format is 'marlin'"),
        ({**packed_settings(4, 32, True), "format": "marlin-24"}, "format is 'marlin-24'"),
        (packed_settings(9, 32, True), "int of 9 bits"),
        ({**packed_settings(4, 32, True), "transform_config": {"config_groups": {"R1": {}}}}, "R1 is of type None"),
    ],
)
def test_packing_that_is_not_read_is_refused_by_name(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match=words):
        read(tmp_path, gptq_tensors(random_codes(generator(), SHAPE)), settings)


def without(tensors: dict[str, Stored], leaf: str) -> dict[str, Stored]:
    return {name: stored for name, stored in tensors.items() if name != leaf}


GPTQ = gptq_tensors(random_codes(generator(), SHAPE))
AWQ = awq_tensors(random_codes(generator(), SHAPE))
AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 32}
PACKED = packed_tensors(random_codes(generator(), SHAPE), is_symmetric=False)
PACKED_SETTINGS = packed_settings(4, 32, False)


@pytest.mark.parametrize(
    ("tensors", "settings", "words"),
    [
        (without(GPTQ, "scales"), gptq_settings(), r"no tensor .*q_proj\.scales"),
        (without(GPTQ, "qzeros"), gptq_settings(), r"no tensor .*q_proj\.qzeros"),
        (GPTQ, gptq_settings(bits=8), "for 8 bits"),
        (GPTQ, gptq_settings(group_size=64), "do not fit group_size 64"),
        (GPTQ, gptq_settings(group_size="x"), "do not fit group_size 'x'"),
        (GPTQ, gptq_settings(dynamic={"(": {}}), "pattern"),
        (GPTQ, gptq_settings(dynamic=[1]), "dynamic is"),
        ({**GPTQ, "qweight": np.zeros((32, 24), np.float32)}, gptq_settings(), "qweight is F32"),
        ({**GPTQ, "scales": np.ones((8, 24), np.int32)}, gptq_settings(), "scales is I32"),
        ({**GPTQ, "scales": np.ones((8, 23), np.float16)}, gptq_settings(), r"scales has shape \(8, 23\)"),
        ({**GPTQ, "scales": np.full((8, 24), np.inf, np.float16)}, gptq_settings(), "infinite or NaN"),
        ({**GPTQ, "g_idx": np.zeros(255, np.int32)}, gptq_settings(), r"g_idx has shape \(255,\)"),
        ({**GPTQ, "g_idx": np.full(256, 8, np.int32)}, gptq_settings(), "groups 8 to 8; wanted 0 to 7"),
        ({**GPTQ, "g_idx": np.full(256, -1, np.int32)}, gptq_settings(), "groups -1 to -1"),
        (AWQ, {**AWQ_SETTINGS, "group_size": 64}, r"scales has shape \(8, 24\)"),
        (AWQ, {**AWQ_SETTINGS, "group_size": 7}, "do not split into groups of 7"),
        (AWQ, {**AWQ_SETTINGS, "version": "gemv"}, "do not split into groups|has shape"),
        ({**AWQ, "qzeros": np.zeros((8, 2), np.int32)}, AWQ_SETTINGS, r"qzeros has shape \(8, 2\)"),
        (without(PACKED, "weight_shape"), PACKED_SETTINGS, "no tensor .*weight_shape"),
        ({**PACKED, "weight_shape": np.array([24, -1])}, PACKED_SETTINGS, r"weight_shape is \[24, -1\]"),
        ({**PACKED, "weight_shape": np.array([24, 300])}, PACKED_SETTINGS, "weight_packed has shape"),
        ({**PACKED, "weight_scale": np.ones((24, 7), np.float16)}, PACKED_SETTINGS, "weight_scale has shape"),
        ({**PACKED, "weight_zero_point": np.zeros((2, 8), np.int32)}, PACKED_SETTINGS, "weight_zero_point has shape"),
        (PACKED, {**PACKED_SETTINGS, "config_groups": {}}, "config_groups"),
    ],
)
def test_tensors_that_do_not_fit_each_other_or_the_settings_are_refused(
    tensors: dict[str, Stored], settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptFileError, match=words):
        read(tmp_path, tensors, settings)

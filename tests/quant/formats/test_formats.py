from pathlib import Path

import gguf
import numpy as np
import pytest

from localinfer.errors import ShapeError, UnsupportedFormatError
from localinfer.quant.formats.types import (
    RETIRED_TYPES,
    TensorType,
    bits_per_weight,
    block_bytes,
    block_dtype,
    block_size,
    row_bytes,
    tensor_type,
)

# Activation blocks never lie in files; the gguf package states an older layout for this one.
NOT_COMPARED = {TensorType.Q8_1}


@pytest.mark.parametrize("oracle", gguf.GGMLQuantizationType, ids=lambda oracle: oracle.name)
def test_type_ids_names_and_sizes_equal_the_gguf_package(oracle: gguf.GGMLQuantizationType) -> None:
    type = tensor_type(int(oracle))
    assert type.name == oracle.name
    if type not in NOT_COMPARED:
        assert (block_size(type), block_bytes(type)) == gguf.GGML_QUANT_SIZES[oracle]


@pytest.mark.parametrize("type", TensorType, ids=lambda type: type.name)
def test_block_fields_fill_the_block_without_gaps(type: TensorType) -> None:
    dtype = block_dtype(type)
    assert dtype.names is not None
    sizes = [dtype[name].itemsize for name in dtype.names]
    assert sum(sizes) == dtype.itemsize == block_bytes(type)
    assert not dtype.isalignedstruct


@pytest.mark.parametrize(("type_id", "name"), RETIRED_TYPES.items())
def test_retired_type_is_refused_by_name(type_id: int, name: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=f"{name} .*retired"):
        tensor_type(type_id)


@pytest.mark.parametrize("type_id", [-1, 43, 255, 2**31 - 1])
def test_unknown_type_is_refused_by_id(type_id: int) -> None:
    with pytest.raises(UnsupportedFormatError, match=f"id {type_id} is unknown"):
        tensor_type(type_id)


def test_row_bytes_counts_whole_blocks() -> None:
    assert row_bytes(TensorType.F16, 7) == 14
    assert row_bytes(TensorType.Q4_0, 96) == 3 * 18
    assert row_bytes(TensorType.Q6_K, 2048) == 8 * 210


@pytest.mark.parametrize("columns", [-32, 0, 31, 33])
def test_row_bytes_refuses_a_broken_block(columns: int) -> None:
    with pytest.raises(ShapeError, match="Q8_0 .* blocks of 32"):
        row_bytes(TensorType.Q8_0, columns)


def test_bits_per_weight_include_the_scales() -> None:
    stated = {"F32": 32, "Q4_0": 4.5, "Q4_K": 4.5, "Q6_K": 6.5625, "MXFP4": 4.25, "Q1_0": 1.125}
    found = {name: bits_per_weight(TensorType[name]) for name in stated}
    assert found == stated


def test_block_records_are_little_endian() -> None:
    raw = np.array([0, 0x3C] + [0] * 16, dtype=np.uint8)
    assert raw.view(block_dtype(TensorType.Q4_0))["d"][0] == 1.0


def test_readme_table_states_the_real_sizes() -> None:
    readme = Path(__file__).parents[3] / "quant" / "README.md"
    rows = [line.strip("| ").split(" | ") for line in readme.read_text("utf-8").splitlines()]
    stated = {row[0]: row[1:4] for row in rows if row[0] in TensorType.__members__ and row[1].isdigit()}
    assert len(stated) == 28
    for name, (columns, num_bytes, bits) in stated.items():
        type = TensorType[name]
        assert (int(columns), int(num_bytes)) == (block_size(type), block_bytes(type))
        assert float(bits) == pytest.approx(bits_per_weight(type), abs=1e-4)

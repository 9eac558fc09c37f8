"""Files made to break a reader: each ends in a typed error that says where, before any allocation.

The row numbers are those of the project's table of hostile inputs; row 13 is in test_gguf_split.py,
and test_gguf_fuzz.py injures a sound file at random.
"""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import array, entry, gguf, tensor, text, u32, u64

from localinfer.errors import CorruptFileError, ModelFileError, UnsupportedFormatError
from localinfer.quant.gguf.reader import read_gguf

MAX_READER_BYTES = 4 << 20
"""More than any hostile file here may make the reader allocate."""

Refuse = Callable[..., None]


@pytest.fixture
def refuse(tmp_path: Path) -> Refuse:
    """Check that a file of these bytes is refused with this error, cheaply."""

    def check(content: bytes, match: str, error: type[ModelFileError] = CorruptFileError, grow: int = 0) -> None:
        path = tmp_path / "hostile.gguf"
        path.write_bytes(content)
        if grow:
            with open(path, "r+b") as file:
                file.truncate(grow)
        tracemalloc.start()
        try:
            with pytest.raises(error, match=match) as caught:
                read_gguf(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert type(caught.value) is error
        assert "hostile.gguf" in str(caught.value)
        assert peak < MAX_READER_BYTES

    return check


NAME = entry("general.name", 8, text("model"))


# Row 1: the first bytes


@pytest.mark.parametrize("length", range(1, 24))
def test_row_1_file_that_ends_in_the_header_is_refused(refuse: Refuse, length: int) -> None:
    refuse(gguf()[:24][:length], "wanted a GGUF file|the file ends at byte")


def test_row_1_empty_file_is_refused(refuse: Refuse) -> None:
    refuse(b"", "empty")


@pytest.mark.parametrize(
    ("start", "match"),
    [
        (b"ABCD" + bytes(60), "starts with b'ABCD'"),
        (b"FUGG" + bytes(60), "byte-swapped"),
        (b"lmgg" + bytes(60), "came before GGUF"),
        (b"PK\3\4" + bytes(60), "PyTorch"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (u64(80) + b'{"weight": {}}' + bytes(80), "safetensors"),
    ],
)
def test_row_1_other_kinds_of_file_are_named(refuse: Refuse, start: bytes, match: str) -> None:
    refuse(start, match)


@pytest.mark.parametrize(
    ("version", "match"),
    [
        (0, "version 0.*convert"),
        (1, "version 1.*convert"),
        (4, "version 4.*update localinfer"),
        (2**32 - 1, "version 4294967295"),
        (3 << 24, "big-endian"),
        (2 << 24, "big-endian"),
    ],
)
def test_row_1_other_versions_are_refused(refuse: Refuse, version: int, match: str) -> None:
    refuse(gguf(version=version), match, UnsupportedFormatError)


# Row 2: counts


@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 2**32, 2**62, 10_000])
def test_row_2_impossible_number_of_keys_is_refused(refuse: Refuse, count: int) -> None:
    refuse(gguf([NAME], num_keys=count), f"declares {count}.* metadata keys")


@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 2**32, 2**62, 10_000])
def test_row_2_impossible_number_of_tensors_is_refused(refuse: Refuse, count: int) -> None:
    refuse(gguf([NAME], num_tensors=count), f"declares {count}.* tensors")


def test_row_2_counts_beyond_the_limits_are_refused_in_a_big_file(refuse: Refuse) -> None:
    refuse(gguf(num_keys=70_000), "limit 65536", grow=1 << 30)
    refuse(gguf(num_tensors=40_000), "limit 32768", grow=1 << 30)


def test_row_2_more_keys_than_written_is_refused(refuse: Refuse) -> None:
    refuse(gguf([NAME], num_keys=3), "key", grow=600)


# Row 3: string lengths

LENGTHS = [2**63, 2**64 - 1, 2**64 - 8, 2**32, 1 << 30, 10_000]


@pytest.mark.parametrize("length", LENGTHS)
def test_row_3_key_longer_than_the_file_is_refused(refuse: Refuse, length: int) -> None:
    refuse(gguf([text("a", length)]), "metadata key 0")


@pytest.mark.parametrize("length", LENGTHS)
def test_row_3_value_longer_than_the_file_is_refused(refuse: Refuse, length: int) -> None:
    refuse(gguf([entry("general.name", 8, text("a", length))]), "'general.name'")


@pytest.mark.parametrize("length", LENGTHS)
def test_row_3_entry_longer_than_the_file_is_refused(refuse: Refuse, length: int) -> None:
    tokens = array(8, text("a") + text("b", length), 2)
    refuse(gguf([entry("tokenizer.ggml.tokens", 9, tokens)]), "'tokenizer.ggml.tokens'")


@pytest.mark.parametrize("length", LENGTHS)
def test_row_3_tensor_name_longer_than_the_file_is_refused(refuse: Refuse, length: int) -> None:
    refuse(gguf([], [text("a", length) + bytes(40)]), "name of tensor 0")


def test_row_3_gigabyte_string_inside_a_big_file_is_refused(refuse: Refuse) -> None:
    content = gguf([entry("general.name", 8, text("a", 1 << 30))])
    refuse(content, f"'general.name' is {1 << 30} bytes long; wanted at most", grow=3 << 30)


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
def test_row_3_chat_template_over_a_mebibyte_is_refused(refuse: Refuse, key: str) -> None:
    refuse(gguf([entry(key, 8, text("a", (1 << 20) + 1))]), key, grow=4 << 20)


def test_row_3_token_over_a_mebibyte_is_refused(refuse: Refuse) -> None:
    tokens = array(8, text("a", (1 << 20) + 1), 1)
    refuse(gguf([entry("tokenizer.ggml.tokens", 9, tokens)]), "an entry of key", grow=4 << 20)


def test_row_3_metadata_over_the_header_limit_is_refused(refuse: Refuse) -> None:
    content = gguf([entry("a", 9, array(0, b"", 1 << 29))])
    refuse(content, "runs past the first 268435456 bytes", grow=1 << 30)
    refuse(gguf([entry("a", 9, array(8, b"", 1 << 26))]), "runs past the first 268435456", grow=1 << 30)


# Row 4: arrays


@pytest.mark.parametrize("element", [0, 1, 2, 4, 6, 7, 8, 10, 12])
@pytest.mark.parametrize("count", [2**63, 2**62, 2**61 + 1, 2**32, 100])
def test_row_4_array_longer_than_the_file_is_refused(refuse: Refuse, element: int, count: int) -> None:
    refuse(gguf([entry("list", 9, array(element, b"", count))]), "'list'")


def test_row_4_nested_arrays_are_refused(refuse: Refuse) -> None:
    refuse(gguf([entry("list", 9, array(9, array(4, u32(1), 1), 1))]), "arrays cannot nest")
    refuse(gguf([entry("list", 9, array(9, b"", 2**62))]), "arrays cannot nest")
    deep = array(4, u32(1), 1)
    for _ in range(10_000):
        deep = array(9, deep, 1)
    refuse(gguf([entry("list", 9, deep)]), "arrays cannot nest")


@pytest.mark.parametrize("type_id", [-1, 13, 100, 2**31 - 1])
def test_row_4_unknown_value_types_are_refused(refuse: Refuse, type_id: int) -> None:
    refuse(gguf([entry("key", type_id, u64(0))]), f"'key' has the unknown value type {type_id}")
    refuse(gguf([entry("key", 9, array(type_id, b"", 0))]), f"unknown value type {type_id}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", entry("tokenizer.ggml.tokens", 9, array(4, u32(1), 1))),
        ("tokens", entry("tokenizer.ggml.tokens", 8, text("a"))),
        ("merges", entry("tokenizer.ggml.merges", 9, array(6, u32(1), 1))),
        ("scores", entry("tokenizer.ggml.scores", 9, array(5, u32(1), 1))),
        ("scores", entry("tokenizer.ggml.scores", 9, array(8, text("a"), 1))),
        ("token_type", entry("tokenizer.ggml.token_type", 9, array(6, u32(1), 1))),
        ("token_type", entry("tokenizer.ggml.token_type", 4, u32(1))),
    ],
)
def test_row_4_wrong_element_type_is_refused(refuse: Refuse, key: str, value: bytes) -> None:
    refuse(gguf([value]), f"'tokenizer.ggml.{key}' is .*; wanted an array of")


@pytest.mark.parametrize("value", [2, 255])
def test_row_4_bool_that_is_neither_is_refused(refuse: Refuse, value: int) -> None:
    refuse(gguf([entry("flag", 7, bytes([value]))]), f"'flag' is a bool with the value {value}")


# Row 5: names


def test_row_5_duplicate_key_is_refused(refuse: Refuse) -> None:
    refuse(gguf([NAME, NAME]), "'general.name' appears twice")


def test_row_5_duplicate_tensor_is_refused(refuse: Refuse) -> None:
    tensors = [tensor("a", [8]), tensor("a", [8], offset=32)]
    refuse(gguf([], tensors, bytes(64)), "tensor 'a' appears twice")


@pytest.mark.parametrize("name", [b"", b"a\0b", b"\0"])
def test_row_5_empty_and_nul_names_are_refused(refuse: Refuse, name: bytes) -> None:
    refuse(gguf([entry(name, 4, u32(0))]), "metadata key 0 is .* without NUL")
    refuse(gguf([], [tensor(name, [8])], bytes(32)), "tensor 0 is .* without NUL")


@pytest.mark.parametrize("raw", [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
def test_row_5_invalid_utf_8_is_refused(refuse: Refuse, raw: bytes) -> None:
    refuse(gguf([entry(raw, 4, u32(0))]), "metadata key 0 is not UTF-8")
    refuse(gguf([entry("general.name", 8, text(raw))]), "'general.name' is not UTF-8")
    refuse(gguf([], [tensor(raw, [8])], bytes(32)), "tensor 0 is not UTF-8")


def test_row_5_tensor_name_of_64_bytes_is_refused(refuse: Refuse) -> None:
    refuse(gguf([], [tensor("a" * 64, [8])], bytes(32)), "64 bytes long; wanted at most 63")


# Row 6: alignment


@pytest.mark.parametrize("alignment", [0, 1, 3, 4, 33, 131072, 1 << 30, 2**32 - 1])
def test_row_6_bad_alignment_is_refused(refuse: Refuse, alignment: int) -> None:
    key = entry("general.alignment", 4, u32(alignment))
    refuse(gguf([key], [tensor("a", [8])], bytes(32)), f"'general.alignment' is {alignment};")


@pytest.mark.parametrize(
    "key",
    [
        entry("general.alignment", 5, u32(32)),
        entry("general.alignment", 10, u64(32)),
        entry("general.alignment", 8, text("32")),
        entry("general.alignment", 9, array(4, u32(32), 1)),
    ],
)
def test_row_6_alignment_of_the_wrong_type_is_refused(refuse: Refuse, key: bytes) -> None:
    refuse(gguf([key], [tensor("a", [8])], bytes(32)), "'general.alignment' is .*; wanted uint32")


# Row 7: shapes


@pytest.mark.parametrize("count", [0, 5, 2**31, 2**32 - 1])
def test_row_7_wrong_number_of_dimensions_is_refused(refuse: Refuse, count: int) -> None:
    content = gguf([], [tensor("a", [8] * 5, num_dimensions=count)], bytes(64))
    refuse(content, f"tensor 'a' has {count} dimensions")


@pytest.mark.parametrize(
    "sizes",
    [
        [0],
        [32, 0],
        [2**63],
        [2**64 - 1],
        [32, 2**64 - 32],
        [2**32, 2**32],
        [2**42 + 1, 2**21, 2**2],
        [2**62, 2**62, 2**62, 2**62],
        [2**31, 2**31, 2],
    ],
)
@pytest.mark.parametrize("type_id", [0, 2, 12])
def test_row_7_impossible_shape_is_refused(refuse: Refuse, sizes: list[int], type_id: int) -> None:
    content = gguf([], [tensor("blk.0.x", sizes, type_id)], bytes(64))
    refuse(content, "tensor 'blk.0.x' has the impossible shape")


@pytest.mark.parametrize("sizes", [[2**40], [2**30, 2**30], [2**42 + 1, 2**20]])
def test_row_7_shape_larger_than_the_file_is_refused(refuse: Refuse, sizes: list[int]) -> None:
    refuse(gguf([], [tensor("a", sizes)], bytes(64)), "tensor 'a' .* ends at byte")


# Row 8: offsets


def test_row_8_unaligned_offset_is_refused(refuse: Refuse) -> None:
    refuse(gguf([], [tensor("a", [8], offset=4)], bytes(64)), "tensor 'a' starts at offset 4")


def test_row_8_overlapping_tensors_are_refused(refuse: Refuse) -> None:
    tensors = [tensor("a", [16]), tensor("b", [8], offset=32)]
    refuse(gguf([], tensors, bytes(96)), "tensors 'a' and 'b' overlap")
    refuse(gguf([], [tensor("a", [8]), tensor("b", [8])], bytes(96)), "overlap")


def test_row_8_tensor_one_byte_past_the_end_is_refused(refuse: Refuse) -> None:
    refuse(gguf([], [tensor("a", [8])], bytes(31)), "tensor 'a' .* ends at byte")


@pytest.mark.parametrize("offset", [2**63, 2**64 - 32, 2**62, 2**32])
def test_row_8_offset_that_wraps_is_refused(refuse: Refuse, offset: int) -> None:
    refuse(gguf([], [tensor("a", [8], offset=offset)], bytes(64)), "tensor 'a' .* ends at byte")


def test_row_8_file_without_its_data_is_refused(refuse: Refuse) -> None:
    content = gguf([], [tensor("a", [8])])
    refuse(content.rstrip(b"\0")[:-1] + bytes(12), "tensor 'a'")


# Row 9: types


@pytest.mark.parametrize("type_id", [-1, 43, 1000, 2**31 - 1])
def test_row_9_unknown_tensor_type_is_refused(refuse: Refuse, type_id: int) -> None:
    content = gguf([], [tensor("a", [256], type_id)], bytes(1024))
    refuse(content, f"tensor 'a': .* {type_id} is unknown", UnsupportedFormatError)


def test_row_9_retired_tensor_type_is_refused_by_name(refuse: Refuse) -> None:
    content = gguf([], [tensor("a", [256], 31)], bytes(1024))
    refuse(content, "tensor 'a': .*Q4_0_4_4 .*retired", UnsupportedFormatError)


@pytest.mark.parametrize(("type_id", "columns", "name"), [(2, 31, "Q4_0"), (12, 128, "Q4_K"), (40, 32, "NVFP4")])
def test_row_9_row_of_broken_blocks_is_refused(refuse: Refuse, type_id: int, columns: int, name: str) -> None:
    content = gguf([], [tensor("a", [columns, 256], type_id)], bytes(65536))
    refuse(content, f"tensor 'a' has rows of {columns} columns, but {name}")

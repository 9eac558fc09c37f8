"""The header of a safetensors file: what is sound is read, what is not ends in an error that names it."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from localinfer.errors import CorruptFileError, ModelFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.folder import MAX_HEADER_BYTES, MAX_HEADER_VALUES, read_header
from localinfer.quant.gguf.mapped_file import MappedFile
from tests.support.checkpoint_files import bfloat16, safetensors_bytes, with_header

SOUND = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.bias": np.ones(4, np.float16)}


def header_of(path: Path, content: bytes) -> dict[str, tuple[str, tuple[int, ...]]]:
    path.write_bytes(content)
    file = MappedFile(path)
    try:
        return {name: (tensor.dtype, tensor.shape) for name, tensor in read_header(file).items()}
    finally:
        file.close()


def entry(dtype: object = "F32", shape: object = (2,), data_offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def test_sound_header_gives_every_tensor_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        safetensors_bytes({**SOUND, "c": bfloat16(np.ones((1, 2))), "empty": np.zeros((0, 3), np.float32)})
    )
    file = MappedFile(path)
    tensors = read_header(file, part=3)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "a.weight": ("F32", (2, 3)),
        "b.bias": ("F16", (4,)),
        "c": ("BF16", (1, 2)),
        "empty": ("F32", (0, 3)),
    }
    place = tensors["a.weight"]
    assert place.part == 3
    np.testing.assert_array_equal(file.view(place.start, place.end).view(np.float32), np.arange(6))
    del file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00", "8 bytes of header length"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "claims 1099511627776 bytes"),
        (b"\x02" + bytes(7) + b"[]", r"begins with b'\['"),
        (with_header('{"a": '), "not sound JSON"),
        (with_header("{" + '"a":{' * 5000 + "}" * 5001), "not sound JSON"),
        (with_header('{"a": 1, "a": 2}'), "'a' stands there twice"),
        (with_header(json.dumps(entry())), "that of one tensor"),
        (with_header('{"a": [' + "[]," * (MAX_HEADER_VALUES // 2) + "[]]}"), f"at most {MAX_HEADER_VALUES}"),
        (with_header(json.dumps({"a\u202eb": entry()}), bytes(8)), "cannot be printed"),
        (with_header(json.dumps({"a": 7})), "wanted an object of dtype, shape and data_offsets"),
        (with_header(json.dumps({"a": {**entry(), "extra": 1}}), bytes(8)), "wanted an object of dtype"),
        (with_header(json.dumps({"": entry()}), bytes(8)), "a name of 0 characters"),
        (with_header(json.dumps({"a": entry(dtype=3)}), bytes(8)), "dtype 3"),
        (with_header(json.dumps({"a": entry(shape=[-2])}), bytes(8)), r"shape \[-2\]"),
        (with_header(json.dumps({"a": entry(shape=[True, 2])}), bytes(8)), "shape"),
        (with_header(json.dumps({"a": entry(shape=[2.0])}), bytes(8)), "shape"),
        (with_header(json.dumps({"a": entry(shape=[1] * 9)}), bytes(8)), "at most 8"),
        (with_header(json.dumps({"a": entry(data_offsets=[8, 0])}), bytes(8)), "data_offsets"),
        (with_header(json.dumps({"a": entry(data_offsets=[0, 16], shape=[4])}), bytes(8)), "the file at byte"),
        (with_header(json.dumps({"a": entry(dtype="F16")}), bytes(8)), r"F16 of shape \[2\] takes 4"),
        (with_header(json.dumps({"a": entry(shape=[1 << 62, 1 << 62])}), bytes(8)), "takes"),
        (with_header(json.dumps({"a": entry(), "b": entry()}), bytes(8)), "overlaps the tensor before it"),
        (with_header(json.dumps({"a": entry(data_offsets=[4, 12])}), bytes(12)), "leaves bytes before it unused"),
        (with_header(json.dumps({"a": entry()}), bytes(9)), "its tensors end at byte"),
    ],
)
def test_damaged_header_is_refused_with_what_is_wrong(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=words):
        header_of(tmp_path / "model.safetensors", content)


def test_dtype_of_unknown_size_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match="'F4'"):
        header_of(tmp_path / "model.safetensors", with_header(json.dumps({"a": entry(dtype="F4")}), bytes(8)))


def test_header_longer_than_the_format_allows_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{")
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(CorruptFileError, match=f"at most {MAX_HEADER_BYTES}"):
        read_header(MappedFile(path))


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = safetensors_bytes(SOUND)
    for length in range(1, len(whole)):
        with pytest.raises(CorruptFileError):
            header_of(tmp_path / "model.safetensors", whole[:length])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_changed_bytes_never_give_anything_but_a_sound_header_or_a_typed_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(safetensors_bytes(SOUND))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(content)
    with contextlib.closing(MappedFile(path)) as file, contextlib.suppress(ModelFileError):
        places = [(tensor.start, tensor.end) for tensor in read_header(file).values()]
        # One after the other, up to the end of the file.
        assert [end for _, end in places] == [*(start for start, _ in places[1:]), len(content)]

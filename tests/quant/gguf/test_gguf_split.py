"""Models in several files: any part opens the whole, and a wrong part is named (row 13)."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import entry, gguf as gguf_bytes, tensor, text

from localinfer.errors import CorruptFileError, ModelFileError
from localinfer.quant.gguf.reader import read_gguf

NAMES = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def u16(value: int) -> bytes:
    return value.to_bytes(2, "little")


def part(index: int, count: int, num_tensors: int, names: list[str], *more: bytes) -> bytes:
    """One part whose tensors are 8 floats equal to the part's index."""
    data = np.full(8 * len(names), index, dtype=np.float32).tobytes()
    keys = [
        entry("split.no", 2, u16(index)),
        entry("split.count", 2, u16(count)),
        entry("split.tensors.count", 5, num_tensors.to_bytes(4, "little")),
        *more,
    ]
    return gguf_bytes(keys, [tensor(n, [8], offset=32 * i) for i, n in enumerate(names)], data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three parts holding a, b and c, d."""
    name = entry("general.name", 8, text("first"))
    (tmp_path / NAMES[0]).write_bytes(part(0, 3, 4, ["a"], name))
    (tmp_path / NAMES[1]).write_bytes(part(1, 3, 4, ["b", "c"]))
    (tmp_path / NAMES[2]).write_bytes(part(2, 3, 4, ["d"], name))
    return tmp_path


@pytest.mark.parametrize("given", NAMES)
def test_any_part_opens_the_whole_model(folder: Path, given: str) -> None:
    with read_gguf(folder / given) as model:
        assert [path.name for path in model.paths] == NAMES
        assert model.path == folder / NAMES[0]
        assert model.metadata["general.name"] == "first"
        assert list(model.tensors) == ["a", "b", "c", "d"]
        parts = {name: model.tensor_bytes(name).view(np.float32)[7] for name in "abcd"}
        assert parts == {"a": 0, "b": 1, "c": 1, "d": 2}


def test_parts_written_by_the_gguf_package_open(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    values = {f"t{i}": np.full((3, 32), i, dtype=np.float32) for i in range(5)}
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with read_gguf(tmp_path / "m-00002-of-00003.gguf") as model:
        assert model.metadata["general.architecture"] == "llama"
        for name, value in values.items():
            assert model.tensor_bytes(name).tobytes() == value.tobytes()


def test_missing_part_is_named(folder: Path) -> None:
    (folder / NAMES[1]).unlink()
    with pytest.raises(ModelFileError, match=f"{NAMES[0]} is one of 3 parts, but {NAMES[1]}"):
        read_gguf(folder / NAMES[0])


def test_repeated_part_is_named(folder: Path) -> None:
    shutil.copy(folder / NAMES[1], folder / NAMES[2])
    with pytest.raises(CorruptFileError, match=f"{NAMES[2]} holds part 2 of 3; wanted part 3"):
        read_gguf(folder / NAMES[0])


def test_part_of_another_model_is_named_by_a_key_that_differs(folder: Path) -> None:
    other = entry("general.name", 8, text("second"))
    (folder / NAMES[2]).write_bytes(part(2, 3, 4, ["d"], other))
    with pytest.raises(CorruptFileError, match=f"{NAMES[2]} .*{NAMES[0]}.*'general.name'"):
        read_gguf(folder / NAMES[1])


def test_part_of_another_model_is_named_by_a_tensor_that_repeats(folder: Path) -> None:
    (folder / NAMES[2]).write_bytes(part(2, 3, 4, ["b"]))
    with pytest.raises(CorruptFileError, match=f"{NAMES[2]} and {NAMES[1]} both hold tensor 'b'"):
        read_gguf(folder / NAMES[0])


def test_wrong_total_of_tensors_is_refused(folder: Path) -> None:
    (folder / NAMES[2]).write_bytes(part(2, 3, 4, ["d", "e"]))
    with pytest.raises(CorruptFileError, match="hold 5 tensors; wanted 4"):
        read_gguf(folder / NAMES[0])


def test_part_of_a_longer_model_is_refused(folder: Path) -> None:
    (folder / NAMES[1]).write_bytes(part(1, 4, 4, ["b", "c"]))
    with pytest.raises(CorruptFileError, match=f"{NAMES[1]} holds part 2 of 4; wanted part 2 of 3"):
        read_gguf(folder / NAMES[0])


@pytest.mark.parametrize("name", ["model.gguf", "m-00002-of-00003.gguf", "m-00001-of-00004.gguf"])
def test_renamed_part_is_told_its_name(folder: Path, name: str) -> None:
    shutil.copy(folder / NAMES[0], folder / name)
    with pytest.raises(CorruptFileError, match="wanted it to be named NAME-00001-of-00003.gguf"):
        read_gguf(folder / name)


def test_damaged_part_is_named(folder: Path) -> None:
    (folder / NAMES[1]).write_bytes((folder / NAMES[1]).read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match=f"{NAMES[1]}: tensor 'c'"):
        read_gguf(folder / NAMES[0])


def test_single_part_needs_no_part_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(part(0, 1, 1, ["a"]))
    with read_gguf(tmp_path / "model.gguf") as model:
        assert list(model.tensors) == ["a"]

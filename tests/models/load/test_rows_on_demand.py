"""Rows of a table come from the file when they are needed, and are this process's own from then on."""

import os
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import ClosedError, CorruptFileError
from localinfer.models.load.weights import RowsOnDemand
from localinfer.quant.gguf.mapped_file import FileStretch, MappedFile

NUM_ROWS, ROW_BYTES, START = 300, 100, 64


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(1).bytes(START + NUM_ROWS * ROW_BYTES + 40)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "table"
    path.write_bytes(content)
    os.utime(path, ns=(10**18, 10**18))
    return path


def rows_of(file: MappedFile, **options: int) -> RowsOnDemand:
    return RowsOnDemand(FileStretch(file, START, START + NUM_ROWS * ROW_BYTES), NUM_ROWS, **options)


def wanted(content: bytes, row: int) -> bytes:
    return content[START + row * ROW_BYTES : START + (row + 1) * ROW_BYTES]


def found(rows: RowsOnDemand, row: int) -> bytes:
    return rows.data[row * ROW_BYTES : (row + 1) * ROW_BYTES].tobytes()


def fill(rows: RowsOnDemand, *row_ids: int) -> None:
    assert rows.fill is not None
    rows.fill(np.array(row_ids, np.int32))


@pytest.mark.parametrize("block_bytes", [1, 100, 250, 700, 1 << 20])
@pytest.mark.parametrize("row_ids", [[0], [NUM_ROWS - 1], [5, 5, 299, 0, 17], list(range(NUM_ROWS)), []])
def test_rows_asked_for_are_those_of_the_file(path: Path, content: bytes, block_bytes: int, row_ids: list[int]) -> None:
    file = MappedFile(path)
    rows = rows_of(file, whole_bytes=0, block_bytes=block_bytes)
    fill(rows, *row_ids)
    fill(rows, *row_ids)
    assert all(found(rows, row) == wanted(content, row) for row in row_ids)
    file.close()


def test_small_table_is_read_whole_and_never_again(path: Path, content: bytes) -> None:
    file = MappedFile(path)
    rows = rows_of(file)
    file.close()
    os.truncate(path, 1)
    assert rows.fill is None and rows.data.tobytes() == content[START : START + NUM_ROWS * ROW_BYTES]


def test_rows_that_were_read_are_not_read_again(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MappedFile(path)
    rows = rows_of(file, whole_bytes=0, block_bytes=ROW_BYTES)
    fill(rows, 3, 4)
    monkeypatch.setattr(MappedFile, "read_into", None)
    fill(rows, 4)
    fill(rows, 4, 3, 3)
    assert found(rows, 3) == wanted(content, 3) and found(rows, 4) == wanted(content, 4)
    file.close()


def cut(path: Path) -> None:
    os.truncate(path, 10)


def cut_behind(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def rewrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"another model")


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


CHANGES = [cut, cut_behind, rewrite, grow]


@pytest.mark.skipif(os.name == "nt", reason="Windows does not let a mapped file change its size")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("row_ids", [[200], [3, 200]])
def test_rows_of_a_file_that_was_changed_are_refused_and_the_others_stay(
    path: Path, content: bytes, change, row_ids: list[int]
) -> None:
    file = MappedFile(path)
    rows = rows_of(file, whole_bytes=0, block_bytes=ROW_BYTES)
    fill(rows, 3)
    change(path)
    assert file.has_changed
    for _ in range(2):
        with pytest.raises(CorruptFileError, match="load the model again"):
            fill(rows, *row_ids)
    fill(rows, 3)
    assert found(rows, 3) == wanted(content, 3)
    file.close()


@pytest.mark.skipif(os.name == "nt", reason="Windows does not let an open file go")
def test_file_that_was_moved_is_read_on_and_one_that_took_its_name_is_noticed(path: Path, content: bytes) -> None:
    file = MappedFile(path)
    rows = rows_of(file, whole_bytes=0, block_bytes=ROW_BYTES)
    path.rename(path.with_name("moved"))
    assert not file.has_changed
    fill(rows, 7)
    path.write_bytes(content)
    assert file.has_changed
    fill(rows, 8)
    assert found(rows, 7) == wanted(content, 7) and found(rows, 8) == wanted(content, 8)
    file.close()


def test_closed_file_gives_no_rows(path: Path) -> None:
    file = MappedFile(path)
    rows = rows_of(file, whole_bytes=0)
    file.close()
    with pytest.raises(ClosedError):
        fill(rows, 0)
    assert not file.has_changed

"""Importance from both formats of llama.cpp's imatrix files, and from damaged ones."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from localinfer.errors import CorruptFileError, ModelFileError
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.writer import GGUFWriter, encode_value
from localinfer.quant.methods.imatrix import Importance, read_imatrix, write_imatrix

SUMS = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


def write_gguf(path: Path, sums: np.ndarray, counts: np.ndarray, type: str = "imatrix") -> None:
    tensors = [
        TensorRecord("blk.0.ffn_up_exps.weight.in_sum2", TensorType.F32, sums.shape),
        TensorRecord("blk.0.ffn_up_exps.weight.counts", TensorType.F32, counts.shape),
    ]
    values: dict[str, object] = {
        "general.type": type,
        "imatrix.datasets": ["a.txt", "b.txt"],
        "imatrix.chunk_count": 9,
        "imatrix.chunk_size": 512,
    }
    with GGUFWriter(path, {key: encode_value(value) for key, value in values.items()}, tensors) as writer:
        writer.write(sums)
        writer.write(counts)


def legacy(name: bytes, calls: int, sums: np.ndarray) -> bytes:
    return struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, sums.size) + sums.tobytes()


def test_gguf_divides_sums_by_counts_and_gives_one_where_nothing_was_counted(tmp_path: Path) -> None:
    write_gguf(tmp_path / "i.gguf", SUMS, np.array([[2], [0], [4]], np.float32))
    found = read_imatrix(tmp_path / "i.gguf")
    assert (found.dataset, found.num_chunks) == ("a.txt, b.txt", 9)
    mean = found.of("blk.0.ffn_up_exps.weight", 3, 4)
    assert mean is not None
    np.testing.assert_array_equal(mean, np.stack([SUMS[0] / 2, np.ones(4), SUMS[2] / 4]))
    assert found.of("output.weight", 1, 4) is None


def test_legacy_divides_sums_by_calls(tmp_path: Path) -> None:
    entries = legacy(b"a.weight", 2, SUMS[0]) + legacy(b"b.weight", 0, SUMS[1])
    tail = struct.pack("<ii", 21, 5) + b"x.txt"
    (tmp_path / "i.dat").write_bytes(struct.pack("<i", 2) + entries + tail)
    found = read_imatrix(tmp_path / "i.dat")
    assert (found.dataset, found.num_chunks) == ("x.txt", 21)
    np.testing.assert_array_equal(found.mean_squares["a.weight"], [SUMS[0] / 2])
    np.testing.assert_array_equal(found.mean_squares["b.weight"], [SUMS[1]])
    (tmp_path / "i.dat").write_bytes(struct.pack("<i", 1) + legacy(b"a.weight", 2, SUMS[0]))
    assert read_imatrix(tmp_path / "i.dat").num_chunks == 0


def test_both_formats_of_the_same_sums_say_the_same(tmp_path: Path) -> None:
    # The newer format, with the keys and shapes of llama-imatrix, by the format's own package.
    writer = gguf.GGUFWriter(tmp_path / "new.gguf", "unused")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["a.txt"])
    writer.add_uint32("imatrix.chunk_count", 4)
    writer.add_uint32("imatrix.chunk_size", 512)
    dense, experts = SUMS[:1], SUMS[1:]
    for name, sums, counts in (("blk.0.attn_q", dense, [2048]), ("blk.0.ffn_up_exps", experts, [1024, 512])):
        writer.add_tensor(f"{name}.weight.in_sum2", sums)
        writer.add_tensor(f"{name}.weight.counts", np.array(counts, np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # The older one keeps means times calls, those of a stack in one run.
    means = (experts / np.array([[1024], [512]], np.float32)).reshape(-1)
    entries = legacy(b"blk.0.attn_q.weight", 4, dense[0] / 512) + legacy(b"blk.0.ffn_up_exps.weight", 4, 4 * means)
    tail = struct.pack("<ii", 4, 5) + b"a.txt"
    (tmp_path / "old.dat").write_bytes(struct.pack("<i", 2) + entries + tail)
    new, old = read_imatrix(tmp_path / "new.gguf"), read_imatrix(tmp_path / "old.dat")
    assert (new.dataset, new.num_chunks) == (old.dataset, old.num_chunks) == ("a.txt", 4)
    assert new.mean_squares.keys() == old.mean_squares.keys()
    for name, num_experts in (("blk.0.attn_q.weight", 1), ("blk.0.ffn_up_exps.weight", 2)):
        first, second = new.of(name, num_experts, 4), old.of(name, num_experts, 4)
        assert first is not None and second is not None
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(new.mean_squares["blk.0.ffn_up_exps.weight"][1], SUMS[2] / 512)


def test_importance_of_another_model_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "i.gguf", SUMS, np.ones((3, 1), np.float32))
    with pytest.raises(CorruptFileError, match="12 numbers for blk.0.ffn_up_exps.weight, which needs 3 x 8"):
        read_imatrix(tmp_path / "i.gguf").of("blk.0.ffn_up_exps.weight", 3, 8)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    whole = struct.pack("<i", 1) + legacy(b"a.weight", 2, SUMS[0])
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptFileError, match="damaged"):
            read_imatrix(path)
    for sums in (-SUMS[0], SUMS[0] * np.float32(np.nan)):
        path.write_bytes(struct.pack("<i", 1) + legacy(b"a.weight", 2, sums))
        with pytest.raises(CorruptFileError, match="negative"):
            read_imatrix(path)
    path.write_bytes(struct.pack("<i", 1) + legacy(b"\xff", 2, SUMS[0]))
    with pytest.raises(CorruptFileError, match="damaged"):
        read_imatrix(path)
    with pytest.raises(ModelFileError, match="check the path"):
        read_imatrix(tmp_path / "missing")
    write_gguf(path, SUMS, np.ones((3, 1), np.float32), type="model")
    with pytest.raises(CorruptFileError, match="no imatrix"):
        read_imatrix(path)
    write_gguf(path, SUMS[:1], np.ones((3, 1), np.float32))
    with pytest.raises(CorruptFileError, match="4 sums of blk.0.ffn_up_exps.weight for 3 experts"):
        read_imatrix(path)


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    squares = {
        "blk.0.attn_q.weight": np.random.default_rng(5).random((1, 64), np.float32),
        "blk.0.ffn_up_exps.weight": np.random.default_rng(6).random((3, 32), np.float32),
    }
    path = tmp_path / "new.gguf"
    write_imatrix(path, Importance("given", squares, "a text", 7), 512)
    found = read_imatrix(path)
    assert (found.dataset, found.num_chunks, list(found.mean_squares)) == ("a text", 7, list(squares))
    for name, wanted in squares.items():
        np.testing.assert_allclose(found.mean_squares[name], wanted, rtol=1e-6)

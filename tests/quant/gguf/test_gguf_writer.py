"""Files written piece by piece, read back by our reader and by the gguf package."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from localinfer.errors import RequestError, ShapeError
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.header import ValueType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import EncodedValue, GGUFWriter, copy_values, encode_value

VALUES: dict[str, object] = {
    "general.architecture": "llama",
    "general.name": "Größe",
    "a.count": 7,
    "a.negative": -7,
    "a.large": 1 << 40,
    "a.number": 0.1,
    "a.flag": True,
    "a.words": ["one", "", "three"],
    "a.scores": np.array([0.5, -1], np.float32),
    "a.types": np.array([1, -2, 3], np.int32),
    "a.flags": np.array([True, False]),
    "a.list": [1, 2, 3],
}
SPECS = [
    TensorRecord("first.weight", TensorType.Q4_0, (3, 64)),
    TensorRecord("second.weight", TensorType.F32, (5,)),
    TensorRecord("third.weight", TensorType.F16, (2, 3, 4)),
]


def contents(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 60, spec.num_bytes).astype(np.uint8) for spec in SPECS]


def write(path: Path, pieces: int = 1, **options: int) -> list[np.ndarray]:
    metadata = {key: encode_value(value) for key, value in VALUES.items()}
    data = contents(1)
    with GGUFWriter(path, metadata, SPECS, **options) as writer:
        for one in data:
            for piece in np.array_split(one, pieces):
                writer.write(piece)
        assert not path.exists()
    assert path.stat().st_size == writer.num_bytes
    return data


@pytest.mark.parametrize("alignment", [8, 32, 256])
@pytest.mark.parametrize("pieces", [1, 7])
def test_what_is_written_is_read_back(pieces: int, alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = write(path, pieces, alignment=alignment)
    with read_gguf(path) as model:
        assert list(model.tensors) == [spec.name for spec in SPECS]
        for spec, wanted in zip(SPECS, data, strict=True):
            info = model.tensor(spec.name)
            assert (info.type, info.shape) == (spec.type, spec.shape)
            np.testing.assert_array_equal(model.tensor_bytes(spec.name), wanted)
        for key, value in VALUES.items():
            np.testing.assert_array_equal(model.metadata[key], np.float32(0.1) if key == "a.number" else value)
    assert list(tmp_path.iterdir()) == [path]


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = write(path)
    reader = gguf.GGUFReader(path)
    for tensor, spec, wanted in zip(reader.tensors, SPECS, data, strict=True):
        assert (tensor.name, tuple(reversed(tensor.shape.tolist()))) == (spec.name, spec.shape)
        assert tensor.data.tobytes() == wanted.tobytes()
    found = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert found.keys() == VALUES.keys()
    assert (found["a.words"], found["a.types"], found["a.flag"]) == (["one", "", "three"], [1, -2, 3], True)
    assert reader.fields["a.count"].types[0].name == "UINT32"
    del reader, tensor


def test_copied_metadata_keeps_its_bytes(tmp_path: Path) -> None:
    path, copy = tmp_path / "model.gguf", tmp_path / "copy.gguf"
    odd = {"a.short": encode_value(3, ValueType.UINT16), "a.raw": encode_value([b"\xff\xfe", "x"])}
    with GGUFWriter(path, odd | {key: encode_value(value) for key, value in VALUES.items()}, []):
        pass
    with read_gguf(path) as model, GGUFWriter(copy, copy_values(model.metadata), []):
        pass
    assert copy.read_bytes() == path.read_bytes()
    assert copy_values({"a.count": 7}) == {"a.count": encode_value(7)}


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), GGUFWriter(path, {}, SPECS) as writer:
        writer.write(contents(1)[0])
        raise KeyboardInterrupt
    with pytest.raises(RequestError, match=r"second\.weight got 3 bytes"), GGUFWriter(path, {}, SPECS) as writer:
        writer.write(contents(1)[0])
        writer.write(b"abc")
    with pytest.raises(RequestError, match=r"more than tensor first\.weight"), GGUFWriter(path, {}, SPECS) as writer:
        writer.write(bytes(SPECS[0].num_bytes + 1))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([TensorRecord("x" * 64, TensorType.F32, (1,))], "64 bytes"),
        ([TensorRecord("x", TensorType.F32, (1,) * 5)], "1 to 4 sizes"),
        ([TensorRecord("x", TensorType.F32, (0, 4))], "1 to 4 sizes"),
        ([TensorRecord("x", TensorType.F32, (1,))] * 2, "given twice"),
    ],
)
def test_tensors_that_make_no_file_are_refused(specs: list[TensorRecord], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        GGUFWriter(tmp_path / "model.gguf", {}, specs)


def test_rows_that_fill_no_block_and_odd_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="blocks of 256"):
        GGUFWriter(tmp_path / "model.gguf", {}, [TensorRecord("x", TensorType.Q4_K, (1, 255))])
    with pytest.raises(RequestError, match="alignment is 33"):
        GGUFWriter(tmp_path / "model.gguf", {}, [], alignment=33)
    for wrong in ({"a": 1}, None, np.zeros((2, 2)), np.array(["a"])):
        with pytest.raises(RequestError, match="cannot be metadata"):
            encode_value(wrong)
    assert isinstance(encode_value(1), EncodedValue)

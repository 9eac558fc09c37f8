"""What the reader gives back for sound files, most of them written by the gguf package."""

import os
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_bytes import array, entry, gguf as gguf_bytes, tensor, text, u32, u64
from hypothesis import given, settings, strategies as st

from localinfer.errors import ClosedError, CorruptFileError, ModelFileError
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.header import ValueType
from localinfer.quant.gguf.reader import GGUFFile, read_gguf

WriteBytes = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteBytes:
    def write_bytes(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write_bytes


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def small_model(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Write a model with two plain tensors and a quantized one; return what their bytes must be."""
    generator = np.random.default_rng(3)
    tensors = {
        "token_embd.weight": generator.normal(size=(5, 96)).astype(np.float32),
        "output_norm.weight": generator.normal(size=96).astype(np.float32),
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_token_list(["<s>", "a", "é", "日本"])
    writer.add_token_scores([0.0, -1.0, -2.5, -3.0])
    writer.add_token_types([3, 1, 1, 1])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    packed = generator.integers(0, 256, (7, 3 * 18), dtype=np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    finish(writer)
    return {**tensors, "blk.0.ffn_up.weight": packed}


@pytest.mark.parametrize("version", [2, 3])
def test_every_scalar_type_is_decoded(write: WriteBytes, version: int) -> None:
    values: list[tuple[int, bytes, Any]] = [
        (0, b"\xfe", 254),
        (1, b"\xfe", -2),
        (2, struct.pack("<H", 65535), 65535),
        (3, struct.pack("<h", -3), -3),
        (4, u32(2**32 - 1), 2**32 - 1),
        (5, struct.pack("<i", -(2**31)), -(2**31)),
        (6, struct.pack("<f", 0.5), 0.5),
        (7, b"\1", True),
        (7, b"\0", False),
        (8, text("naïve\0"), "naïve\0"),
        (10, u64(2**64 - 1), 2**64 - 1),
        (11, struct.pack("<q", -(2**63)), -(2**63)),
        (12, struct.pack("<d", 1e-300), 1e-300),
    ]
    keys = [entry(f"key.{i}", kind, payload) for i, (kind, payload, _) in enumerate(values)]
    with read_gguf(write(gguf_bytes(keys, version=version))) as model:
        assert model.version == version
        assert list(model.metadata) == [f"key.{i}" for i in range(len(values))]
        for found, (_, _, wanted) in zip(model.metadata.values(), values, strict=True):
            assert found == wanted
            assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("type_id", "dtype"),
    [
        (0, "u1"),
        (1, "i1"),
        (2, "u2"),
        (3, "i2"),
        (4, "u4"),
        (5, "i4"),
        (6, "f4"),
        (7, "?"),
        (10, "u8"),
        (11, "i8"),
        (12, "f8"),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 37])
def test_arrays_of_numbers_become_numpy_arrays(write: WriteBytes, type_id: int, dtype: str, count: int) -> None:
    generator = np.random.default_rng(type_id)
    wanted = generator.integers(0, 2 if dtype == "?" else 100, count).astype(dtype)
    keys = [entry("pad", 8, text("odd")), entry("a", 9, array(type_id, wanted.tobytes(), count))]
    with read_gguf(write(gguf_bytes(keys))) as model:
        found = model.metadata["a"]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, wanted)


def test_arrays_of_strings_give_text_or_raw_bytes(write: WriteBytes) -> None:
    tokens = [b"", "é".encode(), b"\xff\x00", b"x" * 300]
    payload = b"".join(text(token) for token in tokens)
    keys = [
        entry("raw", 9, array(8, payload, 4)),
        entry("good", 9, array(8, text("a") + text("b"), 2)),
    ]
    with read_gguf(write(gguf_bytes(keys))) as model:
        assert model.metadata.raw_strings("raw") == tokens
        assert model.metadata["good"] == ["a", "b"]
        with pytest.raises(CorruptFileError, match="entry 2 of key 'raw'"):
            model.metadata["raw"]


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_strings_decoded_together_are_those_decoded_one_by_one(write: WriteBytes, count: int, has_zeros: bool) -> None:
    """Bytes that are no UTF-8, characters cut short, entries that are empty or longer than a byte can say."""
    generator = np.random.default_rng(count)
    pieces = [b"a", "é".encode(), b"\xe2\x96", b"\xff", b"\x81", "日本".encode(), b" " * 400, b"\x01", b"\x80"]
    pieces += [b"\0", bytes(9)] if has_zeros else []
    tokens = [
        b"".join(pieces[index] for index in generator.integers(0, len(pieces), int(generator.integers(0, 4))))
        for _ in range(count)
    ]
    keys = [entry("pad", 8, text("odd")), entry("a", 9, array(8, b"".join(map(text, tokens)), count))]
    with read_gguf(write(gguf_bytes(keys))) as model:
        assert model.metadata.raw_strings("a") == tokens
        assert model.metadata.texts("a") == [token.decode("utf-8", "surrogateescape") for token in tokens]
        for other in ("pad", "absent"):
            with pytest.raises(CorruptFileError, match="wanted an array of strings"):
                model.metadata.texts(other)


@pytest.mark.parametrize("lengths", [(0, 20), (0, 0), (0, 400), (250, 260), (70_000, 70_300)])
@pytest.mark.parametrize("alphabet", [b"abc\xc3\xa9", b"\0\1\5"])
def test_strings_are_found_where_each_begins(write: WriteBytes, lengths: tuple[int, int], alphabet: bytes) -> None:
    generator = np.random.default_rng()
    count = 20_000 if lengths[1] < 1000 else 40
    odd = generator.random(count) < 0.001
    drawn = np.where(odd, generator.integers(0, 300, count), generator.integers(lengths[0], lengths[1] + 1, count))
    letters = np.frombuffer(alphabet, np.uint8)
    flat, ends = letters[generator.integers(0, len(letters), drawn.sum())].tobytes(), np.cumsum(drawn).tolist()
    tokens = [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    payload = b"".join(map(text, tokens))
    content = gguf_bytes([entry("a", 9, array(8, payload, count)), entry("b", 4, u32(7))])
    with read_gguf(write(content)) as model:
        assert model.metadata.raw_strings("a") == tokens
        assert model.metadata["b"] == 7
    for cut in (1, 4, 8, int(drawn[-1]) + 7, int(drawn[-1]) + 8):
        short = content[: content.index(text("b"), content.index(payload) + len(payload)) - cut]
        with pytest.raises(CorruptFileError, match="key 'a'"):
            read_gguf(write(short))


def test_tensors_keep_name_type_shape_and_bytes(tmp_path: Path) -> None:
    wanted = small_model(tmp_path / "model.gguf")
    with read_gguf(tmp_path / "model.gguf") as model:
        assert model.tensors.keys() == wanted.keys()
        assert model.tensors["token_embd.weight"].shape == (5, 96)
        info = model.tensor("blk.0.ffn_up.weight")
        assert (info.type, info.shape, info.num_bytes) == (TensorType.Q4_0, (7, 96), 7 * 54)
        for name, values in wanted.items():
            found = model.tensor_bytes(name)
            assert found.dtype == np.uint8
            assert not found.flags.writeable
            assert found.tobytes() == values.tobytes()


def test_file_without_tensors_opens(write: WriteBytes) -> None:
    with read_gguf(write(gguf_bytes([entry("general.architecture", 8, text("llama"))]))) as model:
        assert model.tensors == {}


@pytest.mark.parametrize("alignment", [8, 64, 65536])
def test_stated_alignment_places_the_tensors(write: WriteBytes, alignment: int) -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    content = gguf_bytes(
        [entry("general.alignment", 4, u32(alignment))],
        [tensor("a", [2, 3])],
        data,
        alignment=alignment,
    )
    with read_gguf(write(content)) as model:
        assert model.alignment == alignment
        assert model.tensors["a"].shape == (3, 2)
        assert model.tensor_bytes("a").tobytes() == data


def test_view_outlives_the_file_object(tmp_path: Path) -> None:
    wanted = small_model(tmp_path / "model.gguf")
    with read_gguf(tmp_path / "model.gguf") as model:
        view = model.tensor_bytes("token_embd.weight")
    assert view.tobytes() == wanted["token_embd.weight"].tobytes()


def test_closed_file_refuses_access(tmp_path: Path) -> None:
    small_model(tmp_path / "model.gguf")
    model = read_gguf(tmp_path / "model.gguf")
    model.close()
    model.close()
    with pytest.raises(ClosedError, match="closed"):
        model.tensor_bytes("token_embd.weight")
    with pytest.raises(ClosedError, match="closed"):
        model.metadata["general.architecture"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not let a mapped file shrink")
def test_file_truncated_while_open_is_refused(tmp_path: Path) -> None:
    small_model(tmp_path / "model.gguf")
    with read_gguf(tmp_path / "model.gguf") as model:
        os.truncate(tmp_path / "model.gguf", 64)
        with pytest.raises(CorruptFileError, match="shrank"):
            model.tensor_bytes("token_embd.weight")
        with pytest.raises(CorruptFileError, match="shrank"):
            model.metadata["tokenizer.ggml.tokens"]


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    small_model(tmp_path / "model.gguf")
    with (
        read_gguf(tmp_path / "model.gguf") as model,
        pytest.raises(CorruptFileError, match="no tensor 'output.weight'"),
    ):
        model.tensor_bytes("output.weight")


def test_stored_bytes_can_be_copied_into_another_file(tmp_path: Path, write: WriteBytes) -> None:
    small_model(tmp_path / "source.gguf")
    with read_gguf(tmp_path / "source.gguf") as model:
        metadata = model.metadata
        keys = []
        for key in metadata:
            stored, raw = metadata.stored(key), metadata.value_bytes(key)
            is_array = stored.count is not None
            payload = array(stored.type, raw, stored.count) if stored.count is not None else raw
            keys.append(entry(key, ValueType.ARRAY if is_array else stored.type, payload))
        with read_gguf(write(gguf_bytes(keys))) as copy:
            assert list(copy.metadata) == list(metadata)
            for key in metadata:
                np.testing.assert_array_equal(copy.metadata[key], metadata[key])


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS: dict[gguf.GGUFValueType, st.SearchStrategy[Any]] = {
    gguf.GGUFValueType.UINT8: st.integers(0, 2**8 - 1),
    gguf.GGUFValueType.INT8: st.integers(-(2**7), 2**7 - 1),
    gguf.GGUFValueType.UINT16: st.integers(0, 2**16 - 1),
    gguf.GGUFValueType.INT16: st.integers(-(2**15), 2**15 - 1),
    gguf.GGUFValueType.UINT32: st.integers(0, 2**32 - 1),
    gguf.GGUFValueType.INT32: st.integers(-(2**31), 2**31 - 1),
    gguf.GGUFValueType.FLOAT32: st.floats(width=32),
    gguf.GGUFValueType.BOOL: st.booleans(),
    gguf.GGUFValueType.STRING: TEXT,
    gguf.GGUFValueType.UINT64: st.integers(0, 2**64 - 1),
    gguf.GGUFValueType.INT64: st.integers(-(2**63), 2**63 - 1),
    gguf.GGUFValueType.FLOAT64: st.floats(),
}
TYPED_VALUES = st.sampled_from(list(SCALARS)).flatmap(
    lambda kind: st.one_of(
        st.tuples(st.just(kind), st.none(), SCALARS[kind]),
        st.tuples(
            st.just(gguf.GGUFValueType.ARRAY),
            st.just(kind),
            st.lists(SCALARS[kind], min_size=1, max_size=9),
        ),
    )
)
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(KEYS.filter(lambda key: key != "general.alignment" and not key.startswith("split.")), TYPED_VALUES)
)
def test_metadata_written_by_the_gguf_package_reads_back(
    values: dict[str, tuple[gguf.GGUFValueType, gguf.GGUFValueType | None, Any]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, (kind, element, value) in values.items():
            writer.add_key_value(key, value, kind, element)
        finish(writer)
        with read_gguf(path) as model:
            found = dict(model.metadata)
    found.pop("general.architecture")
    values.pop("general.architecture", None)
    assert found.keys() == values.keys()
    for key, (kind, element, value) in values.items():
        if kind is not gguf.GGUFValueType.ARRAY or element is gguf.GGUFValueType.STRING:
            assert type(found[key]) is type(value)
        np.testing.assert_array_equal(found[key], value)


class TestTypedGetters:
    """Getters give the value asked for, or an error that names key, finding and wish."""

    @pytest.fixture
    def model(self, write: WriteBytes) -> GGUFFile:
        layers = np.array([4, 8, 12], dtype="<i4")
        signed = np.array([-1, 5], dtype="<i4")
        floats = np.array([1.5, np.nan], dtype="<f4")
        keys = [
            entry("count", 4, u32(32)),
            entry("zero", 4, u32(0)),
            entry("negative", 5, struct.pack("<i", -5)),
            entry("huge", 10, u64(2**64 - 1)),
            entry("eps", 6, struct.pack("<f", 1e-5)),
            entry("nan", 6, struct.pack("<f", float("nan"))),
            entry("flag", 7, b"\1"),
            entry("name", 8, text("llama")),
            entry("layers", 9, array(5, layers.tobytes(), 3)),
            entry("signed", 9, array(5, signed.tobytes(), 2)),
            entry("floats", 9, array(6, floats.tobytes(), 2)),
            entry("bools", 9, array(7, b"\0\2", 2)),
            entry("words", 9, array(8, text("a"), 1)),
        ]
        return read_gguf(write(gguf_bytes(keys)))

    def test_values_inside_the_range_are_returned(self, model: GGUFFile) -> None:
        metadata = model.metadata
        assert metadata.integer("count", minimum=1) == 32
        assert metadata.number("eps", minimum=0) == pytest.approx(1e-5)
        assert metadata.number("count") == 32.0
        assert metadata.boolean("flag") is True
        assert metadata.string("name") == "llama"
        assert metadata.strings("words") == ["a"]
        assert metadata.integers("layers", 3).tolist() == [4, 8, 12]
        assert metadata.integers("count", 2).tolist() == [32, 32]
        assert metadata.numbers("layers").dtype == np.float32

    def test_defaults_stand_in_for_missing_keys_only(self, model: GGUFFile) -> None:
        metadata = model.metadata
        assert metadata.integer("absent", 7) == 7
        assert metadata.number("absent", 0.5) == 0.5
        assert metadata.boolean("absent", False) is False
        assert metadata.string("absent", "") == ""
        with pytest.raises(CorruptFileError, match="'name' is 'llama'"):
            metadata.integer("name", 7)

    @pytest.mark.parametrize(
        ("ask", "message"),
        [
            (lambda m: m.integer("absent"), "no key 'absent'; wanted an integer"),
            (lambda m: m.integer("zero", minimum=1), r"'zero' is 0 \(uint32\).*from 1"),
            (lambda m: m.integer("count", maximum=31), "'count' is 32"),
            (lambda m: m.integer("negative"), "'negative' is -5"),
            (lambda m: m.integer("huge"), f"'huge' is {2**64 - 1}"),
            (lambda m: m.integer("flag"), "'flag' is True"),
            (lambda m: m.integer("eps"), "'eps' is "),
            (lambda m: m.number("nan"), "'nan' is nan"),
            (lambda m: m.number("flag"), "'flag' is True"),
            (lambda m: m.number("eps", minimum=0.1), "'eps' is "),
            (lambda m: m.boolean("zero"), "'zero' is 0"),
            (lambda m: m.string("count"), "'count' is 32"),
            (lambda m: m.strings("name"), "'name' is 'llama'"),
            (lambda m: m.strings("absent"), "no key 'absent'"),
            (lambda m: m.raw_strings("layers"), "'layers' is array of 3 int32"),
            (lambda m: m.integers("layers", 4), "wanted 4 integers"),
            (lambda m: m.integers("signed"), "'signed' is array of 2 int32"),
            (lambda m: m.integers("negative", 3), "'negative' is -5"),
            (lambda m: m.integers("count"), "'count' is 32"),
            (lambda m: m.integers("floats"), "'floats' is array of 2 float32"),
            (lambda m: m.numbers("floats"), "wanted finite numbers"),
            (lambda m: m.numbers("words"), "'words' is array of 1 string"),
            (lambda m: m["bools"], "'bools' is array of 2 bool"),
        ],
    )
    def test_wrong_values_are_refused_by_key(self, model: GGUFFile, ask: Callable[[Any], object], message: str) -> None:
        with pytest.raises(CorruptFileError, match=message):
            ask(model.metadata)


def test_missing_path_folder_and_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="does not exist"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_gguf(tmp_path)
    with pytest.raises(ModelFileError, match="cannot be opened"):
        read_gguf("a\0b")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(ModelFileError, match="not a regular file"):
            read_gguf(tmp_path / "pipe.gguf")


def test_real_model_agrees_with_the_gguf_package(shared: Path) -> None:
    path = shared / "models" / "stories260K.gguf"
    oracle = gguf.GGUFReader(path)
    with read_gguf(path) as model:
        for key, field in oracle.fields.items():
            if not key.startswith("GGUF."):
                np.testing.assert_array_equal(model.metadata[key], field.contents())
        assert list(model.tensors) == [info.name for info in oracle.tensors]
        for info in oracle.tensors:
            assert model.tensors[info.name].shape == tuple(info.shape.tolist()[::-1])
            assert model.tensor_bytes(info.name).tobytes() == info.data.tobytes()


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [("llama-spm", 32000), ("llama-bpe", 128256), ("gpt-2", 50257), ("qwen2", 151936)],
)
def test_real_vocabulary_opens(shared: Path, name: str, num_tokens: int) -> None:
    with read_gguf(shared / "vocab" / f"ggml-vocab-{name}.gguf") as model:
        assert len(model.metadata.raw_strings("tokenizer.ggml.tokens")) == num_tokens
        assert len(model.metadata.integers("tokenizer.ggml.token_type")) == num_tokens

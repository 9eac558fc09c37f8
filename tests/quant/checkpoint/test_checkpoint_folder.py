"""Opening a Hugging Face folder: which files are read, and that nothing outside it, and no pickle, ever is."""

import json
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import CorruptFileError, ModelFileError, UnsupportedFormatError
from localinfer.quant.checkpoint.folder import MAX_TOKENIZER_BYTES, MAX_TOKENIZER_VALUES, MAX_VALUES, open_folder
from tests.support.checkpoint_files import bfloat16, safetensors_bytes

PARTS = {
    "model-00001-of-00002.safetensors": {"a": np.arange(3, dtype=np.float32)},
    "model-00002-of-00002.safetensors": {"b": np.ones((2, 2), np.float16), "c": bfloat16(np.array([1.5]))},
}


def write_parts(folder: Path, weight_map: dict[str, object] | None = None) -> Path:
    for name, tensors in PARTS.items():
        (folder / name).write_bytes(safetensors_bytes(tensors))
    names = {tensor: name for name, tensors in PARTS.items() for tensor in tensors}
    index = {"metadata": {}, "weight_map": names if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_index_decides_which_file_holds_which_tensor(tmp_path: Path) -> None:
    with open_folder(write_parts(tmp_path)) as folder:
        assert set(folder.tensors) == {"a", "b", "c"}
        assert folder.config == {"model_type": "llama"}
        np.testing.assert_array_equal(folder.array("a"), [0, 1, 2])
        assert folder.array("b").dtype == np.float16
        assert folder.array("c").tolist() == [0x3FC0]
        assert folder.num_bytes == sum((tmp_path / name).stat().st_size for name in PARTS)
        with pytest.raises(CorruptFileError, match="no tensor 'd'"):
            folder.array("d")


def test_one_safetensors_file_of_any_name_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / "gptq_model-4bit-128g.safetensors").write_bytes(safetensors_bytes({"a": np.ones(2, np.float32)}))
    (tmp_path / "config.json").write_text("{}")
    with open_folder(tmp_path) as folder:
        assert set(folder.tensors) == {"a"}


def test_missing_part_is_named(tmp_path: Path) -> None:
    write_parts(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match="model-00002-of-00002"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "file_name",
    [
        "../outside.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "a\\b.safetensors",
        "model.bin",
        7,
        ".safetensors",
    ],
)
def test_index_that_points_outside_the_folder_is_refused(file_name: object, tmp_path: Path) -> None:
    write_parts(tmp_path, {"a": file_name})
    with pytest.raises(CorruptFileError, match="plain name of a safetensors file"):
        open_folder(tmp_path)


def test_index_that_names_a_tensor_its_file_lacks_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path, {"z": "model-00001-of-00002.safetensors"})
    with pytest.raises(CorruptFileError, match="lacks tensor 'z'"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_folder_of_pickles_is_refused_and_they_are_not_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).mkdir()  # opening it would be an error of another kind
    with pytest.raises(UnsupportedFormatError, match="pickles.*never opens them"):
        open_folder(tmp_path)


def test_other_folders_are_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="holds no safetensors file"):
        open_folder(tmp_path)
    (tmp_path / "model-q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"pass one of them, such as .*model-q4_0\.gguf"):
        open_folder(tmp_path)
    for name in ("x.safetensors", "y.safetensors"):
        (tmp_path / name).write_bytes(safetensors_bytes({}))
    with pytest.raises(CorruptFileError, match="no model.safetensors.index.json"):
        open_folder(tmp_path)
    (tmp_path / "y.safetensors").unlink()
    with pytest.raises(ModelFileError, match="no config.json"):
        open_folder(tmp_path)


def test_short_json_that_would_take_much_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = write_parts(tmp_path)
    (folder / "config.json").write_bytes(b'{"a": [' + b"[]," * (MAX_VALUES // 2) + b"[]]}")
    with pytest.raises(CorruptFileError, match=f"config.json holds .* at most {MAX_VALUES}"):
        open_folder(folder)


def test_short_json_of_a_tokenizer_is_bounded_too(tmp_path: Path) -> None:
    folder = write_parts(tmp_path)
    (folder / "tokenizer.json").write_bytes(b'{"a": [' + b"[]," * (MAX_TOKENIZER_VALUES // 2) + b"[]]}")
    with (
        open_folder(folder) as opened,
        pytest.raises(CorruptFileError, match=f"tokenizer.json holds .* at most {MAX_TOKENIZER_VALUES}"),
    ):
        opened.json("tokenizer.json", max_bytes=MAX_TOKENIZER_BYTES)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"[1]", "wanted an object"), (b"{", "not sound JSON"), (b"\xff", "not UTF-8"), (b"[" * 100000, "not sound JSON")],
)
def test_damaged_config_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    write_parts(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CorruptFileError, match=words):
        open_folder(tmp_path)

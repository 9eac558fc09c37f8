"""The fingerprint changes with everything that cached keys and values depend on, and with nothing else."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from llvmlite import binding as llvm

from localinfer.kernels.jit import host, isa
from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import KVLayerShape
from localinfer.storage import fingerprint
from localinfer.storage.fingerprint import Fingerprint, WeightsFiles, describe_parts


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...] = (4, 4)
    offset: int = 0
    part: int = 0


@dataclass(frozen=True)
class File:
    paths: tuple[Path, ...] = ()
    path: Path = Path("model.gguf")
    metadata: dict[str, object] = field(
        default_factory=lambda: {
            "llama.block_count": 2,
            "tokenizer.ggml.tokens": ["a", "b"],
            "tokenizer.chat_template": "{{ messages }}",
        }
    )
    tensors: dict[str, Tensor] = field(default_factory=lambda: {"output.weight": Tensor()})


LAYOUT = KVLayout("f16", (KVLayerShape(2, 16, 16),))
CONFIG = SimpleNamespace(context_length=64, rope=SimpleNamespace(original_context_length=64))


def parts(file: File | None = None, layout: KVLayout = LAYOUT, config: object = CONFIG) -> dict[str, str]:
    return describe_parts(file or File(), layout, config)


def test_same_model_has_the_same_parts():
    assert parts() == parts()
    assert Fingerprint(parts()).key == Fingerprint(dict(reversed(parts().items()))).key


CHANGES: dict[str, Callable[[], dict[str, str]]] = {
    "model settings": lambda: parts(File(metadata={**File().metadata, "llama.block_count": 3})),
    "tokenizer": lambda: parts(File(metadata={**File().metadata, "tokenizer.ggml.tokens": ["a", "c"]})),
    "chat template": lambda: parts(File(metadata={**File().metadata, "tokenizer.chat_template": "x"})),
    "key-value layout": lambda: parts(layout=replace(LAYOUT, kv_type="f32")),
    "position encoding": lambda: parts(
        config=SimpleNamespace(context_length=65, rope=SimpleNamespace(original_context_length=64))
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_changes_its_own_part_and_the_key(name: str):
    changed = CHANGES[name]()
    assert {part for part, value in parts().items() if changed[part] != value} == {name}
    assert Fingerprint(changed).key != Fingerprint(parts()).key


MACHINES = {
    ("aarch64-unknown-linux-gnu", "neoverse-n1"): ISA.NEON_DOTPROD,
    ("arm64-apple-darwin25", "apple-m2"): ISA.NEON_I8MM,
    ("aarch64-unknown-linux-gnu", "cortex-a72"): ISA.GENERIC,
    ("x86_64-pc-windows-msvc", "haswell"): ISA.AVX2,
    ("x86_64-unknown-linux-gnu", "znver5"): ISA.AVX512_VNNI,
}


def test_every_machine_has_the_same_parts_since_every_path_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = parts()
    for (triple, cpu), path in MACHINES.items():
        monkeypatch.setattr(isa, "SELECTED", path)
        monkeypatch.setattr(llvm, "get_process_triple", lambda triple=triple: triple)
        monkeypatch.setattr(llvm, "get_host_cpu_name", lambda cpu=cpu: cpu)
        monkeypatch.setattr(llvm, "get_host_cpu_features", dict)
        monkeypatch.setattr(platform, "machine", lambda triple=triple: triple.partition("-")[0])
        host.host_features.cache_clear()
        assert parts() == wanted
    host.host_features.cache_clear()


def test_renamed_or_reshaped_tensor_changes_the_settings():
    for tensors in ({"other.weight": Tensor()}, {"output.weight": Tensor((2, 8))}):
        assert parts(File(tensors=tensors))["model settings"] != parts()["model settings"]


def weights(path: Path, memory: Path | None, start: int = 0) -> WeightsFiles:
    return WeightsFiles(File(paths=(path,), tensors={"output.weight": Tensor(offset=start)}), memory)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 40)
    backdate(path)
    return path


def backdate(path: Path) -> None:
    """A file that changed just now may change once more within a tick, so its hash is not remembered."""
    then = time.time() - 100
    os.utime(path, (then, then))


def test_hash_is_remembered_until_the_file_changes(model: Path, tmp_path: Path):
    memory = tmp_path / "memory"
    assert weights(model, memory).cached_hash() is None
    value = weights(model, memory).compute_hash()
    assert value is not None and weights(model, memory).cached_hash() == value
    content = bytearray(model.read_bytes())
    content[5000] ^= 1
    model.write_bytes(content)
    backdate(model)
    assert weights(model, memory).cached_hash() is None
    assert weights(model, memory).compute_hash() not in (None, value)


def test_hash_is_of_the_bytes_whatever_the_name_the_time_and_the_threads(model: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_CHUNK_BYTES", 1000)
    value = weights(model, None).compute_hash(threads=3)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    assert weights(copy, None).compute_hash(threads=1) == value


@pytest.mark.parametrize("offset", [100, 5000, 10239])
def test_every_byte_after_the_header_counts(model: Path, offset: int):
    values = []
    for _ in range(2):
        values.append(weights(model, None, start=100).compute_hash())
        content = bytearray(model.read_bytes())
        content[offset] ^= 128
        content[99] ^= 1
        model.write_bytes(content)
    assert values[0] != values[1]


def test_header_is_left_to_the_other_parts(model: Path):
    value = weights(model, None, start=100).compute_hash()
    model.write_bytes(bytes(100) + model.read_bytes()[100:])
    assert weights(model, None, start=100).compute_hash() == value


def test_file_that_changed_since_it_was_loaded_has_no_hash(model: Path, tmp_path: Path):
    loaded = weights(model, tmp_path / "memory")
    model.write_bytes(b"another model")
    assert loaded.compute_hash() is None
    assert not (tmp_path / "memory").exists()


def test_file_written_just_now_is_hashed_and_not_remembered(model: Path, tmp_path: Path):
    os.utime(model)
    assert weights(model, tmp_path / "memory").compute_hash() is not None
    assert weights(model, tmp_path / "memory").cached_hash() is None


def test_stopped_hash_is_none(model: Path, tmp_path: Path):
    assert weights(model, tmp_path / "memory").compute_hash(should_stop=lambda: True) is None


def test_torn_or_edited_memory_is_not_believed(model: Path, tmp_path: Path):
    memory = tmp_path / "memory"
    weights(model, memory).compute_hash()
    (note,) = memory.iterdir()
    text = note.read_text()
    for edited in (text[:-1], text[:64], "", ("0" if text[0] != "0" else "1") + text[1:], "\N{SNOWMAN}"):
        note.write_text(edited, "utf-8")
        assert weights(model, memory).cached_hash() is None


def test_memory_that_cannot_be_written_is_done_without(model: Path, tmp_path: Path):
    (tmp_path / "memory").write_text("a file")
    assert weights(model, tmp_path / "memory").compute_hash() is not None

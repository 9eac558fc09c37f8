"""A model file in memory that tests change as a faulty conversion, a bad disk or a broken download would."""

import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from localinfer.kernels.cpu.program import ThreadPool
from localinfer.loading.options import model_path
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.encoding import encode
from localinfer.quant.formats.types import TensorRecord, TensorType, block_dtype
from localinfer.quant.gguf.header import ValueType
from localinfer.quant.gguf.reader import Metadata, read_gguf
from localinfer.quant.gguf.writer import EncodedValue, GGUFWriter, copy_values, encode_value
from localinfer.quant.methods.presets import find_preset
from localinfer.quant.pipeline.quantize import quantize_model
from localinfer.types import FloatArray
from tests.models.arch_models import skeletons, write_skeleton
from tests.models.small_models import VOCAB, write_small_llama, write_small_mixture
from tests.support.typed_models import Weight

_PLAIN = {TensorType.F32: np.float32, TensorType.F16: np.float16}
TOKENS, MERGES, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"


@cache
def _pool() -> ThreadPool:
    return ThreadPool(1)


@dataclass
class EditableModel:
    """Metadata, decoded, and tensors of a model; what a test changes is written under the types it had."""

    values: dict[str, Any]
    weights: dict[str, Weight]
    _stored: dict[str, EncodedValue] = field(default_factory=dict)
    _types: dict[str, ValueType] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "EditableModel":
        """All of a GGUF file."""
        with read_gguf(path) as file:
            assert isinstance(file.metadata, Metadata)
            weights = {
                name: Weight(one.type, one.shape, file.tensor_bytes(name).reshape(-1).copy())
                for name, one in file.tensors.items()
            }
            stored = {key: file.metadata.stored(key) for key in file.metadata}
            types = {key: one.type for key, one in stored.items() if one.count is None}
            return cls({key: file.metadata[key] for key in file.metadata}, weights, copy_values(file.metadata), types)

    def write(self, path: Path) -> Path:
        """Write the file; values that nobody replaced keep their bytes."""
        values = {key: self._stored.get(key) or encode_value(value) for key, value in self.values.items()}
        records = [TensorRecord(name, one.type, one.shape) for name, one in self.weights.items()]
        with GGUFWriter(path, values, records) as writer:
            for one in self.weights.values():
                writer.write(np.ascontiguousarray(one.blocks))
        return path

    @property
    def num_layers(self) -> int:
        return int(self.get("block_count"))

    def get(self, key: str) -> Any:
        """A setting of the architecture by its key without the prefix, or any by its whole key."""
        return self.values[self._key(key)]

    def put(self, key: str, value: Any) -> None:
        """Replace or add a setting."""
        key = self._key(key)
        if isinstance(value, list) and value and isinstance(value[0], bool):
            value = np.array(value)
        self._stored[key] = encode_value(value, None if isinstance(value, str) else self._types.get(key))
        self.values[key] = value

    def drop(self, *keys: str) -> None:
        """Leave settings or tensors out; one of them at least must be there."""
        found = [key for key in keys if self._key(key) in self.values or key in self.weights]
        assert found, f"none of {keys} is in this model"
        for key in found:
            self.values.pop(self._key(key), None)
            self.weights.pop(key, None)

    def floats(self, name: str) -> FloatArray:
        """A tensor's numbers."""
        one = self.weights[name]
        return dequantize(one.blocks, one.type, one.shape)

    def set_floats(self, name: str, values: FloatArray) -> None:
        """Store other numbers, rounded to the type that the tensor has."""
        type = self.weights[name].type
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
        if type in _PLAIN:
            with np.errstate(over="ignore"):
                blocks = rows.astype(_PLAIN[type]).view(np.uint8)
        else:
            blocks = encode(_pool(), rows, type)
        self.weights[name] = Weight(type, values.shape, blocks.reshape(-1))

    def change(self, name: str, change: Callable[[FloatArray], FloatArray]) -> None:
        """Put numbers made of a tensor's in its place."""
        self.set_floats(name, change(self.floats(name).copy()))

    def change_all(self, ending: str, change: Callable[[FloatArray], FloatArray]) -> None:
        """Change every tensor whose name ends so."""
        names = [name for name in self.weights if name.endswith(ending)]
        assert names, f"no tensor ends with {ending}"
        for name in names:
            self.change(name, change)

    def blocks(self, name: str) -> Any:
        """The block records of a tensor, to be changed in place."""
        one = self.weights[name]
        return one.blocks.view(block_dtype(one.type))

    def bytes_of(self, name: str) -> Any:
        """The bytes of a tensor, to be changed in place."""
        return self.weights[name].blocks

    def swap(self, one: str, other: str) -> None:
        """Give two tensors each other's place."""
        self.weights[one], self.weights[other] = self.weights[other], self.weights[one]

    def layer(self, number: int) -> Iterator[str]:
        """What the tensors of a layer are called behind their number."""
        start = f"blk.{number}."
        return iter([name.removeprefix(start) for name in self.weights if name.startswith(start)])

    def _key(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.")) else f"{self.values['general.architecture']}.{key}"


@cache
def _base_folder() -> "TemporaryDirectory[str]":
    """Where this process keeps whole models, to its end."""
    return TemporaryDirectory()


@cache
def base_model(name: str) -> Path:
    """A whole model by its name, which many faults are planted on: written once, and only read.

    `demo-f16` and `demo-q4_k_m` are shipped, `demo-TYPE` is made of the first; `llama` and `mixture` are small and
    random, `vocabulary:NAME` is a small llama with a published vocabulary, others are of `arch_models`.
    """
    shipped = model_path(None).with_name(f"{name}.gguf")
    path = Path(_base_folder().name) / f"{name.replace(':', '-')}.gguf"
    if shipped.exists():
        return shipped
    if name == "llama":
        return write_small_llama(path, num_layers=4)
    if name == "mixture":
        return write_small_mixture(path, num_layers=4)
    if name.startswith("demo-"):
        with read_gguf(model_path(None).with_name("demo-f16.gguf")) as file:
            quantize_model(file, path, find_preset(name.removeprefix("demo-")), _pool())
        return path
    if name.startswith("vocabulary:"):
        return _with_vocabulary(name.partition(":")[2], path)
    write_skeleton(skeletons()[name], path)
    return path


def _with_vocabulary(name: str, path: Path) -> Path:
    """A llama of four narrow layers with the words of a published vocabulary, and as many rows of Q8_0."""
    packed = Path(__file__).parents[2] / "data" / "vocabularies" / f"{name}.gguf.xz"
    words = path.with_name(f"words-{name}.gguf")
    words.write_bytes(lzma.decompress(packed.read_bytes()))
    with read_gguf(words) as file:
        settings = {key: value for key, value in copy_values(file.metadata).items() if key.startswith("tokenizer.")}
        size = len(file.metadata[TOKENS])  # type: ignore[arg-type]
    model = EditableModel.read(base_model("llama"))
    for key, value in settings.items():
        model.values[key], model._stored[key] = None, value
    model.put("vocab_size", size)
    generator = np.random.default_rng(1)
    for tensor, one in model.weights.items():
        if one.shape[0] == VOCAB:
            values = generator.standard_normal((size, one.shape[1]), dtype=np.float32) / np.sqrt(one.shape[1])
            model.weights[tensor] = Weight(TensorType.Q8_0, values.shape, one.blocks)
            model.set_floats(tensor, values.astype(np.float32))
    return model.write(path)

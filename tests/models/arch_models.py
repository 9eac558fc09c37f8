"""Tiny random models of many architectures, with the logits that llama.cpp gave for them (tests/data/README.md)."""

import json
import lzma
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import KVLayerShape, OpGraph, WeightSource
from localinfer.kernels.program import Batch, Program, Segment
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, write_decoder
from localinfer.quant.gguf.reader import read_gguf
from localinfer.types import FloatArray

DATA = Path(__file__).parents[1] / "data" / "architectures"
SEED = 1
REQUIRED = [
    *("llama-dense", "llama-gqa", "llama-moe", "mistral3-dense", "mistral3-gqa"),
    *("qwen2-dense", "qwen2-gqa", "qwen3-dense", "qwen3-gqa", "qwen3moe-moe", "qwen3moe-gqa"),
    *("smollm3-dense", "smollm3-gqa", "granite-dense", "granite-gqa"),
]
# Not phimoe-moe: its answers were computed with RMS norms where the model's own code has layer norms.
FURTHER = [
    *("arcee-dense", "baichuan-dense", "bailingmoe2-moe", "bloom-dense", "chatglm-dense", "cohere2-dense"),
    *(
        "command-r-dense",
        "deepseek-moe",
        "deepseek2-moe",
        "dots1-moe",
        "exaone4-dense",
        "falcon-dense",
        "gemma-dense",
        "gemma2-dense",
    ),
    *("gemma2-gqa", "gemma3-dense", "gemma3-gqa", "glm4-dense", "glm4moe-moe", "gpt-oss-gqa", "gpt-oss-moe"),
    *(
        "gpt2-dense",
        "gptneox-dense",
        "granitemoe-moe",
        "hunyuan-dense-dense",
        "hunyuan-dense-gqa",
        "hunyuan-moe-moe",
        "internlm2-dense",
    ),
    *("llama4-moe", "minicpm-dense", "minimax-m2-moe", "nemotron-dense", "olmo2-dense", "olmo2-gqa", "olmoe-moe"),
    *("orion-dense", "phi2-dense", "phi3-dense", "qwen-dense", "qwen2moe-moe", "seed_oss-dense", "stablelm-dense"),
    "starcoder2-dense",
]


@dataclass(frozen=True)
class ArchModel:
    """A model file, the ids int32[T] it was asked about, and the logits float32[T, vocab_size] that are right."""

    name: str
    path: Path
    token_ids: NDArray[np.int32]
    logits: FloatArray


class Device(Protocol):
    """What a test needs of a device to run a model: the oracle's and every real one."""

    def weights(self, path: Path) -> WeightSource:
        """The weights of a file."""
        ...

    def program(self, graph: OpGraph, max_rows: int) -> Program:
        """A graph's program for batches of up to max_rows rows, all of them output rows."""
        ...

    def pages(self, layers: Sequence[KVLayerShape], num_positions: int) -> NDArray[np.int64]:
        """Addresses of fresh cache pages for one sequence of num_positions."""
        ...


def architectures() -> list[str]:
    """Names of the models that must agree."""
    return [*REQUIRED, *FURTHER]


@cache
def skeletons() -> dict[str, dict[str, Any]]:
    """By a model's name its architecture ("arch"), metadata ("kv") and the names and shapes of its "tensors"."""
    found: dict[str, dict[str, Any]] = json.loads(lzma.decompress((DATA / "skeletons.json.xz").read_bytes()))
    return found


def random_weight(name: str, shape: Sequence[int]) -> FloatArray:
    """The tensor that the reference logits were computed with, which its name and shape decide."""
    generator = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    values = generator.standard_normal(shape, dtype=np.float32)
    if "norm" in name and name.endswith("weight"):
        return 1.0 + 0.1 * values
    if name.endswith("bias"):
        return 0.1 * values
    scale = 1.5 if "attn_q" in name or "attn_k" in name else 1.0
    return (values / np.sqrt(shape[-1])).astype(np.float32) * scale


def write_skeleton(skeleton: dict[str, Any], path: Path) -> None:
    """Write the model of a skeleton with random weights, by another library's writer."""
    writer = gguf.GGUFWriter(str(path), skeleton["arch"])
    for key, type_name, element_type, value in skeleton["kv"]:
        element = None if element_type is None else gguf.GGUFValueType[element_type]
        writer.add_key_value(key, value, gguf.GGUFValueType[type_name], sub_type=element)
    for name, shape in skeleton["tensors"]:
        writer.add_tensor(name, random_weight(name, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build_model(folder: Path, name: str) -> ArchModel:
    """Write one model into folder, unless it is there, and return it with its answers."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        write_skeleton(skeletons()[name], path)
    with np.load(DATA / "logits.npz") as answers:
        return ArchModel(name, path, answers[f"{name}.tokens"], answers[f"{name}.logits"])


def read_config(path: Path) -> ModelConfig:
    """The configuration of a file."""
    with read_gguf(path) as file:
        return ModelConfig.from_metadata(file.metadata, {name: info.shape for name, info in file.tensors.items()})


def run_logits(model: ArchModel, device: Device, chunk_rows: int = 0) -> FloatArray:
    """Logits of every position, computed at once or in chunks of chunk_rows."""
    config = read_config(model.path)
    layers = kv_layer_shapes(config)
    num_rows = len(model.token_ids)
    step = chunk_rows or num_rows
    program = device.program(write_decoder(config, device.weights(model.path)), step)
    pages = device.pages(layers, num_rows)
    parts = []
    for start in range(0, num_rows, step):
        token_ids = model.token_ids[start : start + step]
        rows = np.arange(len(token_ids), dtype=np.int32)
        parts.append(program.run(Batch(token_ids, [Segment(start, len(token_ids), pages)], rows)).copy())
    program.close()
    return np.concatenate(parts)


def normalized_error(found: FloatArray, wanted: FloatArray) -> float:
    """Sum of squared differences over sum of squares."""
    difference = found.astype(np.float64) - wanted
    return float(np.sum(difference**2) / np.sum(wanted.astype(np.float64) ** 2))

"""Tiny random models of many architectures, with the logits that llama.cpp gave for them (tests/data/README.md)."""

import io
import json
import lzma
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import KVLayerShape, OpGraph, StateShape, WeightSource
from localinfer.kernels.program import Batch, Program, Segment, StateStep
from localinfer.models.decoder.block_config import Pooling, classified_rows
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes, write_decoder
from localinfer.models.decoder.text_head import write_text_model
from localinfer.models.load.loader import open_model_file
from localinfer.quant.gguf.reader import read_gguf
from localinfer.types import FloatArray

DATA = Path(__file__).parents[1] / "data" / "architectures"
FURTHER = ("further", "hybrids")
SEED = 1
# phimoe's answers were computed with RMS norms where the model's own code has layer norms.
KNOWN_TO_DIFFER = {"phimoe-moe"}
# Models of architectures that this version refuses.
REFUSED: set[str] = set()


@dataclass(frozen=True)
class TextModel:
    """A model file of an encoder or reranker, the ids int32[T] of a text, and what is right for it.

    answers: "embeddings" float32[T, width] before pooling, and "pooled" float32[width] or "scores" float32[labels].
    """

    name: str
    path: Path
    token_ids: NDArray[np.int32]
    answers: dict[str, FloatArray]


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

    def states(self, shapes: Sequence[StateShape], count: int) -> list[int]:
        """Addresses of so many fresh blocks of recurrent states."""
        ...


def architectures() -> list[str]:
    """Names of the decoders that must agree."""
    return [
        name
        for name, skeleton in skeletons().items()
        if name not in KNOWN_TO_DIFFER | REFUSED and not {"encoder", "target"} & skeleton.get("options", {}).keys()
    ]


@cache
def one_of_each() -> list[str]:
    """Names of decoders, of each architecture the last: one with experts or grouped heads where there is any."""
    return list({skeletons()[name]["arch"]: name for name in architectures()}.values())


@cache
def skeletons() -> dict[str, dict[str, Any]]:
    """By a model's name its architecture ("arch"), metadata ("kv") and the names and shapes of its "tensors".

    "init", if there is one, has distributions of tensors by a regular expression for their names. "options": "encoder"
    has embeddings instead of logits; "target" names the model whose cache a draft model reads; "reference" says that
    formulas gave the answers, not another runtime.
    """
    found: dict[str, dict[str, Any]] = json.loads(lzma.decompress((DATA / "skeletons.json.xz").read_bytes()))
    return found


def random_weight(name: str, shape: Sequence[int], init: Mapping[str, Sequence[Any]] | None = None) -> FloatArray:
    """The tensor that the reference logits were computed with, which its name, shape and distribution decide."""
    for pattern, (kind, *arguments) in (init or {}).items():
        if re.search(pattern, name):
            return _drawn(_generator(name), shape, kind, *arguments).astype(np.float32)
    return _usual_weight(name, tuple(shape), SEED).copy()


@cache
def _usual_weight(name: str, shape: tuple[int, ...], seed: int) -> FloatArray:
    """A tensor of no distribution of its own: models have many of the same names and shapes."""
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, dtype=np.float32)
    if "norm" in name and name.endswith("weight"):
        return 1.0 + 0.1 * values
    if "ssm_a" in name:
        return -np.abs(values)
    if name.endswith("bias"):
        return 0.1 * values
    scale = 1.5 if "attn_q" in name or "attn_k" in name else 1.0
    return (values / np.sqrt(shape[-1])).astype(np.float32) * scale


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng([SEED, zlib.crc32(name.encode())])


def _drawn(generator: np.random.Generator, shape: Sequence[int], kind: str, *arguments: float) -> NDArray[np.float64]:
    """Values of one of the distributions that a skeleton may name."""
    match kind:
        case "normal":
            return np.asarray(arguments[0] + arguments[1] * generator.standard_normal(shape))
        case "ternary":
            return np.asarray(generator.integers(-1, 2, shape), np.float64)
        case "llama3_factors":
            return np.clip(np.linspace(-4.0, 12.0, shape[-1]), 1.0, 8.0)
        case "rope_factors":
            return np.where(np.arange(shape[-1]) < arguments[0] * shape[-1], 1.0, 1e30)
    uniform = generator.random(shape)
    low, high = arguments
    match kind:
        case "uniform":
            return np.asarray(low + (high - low) * uniform)
        case "softplus_inverse":
            return np.asarray(np.log(np.expm1(low * (high / low) ** uniform)))
        case "log_uniform" | "negative_log_uniform":
            return np.asarray(low * (high / low) ** uniform * (-1.0 if kind.startswith("negative") else 1.0))
    raise ValueError(f"a distribution {kind}")


def write_skeleton(skeleton: dict[str, Any], path: Path) -> None:
    """Write the model of a skeleton with random weights, by another library's writer."""
    writer = gguf.GGUFWriter(str(path), skeleton["arch"])
    for key, type_name, element_type, value in skeleton["kv"]:
        element = None if element_type is None else gguf.GGUFValueType[element_type]
        writer.add_key_value(key, value, gguf.GGUFValueType[type_name], sub_type=element)
    for name, shape in skeleton["tensors"]:
        writer.add_tensor(name, random_weight(name, shape, skeleton.get("init")).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def further_skeletons() -> dict[str, dict[str, Any]]:
    """Architectures whose files were added later, each asked about one text: as `skeletons`, with "file", the name of
    the file of its answers."""
    found: dict[str, dict[str, Any]] = {}
    for stem in FURTHER:
        models = json.loads(lzma.decompress((DATA / f"{stem}.json.xz").read_bytes()))
        found |= {name: {**skeleton, "file": stem} for name, skeleton in models.items()}
    return found


@cache
def _answers(stem: str) -> Mapping[str, NDArray[Any]]:
    """Arrays of a file of answers by their names; each is decoded when it is asked for."""
    found: Mapping[str, NDArray[Any]] = np.load(io.BytesIO((DATA / f"{stem}.npz").read_bytes()))
    return found


def build_further(folder: Path, name: str) -> ArchModel:
    """Write one of `further_skeletons` into folder, unless it is there, and return it with its answers."""
    skeleton, path = further_skeletons()[name], folder / f"{name}.gguf"
    if not path.exists():
        write_skeleton(skeleton, path)
    answers = _answers(skeleton["file"])
    return ArchModel(name, path, answers["tokens"], answers[name])


def build_model(folder: Path, name: str) -> ArchModel:
    """Write one model into folder, unless it is there, and return it with its answers."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        write_skeleton(skeletons()[name], path)
    answers = _answers("logits")
    return ArchModel(name, path, answers[f"{name}.tokens"], answers[f"{name}.logits"])


def text_models() -> list[str]:
    """Names of the encoders and rerankers that must agree."""
    return [name for name, skeleton in skeletons().items() if "encoder" in skeleton.get("options", {})]


def build_text_model(folder: Path, name: str) -> TextModel:
    """Write one encoder or reranker into folder, unless it is there, and return it with its answers."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        write_skeleton(skeletons()[name], path)
    answers = _answers("logits")
    kinds = [kind for kind in ("embeddings", "pooled", "scores") if f"{name}.{kind}" in answers]
    return TextModel(name, path, answers[f"{name}.tokens"], {kind: answers[f"{name}.{kind}"] for kind in kinds})


def run_texts(path: Path, device: Device, texts: Sequence[NDArray[np.int32]], pooling: Pooling) -> list[FloatArray]:
    """What the model makes of each text, all of them in one batch: float32[T, width], or [1, width] where pooled."""
    config = read_config(path)
    with read_gguf(path) as file:
        classified = classified_rows(file.metadata, is_encoder=config.is_encoder)
    num_rows = sum(map(len, texts))
    graph = write_text_model(config, device.weights(path), pooling, classified)
    program = device.program(graph, num_rows)
    segments, rows, start = [], [], 0
    for text in texts:
        segments.append(Segment(0, len(text), device.pages(graph.kv_layers, len(text))))
        last = Pooling.LAST in (pooling, classified if pooling is Pooling.RANK else pooling)
        taken = np.arange(start, start + len(text), dtype=np.int32)
        rows.append(taken if pooling is Pooling.NONE else taken[-1:] if last else taken[:1])
        start += len(text)
    found = program.run(Batch(np.concatenate(texts), segments, np.concatenate(rows))).copy()
    program.close()
    ends = np.cumsum([len(one) for one in rows])
    return np.split(found, ends[:-1])


def read_config(path: Path, *, with_draft_layers: bool = False) -> ModelConfig:
    """The configuration of a GGUF file or a folder."""
    with closing(open_model_file(path)) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        return ModelConfig.from_metadata(file.metadata, shapes, with_draft_layers=with_draft_layers)


class ArchRun:
    """A model on a device, whose texts may come in chunks of up to max_rows rows. `weights`: others than its file's."""

    def __init__(
        self, model: ArchModel, device: Device, max_rows: int = 0, weights: WeightSource | None = None
    ) -> None:
        self._token_ids = model.token_ids
        self._device = device
        config = read_config(model.path)
        self._layers, self._states = kv_layer_shapes(config), state_shapes(config)
        graph = write_decoder(config, weights or device.weights(model.path))
        self._program = device.program(graph, max_rows or len(model.token_ids))

    def __enter__(self) -> "ArchRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._program.close()

    def logits(self, chunk_rows: int = 0) -> FloatArray:
        """Logits of every position, computed at once or in chunks of chunk_rows, over fresh pages and states."""
        num_rows = len(self._token_ids)
        step = chunk_rows or num_rows
        pages = self._device.pages(self._layers, num_rows)
        parts, source = [], 0
        for start in range(0, num_rows, step):
            token_ids = self._token_ids[start : start + step]
            rows = np.arange(len(token_ids), dtype=np.int32)
            state = None
            if self._states:
                (target,) = self._device.states(self._states, 1)
                state, source = StateStep(source, [(len(token_ids), target)]), target
            segment = Segment(start, len(token_ids), pages, state=state)
            parts.append(self._program.run(Batch(token_ids, [segment], rows)).copy())
        return np.concatenate(parts)


def run_logits(
    model: ArchModel, device: Device, chunk_rows: int = 0, weights: WeightSource | None = None
) -> FloatArray:
    """Logits of every position, of a program whose batches hold no more than a chunk."""
    with ArchRun(model, device, chunk_rows, weights) as run:
        return run.logits(chunk_rows)


def normalized_error(found: FloatArray, wanted: FloatArray) -> float:
    """Sum of squared differences over sum of squares."""
    difference = found.astype(np.float64) - wanted
    return float(np.sum(difference**2) / np.sum(wanted.astype(np.float64) ** 2))

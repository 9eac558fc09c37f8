"""Tiny random models of every kind of cache: dense, sliding window, hybrid, mixture of experts; with real kernels."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import Batch, Program, StateStep
from localinfer.models.decoder.block_config import Pooling
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import write_decoder
from localinfer.models.load.loader import Model, load_model
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.types import FloatArray
from tests.models import arch_models
from tests.models.arch_models import skeletons, write_skeleton
from tests.models.small_models import write_small_llama
from tests.proof.simulation.pictures import Gallery, gallery_of

CONTEXT = 192
"""Six pages."""
SIZES = ((16, 4), (24, 6), (48, 8))
"""Rows of a batch, and rows with logits: small ones cut prompts in many chunks."""
MODELS = ("dense", "window", "hybrid", "mixture")


@dataclass
class TinyModel:
    """A loaded model, its file, a program for cold runs, and programs of small batches for simulated engines."""

    name: str
    model: Model
    path: Path
    cold: CpuProgram
    programs: list[CpuProgram]
    text_programs: dict[Pooling, Program] = field(default_factory=dict)

    @property
    def gallery(self) -> Gallery:
        """Pictures and sounds of its texts."""
        return gallery_of(self.model.config)

    @property
    def layout(self) -> KVLayout:
        """Of its pages and states."""
        return self.model.kv_layout

    @property
    def vocab_size(self) -> int:
        """Of its logits."""
        return self.model.config.vocab_size


Hook = Callable[[str, int], None]
"""Called with where the simulation is, and how many rows are computed there; it may raise what it likes."""


class SimulatedProgram:
    """A program that tells a hook before and after each batch; closing it leaves the shared one open."""

    def __init__(self, program: CpuProgram, hook: Hook) -> None:
        self.max_batch_rows, self.max_output_rows = program.max_batch_rows, program.max_output_rows
        self.is_closed = False
        self._program, self._hook = program, hook

    def run(self, batch: Batch) -> FloatArray:
        """As the program does."""
        assert not self.is_closed, "a closed program was run"
        rows = len(batch.token_ids)
        self._hook("before a pass", rows)
        found = self._program.run(batch)
        self._hook("after a pass", 0)
        return found

    def run_abortable(self, batch: Batch, should_abort: Callable[[float], bool]) -> FloatArray | None:
        """As the program does."""
        assert not self.is_closed, "a closed program was run"
        self._hook("before a pass", len(batch.token_ids))
        found = self._program.run_abortable(batch, should_abort, least_rows=8)
        self._hook("after a pass", 0)
        return found

    def settle(self, step: StateStep) -> None:
        """As the program does."""
        self._hook("before states", 1)
        self._program.settle(step)

    def close(self) -> None:
        """Note that it was closed."""
        self.is_closed = True


@dataclass
class SimulatedModel:
    """What an engine is given for one life: all of a tiny model but the end of it."""

    tiny: TinyModel
    program: SimulatedProgram
    times_closed: int = 0

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.tiny.model.config

    @property
    def kv_layout(self) -> KVLayout:
        """The model's."""
        return self.tiny.layout

    @property
    def file(self) -> ModelFile:
        """The model's."""
        return self.tiny.model.file

    tokenizer = None
    has_dense = False
    adapts_media = False
    classified_rows = Pooling.LAST

    def text_program(self, pooling: Pooling, max_rows: int = 512) -> Program:
        """A program of text embeddings, the same for every life."""
        known = self.tiny.text_programs.get(pooling)
        if known is None:
            known = self.tiny.text_programs[pooling] = self.tiny.model.text_program(pooling, max_rows)
        return known

    def close(self) -> None:
        """Note that it was closed."""
        self.times_closed += 1
        self.program.close()


_FOLDERS: list[TemporaryDirectory[str]] = []


@cache
def tiny_model(name: str, seed: int = 1) -> TinyModel:
    """Write and load a model, once per process. seed: of its weights; all else is the same."""
    folder = TemporaryDirectory(prefix="localinfer-simulation-", ignore_cleanup_errors=True)
    # Kept until the process ends.
    _FOLDERS.append(folder)
    path = Path(folder.name) / f"{name}.gguf"
    with mock.patch.object(arch_models, "SEED", seed):
        _WRITERS[name](path, seed)
    model = load_model(path, threads=1, context_length=CONTEXT, takes_media=True)
    cold = _lower(model, 256, CONTEXT)
    return TinyModel(name, model, path, cold, [_lower(model, rows, outputs) for rows, outputs in SIZES])


def _lower(model: Model, rows: int, outputs: int) -> CpuProgram:
    assert model.weights is not None, "on the CPU"
    graph = write_decoder(model.config, model.weights, CONTEXT, kv_layers=model.kv_layout.layers)
    return lower_to_cpu(graph, model.pool, model.kv_layout, max_batch_rows=rows, max_output_rows=outputs)


def _write_window(path: Path, seed: int) -> None:
    """A Gemma 3 of a quarter of its usual test width, with a window that ends inside of the second page."""
    skeleton = copy.deepcopy(skeletons()["gemma3-gqa"])
    sizes = {256: 64, 384: 64, 64: 16}
    values: dict[str, Any] = {
        "embedding_length": 64,
        "feed_forward_length": 64,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "rope.dimension_count": 16,
        "rope.dimension_count_swa": 16,
        "attention.scale": 0.25,
        "attention.sliding_window": 40,
    }
    for entry in skeleton["kv"]:
        entry[3] = values.get(entry[0].removeprefix("gemma3."), entry[3])
    for entry in skeleton["tensors"]:
        name, shape = entry
        is_key = "attn_k." in name or "attn_v." in name
        first = 32 if is_key else shape[0] if name.startswith(("token_embd", "output.")) else sizes[shape[0]]
        entry[1] = [first, *(sizes[size] for size in shape[1:])]
    write_skeleton(skeleton, path)


def _write(name: str) -> Callable[[Path, int], None]:
    return lambda path, seed: write_skeleton(skeletons()[name], path)


_WRITERS: dict[str, Callable[[Path, int], object]] = {
    "dense": lambda path, seed: write_small_llama(path, seed=seed),
    "window": _write_window,
    "hybrid": _write("granitehybrid-nope"),
    "mixture": _write("qwen3vlmoe-moe"),
}


def valid_bytes(layout: KVLayout, count: int, *, is_windowed: bool) -> NDArray[np.uint8]:
    """Of a page whose first `count` positions are valid, a mask of the bytes that those have, 0 or 255."""
    assert layout.kv_type == "f16", "the order of bytes of this type"
    total = layout.windowed_bytes if is_windowed else layout.page_bytes
    mask = np.zeros(total, np.uint8)
    for index, shape in enumerate(layout.layers):
        if (shape.window > 0) != (is_windowed and layout.window > 0):
            continue
        head = layout.head(index)
        for number in range(shape.num_kv_heads):
            start = layout.layer_offset(index) + number * head.num_bytes
            part = mask[start : start + head.num_bytes]
            keys = part[: 64 * head.key_columns].reshape(2, head.key_columns, 16, 2)
            for position in range(count):
                keys[position // 16, : shape.key_size, position % 16] = 255
            values = part[head.values : head.values + 64 * head.value_columns].reshape(32, head.value_columns, 2)
            values[:count, : shape.value_size] = 255
    return mask


def valid_state_bytes(layout: KVLayout) -> NDArray[np.uint8]:
    """The same of a recurrent state: all but what fills it up."""
    mask = np.zeros(layout.state_bytes, np.uint8)
    for start, shape in zip(layout.state_offsets, layout.states, strict=False):
        mask[start : start + 4 * shape.num_values] = 255
    return mask

"""A model's programs on the CPU, and the parts from which `pipeline` writes those on GPUs."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from localinfer.kernels.cpu.lower import MAX_BATCH_ROWS, kernels_of_graph, lower_to_cpu
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.jit.compile_ahead import compile_ahead
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import KVLayerShape, OpGraph, WeightSource
from localinfer.kernels.program import HiddenProgram, Program
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.block_config import Pooling, classified_rows, read_pooling
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes, write_decoder, write_draft_layer
from localinfer.models.load.threads import choose_decode_threads
from localinfer.models.load.weights import CpuWeights
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.types import ProgressCallback, Record

logger = logging.getLogger(__name__)


class Parts(Record):
    """The parts from which a program is written on any device."""

    config: ModelConfig
    file: ModelFile
    pool: ThreadPool
    kv_type: str
    progress: ProgressCallback | None
    chooses_threads: bool
    measures_again: bool = False
    may_measure: bool = True
    window_tokens: int | None = None
    """Positions that a text keeps between batches; None for all."""

    def summed_tokens(self, batch_rows: int, page_tokens: int) -> int:
        """Positions of a sequence at most whose attention a program of so many rows sums by page; 0 for none."""
        # A batch may begin and end inside a page.
        return 0 if self.window_tokens is None else self.window_tokens + batch_rows + 2 * page_tokens


def batch_rows_of(config: ModelConfig, usual: int = MAX_BATCH_ROWS) -> int:
    """Rows of a batch: the usual number of its devices, or what the largest picture takes where some are taken."""
    return max(usual, find_architecture(config).picture_rows if config.takes_media else 0)


GraphWriter = Callable[[WeightSource, Sequence[KVLayerShape] | None, list[int]], OpGraph]
"""Writes a graph of some weights and layers of the cache; the list gets the `marks` of `write_decoder`."""


class GpuModel(Record):
    """A model's program on GPUs, the layout of its cache, and a function that writes a further program over the same
    weights and cache, of a graph and a number of rows, all of which may be output rows; one of them runs at a time."""

    program: Program
    kv_layout: KVLayout
    further_program: Callable[[GraphWriter, int], Program]


def decoder_writer(config: ModelConfig) -> GraphWriter:
    """A function that writes the model's own graph."""
    return lambda weights, kv_layers, marks: write_decoder(
        config, weights, config.context_length, kv_layers=kv_layers, marks=marks
    )


def write_on_cpu(
    parts: Parts,
    weights: CpuWeights,
    kv_layout: KVLayout,
    max_summed_tokens: int,
    *,
    shows_states: bool = False,
    batch_rows: int = MAX_BATCH_ROWS,
) -> CpuProgram:
    """The program on the CPU. kv_layout, max_summed_tokens, batch_rows: see `lower_to_cpu`; shows_states: see
    `write_decoder`."""
    graph = write_decoder(
        parts.config,
        weights,
        parts.config.context_length,
        kv_layers=kv_layout.layers,
        shows_states=shows_states,
    )
    weights.check_asked(parts.config)
    program = lower_to_cpu(
        graph,
        parts.pool,
        kv_layout,
        max_batch_rows=batch_rows,
        max_summed_tokens=max_summed_tokens,
        progress=parts.progress,
    )
    weights.pack_behind(program, parts.pool)
    if parts.chooses_threads and not parts.config.is_encoder:
        choose_decode_threads(
            program,
            kv_layout,
            parts.file.num_bytes,
            parts.progress,
            measure_again=parts.measures_again,
            may_measure=parts.may_measure,
        )
    note(parts.file, list(weights.notes.values()))
    return program


def note(file: ModelFile, notes: Sequence[str]) -> None:
    """Log converted tensor types and unused layers."""
    for text in notes:
        logger.warning("%s", text)
    for text in getattr(file, "notices", ()):
        logger.warning("%s: %s", file.path.name, text)


def has_draft_layers(file: ModelFile) -> bool:
    """True if a file declares layers for next-token prediction."""
    found = file.metadata.get(f"{file.metadata.get('general.architecture')}.nextn_predict_layers")
    # What is no number of layers is refused where it is read.
    return bool(found.any()) if isinstance(found, np.ndarray) else bool(found)


def with_draft_layers(config: ModelConfig, kv_layout: KVLayout) -> KVLayout:
    """The layout of a model's cache with its draft layers, which `config` counts, and what they carry."""
    layers, states = kv_layer_shapes(config, parts_windows=True), state_shapes(config)
    return replace(kv_layout, layers=layers, states=states, carried_size=config.hidden_size)


def draft_heads(config: ModelConfig) -> list[int | None]:
    """Widths of the output heads that draft layers are loaded with, None for all tokens; empty without such layers."""
    if not config.num_draft_layers:
        return []
    from localinfer.models.decoder.draft_layers import short_head_tokens

    return list(dict.fromkeys((None, short_head_tokens(config.vocab_size) or None)))


def write_draft_programs(
    config: ModelConfig,
    weights: WeightSource,
    main: CpuProgram,
    pool: ThreadPool,
    kv_layout: KVLayout,
    progress: ProgressCallback | None = None,
) -> tuple[tuple[HiddenProgram, ...], ...]:
    """Programs of one row per sequence for each draft layer: all with the whole output head, then all with a short one.

    main: the model's own, whose threads they take. Empty for a model without draft layers.
    """

    def written(layer: int, num_tokens: int | None) -> CpuProgram:
        graph = write_draft_layer(
            config, weights, layer, config.context_length, kv_layers=kv_layout.layers, num_tokens=num_tokens
        )
        program = lower_to_cpu(graph, pool, kv_layout, max_batch_rows=1, max_output_rows=1, progress=progress)
        program.decode_threads, program.is_measured = main.decode_threads, main.is_measured
        return program

    return tuple(
        tuple(written(layer, num_tokens) for layer in range(config.num_main_layers, config.num_layers))
        for num_tokens in draft_heads(config)
    )


def write_text_graphs(
    config: ModelConfig, file: ModelFile, weights: WeightSource, kv_layers: Sequence[KVLayerShape] | None = None
) -> list[OpGraph]:
    """The graphs of `Model.text_program`, for every pooling, that need more than the model's own program.

    None for a plain decoder: its vectors are pooled of hidden states, which its own kernels compute.
    """
    return [
        text_writer(config, kind, classified_rows(file.metadata, is_encoder=config.is_encoder))(weights, kv_layers, [])
        for kind in _further_kinds(config, file)
    ]


def text_writer(config: ModelConfig, pooling: Pooling, classified: Pooling) -> GraphWriter:
    """A function that writes the graph of `Model.text_program`; see `write_text_model`."""
    # Most models are loaded to generate.
    from localinfer.models.decoder.text_head import write_text_model

    return lambda weights, kv_layers, marks: write_text_model(
        config, weights, pooling, classified, config.context_length, kv_layers=kv_layers, marks=marks
    )


def _further_kinds(config: ModelConfig, file: ModelFile) -> list[Pooling]:
    """Poolings whose programs have other kernels than the model's own."""
    kinds = []
    if config.is_encoder or "dense_2.weight" in file.tensors:
        # Other poolings take single rows, as NONE does, or as LAST does go through matrices as well.
        kinds = [Pooling.MEAN, Pooling.LAST, Pooling.NONE]
    if (pooling := read_pooling(file.metadata)) in (Pooling.RANK, Pooling.LATE):
        kinds.append(pooling)
    if config.num_decision_layers:
        kinds = [Pooling.RANK]
    return kinds


def compile_text_kernels(
    config: ModelConfig,
    file: ModelFile,
    weights: WeightSource,
    pool: ThreadPool,
    kv_layout: KVLayout,
    progress: ProgressCallback | None = None,
) -> None:
    """Compile what texts' programs need beside the model's own, so that no text waits for it."""
    kernels: dict[Kernel, None] = {}
    for graph in write_text_graphs(config, file, weights, kv_layout.layers):
        kernels |= dict.fromkeys(kernels_of_graph(graph, pool, kv_layout))
    compile_ahead(kernels, progress)


def prepare_text_programs(config: ModelConfig, file: ModelFile, model: GpuModel) -> None:
    """The same on GPUs, whose programs compile their kernels when they are written."""
    for kind in _further_kinds(config, file):
        classified = classified_rows(file.metadata, is_encoder=config.is_encoder)
        model.further_program(text_writer(config, kind, classified), MAX_BATCH_ROWS)

"""Kernels of the programs that give vectors and scores: compiled with the model, while a text can wait for them."""

from collections.abc import Sequence

from localinfer.kernels.cpu.lower import MAX_BATCH_ROWS, kernels_of_graph
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.jit.compile_ahead import compile_ahead
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import KVLayerShape, OpGraph, WeightSource
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.pooling import Pooling, classified_rows, read_pooling
from localinfer.models.decoder.text_head import write_text_model
from localinfer.models.load.programs import GpuModel, GraphWriter
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.types import ProgressCallback


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
    return lambda weights, kv_layers, marks: write_text_model(
        config, weights, pooling, classified, config.context_length, kv_layers=kv_layers, marks=marks
    )


def _further_kinds(config: ModelConfig, file: ModelFile) -> list[Pooling]:
    """Poolings whose programs have other kernels than the model's own."""
    kinds = []
    if config.is_encoder or "dense_2.weight" in file.tensors:
        # Other poolings take single rows, as NONE does, or as LAST does go through matrices as well.
        kinds = [Pooling.MEAN, Pooling.LAST, Pooling.NONE]
    if read_pooling(file.metadata) is Pooling.RANK:
        kinds.append(Pooling.RANK)
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

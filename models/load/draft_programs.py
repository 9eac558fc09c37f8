"""Programs of a model's own layers for next-token prediction, over its cache."""

from dataclasses import replace

import numpy as np

from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import WeightSource
from localinfer.kernels.program import HiddenProgram
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes, write_draft_layer
from localinfer.models.decoder.draft_layers import short_head_tokens
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.types import ProgressCallback


def has_draft_layers(file: ModelFile) -> bool:
    """Whether a file says that it brings layers for next-token prediction."""
    found = file.metadata.get(f"{file.metadata.get('general.architecture')}.nextn_predict_layers")
    # What is no number of layers is refused where it is read.
    return bool(found.any()) if isinstance(found, np.ndarray) else bool(found)


def with_draft_layers(config: ModelConfig, kv_layout: KVLayout) -> KVLayout:
    """The layout of a model's cache with its draft layers, which `config` counts, and what they carry."""
    layers, states = kv_layer_shapes(config, parts_windows=True), state_shapes(config)
    return replace(kv_layout, layers=layers, states=states, carried_size=config.hidden_size)


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
    if not config.num_draft_layers:
        return ()

    def written(layer: int, num_tokens: int | None) -> CpuProgram:
        graph = write_draft_layer(
            config, weights, layer, config.context_length, kv_layers=kv_layout.layers, num_tokens=num_tokens
        )
        program = lower_to_cpu(graph, pool, kv_layout, max_batch_rows=1, max_output_rows=1, progress=progress)
        program.decode_threads, program.is_measured = main.decode_threads, main.is_measured
        return program

    heads = (None, short_head_tokens(config.vocab_size) or None)
    return tuple(
        tuple(written(layer, num_tokens) for layer in range(config.num_main_layers, config.num_layers))
        for num_tokens in dict.fromkeys(heads)
    )

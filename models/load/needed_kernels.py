"""Kernels that a model needs on the CPU, found without its weights from its settings and the types of its tensors."""

import os
from collections.abc import Iterator

from localinfer.kernels.cpu.lower import kernels_of_graph
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import OpGraph
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes, write_decoder, write_draft_layer
from localinfer.models.decoder.gemma_blocks import write_assistant
from localinfer.models.load.assistant import Target, open_assistant
from localinfer.models.load.loader import SHARED_KERNELS, open_model_file, read_config
from localinfer.models.load.model_changes import ModelChanges
from localinfer.models.load.programs import with_draft_layers, write_text_graphs
from localinfer.models.load.weights import NO_POOL, UnreadWeights
from localinfer.quant.checkpoint.model_file import ModelFile

_SUMMED_TOKENS = 1024


def needed_kernels(
    path: str | os.PathLike[str],
    *,
    kv_type: str = "f16",
    has_window: bool = False,
    draft_layers: bool = False,
    assistant: str | os.PathLike[str] | None = None,
    changes: ModelChanges | None = None,
) -> list[Kernel]:
    """Every kernel that loading a model with these options compiles, if it is missing; see `load_model`.

    Raises: ModelFileError or a subclass; RequestError for an invalid option.
    """
    file = open_model_file(path, changes)
    try:
        config = read_config(file)
        layout = KVLayout(kv_type, kv_layer_shapes(config, parts_windows=True), state_shapes(config))
        if draft_layers and assistant is None:
            found = read_config(file, with_draft_layers=True)
            if found.num_draft_layers:
                config, layout = found, with_draft_layers(found, layout)
        return kernels_of_file(file, config, layout, has_window=has_window, assistant=assistant, changes=changes)
    finally:
        file.close()


def kernels_of_file(
    file: ModelFile,
    config: ModelConfig,
    kv_layout: KVLayout,
    *,
    has_window: bool = False,
    assistant: str | os.PathLike[str] | None = None,
    changes: ModelChanges | None = None,
) -> list[Kernel]:
    """The same of a file that is open.

    config, kv_layout: with draft layers if those are loaded too. Raises: ModelFileError or a subclass for a model that
    cannot run; ShapeError for sizes that no kernel computes.
    """
    kernels = dict.fromkeys(SHARED_KERNELS)
    summed = _SUMMED_TOKENS if has_window and not config.is_encoder else 0
    for graph in _graphs(file, config, kv_layout, assistant, changes):
        kernels |= dict.fromkeys(kernels_of_graph(graph, NO_POOL, kv_layout, summed))
    return list(kernels)


def _graphs(
    file: ModelFile,
    config: ModelConfig,
    kv_layout: KVLayout,
    assistant: str | os.PathLike[str] | None,
    changes: ModelChanges | None,
) -> Iterator[OpGraph]:
    """The graphs of a model: its own, those that draft, and those that give vectors and scores."""
    weights, length = UnreadWeights(file), config.context_length
    yield write_decoder(config, weights, length, kv_layers=kv_layout.layers, shows_states=assistant is not None)
    weights.check_asked(config)
    for layer in range(config.num_main_layers, config.num_layers):
        yield write_draft_layer(config, weights, layer, length, kv_layers=kv_layout.layers)
    yield from write_text_graphs(config, file, weights, kv_layout.layers)
    if assistant is not None:
        drafter = open_assistant(assistant, Target(file, config, kv_layout), changes)
        try:
            yield write_assistant(drafter.config, UnreadWeights(drafter.file), config, weights, kv_layout.layers)
        finally:
            drafter.file.close()

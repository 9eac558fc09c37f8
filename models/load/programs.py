"""A model's program: on the CPU, on a GPU, or its layers, and its experts, on several devices."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from localinfer.errors import BackendUnavailableError, OutOfMemoryError
from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import KVLayerShape, OpGraph, WeightSource
from localinfer.kernels.program import Program
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import crosses_layers, kv_layer_shapes, write_decoder
from localinfer.models.load.devices import GPU_BATCH_ROWS, close_all, report_fallback
from localinfer.models.load.placement import Placement
from localinfer.models.load.threads import choose_decode_threads
from localinfer.models.load.weights import CpuWeights, CudaWeights
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.types import ProgressCallback

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """The parts from which a program is written on any device."""

    config: ModelConfig
    file: ModelFile
    pool: ThreadPool
    kv_type: str
    progress: ProgressCallback | None
    chooses_threads: bool
    measures_again: bool = False
    may_measure: bool = True
    kv_window: int | None = None

    def summed_tokens(self, batch_rows: int, page_tokens: int) -> int:
        """Positions of a sequence at most whose attention a program of so many rows sums by page; 0 for none."""
        # A batch may begin and end inside a page.
        return 0 if self.kv_window is None else self.kv_window + batch_rows + 2 * page_tokens


GraphWriter = Callable[[WeightSource, Sequence[KVLayerShape] | None, list[int]], OpGraph]
"""Writes a graph of some weights and layers of the cache; the list gets the `marks` of `write_decoder`."""


@dataclass(frozen=True)
class GpuModel:
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
    parts: Parts, weights: CpuWeights, kv_layout: KVLayout, max_summed_tokens: int, *, shows_states: bool = False
) -> CpuProgram:
    """The program on the CPU. kv_layout, max_summed_tokens: see `lower_to_cpu`; shows_states: see `write_decoder`."""
    graph = write_decoder(
        parts.config,
        weights,
        parts.config.context_length,
        kv_layers=kv_layout.layers,
        shows_states=shows_states,
    )
    weights.check_asked(parts.config)
    program = lower_to_cpu(graph, parts.pool, kv_layout, max_summed_tokens=max_summed_tokens, progress=parts.progress)
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


def write_on_gpus(
    parts: Parts, gpus: Sequence[CudaDevice], placement: Placement, *, is_required: bool
) -> GpuModel | None:
    """The program with the chosen layers on GPUs; None, after logging the reason, if it cannot run there.

    Raises: BackendUnavailableError, OutOfMemoryError if a GPU is required.
    """
    try:
        check_runs_on_gpus(parts.config, placement, has_window=parts.kv_window is not None)
        if placement.is_whole:
            return _write_whole(parts, gpus[0])
        from localinfer.models.load.pipeline import write_pipeline

        return write_pipeline(parts, gpus, placement)
    except BaseException as error:
        close_all(gpus)
        if is_required or not isinstance(error, BackendUnavailableError | OutOfMemoryError):
            raise
        report_fallback(error)
        return None


def check_runs_on_gpus(config: ModelConfig, placement: Placement, *, has_window: bool = False) -> None:
    """Raise BackendUnavailableError for a model that does not run so on GPUs.

    has_window: texts evict keys and values.
    """
    if config.indexer is not None:
        raise BackendUnavailableError(
            f"the sparse attention of {config.architecture} models is computed on the CPU only; take device 'cpu'"
        )
    if placement.is_whole or not (has_window or crosses_layers(config)):
        return
    held = f"the GPU was to hold {placement.num_gpu_layers} of {placement.num_layers} layers"
    if len(placement.gpus) > 1:
        held = f"{len(placement.gpus)} GPUs were to share it"
    elif placement.num_split_layers:
        held = "the experts were to stay on the CPU"
    if has_window:
        raise BackendUnavailableError(
            f"kv_window evicts by the attention of all layers, which one device has to measure, and {held}; leave it "
            "out, or take a smaller quantization, or device 'cpu'"
        )
    raise BackendUnavailableError(
        f"the layers of this {config.architecture} model read more than the layer before them wrote, so all of it "
        f"runs on one device, and {held}; take a smaller context_length or quantization, or device 'cpu'"
    )


def _write_whole(parts: Parts, gpu: CudaDevice) -> GpuModel:
    """A program on the GPU alone."""
    from localinfer.kernels.cuda.lower import lower_to_cuda
    from localinfer.kernels.cuda.memory import DeviceKVLayout, SharedMemory

    layout = DeviceKVLayout(parts.kv_type, kv_layer_shapes(parts.config), device=gpu)
    weights = CudaWeights(parts.file, parts.pool, gpu, parts.progress)
    shared = SharedMemory(gpu)
    lower = partial(lower_to_cuda, device=gpu, kv_layout=layout, shared=shared, progress=parts.progress)

    def further(write: GraphWriter, max_rows: int) -> Program:
        graph = write(weights, layout.layers, [])
        return lower(graph, max_batch_rows=max_rows, max_output_rows=max_rows, samples=False)

    graph = decoder_writer(parts.config)(weights, layout.layers, [])
    weights.check_asked(parts.config)
    summed_tokens = parts.summed_tokens(GPU_BATCH_ROWS, layout.page_tokens)
    program = lower(graph, max_batch_rows=GPU_BATCH_ROWS, max_summed_tokens=summed_tokens)
    note(parts.file, list(weights.notes.values()))
    return GpuModel(program, layout, further)


def note(file: ModelFile, notes: Sequence[str]) -> None:
    """Log converted tensor types and unused layers."""
    for text in notes:
        logger.warning("%s", text)
    for text in getattr(file, "notices", ()):
        logger.warning("%s: %s", file.path.name, text)

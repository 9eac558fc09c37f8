"""A model's program: on the CPU, on a GPU, or its first layers on the one and the others on the other."""

import logging
from dataclasses import dataclass

from localinfer.errors import BackendUnavailableError, OutOfMemoryError
from localinfer.kernels.cpu.lower import MAX_BATCH_ROWS, lower_to_cpu
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import Program
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import (
    crosses_layers,
    kv_layer_shapes,
    write_decoder,
    write_first_layers,
    write_last_layers,
)
from localinfer.models.load.devices import Placement, report_fallback
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
    _note(parts.file, weights)
    return program


def write_on_gpu(
    parts: Parts, gpu: CudaDevice, placement: Placement, *, is_required: bool
) -> tuple[Program, KVLayout] | None:
    """The program with the chosen layers on a GPU; None, after logging the reason, if it cannot run there.

    Raises: BackendUnavailableError, OutOfMemoryError if the GPU is required.
    """
    try:
        _check_placement(parts.config, placement)
        return _write_whole(parts, gpu) if placement.is_whole else _write_split(parts, gpu, placement)
    except BaseException as error:
        gpu.close()
        if is_required or not isinstance(error, BackendUnavailableError | OutOfMemoryError):
            raise
        report_fallback(error)
        return None


def _check_placement(config: ModelConfig, placement: Placement) -> None:
    """Raise BackendUnavailableError for a model that does not run so on a GPU."""
    if config.indexer is not None:
        raise BackendUnavailableError(
            f"the sparse attention of {config.architecture} models is computed on the CPU only; take device 'cpu'"
        )
    if crosses_layers(config) and not placement.is_whole:
        raise BackendUnavailableError(
            f"the layers of this {config.architecture} model read more than the layer before them wrote, so all of it "
            f"runs on one device, and the GPU was to hold {placement.num_gpu_layers} of {placement.num_layers} layers; "
            "take a smaller context_length or quantization, or device 'cpu'"
        )


def _write_whole(parts: Parts, gpu: CudaDevice) -> tuple[Program, KVLayout]:
    """A program on the GPU alone."""
    from localinfer.kernels.cuda.lower import check_kv_types, lower_to_cuda
    from localinfer.kernels.cuda.memory import DeviceKVLayout

    config = parts.config
    layout = DeviceKVLayout(parts.kv_type, kv_layer_shapes(config), device=gpu)
    weights = CudaWeights(parts.file, parts.pool, gpu, parts.progress)
    check_kv_types(layout)
    graph = write_decoder(config, weights, config.context_length, kv_layers=layout.layers)
    weights.check_asked(config)
    program = lower_to_cuda(graph, gpu, layout, progress=parts.progress)
    _note(parts.file, weights)
    return program, layout


def _write_split(parts: Parts, gpu: CudaDevice, placement: Placement) -> tuple[Program, KVLayout]:
    """A program whose first layers run on the CPU; the GPU's part is made first, as it may run out of memory."""
    from localinfer.kernels.cuda.lower import check_kv_types, lower_to_cuda
    from localinfer.kernels.cuda.memory import SplitKVLayout
    from localinfer.kernels.cuda.offload import SplitProgram

    config, progress = parts.config, parts.progress
    num_first = config.num_layers - placement.num_gpu_layers
    layout = SplitKVLayout(parts.kv_type, kv_layer_shapes(config), num_host_layers=num_first, device=gpu)
    on_gpu = CudaWeights(parts.file, parts.pool, gpu, progress)
    check_kv_types(layout)
    graph = write_last_layers(config, on_gpu, num_first, config.context_length, layout.device_part.layers)
    rest = lower_to_cuda(graph, gpu, layout.device_part, max_batch_rows=MAX_BATCH_ROWS, progress=progress)
    on_cpu = CpuWeights(parts.file, parts.pool, progress)
    graph = write_first_layers(config, on_cpu, num_first, config.context_length, layout.host_part.layers)
    on_cpu.asked |= on_gpu.asked
    on_cpu.check_asked(config)
    first = lower_to_cpu(graph, parts.pool, layout.host_part, max_output_rows=MAX_BATCH_ROWS, progress=progress)
    if parts.chooses_threads and num_first:
        part_bytes = parts.file.num_bytes * num_first // config.num_layers
        choose_decode_threads(
            first,
            layout.host_part,
            part_bytes,
            progress,
            measure_again=parts.measures_again,
            may_measure=parts.may_measure,
        )
    on_cpu.notes.update(on_gpu.notes)
    _note(parts.file, on_cpu)
    return SplitProgram(first, rest, layout), layout


def _note(file: ModelFile, weights: CpuWeights) -> None:
    """Log converted tensor types and unused layers."""
    for note in weights.notes.values():
        logger.warning("%s", note)
    for note in getattr(file, "notices", ()):
        logger.warning("%s: %s", file.path.name, note)

"""A model's program on a GPU, or on several devices: its graph, written once, is cut and lowered part by part.

The parts are the CPU, if it has any work, and the GPUs in the order of their layers.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from localinfer.errors import BackendUnavailableError, OutOfMemoryError
from localinfer.kernels import ops
from localinfer.kernels.cpu.lower import MAX_BATCH_ROWS, lower_to_cpu
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.memory import DeviceKVLayout, SharedMemory
from localinfer.kernels.cuda.pipeline import PipelineProgram
from localinfer.kernels.cuda.sharded_pages import KVPart, ShardedKVLayout
from localinfer.kernels.ops import OpGraph
from localinfer.kernels.program import Program, StagedProgram
from localinfer.models.decoder.checked_weights import ShapeWeights
from localinfer.models.decoder.decoder import kv_layer_shapes
from localinfer.models.decoder.graph_parts import CutGraph, cut_graph
from localinfer.models.load.device_request import GPU_BATCH_ROWS, report_fallback
from localinfer.models.load.devices import close_all
from localinfer.models.load.placement import DevicePlacement, check_runs_on_gpus
from localinfer.models.load.programs import GpuModel, GraphWriter, Parts, batch_rows_of, decoder_writer, note
from localinfer.models.load.threads import choose_decode_threads
from localinfer.models.load.weights import CpuWeights, CudaWeights, PlacedWeights, parts_of_weights


def write_on_gpus(
    parts: Parts, gpus: Sequence[CudaDevice], placement: DevicePlacement, *, is_required: bool
) -> GpuModel | None:
    """The program with the chosen layers on GPUs; None, after logging the reason, if it cannot run there.

    Raises: BackendUnavailableError, OutOfMemoryError if a GPU is required.
    """
    try:
        check_runs_on_gpus(parts.config, placement, has_window=parts.window_tokens is not None)
        if placement.is_whole:
            return _write_whole(parts, gpus[0])
        return _write_pipeline(parts, gpus, placement)
    except BaseException as error:
        close_all(gpus)
        if is_required or not isinstance(error, BackendUnavailableError | OutOfMemoryError):
            raise
        report_fallback(error)
        return None


def _write_whole(parts: Parts, gpu: CudaDevice) -> GpuModel:
    """A program on the GPU alone."""
    layout = DeviceKVLayout(parts.kv_type, kv_layer_shapes(parts.config), device=gpu)
    weights = CudaWeights(parts.file, parts.pool, gpu, parts.progress)
    shared = SharedMemory(gpu)
    lower = partial(lower_to_cuda, device=gpu, kv_layout=layout, shared=shared, progress=parts.progress)

    def further(write: GraphWriter, max_rows: int) -> Program:
        graph = write(weights, layout.layers, [])
        return lower(graph, max_batch_rows=max_rows, max_output_rows=max_rows, samples=False)

    graph = decoder_writer(parts.config)(weights, layout.layers, [])
    weights.check_asked(parts.config)
    rows = batch_rows_of(parts.config, GPU_BATCH_ROWS)
    program = lower(graph, max_batch_rows=rows, max_summed_tokens=parts.summed_tokens(rows, layout.page_tokens))
    note(parts.file, list(weights.notes.values()))
    return GpuModel(program, layout, further)


def _write_pipeline(parts: Parts, gpus: Sequence[CudaDevice], placement: DevicePlacement) -> GpuModel:
    """The program of a placement, the layout of its cache, and further programs over the same parts.

    The GPUs' parts are made first, as they may run out of memory. Raises: as `lower_to_cpu` and `lower_to_cuda`.
    """
    made = _Pipeline(parts, placement, gpus, _layout(parts, gpus, placement))
    cut, weights = made.cut(decoder_writer(parts.config))
    weights.check_asked(parts.config)
    usual_rows = MAX_BATCH_ROWS if placement.uses_cpu else GPU_BATCH_ROWS
    program, on_cpu = made.lower(cut, batch_rows_of(parts.config, usual_rows))
    # To look up embeddings takes no threads.
    is_busy = placement.num_gpu_layers < placement.num_layers or placement.num_split_layers > 0
    if on_cpu is not None and parts.chooses_threads and is_busy:
        choose_decode_threads(
            on_cpu,
            made.layouts[0],
            placement.host_bytes,
            parts.progress,
            measure_again=parts.measures_again,
            may_measure=parts.may_measure,
        )
    note(parts.file, weights.notes)
    return GpuModel(program, made.layout, made.further)


class _Pipeline:
    """Builder of the programs of one placement: weights, memory and the cache's layers of each of its devices."""

    def __init__(
        self, parts: Parts, placement: DevicePlacement, gpus: Sequence[CudaDevice], layout: ShardedKVLayout
    ) -> None:
        self._parts, self._placement, self._gpus = parts, placement, gpus
        self.layout = layout
        self.layouts = [layout.part_layout(part) for part in range(len(layout.parts))]
        host = [CpuWeights(parts.file, parts.pool, parts.progress)] if placement.uses_cpu else []
        self._sources = [*host, *(CudaWeights(parts.file, parts.pool, gpu, parts.progress) for gpu in gpus)]
        self._shared = [SharedMemory(gpu) for gpu in gpus]

    def cut(self, write: GraphWriter) -> tuple[CutGraph, PlacedWeights]:
        """A graph as every part has it, and its weights."""
        shapes = ShapeWeights({name: one.shape for name, one in self._parts.file.tensors.items()})
        marks: list[int] = []
        planned = write(shapes, self.layout.layers, marks)
        assigned = assign_ops(planned, marks, self._placement)
        weights = PlacedWeights(self._sources, parts_of_weights(planned, assigned))
        graph = write(weights, self.layout.layers, [])
        return cut_graph(graph, assigned, [part.layers for part in self.layouts]), weights

    def lower(
        self, cut: CutGraph, max_rows: int, *, output_rows: int = 64, samples: bool = True
    ) -> tuple[PipelineProgram, CpuProgram | None]:
        """The program of a graph, and the part of it that the CPU has, if it has any."""
        first_gpu = len(cut.graphs) - len(self._gpus)
        on_gpus = [
            lower_to_cuda(
                graph,
                gpu,
                layout,
                max_batch_rows=max_rows,
                max_output_rows=output_rows,
                shared=shared,
                samples=samples,
                progress=self._parts.progress,
            )
            for gpu, graph, layout, shared in zip(
                self._gpus, cut.graphs[first_gpu:], self.layouts[first_gpu:], self._shared, strict=True
            )
        ]
        programs: list[StagedProgram] = [*on_gpus]
        on_cpu = None
        if first_gpu:
            on_cpu = lower_to_cpu(
                cut.graphs[0],
                self._parts.pool,
                self.layouts[0],
                max_batch_rows=max_rows,
                max_output_rows=output_rows,
                progress=self._parts.progress,
            )
            programs.insert(0, on_cpu)
        return PipelineProgram(programs, on_gpus[-1], cut.stages, self.layout), on_cpu

    def further(self, write: GraphWriter, max_rows: int) -> Program:
        """Another program over the same weights and cache; see `programs.GpuModel`."""
        cut, _ = self.cut(write)
        return self.lower(cut, max_rows, output_rows=max_rows, samples=False)[0]


def assign_ops(graph: OpGraph, marks: Sequence[int], placement: DevicePlacement) -> list[int]:
    """The part that computes each op. marks: the number of ops before each layer, and before what follows the last.

    Experts that stay on the CPU are chosen, multiplied and summed there.
    """
    first_gpu = int(placement.uses_cpu)
    owners = [0] * placement.gpus[0].first
    for number, share in enumerate(placement.gpus, first_gpu):
        owners += [number] * (share.end - share.first)
    # Before the layers, and after them.
    owners = [first_gpu if placement.has_embedding else 0, *owners, first_gpu + len(placement.gpus) - 1]
    found: list[int] = []
    is_in_experts = False
    for index, op in enumerate(graph.ops):
        layer = bisect_right(marks, index) - 1
        has_cpu_experts = 0 <= layer < placement.cpu_experts
        is_in_experts = has_cpu_experts and (is_in_experts or isinstance(op, ops.Route))
        found.append(0 if is_in_experts else owners[layer + 1])
        if isinstance(op, ops.ExpertSum):
            is_in_experts = False
    return found


def _layout(parts: Parts, gpus: Sequence[CudaDevice], placement: DevicePlacement) -> ShardedKVLayout:
    """Pages with the layers of each device on it; those of an encoder, which share one, have it on every device."""
    computed: list[tuple[CudaDevice | None, range]] = []
    if placement.uses_cpu:
        computed.append((None, range(placement.gpus[0].first)))
    computed += [(gpu, range(share.first, share.end)) for gpu, share in zip(gpus, placement.gpus, strict=True)]
    kinds = []
    for gpu, layers in computed:
        kinds += ["cpu" if gpu is None else "sm_{}{}".format(*gpu.capability)] * len(layers)
    if parts.config.is_encoder:
        computed = [(gpu, range(min(1, len(layers)))) for gpu, layers in computed]
    held = [KVPart(gpu, layers.start, layers.stop) for gpu, layers in computed]
    computed_by = ", ".join(f"{kind}: {len(list(same))}" for kind, same in groupby(kinds))
    if placement.num_split_layers:
        computed_by += f", experts on cpu: {placement.cpu_experts}"
    return ShardedKVLayout(parts.kv_type, kv_layer_shapes(parts.config), parts=tuple(held), computed_by=computed_by)

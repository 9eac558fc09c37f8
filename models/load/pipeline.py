"""A model's program on several devices: its graph is written once, cut by a placement, and lowered part by part.

The parts are the CPU, if it has any work, and the GPUs in the order of their layers.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from localinfer.kernels import ops
from localinfer.kernels.cpu.lower import MAX_BATCH_ROWS, lower_to_cpu
from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.parted_pages import KVPart, PartedKVLayout
from localinfer.kernels.cuda.pipeline import PipelineProgram
from localinfer.kernels.ops import OpGraph, WeightSource
from localinfer.kernels.program import StagedProgram
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, write_decoder
from localinfer.models.decoder.graph_parts import cut_graph
from localinfer.models.decoder.shape_weights import ShapeWeights
from localinfer.models.load.placed_weights import PlacedWeights, parts_of_weights
from localinfer.models.load.placement import Placement
from localinfer.models.load.threads import choose_decode_threads
from localinfer.models.load.weights import CpuWeights, CudaWeights

if TYPE_CHECKING:
    from localinfer.models.load.programs import Parts

GPU_BATCH_ROWS = 1024
"""Rows of a batch that GPUs compute alone."""


def write_pipeline(
    parts: "Parts", gpus: Sequence[CudaDevice], placement: Placement
) -> tuple[PipelineProgram, PartedKVLayout, list[str]]:
    """The program of a placement, the layout of its cache, and what tensor types were converted to.

    The GPUs' parts are made first, as they may run out of memory. Raises: as `lower_to_cpu` and `lower_to_cuda`.
    """
    config, file, progress = parts.config, parts.file, parts.progress
    layout = _layout(parts, gpus, placement)
    planned, marks = _written(config, ShapeWeights({name: one.shape for name, one in file.tensors.items()}), layout)
    assigned = assign_ops(planned, marks, placement)
    host = [CpuWeights(file, parts.pool, progress)] if placement.uses_cpu else []
    sources = [*host, *(CudaWeights(file, parts.pool, gpu, progress) for gpu in gpus)]
    weights = PlacedWeights(sources, parts_of_weights(planned, assigned))
    graph, _ = _written(config, weights, layout)
    weights.check_asked(config)
    layouts = [layout.part_layout(part) for part in range(len(layout.parts))]
    cut = cut_graph(graph, assigned, [part.layers for part in layouts])
    max_rows = MAX_BATCH_ROWS if host else GPU_BATCH_ROWS
    on_gpus = [
        lower_to_cuda(part, gpu, of_part, max_batch_rows=max_rows, progress=progress)
        for gpu, part, of_part in zip(gpus, cut.graphs[len(host) :], layouts[len(host) :], strict=True)
    ]
    programs: list[StagedProgram] = [*on_gpus]
    if host:
        on_cpu = lower_to_cpu(cut.graphs[0], parts.pool, layouts[0], progress=progress)
        # To look up embeddings takes no threads.
        is_busy = placement.num_gpu_layers < placement.num_layers or placement.num_split_layers > 0
        if parts.chooses_threads and is_busy:
            choose_decode_threads(
                on_cpu,
                layouts[0],
                placement.host_bytes,
                progress,
                measure_again=parts.measures_again,
                may_measure=parts.may_measure,
            )
        programs.insert(0, on_cpu)
    return PipelineProgram(programs, on_gpus[-1], cut.stages, layout), layout, weights.notes


def assign_ops(graph: OpGraph, marks: Sequence[int], placement: Placement) -> list[int]:
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


def _layout(parts: "Parts", gpus: Sequence[CudaDevice], placement: Placement) -> PartedKVLayout:
    """Pages with the layers of each device on it."""
    shares = zip(gpus, placement.gpus, strict=True)
    held = [KVPart(gpu, share.first, share.end) for gpu, share in shares]
    first = placement.gpus[0].first
    if placement.uses_cpu:
        held.insert(0, KVPart(None, 0, first))
    kinds = ["cpu"] * first
    for part in held:
        if part.device is not None:
            kinds += ["sm_{}{}".format(*part.device.capability)] * (part.end - part.first)
    computed_by = ", ".join(f"{kind}: {len(list(layers))}" for kind, layers in groupby(kinds))
    if placement.num_split_layers:
        computed_by += f", experts on cpu: {placement.cpu_experts}"
    return PartedKVLayout(parts.kv_type, kv_layer_shapes(parts.config), parts=tuple(held), computed_by=computed_by)


def _written(config: ModelConfig, weights: WeightSource, layout: PartedKVLayout) -> tuple[OpGraph, list[int]]:
    """The whole graph, and the numbers of ops before its layers."""
    marks: list[int] = []
    return write_decoder(config, weights, config.context_length, kv_layers=layout.layers, marks=marks), marks

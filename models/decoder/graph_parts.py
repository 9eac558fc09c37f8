"""A graph cut for several devices: a graph for each, and the stages in which they take turns.

Which device computes an op is given; what has to be copied between them follows from what the ops read and write.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

from localinfer.kernels import ops
from localinfer.kernels.ops import Buffer, KVLayerShape, Matmul, Op, OpGraph, Projection, StageBoundary
from localinfer.kernels.program import PlacedStage
from localinfer.types import Record


def buffers_of(record: Op | Projection) -> Iterator[Buffer]:
    """Every buffer that an op names."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Buffer):
            yield value
        elif isinstance(value, ops.SparseSelection):
            yield value.blocks
        elif field.name == "projections":
            for projection in value:
                yield from buffers_of(projection)


def written_by(op: Op) -> list[int]:
    """Buffers that an op writes: its outputs, or what it changes in place; none for what writes the cache."""
    if isinstance(op, Matmul):
        return [projection.out.index for projection in op.projections]
    if isinstance(op, ops.Route):
        return [op.expert_ids.index, op.expert_weights.index]
    if isinstance(op, ops.StoreKV):
        return []
    if isinstance(op, ops.ChooseBlocks):
        return [op.chosen.blocks.index]
    names = {field.name for field in fields(op)}
    out: Buffer = getattr(op, "out" if "out" in names else "x")
    return [out.index]


def read_by(op: Op) -> set[int]:
    """Buffers that an op reads, among them those that it also writes."""
    outputs = {"out", "expert_ids", "expert_weights"} if isinstance(op, ops.Route) else {"out"}
    found = {
        value.index
        for field in fields(op)
        if field.name not in outputs and isinstance(value := getattr(op, field.name), Buffer)
    }
    if isinstance(op, Matmul):
        found |= {one.residual.index for one in op.projections if one.residual is not None}
    chosen = getattr(op, "chosen", None)
    if isinstance(op, ops.Attention) and chosen is not None:
        found.add(chosen.blocks.index)
    relative = getattr(op, "relative", None)
    if isinstance(op, ops.Attention) and relative is not None:
        found |= {one.index for one in (relative.by_row, relative.by_key) if one is not None}
    # What was there before is a part of the result.
    return found if is_whole(op) else found | set(written_by(op))


def is_whole(op: Op) -> bool:
    """Return whether an op writes all of its output, so that what was there before is not needed for it."""
    if isinstance(op, ops.EmbedTypes):
        return not op.adds
    return not isinstance(op, ops.CopyHeads | ops.HeadMatmul | ops.EmbedPositions | ops.EmbedMedia)


class CutGraph(Record):
    """The graph of each part, and the stages in the order in which they run."""

    graphs: tuple[OpGraph, ...]
    stages: tuple[PlacedStage, ...]


@dataclass
class _Stage:
    """Ops of one part in a row."""

    part: int
    number: int
    ops: list[Op]
    uploads: dict[int, int]
    """Buffers that they need of other parts, and the number of the part that has each."""
    downloads: set[int]
    """Buffers that other parts need of them."""


def cut_graph(graph: OpGraph, parts: Sequence[int], kv_layers: Sequence[Sequence[KVLayerShape]]) -> CutGraph:
    """Cut a graph; parts: which part computes each op, as a number. kv_layers: of each part, its layers of the cache.

    Every part has ops. The results of the whole are those of its last stage.
    """
    stages: list[_Stage] = []
    counts = [0] * len(kv_layers)
    for part, pairs in groupby(zip(parts, graph.ops, strict=True), key=lambda pair: pair[0]):
        stages.append(_Stage(part, counts[part], [op for _, op in pairs], {}, set()))
        counts[part] += 1
    _find_copies(stages)
    assert stages[-1].ops[-1] is graph.ops[-1], "results come last"
    graphs = tuple(
        _graph_of(graph, [stage for stage in stages if stage.part == part], layers)
        for part, layers in enumerate(kv_layers)
    )
    placed = [
        PlacedStage(
            stage.part,
            # Before the first stage of a part there is a boundary, if it needs any buffer of others.
            stage.number + _begins_with_boundary(stages, stage.part),
            tuple((graph.buffers[index], source) for index, source in sorted(stage.uploads.items())),
        )
        for stage in stages
    ]
    return CutGraph(graphs, tuple(placed))


def _begins_with_boundary(stages: Sequence[_Stage], part: int) -> bool:
    return bool(next(stage for stage in stages if stage.part == part).uploads)


def _find_copies(stages: Sequence[_Stage]) -> None:
    """Note in each stage the buffers that it needs of other parts, and in theirs that they are needed."""
    holders: dict[int, dict[int, _Stage]] = {}
    for stage in stages:
        written: set[int] = set()
        for op in stage.ops:
            for index in sorted(read_by(op) - written):
                # What the stage did not write itself has to be here, as the last that wrote it left it. What no
                # stage did is being filled part by part.
                if index in holders and stage.part not in holders[index]:
                    source, source_stage = next(iter(holders[index].items()))
                    stage.uploads[index] = source
                    source_stage.downloads.add(index)
                    holders[index][stage.part] = stage
            written |= set(written_by(op))
        for index in written:
            holders[index] = {stage.part: stage}


def _graph_of(graph: OpGraph, stages: Sequence[_Stage], kv_layers: Sequence[KVLayerShape]) -> OpGraph:
    """The graph of one part: its stages' ops, with boundaries between them, and before the first if it needs any."""
    ops: list[Op] = []
    downloads: set[int] = set()
    for number, stage in enumerate(stages):
        if number or stage.uploads:
            ops.append(StageBoundary(_buffers(graph, downloads), _buffers(graph, set(stage.uploads))))
        ops += stage.ops
        downloads = stage.downloads
    if downloads:
        ops.append(StageBoundary(_buffers(graph, downloads), ()))
    used = {buffer.index for op in ops if not isinstance(op, StageBoundary) for buffer in buffers_of(op)}
    # Buffers keep their numbers; those of other parts take no memory.
    buffers = tuple(one if one.index in used else replace(one, width=0) for one in graph.buffers)
    output = graph.output
    if output.index not in used:
        output = graph.buffers[min(used)]
    return replace(
        graph, kv_layers=tuple(kv_layers), buffers=buffers, ops=tuple(ops), output=output, typed_ops=frozenset()
    )


def _buffers(graph: OpGraph, indices: set[int]) -> tuple[Buffer, ...]:
    return tuple(graph.buffers[index] for index in sorted(indices))

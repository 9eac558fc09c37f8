"""Which buffers the ops of a graph read and write, for what leaves ops out or shares them out."""

from collections.abc import Iterator
from dataclasses import fields

from localinfer.kernels import ops
from localinfer.kernels.ops import Buffer, Matmul, Op, Projection


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
    """Whether an op writes all of its output, so that what was there before is not needed for it."""
    return not isinstance(op, ops.CopyHeads | ops.HeadMatmul | ops.EmbedPositions | ops.EmbedTypes)

"""Weights of a model that several devices compute: each is packed for, and read by, the device that needs it."""

from collections.abc import Mapping, Sequence

from localinfer.kernels import ops
from localinfer.kernels.ops import EmbeddingTable, LinearWeight, OpGraph
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.load.weights import CpuWeights
from localinfer.types import FloatArray

WeightKey = tuple[bool, str]
"""Whether a tensor is read as an embedding table, and its name: a tied one is read as a matrix as well."""


class PlacedWeights:
    """A `WeightSource` that asks the weights of the part that computes with a tensor.

    sources: of each part. parts: the number of the part, by how a tensor is read.
    """

    def __init__(self, sources: Sequence[CpuWeights], parts: Mapping[WeightKey, int]) -> None:
        self._sources = sources
        self._parts = parts

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor."""
        return self._sources[0].has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return self._sources[0].shape(name)

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """Pack a matrix for its part; see `CpuWeights.linear`."""
        return self._sources[self._parts.get((False, name), 0)].linear(name, rows)

    def embedding(self, name: str) -> EmbeddingTable:
        """A table for its part; see `CpuWeights.embedding`."""
        return self._sources[self._parts.get((True, name), 0)].embedding(name)

    def vector(self, name: str) -> FloatArray:
        """A small tensor as float32, which every part may read."""
        return self._sources[0].vector(name)

    def check_asked(self, config: ModelConfig) -> None:
        """See `CpuWeights.check_asked`."""
        self._sources[0].check_asked(config)

    @property
    def notes(self) -> list[str]:
        """What types were converted to, on any part."""
        return list(dict.fromkeys(note for source in self._sources for note in source.notes.values()))


def parts_of_weights(graph: OpGraph, parts: Sequence[int]) -> dict[WeightKey, int]:
    """Which part reads each tensor; parts: which one computes each op of the graph."""
    found: dict[WeightKey, int] = {}
    for op, part in zip(graph.ops, parts, strict=True):
        if isinstance(op, ops.Embed | ops.EmbedPositions | ops.EmbedTypes):
            found[True, op.table.name] = part
        elif isinstance(op, ops.Matmul):
            found |= {(False, projection.weight.name): part for projection in op.projections}
        elif isinstance(op, ops.HeadMatmul | ops.ExpertMatmul):
            found[False, op.weight.name] = part
    return found

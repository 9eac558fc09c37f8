"""Weights that are packed once, however many tapes are written over them."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from localinfer.kernels.ops import EmbeddingTable, FloatArray, LinearWeight, WeightSource

Found = TypeVar("Found")


class RememberedWeights:
    """A `WeightSource` that asks another one once for each of its weights, and hands out the same after that."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._found: dict[tuple[object, ...], Any] = {}

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor."""
        return self._source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return self._source.shape(name)

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """A packed matrix, or some of its rows."""
        part = None if rows is None else (rows.start, rows.stop, rows.step)
        return self._once(("linear", name, part), lambda: self._source.linear(name, rows))

    def embedding(self, name: str) -> EmbeddingTable:
        """A table of rows."""
        return self._once(("embedding", name), lambda: self._source.embedding(name))

    def vector(self, name: str) -> FloatArray:
        """A small tensor as float32, in its own shape."""
        return self._once(("vector", name), lambda: self._source.vector(name))

    def _once(self, key: tuple[object, ...], make: Callable[[], Found]) -> Found:
        if key not in self._found:
            self._found[key] = make()
        return cast(Found, self._found[key])

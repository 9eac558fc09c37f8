"""Parts of ops: buffers of rows, handles of weights, and the base class of their records."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np

from localinfer.types import Record


class Rows(Enum):
    """The rows of a batch that a buffer holds: all, or those whose logits were asked for."""

    BATCH = "batch"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Handle of `rows x width` float32 values of a graph."""

    index: int
    name: str
    width: int
    rows: Rows

    @property
    def is_output(self) -> bool:
        """True if its rows are those with logits."""
        return self.rows is Rows.OUTPUT


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight matrix (or a stack of them, one per expert) as a device holds it."""

    name: str
    num_rows: int
    num_columns: int
    packed: Any = field(compare=False)
    """The device's own record, opaque to everything else, equality included."""
    num_experts: int = 1
    """Matrices of a stack; 1 for an ordinary matrix."""


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """A table of `num_rows` vectors of `width`."""

    name: str
    num_rows: int
    width: int
    packed: Any = field(compare=False)
    """The device's own record."""


class OpRecord(Record):
    """Base class of ops and of their parts: one equals another with equal numbers in its arrays, so none is hashed."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return False
        return all(_are_equal(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))

    __hash__ = None  # type: ignore[assignment]


def _are_equal(first: object, second: object) -> bool:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    return not isinstance(second, np.ndarray) and first == second

"""Changes from a checkpoint's tensor to GGUF's: rows in another order, parts of a tensor, values computed from it.

Sources: the published model code says what a checkpoint's tensor means, the GGUF specification and llama.cpp's graphs
what is read of a file.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Order = Callable[[int], NDArray[np.intp]]
"""The rows to take, by how many there are."""


class Change(ABC):
    """One change of a tensor. `is_arithmetic`: whether it computes, on float32; others move values of any type."""

    is_arithmetic: bool

    @abstractmethod
    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """The changed tensor. Raises: ValueError if the tensor has no such parts."""

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a changed tensor. Raises: ValueError if the tensor has no such parts."""
        # No memory is behind it, whatever its size, as long as the change takes views.
        return self.apply(np.broadcast_to(np.zeros((), np.float32), shape)).shape


@dataclass(frozen=True)
class RowOrder(Change):
    """Some rows, or all in another order: what can be done to quantized matrices too."""

    order: Order
    is_arithmetic = False

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """The rows in that order."""
        return values[self.order(values.shape[0])]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with as many rows as the order has."""
        return (len(self.order(shape[0])), *shape[1:])


@dataclass(frozen=True)
class ExpertRows(Change):
    """Every step-th row of each expert's matrix, from the first: what can be done to quantized stacks too.

    Plain stacks lie as [experts, columns, rows].
    """

    first: int
    step: int
    is_arithmetic = False

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """[experts, rows taken, columns]; of biases [experts, rows taken]."""
        taken = values[..., self.first :: self.step]
        return taken.swapaxes(1, 2) if taken.ndim == 3 else taken

    def order(self, num_rows: int) -> NDArray[np.intp]:
        """The rows taken of one expert's."""
        return np.arange(self.first, num_rows, self.step)


@dataclass(frozen=True)
class Moved(Change):
    """Values moved to other positions."""

    function: Callable[[NDArray[Any]], NDArray[Any]]
    is_arithmetic = False

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """The function's result."""
        return self.function(values)


@dataclass(frozen=True)
class Computed(Change):
    """Other values."""

    function: Callable[[NDArray[np.float32]], NDArray[Any]]
    is_arithmetic = True

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """The function's result in float32; what is beyond it is infinite, as in tensors that are taken as they are."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return np.asarray(self.function(values), np.float32)


@dataclass(frozen=True)
class Derived:
    """A tensor that is computed of several."""

    shape: tuple[int, ...]
    """Shape of its float32 values."""
    sources: tuple[str, ...]
    """GGUF's names of the tensors that it is made of."""
    function: Callable[..., NDArray[np.float32]]
    """Function of their values in float32, in that order."""


def adjacent_pairs(num_rows: int, num_heads: int, fraction: float = 1.0) -> NDArray[np.intp]:
    """The order of rows in which the two that rotate together, i and i + half in each head, lie side by side.

    fraction: of each head that rotates, its first rows.
    """
    head_dim, rest = divmod(num_rows, num_heads)
    rotary_size = int(head_dim * fraction)
    if rest or rotary_size % 2:
        raise ValueError(f"{num_rows} rows; wanted an even number for each of {num_heads} heads")
    rows = np.arange(num_rows).reshape(num_heads, head_dim)
    rotated = rows[:, :rotary_size].reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(num_heads, -1)
    return np.concatenate([rotated, rows[:, rotary_size:]], axis=1).reshape(-1)


def pairs_adjacent(num_heads: int, fraction: float = 1.0) -> RowOrder:
    """Rows of heads, from halves that rotate together to adjacent pairs."""
    return RowOrder(lambda num_rows: adjacent_pairs(num_rows, num_heads, fraction))


def pairs_in_halves(num_heads: int, fraction: float = 1.0) -> RowOrder:
    """Rows of heads, from adjacent pairs that rotate together to halves."""

    def order(num_rows: int) -> NDArray[np.intp]:
        # Where a row went on the way to adjacent pairs is where it comes from on the way back.
        return np.argsort(adjacent_pairs(num_rows, num_heads, fraction))

    return RowOrder(order)


def rows_between(first: float, end: float) -> RowOrder:
    """The rows between two fractions of all."""
    return RowOrder(lambda num_rows: np.arange(_whole(num_rows, first), _whole(num_rows, end)))


def _whole(num_rows: int, fraction: float) -> int:
    if (num_rows * fraction) % 1:
        raise ValueError(f"{num_rows} rows; wanted a number that can be divided")
    return int(num_rows * fraction)


FIRST_HALF, SECOND_HALF = rows_between(0.0, 0.5), rows_between(0.5, 1.0)
FIRST_HALVES = Moved(lambda values: _halved(values)[0])
"""First halves of each expert's matrix, in a stack."""
SECOND_HALVES = Moved(lambda values: _halved(values)[1])
TRANSPOSED = Moved(lambda values: values.swapaxes(-1, -2))
PLUS_ONE = Computed(lambda values: values + np.float32(1))
NEGATIVE_EXPONENTIAL = Computed(lambda values: -np.exp(values))
CONVOLUTION = Moved(lambda values: values.squeeze(1) if values.ndim == 3 else values)
"""[channels, 1, taps] without the middle; a bias as it is."""
COLUMN = Moved(lambda values: values.reshape(-1, 1))
FLAT = Moved(lambda values: values.reshape(-1))
UNIT_COLUMNS = Computed(lambda values: values / (np.linalg.norm(values, axis=0, keepdims=True) + np.float32(1e-7)))


def _halved(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    half, rest = divmod(values.shape[1], 2)
    if rest:
        raise ValueError(f"{values.shape[1]} rows in each matrix; wanted two halves")
    return values[:, :half], values[:, half:]


def per_group(num_groups: int) -> Moved:
    """[width] as [groups, width of one]."""
    return Moved(lambda values: values.reshape(num_groups, -1))


def parts_of_groups(num_groups: int, sizes: tuple[int, ...], wanted: tuple[int, ...]) -> RowOrder:
    """Rows of the wanted parts, where each group has its parts of these sizes together: part by part, all groups."""

    def order(num_rows: int) -> NDArray[np.intp]:
        starts = np.cumsum((0, *sizes))
        if num_rows != num_groups * starts[-1]:
            raise ValueError(f"{num_rows} rows; wanted {num_groups} groups of {starts[-1]}")
        rows = np.arange(num_rows).reshape(num_groups, -1)
        return np.concatenate([rows[:, starts[part] : starts[part + 1]].reshape(-1) for part in wanted])

    return RowOrder(order)


def tiled_heads(num_groups: int, num_heads: int, head_dim: int, offset: int = 0) -> RowOrder:
    """Rows of heads, from the heads of one group side by side to one head of every group side by side.

    offset: rows before those of the heads, which stay.
    """
    heads = np.arange(num_heads * head_dim).reshape(num_groups, num_heads // num_groups, head_dim)
    tiled = heads.swapaxes(0, 1).reshape(-1)

    def order(num_rows: int) -> NDArray[np.intp]:
        if num_rows != offset + len(tiled):
            raise ValueError(f"{num_rows} rows; wanted {offset + len(tiled)}")
        return np.concatenate([np.arange(offset), offset + tiled])

    return RowOrder(order)


def tiled_columns(num_groups: int, num_heads: int, head_dim: int) -> Moved:
    """Columns of a matrix in the order of `tiled_heads`."""
    rows = tiled_heads(num_groups, num_heads, head_dim)
    return Moved(lambda values: values[:, rows.order(values.shape[1])])


def scaled_rows(sizes: tuple[int, ...], factors: tuple[float, ...]) -> Computed:
    """Consecutive parts of the rows, each times a factor of its own."""

    def scale(values: NDArray[np.float32]) -> NDArray[np.float32]:
        if values.shape[0] != sum(sizes):
            raise ValueError(f"{values.shape[0]} rows; wanted {sum(sizes)}")
        column = np.repeat(np.array(factors, np.float32), sizes)
        return values * column.reshape(-1, *(1,) * (values.ndim - 1))

    return Computed(scale)


def scaled(factor: float) -> Computed:
    """All values times a factor."""
    return Computed(lambda values: values * np.float32(factor))


def latent_keys(num_heads: int, key_size: int, value_size: int) -> Moved:
    """The keys' part of latent attention's matrix of keys and values: [heads, rank, key_size].

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; GGUF has it transposed, so that it meets the queries.
    """
    return Moved(lambda values: values.reshape(num_heads, key_size + value_size, -1)[:, :key_size].swapaxes(1, 2))


def latent_values(num_heads: int, key_size: int, value_size: int) -> Moved:
    """The values' part of latent attention's matrix of keys and values: [heads, value_size, rank]."""
    return Moved(lambda values: values.reshape(num_heads, key_size + value_size, -1)[:, key_size:])

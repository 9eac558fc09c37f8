"""Instructions that the lanes of a warp do together, for the emulator: from what 32 lanes yield to each one's result.

A lane yields the name of the instruction and then its operands.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

Operands = Sequence[tuple[Any, ...]]
Together = Callable[[Operands], list[Any]]

_LANES = 32


_EXCHANGES: list[Callable[[Sequence[Any]], tuple[Any, ...]]] = [
    itemgetter(*(lane ^ mask for lane in range(_LANES))) for mask in range(_LANES)
]
"""Of a value of each lane, those of the lanes whose number differs by a mask."""


def _exchange(operands: Operands) -> list[Any]:
    _, values, masks = zip(*operands, strict=True)
    if masks.count(masks[0]) == _LANES:
        return list(_EXCHANGES[masks[0]](values))
    return [values[lane ^ mask] for lane, mask in enumerate(masks)]


def _fetch(operands: Operands) -> list[Any]:
    _, values, lanes = zip(*operands, strict=True)
    return [values[lane % _LANES] for lane in lanes]


def _words(operands: Operands, first: int, count: int, kind: type[np.generic]) -> NDArray[Any]:
    """Operands `first` and after, as numbers of a kind: [lane][operand][number in its word]."""
    words = np.array([lane[1 + first : 1 + first + count] for lane in operands], np.int64)
    return words.astype(np.uint32).view(kind).reshape(_LANES, count, -1)


def _multiply(a_kind: type[np.generic], b_kind: type[np.generic], halves: int) -> Together:
    """mma.sync of 16 rows by 8 columns; `halves` of the inner axis, each of four words."""
    is_float = a_kind is np.float16
    exact: type[np.generic] = np.float64 if is_float else np.int64

    def multiply(operands: Operands) -> list[Any]:
        left = _words(operands, 0, 2 * halves, a_kind).astype(exact)
        right = _words(operands, 2 * halves, halves, b_kind).astype(exact)
        # Lane 4 g + t: of a, words (half, row g or g + 8) at t; of b, words (half) of column g at t.
        a = left.reshape(8, 4, halves, 2, -1).transpose(3, 0, 2, 1, 4).reshape(16, -1)
        b = right.reshape(8, 4, halves, -1).transpose(0, 2, 1, 3).reshape(8, -1)
        # Of a lane: two columns of row g, then of row g + 8.
        product = (a @ b.T).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(_LANES, 4)
        total = product + np.array([given[1 + 3 * halves :] for given in operands], exact)
        return list(map(tuple, total.astype(np.float32) if is_float else total.tolist()))

    return multiply


TOGETHER: dict[str, Together] = {
    "shuffle": _exchange,
    "shuffle_int": _exchange,
    "shuffle_word": _exchange,
    "shuffle_from": _fetch,
    "fetch_word": _fetch,
    "multiply_halves": _multiply(np.float16, np.float16, 2),
    "multiply_signed": _multiply(np.int8, np.int8, 2),
    "multiply_half_signed": _multiply(np.int8, np.int8, 1),
    "multiply_half_unsigned": _multiply(np.uint8, np.int8, 1),
}
"""By the name of the instruction in `kernels.cuda.compiled.ptx`."""

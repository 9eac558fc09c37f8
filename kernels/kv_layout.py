"""The layout of keys and values in a page: pages of a fixed number of positions, with all layers of a position.

A page is one block of memory, or two: sliding-window layers may have a block of their own, which is freed once no
position in it will be read again. A block has, per layer and KV head: keys, scales of keys, values, scales of values,
each part a multiple of 64 bytes. Keys are in groups of sixteen positions, so that one query dimension (or four) is
multiplied by sixteen keys in one vector; values so that the probability of one position (or two) is multiplied by
sixteen columns in one vector.

| type | keys, per group of sixteen positions | values |
|---|---|---|
| f32 f16 | [key_size][16] | [32 positions][columns] |
| q8_0 | [key_size / 4][16][4] codes + 128 | [16 pairs of positions][columns][2] codes |
| q4_0 | [key_size / 8][16][4] bytes: low nibbles 4 dimensions, high nibbles the next 4 | [8 fours of positions] |
| | | [columns / 32][16][4] bytes: low nibbles column c, high nibbles column c + 16 |

The four bytes of a column in q4_0 values belong to positions 0, 2, 1, 3, so that its 16-bit halves are pairs. Codes of
q4_0 are 0 to 15 and mean -8 to 7. One float16 scale belongs to SCALE_BLOCK elements of one position: keys hold theirs
as [2 groups][blocks][16], values as [blocks][32].

Recurrent ops keep a state per sequence instead. All states of a sequence at one position are a block of float32, and so
is the log: what up to LOG_ROWS rows after that position did to the states, [op][row][log_values], so that any number of
those rows can be undone by not repeating them. Every op's part is a multiple of 64 bytes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.ops import KVLayerShape, StateShape
from localinfer.types import PAGE_TOKENS as PAGE_TOKENS, Record

SCALE_BLOCK = 64
"""Elements of a head that share a scale, in the quantized types."""

LOG_ROWS = 16
"""Rows that a log holds: the most that a step verifies of a draft, with the row before it."""

KV_TYPES = ("f32", "f16", "q8_0", "q4_0")


def parse_kv_type(kv_type: str) -> tuple[str, str]:
    """Types of keys and values from one name for both, or from "keys/values". Raises: RequestError."""
    names = kv_type.split("/") if isinstance(kv_type, str) else []
    if not 1 <= len(names) <= 2 or any(name not in KV_TYPES for name in names):
        raise RequestError(
            f"kv_type is {kv_type!r}; give one of {', '.join(KV_TYPES)}, or one for keys and one for values, "
            "such as 'q8_0/q4_0'"
        )
    return names[0], names[-1]


def is_quantized(name: str) -> bool:
    """True if a type of keys or values has codes and scales."""
    return name.startswith("q")


def num_blocks(size: int) -> int:
    """Scales of `size` elements; the last may belong to fewer than SCALE_BLOCK."""
    return -(-size // SCALE_BLOCK)


class HeadLayout(Record):
    """One KV head of one layer in a page: offsets of its parts, its bytes, and padded sizes.

    key_columns, value_columns: elements stored per position, padded to whole vectors.
    """

    key_columns: int
    value_columns: int
    key_scales: int
    values: int
    value_scales: int
    num_bytes: int


class KVLayout(Record):
    """Sizes and offsets of a page, in bytes. `kv_type` is a type for both, or "keys/values"."""

    kv_type: str
    layers: Sequence[KVLayerShape]
    states: Sequence[StateShape] = ()
    carried_size: int = 0
    """Hidden states that a sequence carries from its last position to the next, for draft layers; 0 without such."""
    scale_block: int = SCALE_BLOCK
    """Always SCALE_BLOCK; in the layout's repr, which is part of the key of stored pages."""

    def __post_init__(self) -> None:
        parse_kv_type(self.kv_type)

    @property
    def page_tokens(self) -> int:
        """Positions per page."""
        return PAGE_TOKENS

    @property
    def key_type(self) -> str:
        """Type of keys."""
        return parse_kv_type(self.kv_type)[0]

    @property
    def value_type(self) -> str:
        """Type of values."""
        return parse_kv_type(self.kv_type)[1]

    def head(self, layer: int) -> HeadLayout:
        """The layout of each KV head of a layer."""
        shape, key_type, value_type = self.layers[layer], self.key_type, self.value_type
        key_columns = _padded(shape.key_size, {"q8_0": 4, "q4_0": 8}.get(key_type, 1))
        value_columns = _padded(shape.value_size, 32 if value_type == "q4_0" else 16)
        key_scales = _part_bytes(key_columns, key_type)
        values = key_scales + _scale_bytes(shape.key_size, key_type)
        value_scales = values + _part_bytes(value_columns, value_type)
        num_bytes = value_scales + _scale_bytes(shape.value_size, value_type)
        return HeadLayout(key_columns, value_columns, key_scales, values, value_scales, num_bytes)

    def layer_offset(self, layer: int) -> int:
        """Offset of a layer in its block of a page."""
        return self._placement[0][layer]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page without its sliding-window block, a multiple of 64."""
        return self._placement[1][False]

    @property
    def windowed_bytes(self) -> int:
        """Bytes of the sliding-window block of a page, a multiple of 64."""
        return self._placement[1][True]

    @property
    def window(self) -> int:
        """The largest sliding window; 0 without such layers."""
        return max((shape.window for shape in self.layers), default=0)

    @cached_property
    def state_offsets(self) -> tuple[int, ...]:
        """Offset of each op's state in a block of states, and then the bytes of the block."""
        return _offsets([shape.num_values for shape in self.states])

    @cached_property
    def log_offsets(self) -> tuple[int, ...]:
        """Offset of each op's rows in a log, and then the bytes of the log."""
        return _offsets([LOG_ROWS * shape.log_values for shape in self.states])

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of a sequence, a multiple of 64; 0 for a model without recurrent layers."""
        return self.state_offsets[-1]

    @property
    def log_bytes(self) -> int:
        """Bytes of a log, a multiple of 64."""
        return self.log_offsets[-1]

    @cached_property
    def _placement(self) -> tuple[list[int], dict[bool, int]]:
        """The offset of each layer in its block, and the bytes of the block of layers without and with a window."""
        offsets, sizes = [], {False: 0, True: 0}
        for layer, shape in enumerate(self.layers):
            offsets.append(sizes[shape.window > 0])
            sizes[shape.window > 0] += shape.num_kv_heads * self.head(layer).num_bytes
        return offsets, sizes


@runtime_checkable
class DevicePages(Protocol):
    """A layout whose pages are wholly or partly in memory of devices; addresses are valid there only."""

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a page in host memory; the rest is on the device, or on several."""

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory for whole pages; returns its address. Raises: OutOfMemoryError, MemoryError."""

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Copy a page from one address to another."""

    def read(self, page: int, out: NDArray[np.uint8]) -> None:
        """Copy the page at an address into uint8[page_bytes]."""

    def write(self, page: int, data: NDArray[np.uint8]) -> None:
        """Fill the page at an address with uint8[page_bytes]."""

    def free_pages(self, spare: int) -> int:
        """Pages for which there is free memory on every device that holds a part; `spare` bytes of each stay free."""


def _offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """Offsets in bytes of parts of so many float32, each a multiple of 64, and the end of the last."""
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + _padded(4 * count, 64))
    return tuple(offsets)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _part_bytes(columns: int, name: str) -> int:
    """Bytes of the elements of one head in a page, without scales."""
    bits = {"f32": 32, "f16": 16, "q8_0": 8, "q4_0": 4}[name]
    return _padded(PAGE_TOKENS * columns * bits // 8, 64)


def _scale_bytes(size: int, name: str) -> int:
    return PAGE_TOKENS * 2 * num_blocks(size) if is_quantized(name) else 0

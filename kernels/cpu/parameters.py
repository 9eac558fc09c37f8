"""Parameter blocks: the int64 words at one address that a kernel reads, with one declaration for both sides.

Python packs a block by its names; a kernel loads a word as `BLOCK.name(address)`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray


class Block:
    """A block's words in order, by name; `floats` are those of its words that hold the bits of a float32."""

    def __init__(self, words: str, floats: str = "") -> None:
        self.words = tuple(words.split())
        self.floats = frozenset(floats.split())
        assert len(set(self.words)) == len(self.words) and self.floats <= set(self.words), "each name once"
        self.num_bytes = 8 * len(self.words)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[[int], Any]:
            """In a kernel: the word of the block at an address. Compiled by `compiled/simd/memory.py`."""

    def offset(self, name: str) -> int:
        """Where a word is, in bytes from the block's address."""
        return 8 * self.words.index(name)

    def pack(self, **values: float) -> NDArray[np.int64]:
        """The block of these values, int64[words]; every word must be given, floats as floats."""
        missing = set(self.words) ^ set(values)
        assert not missing, f"a block of {', '.join(self.words)} needs each of them once, not {', '.join(missing)}"
        words = [_bits(values[name]) if name in self.floats else values[name] for name in self.words]
        return np.array(words, np.int64)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))

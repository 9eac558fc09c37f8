"""Decoders of the types whose codes are indices into a grid of vectors: IQ1, IQ2 and IQ3.

The grids are constants of the format; they are taken from the `gguf` package when first needed.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.quant.formats.types import TensorType
from localinfer.quant.formats.unpacking import unpack_bits

Blocks = NDArray[Any]

# A 7-bit sign code stands for 8 signs whose number of minuses is even.
_EVEN_SIGNS = np.array([code | (code.bit_count() & 1) << 7 for code in range(128)], dtype=np.uint8)


@cache
def grid(type: TensorType) -> NDArray[np.float32]:
    """Return float32[entries, 4 or 8], the vectors that codes of this type select."""
    import gguf.quants  # imports for a quarter of a second, and few models need it

    table = getattr(gguf.quants, type.name)
    table.init_grid()
    vectors: NDArray[np.float32] = table.grid[0, 0].astype(np.float32)
    vectors.flags.writeable = False
    return vectors


def _signs(sign_bytes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return float32[..., 8]: -1 where a bit of the byte is set, else 1."""
    bits = sign_bytes[..., None] >> np.arange(8, dtype=np.uint8) & 1
    return np.where(bits == 1, np.float32(-1), np.float32(1))


def _even_signs(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Expand the four 7-bit sign codes of each word: uint32[n, 8] gives float32[n, 8, 4, 8]."""
    codes = words[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & 127
    return _signs(_EVEN_SIGNS[codes])


def _scaled(
    scale: NDArray[np.float32], vectors: NDArray[np.float32], signs: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Multiply vectors and signs of a block by one scale per equal share of them."""
    shape = (*scale.shape, -1)
    return scale[..., None] * vectors.reshape(shape) * signs.reshape(shape)


def _d(blocks: Blocks) -> NDArray[np.float32]:
    d: NDArray[np.float32] = blocks["d"].astype(np.float32)[:, None]
    return d


def _nibble_scale(blocks: Blocks) -> NDArray[np.float32]:
    nibbles = unpack_bits(blocks["scales"], 4, 1).astype(np.float32)
    return _d(blocks) * (np.float32(0.5) + nibbles) * np.float32(0.25)


def _iq2_xxs(blocks: Blocks) -> NDArray[np.float32]:
    words = blocks["qs"]
    codes = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    top = (words[..., 1] >> 28).astype(np.float32)
    scale = _d(blocks) * (np.float32(0.5) + top) * np.float32(0.25)
    return _scaled(scale, grid(TensorType.IQ2_XXS)[codes], _even_signs(words[..., 1]))


def _iq2_xs(blocks: Blocks) -> NDArray[np.float32]:
    words = blocks["qs"]
    vectors = grid(TensorType.IQ2_XS)[words & 511]
    return _scaled(_nibble_scale(blocks), vectors, _signs(_EVEN_SIGNS[words >> 9]))


def _iq2_s(blocks: Blocks) -> NDArray[np.float32]:
    high = unpack_bits(blocks["qh"], 2, 1).astype(np.uint16)
    vectors = grid(TensorType.IQ2_S)[blocks["qs"] | high << 8]
    return _scaled(_nibble_scale(blocks), vectors, _signs(blocks["signs"]))


def _iq3_xxs(blocks: Blocks) -> NDArray[np.float32]:
    top = (blocks["signs"] >> 28).astype(np.float32)
    scale = _d(blocks) * (np.float32(0.5) + top) * np.float32(0.5)
    return _scaled(scale, grid(TensorType.IQ3_XXS)[blocks["qs"]], _even_signs(blocks["signs"]))


def _iq3_s(blocks: Blocks) -> NDArray[np.float32]:
    scale = _d(blocks) * (1 + 2 * unpack_bits(blocks["scales"], 4, 1)).astype(np.float32)
    high = unpack_bits(blocks["qh"], 1, 1).astype(np.uint16)
    vectors = grid(TensorType.IQ3_S)[blocks["qs"] | high << 8]
    return _scaled(scale, vectors, _signs(blocks["signs"]))


def _shifted(scale: NDArray[np.float32], codes: NDArray[np.uint16], is_minus: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Decode IQ1 vectors, moved by -1/8 or +1/8: scale and is_minus divide the block equally."""
    vectors = grid(TensorType.IQ1_S)[codes].reshape(*is_minus.shape, -1)
    moved = vectors + np.where(is_minus, np.float32(-0.125), np.float32(0.125))[..., None]
    return scale[..., None] * moved.reshape(*scale.shape, -1)


def _iq1_s(blocks: Blocks) -> NDArray[np.float32]:
    words = blocks["qh"]
    scale = _d(blocks) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    high = (words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & 7).reshape(len(blocks), -1)
    return _shifted(scale, blocks["qs"] | high << 8, words >> 15 == 1)


def _iq1_m(blocks: Blocks) -> NDArray[np.float32]:
    words = blocks["scales"]
    # The four top nibbles together are the float16 scale of the block, lowest nibble first.
    nibbles = words >> 12 << np.array([0, 4, 8, 12], dtype=np.uint16)
    d = np.bitwise_or.reduce(nibbles, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    codes = (words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & 7).reshape(len(words), -1)
    high = unpack_bits(blocks["qh"], 4, 1)
    indices = blocks["qs"] | (high & 7).astype(np.uint16) << 8
    return _shifted(d * (2 * codes + 1).astype(np.float32), indices, high >> 3 == 1)


GRID_DECODERS: dict[TensorType, Callable[[Blocks], NDArray[np.float32]]] = {
    TensorType.IQ2_XXS: _iq2_xxs,
    TensorType.IQ2_XS: _iq2_xs,
    TensorType.IQ2_S: _iq2_s,
    TensorType.IQ3_XXS: _iq3_xxs,
    TensorType.IQ3_S: _iq3_s,
    TensorType.IQ1_S: _iq1_s,
    TensorType.IQ1_M: _iq1_m,
}

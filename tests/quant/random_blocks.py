"""Blocks of any tensor type whose fields are random."""

import numpy as np
from numpy.typing import NDArray

from localinfer.quant.formats.types import TensorType, block_bytes, block_dtype


def random_blocks(
    type: TensorType, num_blocks: int, generator: np.random.Generator, scale: float = 1.0
) -> tuple[NDArray[np.uint8], NDArray[np.void]]:
    """Random bytes in every field, except that float fields hold finite numbers; as bytes and as blocks."""
    raw = generator.integers(0, 256, num_blocks * block_bytes(type), dtype=np.uint8)
    blocks = raw.view(block_dtype(type))
    for name in block_dtype(type).names or ():
        if blocks[name].dtype.kind == "f":
            blocks[name] = generator.normal(scale=scale, size=blocks[name].shape)
    return raw, blocks

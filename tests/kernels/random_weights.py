"""Random weights in every layout: all codes, scales of both signs and ordinary size."""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.layouts import GGUF_LAYOUTS, SIZES, Layout
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType, block_dtype, block_size


def group_dtype(layout: Layout) -> np.dtype[np.void]:
    """One group of one row in an INT layout: scale, zero point, codes (in nibbles: low ones first of every 16)."""
    return np.dtype([("d", "<f2"), ("zero", "<i2"), ("codes", "u1", SIZES[layout].file_bytes - 4)])


def random_weights(layout: Layout, shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    """The bytes of a tensor as a file holds them."""
    generator = np.random.default_rng(seed)
    if layout not in GGUF_LAYOUTS:
        units = np.zeros(int(np.prod(shape)) // SIZES[layout].unit, group_dtype(layout))
        units["d"] = generator.normal(scale=0.1, size=len(units))
        units["zero"] = generator.integers(0, 257 if layout is Layout.INT8_32 else 17, len(units))
        units["codes"] = generator.integers(0, 256, units["codes"].shape)
        return units.view(np.uint8)
    type = TensorType[layout.name]
    if type is TensorType.BF16:
        return (generator.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    dtype = block_dtype(type)
    num_blocks = int(np.prod(shape)) // block_size(type)
    blocks = generator.integers(0, 256, num_blocks * dtype.itemsize, dtype=np.uint8).view(dtype)
    for name in dtype.names or ():
        if blocks[name].dtype.kind == "f":
            blocks[name] = generator.normal(scale=0.1, size=blocks[name].shape)
    if type is TensorType.MXFP4:
        blocks["e"] = generator.integers(122, 128, num_blocks)
    return blocks.view(np.uint8)


def decoded(layout: Layout, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """What those bytes mean."""
    if layout not in GGUF_LAYOUTS:
        units = data.view(group_dtype(layout))
        codes = units["codes"]
        if layout is not Layout.INT8_32:
            halves = codes.reshape(len(units), -1, 1, 16) >> np.array([0, 4], np.uint8)[:, None] & 15
            codes = halves.reshape(len(units), -1)
        steps = codes.astype(np.float64) - units["zero"][:, None]
        return (units["d"].astype(np.float64)[:, None] * steps).reshape(shape)
    return dequantize(data, TensorType[layout.name], shape).astype(np.float64)


def quantized_activations(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """What rows become as int8: per 32 columns, whole multiples of a 127th of the largest magnitude."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    scale = largest / np.float32(127)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(blocks * inverse)
    products: NDArray[np.float64] = codes.astype(np.float64) * scale.astype(np.float64)
    return products.reshape(x.shape)

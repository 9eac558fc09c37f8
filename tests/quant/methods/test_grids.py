"""Grids read out of encoded blocks, and codes put back."""

import numpy as np
import pytest

from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.encoding import LEVEL_RANGES, read_grid, with_levels
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.types import TensorType
from tests.quant.methods.grid_oracle import levels_of, nearest


def encoded(type: TensorType, seed: int = 1) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((5, 512)).astype(np.float32)
    # A whole block of zeros: its scale is 0.
    values[3, 256:] = 0
    return quantize(values, type, np.ones(512, np.float32))


@pytest.mark.parametrize("type", LEVEL_RANGES)
def test_levels_come_back(type: TensorType) -> None:
    blocks = encoded(type)
    levels = levels_of(blocks, type)
    np.testing.assert_array_equal(with_levels(blocks, type, levels), blocks)
    other = levels_of(encoded(type, seed=2), type)
    changed = with_levels(blocks, type, other)
    np.testing.assert_array_equal(levels_of(changed, type), other)
    np.testing.assert_array_equal(read_grid(changed, type).scale, read_grid(blocks, type).scale)


@pytest.mark.parametrize("type", LEVEL_RANGES)
def test_the_nearest_level_decodes_as_the_reference_does(type: TensorType) -> None:
    blocks = encoded(type)
    wanted = dequantize(blocks, type, (5, 512))
    grid = read_grid(blocks, type)
    for column in (0, 17, 255, 256, 511):
        levels, decoded = nearest(grid, wanted[:, column], column // grid.group_size, slice(0, 5))
        np.testing.assert_array_equal(decoded, wanted[:, column])
        is_zero = grid.scale[column // grid.group_size] == 0
        np.testing.assert_array_equal(levels[~is_zero], levels_of(blocks, type)[~is_zero, column])

"""Weights in tiles: as dense as the file, whole for every row, and refused when sizes do not meet."""

import numpy as np
import pytest

from localinfer.errors import ShapeError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.weights import pack
from localinfer.kernels.jit import isa
from localinfer.kernels.layouts import GGUF_LAYOUTS, SIZES, TILE_ROWS, Layout, tile_bytes
from localinfer.quant.formats.types import TensorType, row_bytes
from tests.kernels.random_weights import random_weights

LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.name)


@LAYOUTS
def test_pack_takes_no_more_bytes_than_the_file(layout: Layout, pool: ThreadPool) -> None:
    shape = (3 * TILE_ROWS, 2 * SIZES[layout].unit)
    data = random_weights(layout, shape, 1)
    packed = pack(pool, layout, data, 1, *shape)
    if layout in GGUF_LAYOUTS:
        assert data.size == shape[0] * row_bytes(TensorType[layout.name], shape[1])
    assert packed.data.size == data.size
    assert packed.data.ctypes.data % 64 == 0


@LAYOUTS
def test_pack_pads_the_last_tile_with_zeros(layout: Layout, pool: ThreadPool, two_threads: ThreadPool) -> None:
    unit = SIZES[layout].unit
    whole, part = (2 * TILE_ROWS, 3 * unit), (TILE_ROWS + 5, 3 * unit)
    data = random_weights(layout, part, 2)
    padding = np.zeros(whole[0] * 3 * SIZES[layout].file_bytes - data.size, np.uint8)
    found = pack(pool, layout, data, 1, *part).data
    wanted = pack(pool, layout, np.concatenate([data.reshape(-1), padding]), 1, *whole).data
    # A row of zero bytes has codes of 128 where they are stored with an offset; its scale is zero either way.
    codes_differ = layout is (Layout.INT8_32 if isa.pairs_rows() else Layout.Q8_0)
    assert (found.tobytes() == wanted.tobytes()) is not codes_differ
    np.testing.assert_array_equal(pack(two_threads, layout, data, 1, *part).data, found)


@LAYOUTS
def test_pack_keeps_the_experts_of_a_stack_apart(layout: Layout, pool: ThreadPool) -> None:
    shape = (3, 21, SIZES[layout].unit)
    data = random_weights(layout, shape, 3)
    stack = pack(pool, layout, data, *shape)
    assert stack.data.size == 3 * stack.expert_bytes == 3 * 2 * tile_bytes(layout, shape[2])
    for expert, part in enumerate(data.reshape(3, -1)):
        alone = pack(pool, layout, np.ascontiguousarray(part), 1, *shape[1:])
        found = stack.data[expert * stack.expert_bytes : (expert + 1) * stack.expert_bytes]
        np.testing.assert_array_equal(found, alone.data)


def test_pack_reads_weights_at_any_address(pool: ThreadPool) -> None:
    shape = (16, 256)
    data = random_weights(Layout.Q6_K, shape, 4)
    moved = np.empty(data.size + 1, np.uint8)[1:]
    moved[:] = data
    moved.flags.writeable = False
    found = pack(pool, Layout.Q6_K, moved, 1, *shape).data
    np.testing.assert_array_equal(found, pack(pool, Layout.Q6_K, data, 1, *shape).data)


@pytest.mark.parametrize(
    ("num_bytes", "experts", "rows", "columns"),
    [(17, 1, 1, 32), (19, 1, 1, 32), (0, 1, 0, 32), (18, 0, 1, 32), (18, 1, 1, 16), (18, 1, 1, 0), (18, 1, -1, -32)],
)
def test_pack_refuses_sizes_that_do_not_meet(
    num_bytes: int, experts: int, rows: int, columns: int, pool: ThreadPool
) -> None:
    with pytest.raises(ShapeError):
        pack(pool, Layout.Q4_0, np.zeros(num_bytes, np.uint8), experts, rows, columns)


def test_pack_refuses_arrays_that_are_not_bytes(pool: ThreadPool) -> None:
    with pytest.raises(ShapeError, match="float32"):
        pack(pool, Layout.F32, np.zeros(64, np.float32), 1, 1, 16)

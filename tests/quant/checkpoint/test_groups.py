"""Grouped matrices in the kernels' layouts: the smallest that fits, and the same weights in every one."""

import numpy as np
import pytest

from localinfer.errors import CorruptFileError
from localinfer.kernels.layouts import LARGEST_STEP, SIZES, Layout
from localinfer.quant.checkpoint.groups import GroupedMatrix, grouped_matrix
from tests.kernels.random_weights import decoded
from tests.support.quantized_checkpoints import Codes, random_codes

SHAPE = (21, 384)


def matrix_of(codes: Codes) -> GroupedMatrix:
    return grouped_matrix(
        "m", codes.bits, codes.scales, codes.zeros, codes.groups, lambda rows: codes.codes[rows].astype(np.uint8)
    )


CODES = {
    Layout.INT4_128: [(4, 128, True), (4, 128, False), (4, -1, False), (2, 128, False)],
    Layout.INT4_64: [(4, 64, False), (4, 192, False)],
    Layout.INT4_32: [(4, 32, False), (4, 96, False)],
    Layout.Q4_0: [(4, 64, True), (4, 32, True), (2, 32, False)],
    Layout.Q8_0: [(8, 128, True)],
    Layout.INT8_32: [(8, 32, False)],
    Layout.F32: [(4, 16, False), (8, 24, True)],
}
"""Bits, sizes of groups, and whether zeros are in the middle, by the smallest layout."""


@pytest.mark.parametrize(
    ("bits", "group_size", "is_symmetric", "wanted"),
    [(*codes, layout) for layout, all_codes in CODES.items() for codes in all_codes],
)
def test_layout_is_the_smallest_that_holds_every_weight(
    bits: int, group_size: int, is_symmetric: bool, wanted: Layout
) -> None:
    codes = random_codes(np.random.default_rng(5), SHAPE, bits=bits, group_size=group_size, is_symmetric=is_symmetric)
    matrix = matrix_of(codes)
    layout = matrix.layout()
    assert layout is wanted
    rows = matrix.kernel_rows(layout)
    assert rows.size == SHAPE[0] * SHAPE[1] // SIZES[layout].unit * SIZES[layout].file_bytes
    np.testing.assert_array_equal(decoded(layout, rows, SHAPE), codes.weights)


def test_stack_of_experts_has_one_layout() -> None:
    generator = np.random.default_rng(6)
    even = matrix_of(random_codes(generator, SHAPE, group_size=32, is_symmetric=True))
    odd = matrix_of(random_codes(generator, SHAPE, group_size=32))
    wide = matrix_of(random_codes(generator, SHAPE, group_size=128))
    assert even.layout(even) is Layout.Q4_0
    assert even.layout(odd) is Layout.INT4_32
    assert wide.layout(odd) is Layout.INT4_32
    assert wide.layout(wide) is Layout.INT4_128


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_are_refused_from_which_codes_are_too_far(bits: int) -> None:
    codes = random_codes(np.random.default_rng(7), SHAPE, bits=bits, group_size=32)
    lowest, highest = (1 << bits) - 1 - LARGEST_STEP, LARGEST_STEP
    # As numbers of every width that a reader may have, which the check must see before they are cut to 16 bits.
    for kind in (np.int16, np.int32, np.int64, np.uint16):
        for zero in (lowest - 1, lowest, highest, highest + 1, -(1 << 15), 1 << 14, 1 << 16, 40_000):
            if not np.iinfo(kind).min <= zero <= np.iinfo(kind).max:
                continue
            zeros = np.full(codes.zeros.shape, (1 << bits) >> 1, kind)
            zeros[-1, -1] = zero
            arguments = (codes.scales, zeros, codes.groups, lambda rows: codes.codes[rows].astype(np.uint8))
            if lowest <= zero <= highest:
                assert grouped_matrix("m", bits, *arguments).zeros[-1, -1] == zero
                continue
            with pytest.raises(CorruptFileError, match=f"m: zero points are .*; wanted {lowest} to {highest}, so that"):
                grouped_matrix("m", bits, *arguments)

"""Steps of every encoder kernel around one block: sixteen rows at a time from the source, weights, scales, bytes.

An encoder's memory (one stretch per thread) holds columns as lanes: values and weights of a block, codes, and what its
groups have found. Fields of the file are written row by row from there.

Also the inner loop of GPTQ: a block of columns is rounded one by one, and later ones take up the errors so far. Its
columns lie one after the other, with rows as lanes: nothing is summed across them, so a row gets the bits it would get
alone. Products are added one by one in the order of columns.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from localinfer.kernels.cpu.compiled.encode.grid_fits import divide, nearest_iq4_value, total, whole
from localinfer.kernels.cpu.compiled.simd.lanes import (
    LANE_BYTES,
    absolute,
    any_lane,
    bits_from,
    half_bits,
    half_values,
    load,
    load_bfloat_columns,
    load_float_columns,
    load_half_columns,
    scatter_shorts,
    scatter_words,
    shifted_left,
    splat,
    square_root,
    store,
    to_integers,
)
from localinfer.kernels.cpu.compiled.simd.memory import load_f32, load_i64, store_i64
from localinfer.kernels.cpu.compiled.simd.pool import take_units
from localinfer.kernels.cpu.kernel_abi import (
    ENCODER_MEMORY_BYTES,
    ENCODER_STATUS,
    ROWS_PER_ENCODER_UNIT,
    SOURCE_BF16,
    SOURCE_F16,
    STATUS_NOT_FINITE,
    STATUS_TOO_LARGE,
)
from localinfer.kernels.cpu.parameters import ENCODE, ROUND_COLUMNS
from localinfer.kernels.jit.numba import Source, entry, inline, op

_BLOCK = 256 * LANE_BYTES
VALUES, WEIGHTS, CODES = 0, _BLOCK, 2 * _BLOCK
"""Lanes of up to 256 columns each."""
SCALES, MINIMUMS, SUMS, SCALE_CODES, MINIMUM_CODES = (3 * _BLOCK + 16 * LANE_BYTES * i for i in range(5))
"""Lanes of up to 16 groups each."""
MEAN_SQUARE = 3 * _BLOCK + 80 * LANE_BYTES
"""Lanes: the mean square of each whole row."""
assert MEAN_SQUARE + LANE_BYTES <= ENCODER_STATUS, "the protocol's memory must hold all of it"


@inline
def at(base: int, column: int) -> int:
    """Address of a column's lanes."""
    return base + LANE_BYTES * column


@inline
def store_half(memory: int, target: int, stride: int, last: int, value: Any) -> Any:
    """Write lanes as float16, one a row; return what was written. Notes a number that float16 cannot hold."""
    bits = half_bits(value)
    scatter_shorts(target, stride, last, bits)
    rounded = half_values(bits)
    is_wrong = (absolute(rounded) > splat(65504.0)) | (rounded != rounded)
    if any_lane(is_wrong) and load_i64(memory + ENCODER_STATUS) == 0:
        store_i64(memory + ENCODER_STATUS, STATUS_TOO_LARGE)
    return rounded


@inline
def integer(lanes: int, column: int) -> Any:
    """A column of whole numbers as integers."""
    return to_integers(load(at(lanes, column)))


@inline
def _nibbles(codes: int, low: int, high: int) -> Any:
    return bits_from(integer(codes, low), 0, 15) | shifted_left(bits_from(integer(codes, high), 0, 15), 4)


@inline
def store_nibbles(codes: int, run: int, count: int, target: int, stride: int, last: int) -> None:
    """Write the low four bits of `count` codes: in runs of 2 * `run`, byte j holds code j low and code j + run high."""
    for word in range(count // 8):
        first = word * 4 // run * 2 * run + word * 4 % run
        bits = _nibbles(codes, first, first + run)
        for byte in range(1, 4):
            bits = bits | shifted_left(_nibbles(codes, first + byte, first + byte + run), 8 * byte)
        scatter_words(target + 4 * word, stride, last, bits)


@inline
def store_upper_bits(
    codes: int, count: int, first_bit: int, num_bits: int, target: int, stride: int, last: int
) -> None:
    """Write `num_bits` bits of each code from `first_bit` on, in runs of 32 bytes: byte j has code j lowest."""
    per_byte = 8 // num_bits
    for run in range(count // (32 * per_byte)):
        for word in range(8):
            bits = bits_from(integer(codes, 0), 31, 0)
            for byte in range(4):
                for part in range(per_byte):
                    code = integer(codes, run * 32 * per_byte + part * 32 + 4 * word + byte)
                    field = bits_from(code, first_bit, (1 << num_bits) - 1)
                    bits = bits | shifted_left(field, 8 * byte + num_bits * part)
            scatter_words(target + 32 * run + 4 * word, stride, last, bits)


@inline
def weigh(memory: int, importance: int, count: int, mean_square: Any) -> None:
    """Write weights importance * sqrt(mean_square + value^2)."""
    for i in range(count):
        value = load(at(memory + VALUES, i))
        weight = splat(load_f32(importance + 4 * i)) * square_root(mean_square + value * value)
        store(at(memory + WEIGHTS, i), weight)


@inline
def weigh_by_squares(memory: int, count: int) -> None:
    """Write weights value^2."""
    for i in range(count):
        value = load(at(memory + VALUES, i))
        store(at(memory + WEIGHTS, i), value * value)


@inline
def sum_of_squares(memory: int, first: int, count: int) -> Any:
    """Sum value^2 over some columns, in order."""
    result = splat(0.0)
    for i in range(first, first + count):
        value = load(at(memory + VALUES, i))
        result = result + value * value
    return result


@inline
def sum_weights(memory: int, groups: int, columns: int) -> None:
    """Write the sum of each group's weights."""
    for group in range(groups):
        store(at(memory + SUMS, group), total(at(memory + WEIGHTS, group * columns), columns))


@inline
def _load_block(source: int, kind: int, stride: int, last: int, columns: int, memory: int) -> None:
    wrong = 0
    for column in range(0, columns, 16):
        target = at(memory + VALUES, column)
        if kind == SOURCE_F16:
            wrong |= load_half_columns(source + 2 * column, stride, last, target)
        elif kind == SOURCE_BF16:
            wrong |= load_bfloat_columns(source + 2 * column, stride, last, target)
        else:
            wrong |= load_float_columns(source + 4 * column, stride, last, target)
    if wrong != 0:
        store_i64(memory + ENCODER_STATUS, STATUS_NOT_FINITE)


def encoder(block_columns: int, block_bytes: int, *, needs_row_mean: bool = False) -> Callable[[Any], Source]:
    """Make the op that encodes rows with a function of (memory, importance, target, stride, last).

    The function finds a block's values in memory and writes its bytes for rows 0 to `last` from `target` on, a stride
    apart; importance is the address of its columns' float32, or 0. needs_row_mean: with importance, the mean square of
    the whole row stands ready.
    """

    def decorate(function: Any) -> Source:
        encode_block = inline(function)

        @op
        def encode(parameters: int, batch: int, thread: int, num_threads: int) -> None:
            p = ENCODE.load(parameters)
            memory = p.memory + thread * ENCODER_MEMORY_BYTES
            item_bytes = 2 if p.kind in (SOURCE_F16, SOURCE_BF16) else 4
            while True:
                row = take_units(p.control, 1) * ROWS_PER_ENCODER_UNIT
                if row >= p.rows:
                    return
                last = min(ROWS_PER_ENCODER_UNIT, p.rows - row) - 1
                start = p.source + row * p.stride
                if needs_row_mean and p.importance != 0:
                    squares = splat(0.0)
                    for column in range(0, p.columns, 32):
                        _load_block(start + item_bytes * column, p.kind, p.stride, last, 32, memory)
                        for i in range(32):
                            value = load(at(memory + VALUES, i))
                            squares = squares + value * value
                    store(memory + MEAN_SQUARE, squares / splat(np.float32(p.columns)))
                for block in range(p.columns // block_columns):
                    first = block * block_columns
                    _load_block(start + item_bytes * first, p.kind, p.stride, last, block_columns, memory)
                    block_importance = p.importance + 4 * first if p.importance != 0 else 0
                    place = p.target + row * p.target_stride + block * block_bytes
                    encode_block(memory, block_importance, place, p.target_stride, last)

        return encode

    return decorate


@inline
def _nearest(value: Any, lowest: int, highest: int) -> Any:
    """The nearest whole number of a range, or of IQ4's table where the range is empty."""
    if lowest > highest:
        return nearest_iq4_value(value)
    return whole(value, splat(np.float32(lowest)), splat(np.float32(highest)))


@entry("q", "q")
def round_block(parameters: int) -> int:
    """Round some columns; return 0.

    Parameters: first column, end, vectors of rows, bytes from column to column, wanted, given, errors, levels, decoded,
    weights, bytes from row to row of them, group of each column, place of each column, scales, minimums, lowest level,
    highest level.
    """
    p = ROUND_COLUMNS.load(parameters)
    for part in range(p.vectors):
        lane = LANE_BYTES * part
        for i in range(p.first, p.end):
            column = i * p.stride + lane
            value = load(p.wanted + column)
            for j in range(p.first, i):
                weight = splat(load_f32(p.weights + i * p.weights_stride + 4 * j))
                value = value + weight * load(p.errors + j * p.stride + lane)
            grid = load_i64(p.groups + 8 * i) * p.stride + lane
            scale, minimum = load(p.scales + grid), load(p.minimums + grid)
            level = _nearest(divide(value - minimum, scale), p.lowest, p.highest)
            found = scale * level + minimum
            store(p.errors + column, load(p.given + column) - found)
            store(p.wanted + column, value - found)
            place = load_i64(p.places + 8 * i) * p.stride + lane
            store(p.levels + place, level)
            store(p.decoded + place, found)
    return 0

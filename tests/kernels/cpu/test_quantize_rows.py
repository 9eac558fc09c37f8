"""Activations as int8: codes, scales and sums, bit for bit as the plain rule says."""

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.kernels.cpu.kernel_abi import PAIR_BIAS, PAIR_BYTES, PAIR_CODES, RECORD_BYTES, activation_row_bytes
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.cpu.parameters import BATCH, QUANTIZE
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.object_cache import Kernel
from tests.kernels.cpu.tape_runs import random_rows

RECORD = np.dtype(
    [("scale", "<f4"), ("scaled_sum", "<f4"), ("sum", "<i4"), ("first_half", "<i4"), ("second_half", "<i4")]
)


def quantized(pool: ThreadPool, x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.void]]:
    """Codes int8[rows, columns] and records [rows, columns / 32]."""
    assert RECORD.itemsize == RECORD_BYTES
    rows, columns = x.shape
    stride = activation_row_bytes(columns)
    memory = aligned_zeros((rows + rows % 2) * stride)
    header = BATCH.pack(**dict.fromkeys(BATCH.fields, 0) | {"num_rows": rows, "control": pool.control_address})
    words = QUANTIZE.pack(
        source=address(x), source_stride=4 * columns, target=address(memory), target_stride=stride, columns=columns,
        is_output=0, slots=1, slot_stride=0,
    )  # fmt: skip
    ops = np.array([[Kernel("matmul.quantize_rows").address, address(words)]], np.int64)
    pool.run(address(ops), 1, address(header))
    if isa.pairs_rows():
        return _of_pairs(memory.reshape(-1, columns // 32, PAIR_BYTES), rows)
    found = memory[: rows * stride].reshape(rows, stride)
    records = np.ascontiguousarray(found[:, columns : columns + columns // 32 * RECORD_BYTES]).view(RECORD)
    return found[:, :columns].view(np.int8), records


def _of_pairs(blocks: NDArray[np.uint8], rows: int) -> tuple[NDArray[np.int8], NDArray[np.void]]:
    """The same of blocks uint8[pairs, blocks of a row, PAIR_BYTES]."""
    pairs, count, _ = blocks.shape
    codes = blocks[:, :, :PAIR_CODES].reshape(pairs, count, 4, 2, 8).transpose(0, 3, 1, 2, 4)
    fields = np.ascontiguousarray(blocks[:, :, PAIR_CODES:]).view("<i4")
    records = np.empty((pairs, 2, count, 5), "<i4")
    for second in range(2):
        np.testing.assert_array_equal(fields[..., [second, 4 + second]], fields[..., [2 + second, 6 + second]])
        records[:, second] = fields[..., [second, 4 + second, 8 + second, 10 + second, 12 + second]]
    records[..., 2:] -= PAIR_BIAS
    whole = records.reshape(2 * pairs, count, 5).view(RECORD)[..., 0]
    return codes.reshape(2 * pairs, 32 * count)[:rows].view(np.int8), whole[:rows]


@pytest.mark.parametrize("columns", [32, 96, 1024, 1056])
def test_quantize_rows_follows_the_plain_rule_exactly(columns: int, pool: ThreadPool, two_threads: ThreadPool) -> None:
    x = random_rows(5, columns, 1)
    x[0, :32] = 0
    x[1] *= 1e-30
    x[2] *= 1e30
    x[3, 7] = 1000
    blocks = x.reshape(5, -1, 32)
    largest = np.abs(blocks).max(axis=2)
    scales = largest / np.float32(127)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    wanted = np.rint(blocks * inverse[:, :, None]).astype(np.int32)
    codes, records = quantized(pool, x)
    np.testing.assert_array_equal(codes, wanted.reshape(5, columns))
    np.testing.assert_array_equal(records["scale"], scales)
    np.testing.assert_array_equal(records["scaled_sum"], scales * wanted.sum(axis=2).astype(np.float32))
    np.testing.assert_array_equal(records["sum"], -8 * wanted.sum(axis=2))
    np.testing.assert_array_equal(records["first_half"], -8 * wanted[:, :, :16].sum(axis=2))
    np.testing.assert_array_equal(records["second_half"], -8 * wanted[:, :, 16:].sum(axis=2))
    again, again_records = quantized(two_threads, x)
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(again_records, records)


def test_quantize_rows_gives_the_largest_value_the_largest_code(pool: ThreadPool) -> None:
    x = random_rows(1, 64, 2)
    x[0, 5], x[0, 40] = -9, 11
    codes, _ = quantized(pool, x)
    assert codes[0, 5] == -127
    assert codes[0, 40] == 127


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1.1e-38, 9e-37])
def test_quantize_rows_counts_values_whose_inverse_overflows_as_zeros(tiny: float, pool: ThreadPool) -> None:
    x = np.full((1, 64), tiny, np.float32)
    x[0, 33:] = 0
    codes, records = quantized(pool, x)
    assert not codes.any()
    assert not records["sum"].any()
    assert not records["scaled_sum"].any()


def test_row_bytes_are_whole_cache_lines() -> None:
    for columns in (32, 64, 96, 2048, 2080):
        assert activation_row_bytes(columns) % 64 == 0
        assert activation_row_bytes(columns) >= columns + columns // 32 * RECORD_BYTES

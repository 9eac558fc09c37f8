"""Folded bytes: equal to plain arithmetic, and different after any change."""

import numpy as np
import pytest

from localinfer.kernels.cpu.kernel_abi import CHECKSUM_LANES, CHECKSUM_MULTIPLIER
from localinfer.kernels.cpu.weights import fold


def folded_plainly(data: bytes) -> bytes:
    lanes = [(lane + 1) * CHECKSUM_MULTIPLIER % 2**64 for lane in range(CHECKSUM_LANES)]
    for index, word in enumerate(np.frombuffer(data, np.uint64).tolist()):
        mixed = (lanes[index % CHECKSUM_LANES] ^ word) * CHECKSUM_MULTIPLIER % 2**64
        lanes[index % CHECKSUM_LANES] = mixed ^ mixed >> 32
    return np.array(lanes, np.uint64).tobytes()


@pytest.mark.parametrize("num_words", [0, 1, 2, 31, 32, 33, 64, 1000, 12_345])
def test_fold_is_the_plain_arithmetic(num_words: int) -> None:
    data = np.random.default_rng(num_words).bytes(8 * num_words)
    assert fold(data) == folded_plainly(data)
    assert fold(memoryview(bytearray(b"12345678" + data))[8:]) == folded_plainly(data)


def test_one_bit_changed_anywhere_changes_the_result() -> None:
    data = bytearray(np.random.default_rng(1).bytes(8 * 70))
    whole = fold(data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert fold(data) != whole
        data[bit // 8] ^= 1 << bit % 8


def test_same_change_at_two_places_does_not_cancel() -> None:
    data = np.zeros(8 * CHECKSUM_LANES, np.uint64)
    whole = fold(data.tobytes())
    for distance in (1, CHECKSUM_LANES, 2 * CHECKSUM_LANES):
        for bit in range(64):
            changed = data.copy()
            changed[[5, 5 + distance]] ^= np.uint64(1) << np.uint64(bit)
            assert fold(changed.tobytes()) != whole


def test_exchanged_words_and_missing_zeros_change_the_result() -> None:
    data = np.arange(256, dtype=np.uint64)
    exchanged = data.copy()
    exchanged[[3, 35]] = exchanged[[35, 3]]
    assert len({fold(data.tobytes()), fold(exchanged.tobytes()), fold(data.tobytes() + bytes(8))}) == 3

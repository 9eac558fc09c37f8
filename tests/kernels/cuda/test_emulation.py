"""The emulator itself: what a GPU would read or round silently, or wait for without end, fails in it at once."""

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from numba import cuda, float32, int64, uint32

from localinfer.kernels.cuda import jit
from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.jit import inline, kernel
from tests.kernels.cuda.emulation import EmulatedMemory, Emulator

SIZE = 40
"""Bytes of the array that the kernels get, which are no whole number of 16."""


def launch(monkeypatch: pytest.MonkeyPatch, function: Callable[..., None], threads: int = 32) -> list[int]:
    """A kernel of one block, of the address of an array of ones; its words afterwards."""
    monkeypatch.setattr(jit, "find_template", lambda name: kernel()(function))
    memory = EmulatedMemory()
    address = memory.allocate(SIZE)
    memory.view(address, SIZE).view(np.uint32)[:] = 1
    Emulator(memory).launch("test.kernel", (), (1, 1, 1), threads, (address,))
    words: list[int] = memory.view(address, SIZE).view(np.uint32).tolist()
    return words


def beyond(place):
    ptx.store_u32(place + 40, 1)


def before(place):
    ptx.load_u8(place - 1)


def of_the_host(place):
    ptx.load_u8(place % 256)


def across_the_end(place):
    ptx.load_v4(place + 32)


def misaligned(place):
    ptx.load_f32(place + 2)


def misaligned_words(place):
    ptx.load_v2(place + 4)


def of_no_float32(place):
    ptx.store_f32(place, 1.0)


def float64_as_float32(place):
    ptx.divide(ptx.widen(ptx.load_f32(place)), float32(2.0))


def float_as_word(place):
    ptx.store_u32(place, ptx.load_f32(place))


def behind_an_array(place):
    numbers = cuda.local.array(3, float32)
    numbers[3] = float32(1.0)


def floats_in_an_array_of_whole_numbers(place):
    numbers = cuda.local.array(3, int64)
    numbers[0] = ptx.load_f32(place)


def sign_in_an_array_of_words(place):
    numbers = cuda.shared.array(3, uint32)
    numbers[0] = ptx.thread() - 1


def lanes_that_do_not_meet(place):
    if ptx.thread() < 31:
        ptx.shuffle(float32(1.0), 1)


def lanes_that_meet_elsewhere(place):
    if ptx.thread() < 16:
        ptx.shuffle(float32(1.0), 1)
    else:
        ptx.syncthreads()


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (beyond, "4 bytes at 0x.* are outside of every allocation"),
        (before, "1 bytes at 0x.* are outside of every allocation"),
        (of_the_host, "1 bytes at 0x0 are outside of every allocation"),
        (across_the_end, "16 bytes at 0x.* are outside of every allocation"),
        (misaligned, "4 bytes at 0x.* are not aligned"),
        (misaligned_words, "8 bytes at 0x.* are not aligned"),
        (of_no_float32, "float'> is used as float32"),
        (float64_as_float32, "float64'> is used as float32"),
        (float_as_word, "not supported"),
        (behind_an_array, "index 3 is out of bounds"),
        (floats_in_an_array_of_whole_numbers, "integer"),
        (sign_in_an_array_of_words, "can't convert negative|less than minimum"),
        (lanes_that_do_not_meet, "31 lanes of a warp are in shuffle"),
        (lanes_that_meet_elsewhere, "lanes of a warp are in shuffle and in syncthreads"),
    ],
)
def test_wrong_kernels_fail(function: Callable[..., None], error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, TypeError, OverflowError, IndexError), match=error):
        launch(monkeypatch, function)


@inline
def sum_of_pair(value):
    return value + ptx.shuffle(value, 1)


@inline
def doubled(number):
    return number + number


def test_lanes_warps_and_pieces_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier for all warps, of which the last has few lanes; pieces at which lanes meet, and others."""

    def summed(place):
        thread = ptx.thread()
        numbers = cuda.shared.array(40, int64)
        numbers[thread] = doubled(thread)
        ptx.syncthreads()
        other = numbers[39 - thread]
        if thread < 32:
            pair = sum_of_pair(ptx.to_float(other))
            if thread < 10:
                ptx.store_u32(place + 4 * thread, ptx.to_int(pair))

    wanted = [2 * (39 - lane) + 2 * (39 - (lane ^ 1)) for lane in range(10)]
    assert launch(monkeypatch, summed, threads=40) == wanted


def test_a_barrier_that_is_missing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp goes on to its next meeting before the others start, and shared memory is not zero before."""

    def summed(place):
        numbers = cuda.shared.array(64, int64)
        numbers[ptx.thread()] = 1
        if ptx.thread() == 0:
            ptx.store_u32(place, numbers[63])

    assert launch(monkeypatch, summed, threads=64)[0] == 0xFFFFFFFF


def test_numbers_are_rounded_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(place):
        ptx.store_f32(place, ptx.to_float(16777217) + float32(0.1))
        ptx.store_f32(place + 4, ptx.divide(float32(1.0), float32(3.0)) * float32(0.1))
        ptx.store_u32(place + 8, ptx.pack_halves(ptx.narrow(ptx.widen(float32(0.1))), float32(-65520.0)))
        ptx.store_u32(place + 12, ptx.to_int(float32(2.5)))
        ptx.store_f32(place + 16, ptx.maximum(ptx.bits_float(0x7FC00000), float32(-1.0)))
        ptx.store_f32(place + 20, ptx.exp2(float32(200.0)))

    words = np.array(launch(monkeypatch, rounded, threads=1), np.uint32)
    third = np.float32(1) / np.float32(3)
    floats = [np.float32(16777216), third * np.float32(0.1), np.float32(-1), np.float32(np.inf)]
    np.testing.assert_array_equal(words.view(np.float32)[[0, 1, 4, 5]], floats)
    with np.errstate(over="ignore"):
        halves = np.array([0.1, -65520.0], np.float32).astype(np.float16)
    assert words[2] == halves.view(np.uint32)[0] and words[3] == 2

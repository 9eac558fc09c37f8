"""Memory that is lent again only when nobody looks at it."""

import gc

import numpy as np

from localinfer.quant.methods.workers import BufferPool

SHAPE = (1024, 2048)


def start(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_comes_back_with_the_last_view_of_it() -> None:
    memory = BufferPool()
    first = memory.empty(SHAPE)
    first.fill(1)
    view, place = first[5:, ::2].T, start(first)
    del first
    gc.collect()
    second = memory.empty(SHAPE)
    second.fill(2)
    assert start(second) != place
    assert (view == 1).all()
    del view
    gc.collect()
    third = memory.empty((2048, 768))
    assert start(third) == place
    assert third.shape == (2048, 768) and third.dtype == np.float32 and third.flags.c_contiguous


def test_much_smaller_arrays_do_not_take_large_memory() -> None:
    memory = BufferPool()
    large = memory.empty((4096, 4096))
    place = start(large)
    del large
    gc.collect()
    assert start(memory.empty(SHAPE)) != place
    assert start(memory.empty((4096, 2048), np.float64)) == place


def test_what_was_lent_outlives_the_lender() -> None:
    memory = BufferPool()
    array = memory.empty(SHAPE)
    memory.clear()
    del memory
    gc.collect()
    array.fill(3)
    assert (array == 3).all()

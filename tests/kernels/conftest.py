"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest

from localinfer.kernels.cpu.program import ThreadPool


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPool]:
    """One thread, the caller's."""
    with_one = ThreadPool(1)
    yield with_one
    with_one.close()


@pytest.fixture(scope="session")
def two_threads() -> Iterator[ThreadPool]:
    """The caller's thread and one worker."""
    with_two = ThreadPool(2)
    yield with_two
    with_two.close()

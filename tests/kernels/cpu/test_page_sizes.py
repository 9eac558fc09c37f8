"""Pages of 16 and 64 KiB, as macOS and some kernels of Linux on arm64 have: whole ones are protected, and forgotten."""

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localinfer.kernels.cpu import guard
from localinfer.kernels.cpu.guard import Guard
from localinfer.quant.gguf.mapped_file import MappedFile

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pages of Windows have 4 KiB on every CPU")
SIZES = (1, 63, 64, 4095, 4096, 16383, 16384, 65536, 65537)


@pytest.fixture(params=[16 << 10, 64 << 10], ids=["16 KiB", "64 KiB"])
def page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of a page, whose multiples this system's pages are."""
    num_bytes: int = request.param
    if num_bytes % mmap.PAGESIZE:
        pytest.skip("the pages of this system are larger")
    monkeypatch.setattr(mmap, "PAGESIZE", num_bytes)
    return num_bytes


@pytest.mark.parametrize("mode", [Guard.AFTER, Guard.BEFORE])
@pytest.mark.parametrize("alignment", [1, 2, 8, 64, 128, 4096])
def test_an_array_lies_at_the_edge_of_its_pages_between_two_protected_ones(
    mode: Guard, alignment: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected: list[tuple[int, int]] = []
    protect = guard._protect

    def noted(address: int, num_bytes: int, *, is_protected: bool) -> None:
        protected.append((address, num_bytes))
        protect(address, num_bytes, is_protected=is_protected)

    monkeypatch.setattr(guard, "_protect", noted)
    monkeypatch.setattr(guard, "MODE", mode)
    for num_bytes in SIZES:
        protected.clear()
        array = guard.guarded(num_bytes, 64, alignment=alignment)
        start = int(array.ctypes.data)
        (before, first_size), (behind, last_size) = protected
        assert first_size == last_size == page and (behind - before) % page == 0 and start % alignment == 0
        inside = range(before + page, behind + 1)
        reach = -(-(num_bytes + 64) // alignment) * alignment
        assert start in inside and start + reach in inside
        assert start == inside[0] if mode is Guard.BEFORE else start + reach == behind
        assert len(inside) - 1 - reach < page, "no more pages than it needs"
        # What is around it stays as it was, or the process ends with the array.
        array[:] = 1


def test_a_slot_of_the_cache_is_protected_by_whole_pages(page: int) -> None:
    slot = guard.GuardedSlot(5000)
    slot.set_protected(True)
    slot.set_protected(False)
    assert slot.address % 64 == 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system takes no such advice")
def test_whole_pages_of_a_file_are_forgotten_and_no_others(page: int, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(5 * page))
    forgotten: list[tuple[int, int]] = []
    with MappedFile(path) as file:
        noting = SimpleNamespace(madvise=lambda advice, start, length: forgotten.append((start, length)))
        monkeypatch.setattr(file, "_map", noting)
        generator = np.random.default_rng(0)
        for _ in range(200):
            forgotten.clear()
            start, end = sorted(generator.integers(0, 5 * page, 2).tolist())
            file.forget(start, end)
            whole = [number for number in range(5) if start <= number * page and (number + 1) * page <= end]
            assert forgotten == ([(whole[0] * page, len(whole) * page)] if whole else [])
        monkeypatch.undo()

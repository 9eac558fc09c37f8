"""A device is trusted after it computed a product and an attention: one that is right, wrong or broken."""

import re
from collections.abc import Callable, Sequence
from importlib import metadata

import numpy as np
import pytest

from localinfer.errors import BackendUnavailableError
from localinfer.kernels.cuda import kernel_cache

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda.device import Launch, Step
from localinfer.kernels.cuda.self_check import check_device
from tests.kernels.cuda.device import EmulatedDevice


class CountingDevice(EmulatedDevice):
    """Knows what of its memory was not given back."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()

    def allocate(self, num_bytes: int) -> int:
        self.held.add(address := super().allocate(num_bytes))
        return address

    def free(self, address: int) -> None:
        self.held.remove(address)


class SkippingDevice(CountingDevice):
    """Leaves out one kernel, so that what it should have written is whatever was there."""

    skipped = ""

    def run(self, steps: Sequence[Step]) -> None:
        super().run([step for step in steps if not (isinstance(step, Launch) and step.kernel == self.skipped)])


class ScalingDevice(CountingDevice):
    """Reads numbers that are off by some part."""

    factor = 1.0

    def read(self, address: int, out: np.ndarray) -> None:
        super().read(address, out)
        out *= self.factor


def test_a_device_that_computes_what_it_should_passes_and_gets_its_memory_back() -> None:
    device = CountingDevice()
    check_device(device)
    assert not device.held and device.overlaps
    kernels = set(device.kernels)
    assert {"matmul.matmul", "matmul_tiles.matmul_tiles", "attention.attend_chunks"} <= kernels


@pytest.mark.parametrize(
    "kernel", ["matmul.matmul", "matmul_tiles.matmul_tiles", "attention.attend_chunks", "kv_store.store_rows"]
)
def test_a_device_whose_kernels_do_nothing_does_not_pass(kernel: str) -> None:
    device = SkippingDevice()
    device.skipped = kernel
    with pytest.raises(BackendUnavailableError, match="self-check of a GEMM and an attention differs"):
        check_device(device)
    assert not device.held


@pytest.mark.parametrize("factor", [0.0, 0.97, 1.03, -1.0, np.inf, np.nan])
def test_wrong_numbers_do_not_pass(factor: float) -> None:
    device = ScalingDevice()
    device.factor = factor
    with pytest.raises(BackendUnavailableError, match="differs"):
        check_device(device)


def test_rounding_passes() -> None:
    device = ScalingDevice()
    device.factor = 1.004
    check_device(device)


class OverlappingDevice(CountingDevice):
    """Computes something else, or fails, where launches overlap."""

    failure: Exception | None = None

    def capture(self, steps: Sequence[Step]) -> Callable[[], None]:
        if self.failure is not None:
            raise self.failure
        return super().capture([] if self.overlaps else steps)


@pytest.mark.parametrize("failure", [None, RuntimeError("CUDA_ERROR_NOT_SUPPORTED")])
def test_launches_overlap_only_where_that_gives_the_same_bits(
    failure: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    device = OverlappingDevice()
    device.failure = failure
    check_device(device)
    assert not device.overlaps and not device.held
    (record,) = caplog.records
    assert ("differ from those without overlap" if failure is None else "NOT_SUPPORTED") in record.getMessage()


class BrokenDevice(OverlappingDevice):
    """Computes nothing, or other numbers, after its first launch in a graph."""

    is_broken = False
    keeps_error = True

    def capture(self, steps: Sequence[Step]) -> Callable[[], None]:
        self.is_broken = True
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    def run(self, steps: Sequence[Step]) -> None:
        if self.is_broken and self.keeps_error:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        super().run([] if self.is_broken else steps)


@pytest.mark.parametrize(("keeps_error", "message"), [(True, "computes nothing since"), (False, "numbers changed")])
def test_a_device_that_overlapping_launches_broke_is_not_taken(keeps_error: bool, message: str) -> None:
    device = BrokenDevice()
    device.keeps_error = keeps_error
    with pytest.raises(BackendUnavailableError, match=message):
        check_device(device)
    assert not device.overlaps and not device.held


def test_launches_do_not_overlap_on_older_gpus() -> None:
    device = CountingDevice()
    device.capability = (8, 9)
    check_device(device)
    assert not device.overlaps


VERSIONS = {
    "numba-cuda": "0.30.4", "torch": "2.11.0+cu130", "numba": "0.67.0", "llvmlite": "0.50.0", "numpy": "2.4.6"
}  # fmt: skip


@pytest.mark.parametrize(
    ("package", "version", "is_enough"),
    [
        *[("numba-cuda", version, False) for version in ("0.29.0", "0.30.0", "0.30.3", "0.9.9")],
        *[("numba-cuda", version, True) for version in ("0.30.4", "0.30.4.post1", "0.31.0", "1.0")],
        *[("torch", version, False) for version in ("2.5.1+cu124", "1.13")],
        *[("torch", version, True) for version in ("2.6.0", "2.11.0+cu130", "3.0a0")],
        *[("numpy", version, False) for version in ("2.5.0", "2.5.2", "3.0.0")],
        *[("numpy", version, True) for version in ("1.26.4", "2.4.6")],
    ],
)
def test_versions_that_fail_are_refused_by_name(
    package: str, version: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", (VERSIONS | {package: version}).__getitem__)
    if is_enough:
        kernel_cache.require_numba_cuda()
        return
    wanted = "before 2.5" if package == "numpy" else ".* or newer"
    message = f"needs {package} {wanted}, and {re.escape(version)} is installed; install"
    with pytest.raises(BackendUnavailableError, match=message):
        kernel_cache.require_numba_cuda()

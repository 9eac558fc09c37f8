"""A GPU whose numbers differ from the CPU's, or that fails, is not taken, and one line says why."""

import logging
from typing import Any

import pytest

from localinfer.errors import BackendUnavailableError
from localinfer.kernels.cuda.device import FoundDevice
from localinfer.models.load import device_request, devices
from localinfer.models.load.device_request import DeviceRequest
from localinfer.models.load.placement import MemoryNeeds

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from tests.models.emulated_gpu import NamedDevice, emulate_gpu

NEEDS = MemoryNeeds(layers=[1 << 30] * 4, output=1 << 28, embedding=1 << 29, working=1 << 28)


class WrongDevice(NamedDevice):
    """Gives numbers that are off."""

    def read(self, address: int, out: Any) -> None:
        super().read(address, out)
        out *= 0.9


class BrokenDevice(NamedDevice):
    """Fails at the first kernel, as a driver does, and at closing."""

    def run(self, steps: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nwith advice in further lines")

    def close(self) -> None:
        raise RuntimeError("CUDA error: the context is gone")


class UnopenedDevice(NamedDevice):
    """Whose bindings are not what was expected."""

    def __init__(self, index: int = 0) -> None:
        raise ImportError("cannot import name 'driver'")


DEVICES = {WrongDevice: "differs from the CPU by", BrokenDevice: "illegal memory access", UnopenedDevice: "ImportError"}


@pytest.mark.parametrize("device", DEVICES)
def test_a_gpu_that_computes_something_else_is_not_taken(
    device: type[NamedDevice], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emulate_gpu(monkeypatch, device, checks=True)
    with caplog.at_level(logging.WARNING):
        assert devices.open_devices(DeviceRequest(device="auto"), lambda: NEEDS) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("running on the CPU: ") and "\n" not in record.getMessage()
    assert DEVICES[device] in record.getMessage()
    with pytest.raises(BackendUnavailableError, match=DEVICES[device]):
        devices.open_devices(DeviceRequest(device="cuda"), lambda: NEEDS)


def test_a_gpu_that_computes_what_it_should_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_gpu(monkeypatch, checks=True)
    opened = devices.open_devices(DeviceRequest(device="auto"), lambda: NEEDS)
    assert opened is not None and opened[1].is_whole


def test_libraries_that_cannot_be_imported_leave_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> list[FoundDevice]:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(device_request, "has_driver", lambda: True)
    monkeypatch.setattr(devices, "find_devices", broken)
    with caplog.at_level(logging.WARNING):
        assert devices.open_devices(DeviceRequest(device="auto"), lambda: NEEDS) is None
    assert "running on the CPU" in caplog.text and "libcudart" in caplog.text

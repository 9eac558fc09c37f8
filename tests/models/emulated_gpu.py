"""A machine whose GPUs are emulators."""

from collections.abc import Sequence

import pytest

from localinfer.kernels.cuda import program
from localinfer.kernels.cuda.device import FoundDevice
from localinfer.models.load import device_request, devices
from tests.kernels.cuda.device import EmulatedDevice


class NamedDevice(EmulatedDevice):
    """The emulator, as a loader opens it."""

    name = "emulator"


def emulate_gpu(
    monkeypatch: pytest.MonkeyPatch, device: type[NamedDevice] = NamedDevice, *, checks: bool = False
) -> None:
    """Have loaders find one, with 64 GiB free; without its self-check, which takes the emulator a second."""
    emulate_gpus(monkeypatch, [64 << 30], device, checks=checks)


def find_gpus(monkeypatch: pytest.MonkeyPatch, there: Sequence[FoundDevice]) -> None:
    """Have loaders find these GPUs, which they need not open."""

    def find_devices(most: int | None = None, *, among: Sequence[int] | None = None) -> list[FoundDevice]:
        return [one for one in there if among is None or one.index in among][:most]

    monkeypatch.setattr(devices, "find_devices", find_devices)


def emulate_gpus(
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: Sequence[int],
    device: type[NamedDevice] = NamedDevice,
    *,
    checks: bool = False,
) -> list[NamedDevice]:
    """Have loaders find several, with so much free memory each; returns a list that gets those that they open."""
    opened: list[NamedDevice] = []

    def open_device(index: int) -> NamedDevice:
        opened.append(device(index))
        return opened[-1]

    monkeypatch.setattr(device_request, "has_driver", lambda: True)
    find_gpus(monkeypatch, [FoundDevice("emulator", free, index) for index, free in enumerate(free_bytes)])
    monkeypatch.setattr(devices, "CudaDevice", open_device)
    # Captured graphs have room for more chunks than short texts fill, at the same price each for an emulator.
    monkeypatch.setattr(program, "_FEWEST_CHUNKS", 2)
    if not checks:
        monkeypatch.setattr(devices, "check_device", lambda *_: None)
    return opened

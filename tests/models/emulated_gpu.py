"""A machine whose GPU is the emulator."""

import pytest

from localinfer.kernels.cuda.device import FoundDevice
from localinfer.models.load import devices
from tests.kernels.cuda.device import EmulatedDevice


class NamedDevice(EmulatedDevice):
    """The emulator, as a loader opens it."""

    name = "emulator"


def emulate_gpu(
    monkeypatch: pytest.MonkeyPatch, device: type[NamedDevice] = NamedDevice, *, checks: bool = False
) -> None:
    """Have loaders find it, with 64 GiB free; without its self-check, which takes the emulator a second."""
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    monkeypatch.setattr(devices, "find_device", lambda: FoundDevice("emulator", 64 << 30))
    monkeypatch.setattr(devices, "CudaDevice", device)
    if not checks:
        monkeypatch.setattr(devices, "check_device", lambda *_: None)

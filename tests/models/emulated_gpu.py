"""A machine whose GPU is the emulator."""

import pytest

from localinfer.kernels.cuda.device import FoundDevice
from localinfer.models import device_choice
from tests.kernels.cuda_device import EmulatedDevice


class NamedDevice(EmulatedDevice):
    """The emulator, as a loader opens it."""

    name = "emulator"


def emulate_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loaders find it, with 64 GiB free."""
    monkeypatch.setattr(device_choice, "has_driver", lambda: True)
    monkeypatch.setattr(device_choice, "find_device", lambda: FoundDevice("emulator", 64 << 30))
    monkeypatch.setattr(device_choice, "CudaDevice", NamedDevice)

"""Pages of keys and values in a device's memory, for the pool that hands them out."""

from dataclasses import dataclass, field

from localinfer.kernels.cuda.device import Device
from localinfer.kernels.kv_layout import KVLayout


@dataclass(frozen=True)
class DeviceKVLayout(KVLayout):
    """A page layout whose pages lie in a device's memory; `slot_memory.DeviceMemory`."""

    device: Device = field(kw_only=True, repr=False, compare=False)

    def allocate(self, num_bytes: int) -> int:
        """Address of fresh memory. Raises: OutOfMemoryError."""
        return self.device.allocate(num_bytes)

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Copy from one address to another, after every step so far."""
        self.device.copy(source, target, num_bytes)

    def free_bytes(self) -> int:
        """Memory that is free on the device."""
        return self.device.free_bytes()

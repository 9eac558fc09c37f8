"""A device of CUDA tapes without a GPU and without arithmetic: it notes what it is given, and every number is 0."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cuda.device import BF16, OVERLAP_CAPABILITY, Launch, Step
from localinfer.kernels.cuda.kernel_cache import KernelKey
from localinfer.types import ProgressCallback


class RecordingDevice:
    """`kernels.cuda.device.CudaDevice` with memory of made-up addresses, for models of any size.

    launches: those that were run or replayed, in order. keys: kernels that were prepared.
    """

    name = "recording"
    gemm_kind = BF16
    waited_seconds = 0.0

    def __init__(
        self, index: int | None = None, *, overlaps: bool = False, capability: tuple[int, int] = (9, 0)
    ) -> None:
        self.index = index or 0
        self.capability = capability
        self.overlaps = overlaps and capability >= OVERLAP_CAPABILITY
        self.launches: list[Launch] = []
        self.keys: set[KernelKey] = set()
        self._end = 1 << 44

    def allocate(self, num_bytes: int) -> int:
        address = self._end
        self._end += -(-max(num_bytes, 256) // 256) * 256
        return address

    def free(self, address: int) -> None: ...

    def write(self, address: int, data: NDArray[Any]) -> None:
        assert address >= 1 << 44 and address + data.nbytes <= self._end, "memory of this device"

    def read(self, address: int, out: NDArray[Any]) -> None:
        assert address >= 1 << 44 and address + out.nbytes <= self._end, "memory of this device"
        out.reshape(-1).view(np.uint8)[:] = 0

    def copy(self, source: int, target: int, num_bytes: int) -> None: ...

    def free_bytes(self) -> int:
        return 64 << 30

    def used_bytes(self) -> int:
        return self._end - (1 << 44)

    def read_bandwidth(self) -> float:
        return 1e12

    def synchronize(self) -> None: ...

    def prepare(
        self, first: Sequence[KernelKey], every: Sequence[KernelKey], progress: ProgressCallback | None
    ) -> None:
        self.keys.update(first, every)

    def run(self, steps: Sequence[Step]) -> None:
        self.launches += [step for step in steps if isinstance(step, Launch)]

    def capture(self, steps: Sequence[Step]) -> Callable[[], None]:
        return lambda: self.run(steps)

    def close(self) -> None: ...

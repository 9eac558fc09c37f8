"""What the emulator shows of every op, on a GPU: the same tests with new inputs and another device under them.

`pytest -m cuda` runs these; without a GPU they are skipped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from localinfer.kernels.cuda.device import CudaDevice, Launch, Step
from localinfer.system.machine_limits import has_driver
from tests.kernels.cpu.tape_runs import random_rows
from tests.kernels.cuda.test_cuda_on_gpu import FRESH_SEED
from tests.kernels.random_weights import random_weights

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from tests.kernels.cuda import (
    test_cuda_attention,
    test_cuda_draws,
    test_cuda_media,
    test_cuda_page_sums,
    test_cuda_tape,
)

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not has_driver(), reason="there is no NVIDIA driver here")]

_MODULES = (test_cuda_attention, test_cuda_draws, test_cuda_media, test_cuda_page_sums, test_cuda_tape)

for _module in _MODULES:
    globals().update({name: thing for name, thing in vars(_module).items() if name.startswith("test_")})


class NotingDevice(CudaDevice):
    """A GPU that notes which kernels it starts, as the emulator does."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def run(self, steps: Sequence[Step]) -> None:
        self._note(steps)
        super().run(steps)

    def capture(self, steps: Sequence[Step]) -> Callable[[], None]:
        replay = super().capture(steps)

        def noted() -> None:
            self._note(steps)
            replay()

        return noted

    def _note(self, steps: Sequence[Step]) -> None:
        self.kernels += [step.kernel for step in steps if isinstance(step, Launch)]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Put the GPU in the emulator's place, and new numbers in that of the usual ones.

    A whole block rounds to int8 in five places, and how far that leads depends on the numbers: those stay.
    """

    def fresh(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: make(*arguments[:-1], (arguments[-1] + FRESH_SEED) % 2**32)

    for module in _MODULES:
        monkeypatch.setattr(module, "EmulatedDevice", NotingDevice)
        for name, make in (("random_rows", random_rows), ("random_weights", random_weights)):
            if hasattr(module, name) and "block_of_a_decoder" not in request.node.name:
                monkeypatch.setattr(module, name, fresh(make))

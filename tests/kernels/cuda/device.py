"""A device of CUDA tapes in this process: the emulator in place of a GPU, NumPy in place of the library's products."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cuda.device import BF16, F32, CudaDevice, Gemm, Launch, Step
from localinfer.kernels.cuda.kernel_cache import KernelKey
from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.program import CudaProgram
from localinfer.kernels.cuda.weights import upload
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import KVLayerShape, OpGraph
from localinfer.types import FloatArray, ProgressCallback
from tests.kernels.cpu.device import DecodedWeights
from tests.kernels.cuda.emulation import EmulatedMemory, Emulator


class EmulatedDevice:
    """`kernels.cuda.device.Device` without a GPU; graphs are lists of steps."""

    capability = (9, 0)
    gemm_kind = BF16
    overlaps = False
    waited_seconds = 0.0

    def __init__(self, index: int = 0) -> None:
        self.index = index
        # No address of one device is one of another.
        self.memory = EmulatedMemory(index + 1 << 44)
        self.emulator = Emulator(self.memory)
        self.kernels: list[str] = []

    def allocate(self, num_bytes: int) -> int:
        return self.memory.allocate(max(256, num_bytes))

    def free(self, address: int) -> None:
        """Memory of the emulator is never used twice."""

    def write(self, address: int, data: NDArray[Any]) -> None:
        self.memory.view(address, data.nbytes)[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def read(self, address: int, out: NDArray[Any]) -> None:
        out.reshape(-1).view(np.uint8)[:] = self.memory.view(address, out.nbytes)

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        self.memory.view(target, num_bytes)[:] = self.memory.view(source, num_bytes)

    def free_bytes(self) -> int:
        return 1 << 30

    def used_bytes(self) -> int:
        return 1 << 20

    def read_bandwidth(self) -> float:
        return 1e9

    def prepare(
        self, first: Sequence[KernelKey], every: Sequence[KernelKey], progress: ProgressCallback | None
    ) -> None:
        """There is nothing to compile."""

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Launch):
                self.kernels.append(step.kernel)
                self.emulator.launch(step.kernel, step.constants, step.grid, step.threads, step.values)
            else:
                self._multiply(step)

    def capture(self, steps: Sequence[Step]) -> Callable[[], None]:
        return lambda: self.run(steps)

    def close(self) -> None: ...

    def _multiply(self, product: Gemm) -> None:
        x = self._numbers(product.x, product.rows * product.inner, product.kind).reshape(product.rows, -1)
        weights = self._numbers(product.weights, product.columns * product.inner, product.kind)
        out = x @ weights.reshape(product.columns, -1).T
        for row in range(product.rows):
            self.write(product.out + row * product.out_stride, out[row].astype(np.float32))

    def _numbers(self, address: int, count: int, kind: int) -> FloatArray:
        if kind == F32:
            return self.memory.view(address, 4 * count).view(np.float32)
        bits = self.memory.view(address, 2 * count).view(np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32)


class CudaWeights(DecodedWeights):
    """Weights in planes on a device."""

    def __init__(self, device: CudaDevice, path: Path) -> None:
        super().__init__(path, lambda *matrices: upload(device, Layout.F32, *matrices))


class CudaTestDevice:
    """CUDA as a device of the architecture tests: float32 weights, a tape and cache pages."""

    def __init__(self, device: CudaDevice, kv_type: str = "f32") -> None:
        self._device = device
        self._kv_type = kv_type

    def weights(self, path: Path) -> CudaWeights:
        return CudaWeights(self._device, path)

    def program(self, graph: OpGraph, max_rows: int) -> CudaProgram:
        layout = KVLayout(self._kv_type, graph.kv_layers)
        return lower_to_cuda(graph, self._device, layout, max_batch_rows=max_rows, max_output_rows=max_rows)

    def pages(self, layers: Sequence[KVLayerShape], num_positions: int) -> NDArray[np.int64]:
        layout = KVLayout(self._kv_type, layers)
        count = -(-num_positions // layout.page_tokens)
        address = self._device.allocate(count * layout.page_bytes)
        return address + np.arange(count, dtype=np.int64) * layout.page_bytes

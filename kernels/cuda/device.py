"""The GPU: memory by address, and steps that run in order; torch for memory, graphs and GEMMs, the driver for kernels.

Only this module imports torch and the driver's bindings. Tests replace the device by an emulator.
"""

import bisect
import ctypes
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import BackendUnavailableError, OutOfMemoryError
from localinfer.kernels.cuda.kernel_cache import KernelKey, compile_all, entry_name, kernel_ptx, require_numba_cuda
from localinfer.system.machine_limits import has_driver
from localinfer.types import ProgressCallback

F32, F16, BF16 = range(3)
"""Element types of a library GEMM, numbered as in `compiled.rows`."""

_LOG_BYTES = 8192
"""Of what the driver says of a kernel that it refuses."""

_READ_BYTES = 1 << 30
_READS = 8
"""Bytes and repetitions of `read_bandwidth`."""


@dataclass(frozen=True)
class Launch:
    """A kernel launch: kernel, constants, grid, threads per block, arguments."""

    kernel: str
    constants: tuple[int, ...]
    grid: tuple[int, int, int]
    threads: int
    values: tuple[float, ...]

    @property
    def key(self) -> KernelKey:
        return self.kernel, self.constants


@dataclass(frozen=True)
class Gemm:
    """out[rows, columns] float32 = x[rows, inner] @ weights[columns, inner].T; out_stride in bytes."""

    out: int
    out_stride: int
    x: int
    weights: int
    rows: int
    columns: int
    inner: int
    kind: int


Step = Launch | Gemm

_LEAST_CAPABILITY = (7, 5)
OVERLAP_CAPABILITY = (9, 0)
"""Minimum compute capability of programmatic dependent launch."""


@dataclass(frozen=True)
class FoundDevice:
    """A GPU, its free memory, and its number among those of this process."""

    name: str
    free_bytes: int
    index: int = 0


def find_devices(most: int | None = None, *, among: Sequence[int] | None = None) -> list[FoundDevice]:
    """The CUDA devices that can be used, at least one.

    most: the first so many of them. among: of these numbers only. To ask a GPU for its free memory takes some of it, so
    no others are asked. Raises: BackendUnavailableError with the reason.
    """
    if not has_driver():
        raise BackendUnavailableError(
            "device 'cuda' needs an NVIDIA GPU, and its driver is not installed; take device 'cpu'"
        )
    require_numba_cuda()
    import torch

    if not torch.cuda.is_available():
        built = (
            f"torch {torch.__version__} sees none" if torch.version.cuda else f"torch {torch.__version__} has no CUDA"
        )
        raise BackendUnavailableError(
            f"device 'cuda' needs a CUDA device, and {built}; check the driver with nvidia-smi, or take device 'cpu'"
        )
    there = range(torch.cuda.device_count())
    wanted = there if among is None else [index for index in among if index in there]
    usable = [index for index in wanted if torch.cuda.get_device_capability(index) >= _LEAST_CAPABILITY]
    if not wanted:
        named = ", ".join(f"cuda:{index}" for index in among or ())
        raise BackendUnavailableError(f"there is no GPU {named}; there are {len(there)}, from cuda:0 on")
    if not usable:
        name, (major, minor) = torch.cuda.get_device_name(wanted[0]), torch.cuda.get_device_capability(wanted[0])
        raise BackendUnavailableError(
            f"{name} has compute capability {major}.{minor}; 7.5 or newer is needed: take device 'cpu'"
        )
    return [
        FoundDevice(torch.cuda.get_device_name(index), int(torch.cuda.mem_get_info(index)[0]), index)
        for index in usable[:most]
    ]


def parameter_kinds(ptx: bytes) -> tuple[type[ctypes.c_float] | type[ctypes.c_int64], ...]:
    """The types of a kernel's arguments: 32-bit parameters are floats, others int64."""
    entry = ptx[ptx.index(b".entry ") :]
    kinds = entry[: entry.index(b")")].split(b".param ")[1:]
    return tuple(ctypes.c_float if kind.startswith((b".f32", b".b32")) else ctypes.c_int64 for kind in kinds)


def overlapping_launch(launch: Launch, stream: int) -> Any:
    """The driver's CUlaunchConfig for programmatic dependent launch: the kernel waits for the previous one."""
    from cuda.bindings import driver

    allowed = driver.CUlaunchAttribute()
    allowed.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    allowed.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes = 0
    config.hStream = driver.CUstream(stream)
    config.attrs, config.numAttrs = [allowed], 1
    return config


class CudaDevice:
    """One CUDA device. Any thread, one at a time.

    index: its number among those of this process.
    overlaps: use programmatic dependent launch where the GPU supports it; `self_check` turns it on where it works.
    waited_seconds: total time that `read` has waited for steps.
    """

    def __init__(self, index: int | None = None, *, overlaps: bool = False) -> None:
        """index: None for the first that can be used. Raises: BackendUnavailableError."""
        (found,) = find_devices(1, among=None if index is None else [index])
        self.name, self._free_at_first, self.index = found.name, found.free_bytes, found.index
        self._place = f"cuda:{found.index}"
        self.waited_seconds = 0.0
        import torch
        from cuda.bindings import driver

        self._torch = torch
        self._driver = driver
        with torch.cuda.device(self.index):
            torch.zeros(1, device=self._place)  # creates the context into which kernels are loaded
            (self._context,) = self._check(driver.cuCtxGetCurrent())
        major, minor = torch.cuda.get_device_capability(self.index)
        self.capability = (int(major), int(minor))
        self.gemm_kind = BF16 if self.capability >= (8, 0) else F16
        self.overlaps = overlaps and self.capability >= OVERLAP_CAPABILITY
        self._stream = torch.cuda.Stream(device=self.index)
        self._tensors: dict[int, Any] = {}
        self._starts: list[int] = []
        self._views: dict[tuple[int, Any], Any] = {}
        # torch before 2.8 rounds products of 16-bit numbers to 16 bits.
        self._widens = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 8)
        self._staging: list[Any] = []
        self._functions: dict[KernelKey, Any] = {}
        self._modules: list[Any] = []
        self._graphs: list[Any] = []

    def allocate(self, num_bytes: int) -> int:
        """Address of zeroed memory, a multiple of 256. Raises: OutOfMemoryError."""
        self._enter()
        try:
            tensor = self._torch.zeros(-(-max(256, num_bytes) // 16) * 16, dtype=self._torch.uint8, device=self._place)
        except self._torch.cuda.OutOfMemoryError:
            free = self.free_bytes()
            raise OutOfMemoryError(
                f"{num_bytes:,} bytes are needed on {self.name}, which has {free:,} free; close other programs, "
                "give a smaller context_length or kv_memory, or take device 'cpu'"
            ) from None
        # Zeros are written on another stream than that of the steps.
        self._torch.cuda.current_stream(self.index).synchronize()
        address = int(tensor.data_ptr())
        self._tensors[address] = tensor
        bisect.insort(self._starts, address)
        return address

    def free(self, address: int) -> None:
        self._enter()
        self._stream.synchronize()
        del self._tensors[address]
        self._starts.remove(address)
        for key in [key for key in self._views if key[0] == address]:
            del self._views[key]

    def write(self, address: int, data: NDArray[Any]) -> None:
        """Copy an array to an address; the caller may overwrite it afterwards."""
        self._enter()
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        pinned = self._torch.empty(flat.size, dtype=self._torch.uint8, pin_memory=flat.size < 1 << 20)
        pinned.numpy()[:] = flat
        self._check(self._driver.cuMemcpyHtoDAsync(address, pinned.data_ptr(), flat.size, self._stream.cuda_stream))
        # Kept alive until a later step has ended.
        self._staging.append(pinned)
        if flat.size >= 1 << 20 or len(self._staging) > 256:
            self.synchronize()

    def read(self, address: int, out: NDArray[Any]) -> None:
        """Wait for every step so far and copy from an address."""
        assert out.flags.c_contiguous, "results are copied at once"
        self._enter()
        self._check(self._driver.cuMemcpyDtoHAsync(out.ctypes.data, address, out.nbytes, self._stream.cuda_stream))
        began = time.perf_counter()
        self.synchronize()
        self.waited_seconds += time.perf_counter() - began

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        self._enter()
        self._check(self._driver.cuMemcpyDtoDAsync(target, source, num_bytes, self._stream.cuda_stream))

    def free_bytes(self) -> int:
        return int(self._torch.cuda.mem_get_info(self.index)[0])

    def used_bytes(self) -> int:
        """Memory allocated since this device was opened, by any process."""
        return self._free_at_first - self.free_bytes()

    def read_bandwidth(self) -> float:
        """Measure the device's memory read bandwidth in bytes per second."""
        torch = self._torch
        self._enter()
        with torch.cuda.stream(self._stream):
            count = min(_READ_BYTES, self.free_bytes() // 4) // 4
            values = torch.ones(count, dtype=torch.float32, device=self._place)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(_READS + 2)]
            for mark in marks:
                mark.record()
                values.sum()
            self._stream.synchronize()
        # The first is a warm-up.
        milliseconds = min(first.elapsed_time(second) for first, second in zip(marks[1:], marks[2:], strict=False))
        num_bytes = values.numel() * 4
        del values
        torch.cuda.empty_cache()
        return float(num_bytes / milliseconds * 1e3)

    def prepare(
        self, first: Sequence[KernelKey], every: Sequence[KernelKey], progress: ProgressCallback | None
    ) -> None:
        """Compile all kernels, and load those that are needed first."""
        compile_all([*first, *every], self.capability, progress)
        for key in first:
            self._function(key)

    def run(self, steps: Sequence[Step]) -> None:
        """Start steps."""
        self._enter()
        with self._torch.cuda.stream(self._stream):
            for step in steps:
                self._start(step, self._stream.cuda_stream)

    def capture(self, steps: Sequence[Step]) -> Callable[[], None]:
        """A function that replays these steps as one graph.

        Other threads may use their devices meanwhile: only this thread's calls are part of the capture.
        """
        self._enter()
        for step in steps:
            if isinstance(step, Launch):
                self._function(step.key)  # loading a kernel is not allowed while capturing
        self.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            stream = self._torch.cuda.current_stream().cuda_stream
            for step in steps:
                self._start(step, stream)
        self._graphs.append(graph)

        def replay() -> None:
            self._enter()
            with self._torch.cuda.stream(self._stream):
                graph.replay()

        return replay

    def close(self) -> None:
        self._enter()
        self.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._views.clear()
        self._tensors.clear()
        self._starts.clear()
        self._functions.clear()
        for module in self._modules:
            self._check(self._driver.cuModuleUnload(module))
        self._modules.clear()

    def _start(self, step: Step, stream: int) -> None:
        if isinstance(step, Launch):
            function, kinds = self._function(step.key)
            arguments = (step.values, kinds)
            if self.overlaps:
                self._check(self._driver.cuLaunchKernelEx(overlapping_launch(step, stream), function, arguments, 0))
                return
            self._check(self._driver.cuLaunchKernel(function, *step.grid, step.threads, 1, 1, 0, stream, arguments, 0))
        else:
            self._multiply(step)

    def _function(self, key: KernelKey) -> Any:
        if key not in self._functions:
            ptx = kernel_ptx(key, self.capability)
            module = self._load(ptx, entry_name(key))
            self._modules.append(module)
            (function,) = self._check(self._driver.cuModuleGetFunction(module, entry_name(key).encode()))
            self._functions[key] = (function, parameter_kinds(ptx))
        return self._functions[key]

    def _load(self, ptx: bytes, name: str) -> Any:
        """The driver's module of a kernel. Raises: BackendUnavailableError with what its assembler says."""
        options, log = self._driver.CUjit_option, bytearray(_LOG_BYTES)
        kinds = [options.CU_JIT_ERROR_LOG_BUFFER, options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        status, *modules = self._driver.cuModuleLoadDataEx(ptx + b"\0", len(kinds), kinds, [log, len(log)])
        said = "; ".join(log.rstrip(b"\0").decode(errors="replace").split("\n")).strip("; ")
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise BackendUnavailableError(
                f"the CUDA driver refuses kernel {name} for sm_{self.capability[0]}{self.capability[1]} with "
                f"{status.name}" + (f" ({said})" if said else "") + "; update the driver, or take device 'cpu'"
            )
        return modules[0]

    def _multiply(self, product: Gemm) -> None:
        torch = self._torch
        kind = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[product.kind]
        x = self._view(product.x, kind, (product.rows, product.inner), product.inner)
        weights = self._view(product.weights, kind, (product.columns, product.inner), product.inner)
        shape = (product.rows, product.columns)
        out = self._view(product.out, torch.float32, shape, product.out_stride // 4)
        if product.kind == F32:
            torch.mm(x, weights.t(), out=out)
        elif self._widens:
            torch.mm(x, weights.t(), torch.float32, out=out)
        else:
            out.copy_(torch.mm(x, weights.t()))

    def _view(self, address: int, kind: Any, shape: tuple[int, int], stride: int) -> Any:
        start = self._starts[bisect.bisect_right(self._starts, address) - 1]
        if (start, kind) not in self._views:
            self._views[start, kind] = self._tensors[start].view(kind)
        return self._views[start, kind].as_strided(shape, (stride, 1), (address - start) // kind.itemsize)

    def _enter(self) -> None:
        """Make the device's context current in this thread, where another device's may have been since."""
        self._check(self._driver.cuCtxSetCurrent(self._context))

    def synchronize(self) -> None:
        self._stream.synchronize()
        self._staging.clear()

    def _check(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *values = result
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise BackendUnavailableError(
                f"the CUDA driver returned {status.name}; load the model again, or take device 'cpu'"
            )
        return tuple(values)

"""What the device asks of torch and of the driver, on stand-ins for both: memory, library products and capture."""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localinfer.errors import BackendUnavailableError
from localinfer.kernels.cuda import device as device_module
from localinfer.kernels.cuda.device import BF16, F32, CudaDevice, FoundDevice, Gemm, Launch


class Kind(str):
    """A type of elements."""

    itemsize = 0


def kind(name: str, itemsize: int) -> Kind:
    made = Kind(name)
    made.itemsize = itemsize
    return made


FLOAT32, FLOAT16, BFLOAT16, UINT8 = kind("float32", 4), kind("float16", 2), kind("bfloat16", 2), kind("uint8", 1)


class Tensor:
    """A view of some bytes: first element, shape and strides."""

    def __init__(self, address: int, num_bytes: int, dtype: Kind = UINT8, place: tuple[Any, ...] = ()) -> None:
        self.address, self.num_bytes, self.dtype, self.place = address, num_bytes, dtype, place

    def data_ptr(self) -> int:
        return self.address

    def view(self, dtype: Kind) -> "Tensor":
        assert self.num_bytes % dtype.itemsize == 0
        return Tensor(self.address, self.num_bytes, dtype)

    def as_strided(self, shape: tuple[int, int], strides: tuple[int, int], offset: int) -> "Tensor":
        last = offset + (shape[0] - 1) * strides[0] + shape[1]
        assert last * self.dtype.itemsize <= self.num_bytes, "inside of the array"
        return Tensor(self.address, self.num_bytes, self.dtype, (shape, strides, offset))

    def t(self) -> "Tensor":
        return self

    def copy_(self, other: Any) -> None:
        self.copied = other


class Torch(ModuleType):
    """As much of torch as a device asks for."""

    float32, float16, bfloat16, uint8 = FLOAT32, FLOAT16, BFLOAT16, UINT8

    def __init__(self, version: str) -> None:
        super().__init__("torch")
        self.__version__ = version
        self.products: list[tuple[Any, ...]] = []
        self.modes: list[str] = []
        self._end = 1 << 40
        stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=7)

        @contextlib.contextmanager
        def graph(made: Any, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
            self.modes.append(capture_error_mode)
            yield

        self.cuda = SimpleNamespace(
            device=lambda index: contextlib.nullcontext(),
            stream=lambda stream: contextlib.nullcontext(),
            get_device_capability=lambda index: (9, 0),
            Stream=lambda device: stream,
            current_stream=lambda *index: stream,
            OutOfMemoryError=MemoryError,
            CUDAGraph=lambda: SimpleNamespace(replay=lambda: None, reset=lambda: None),
            graph=graph,
        )

    def zeros(self, count: int, *, dtype: Kind = UINT8, device: str) -> Tensor:
        address = self._end
        self._end += -(-count // 256) * 256
        return Tensor(address, count, dtype)

    def mm(self, x: Tensor, weights: Tensor, *dtype: Kind, out: Tensor | None = None) -> str:
        self.products.append((x, weights, dtype, out))
        return "product"


@pytest.fixture
def torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch(getattr(request, "param", "2.11.0+cu130"))
    success = SimpleNamespace(name="CUDA_SUCCESS")
    driver = ModuleType("cuda.bindings.driver")
    driver.CUresult = SimpleNamespace(CUDA_SUCCESS=success)  # type: ignore[attr-defined]
    driver.cuCtxGetCurrent = lambda: (success, 1)  # type: ignore[attr-defined]
    driver.cuCtxSetCurrent = lambda context: (success,)  # type: ignore[attr-defined]
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    cuda = ModuleType("cuda")
    cuda.bindings = bindings  # type: ignore[attr-defined]
    for module in (made, cuda, bindings, driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(device_module, "find_devices", lambda *_, among=None: [FoundDevice("stand-in", 1 << 30)])
    return made


def test_a_product_is_written_where_it_belongs(torch: Torch) -> None:
    device = CudaDevice()
    places = [device.allocate(4 * 1024) for _ in range(40)]
    x, weights, out = places[20], places[3], places[39]
    device.run([Gemm(out + 16, 256, x + 64, weights, 8, 16, 32, BF16), Gemm(out, 64, x, weights, 8, 16, 32, F32)])
    (rounded, exact) = torch.products
    assert [tensor.address for tensor in (rounded[0], rounded[1], rounded[3])] == [x, weights, out]
    assert rounded[0].place == ((8, 32), (32, 1), 32) and rounded[0].dtype is BFLOAT16
    assert rounded[1].place == ((16, 32), (32, 1), 0)
    assert rounded[2] == (FLOAT32,) and rounded[3].place == ((8, 16), (64, 1), 4) and rounded[3].dtype is FLOAT32
    assert exact[2] == () and exact[0].dtype is FLOAT32 and exact[3].place == ((8, 16), (16, 1), 0)


@pytest.mark.parametrize("torch", ["2.7.1"], indirect=True)
def test_an_older_torch_rounds_and_copies(torch: Torch) -> None:
    device = CudaDevice()
    place = device.allocate(4096)
    device.run([Gemm(place, 64, place, place, 8, 16, 32, BF16)])
    assert torch.products[0][2:] == ((), None)


def test_memory_that_was_freed_is_not_found_again(torch: Torch) -> None:
    device = CudaDevice()
    first, second, third = (device.allocate(1000) for _ in range(3))
    product = Gemm(third, 16, second, first, 2, 4, 8, F32)
    device.run([product])
    device.free(second)
    device.free(third)
    # What lies behind the end of an array is no part of it.
    with pytest.raises(AssertionError, match="inside"):
        device.run([product])
    again = device.allocate(2000)
    device.run([Gemm(again, 16, again, first, 2, 4, 8, F32)])
    assert torch.products[-1][3].address == again and np.unique([first, again]).size == 2


def test_other_threads_may_use_their_devices_during_a_capture(torch: Torch) -> None:
    device = CudaDevice()
    place = device.allocate(4096)
    device.capture([Gemm(place, 64, place, place, 8, 16, 32, F32)])()
    assert torch.modes == ["thread_local"] and len(torch.products) == 1


def test_a_kernel_that_the_driver_refuses_is_named_with_what_its_assembler_says(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(image: bytes, count: int, options: list[str], values: list[Any]) -> tuple[Any, None]:
        log, size = values
        assert image.endswith(b"\0") and count == len(options) == 2 and len(log) == size
        said = b"ptxas fatal   : Unresolved extern function '__nv_fabsf'\n"
        log[: len(said)] = said
        return SimpleNamespace(name="CUDA_ERROR_INVALID_PTX"), None

    driver = sys.modules["cuda.bindings.driver"]
    driver.CUjit_option = SimpleNamespace(  # type: ignore[attr-defined]
        CU_JIT_ERROR_LOG_BUFFER="log", CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES="size"
    )
    driver.cuModuleLoadDataEx = refuse  # type: ignore[attr-defined]
    monkeypatch.setattr(device_module, "kernel_ptx", lambda *_: b".entry route_3()")
    with pytest.raises(BackendUnavailableError) as raised:
        CudaDevice().run([Launch("experts.route", (3,), (1, 1, 1), 32, ())])
    assert str(raised.value) == (
        "the CUDA driver refuses kernel route_3 for sm_90 with CUDA_ERROR_INVALID_PTX (ptxas fatal   : Unresolved "
        "extern function '__nv_fabsf'); update the driver, or take device 'cpu'"
    )

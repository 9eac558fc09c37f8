"""Where a model is wanted: a device or several, how many layers on GPUs, their shares, and experts on the CPU."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.types import is_finite_number

DEVICES = ("auto", "cpu", "cuda")
"""Devices by kind; GPUs can be named, too."""
DEVICES_HELP = "'auto', 'cpu', 'cuda', or GPUs by number, such as 'cuda:1' or 'cuda:0,cuda:1'"

_GPU = re.compile(r"cuda:(\d{1,3})")


@dataclass(frozen=True, kw_only=True)
class DeviceRequest:
    """Options of `load` that say where a model runs."""

    device: str = "cpu"
    """See DEVICES_HELP."""
    gpu_layers: int | None = None
    """Number of the last layers that run on GPUs; None, or "auto", for as many as fit."""
    tensor_split: Sequence[float] | None = None
    """The GPUs' shares of these layers, as proportions; None for shares that fit."""
    cpu_moe: bool | int | None = None
    """Number of the first layers whose experts stay on the CPU, True for all; None for as few as let the rest run on
    GPUs."""

    def __post_init__(self) -> None:
        layers: object = self.gpu_layers
        if isinstance(layers, str) and layers == "auto":
            object.__setattr__(self, "gpu_layers", None)

    @property
    def is_required(self) -> bool:
        """Whether the CPU alone is not what was asked for."""
        return self.device.startswith("cuda")

    @property
    def gpus(self) -> tuple[int, ...] | None:
        """The numbers of the GPUs that were named; None if any may be taken."""
        return named_gpus(self.device)

    def num_cpu_experts(self, num_layers: int) -> int | None:
        """Of how many of the first layers the experts stay on the CPU; None if that is to be chosen."""
        if isinstance(self.cpu_moe, bool):
            return num_layers if self.cpu_moe else 0
        return None if self.cpu_moe is None else min(self.cpu_moe, num_layers)

    def check(self) -> None:
        """Raise BackendUnavailableError or RequestError for what means nothing, or contradicts itself."""
        named = named_gpus(self.device)
        _check_gpu_layers(self.device, self.gpu_layers)
        _check_cpu_moe(self.cpu_moe)
        _check_tensor_split(self.device, named, self.tensor_split)


def named_gpus(device: str) -> tuple[int, ...] | None:
    """The numbers of the GPUs that a device's name lists; None for a kind of devices.

    Raises: BackendUnavailableError for what is no device.
    """
    if isinstance(device, str) and device in DEVICES:
        return None
    names = device.split(",") if isinstance(device, str) else []
    found = [_GPU.fullmatch(name.strip()) for name in names]
    numbers = [int(match[1]) for match in found if match is not None]
    if not found or len(numbers) < len(found):
        raise BackendUnavailableError(f"device is {device!r:.80}; wanted one of {DEVICES_HELP}")
    if len(set(numbers)) < len(numbers):
        raise BackendUnavailableError(f"device is {device!r}; name every GPU once")
    return tuple(numbers)


def _check_gpu_layers(device: str, gpu_layers: int | None) -> None:
    if gpu_layers is None:
        return
    if not isinstance(gpu_layers, int) or isinstance(gpu_layers, bool) or gpu_layers < 0:
        raise RequestError(
            f"gpu_layers is {gpu_layers!r}; give how many layers run on the GPU, or None for as many as fit"
        )
    if device == "cpu" and gpu_layers:
        raise RequestError(f"gpu_layers is {gpu_layers}, but the device is 'cpu'; take device 'cuda' or 'auto'")
    if device.startswith("cuda") and not gpu_layers:
        raise RequestError(
            f"gpu_layers is 0, but the device is {device!r}; take device 'cpu' for a model without a GPU"
        )


def _check_cpu_moe(cpu_moe: bool | int | None) -> None:
    if cpu_moe is not None and (not isinstance(cpu_moe, int) or cpu_moe < 0):
        raise RequestError(
            f"cpu_moe is {cpu_moe!r:.80}; give of how many of the first layers the experts stay on the CPU, True for "
            "all, or None for what fits"
        )


def _check_tensor_split(device: str, named: Sequence[int] | None, shares: Sequence[float] | None) -> None:
    if shares is None:
        return
    is_list = isinstance(shares, Sequence) and not isinstance(shares, str | bytes) and len(shares) > 0
    are_numbers = is_list and all(is_finite_number(share) and share >= 0 for share in shares)
    if not are_numbers or not any(shares):
        raise RequestError(
            f"tensor_split is {shares!r:.80}; give each GPU's share of the layers as a number of 0 or more, such as "
            "[3, 1], or None for shares that fit"
        )
    if device == "cpu":
        given = ", ".join(f"{share:g}" for share in shares)
        raise RequestError(f"tensor_split is [{given}], but the device is 'cpu'; take device 'cuda' or 'auto'")
    if named is not None and len(named) != len(shares):
        raise RequestError(
            f"tensor_split has shares for {len(shares)} GPUs, and device is {device!r}; give one share for each GPU"
        )

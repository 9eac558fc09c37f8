"""The request for devices: options that say where a model runs, and when GPUs are looked for at all.

What only a model on GPUs needs (`devices`, `placement`, `pipeline`) is imported where some are looked for.
"""

import logging
import re
from collections.abc import Sequence

from localinfer.errors import BackendUnavailableError, LocalinferError, RequestError, UnsupportedFormatError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.config import ModelConfig
from localinfer.system.machine_limits import has_driver
from localinfer.types import Record, is_finite_number

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")
"""Devices by kind; GPUs can be named, too."""
DEVICES_HELP = "'auto', 'cpu', 'cuda', or GPUs by number, such as 'cuda:1' or 'cuda:0,cuda:1'"

GPU_BATCH_ROWS = 1024
"""Rows of a batch that GPUs compute alone."""

USUAL_TOKENS = 8192
"""Positions of the KV cache to plan for, if no context length is given."""

_GPU = re.compile(r"cuda:(\d{1,3})")


class DeviceRequest(Record, kw_only=True):
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
        """True if a GPU was asked for, so that the CPU alone will not do."""
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


def looks_for_gpus(request: DeviceRequest) -> bool:
    """True if GPUs are looked for: without a driver and without a request for them there is nothing to report."""
    is_asked = request.is_required or request.gpu_layers is not None or request.tensor_split is not None
    return request.device != "cpu" and request.gpu_layers != 0 and (is_asked or has_driver())


def calibration_device(device: str) -> str | None:
    """torch's name of the GPU to calibrate on, or None for the CPU; device: "auto", "cpu" or "cuda".

    Raises: BackendUnavailableError if device is "cuda" and torch finds no GPU.
    """
    if device == "cpu" or (device == "auto" and not has_driver()):
        return None
    try:
        import torch

        if torch.cuda.is_available():
            return "cuda"
        reason = "torch finds no GPU"
    except ImportError:
        reason = "torch is not installed"
    if device == "cuda":
        raise BackendUnavailableError(
            f"calibration cannot run on a GPU: {reason}; install 'localinfer[cuda]' with an NVIDIA driver, or take "
            "device 'cpu'"
        )
    return None


def cpu_only(config: ModelConfig, kv_layout: KVLayout) -> LocalinferError | None:
    """Why a model is computed on the CPU whatever GPUs there are; None if it is not."""
    if kv_layout.states:
        return UnsupportedFormatError(
            "this model has recurrent layers, whose states this version keeps on the CPU only; take device 'cpu' "
            "(--device cpu)"
        )
    if find_architecture(config).relative_bias is not None:
        return UnsupportedFormatError(
            f"{config.architecture!r} models have attention biases by distance, which this version computes on the CPU "
            "only; take device 'cpu' (--device cpu)"
        )
    return None


def cached_tokens(config: ModelConfig, context_length: int | None, window_tokens: int | None) -> int:
    """Positions that a GPU's memory for keys and values is planned for.

    context_length: the requested one. window_tokens: positions that texts keep, None for all.
    """
    tokens = min(config.context_length, context_length or USUAL_TOKENS)
    return tokens if window_tokens is None else min(tokens, window_tokens + 2 * GPU_BATCH_ROWS)


def stay_on_cpu(request: DeviceRequest, reason: LocalinferError) -> None:
    """Log why a model is not placed on an available GPU. Raises: `reason` if a GPU was asked for, or layers on one."""
    if request.is_required or request.gpu_layers:
        raise reason
    if request.device == "auto" and (request.tensor_split is not None or has_driver()):
        report_fallback(reason)


def report_fallback(error: Exception) -> None:
    """Log that the CPU is used, and why."""
    logger.warning("running on the CPU: %s", error)

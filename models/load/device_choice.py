"""Which device a model runs on: a GPU where there is one, with as much of the model as it holds, and why not more."""

import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

from localinfer.errors import BackendUnavailableError, LocalinferError, OutOfMemoryError, RequestError
from localinfer.kernels.cuda.device import CudaDevice, find_device, has_driver
from localinfer.kernels.cuda.self_check import check_device
from localinfer.kernels.jit.compile_ahead import ProgressCallback
from localinfer.models.load.memory_fit import MARGIN_BYTES, MemoryNeeds, Placement, choose_placement

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


def check_gpu_layers(device: str, gpu_layers: int | None) -> None:
    """Raise RequestError for a number of layers without meaning on a device."""
    if gpu_layers is None:
        return
    if not isinstance(gpu_layers, int) or isinstance(gpu_layers, bool) or gpu_layers < 0:
        raise RequestError(
            f"gpu_layers is {gpu_layers!r}; give how many layers run on the GPU, or None for as many as fit"
        )
    if device == "cpu" and gpu_layers:
        raise RequestError(f"gpu_layers is {gpu_layers}, but the device is 'cpu'; take device 'cuda' or 'auto'")
    if device == "cuda" and not gpu_layers:
        raise RequestError("gpu_layers is 0, but the device is 'cuda'; take device 'cpu' for a model without a GPU")


def open_device(
    device: str,
    needs: Callable[[], MemoryNeeds],
    gpu_layers: int | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[CudaDevice, Placement] | None:
    """The GPU to run a model on and what of it goes there, or None for the CPU; device: "auto" or "cuda".

    A GPU that does not compute a product and an attention as the CPU does is none. needs: what the model's parts take,
    asked only where there is a GPU. gpu_layers: how many, None for all that fit.
    Raises: BackendUnavailableError if "cuda" was asked for by name and cannot be had, with what is missing;
    RequestError if the layers that were asked for do not fit.
    """
    # Most machines without a GPU have no driver either, and nobody there asked.
    if gpu_layers == 0 or (device == "auto" and gpu_layers is None and not has_driver()):
        return None
    try:
        found = _told(find_device)
        counted = needs()
        placement = choose_placement(counted, found.free_bytes, gpu_layers)
        if placement is None:
            needed = counted.bytes_of(1) + MARGIN_BYTES
            raise BackendUnavailableError(
                f"a single layer and the output need {needed / 1e9:.1f} GB on {found.name}, which has "
                f"{found.free_bytes / 1e9:.1f} GB free; take a smaller model, quantization or context_length, or "
                "device 'cpu'"
            )
        opened = _told(lambda: _open_checked(progress))
        level = logging.INFO if placement.is_whole else logging.WARNING
        logger.log(level, "%s", placement.describe(found.name, found.free_bytes))
        return opened, placement
    except (BackendUnavailableError, OutOfMemoryError) as error:
        if device == "cuda":
            raise
        report_fallback(error)
        return None


def _open_checked(progress: ProgressCallback | None) -> CudaDevice:
    """The GPU, after it has computed what it should."""
    opened = CudaDevice()
    try:
        check_device(opened, progress)
    except BaseException as error:
        if isinstance(error, Exception):
            # A device whose check ended in the midst may fail in closing too, which says nothing more.
            with contextlib.suppress(Exception):
                opened.close()
        raise
    return opened


def _told(ask: Callable[[], Answer]) -> Answer:
    """What `ask` returns, with all that drivers, compilers and their bindings raise as BackendUnavailableError."""
    try:
        return ask()
    except LocalinferError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or "no reason given"
        raise BackendUnavailableError(
            f"the GPU, or what is installed for it, failed before it was used ({type(error).__name__}: {reason}); "
            "take device 'cpu'"
        ) from error


def calibration_device(device: str) -> str | None:
    """torch's name of the GPU to calibrate on, or None for the CPU; device: "auto", "cpu" or "cuda".

    Raises: BackendUnavailableError if "cuda" was asked for by name and torch sees no GPU.
    """
    if device == "cpu" or (device == "auto" and not has_driver()):
        return None
    try:
        import torch

        if torch.cuda.is_available():
            return "cuda"
        reason = "torch sees no GPU"
    except ImportError:
        reason = "torch is not installed"
    if device == "cuda":
        raise BackendUnavailableError(
            f"calibration cannot run on a GPU: {reason}; install 'localinfer[cuda]' with an NVIDIA driver, or take "
            "device 'cpu'"
        )
    return None


def stay_on_cpu(device: str, gpu_layers: int | None, reason: str) -> None:
    """Say why a model does not go to the GPU, if there is one and the choice was ours.

    Raises: BackendUnavailableError if a GPU was asked for by name.
    """
    refusal = BackendUnavailableError(reason)
    if device == "cuda" or gpu_layers:
        raise refusal
    if device == "auto" and has_driver():
        report_fallback(refusal)


def report_fallback(error: Exception) -> None:
    """Say that the CPU is taken, and why."""
    logger.warning("running on the CPU: %s", error)

"""The devices of a model: GPUs if there are any, with as many layers as fit.

How many is computed from the file before loading (`placement.py`): the weights in the device's layout, the KV cache of
the requested context, and working buffers.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from localinfer.errors import (
    BackendUnavailableError,
    LocalinferError,
    OutOfMemoryError,
    RequestError,
    UnsupportedFormatError,
)
from localinfer.kernels.cuda.device import CudaDevice, FoundDevice, find_devices, has_driver
from localinfer.kernels.cuda.self_check import check_device
from localinfer.kernels.kv_layout import KVLayout
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.load.placement import DevicePlacement, DeviceRequest, MemoryNeeds, choose_placement, refusal
from localinfer.types import ProgressCallback

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

GPU_BATCH_ROWS = 1024
"""Rows of a batch that GPUs compute alone."""

USUAL_TOKENS = 8192
"""Positions of the KV cache to plan for, if no context length is given."""


def open_devices(
    request: DeviceRequest,
    needs: Callable[[], MemoryNeeds],
    progress: ProgressCallback | None = None,
    *,
    reserved: Mapping[int, int] | None = None,
) -> tuple[list[CudaDevice], DevicePlacement] | None:
    """The GPUs of a model and its placement on them, or None for the CPU.

    A GPU that fails the self-check is not used. needs: called only if there is a GPU. reserved: by a GPU's number bytes
    that another model will take of it. Raises: BackendUnavailableError if a GPU is required and not available, with the
    reason; RequestError if what is wanted of it does not fit.
    """
    if not looks_for_gpus(request):
        return None
    try:
        placement = plan_placement(request, needs, reserved)
        opened = _open_all(placement, progress)
        on_gpus = placement.num_gpu_layers == placement.num_layers and not placement.num_split_layers
        level = logging.INFO if on_gpus and placement.has_embedding else logging.WARNING
        logger.log(level, "%s", placement.describe())
        return opened, placement
    except (BackendUnavailableError, OutOfMemoryError) as error:
        if request.is_required:
            raise
        report_fallback(error)
        return None


def looks_for_gpus(request: DeviceRequest) -> bool:
    """True if GPUs are looked for: without a driver and without a request for them there is nothing to report."""
    is_asked = request.is_required or request.gpu_layers is not None or request.tensor_split is not None
    return request.device != "cpu" and request.gpu_layers != 0 and (is_asked or has_driver())


def plan_placement(
    request: DeviceRequest, needs: Callable[[], MemoryNeeds], reserved: Mapping[int, int] | None = None
) -> DevicePlacement:
    """The placement of a model on the GPUs of this machine: see `open_devices`.

    Where any may be taken, the first is if it holds the whole model, and the others are not asked for their memory.
    Raises: BackendUnavailableError if there is none, or a single layer fits none; RequestError.
    """

    def find(most: int | None) -> list[FoundDevice]:
        found = _with_gpu_errors(lambda: find_devices(most, among=request.gpus))
        return [_without(one, (reserved or {}).get(one.index, 0)) for one in found]

    found = find(1 if request.gpus is None and request.tensor_split is None else None)
    counted = needs()
    if request.gpus is None and request.tensor_split is None:
        with contextlib.suppress(RequestError):
            first = choose_placement(counted, found, request)
            if first is not None and first.has_all(request):
                return first
        found = find(None)
    placement = choose_placement(counted, found, request)
    if placement is None:
        raise BackendUnavailableError(refusal(counted, found, request))
    return placement


def _without(found: FoundDevice, num_bytes: int) -> FoundDevice:
    return replace(found, free_bytes=max(0, found.free_bytes - num_bytes))


def _open_all(placement: DevicePlacement, progress: ProgressCallback | None) -> list[CudaDevice]:
    """The GPUs of a placement, each after its self-check."""
    opened: list[CudaDevice] = []
    try:
        for share in placement.gpus:
            opened.append(_with_gpu_errors(partial(_open_checked, share.device.index, progress)))
    except BaseException:
        close_all(opened)
        raise
    return opened


def close_all(opened: Sequence[CudaDevice]) -> None:
    """Close devices."""
    for device in opened:
        device.close()


def _open_checked(index: int, progress: ProgressCallback | None) -> CudaDevice:
    """A GPU, after its self-check."""
    opened = CudaDevice(index)
    try:
        check_device(opened, progress)
    except Exception:
        # After a failed check closing may fail too.
        with contextlib.suppress(Exception):
            opened.close()
        raise
    return opened


def _with_gpu_errors(ask: Callable[[], Answer]) -> Answer:
    """The result of `ask`; errors of drivers and compilers become BackendUnavailableError."""
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


def cached_tokens(config: ModelConfig, context_length: int | None, kv_window: int | None) -> int:
    """Positions that a GPU's memory for keys and values is planned for; context_length: the requested one."""
    tokens = min(config.context_length, context_length or USUAL_TOKENS)
    return tokens if kv_window is None else min(tokens, kv_window + 2 * GPU_BATCH_ROWS)


def stay_on_cpu(request: DeviceRequest, reason: LocalinferError) -> None:
    """Log why a model is not placed on an available GPU. Raises: `reason` if a GPU was asked for, or layers on one."""
    if request.is_required or request.gpu_layers:
        raise reason
    if request.device == "auto" and (request.tensor_split is not None or has_driver()):
        report_fallback(reason)


def report_fallback(error: Exception) -> None:
    """Log that the CPU is used, and why."""
    logger.warning("running on the CPU: %s", error)

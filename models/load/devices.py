"""The GPUs of a model, opened with as many layers as fit.

How many is computed from the file before loading (`placement.py`): the weights in the device's layout, the KV cache of
the requested context, and working buffers.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from localinfer.errors import BackendUnavailableError, LocalinferError, OutOfMemoryError, RequestError
from localinfer.kernels.cuda.device import CudaDevice, FoundDevice, find_devices
from localinfer.kernels.cuda.self_check import check_device
from localinfer.models.load.device_request import DeviceRequest, report_fallback
from localinfer.models.load.placement import DevicePlacement, MemoryNeeds, choose_placement, refusal
from localinfer.types import ProgressCallback

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


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

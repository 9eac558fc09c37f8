"""What GPUs would hold of a model, known from its header: the plan that a load would make."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localinfer.errors import BackendUnavailableError, LocalinferError, OutOfMemoryError
from localinfer.kernels.cuda.device import has_driver
from localinfer.kernels.kv_layout import KVLayout
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes
from localinfer.models.load.device_request import DeviceRequest
from localinfer.models.load.devices import USUAL_TOKENS, cached_tokens, cpu_only, looks_for_gpus, plan_placement
from localinfer.models.load.loader import open_model_file, read_config
from localinfer.models.load.memory_needs import memory_needs
from localinfer.models.load.placement import Placement
from localinfer.models.load.programs import check_runs_on_gpus
from localinfer.quant.checkpoint.model_file import ModelFile


def describe_gpus(path: str | os.PathLike[str], *, kv_type: str = "f16") -> dict[str, Any] | None:
    """Which GPUs would have what of a model loaded with device 'auto'; None where no NVIDIA driver is installed.

    Keys: context_length, of which the cache is counted; summary, one line; and gpus, cpu_expert_layers, host_bytes; or
    else reason, why the model stays on the CPU.
    """
    if not has_driver():
        return None
    try:
        return _described(path, kv_type)
    except (LocalinferError, ImportError, OSError, RuntimeError) as error:
        return {"reason": str(error)}


def gpu_placement(
    request: DeviceRequest,
    file: ModelFile,
    config: ModelConfig,
    *,
    kv_type: str = "f16",
    context_length: int | None = None,
    kv_window: int | None = None,
    reserved: Mapping[int, int] | None = None,
) -> Placement | None:
    """What a load would put on GPUs, by the header of an open file; None if the CPU computes all of it.

    kv_window: texts keep so many keys and values, None for all. reserved: see `plan_placement`.
    Raises: as the load where a GPU was asked for, BackendUnavailableError and UnsupportedFormatError; RequestError if
        what is wanted of GPUs does not fit.
    """
    if not looks_for_gpus(request):
        return None
    layout = _layout(config, kv_type)
    reason = cpu_only(config, layout)
    if reason is not None:
        if request.is_required or request.gpu_layers:
            raise reason
        return None
    try:
        return _placed(request, file, config, layout, context_length, kv_window, reserved)
    except (BackendUnavailableError, OutOfMemoryError):
        if request.is_required:
            raise
        return None


def _placed(
    request: DeviceRequest,
    file: ModelFile,
    config: ModelConfig,
    layout: KVLayout,
    context_length: int | None = None,
    kv_window: int | None = None,
    reserved: Mapping[int, int] | None = None,
) -> Placement:
    if config.experts is None:
        request = replace(request, cpu_moe=None)
    tokens = cached_tokens(config, context_length, kv_window)
    placement = plan_placement(request, lambda: memory_needs(file, config, layout, tokens), reserved)
    check_runs_on_gpus(config, placement, has_window=kv_window is not None)
    return placement


def _layout(config: ModelConfig, kv_type: str) -> KVLayout:
    return KVLayout(kv_type, kv_layer_shapes(config, parts_windows=True), state_shapes(config))


def _described(path: str | os.PathLike[str], kv_type: str) -> dict[str, Any]:
    file = open_model_file(path)
    try:
        config = read_config(file)
        layout = _layout(config, kv_type)
        reason = cpu_only(config, layout)
        if reason is not None:
            return {"reason": str(reason)}
        placement = _placed(DeviceRequest(device="auto"), file, config, layout)
    finally:
        file.close()
    return {
        "context_length": min(config.context_length, USUAL_TOKENS),
        "summary": placement.describe(),
        "gpus": [_share(placement, number) for number in range(len(placement.gpus))],
        "cpu_expert_layers": placement.num_split_layers,
        "host_bytes": placement.host_bytes + placement.host_cache_bytes,
    }


def _share(placement: Placement, number: int) -> dict[str, Any]:
    share = placement.gpus[number]
    return {
        "index": share.device.index,
        "name": share.device.name,
        "free_bytes": share.device.free_bytes,
        "first_layer": share.first,
        "num_layers": share.end - share.first,
        "num_bytes": share.num_bytes,
        "kv_bytes": share.cache_bytes,
    }


def gpu_line(plan: dict[str, Any]) -> str:
    """The result of `describe_gpus` as one line."""
    if "reason" in plan:
        return f"on the CPU: {plan['reason']}"
    return f"with a context of {plan['context_length']} tokens {plan['summary']}"

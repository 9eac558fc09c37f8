"""Memory of GPUs, and main memory beside them, that a model and its draft model would take, planned from headers."""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

from localinfer.errors import BackendUnavailableError, LocalinferError, OutOfMemoryError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.loading.memory.limit import KVBudget, check_host_part
from localinfer.loading.memory.plan import plan_memory
from localinfer.loading.options import REFUSED_BY_GPUS, ModelOptions, find_encoders
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes
from localinfer.models.load.device_request import (
    USUAL_TOKENS,
    DeviceRequest,
    cached_tokens,
    cpu_only,
    looks_for_gpus,
)
from localinfer.models.load.devices import plan_placement
from localinfer.models.load.loader import open_model_file, read_config
from localinfer.models.load.placement import DevicePlacement, check_runs_on_gpus, memory_needs
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.system.machine_limits import MemoryLimits, has_driver

ENCODERS_ON_CPU = "pictures and sounds are encoded on the CPU"
"""Said of a model on GPUs that has encoders."""


def describe_gpus(path: str | os.PathLike[str], *, kv_type: str = "f16") -> dict[str, Any] | None:
    """Shares of the GPUs in a model loaded with device 'auto'; None where no NVIDIA driver is installed.

    Keys: context_length, of which the cache is counted; summary, one line; and gpus, cpu_expert_layers, host_bytes, and
    encoder_bytes of encoders beside the model, also in main memory; or else reason, why the model stays on the CPU.
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
    window_tokens: int | None = None,
    reserved: Mapping[int, int] | None = None,
) -> DevicePlacement | None:
    """Placement of a load on GPUs, by the header of an open file; None if the CPU computes all of it.

    window_tokens: texts keep so many keys and values, None for all. reserved: see `plan_placement`.
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
        return _placed(request, file, config, layout, context_length, window_tokens, reserved)
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
    window_tokens: int | None = None,
    reserved: Mapping[int, int] | None = None,
) -> DevicePlacement:
    if config.experts is None:
        request = replace(request, cpu_moe=None)
    tokens = cached_tokens(config, context_length, window_tokens)
    placement = plan_placement(request, lambda: memory_needs(file, config, layout, tokens), reserved)
    check_runs_on_gpus(config, placement, has_window=window_tokens is not None)
    return placement


def _layout(config: ModelConfig, kv_type: str) -> KVLayout:
    return KVLayout(kv_type, kv_layer_shapes(config, parts_windows=True), state_shapes(config))


def _described(path: str | os.PathLike[str], kv_type: str) -> dict[str, Any]:
    file = open_model_file(path)
    try:
        encoders = find_encoders("auto", file.path)
        config = replace(read_config(file), takes_media=encoders is not None)
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
        "encoder_bytes": 0 if encoders is None else encoders.weight_bytes + encoders.buffer_bytes,
    }


def _share(placement: DevicePlacement, number: int) -> dict[str, Any]:
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
    line = f"with a context of {plan['context_length']} tokens {plan['summary']}"
    return f"{line}; {ENCODERS_ON_CPU}" if plan["encoder_bytes"] else line


class HostPart(NamedTuple):
    """Main memory of a draft model; kv_bytes: of that keys and values, if all are there, else 0."""

    num_bytes: int = 0
    kv_bytes: int = 0


def draft_on_host(options: ModelOptions, target: ModelConfig, placement: DevicePlacement) -> HostPart:
    """Main memory of a draft model beside a target on GPUs. Raises: ModelFileError and below."""
    if options.separate_draft is None:
        return HostPart()
    with closing(open_model_file(options.separate_draft)) as file:
        config = read_config(file)
        plan = plan_memory(file, config, kv_type=options.kv_type)
        taken = {share.device.index: share.num_bytes for share in placement.gpus}
        try:
            placed = gpu_placement(options.draft_request, file, config, kv_type=options.kv_type, reserved=taken)
        except REFUSED_BY_GPUS:
            placed = None
    if placed is None:
        length = min(options.context_length or USUAL_TOKENS, target.context_length, config.context_length)
        return HostPart(plan.total_bytes(length), plan.kv_bytes(length))
    if not placed.uses_cpu:
        return HostPart()
    return HostPart(placed.host_bytes + placed.host_cache_bytes + plan.scratch_bytes)


def host_budget(
    options: ModelOptions,
    file: ModelFile,
    config: ModelConfig,
    placement: DevicePlacement,
    draft: HostPart,
    memory: MemoryLimits,
) -> KVBudget:
    """Main memory for keys and values of a model on GPUs, beside its encoders, and of its draft model.

    draft: of `draft_on_host`. Raises: OutOfMemoryError, with the figures and the ways out, if what is to be in main
    memory does not fit.
    """
    if not placement.uses_cpu and not draft.num_bytes and options.media_path is None:
        return KVBudget(0, options.kv_memory, options.kv_memory)
    plan = options.with_media(plan_memory(file, config, kv_type=options.kv_type))
    most = check_host_part(plan, placement, memory, options.memory_limit, draft.num_bytes)
    drafts = options.kv_memory
    if options.memory_limit is not None and draft.kv_bytes:
        drafts = draft.kv_bytes if drafts is None else min(drafts, draft.kv_bytes)
    return KVBudget(0, options.kv_memory, drafts, most if placement.uses_cpu else None)

"""What a model on GPUs takes of main memory, with its draft model, known before the weights of either are read."""

from contextlib import closing
from typing import NamedTuple

from localinfer.errors import BackendUnavailableError, OutOfMemoryError, UnsupportedFormatError
from localinfer.loading.memory.gpu_plan import gpu_placement
from localinfer.loading.memory.limit import KVBudget, check_host_part
from localinfer.loading.memory.plan import plan_memory
from localinfer.loading.options import ModelOptions
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.load.device_request import DeviceRequest
from localinfer.models.load.devices import USUAL_TOKENS
from localinfer.models.load.loader import open_model_file, read_config
from localinfer.models.load.placement import Placement
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.system.machine_limits import MemoryLimits

REFUSED_BY_GPUS = (BackendUnavailableError, OutOfMemoryError, UnsupportedFormatError)
"""Errors after which a draft model is computed on the CPU, whatever its target was asked for."""


class HostPart(NamedTuple):
    """What a draft model takes of main memory; kv_bytes: of that keys and values, if all are there, else 0."""

    num_bytes: int = 0
    kv_bytes: int = 0


def draft_request(options: ModelOptions) -> DeviceRequest:
    """Where the draft model of a target on GPUs is wanted: on those that were named, or on any."""
    return DeviceRequest(device="auto" if options.gpus is None else options.device)


def draft_on_host(options: ModelOptions, target: ModelConfig, placement: Placement) -> HostPart:
    """What a draft model takes of main memory beside a target on GPUs. Raises: ModelFileError and below."""
    if options.separate_draft is None:
        return HostPart()
    with closing(open_model_file(options.separate_draft)) as file:
        config = read_config(file)
        plan = plan_memory(file, config, kv_type=options.kv_type)
        taken = {share.device.index: share.num_bytes for share in placement.gpus}
        try:
            placed = gpu_placement(draft_request(options), file, config, kv_type=options.kv_type, reserved=taken)
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
    placement: Placement,
    draft: HostPart,
    memory: MemoryLimits,
) -> KVBudget:
    """What keys and values may take of main memory beside a model on GPUs, and of its draft model.

    draft: of `draft_on_host`. Raises: OutOfMemoryError, with the figures and the ways out, if what is to be in main
    memory does not fit.
    """
    if not placement.uses_cpu and not draft.num_bytes:
        return KVBudget(0, options.kv_memory, options.kv_memory)
    plan = plan_memory(file, config, kv_type=options.kv_type)
    most = check_host_part(plan, placement, memory, options.memory_limit, draft.num_bytes)
    drafts = options.kv_memory
    if options.memory_limit is not None and draft.kv_bytes:
        drafts = draft.kv_bytes if drafts is None else min(drafts, draft.kv_bytes)
    return KVBudget(0, options.kv_memory, drafts, most if placement.uses_cpu else None)

"""What GPUs would hold of a model, for `localinfer show` and `localinfer doctor`: the plan that a load would make."""

import os
from typing import Any

from localinfer.errors import LocalinferError
from localinfer.kernels.cuda.device import has_driver
from localinfer.kernels.kv_layout import KVLayout
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, state_shapes
from localinfer.models.load.device_request import DeviceRequest
from localinfer.models.load.devices import RECURRENT_ON_CPU, USUAL_TOKENS, plan_placement
from localinfer.models.load.loader import open_model_file, read_config
from localinfer.models.load.memory_needs import memory_needs
from localinfer.models.load.placement import Placement
from localinfer.models.load.programs import check_runs_on_gpus


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


def _described(path: str | os.PathLike[str], kv_type: str) -> dict[str, Any]:
    file = open_model_file(path)
    try:
        config = read_config(file)
        reason = _cpu_only(config)
        if reason:
            return {"reason": reason}
        layout, tokens = KVLayout(kv_type, kv_layer_shapes(config)), min(config.context_length, USUAL_TOKENS)
        needs = memory_needs(file, config, layout, tokens)
    finally:
        file.close()
    placement = plan_placement(DeviceRequest(device="auto"), lambda: needs)
    check_runs_on_gpus(config, placement)
    return {
        "context_length": tokens,
        "summary": placement.describe(),
        "gpus": [_share(placement, number) for number in range(len(placement.gpus))],
        "cpu_expert_layers": placement.num_split_layers,
        "host_bytes": placement.host_bytes + placement.host_cache_bytes,
    }


def _cpu_only(config: ModelConfig) -> str:
    """Why a model runs on the CPU whatever GPUs there are; empty if it does not."""
    if config.is_encoder:
        return f"{config.architecture!r} models are computed on the CPU only"
    return RECURRENT_ON_CPU if state_shapes(config) else ""


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

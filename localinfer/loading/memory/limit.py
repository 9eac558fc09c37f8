"""`memory_limit` of `load`: whether a model fits it, checked before the weights are read, and what it leaves.

What is left beside weights, buffers and what use may add to them is the most that keys and values may take; a draft
model gets its share of it. So the limit holds while texts are generated: the cache refuses to grow beyond its part.
`kv_window` bounds each text's share by a window (`planned_window`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from localinfer.engine.cache.sequence import KVEviction
from localinfer.errors import OutOfMemoryError, RequestError
from localinfer.loading.memory.plan import LEAST_CONTEXT, MemoryPlan
from localinfer.models.decoder.architectures import find_architecture
from localinfer.system.machine_limits import MemoryLimits, byte_text
from localinfer.types import Record

if TYPE_CHECKING:
    from localinfer.models.decoder.config import ModelConfig
    from localinfer.models.load.loader import Model
    from localinfer.models.load.placement import DevicePlacement


class KVBudget(Record):
    """The context length of a model, and the most bytes of keys and values: its own, and a draft model's.

    None leaves those to the machine. host_kv_memory: of a model on GPUs, the part of them in main memory.
    """

    context_length: int
    kv_memory: int | None
    draft_kv_memory: int | None
    host_kv_memory: int | None = None


def keep_within(
    plan: MemoryPlan,
    limit: int,
    context_length: int,
    *,
    is_requested: bool,
    kv_memory: int | None = None,
) -> KVBudget:
    """Share a memory limit out; context_length: what the machine has room for, or, if requested, what has to fit.

    kv_memory: as in `load`; where it bounds the cache, the context need not fit as a whole.
    Raises: OutOfMemoryError, with the figures and the ways out, if the model cannot be kept within it.
    """
    room = limit - plan.fixed_bytes
    longest = context_length if is_requested else plan.largest_context(max(0, room), most=context_length)
    room -= plan.growth_bytes(longest)
    bounds = [] if kv_memory is None else [kv_memory]
    least = context_length if is_requested else min(context_length, LEAST_CONTEXT)
    if min([plan.kv_bytes(least), *bounds]) > room:
        raise OutOfMemoryError(_refusal(plan, limit, least, room))
    if not is_requested and min([plan.kv_bytes(context_length), *bounds]) > room:
        context_length = plan.largest_context(room, most=context_length)
    total = min(room, *bounds) if bounds else room
    if plan.beside is None:
        return KVBudget(context_length, total, 0)
    whole = plan.kv_bytes(context_length)
    drafts = total * (whole - replace(plan, beside=None).kv_bytes(context_length)) // max(1, whole)
    return KVBudget(context_length, total - drafts, drafts)


def check_host_part(
    plan: MemoryPlan, placement: "DevicePlacement", memory: MemoryLimits, limit: int | None, draft_bytes: int = 0
) -> int | None:
    """The most bytes of keys and values that main memory may hold of a model on GPUs; None for no limit but its own.

    placement: what of the model stays on the CPU. limit: `memory_limit` of `load`. draft_bytes: of a draft model there.
    Raises: OutOfMemoryError, with the figures and the ways out, if that does not fit.
    """
    fixed = placement.host_bytes + plan.scratch_bytes + plan.encoder_bytes + draft_bytes
    cache = placement.host_cache_bytes
    room = memory.most_bytes if limit is None else min(limit, memory.most_bytes)
    if fixed + cache > room:
        there = memory.describe() if room == memory.most_bytes else f"memory_limit is {byte_text(room)}"
        parts = f"{byte_text(placement.host_bytes)} for weights"
        if placement.num_split_layers:
            parts += ", experts among them"
        if plan.encoder_bytes:
            parts += f", {byte_text(plan.encoder_bytes)} for encoders of pictures and sounds"
        if draft_bytes:
            parts += f", {byte_text(draft_bytes)} for the draft model"
        raise OutOfMemoryError(
            f"{plan.name} needs {byte_text(fixed + cache)} of main memory beside what is on GPUs ({parts}, "
            f"{byte_text(cache)} for keys and values, {byte_text(plan.scratch_bytes)} for buffers), and {there}; "
            f"{'leave the draft model out, ' if draft_bytes else ''}put more of it on GPUs (gpu_layers, cpu_moe), or "
            "take a smaller quantization or context_length"
        )
    return None if limit is None else room - fixed


def _refusal(plan: MemoryPlan, limit: int, context_length: int, room: int) -> str:
    kv = plan.kv_bytes(context_length)
    found = (
        f"{plan.name} needs {byte_text(limit - room + kv)} of memory for a context of {context_length} tokens "
        f"({byte_text(limit - room)} for weights and buffers, {byte_text(kv)} for keys and values as "
        f"{plan.kv_type}), and memory_limit is {byte_text(limit)}"
    )
    fits = plan.largest_context(room, most=context_length) if room > 0 else 0
    if fits:
        return f"{found}; the largest context_length within it is {fits}, or raise memory_limit"
    return f"{found}; raise memory_limit, or take a smaller quantization or model"


def window_of(model: "Model", tokens: int) -> KVEviction:
    """The window of a model that was loaded for it. Raises: as `planned_window`."""
    return planned_window(model.config, tokens, model.kv_layout.page_tokens, model.program.max_batch_rows)


def planned_window(config: "ModelConfig", tokens: int, page_tokens: int, batch_tokens: int) -> KVEviction:
    """The window of a model with these settings; tokens: `kv_window` of `load`.

    Raises: RequestError where the model's own local attention would then meet positions that are not its.
    """
    window = KVEviction(tokens, page_tokens, batch_tokens)
    architecture = find_architecture(config)
    if any(architecture.chunks):
        raise RequestError(
            f"kv_window cannot be used with {config.architecture}, some of whose layers see chunks of fixed "
            "positions; use a smaller kv_type to save memory"
        )
    widest = max(architecture.windows, default=0)
    # The last of the recent pages may have just begun.
    if widest > (window.recent_pages - 1) * window.page_tokens:
        needed = 2 * (widest + window.page_tokens)
        raise RequestError(
            f"kv_window is {tokens} tokens, but layers of this model see the last {widest} of them; give it at least "
            f"{needed}, or a smaller kv_type to save memory"
        )
    return window

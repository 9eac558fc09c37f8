"""Memory of a model by context length, and the largest that fits: for `localinfer show`, as JSON and as text."""

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from localinfer.errors import LocalinferError
from localinfer.system.machine_limits import MemoryLimits, memory_limits

if TYPE_CHECKING:
    from localinfer.loading.media import MediaPlan

_CONTEXTS = (4096, 8192, 32768)
KV_TYPES = ("f16", "q8_0")


def describe_memory(
    path: str | os.PathLike[str], limits: MemoryLimits | None = None, media: "MediaPlan | None" = None
) -> dict[str, Any]:
    """Bytes of a model's weights, buffers, keys and values by context length, and the largest contexts that fit.

    limits: memory of the machine; None asks it. media: its encoders. A model that cannot be planned has only "unknown",
    the reason.
    """
    from localinfer.kernels.address_space import require_libraries

    try:
        require_libraries()
        from localinfer.loading.memory.plan import plan_file

        plan = plan_file(path, draft_layers=True)
        if media is not None:
            plan = plan.with_media(media.weight_bytes, media.buffer_bytes)
    except LocalinferError as error:
        return {"unknown": str(error)}
    limits = memory_limits() if limits is None else limits
    trained = plan.config.context_length
    return {
        "weight_bytes": plan.weight_bytes,
        "buffer_bytes": plan.scratch_bytes,
        "encoder_bytes": {"weights": plan.media_bytes, "buffers": plan.media_buffer_bytes},
        "contexts": [
            {
                "context_length": length,
                "kv_bytes": {kv_type: plan.kv_bytes(length, kv_type) for kv_type in KV_TYPES},
                "total_bytes": {kv_type: plan.total_bytes(length, kv_type) for kv_type in KV_TYPES},
            }
            for length in [*(length for length in _CONTEXTS if length < trained), trained]
        ],
        "available_bytes": limits.available_bytes,
        "available": limits.describe(),
        "largest_context": {kv_type: plan.largest_loadable(limits, kv_type) for kv_type in KV_TYPES},
        "default_context": plan.default_context(limits),
    }


def memory_lines(memory: Mapping[str, Any]) -> Iterator[str]:
    """The result of `describe_memory` as aligned lines."""
    if "unknown" in memory:
        yield f"  not known: {memory['unknown']}"
        return
    yield f"  weights {_size(memory['weight_bytes'])}, buffers {_size(memory['buffer_bytes'])}"
    if (encoders := memory["encoder_bytes"])["weights"]:
        yield f"  encoders {_size(encoders['weights'])}, and for the largest picture {_size(encoders['buffers'])}"
    heads = [f"{name} {kv_type}" for kv_type in KV_TYPES for name in ("KV", "in all")]
    yield f"  {'context':>9}" + "".join(f"{head:>14}" for head in heads)
    for row in memory["contexts"]:
        sizes = [_size(row[name][kv_type]) for kv_type in KV_TYPES for name in ("kv_bytes", "total_bytes")]
        yield f"  {row['context_length']:>9}" + "".join(f"{size:>14}" for size in sizes)
    yield f"  {_what_fits(memory)}"


def _what_fits(memory: Mapping[str, Any]) -> str:
    largest, default, trained = memory["largest_context"], memory["default_context"], memory["contexts"][-1]
    here = f"here, where {memory['available']}"
    if not any(largest.values()):
        return f"does not fit {here}"
    if all(length >= trained["context_length"] for length in largest.values()):
        fits = f"the whole context fits {here}"
    else:
        each = ", ".join(f"{length} tokens as {kv_type}" for kv_type, length in largest.items())
        fits = f"the largest context that fits {here}: {each}"
    return fits if default == trained["context_length"] else f"{fits}; without --context-length it has {default}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"

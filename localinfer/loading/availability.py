"""`localinfer.availability`: whether a model can be loaded here, and what that takes, known from its header."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localinfer.loading.imports import import_modules

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from localinfer.errors import LocalinferError
    from localinfer.models.decoder.rope_options import RopeOptions


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether a model can be loaded here and now, and what that takes.

    supported: `load` with the same options would work. reason: else why not, and the way out, as the error of `load`
        says it. error: that error, by whose class a program can tell a damaged file from one that is too large.
    memory_bytes: what the model takes with a text of `context_length` tokens, of which `kv_window` may keep less, or,
        if that does not fit, of the context that was asked for; with its draft model. None if the file could not be
        read so far. On GPUs about as much, of their memory and the main memory together.
    context_length: the context it would be loaded with, in tokens; 0 if it does not fit.
    is_compiled: whether all kernels that it needs on the CPU are compiled on this machine; None if unsupported.
    compile_seconds: about how long compiling the others takes, at first start only, within a factor of two or three.
    """

    supported: bool
    reason: str | None = None
    error: LocalinferError | None = field(default=None, compare=False, repr=False)
    memory_bytes: int | None = None
    context_length: int = 0
    is_compiled: bool | None = None
    compile_seconds: float = 0.0


def availability(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    gpu_layers: int | str | None = None,
    tensor_split: Sequence[float] | None = None,
    cpu_moe: bool | int | None = None,
    threads: int | None = None,
    context_length: int | None = None,
    kv_type: str = "f16",
    kv_memory: int | None = None,
    kv_window: int | None = None,
    speculation: str | None = "auto",
    draft: str | os.PathLike[str] | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    rope: RopeOptions | None = None,
    overrides: Mapping[str, bool | int | float | str] | None = None,
    memory_limit: int | None = None,
) -> Availability:
    """Say whether `load` with these options would work, from the header alone: nothing is loaded or compiled.

    Takes some ten milliseconds, and what reading the header takes, with a draft model both vocabularies; where there is
    a GPU, the seconds that asking it for its memory takes, unless device is "cpu". Never raises for a model that cannot
    be loaded. That the weights themselves are sound is known only once they are loaded.
    Raises: RequestError for an option that no model takes.
    """
    import_modules(None)
    from localinfer.loading.feasibility import check_feasible

    return check_feasible(
        model=model,
        device=device,
        gpu_layers=gpu_layers,
        tensor_split=tensor_split,
        cpu_moe=cpu_moe,
        threads=threads,
        context_length=context_length,
        kv_type=kv_type,
        kv_memory=kv_memory,
        kv_window=kv_window,
        speculation=speculation,
        draft=draft,
        chat_template=chat_template,
        rope=rope,
        overrides=overrides,
        memory_limit=memory_limit,
    )

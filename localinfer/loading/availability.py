"""`localinfer.availability`: whether a model can be loaded here, and what that takes, known from its header."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localinfer.loading.imports import import_modules
from localinfer.loading.load_options import HeaderOptions, takes

if TYPE_CHECKING:
    from localinfer.errors import LocalinferError


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Answer to whether a model can be loaded here and now, and the memory and time of that."""

    supported: bool
    """True if `load` with the same options would work."""
    reason: str | None = None
    """The reason why not, and the way out, as the error of `load` says it."""
    error: LocalinferError | None = field(default=None, compare=False, repr=False)
    """That error, by whose class a program can tell a damaged file from one that is too large."""
    memory_bytes: int | None = None
    """Memory of the model with a text of `context_length` tokens, of which `kv_window` may keep less, or, if that does
    not fit, of the context that was asked for; with its draft model. None if the file could not be read so far. On GPUs
    about as much, of their memory and the main memory together."""
    context_length: int = 0
    """The context it would be loaded with, in tokens; 0 if it does not fit."""
    is_compiled: bool | None = None
    """True if all kernels that it needs on the CPU are compiled on this machine; None if unsupported."""
    compile_seconds: float = 0.0
    """About how long compiling the others takes, at first start only, within a factor of two or three."""


@takes(HeaderOptions)
def availability(options: HeaderOptions) -> Availability:
    """Say whether `load` with these options would work, from the header alone: nothing is loaded or compiled.

    Takes some ten milliseconds, and what reading the header takes, with a draft model both vocabularies; where there is
    a GPU, the seconds that asking it for its memory takes, unless device is "cpu". Never raises for a model that cannot
    be loaded. That the weights themselves are sound is known only once they are loaded.
    Raises: RequestError for an option that no model takes.
    """
    import_modules(None)
    from localinfer.loading.feasibility import check_feasible

    return check_feasible(options)

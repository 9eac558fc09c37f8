"""One model of a server: whether it is loaded, who uses it, and what keeps it loaded meanwhile."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from localinfer.apps.server.router.model_folder import MemoryNeed, ModelSource
from localinfer.errors import LocalinferError, ModelFileError
from localinfer.types import Closing

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.types import ModelInfo

ModelState = Literal["unloaded", "loading", "loaded", "failed"]


@dataclass(eq=False)
class ServedModel:
    """A model of the server."""

    source: ModelSource
    own_keep_alive_seconds: float | None = None
    """Its `keep_alive_seconds` once it was unloaded."""
    keep_alive_seconds: float | None = field(init=False)
    """Time that it stays loaded without requests, None for ever."""
    llm: "LLM | None" = None
    """None while it is not loaded."""
    need: MemoryNeed | None = None
    num_leases: int = 0
    """Replies that use it now."""
    num_waiting: int = 0
    """Requests that wait for it."""
    last_used_seconds: float = 0.0
    loading: "asyncio.Task[LLM] | None" = field(default=None, repr=False)
    measuring: "asyncio.Task[MemoryNeed] | None" = field(default=None, repr=False)
    is_served: bool = True
    """True if it can be asked for; if not, it is unloaded after its replies, pinned or not."""
    drained_by: set[object] = field(default_factory=set, repr=False)
    """Waiters for the end of its replies, to unload it; new requests wait meanwhile, and load it again."""
    waiting_for: tuple[str, ...] = ()
    """Models whose memory it needs and whose replies have to end before it can be loaded."""
    failure: BaseException | None = field(default=None, repr=False)
    """The failure of loading it, or of reading its file, the last time."""

    def __post_init__(self) -> None:
        self.keep_alive_seconds = self.own_keep_alive_seconds

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Kinds of requests that it answers; of a model that nothing was read of yet, those that most answer."""
        with suppress(LocalinferError):
            if self.llm is not None:
                return self.llm.capabilities
        return MemoryNeed(0, 0, 0).capabilities if self.need is None else self.need.capabilities

    def info(self) -> "ModelInfo | None":
        """Properties while it is loaded; None if it is unloaded meanwhile, or its file cannot be read any more."""
        llm = self.llm
        with suppress(LocalinferError):
            return None if llm is None else llm.info
        return None

    @property
    def problem(self) -> str | None:
        """Its problem, in words for clients: a file that changed under a loaded model, or why none is."""
        if self.llm is None:
            return None if self.failure is None else "it could not be loaded when that was last tried"
        try:
            _ = self.llm.capabilities
        except ModelFileError:
            return "its file was changed or cut while it was loaded; bring the file back, or load it again"
        except LocalinferError:
            pass
        return None

    @property
    def context_length(self) -> int | None:
        """Tokens of context: of a model that is not loaded what its file and its settings say, None if not read yet."""
        llm = self.llm
        if llm is not None:
            return llm.context_length
        return None if self.need is None else self.need.context_length

    @property
    def state(self) -> ModelState:
        """State of loading: it can answer at once, soon, when it is asked for, or could not when it was last tried."""
        if self.llm is not None:
            return "loaded"
        if self.loading is not None:
            return "loading"
        return "unloaded" if self.failure is None else "failed"

    @property
    def is_pinned(self) -> bool:
        """True if it stays loaded whatever happens."""
        return self.is_served and self.source.settings.is_pinned

    @property
    def is_idle(self) -> bool:
        """True if it is loaded and may be unloaded: requests that wait for a drained model came later."""
        return self.llm is not None and not self.num_leases and (bool(self.drained_by) or not self.num_waiting)

    @property
    def idle_until_seconds(self) -> float | None:
        """Time of unloading by the monotonic clock, if no request comes; None if it is used, or never."""
        if self.keep_alive_seconds is None or self.is_pinned or not self.is_idle:
            return None
        return self.last_used_seconds + self.keep_alive_seconds

    @property
    def memory_bytes(self) -> int:
        """Bytes that it takes now, as far as they are known: its weights and what comes with them, and its cache."""
        if self.llm is None:
            return 0
        return (0 if self.need is None else self.need.fixed_bytes) + self.llm.kv_bytes

    @property
    def use(self) -> str:
        """Reason why it is not unloaded, in words."""
        if self.is_pinned:
            return "pinned"
        return f"{self.num_leases} running" if self.num_leases else "idle"


class Lease(Closing):
    """A loaded model that stays loaded until this is closed; on the event loop.

    fingerprint: by it clients see whether the same model and version answered. on_close: called when it is closed.
    """

    def __init__(self, model: ServedModel, llm: "LLM", on_close: Callable[[], object] = lambda: None) -> None:
        self.llm = llm
        self.model_id = model.source.id
        self.fingerprint = model.source.fingerprint
        self._model: ServedModel | None = model
        self._on_close = on_close
        model.num_leases += 1

    def close(self) -> None:
        """Allow the model to be unloaded; may be called again."""
        if self._model is not None:
            self._model.num_leases -= 1
            self._model.last_used_seconds = time.monotonic()
            self._model = None
            self._on_close()

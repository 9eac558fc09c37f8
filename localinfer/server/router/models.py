"""The models a server has: found by name, loaded when a request names them, unloaded when no request uses them."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from localinfer.closing import Closing
from localinfer.errors import OutOfMemoryError, RequestError
from localinfer.server.operation.metrics import Metrics
from localinfer.server.router.model_folder import ModelSource, matching_names
from localinfer.server.transport.http import ApiError, ModelLoadError, shutting_down
from localinfer.system.machine_limits import memory_limits

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.models.load.model_changes import ModelChanges

logger = logging.getLogger(__name__)

_LEAST_CONTEXT = 512
"""A model with room for fewer tokens than this is not worth loading."""
_IDLE_CHECK_SECONDS = 1.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model takes: its weights with all that comes with them, and its cache per token of context.

    capabilities: what it can be asked for.
    """

    fixed_bytes: int
    bytes_per_token: int
    context_length: int
    capabilities: tuple[str, ...] = ("completion", "chat", "embeddings")

    def largest_context(self, available_bytes: int) -> int:
        """How many tokens of context fit beside the weights, 0 if not even the weights do."""
        return min(self.context_length, max(0, available_bytes - self.fixed_bytes) // max(1, self.bytes_per_token))

    def check(self, name: str, available_bytes: int, *, wanted_context: int | None) -> None:
        """Raise OutOfMemoryError, with the numbers, if the model would not fit.

        wanted_context: tokens that must fit; None asks for enough to be of use, as the cache grows when it is needed.
        """
        least = min(self.context_length, _LEAST_CONTEXT if wanted_context is None else wanted_context)
        fits = self.largest_context(available_bytes)
        if fits >= least:
            return
        needed = self.fixed_bytes + least * self.bytes_per_token
        is_usable = fits >= _LEAST_CONTEXT
        way_out = f"load it with a context of at most {fits} tokens" if is_usable else "use a smaller model"
        raise OutOfMemoryError(
            f"{name} needs {needed:,} bytes ({self.fixed_bytes:,} for weights, {self.bytes_per_token:,} for each of "
            f"{least} tokens), and {max(0, available_bytes):,} are available; close something, or {way_out}"
        )


def measure_need(
    path: str | os.PathLike[str],
    kv_type: str,
    changes: "ModelChanges | None" = None,
    context_length: int | None = None,
) -> MemoryNeed:
    """Read from a model's file what it will take.

    changes: settings in place of those of the file. context_length: the one it will be loaded with, None for its own.
    Raises: ModelFileError and below; RequestError for changes without meaning.
    """
    from localinfer.memory.plan import plan_memory
    from localinfer.models.load.loader import capabilities, open_model_file

    file = open_model_file(path, changes, context_length)
    try:
        plan = plan_memory(file, kv_type=kv_type, draft_layers=True)
        longest = max(plan.config.context_length, context_length or 0)
        layout = plan.kv_layout(longest)
        per_token = -(-layout.page_bytes // layout.page_tokens)
        pages = -(-longest // layout.page_tokens) * layout.page_bytes
        # Sliding windows and recurrent states do not grow with the text.
        fixed = plan.total_bytes(longest) - pages
        return MemoryNeed(fixed, per_token, longest, capabilities(plan.config, file.metadata))
    finally:
        file.close()


@dataclass
class ServedModel:
    """A model of the server. llm: None while it is not loaded. num_leases: replies that use it now."""

    source: ModelSource
    llm: "LLM | None" = None
    need: MemoryNeed | None = None
    num_leases: int = 0
    last_used_seconds: float = 0.0
    loading: "asyncio.Task[LLM] | None" = field(default=None, repr=False)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What it can be asked for; of a model that nothing was read of yet, what most can."""
        if self.llm is not None:
            return self.llm.capabilities
        return MemoryNeed(0, 0, 0).capabilities if self.need is None else self.need.capabilities


class Lease(Closing):
    """A loaded model that stays loaded until this is closed.

    fingerprint: by it clients see whether the same model and version answered.
    """

    def __init__(self, model: ServedModel, llm: "LLM") -> None:
        self.llm = llm
        self.model_id = model.source.id
        self.fingerprint = model.source.fingerprint
        self._model: ServedModel | None = model
        model.num_leases += 1

    def close(self) -> None:
        """Allow the model to be unloaded; may be called again."""
        if self._model is not None:
            self._model.num_leases -= 1
            self._model.last_used_seconds = time.monotonic()
            self._model = None


class LoadThreads:
    """Does work in threads of its own, none of which keeps the event loop or the interpreter from ending.

    A server that ends need not wait for them: compiled code cannot be interrupted. stopping: set when work is to end;
    work that looks at it now and then ends early, by raising what it likes.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._running: set[threading.Thread] = set()

    async def run(self, work: Callable[[], Result], discard: Callable[[Result], object]) -> Result:
        """Return what the work returns. When this is cancelled, its result goes to `discard` as soon as it is there.

        Raises: what the work raises.
        """
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        future: Future[Result] = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            self._running.discard(thread)
            # Where the loop was closed, nothing waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(has_ended.set)

        thread = threading.Thread(target=do, name="localinfer-load", daemon=True)
        self._running.add(thread)
        thread.start()
        try:
            await has_ended.wait()
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: done.exception() or discard(done.result()))
            raise
        return future.result()

    def join(self, seconds: float) -> bool:
        """Wait for work that still runs, so long together; return whether all has ended. Called off the event loop."""
        deadline = time.monotonic() + seconds
        for thread in list(self._running):
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in list(self._running))


class ModelRegistry:
    """Models by name. All methods but the loading itself run on the event loop.

    load: loads a model, in a thread. measure: says what one will take, before. idle_unload_seconds: None keeps models
    loaded. memory_limit: bytes that all loaded models may take together; None leaves it to the machine.
    context_length: the one that models are loaded with, None for their own. threads: what loads; its event `stopping`
    makes `load` give up.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        load: "Callable[[ModelSource], LLM]",
        measure: Callable[[ModelSource], MemoryNeed],
        metrics: Metrics,
        *,
        strict: bool = False,
        idle_unload_seconds: float | None = None,
        memory_limit: int | None = None,
        context_length: int | None = None,
        threads: LoadThreads | None = None,
    ) -> None:
        if not sources:
            raise RequestError("there is no model to serve; name one with -m, or a folder that holds some")
        self._models = {source.id: ServedModel(source) for source in sources}
        self._default = self._models[sources[0].id]
        self._load = load
        self._measure = measure
        self._metrics = metrics
        self._is_strict = strict or len(self._models) > 1
        self._idle_unload_seconds = idle_unload_seconds
        self._memory_limit = memory_limit
        self._context_length = context_length
        self._threads = LoadThreads() if threads is None else threads
        self._loading = asyncio.Lock()

    def models(self) -> list[ServedModel]:
        """All models, the default one first."""
        return list(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """The model of a name, which may be the end of a longer one, or begin with a provider's.

        Without a name, or where any will do, the default. Raises: ApiError 404, also for a name that several have.
        """
        if not name:
            return self._default
        names = list(self._models)
        for wanted in (name, name.removesuffix(".gguf"), name.rpartition("/")[2].removesuffix(".gguf")):
            found = matching_names(wanted, names)
            if len(found) == 1:
                return self._models[found[0]]
            if found:
                raise ApiError(
                    404,
                    f"{name[:80]!r} may be any of {', '.join(found[:10])}; give more of the name",
                    code="model_ambiguous",
                    param="model",
                    facts={"candidates": found[:100]},
                )
        if not self._is_strict:
            return self._default
        known = ", ".join(names[:10])
        raise ApiError(
            404, f"there is no model {name[:80]!r}; there are {known}", code="model_not_found", param="model"
        )

    def lease_loaded(self, name: str | None) -> Lease | None:
        """A model by name, unless it has to be loaded first. Raises: ApiError 404."""
        model = self.find(name)
        return None if model.llm is None else Lease(model, model.llm)

    async def lease(self, name: str | None) -> Lease:
        """A model by name, loaded first if need be.

        Raises: ApiError 404, or 503 if the server ends; OutOfMemoryError; ModelLoadError if it cannot be loaded.
        """
        model = self.find(name)
        while model.llm is None:
            self._check_stopping()
            if model.loading is None:
                model.loading = asyncio.create_task(self._load_model(model))
                # Whether or not a request still waits for it.
                model.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
            loading = model.loading
            try:
                # The first request may be cancelled; others still wait for the model.
                await asyncio.shield(loading)
            except asyncio.CancelledError:
                if loading.cancelled():
                    self._check_stopping()
                raise
        return Lease(model, model.llm)

    def stop_loading(self) -> None:
        """Give up what is being loaded, and load nothing more."""
        self._threads.stopping.set()
        for model in self._models.values():
            if model.loading is not None:
                model.loading.cancel()

    def join_loads(self, seconds: float) -> bool:
        """Wait for threads whose load was given up; return whether none is left. Called off the event loop."""
        return self._threads.join(seconds)

    async def unload_idle(self) -> None:
        """Unload models that were not used for long, for ever."""
        while self._idle_unload_seconds is not None:
            await asyncio.sleep(min(_IDLE_CHECK_SECONDS, self._idle_unload_seconds))
            oldest = time.monotonic() - self._idle_unload_seconds
            for model in self._idle_models():
                if model.last_used_seconds <= oldest:
                    await self._unload(model)

    async def close(self) -> None:
        """Unload every model, in use or not."""
        loading = [model.loading for model in self._models.values() if model.loading is not None]
        self.stop_loading()
        await asyncio.gather(*loading, return_exceptions=True)
        for model in self._models.values():
            await self._unload(model)

    def _check_stopping(self) -> None:
        if self._threads.stopping.is_set():
            raise shutting_down()

    async def _load_model(self, model: ServedModel) -> "LLM":
        source = model.source
        try:
            async with self._loading:
                need = model.need
                if need is None:
                    need = model.need = await self._work(source, lambda: self._measure(source), lambda need: None)
                await self._unload_until_it_fits(model, need)
                began = time.monotonic()
                llm = await self._work(source, lambda: self._load(source), lambda llm: llm.close())
                model.llm, model.last_used_seconds = llm, time.monotonic()
                self._metrics.loaded.inc()
                logger.info("loaded %s in %.1f s", source.id, time.monotonic() - began)
                return llm
        finally:
            model.loading = None

    async def _work(
        self, source: ModelSource, work: Callable[[], Result], discard: Callable[[Result], object]
    ) -> Result:
        try:
            return await self._threads.run(work, discard)
        except Exception as error:
            raise ModelLoadError(source.id) from error

    async def _unload_until_it_fits(self, model: ServedModel, need: MemoryNeed) -> None:
        """Unload idle models, least recently used first, until this one fits. Raises: OutOfMemoryError."""
        while True:
            try:
                need.check(model.source.id, self._available_bytes(), wanted_context=self._context_length)
            except OutOfMemoryError:
                idle = self._idle_models()
                if not idle:
                    raise
                await self._unload(min(idle, key=lambda other: other.last_used_seconds))
            else:
                return

    def _available_bytes(self) -> int:
        available = memory_limits().available_bytes
        if self._memory_limit is None:
            return available
        taken = sum(other.need.fixed_bytes for other in self._models.values() if other.llm is not None and other.need)
        return min(available, self._memory_limit - taken)

    def _idle_models(self) -> list[ServedModel]:
        return [model for model in self._models.values() if model.llm is not None and not model.num_leases]

    async def _unload(self, model: ServedModel) -> None:
        llm, model.llm = model.llm, None
        if llm is not None:
            await asyncio.to_thread(llm.close)
            self._metrics.loaded.dec()
            logger.info("unloaded %s", model.source.id)

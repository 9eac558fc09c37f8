"""The models a server has: found by name, loaded when a request names them, unloaded when no request uses them."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from localinfer.errors import OutOfMemoryError, RequestError
from localinfer.server.operation.metrics import Metrics
from localinfer.server.router.load_threads import LoadThreads, Result
from localinfer.server.router.memory_need import MemoryNeed
from localinfer.server.router.model_folder import ModelSource, matching_names
from localinfer.server.router.served_model import Lease, ModelState, ServedModel
from localinfer.server.transport.http import ApiError, ModelLoadError, shutting_down
from localinfer.system.machine_limits import memory_limits

if TYPE_CHECKING:
    from localinfer.llm import LLM

logger = logging.getLogger(__name__)


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
        self._load = load
        self._measure = measure
        self._metrics = metrics
        self._is_strict = strict
        self._idle_unload_seconds = idle_unload_seconds
        self._memory_limit = memory_limit
        self._context_length = context_length
        self._threads = LoadThreads() if threads is None else threads
        self._loading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._models: dict[str, ServedModel] = {}
        self._former: list[ServedModel] = []
        self.replace_sources(sources)

    @property
    def sources(self) -> list[ModelSource]:
        """What can be asked for, the default first."""
        return [model.source for model in self._models.values()]

    def replace_sources(self, sources: Sequence[ModelSource]) -> None:
        """Serve these models from now on. Those that stay keep running; others are unloaded after their replies.

        Raises: RequestError if there is none, or two have one name.
        """
        if not sources:
            raise RequestError("there is no model to serve; name one with -m, or a folder that holds some")
        _check_names(sources)
        former = self._models
        self._models = {}
        for source in sources:
            known = former.get(source.id)
            if known is not None and known.source == source:
                self._models[source.id] = former.pop(source.id)
            else:
                self._models[source.id] = ServedModel(source, self._idle_unload_seconds)
        for model in former.values():
            model.num_drains += 1
            if model.loading is not None:
                model.loading.cancel()
        self._former = [model for model in (*self._former, *former.values()) if model.llm is not None]
        self._notify()

    def models(self) -> list[ServedModel]:
        """All models, the default one first."""
        return list(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """The model of a name, which may be the end of a longer one, or begin with a provider's.

        Without a name, or where any will do, the default. Raises: ApiError 404, also for a name that several have.
        """
        names = list(self._models)
        default = self._models[names[0]]
        if not name:
            return default
        for wanted in (name, name.removesuffix(".gguf"), name.rpartition("/")[2].removesuffix(".gguf")):
            by_alias = [model.source.id for model in self._models.values() if wanted in model.source.aliases]
            found = by_alias or matching_names(wanted, names)
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
        if len(names) == 1 and not self._is_strict:
            return default
        known = ", ".join(names[:10])
        raise ApiError(
            404, f"there is no model {name[:80]!r}; there are {known}", code="model_not_found", param="model"
        )

    def state_of(self, name: str | None) -> ModelState:
        """Whether a model is loaded. Raises: ApiError 404."""
        return self.find(name).state

    def set_keep_alive(self, name: str | None, seconds: float | None) -> None:
        """How long a model stays loaded without requests: 0 until nobody uses it, None for ever.

        It counts until the model is unloaded. Raises: ApiError 404.
        """
        self.find(name).keep_alive_seconds = seconds
        self._notify()

    def lease_loaded(self, name: str | None) -> Lease | None:
        """A model by name, unless it has to be loaded first. Raises: ApiError 404."""
        return self._leased(self.find(name))

    async def lease(self, name: str | None) -> Lease:
        """A model by name, loaded first if need be.

        Raises: ApiError 404, or 503 if the server ends; OutOfMemoryError; ModelLoadError if it cannot be loaded.
        """
        model = self.find(name)
        model.num_waiting += 1
        try:
            while (lease := self._leased(model)) is None:
                if model.llm is None:
                    await self._loaded(model)
                else:
                    await self._changed.wait()
                if not self._is_served(model):
                    model.num_waiting -= 1
                    model = self.find(name)
                    model.num_waiting += 1
            return lease
        finally:
            model.num_waiting -= 1
            self._notify()

    async def load(self, name: str | None) -> ServedModel:
        """Load a model without using it. Raises: as `lease`."""
        with await self.lease(name):
            return self.find(name)

    async def unload(self, name: str | None) -> bool:
        """Unload a model once its running replies have ended; requests that come meanwhile load it again.

        Return whether it was loaded; a load that has begun is given up. Raises: ApiError 404.
        """
        model = self.find(name)
        loading = model.loading
        if loading is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return False
        if (llm := model.llm) is None:
            return False
        model.num_drains += 1
        try:
            while model.llm is llm and not model.is_idle:
                await self._changed.wait()
            if model.llm is llm:
                await self._unload(model)
        finally:
            model.num_drains -= 1
            self._notify()
        return True

    def stop_loading(self) -> None:
        """Give up what is being loaded, and load nothing more."""
        self._threads.stopping.set()
        for model in self._models.values():
            if model.loading is not None:
                model.loading.cancel()
        self._notify()

    def join_loads(self, seconds: float) -> bool:
        """Wait for threads whose load was given up; return whether none is left. Called off the event loop."""
        return self._threads.join(seconds)

    async def unload_idle(self) -> None:
        """Unload models that were not used for long, and those that are no longer served, for ever."""
        while True:
            changed = self._changed
            now = time.monotonic()
            for model in self._former:
                if model.is_idle:
                    await self._unload(model)
            self._former = [model for model in self._former if model.llm is not None]
            for model in self.models():
                if (until := model.idle_until_seconds) is not None and until <= now:
                    await self._unload(model)
            dues = [until for model in self.models() if (until := model.idle_until_seconds) is not None]
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(dues) - time.monotonic()) if dues else None):
                    await changed.wait()

    async def close(self) -> None:
        """Unload every model, in use or not."""
        loading = [model.loading for model in self._models.values() if model.loading is not None]
        self.stop_loading()
        await asyncio.gather(*loading, return_exceptions=True)
        for model in (*self._models.values(), *self._former):
            await self._unload(model)

    def _leased(self, model: ServedModel) -> Lease | None:
        if model.llm is None or model.is_draining:
            return None
        return Lease(model, model.llm, self._notify)

    def _is_served(self, model: ServedModel) -> bool:
        return self._models.get(model.source.id) is model

    def _notify(self) -> None:
        """Let all look again who wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _check_stopping(self) -> None:
        if self._threads.stopping.is_set():
            raise shutting_down()

    async def _loaded(self, model: ServedModel) -> None:
        """Wait for a model's load, which is begun if need be."""
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
            task = asyncio.current_task()
            if not loading.cancelled() or (task is not None and task.cancelling()):
                raise
            self._check_stopping()
            if self._is_served(model):
                reason = f"{model.source.id} was unloaded while it was being loaded; ask for it again"
                raise ApiError(503, reason, code="model_unloaded") from None

    async def _load_model(self, model: ServedModel) -> "LLM":
        source = model.source
        model.failure = None
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
        except Exception as error:
            model.failure = error
            raise
        finally:
            model.loading = None
            self._notify()

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
                idle = [other for other in self._models.values() if other.is_idle]
                if not idle:
                    raise
                await self._unload(min(idle, key=lambda other: other.last_used_seconds))
            else:
                return

    def _available_bytes(self) -> int:
        available = memory_limits().available_bytes
        if self._memory_limit is None:
            return available
        loaded = [other for other in (*self._models.values(), *self._former) if other.llm is not None]
        return min(available, self._memory_limit - sum(other.need.fixed_bytes for other in loaded if other.need))

    async def _unload(self, model: ServedModel) -> None:
        llm, model.llm = model.llm, None
        if llm is not None:
            model.keep_alive_seconds = self._idle_unload_seconds
            await asyncio.to_thread(llm.close)
            self._metrics.loaded.dec()
            logger.info("unloaded %s", model.source.id)
            self._notify()


def _check_names(sources: Sequence[ModelSource]) -> None:
    owners: dict[str, str] = {}
    for source in sources:
        for name in (source.id, *source.aliases):
            owner = owners.setdefault(name, source.id)
            if owner != source.id:
                raise RequestError(f"{owner} and {source.id} are both called {name}; give one of them another name")

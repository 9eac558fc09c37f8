"""The models a server has: found by name, loaded when a request names them, unloaded when no request uses them."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from localinfer.apps.server.operation.metrics import Metrics
from localinfer.apps.server.router.model_folder import MemoryNeed, ModelSource, matching_sources
from localinfer.apps.server.router.model_loader import Changes, LoadThreads, ModelLoader
from localinfer.apps.server.router.served_model import Lease, ModelState, ServedModel
from localinfer.apps.server.transport.http import ApiError
from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.llm import LLM

logger = logging.getLogger("localinfer.server")


class ModelRegistry:
    """Models by name. All methods but the loading itself run on the event loop.

    load: loads a model, in a thread. measure: says what one will take, before. idle_unload_seconds: None keeps models
    loaded. memory_limit: bytes that all loaded models may take together; None leaves it to the machine.
    context_length: the one that models are loaded with, None for their own. threads: what loads; its event `stopping`
    makes `load` give up. wait_seconds: how long a request for a model waits for memory that running replies hold.
    preload: models that are loaded at start, beside those that are pinned.
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
        wait_seconds: float = 300.0,
        preload: Sequence[str] = (),
    ) -> None:
        self._is_strict = strict
        self._idle_unload_seconds = idle_unload_seconds
        self._preload = preload
        self._threads = LoadThreads() if threads is None else threads
        self._changes = Changes()
        self._loader = ModelLoader(
            load,
            measure,
            self._all_models,
            metrics,
            self._changes,
            memory_limit=memory_limit,
            context_length=context_length,
            wait_seconds=wait_seconds,
            threads=self._threads,
        )
        self._models: dict[str, ServedModel] = {}
        self._former: list[ServedModel] = []
        self.replace_sources(sources)

    @property
    def sources(self) -> list[ModelSource]:
        """Models that can be asked for, the default first."""
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
                self._models[source.id] = ServedModel(source, self._keep_alive_seconds(source))
        for model in former.values():
            model.is_served = False
            model.drained_by.add(self)
            if model.loading is not None:
                model.loading.cancel()
        self._former = [model for model in (*self._former, *former.values()) if model.llm is not None]
        self._changes.notify()

    def models(self) -> list[ServedModel]:
        """All models, the default one first."""
        return list(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """The model of a name, which may be the end of a longer one, or begin with a provider's.

        Without a name, or where any will do, the default: the first that could be loaded when that was last tried.
        Raises: ApiError 404, also for a name that several have.
        """
        if not name:
            models = list(self._models.values())
            return next((model for model in models if model.state != "failed"), models[0])
        if name in self._models:
            return self._models[name]
        sources = self.sources
        for wanted in (name, name.removesuffix(".gguf"), name.rpartition("/")[2].removesuffix(".gguf")):
            found = [source.id for source in matching_sources(wanted, sources)]
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
        if len(sources) == 1 and not self._is_strict:
            return self._models[sources[0].id]
        known = ", ".join(source.id for source in sources[:10])
        raise ApiError(
            404, f"there is no model {name[:80]!r}; there are {known}", code="model_not_found", param="model"
        )

    def state_of(self, name: str | None) -> ModelState:
        """Check whether a model is loaded. Raises: ApiError 404."""
        return self.find(name).state

    def set_keep_alive(self, name: str | None, seconds: float | None) -> None:
        """Time that a model stays loaded without requests: 0 until nobody uses it, None for ever.

        It counts until the model is unloaded. Raises: ApiError 404.
        """
        self.find(name).keep_alive_seconds = seconds
        self._changes.notify()

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
                    await self._changes.next.wait()
                if not model.is_served:
                    successor = self.find(name)
                    model.num_waiting -= 1
                    model = successor
                    model.num_waiting += 1
            return lease
        finally:
            model.num_waiting -= 1
            if model.waiting_for and model.loading is not None and not model.num_waiting:
                # Nobody wants it any more, and it holds others up.
                model.loading.cancel()
            self._changes.notify()

    async def measure_all(self, seconds: float, *models: ServedModel) -> None:
        """Read what models take of which nothing is known yet, all or these, for so long at most."""
        unknown = [model for model in models or self.models() if model.need is None and model.failure is None]
        if unknown:
            await asyncio.wait([self._loader.begin_measuring(model) for model in unknown], timeout=seconds)

    async def load(self, name: str | None) -> ServedModel:
        """Load a model without using it. Raises: as `lease`."""
        with await self.lease(name):
            return self.find(name)

    async def unload(self, name: str | None) -> bool:
        """Unload a model once its running replies have ended; requests that come meanwhile load it again.

        Return whether it was loaded; a load that has begun is given up. Raises: ApiError 404, or 409 if it is pinned.
        """
        model = self.find(name)
        if model.is_pinned:
            raise ApiError(
                409,
                f"{model.source.id} is pinned, so it is not unloaded; unpin it first",
                code="model_pinned",
                param="model",
            )
        loading = model.loading
        if loading is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return False
        if (llm := model.llm) is None:
            return False
        drain = object()
        model.drained_by.add(drain)
        try:
            while model.llm is llm and not model.is_idle:
                await self._changes.next.wait()
            if model.llm is llm:
                await self._loader.unload(model)
        finally:
            model.drained_by.discard(drain)
            self._changes.notify()
        return True

    def stop_loading(self) -> None:
        """Give up what is being loaded, and load nothing more."""
        self._loader.stop()

    def join_loads(self, seconds: float) -> bool:
        """Wait for threads whose load was given up; return whether none is left. Called off the event loop."""
        return self._threads.join(seconds)

    async def preload(self) -> None:
        """Load what is wanted from the start, the default one if nothing else is. Raises: as `lease`."""
        pinned = [source.id for source in self.sources if source.settings.is_pinned]
        for name in dict.fromkeys([*self._preload, *pinned] or [self.sources[0].id]):
            await self.load(name)

    async def unload_idle(self) -> None:
        """Unload models that were not used for long or are no longer served, and load pinned ones, for ever."""
        while True:
            changed = self._changes.next
            for model in self._former:
                if model.is_idle:
                    await self._loader.unload(model)
            self._former = [model for model in self._former if model.llm is not None]
            for model in self.models():
                if (until := model.idle_until_seconds) is not None and until <= time.monotonic():
                    await self._loader.unload(model)
                is_wanted = model.is_pinned and not self._loader.is_stopping
                if is_wanted and model.state == "unloaded":
                    self._loader.begin(model)
            dues = [until for model in self.models() if (until := model.idle_until_seconds) is not None]
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(dues) - time.monotonic()) if dues else None):
                    await changed.wait()

    async def close(self) -> None:
        """Unload every model, in use or not."""
        loading = [model.loading for model in self._models.values() if model.loading is not None]
        self.stop_loading()
        await asyncio.gather(*loading, return_exceptions=True)
        for model in self._all_models():
            await self._loader.unload(model)
        await self._loader.wait_closed()

    def _leased(self, model: ServedModel) -> Lease | None:
        if model.llm is None or model.drained_by:
            return None
        return Lease(model, model.llm, self._changes.notify)

    def _all_models(self) -> list[ServedModel]:
        """Those that are served, and those that were and still have replies."""
        return [*self._models.values(), *self._former]

    def _keep_alive_seconds(self, source: ModelSource) -> float | None:
        own = source.settings.keep_alive_seconds
        return self._idle_unload_seconds if own is None else None if own == math.inf else own

    async def _loaded(self, model: ServedModel) -> None:
        """Wait for a model's load, which is begun if need be."""
        loading = self._loader.begin(model)
        try:
            # The first request may be cancelled; others still wait for the model.
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not loading.cancelled() or (task is not None and task.cancelling()):
                raise
            self._loader.check_stopping()
            if model.is_served:
                reason = f"{model.source.id} was unloaded while it was being loaded; ask for it again"
                raise ApiError(503, reason, code="model_unloaded") from None


def _check_names(sources: Sequence[ModelSource]) -> None:
    owners: dict[str, str] = {}
    for source in sources:
        for name in (source.id, *source.aliases):
            owner = owners.setdefault(name, source.id)
            if owner != source.id:
                raise RequestError(f"{owner} and {source.id} are both called {name}; give one of them another name")

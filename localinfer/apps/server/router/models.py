"""The models of a server: found by name, loaded when a request names them, unloaded when no request uses them.

They are loaded one at a time, on threads of their own, once there is room beside those that are used."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from localinfer.apps.server.operation.observation import Metrics
from localinfer.apps.server.router.model_folder import MemoryNeed, ModelSource, matching_sources
from localinfer.apps.server.transport.http import ApiError, ModelLoadError, shutting_down
from localinfer.errors import LocalinferError, ModelFileError, OutOfMemoryError, RequestError
from localinfer.system.machine_limits import byte_text, memory_limits
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

    @property
    def decides(self) -> bool:
        """True if it answers questions with probabilities."""
        is_run = self.need is None or self.need.decides
        return is_run and bool({"completion", "decisions"} & {*self.capabilities})

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


Result = TypeVar("Result")


class LoadThreads:
    """Does work in threads of its own, none of which keeps the event loop or the interpreter from ending.

    A server that ends need not wait for them: compiled code cannot be interrupted. stopping: set when work is to end;
    work that looks at it now and then ends early, by raising what it likes. is_beside_replies: whether what is
    loaded now should leave the processors to models that answer.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.is_beside_replies = False
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


logger = logging.getLogger("localinfer.server")


class Changes:
    """Lets tasks of an event loop wait for the next change of anything."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Event of the next change."""
        return self._next

    def notify(self) -> None:
        """Wake every task that waits for a change."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()


class ModelLoader:
    """Loads models, in threads, and unloads them. Its methods run on the event loop.

    load, measure, memory_limit, context_length, wait_seconds, threads: as in `ModelRegistry`. models: lists all that
    may hold memory. changes: notified of whatever another task may wait for.
    """

    def __init__(
        self,
        load: "Callable[[ModelSource], LLM]",
        measure: Callable[[ModelSource], MemoryNeed],
        models: Callable[[], Sequence[ServedModel]],
        metrics: Metrics,
        changes: Changes,
        *,
        memory_limit: int | None,
        context_length: int | None,
        wait_seconds: float,
        threads: LoadThreads,
    ) -> None:
        self._load = load
        self._measure = measure
        self._models = models
        self._metrics = metrics
        self._changes = changes
        self._memory_limit = memory_limit
        self._context_length = context_length
        self._wait_seconds = wait_seconds
        self._threads = threads
        self._lock = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_stopping(self) -> bool:
        """True if nothing is loaded any more."""
        return self._threads.stopping.is_set()

    def check_stopping(self) -> None:
        """Raise ApiError 503 if nothing is loaded any more."""
        if self.is_stopping:
            raise shutting_down()

    def stop(self) -> None:
        """Give up what is being loaded, and load nothing more."""
        self._threads.stopping.set()
        for model in self._models():
            for task in (model.loading, model.measuring):
                if task is not None:
                    task.cancel()
        self._changes.notify()

    def begin(self, model: ServedModel) -> "asyncio.Task[LLM]":
        """The load of a model, which continues whether or not a request still waits for it. Raises: ApiError 503."""
        self.check_stopping()
        if model.loading is None:
            model.loading = asyncio.create_task(self._load_model(model))
            model.loading.add_done_callback(lambda task: self._load_ended(model, task))
        return model.loading

    async def unload(self, model: ServedModel) -> None:
        """Unload a model, in use or not; cancelling this does not stop it."""
        llm, model.llm = model.llm, None
        if llm is not None:
            model.drained_by.clear()
            model.keep_alive_seconds = model.own_keep_alive_seconds
            closing = asyncio.create_task(self._close(model.source.id, llm))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)

    async def wait_closed(self) -> None:
        """Wait until the memory is free of the models that are being unloaded now."""
        if self._closing:
            await asyncio.wait(self._closing)

    def begin_measuring(self, model: ServedModel) -> "asyncio.Task[MemoryNeed]":
        """The task that reads a model's memory needs, one file at a time, whether or not a request waits for it."""
        if model.measuring is None:
            model.measuring = asyncio.create_task(self._measure_model(model))
            model.measuring.add_done_callback(lambda task: task.cancelled() or task.exception())
        return model.measuring

    async def _close(self, name: str, llm: "LLM") -> None:
        try:
            await asyncio.to_thread(llm.close)
        finally:
            self._metrics.loaded.dec()
            logger.info("unloaded %s", name)
            self._changes.notify()

    async def _measure_model(self, model: ServedModel) -> MemoryNeed:
        source = model.source
        try:
            async with self._reading:
                need = model.need = await self._work(source, lambda: self._measure(source), lambda need: None)
        except ModelLoadError as error:
            if model.failure is None:
                logger.info("%s cannot be read: %s", source.id, " ".join(str(error.__cause__).split()))
            model.failure = error
            raise
        finally:
            model.measuring = None
        return need

    def _load_ended(self, model: ServedModel, loading: "asyncio.Task[LLM]") -> None:
        if model.loading is loading:
            # A task that is cancelled before its first step runs nothing, not even what stands under `finally`.
            model.loading = None
            self._changes.notify()
        if not loading.cancelled():
            loading.exception()

    async def _load_model(self, model: ServedModel) -> "LLM":
        model.failure = None
        try:
            need = model.need
            if need is None:
                need = await asyncio.shield(self.begin_measuring(model))
            return await self._load_when_it_fits(model, need)
        except (ModelLoadError, OutOfMemoryError) as error:
            model.failure = error
            raise
        finally:
            model.loading = None
            self._changes.notify()

    async def _load_when_it_fits(self, model: ServedModel, need: MemoryNeed) -> "LLM":
        """Load a model once there is room for it, after the replies of those that are in its way.

        Raises: OutOfMemoryError if there never will be; ApiError 503 if the replies take too long.
        """
        drain, drained = object(), list[ServedModel]()
        deadline = time.monotonic() + self._wait_seconds
        try:
            while True:
                async with self._lock:
                    in_the_way = await self._make_room(model, need)
                    if not in_the_way:
                        try:
                            return await self._load_now(model)
                        except ModelLoadError as error:
                            in_the_way = self._busy_models()[:1]
                            if not in_the_way or not isinstance(error.__cause__, OutOfMemoryError):
                                raise
                    changed = self._changes.next
                model.waiting_for = tuple(other.source.id for other in in_the_way)
                # One without replies was just loaded for requests that have not continued yet.
                for other in in_the_way:
                    if other.num_leases:
                        other.drained_by.add(drain)
                        drained.append(other)
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await changed.wait()
                except TimeoutError:
                    held = self._holders()
                    reason = f"{model.source.id} has no room after {self._wait_seconds:g} s: {held}; try again later"
                    raise ApiError(503, reason, code="models_busy") from None
        finally:
            model.waiting_for = ()
            for other in drained:
                other.drained_by.discard(drain)

    async def _load_now(self, model: ServedModel) -> "LLM":
        """Load a model, without idle others where only the load finds out that there is no room, as on a GPU.

        Raises: ModelLoadError, with what holds the memory if there is too little.
        """
        source = model.source
        while True:
            began = time.monotonic()
            self._threads.is_beside_replies = any(other.num_leases for other in self._models())
            try:
                llm = await self._work(source, lambda: self._load(source), lambda llm: llm.close())
            except ModelLoadError as error:
                if not isinstance(error.__cause__, OutOfMemoryError):
                    raise
                idle = self._idle_models()
                if not idle:
                    raise ModelLoadError(source.id, self._holders()) from error.__cause__
                await self.unload(idle[0])
                continue
            model.llm, model.last_used_seconds = llm, time.monotonic()
            self._metrics.loaded.inc()
            logger.info("loaded %s in %.1f s", source.id, time.monotonic() - began)
            return llm

    async def _make_room(self, model: ServedModel, need: MemoryNeed) -> list[ServedModel]:
        """Unload idle models until one fits; return those whose replies have to end first, none once it does.

        The least recently used one goes that makes room by itself, or else one after the other.
        Raises: OutOfMemoryError if it does not fit even alone with those that are pinned.
        """
        wanted = model.source.settings.load.get("context_length", self._context_length)
        needed = need.bytes_for(wanted)
        await self.wait_closed()
        while (missing := needed - self._available_bytes()) > 0:
            idle = self._idle_models()
            missing_then = missing - sum(other.memory_bytes for other in idle)
            if missing_then <= 0:
                enough = [other for other in idle if other.memory_bytes >= missing]
                await self.unload((enough or idle)[0])
                continue
            in_the_way = []
            for other in self._busy_models():
                in_the_way.append(other)
                missing_then -= other.memory_bytes
                if missing_then <= 0:
                    return in_the_way
            try:
                need.check(model.source.id, needed - missing, wanted_context=wanted)
            except OutOfMemoryError as error:
                raise OutOfMemoryError(f"{error} ({self._holders()})") from None
        return []

    def _holders(self) -> str:
        """Models that hold memory, how much, and the reasons why they are not unloaded."""
        loaded = [other for other in self._models() if other.llm is not None]
        if not loaded:
            return "no other model is loaded"
        return ", ".join(
            f"{other.source.id} holds {byte_text(other.memory_bytes)} and is {other.use}" for other in loaded
        )

    def _available_bytes(self) -> int:
        available = memory_limits().available_bytes
        if self._memory_limit is None:
            return available
        return min(available, self._memory_limit - sum(other.memory_bytes for other in self._models()))

    def _idle_models(self) -> list[ServedModel]:
        """Models that may be unloaded at once, the least recently used first."""
        idle = [model for model in self._models() if model.is_idle and not model.is_pinned]
        return sorted(idle, key=lambda model: model.last_used_seconds)

    def _busy_models(self) -> list[ServedModel]:
        """Models that may be unloaded once their replies have ended, the least recently used first."""
        busy = [model for model in self._models() if model.llm and not model.is_idle and not model.is_pinned]
        return sorted(busy, key=lambda model: model.last_used_seconds)

    async def _work(
        self, source: ModelSource, work: Callable[[], Result], discard: Callable[[Result], object]
    ) -> Result:
        try:
            return await self._threads.run(work, discard)
        except Exception as error:
            raise ModelLoadError(source.id) from error


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
        """Time that a model stays loaded without requests: 0 until its last use, None for ever.

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
                # No request wants it any more, and it holds others up.
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
        """Models that are served, and those that were and still have replies."""
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

"""Loads models one at a time, on threads of their own, once there is room beside those that are used."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from localinfer.apps.server.operation.metrics import Metrics
from localinfer.apps.server.router.model_folder import MemoryNeed, ModelSource
from localinfer.apps.server.router.served_model import ServedModel
from localinfer.apps.server.transport.http import ApiError, ModelLoadError, shutting_down
from localinfer.errors import OutOfMemoryError
from localinfer.system.machine_limits import byte_text, memory_limits

if TYPE_CHECKING:
    from localinfer.llm import LLM


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
        """Let all look again who wait."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()


class ModelLoader:
    """Loads models, in threads, and unloads them. Its methods run on the event loop.

    load, measure, memory_limit, context_length, wait_seconds, threads: as in `ModelRegistry`. models: lists all that
    may hold memory. changes: told of whatever another task may wait for.
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
        """The load of a model, which goes on whether or not a request still waits for it. Raises: ApiError 503."""
        self.check_stopping()
        if model.loading is None:
            model.loading = asyncio.create_task(self._load_model(model))
            model.loading.add_done_callback(lambda task: self._load_ended(model, task))
        return model.loading

    async def unload(self, model: ServedModel) -> None:
        """Unload a model, in use or not; it goes on when this is cancelled."""
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
        """The reading of what a model takes, one file at a time, whether or not somebody waits for it."""
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
                # One without replies was just loaded for requests that have not gone on yet.
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
        """Those that may be unloaded at once, the least recently used first."""
        idle = [model for model in self._models() if model.is_idle and not model.is_pinned]
        return sorted(idle, key=lambda model: model.last_used_seconds)

    def _busy_models(self) -> list[ServedModel]:
        """Those that may be unloaded once their replies have ended, the least recently used first."""
        busy = [model for model in self._models() if model.llm and not model.is_idle and not model.is_pinned]
        return sorted(busy, key=lambda model: model.last_used_seconds)

    async def _work(
        self, source: ModelSource, work: Callable[[], Result], discard: Callable[[Result], object]
    ) -> Result:
        try:
            return await self._threads.run(work, discard)
        except Exception as error:
            raise ModelLoadError(source.id) from error

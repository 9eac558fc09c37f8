"""The registry of models by itself: what is loaded, unloaded and replaced, and what requests wait for meanwhile."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from localinfer.apps.server.operation.observation import Metrics
from localinfer.apps.server.router.model_folder import MemoryNeed, ModelSettings, ModelSource
from localinfer.apps.server.router.models import LoadThreads, ModelRegistry
from localinfer.apps.server.transport.http import ApiError, ModelLoadError
from localinfer.errors import ModelFileError, OutOfMemoryError, RequestError
from tests.support.limits import seconds

NEED = MemoryNeed(fixed_bytes=100, bytes_per_token=0, context_length=4096)


class LoadedModel:
    """Stands for a model in memory."""

    capabilities = ("completion",)
    kv_bytes = 0

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.is_closed = False
        self.is_closing = threading.Event()
        self.may_close = threading.Event()
        self.may_close.set()

    def close(self) -> None:
        self.is_closing.set()
        assert self.may_close.wait(seconds(20)), "nobody let it close"
        self.is_closed = True


class Loader:
    """Loads what stands for models, once it may.

    failing: names of models that cannot be loaded; too_large: of those that cannot beside another.
    """

    def __init__(self) -> None:
        self.loaded: list[LoadedModel] = []
        self.failing: set[str] = set()
        self.too_large: set[str] = set()
        self.began = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, source: ModelSource) -> LoadedModel:
        self.began.set()
        assert self.may_go_on.wait(seconds(20)), "nobody let the load go on"
        if source.id in self.failing:
            raise ModelFileError(f"{source.id} is damaged")
        if source.id in self.too_large and not all(model.is_closed for model in self.loaded):
            raise OutOfMemoryError("there is another model")
        self.loaded.append(LoadedModel(source))
        return self.loaded[-1]

    @property
    def names(self) -> list[str]:
        return [model.source.id for model in self.loaded]


def sources(*names: str, **more: Any) -> list[ModelSource]:
    return [ModelSource(name, Path(f"{name}.gguf"), 1, **more) for name in names]


def run(test: Callable[[ModelRegistry, Loader], Awaitable[None]], served: list[ModelSource], **options: Any) -> None:
    """Run a test on a registry, with the task beside it that unloads what is idle."""
    loader = options.pop("loader", None) or Loader()
    metrics = options.pop("metrics", None) or Metrics()

    async def whole() -> None:
        registry = ModelRegistry(served, loader, options.pop("measure", lambda source: NEED), metrics, **options)
        unloading = asyncio.create_task(registry.unload_idle())
        try:
            async with asyncio.timeout(seconds(20)):
                await test(registry, loader)
        finally:
            unloading.cancel()
            await registry.close()
            assert await asyncio.to_thread(registry.join_loads, seconds(20))
        assert all(model.is_closed for model in loader.loaded)

    asyncio.run(whole())


async def rounds(number: int = 20) -> None:
    """Let everything go on that waits for nothing."""
    for _ in range(number):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_models_are_loaded_and_unloaded_without_being_used():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        assert (registry.state_of("a"), await registry.unload("a")) == ("unloaded", False)
        model = await registry.load("a")
        assert (model.source.id, registry.state_of("a"), registry.state_of("b")) == ("a", "loaded", "unloaded")
        assert await registry.load("a") is model
        assert loader.names == ["a"]
        assert await registry.unload("a")
        assert (registry.state_of("a"), loader.loaded[0].is_closed) == ("unloaded", True)

    run(test, sources("a", "b"))


def test_unloading_waits_for_replies_and_new_requests_get_the_model_loaded_again():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        first = await registry.lease("a")
        unloading = asyncio.create_task(registry.unload("a"))
        await rounds()
        assert not loader.loaded[0].is_closed
        assert registry.lease_loaded("a") is None
        second = asyncio.create_task(registry.lease("a"))
        await rounds()
        assert not second.done()
        first.close()
        assert await unloading
        lease = await second
        assert (loader.loaded[0].is_closed, lease.llm is loader.loaded[1]) == (True, True)
        lease.close()

    run(test, sources("a"))


def test_requests_share_a_load_and_its_failure_which_may_be_tried_again():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        loader.may_go_on.clear()
        loader.failing = {"a"}
        waiting = [asyncio.create_task(registry.lease("a")) for _ in range(3)]
        await until(loader.began.is_set)
        assert registry.state_of("a") == "loading"
        loader.may_go_on.set()
        for failed in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(failed, ModelLoadError)
            assert isinstance(failed.__cause__, ModelFileError)
        assert registry.state_of("a") == "failed"
        loader.failing.clear()
        leases = await asyncio.gather(*(registry.lease("a") for _ in range(3)))
        assert (loader.names, registry.state_of("a")) == (["a"], "loaded")
        for lease in leases:
            lease.close()

    run(test, sources("a"))


def test_unloading_gives_up_a_load_and_tells_those_who_wait():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        loader.may_go_on.clear()
        waiting = asyncio.create_task(registry.lease("a"))
        await until(loader.began.is_set)
        assert not await registry.unload("a")
        with pytest.raises(ApiError, match="was unloaded while it was being loaded") as raised:
            await waiting
        assert raised.value.status == 503
        loader.may_go_on.set()
        assert registry.state_of("a") == "unloaded"

    run(test, sources("a"))


def test_a_load_that_is_given_up_before_its_first_step_can_be_begun_again():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        waiting = asyncio.create_task(registry.lease("a"))
        unloading = asyncio.create_task(registry.unload("a"))
        assert not await unloading
        with pytest.raises(ApiError, match="was unloaded while it was being loaded"):
            await waiting
        assert (registry.state_of("a"), loader.names) == ("unloaded", [])
        (await registry.lease("a")).close()
        assert loader.names == ["a"]

    run(test, sources("a"))


def test_keep_alive_is_a_models_own_until_it_is_unloaded():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        lease = await registry.lease("a")
        registry.set_keep_alive("a", 0)
        await rounds()
        assert registry.state_of("a") == "loaded"
        lease.close()
        await until(lambda: registry.state_of("a") == "unloaded")
        await registry.load("a")
        await registry.load("b")
        await rounds()
        assert registry.state_of("a") == "loaded"
        registry.set_keep_alive("b", 0.01)
        await until(lambda: registry.state_of("b") == "unloaded")
        assert registry.state_of("a") == "loaded"

    run(test, sources("a", "b"))


def test_sources_are_replaced_under_running_replies():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        stays, goes = await registry.lease("stays"), await registry.lease("goes")
        (changed,) = sources("goes", aliases=("other",))
        registry.replace_sources([*sources("stays"), changed, *sources("new")])
        assert [source.id for source in registry.sources] == ["stays", "goes", "new"]
        await rounds()
        assert not loader.loaded[1].is_closed
        anew = await registry.lease("other")
        assert anew.llm is not goes.llm
        goes.close()
        await until(lambda: loader.loaded[1].is_closed)
        assert registry.lease_loaded("stays").llm is stays.llm
        assert not loader.loaded[0].is_closed
        with pytest.raises(RequestError, match="both called x"):
            registry.replace_sources(sources("a", "b", aliases=("x",)))
        with pytest.raises(RequestError, match="no model to serve"):
            registry.replace_sources([])

    run(test, sources("stays", "goes"))


def test_requests_for_a_model_that_is_replaced_while_it_loads_get_the_new_one():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        loader.may_go_on.clear()
        waiting = asyncio.create_task(registry.lease("a"))
        await until(loader.began.is_set)
        registry.replace_sources(sources("a", aliases=("new",)))
        loader.may_go_on.set()
        lease = await waiting
        assert lease.llm.source.aliases == ("new",)
        lease.close()

    run(test, sources("a"))


def test_requests_for_a_model_that_is_no_longer_served_are_told_so_and_counted_off_once():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        loader.may_go_on.clear()
        former = registry.find("b")
        waiting = asyncio.create_task(registry.lease("b"))
        await until(loader.began.is_set)
        registry.replace_sources(sources("a", "c"))
        with pytest.raises(ApiError, match="there is no model 'b'"):
            await waiting
        loader.may_go_on.set()
        assert (former.num_waiting, former.state) == (0, "unloaded")

    run(test, sources("a", "b"))


def test_aliases_name_a_model_before_parts_of_names_do():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        assert registry.find("gpt-4o").source.id == "x/a"
        assert registry.find("openai/gpt-4o").source.id == "x/a"
        assert registry.find("b").source.id == "x/a"
        assert registry.find("y/b").source.id == "y/b"

    run(test, [*sources("x/a", aliases=("gpt-4o", "b")), *sources("y/b")])


LIMIT = 250
"""Room for two models."""


async def waits(task: asyncio.Task[Any]) -> bool:
    await rounds()
    return not task.done()


def loaded_names(registry: ModelRegistry) -> set[str]:
    return {model.source.id for model in registry.models() if model.llm is not None}


def test_the_idle_model_that_was_used_least_recently_makes_room():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        for name in ("a", "b", "a", "c"):
            await registry.load(name)
        assert loaded_names(registry) == {"a", "c"}
        running = await registry.lease("a")
        await registry.load("d")
        assert loaded_names(registry) == {"a", "d"}
        running.close()

    run(test, sources("a", "b", "c", "d"), memory_limit=LIMIT)


def test_one_model_that_makes_room_alone_goes_before_several_that_were_used_earlier():
    sizes = {"small": 10, "large": 200, "new": 150}

    async def test(registry: ModelRegistry, loader: Loader) -> None:
        for name in ("small", "large", "new"):
            await registry.load(name)
        assert loaded_names(registry) == {"small", "new"}

    def measure(source: ModelSource) -> MemoryNeed:
        return MemoryNeed(sizes[source.id], 0, 4096)

    run(test, sources(*sizes), memory_limit=LIMIT, measure=measure)


def test_a_model_waits_for_replies_in_its_way_and_neither_ends_them_nor_is_kept_out_by_new_ones():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        first = await registry.lease("a")
        other = asyncio.create_task(registry.lease("b"))
        assert await waits(other)
        assert registry.find("b").waiting_for == ("a",)
        again = asyncio.create_task(registry.lease("a"))
        assert await waits(again)
        assert not loader.loaded[0].is_closed
        first.close()
        lease = await other
        assert loaded_names(registry) == {"b"}
        assert await waits(again)
        lease.close()
        (await again).close()
        assert loader.names == ["a", "b", "a"]

    run(test, sources("a", "b"), memory_limit=150)


def test_a_model_that_nobody_waits_for_any_more_holds_up_no_other():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        first = await registry.lease("a")
        other = asyncio.create_task(registry.lease("b"))
        assert await waits(other)
        assert registry.lease_loaded("a") is None
        other.cancel()
        await until(lambda: registry.find("b").loading is None)
        second = registry.lease_loaded("a")
        assert second is not None
        second.close()
        first.close()

    run(test, sources("a", "b"), memory_limit=150)


def test_a_load_that_is_given_up_while_it_makes_room_leaves_that_room_to_the_next():
    metrics = Metrics()

    async def test(registry: ModelRegistry, loader: Loader) -> None:
        await registry.load("a")
        former = loader.loaded[0]
        former.may_close.clear()
        given_up = asyncio.create_task(registry.load("b"))
        await until(former.is_closing.is_set)
        await registry.unload("b")
        with pytest.raises(ApiError, match="unloaded"):
            await given_up
        following = asyncio.create_task(registry.load("c"))
        has_waited = await waits(following)
        former.may_close.set()
        assert has_waited
        await following
        assert loader.names == ["a", "c"]
        assert metrics.registry.get_sample_value("localinfer_loaded_models") == 1

    run(test, sources("a", "b", "c"), memory_limit=150, metrics=metrics)


def test_what_holds_the_memory_is_named_where_waiting_is_in_vain_or_takes_too_long():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        lease = await registry.lease("a")
        with pytest.raises(ApiError, match="b has no room after 0.05 s: a holds 1 MB and is 1 running") as raised:
            await registry.lease("b")
        assert (raised.value.status, registry.state_of("b")) == (503, "unloaded")
        with pytest.raises(OutOfMemoryError, match=r"huge needs 1,000 bytes .*\(a holds 1 MB and is 1 running\)"):
            await registry.lease("huge")
        assert registry.state_of("huge") == "failed"
        lease.close()

    def measure(source: ModelSource) -> MemoryNeed:
        return MemoryNeed(1000 if source.id == "huge" else 100, 0, 4096)

    run(test, sources("a", "b", "huge"), memory_limit=150, wait_seconds=0.05, measure=measure)


def test_pinned_models_are_loaded_at_start_and_stay():
    pinned = sources("pinned", settings=ModelSettings(is_pinned=True))

    async def test(registry: ModelRegistry, loader: Loader) -> None:
        await until(lambda: registry.state_of("pinned") == "loaded")
        await registry.preload()
        assert loader.names == ["pinned"]
        await registry.load("a")
        await registry.load("b")
        assert loaded_names(registry) == {"pinned", "b"}
        with pytest.raises(ApiError, match="is pinned") as raised:
            await registry.unload("pinned")
        assert raised.value.status == 409
        with pytest.raises(OutOfMemoryError, match="pinned holds 1 MB and is pinned"):
            await registry.lease("large")
        registry.set_keep_alive("pinned", 0)
        await rounds()
        registry.replace_sources([*sources("a", settings=ModelSettings(is_pinned=True)), *sources("b")])
        await until(lambda: loaded_names(registry) == {"a", "b"} and loader.loaded[0].is_closed)

    def measure(source: ModelSource) -> MemoryNeed:
        return MemoryNeed(200 if source.id == "large" else 100, 0, 4096)

    run(test, [*sources("a", "b", "large"), *pinned], memory_limit=LIMIT, measure=measure)


def test_a_pinned_model_that_is_replaced_before_its_turn_is_not_loaded():
    def pinned(created: int) -> ModelSource:
        return ModelSource("b", Path("b.gguf"), created, settings=ModelSettings(is_pinned=True))

    async def test(registry: ModelRegistry, loader: Loader) -> None:
        await registry.load("a")
        idle = loader.loaded[0]
        idle.may_close.clear()
        registry.replace_sources([idle.source, pinned(1)])
        registry.set_keep_alive("a", 0)
        await until(idle.is_closing.is_set)
        registry.replace_sources([idle.source, pinned(2)])
        idle.may_close.set()
        await until(lambda: registry.state_of("b") == "loaded")
        assert [model.source for model in loader.loaded] == [idle.source, pinned(2)]

    run(test, sources("a"))


def test_a_pinned_model_makes_room_after_its_replies_for_the_one_that_replaces_it():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        lease = await registry.lease("a")
        registry.replace_sources(sources("b"))
        other = asyncio.create_task(registry.load("b"))
        assert await waits(other)
        lease.close()
        assert (await other).state == "loaded"

    run(test, sources("a", settings=ModelSettings(is_pinned=True)), memory_limit=150)


def test_models_have_a_keep_alive_of_their_own():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        await registry.load("stays")
        await registry.load("goes")
        await until(lambda: registry.state_of("goes") == "unloaded")
        assert registry.state_of("stays") == "loaded"

    stays = sources("stays", settings=ModelSettings(keep_alive_seconds=math.inf))
    run(test, [*stays, *sources("goes")], idle_unload_seconds=0.01)


def test_others_make_room_where_only_the_load_finds_out_that_there_is_none():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        await registry.load("a")
        loader.too_large = {"b"}
        await registry.load("b")
        assert loaded_names(registry) == {"b"}
        assert loader.loaded[0].is_closed
        with await registry.lease("b"):
            loader.too_large = {"a"}
            waiting = asyncio.create_task(registry.lease("a"))
            await until(lambda: registry.find("a").waiting_for == ("b",))
        (await waiting).close()
        assert loaded_names(registry) == {"a"}

    run(test, sources("a", "b"))


def test_a_load_that_finds_no_room_at_all_tells_what_holds_it():
    pinned = sources("pinned", settings=ModelSettings(is_pinned=True))

    async def test(registry: ModelRegistry, loader: Loader) -> None:
        await registry.load("pinned")
        loader.too_large = {"b"}
        with pytest.raises(ModelLoadError, match=r"'b' could not be loaded \(pinned holds 1 MB and is pinned\)"):
            await registry.load("b")

    run(test, [*pinned, *sources("b")])


def test_a_model_is_told_to_leave_the_processors_to_those_that_answer():
    threads, told = LoadThreads(), []

    async def test(registry: ModelRegistry, loader: Loader) -> None:
        for name in ("a", "b"):
            await registry.load(name)
        with await registry.lease("a"):
            await registry.load("c")
        assert told == [False, False, True]

    class Telling(Loader):
        def __call__(self, source: ModelSource) -> LoadedModel:
            told.append(threads.is_beside_replies)
            return super().__call__(source)

    run(test, sources("a", "b", "c"), threads=threads, loader=Telling())

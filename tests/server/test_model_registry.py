"""The registry of models by itself: what is loaded, unloaded and replaced, and what requests wait for meanwhile."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from localinfer.errors import ModelFileError, RequestError
from localinfer.server.operation.metrics import Metrics
from localinfer.server.router.memory_need import MemoryNeed
from localinfer.server.router.model_folder import ModelSource
from localinfer.server.router.models import ModelRegistry
from localinfer.server.transport.http import ApiError, ModelLoadError
from tests.limits import seconds

NEED = MemoryNeed(fixed_bytes=100, bytes_per_token=0, context_length=4096)


class LoadedModel:
    """Stands for a model in memory."""

    capabilities = ("completion",)

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Loader:
    """Loads what stands for models, once it may. failing: names of models that cannot be loaded."""

    def __init__(self) -> None:
        self.loaded: list[LoadedModel] = []
        self.failing: set[str] = set()
        self.began = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, source: ModelSource) -> LoadedModel:
        self.began.set()
        assert self.may_go_on.wait(seconds(20)), "nobody let the load go on"
        if source.id in self.failing:
            raise ModelFileError(f"{source.id} is damaged")
        self.loaded.append(LoadedModel(source))
        return self.loaded[-1]

    @property
    def names(self) -> list[str]:
        return [model.source.id for model in self.loaded]


def sources(*names: str, **more: Any) -> list[ModelSource]:
    return [ModelSource(name, Path(f"{name}.gguf"), 1, **more) for name in names]


def run(test: Callable[[ModelRegistry, Loader], Awaitable[None]], served: list[ModelSource], **options: Any) -> None:
    """Run a test on a registry, with the task beside it that unloads what is idle."""
    loader = Loader()

    async def whole() -> None:
        registry = ModelRegistry(served, loader, options.pop("measure", lambda source: NEED), Metrics(), **options)
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


def test_aliases_name_a_model_before_parts_of_names_do():
    async def test(registry: ModelRegistry, loader: Loader) -> None:
        assert registry.find("gpt-4o").source.id == "x/a"
        assert registry.find("openai/gpt-4o").source.id == "x/a"
        assert registry.find("b").source.id == "x/a"
        assert registry.find("y/b").source.id == "y/b"

    run(test, [*sources("x/a", aliases=("gpt-4o", "b")), *sources("y/b")])

"""Calls of handles during a client's request: Serve takes no two for the same, and none ends with the client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from localinfer.apps.fleet.accounts import IngressAccounts, IngressOptions, Opened, PresentReplicas
from localinfer.apps.fleet.dispatch import Asked
from localinfer.apps.fleet.replica import PrefillDeployment, RelayedRequest
from localinfer.apps.server.transport.settings import ServerSettings
from tests.apps.fleet.serve_process import has_ray

REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""As Serve's own, from which it takes the id of each call that is made during a request."""


class Handle:
    """As much of a deployment's handle as is used. called: the methods, each with the request it was called in."""

    def __init__(self, name: str = "", called: list[tuple[str, str | None]] | None = None) -> None:
        self._name = name
        self.called: list[tuple[str, str | None]] = [] if called is None else called

    def __getattr__(self, name: str) -> "Handle":
        return Handle(name, self.called)

    def options(self, **options: Any) -> "Handle":
        return self

    def remote(self, *values: Any, **options: Any) -> "Response":
        self.called.append((self._name, REQUEST.get()))
        return Response(Opened())


class Response:
    """Is awaited, or read as a stream of nothing."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(0).__await__()
        return self._value

    async def __aiter__(self) -> AsyncIterator[Any]:
        for _ in ():
            yield _

    async def __anext__(self) -> Any:
        raise StopAsyncIteration

    def cancel(self) -> None:
        pass


async def count_and_report(handle: Handle) -> None:
    told = IngressAccounts(IngressOptions(ServerSettings(), 4), handle, PresentReplicas(), "engine")
    told.start()
    await told.open(1, "a", Asked("a", "a"))
    await told.reserve(1, 2, 3)
    await told.move(1)
    await told.suspect("r", True)
    told.resize(1, 2)
    told.close(1, 5)
    await asyncio.sleep(0.01)
    assert told._reporting is not None
    told._reporting.cancel()


async def hand_over(handle: Handle) -> None:
    asking = PrefillDeployment(handle, asyncio.get_running_loop())
    with pytest.raises(Exception, match="went away"):
        await asking._ask(b"{}", asyncio.get_running_loop().time() + 60.0, lambda: False)


async def answer_and_watch(handle: Handle) -> None:
    from localinfer.apps.fleet.accounts import present_replicas
    from localinfer.apps.fleet.serve_ingress import ENGINE, ServeReplicas

    replicas = ServeReplicas(handle, None)  # type: ignore[arg-type]
    async for _ in replicas.answer(RelayedRequest("POST", "/", b"", (), b"{}"), None, "r"):
        pass
    present_replicas.note(ENGINE, {"r": "actor"})
    try:
        await replicas.ask("r")
    finally:
        present_replicas.note(ENGINE, {})


@pytest.mark.parametrize(
    ("work", "count"),
    [
        (count_and_report, 7),
        (hand_over, 1),
        # Of Ray's own use of pydantic.
        pytest.param(
            answer_and_watch,
            2,
            marks=[
                pytest.mark.skipif(not has_ray(), reason="needs `pip install 'localinfer[ray]'`"),
                pytest.mark.filterwarnings("ignore::DeprecationWarning"),
            ],
        ),
    ],
)
def test_each_call_of_a_handle_is_no_part_of_the_request_during_which_it_is_made(
    work: Callable[[Handle], Coroutine[Any, Any, None]], count: int
) -> None:
    handle = Handle()

    async def during_a_request() -> None:
        REQUEST.set("of a client")
        await work(handle)

    asyncio.run(during_a_request())
    assert len(handle.called) == count
    assert {request for _, request in handle.called} == {None}, handle.called

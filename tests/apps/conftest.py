"""Servers in this process end without waiting."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True, scope="session")
def servers_look_for_their_end_often() -> Iterator[None]:
    """uvicorn looks every 0.1 s for its end, and waits as long for its clients: longer than most tests of a server."""

    async def sleep(delay: float) -> None:
        await asyncio.sleep(delay / 20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        yield

"""Replicas that compute prompts for those that generate text, asked over Serve's own handle instead of HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from localinfer.apps.fleet.answer_parts import AnswerPart, RelayedRequest
from localinfer.apps.fleet.handle_calls import call_apart
from localinfer.apps.server.kv_transfer import (
    CONNECT_SECONDS,
    ROUTE,
    SILENT_SECONDS,
    PrefillAnswer,
    PrefillCancelled,
    PrefillFailed,
    read_line,
    refusal,
    silence,
)

PREFILL = "prefill"
"""The name of the deployment."""
HEADERS = ((b"host", b"localhost"), (b"content-type", b"application/json"))
"""Of requests that this application makes itself; only who holds a handle can make them."""


class PrefillDeployment:
    """Somebody who computes prompts, as `KVTransferClient` asks: whichever replica Serve chooses.

    handle: of the deployment, a `DeploymentHandle`. loop: on which its answers are waited for; it runs in another
    thread than the one that asks.
    """

    name = f"of Serve's deployment {PREFILL!r}"

    def __init__(self, handle: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = handle
        self._loop = loop

    def ask(self, body: bytes, *, deadline: float, is_cancelled: Callable[[], bool]) -> PrefillAnswer:
        """As of `PrefillServer`."""
        asking = asyncio.run_coroutine_threadsafe(self._ask(body, deadline, is_cancelled), self._loop)
        try:
            # The loop may have ended, which tells nobody.
            return asking.result(max(0.0, deadline - time.monotonic()) + SILENT_SECONDS)
        except TimeoutError:
            asking.cancel()
            raise silence(deadline, time.monotonic()) from None

    async def _ask(self, body: bytes, deadline: float, is_cancelled: Callable[[], bool]) -> PrefillAnswer:
        request = RelayedRequest("POST", ROUTE, b"", HEADERS, body)
        try:
            response = call_apart(self._handle.options(stream=True).prefill.remote, request)
            try:
                return await _answer(response, deadline, is_cancelled)
            except BaseException:
                response.cancel()
                raise
        except TimeoutError:
            raise silence(deadline, time.monotonic()) from None
        except (PrefillFailed, PrefillCancelled):
            raise
        except Exception as error:
            # Of Ray's own there are many: a replica that died, a node that is gone, a deployment that is deleted.
            raise PrefillFailed(f"it cannot be reached, or went away: {type(error).__name__}") from None


async def _answer(
    response: AsyncIterator[list[AnswerPart]], deadline: float, is_cancelled: Callable[[], bool]
) -> PrefillAnswer:
    """Read an answer to its end. Raises: PrefillFailed, PrefillCancelled, TimeoutError; what the iterator raises."""
    answer, seconds = _Answer(), CONNECT_SECONDS
    while True:
        if is_cancelled():
            raise PrefillCancelled
        try:
            async with asyncio.timeout(min(seconds, deadline - time.monotonic())):
                parts = await anext(response)
        except StopAsyncIteration:
            if answer.found is None:
                raise PrefillFailed("it went away before it was done") from None
            return answer.found
        seconds = SILENT_SECONDS
        answer.take(parts)


class _Answer:
    """The lines of an answer, out of its parts. found: what was done, None until that is said."""

    def __init__(self) -> None:
        self.found: PrefillAnswer | None = None
        self._status = 0
        self._content = b""

    def take(self, parts: Sequence[AnswerPart]) -> None:
        """Read on. Raises: PrefillFailed."""
        for message in (part.message for part in parts if part.message is not None):
            if message["type"] == "http.response.start":
                self._status = int(message["status"])
                continue
            self._content += message.get("body", b"")
            if self._status == 200:
                *lines, self._content = self._content.split(b"\n")
                for line in lines:
                    self.found = read_line(line) or self.found
            elif not message.get("more_body"):
                raise refusal(self._status, self._content)

"""Bodies of requests: received, decoded and worked on within bounds that hold for all of them together.

A body costs memory three times: while it is received, as what it is decoded into, and by the work on its texts. Two
budgets bound that, of which the first is taken before the first byte is read and given back when the body is decoded,
and the second is held to the end of the answer; who holds the second never waits for the first, so that somebody always
goes on. Whoever holds either while others wait has to hurry: bodies that come slowly and answers that nobody reads end.

What takes long is done in threads: one decodes bodies of megabytes, since decoding holds the interpreter's lock, and
two work on their texts, so that others never wait for a thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from localinfer.apps.server.transport.byte_budget import SMALL_BYTES, ByteBudget, Share
from localinfer.apps.server.transport.http import ApiError, Bytes, ClientGone, Record, checked_shape, decode_json
from localinfer.apps.server.transport.json_shape import JsonShape
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.system.free_memory import return_free_memory

LARGE_BYTES = 1 << 16
"""Bodies up to this size are not counted, and decoded at once: in all connections together they are some megabytes."""
_WAIT_SECONDS = 30.0
_RECEIVING_PART = 4
"""Of the memory for bodies one in so many is for those that are being received."""
_TRIM_BYTES, _TRIM_SECONDS = 16 << 20, 0.5
"""After so many bytes were given back, and so much later, the C library returns free memory to the system."""
_BYTES_PER_VALUE = 64
_WORK_PER_BYTE = 5
"""What the longest text may take beside itself: a copy, code points and their kinds; see `models/text/long_text`."""
CONNECTION = "connection"
"""Set in the state of a request to its `Peer`, where there is one."""
_SHARES, _BODY_BYTES = "body_shares", "body_bytes"
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Peer(Protocol):
    """The connection of a request, as far as its body is concerned."""

    def hold_body(self) -> None:
        """Nothing is read now: no deadline runs."""
        ...

    def resume_body(self) -> None:
        """The body is wanted from now on."""
        ...

    def end_if_late(self) -> None:
        """End it if its body comes slowly."""
        ...

    def end_if_unread(self) -> None:
        """End it if its answer is not read."""
        ...


class Bodies:
    """What the requests of one server share to receive bodies. settings: with `body_memory`, bytes."""

    def __init__(self, settings: ServerSettings) -> None:
        receiving = max(settings.body_memory // _RECEIVING_PART, 1)
        self._receiving = ByteBudget(receiving, self._note_given_back)
        self._working = ByteBudget(max(settings.body_memory - receiving, 1), self._note_given_back)
        self._given_back = 0
        self._trimming: asyncio.TimerHandle | None = None
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="localinfer-decoding")
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="localinfer-texts")

    def close(self) -> None:
        """Let the threads end after what they do now."""
        for threads in (self._decoder, self._workers):
            threads.shutdown(wait=False, cancel_futures=True)

    def _note_given_back(self, num_bytes: int) -> None:
        self._given_back += num_bytes
        if self._given_back >= _TRIM_BYTES and self._trimming is None:
            # What held the bytes is let go right after this.
            self._trimming = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._trimming, self._given_back = None, 0
        with suppress(RuntimeError):  # closed meanwhile
            self._workers.submit(return_free_memory)

    async def read(self, request: Request, record: type[Record], settings: ServerSettings) -> Record:
        """Read a request's body as a record; of two members with one name the last counts.

        Members that the record has not are refused unless its `known_fields` say why they are ignored.
        Raises: ApiError, with the path of the member at fault; ClientGone.
        """
        body, share = await self._receive(request, settings)
        try:
            if len(body) <= LARGE_BYTES:
                return decode_json(body, record)
            request.scope["state"][_BODY_BYTES] = len(body)
            threads = self._decoder if len(body) > SMALL_BYTES else None
            shape, num_bytes = await _in(threads, measured, body)
            peer = request.scope["state"].get(CONNECTION)
            hurry = _nothing if peer is None else peer.end_if_unread
            waiting = self._working.take(num_bytes, _WAIT_SECONDS, hurry)
            keep_share(request.scope, await unless_gone(request.receive, _in_turn(waiting), Share.close))
            return await _in(threads, decode_json, body, record, shape)
        finally:
            share.close()

    async def run(
        self,
        request: Request,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Result:
        """Do some work on what a request's body held in a thread; for bodies of megabytes in one of their own."""
        num_bytes = request.scope["state"].get(_BODY_BYTES, 0)
        return await _in(self._workers if num_bytes > SMALL_BYTES else None, work, *arguments, **options)

    async def prepare(
        self,
        request: Request,
        work: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Result:
        """As `run`, but what a small body held is worked on at once."""
        if not is_large(request):
            return work(*arguments, **options)
        return await self.run(request, work, *arguments, **options)

    async def _receive(self, request: Request, settings: ServerSettings) -> tuple[bytearray, Share]:
        limit = settings.max_body_bytes
        declared = request.headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > limit:
            raise _too_large(limit)
        peer: Peer | None = request.scope["state"].get(CONNECTION)
        is_counted = int(declared) > LARGE_BYTES
        share = await self._take(peer, int(declared) if is_counted else 0)
        body = bytearray()
        parts = request.stream()
        try:
            deadline = asyncio.get_running_loop().time() + settings.body_seconds
            while True:
                async with asyncio.timeout_at(deadline):
                    part = await anext(parts, None)
                if part is None:
                    break
                if len(body) + len(part) > limit:
                    raise _too_large(limit)
                body += part
                if len(body) > LARGE_BYTES and not is_counted:
                    # It comes in chunks, and how many nobody knows.
                    share, is_counted = await self._take(peer, limit), True
                    deadline = asyncio.get_running_loop().time() + settings.body_seconds
            share.shrink(len(body))
            return body, share
        except BaseException as error:
            share.close()
            if isinstance(error, TimeoutError):
                raise ApiError(
                    408,
                    f"the body did not arrive within {settings.body_seconds:g} seconds",
                    headers={"connection": "close"},
                ) from None
            if isinstance(error, ClientDisconnect):
                raise ClientGone from None
            raise

    async def _take(self, peer: Peer | None, num_bytes: int) -> Share:
        """A share to receive a body; meanwhile its client is not to blame for its waiting."""
        if peer is None or not num_bytes:
            return await _in_turn(self._receiving.take(num_bytes, _WAIT_SECONDS))
        peer.hold_body()
        try:
            return await _in_turn(self._receiving.take(num_bytes, _WAIT_SECONDS, peer.end_if_late))
        finally:
            peer.resume_body()


async def _in(
    threads: ThreadPoolExecutor | None,
    work: Callable[Arguments, Result],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Result:
    """As `asyncio.to_thread`, in one of some threads; None: of those for everything."""
    call = partial(copy_context().run, work, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(threads, call)


class SharesMiddleware:
    """ASGI middleware that gives back, when a request has ended, what `keep_share` was told to keep for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            for share in scope.get("state", {}).get(_SHARES, ()):
                share.close()


def keep_share(scope: Scope, share: Share) -> None:
    """Hold a share to the end of a request."""
    scope["state"].setdefault(_SHARES, []).append(share)


def is_large(request: Request) -> bool:
    """Whether the request's body was large, so that work on it is not done on the event loop."""
    return _BODY_BYTES in request.scope["state"]


def measured(body: Bytes) -> tuple[JsonShape, int]:
    """The shape of a body, and what it may take once it is decoded, with the work on its texts, in bytes.

    An upper bound, of all in one text whose every character takes as much as its widest one. Raises: ApiError.
    """
    shape = checked_shape(body)
    width = 1
    if not body.isascii():
        width = 4 if np.frombuffer(body, np.uint8).max() >= 0xF0 else 2
    if width < 4 and b"\\u" in body:
        width = 4 if b"\\ud" in body or b"\\uD" in body else 2
    return shape, (width + _WORK_PER_BYTE) * len(body) + _BYTES_PER_VALUE * shape.values


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, Result], undo: Callable[[Result], object] | None = None
) -> Result:
    """Do some work for a client, and stop when the client leaves.

    receive: of the request, whose body has been read. undo: discards a result that is not returned.
    Raises: what the work raises; ClientGone.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    except asyncio.CancelledError:
        if working.done() and not working.cancelled() and working.exception() is None and undo is not None:
            undo(working.result())
        raise
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _in_turn(waiting: Awaitable[Share]) -> Share:
    with suppress(TimeoutError):
        return await waiting
    raise ApiError(
        503,
        f"the bodies of other requests took all the memory for them for {_WAIT_SECONDS:g} seconds; send it again later",
        code="body_memory",
    )


def _nothing() -> None:
    """No connection can be hurried."""


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit:,} bytes; send less", code="body_too_large")

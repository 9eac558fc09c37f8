"""Bodies of requests: received, decoded and worked on within bounds that hold for all of them together.

A body costs memory three times: while it is received, as what it is decoded into, and by the work on its texts."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from localinfer.apps.server.transport.codings import BodyDecoder, coding_of
from localinfer.apps.server.transport.http import (
    ApiError,
    Bytes,
    ClientGone,
    JsonShape,
    Record,
    checked_shape,
    decode_json,
    invalid_member,
    leave_unread,
)
from localinfer.apps.server.transport.known_fields import NONE
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.errors import RequestError
from localinfer.system.free_memory import return_free_memory

SMALL_BYTES = 1 << 20
"""Requests up to this size have a part of the budget for themselves."""
_TURN_BYTES_PER_SECOND = 16 << 20
_LOOK_SECONDS = 0.25
_SMALL_PART, _MOST_FOR_SMALL = 8, 16 * SMALL_BYTES


class Share:
    """Bytes that a request holds, until it is closed or the context is left.

    end_if_slow: asks the client that holds them to hurry or to leave, while others wait.
    """

    def __init__(self, budget: "ByteBudget", num_bytes: int, is_small: bool, end_if_slow: Callable[[], object]) -> None:
        self.num_bytes = num_bytes
        self.is_small = is_small
        self.end_if_slow = end_if_slow
        self._budget = budget

    def shrink(self, num_bytes: int) -> None:
        """Give back what is more than so many bytes."""
        if num_bytes < self.num_bytes:
            given, self.num_bytes = self.num_bytes - num_bytes, num_bytes
            self._budget.give_back(self, given)

    def close(self) -> None:
        """Give all back; may be called again."""
        self.shrink(0)

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ByteBudget:
    """So many bytes, of which `SMALL_BYTES` or less at a time also come from an eighth that is kept for them.

    most: the largest share; a request for more gets it, and is alone then.
    on_given_back: called with the bytes returned. Used on one event loop. Raises: RequestError for less than a byte.
    """

    def __init__(self, total: int, on_given_back: Callable[[int], object] = lambda num_bytes: None) -> None:
        if total < 1:
            raise RequestError(f"a budget of {total} bytes holds nothing; give more")
        small = min(total // _SMALL_PART, _MOST_FOR_SMALL)
        self.most = total - small
        self._free = {True: small, False: self.most}
        self._on_given_back = on_given_back
        self._shares: set[Share] = set()
        self._queue: list[tuple[float, int, int, asyncio.Future[Share], Callable[[], object]]] = []
        self._numbers = count()

    @property
    def num_held(self) -> int:
        """Bytes that are held now."""
        return sum(share.num_bytes for share in self._shares)

    async def take(self, num_bytes: int, seconds: float, end_if_slow: Callable[[], object] = lambda: None) -> Share:
        """So many bytes, as soon as it is their turn. Raises: TimeoutError after so many seconds without."""
        num_bytes = min(num_bytes, self.most)
        if (share := self._try(num_bytes, end_if_slow, is_behind=bool(self._queue))) is not None:
            return share
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[Share] = loop.create_future()
        turn = loop.time() + num_bytes / _TURN_BYTES_PER_SECOND
        heappush(self._queue, (turn, next(self._numbers), num_bytes, granted, end_if_slow))
        deadline = loop.time() + seconds
        try:
            while not granted.done():
                await asyncio.wait([granted], timeout=min(_LOOK_SECONDS, max(0.0, deadline - loop.time())))
                if not granted.done():
                    for share in list(self._shares):
                        share.end_if_slow()
                    if not granted.done() and loop.time() >= deadline:
                        raise TimeoutError
            return granted.result()
        except BaseException:
            if granted.done() and not granted.cancelled():
                granted.result().close()
            granted.cancel()
            self._queue = [one for one in self._queue if one[3] is not granted]
            heapify(self._queue)
            self._serve()
            raise

    def give_back(self, share: Share, num_bytes: int) -> None:
        """Take bytes back from a share, and serve those that wait."""
        self._free[share.is_small] += num_bytes
        if not share.num_bytes:
            self._shares.discard(share)
        self._serve()
        self._on_given_back(num_bytes)

    def _try(self, num_bytes: int, end_if_slow: Callable[[], object], *, is_behind: bool) -> Share | None:
        """A share, if there are bytes. is_behind: others wait for those that are not kept for small ones."""
        parts = (*((True,) if num_bytes <= SMALL_BYTES else ()), *(() if is_behind else (False,)))
        for is_small in parts:
            if num_bytes <= self._free[is_small]:
                self._free[is_small] -= num_bytes
                share = Share(self, num_bytes, is_small, end_if_slow)
                if num_bytes:
                    self._shares.add(share)
                return share
        return None

    def _serve(self) -> None:
        """Give the first in the queue what they wait for; small ones also where the first is large and has to wait."""
        waiting: list[tuple[float, int, int, asyncio.Future[Share], Callable[[], object]]] = []
        while self._queue:
            one = heappop(self._queue)
            _, _, num_bytes, granted, end_if_slow = one
            if granted.done():
                continue
            share = self._try(num_bytes, end_if_slow, is_behind=bool(waiting))
            if share is None:
                waiting.append(one)
            else:
                granted.set_result(share)
        self._queue = waiting


FORM = "multipart/form-data"
FORM_ROUTES = ("/audio/transcriptions", "/audio/translations")
"""Routes whose bodies are forms with a file. Pages of others may post a form unasked: only headers say where it comes
from."""
PARTED_ROUTES = ("/systemone",)
"""Routes whose bodies may be forms, too: JSON in the part `request`, and the files that it names in others."""
_MOST_FORM_FIELDS, _MOST_FIELD_BYTES = 64, 1 << 16
_MOST_PARTS, _MOST_REQUEST_BYTES = 64, 4 << 20
_FORM_COPIES = 2
"""Copies of a file beside its form: as it is parsed, and as it is read."""
LARGE_BYTES = 1 << 16
"""Bodies up to this size are not counted, and decoded at once: in all connections together they are some megabytes."""
_WAIT_SECONDS = 30.0
_RECEIVING_PART = 4
"""Of the memory for bodies one in so many is for those that are being received."""
_TRIM_BYTES, _TRIM_SECONDS = 16 << 20, 0.5
"""After so many bytes were given back, and so much later, the C library returns free memory to the system."""
_BYTES_PER_VALUE = 64
_WORK_PER_BYTE = 5
"""Memory of the longest text beside itself: a copy, code points and their kinds; see `models/text/long_text`."""
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
    """State that the requests of one server share to receive bodies. settings: with `body_memory`, bytes."""

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

    async def read_form(self, request: Request, record: type[Record], settings: ServerSettings) -> Record:
        """Read a form with one file as a record, as `read` reads JSON: the member `file` has the file's bytes.

        A member of several values is written with `[]` behind its name; text that is empty asks for nothing.
        Raises: ApiError, with the name of the member at fault; ClientGone.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
            raise ApiError(400, f"the body is no form; send the file and its options as {FORM}", code="not_a_form")
        body, share = await self._receive(request, settings)
        try:
            if len(body) <= LARGE_BYTES:
                return form_record(body, request.headers, record)
            request.scope["state"][_BODY_BYTES] = len(body)
            waiting = self._working.take(_FORM_COPIES * len(body), _WAIT_SECONDS)
            keep_share(request.scope, await unless_gone(request.receive, _in_turn(waiting), Share.close))
            threads = self._decoder if len(body) > SMALL_BYTES else None
            return await _in(threads, form_record, body, request.headers, record)
        finally:
            share.close()

    async def read_parted(
        self, request: Request, record: type[Record], settings: ServerSettings
    ) -> tuple[Record, dict[str, bytes]]:
        """Read a body that is JSON, or a form with JSON in its part `request` and files in others, which come by name.

        Raises: as `read`.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
            return await self.read(request, record, settings), {}
        body, share = await self._receive(request, settings)
        try:
            if len(body) <= LARGE_BYTES:
                return parted_record(body, request.headers, record)
            request.scope["state"][_BODY_BYTES] = len(body)
            text_bytes = (4 + _WORK_PER_BYTE) * min(len(body), _MOST_REQUEST_BYTES)
            waiting = self._working.take(_FORM_COPIES * len(body) + text_bytes, _WAIT_SECONDS)
            keep_share(request.scope, await unless_gone(request.receive, _in_turn(waiting), Share.close))
            threads = self._decoder if len(body) > SMALL_BYTES else None
            return await _in(threads, parted_record, body, request.headers, record)
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
        coding = coding_of(request.headers)
        decoder = None if coding is None else BodyDecoder(coding, limit)
        # What a body is decoded into is known when it is there.
        is_counted = decoder is None and int(declared) > LARGE_BYTES
        share = await self._take(peer, int(declared) if is_counted else 0)
        body = bytearray()
        parts = request.stream()
        try:
            # A connection of this server keeps the deadline itself, as it knows when nothing could be read.
            deadline = None if peer else asyncio.get_running_loop().time() + settings.body_seconds
            while True:
                async with asyncio.timeout_at(deadline):
                    part = await anext(parts, None)
                if part is None:
                    break
                for decoded in [part] if decoder is None else decoder.push(part):
                    if len(body) + len(decoded) > limit:
                        raise _too_large(limit)
                    body += decoded
                    if len(body) > LARGE_BYTES and not is_counted:
                        # It comes in chunks of an unknown number.
                        share, is_counted = await self._take(peer, limit), True
                        deadline = None if peer else asyncio.get_running_loop().time() + settings.body_seconds
                    if decoder is not None:
                        await asyncio.sleep(0)
            if decoder is not None:
                decoder.finish()
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
    """ASGI middleware that returns, when a request has ended, the share that `keep_share` kept for it."""

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
    """Return whether the request's body was large, so that work on it is not done on the event loop."""
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


class _FormParser(MultiPartParser):
    """Keeps files in memory, as other bodies are: what a client sends is on no disk."""

    spool_max_size = 1 << 62


def form_record(body: Bytes, headers: Headers, record: type[Record]) -> Record:
    """A form with one file as a record. headers: of its request. Raises: ApiError."""
    members: dict[str, Any] = {}
    for name, value in _form_items(body, headers, 1, _MOST_FIELD_BYTES):
        if isinstance(value, bytes):
            members[name] = value
        elif name.endswith("[]"):
            members.setdefault(name.removesuffix("[]"), []).append(value)
        elif value:
            members[name] = value
    made: Record = _form_members(members, record)
    return made


def parted_record(body: Bytes, headers: Headers, record: type[Record]) -> tuple[Record, dict[str, bytes]]:
    """A form with JSON in its part `request` as a record, and its other parts, which are files. Raises: ApiError."""
    text: str | bytes | None = None
    files: dict[str, bytes] = {}
    for name, value in _form_items(body, headers, _MOST_PARTS, _MOST_REQUEST_BYTES):
        if name == "request" and text is None:
            text = value
        elif isinstance(value, bytes) and name not in files:
            files[name] = value
        else:
            raise ApiError(400, f"the part {name!r:.80} comes twice or is no file; send each once", code="invalid_form")
    if text is None:
        raise ApiError(400, "the form has no part named request; send the JSON of the body as it", code="invalid_form")
    return decode_json(text.encode() if isinstance(text, str) else text, record), files


def _form_items(
    body: Bytes, headers: Headers, max_files: int, max_field_bytes: int
) -> Iterator[tuple[str, str | bytes]]:
    """The names of a form's parts, and their texts, or bytes of files. Raises: ApiError."""

    async def parts() -> AsyncGenerator[bytes, None]:
        yield bytes(body)

    parser = _FormParser(
        headers, parts(), max_files=max_files, max_fields=_MOST_FORM_FIELDS, max_part_size=max_field_bytes
    )
    parsing = parser.parse()
    try:
        # Nothing in it waits.
        parsing.send(None)
    except StopIteration as done:
        items = done.value.multi_items()
    except (MultiPartException, UnicodeError, LookupError) as error:
        files = "one file" if max_files == 1 else f"at most {max_files} files"
        raise ApiError(
            400, f"the body is no form that can be read ({error}); send {files} as {FORM}", code="invalid_form"
        ) from None
    else:
        parsing.close()
        raise AssertionError("a form in memory is parsed at once")
    for name, value in items:
        if isinstance(value, UploadFile):
            yield name, value.file.read()
            value.file.close()
        else:
            yield name, value


def _form_members(members: dict[str, Any], record: type) -> Any:
    read = {field.encode_name for field in msgspec.structs.fields(record)}
    known = getattr(record, "known_fields", NONE)
    for name, value in members.items():
        if name not in read and name not in known.ignored:
            leave_unread(name, name, read, known.refused.get(name), value)
    if isinstance(members.get("file"), str):
        raise ApiError(400, "file is a text; send a file, with its name, as its part of the form", param="file")
    try:
        return msgspec.convert(members, record, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_member(error) from None


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

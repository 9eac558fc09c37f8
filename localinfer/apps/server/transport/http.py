"""Requests and answers as HTTP carries them: JSON bodies as records, one shape for every error, server-sent events."""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import cache
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from localinfer.apps.server.transport.known_fields import (
    NONE,
    KnownFields,
    Refusal,
    is_full,
    meant_name,
    notice,
    read_value,
    with_meant_values,
    with_whole_numbers,
)
from localinfer.errors import (
    BackendUnavailableError,
    ClosedError,
    ConstraintError,
    ContextLengthError,
    LocalinferError,
    MessageError,
    MissingPackageError,
    ModelFileError,
    OutOfMemoryError,
    OverloadedError,
    RequestError,
    TemplateError,
    TokenIdError,
)

_PIECE_BYTES = 1 << 18
_QUOTE, _BACKSLASH, _COMMA = b'"'[0], b"\\"[0], b","[0]
_STEPS = np.zeros(256, np.int8)
"""Change of the depth by a byte."""
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_IS_SIGN = _STEPS != 0
_IS_SIGN[_COMMA] = True


class JsonShape(NamedTuple):
    """The size of a JSON text, or of as much of it as was read before a limit was passed."""

    depth: int = 0
    """Depth of the deepest bracket."""
    values: int = 0
    """An upper bound, by commas and opening brackets."""
    containers: int = 0
    """Objects and arrays."""
    entries: int = 0
    """Entries of the outermost object or array."""


def json_shape(text: bytes | bytearray | memoryview, most_depth: int, most_values: int) -> JsonShape:
    """The shape of a text, which need not be JSON; reading ends where a limit is passed."""
    view = np.frombuffer(text, np.uint8)
    found = JsonShape()
    level, num_commas = 0, 0
    is_inside, num_backslashes = False, 0
    for start in range(0, view.size, _PIECE_BYTES):
        piece = view[start : start + _PIECE_BYTES]
        quotes = np.flatnonzero(piece == _QUOTE)
        if quotes.size or num_backslashes or is_inside:
            quotes, num_backslashes = _unescaped(piece, quotes, num_backslashes)
        places = np.flatnonzero(_IS_SIGN[piece])
        if quotes.size:
            toggles = np.zeros(piece.size, np.bool_)
            toggles[quotes] = True
            places = places[np.logical_xor.accumulate(toggles)[places] == is_inside]
            is_inside ^= bool(quotes.size & 1)
        elif is_inside:
            continue
        signs = piece[places]
        steps = _STEPS[signs]
        levels = level + np.cumsum(steps, dtype=np.int64)
        if not levels.size:
            continue
        level = int(levels[-1])
        num_opened = int(np.count_nonzero(steps == 1))
        num_commas += int(np.count_nonzero((steps == 0) & (levels == 1)))
        found = JsonShape(
            max(found.depth, int(levels.max())),
            found.values + num_opened + int(np.count_nonzero(steps == 0)),
            found.containers + num_opened,
            num_commas + 1,
        )
        if found.depth > most_depth or found.values > most_values:
            break
    return found


def _unescaped(piece: NDArray[np.uint8], quotes: NDArray[np.int64], before: int) -> tuple[NDArray[np.int64], int]:
    """The quotes without an odd number of backslashes before them, and how many the piece ends in.

    before: backslashes that the text before the piece ends in.
    """
    is_backslash = piece == _BACKSLASH
    if not is_backslash.any():
        return quotes[1:] if before & 1 and quotes.size and quotes[0] == 0 else quotes, 0
    # Index of the last byte before each position that is no backslash.
    others = np.where(is_backslash, np.int32(-1 - before), np.arange(piece.size, dtype=np.int32))
    others = np.maximum.accumulate(others)
    lengths = np.arange(piece.size, dtype=np.int32) - others
    at_quotes = np.where(quotes > 0, lengths[quotes - 1], before)
    return quotes[at_quotes & 1 == 0], int(lengths[-1])


logger = logging.getLogger("localinfer.server")

MAX_DEPTH = 64
MAX_VALUES = 1 << 20
"""Of a whole body: a text of 32 MiB is one value, and as many token ids as any context holds are fewer."""
MAX_CONTAINERS = 1 << 16
"""Objects and arrays among them, which take most memory and time: 10,000 messages with their parts have 30,000."""
MAX_MEMBERS = 1 << 10
"""Of the object that a body is."""
_LONG_MEMBER_BYTES = 1 << 12
_RETRY_SECONDS = "1"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
"""Status of an error -> its type; "server_error" for any other."""

ANTHROPIC = "/messages"
"""Prefix of the paths of Anthropic's API, which has another shape of errors."""
_ANTHROPIC_TYPES = {
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Status of an error -> its type there, where that is another."""

OLLAMA = "/api/"
"""Prefix of the paths of Ollama's API, whose errors are one text."""
_OLLAMA_STATUSES = {"queue_full": 503, "ttft_objective": 503}
"""Code of an error -> its status there, where that is another: its clients know a full queue by 503."""

SYSTEM_ONE = "/systemone"
"""The path of the System One API, whose errors are in `detail`: a list of what a body has wrong, at status 422."""

DONE = b"data: [DONE]\n\n"
PING = b": ping\n"
"""A comment line, without the blank one that would make several clients see an event."""
STREAMS_EVENTS = "streams_events"
"""Set in the state of a request whose answer is a stream of events, to the ping that may stand between any two of its
writes."""

Record = TypeVar("Record")
Bytes = bytes | bytearray
_KEY = secrets.token_bytes(32)
_numbers = count()
_WITH_UNDERSCORE = ("resp", "conv", "msg")
"""Kinds of names that OpenAI and Anthropic write so."""
_OBJECT = re.compile(rb"\s*\{")
_MISSING_MEMBER = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_UNKNOWN_MEMBER = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


def identifier(prefix: str) -> str:
    """A name for a request, a reply or what is kept of one: the prefix and 24 hexadecimal digits.

    Unlike any other, and not to be guessed by the owners of others: what is kept is found by its name. No digit comes
    from the system: such a call releases the interpreter's lock, and the event loop would wait for threads that compute
    to reacquire it, up to a millisecond each time.
    """
    number = next(_numbers).to_bytes(8, "big")
    separator = "_" if prefix in _WITH_UNDERSCORE else "-"
    return f"{prefix}{separator}{blake2b(number, digest_size=12, key=_KEY).hexdigest()}"


class ClientGone(Exception):
    """The client left before it had its answer."""


class ApiError(Exception):
    """A request that is refused or fails: its status, and what the client reads.

    param: the field at fault, as a path. code: the kind of error, for programs. facts: more members of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.facts = dict(facts or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", _RETRY_SECONDS)
        if status >= 500 or status == 409:
            # Clients repeat these by themselves, though the same request would fail the same way.
            self.headers.setdefault("x-should-retry", "true" if code == "model_loading" else "false")

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON object that goes to the client. path: of the request, without `/v1`, whose API has a shape."""
        if path.startswith(OLLAMA):
            return {"error": self.message}
        kind = _TYPES.get(self.status, "server_error")
        if path == SYSTEM_ONE:
            if self.status != 400:
                return {"detail": {"error_type": kind, "message": self.message}}
            place = [] if self.param is None else self.param.split(".")
            return {"detail": [{"loc": ["body", *place], "msg": self.message, "type": self.code or "value_error"}]}
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.facts}
        if not path.startswith(ANTHROPIC):
            return {"error": error}
        return {"type": "error", "error": {**error, "type": _ANTHROPIC_TYPES.get(self.status, kind)}}

    def response(self, path: str = "") -> Response:
        """The error as a response. path: as in `body`."""
        status = _OLLAMA_STATUSES.get(self.code or "", self.status) if path.startswith(OLLAMA) else self.status
        status = 422 if path == SYSTEM_ONE and status == 400 else status
        return json_response(self.body(path), status, self.headers)


def unsupported(message: str, param: str | None = None) -> ApiError:
    """The error for something well formed that cannot be had here."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def too_long(error: ContextLengthError, param: str, found: str = "exceeds the available context size") -> ApiError:
    """The error for a text that does not fit: with OpenAI's code, and llama-server's type and words, which clients of
    either look for to shorten their conversation."""
    return ApiError(
        400,
        f"{param} {found}: {error}",
        code="context_length_exceeded",
        param=param,
        facts={
            "type": "exceed_context_size_error",
            "n_prompt_tokens": error.num_tokens,
            "n_ctx": error.context_length,
        },
    )


def not_supported(message: str) -> ApiError:
    """The error for a route that this server was started without, or has not."""
    return ApiError(501, message, code="not_supported", facts={"type": "not_supported_error"})


def shutting_down(message: str = "the server is being stopped; try again") -> ApiError:
    """The error for requests to a server that ends."""
    return ApiError(503, message, code="shutting_down")


class ModelLoadError(Exception):
    """A model could not be loaded; its cause says why, and holds what no client may read, such as a path.

    more: of the reason, for clients.
    """

    def __init__(self, model_id: str, more: str = "") -> None:
        super().__init__(f"the model {model_id!r} could not be loaded" + (f" ({more})" if more else ""))


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; text outside ASCII stays as it is."""
    return Response(msgspec.json.encode(value), status, dict(headers or {}), media_type="application/json")


def to_api_error(error: BaseException, request_id: str = "", *, prompt_field: str = "messages") -> ApiError:
    """Body of an error.

    Of what is the server's own fault, the log has the text, and the client only the id to find it by: such texts hold
    paths. prompt_field: the member of the request that holds its prompt.
    """
    text = str(error)
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return too_long(error, prompt_field)
        case TemplateError():
            return ApiError(400, text, param=prompt_field)
        case ConstraintError():
            facts = {} if error.keyword is None else {"keyword": error.keyword}
            return ApiError(400, text, code="unsupported_schema", param=error.field or "response_format", facts=facts)
        case MessageError():
            return ApiError(400, text, param=error.path)
        case TokenIdError():
            return ApiError(400, text, param=error.field or prompt_field)
        case RequestError():
            return ApiError(400, text, param=error.field)
        case OverloadedError():
            seconds = str(max(1, round(error.retry_after_seconds)))
            predicted = error.predicted_ttft_seconds
            if predicted is None:
                return ApiError(429, text, code="queue_full", headers={"retry-after": seconds})
            told = {"predicted_ttft_seconds": round(predicted, 3)}
            return ApiError(429, text, code="ttft_objective", headers={"retry-after": seconds}, facts=told)
        case BackendUnavailableError() | MissingPackageError():
            return unsupported(text)
        case OutOfMemoryError():
            return ApiError(503, text, code="insufficient_memory")
        case ClosedError():
            return ApiError(503, "the model was unloaded while it answered; try again", code="model_unloaded")
        case MemoryError():
            return ApiError(
                503, "this machine has no memory left for that; send less at a time", code="insufficient_memory"
            )
    log = f"its log has the reason under {request_id}" if request_id else "its log has the reason"
    if not isinstance(error, ModelLoadError):
        _log_failure(request_id, error)
        return ApiError(500, f"the server failed; {log}")
    cause = error.__cause__ or error
    _log_failure(request_id, cause, f"{error}: ")
    if isinstance(cause, OutOfMemoryError | MemoryError):
        return ApiError(503, f"{error}; {log}", code="insufficient_memory")
    code = "model_file" if isinstance(cause, ModelFileError) else "model_not_loaded"
    return ApiError(500, f"{error}; {log}", code=code)


def _log_failure(request_id: str, error: BaseException, prefix: str = "") -> None:
    """Log one line for an expected error; for any other also its traceback."""
    is_expected = isinstance(error, LocalinferError | OSError | MemoryError)
    reason = " ".join(f"{prefix}{error}".split()) if is_expected else "a fault of the server"
    logger.error("request %s failed: %s", request_id or "unknown", reason, exc_info=None if is_expected else error)


def checked_shape(body: Bytes) -> JsonShape:
    """The shape of a body that is neither too deep nor too large once it is decoded. Raises: ApiError."""
    num_opened = body.count(b"[") + body.count(b"{")
    if num_opened <= MAX_DEPTH and num_opened + body.count(b",") < MAX_MEMBERS:
        return JsonShape(num_opened, num_opened + body.count(b","), num_opened)
    shape = json_shape(body, MAX_DEPTH, MAX_VALUES)
    if shape.depth > MAX_DEPTH:
        raise ApiError(
            400, f"the JSON is nested more than {MAX_DEPTH} levels deep; send it flatter", code="invalid_json"
        )
    if shape.values >= MAX_VALUES or shape.containers > MAX_CONTAINERS:
        raise ApiError(
            413,
            f"the JSON has more than {MAX_VALUES:,} values, or more than {MAX_CONTAINERS:,} of them are objects and "
            "arrays; send fewer at a time",
            code="body_too_large",
        )
    if shape.entries > MAX_MEMBERS and _OBJECT.match(body):
        raise ApiError(400, f"the body has {shape.entries:,} members; no route reads so many", code="invalid_json")
    return shape


def decode_json(body: Bytes, record: type[Record], shape: JsonShape | None = None) -> Record:
    """Decode JSON, if it is not too deep and has no member that means nothing. Raises: ApiError.

    shape: as `checked_shape` found it, if it was asked.
    """
    if shape is None:
        checked_shape(body)
    members = _members(body)
    if members is not None:
        check_entries(members, record)
        check_members(members, record, getattr(record, "known_fields", NONE))
        if (meant := with_meant_values(members, record)) is not None:
            body = msgspec.json.encode(meant)
    try:
        return _decode(body, record)
    except msgspec.ValidationError as error:
        raise invalid_member(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        found = "empty" if not body.strip() else f"not JSON ({error})"
        raise ApiError(400, f"the body is {found}; send one JSON object in UTF-8", code="invalid_json") from None


def invalid_member(error: msgspec.ValidationError) -> ApiError:
    """The error for a member that is missing or wrong."""
    message, _, path = str(error).partition(" - at ")
    name = path.rpartition("`$")[2].strip("`").removeprefix(".")
    missing = _MISSING_MEMBER.match(message)
    param = name if missing is None else f"{name}.{missing[1]}".removeprefix(".")
    if not param:
        # Of the whole, or where msgspec does not say of which member.
        return ApiError(400, f"the body: {message}; send one JSON object", code="invalid_json")
    return ApiError(400, f"{name or 'the body'}: {message}", param=param)


def _decode(body: Bytes, record: type[Record]) -> Record:
    """A body as a record, without what the record does not read. Raises: ApiError, msgspec.ValidationError."""
    for _ in _MENDS:
        try:
            return msgspec.json.decode(body, type=record)
        except msgspec.ValidationError as error:
            made = (mend(body, record, str(error)) for mend in _MENDS)
            mended = next((one for one in made if one != body), None)
            if mended is None:
                raise
            body = mended
    return msgspec.json.decode(body, type=record)


def _without_unread(body: Bytes, record: type, found: str) -> Bytes:
    if _UNKNOWN_MEMBER.match(found) is None and "got `null`" not in found:
        return body
    return msgspec.json.encode(read_value(msgspec.json.decode(body), record, _unread_inside))


def _with_whole_numbers(body: Bytes, record: type, found: str) -> Bytes:
    return with_whole_numbers(body) if "got `float`" in found else body


_MENDS = (_without_unread, _with_whole_numbers)
"""Each is tried once, where a body is not what its record is."""


def _unread_inside(record: type, members: Collection[str], name: str, path: str, value: Any) -> None:
    known: KnownFields = getattr(record, "known_fields", NONE)
    if not known.takes_unknown:
        raise unsupported(f"{path:.200} is no member that is known here; leave it out", path[:200])
    if name not in known.ignored:
        leave_unread(name, path, members, known.refused.get(name), value)


def check_entries(members: Mapping[str, msgspec.Raw], record: type) -> None:
    """Refuse a list or an object of more entries than its member takes, before one is built. Raises: ApiError.

    Decoding finds that too, at the end of them all.
    """
    for name, value in members.items():
        if len(value) <= _LONG_MEMBER_BYTES:
            continue
        view = memoryview(value)
        kind = "array" if view[0] == b"["[0] else "object"
        most = _most_entries(record).get((name, kind))
        if most is not None and (found := json_shape(view, MAX_DEPTH, MAX_VALUES).entries) > most:
            raise ApiError(400, f"{name} has {found:,} entries; send at most {most:,}", param=name)


@cache
def _most_entries(record: type) -> Mapping[tuple[str, str], int]:
    """A member and the kind of its value -> how many entries that may have, where a record says so."""
    most = {}
    described = msgspec.inspect.type_info(record)
    assert isinstance(described, msgspec.inspect.StructType), "bodies are read as records"
    for field in described.fields:
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        for kind in kinds:
            if isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.DictType) and kind.max_length is not None:
                name = "array" if isinstance(kind, msgspec.inspect.ListType) else "object"
                most[field.encode_name, name] = kind.max_length
    return most


def _members(body: Bytes) -> dict[str, msgspec.Raw] | None:
    """The members of a JSON object; None of anything else, which is refused, with the reason, when it is decoded."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def check_members(members: Mapping[str, msgspec.Raw], record: type, known: KnownFields) -> None:
    """Note each member of a request that `record` has not and that is not known to do nothing.

    Raises: ApiError for one that cannot be had, or is misspelled.
    """
    read = {field.encode_name for field in msgspec.structs.fields(record)}
    for name, value in members.items():
        if name not in read and name not in known.ignored and bytes(value) != b"null":
            refusal = known.refused.get(name)
            leave_unread(name, name, read, refusal, None if refusal is None else msgspec.json.decode(value))


def leave_unread(name: str, path: str, read: Collection[str], refusal: Refusal | None, value: object) -> None:
    """Note a member that is not read. read: the names beside it that are. value: what it asks for, if there is a
    refusal.

    Raises: ApiError for one that cannot be had, or is misspelled.
    """
    if refusal is not None:
        if not _is_neutral(value, refusal):
            raise refused_member(path, refusal)
        return
    if is_full():
        # To look for what each of a million names is meant for would take minutes.
        return
    if (meant := meant_name(name, read)) is not None:
        raise unsupported(f"{path:.200} is no member of this route; did you mean {meant}?", path[:200])
    notice(f"{path:.120} was not read: this route has no such member")


def _is_neutral(value: object, refusal: Refusal) -> bool:
    # True is no number here.
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in refusal.neutral)


def refused_member(path: str, refusal: Refusal) -> ApiError:
    """The error for a member that cannot be had."""
    error = unsupported(f"{path:.200} is given, but cannot be had here; {refusal.way_out}", path[:200])
    if refusal.error_code is not None:
        error.facts["details"] = {"error_code": refusal.error_code}
    return error


def check_object(value: Mapping[str, Any], read: str, path: str, ignored: Mapping[str, str]) -> None:
    """Note each member of an object inside a request that is not read. read: the names that are, with spaces between.

    Raises: ApiError for one that is misspelled.
    """
    for name, member in value.items():
        if member is not None and name not in ignored and name not in read.split():
            leave_unread(name, f"{path}.{name}", read.split(), None, member)


def event_frame(value: Mapping[str, Any]) -> bytes:
    """One server-sent event; its name is the value's member `type`, if there is one."""
    name = value.get("type")
    head = b"data: " if name is None else b"event: %b\ndata: " % name.encode()
    return head + msgspec.json.encode(value) + b"\n\n"


class EventStream(StreamingResponse):
    """Frames as they come. When the client leaves, `on_end` is called, which must bring the frames to an end.

    It is called again when they have ended or failed. ping: what its clients read as nothing, between two frames.
    """

    media_type = "text/event-stream"
    ping = PING

    def __init__(self, frames: AsyncIterator[bytes], on_end: Callable[[], object]) -> None:
        super().__init__(frames, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[STREAMS_EVENTS] = self.ping
        watching = asyncio.create_task(self._watch(receive))
        try:
            await self.stream_response(send)
        finally:
            watching.cancel()
            self._on_end()

    async def _watch(self, receive: Receive) -> None:
        await self.listen_for_disconnect(receive)
        self._on_end()

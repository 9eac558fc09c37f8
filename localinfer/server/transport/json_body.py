"""Request bodies: bounded in size, time and depth, then read into typed records."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from localinfer.server.transport.errors import ApiError
from localinfer.server.transport.known_fields import NONE, check_members, refused_member
from localinfer.server.transport.settings import ServerSettings

MAX_DEPTH = 64
MAX_VALUES = 1 << 20
"""Of a whole body: a text of 32 MiB is one value, and as many token ids as any context holds are fewer."""
_BIG_BODY_BYTES = 1 << 16

# A string, closed or running to the end, or a sign; possessive, so that no input is read twice.
_STRING_OR_SIGN = re.compile(rb'"(?:[^"\\]++|\\(?:.|\Z))*+(?:"|\Z)|[\[\]{},]', re.DOTALL)

_UNKNOWN_MEMBER = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)

Record = TypeVar("Record")


class ClientGone(Exception):
    """The client left before it had its answer."""


async def read_json(request: Request, record: type[Record], settings: ServerSettings) -> Record:
    """Read a request's body as a record; of two members with one name the last counts.

    Members that the record has not are refused unless its `known_fields` say why they are ignored.
    Raises: ApiError, with the path of the member at fault; ClientGone.
    """
    body = await _read_body(request, settings)
    if len(body) > _BIG_BODY_BYTES:
        return await asyncio.to_thread(decode_json, body, record)
    return decode_json(body, record)


def decode_json(body: bytes, record: type[Record]) -> Record:
    """Decode JSON, if it is not too deep and has no member that means nothing. Raises: ApiError."""
    if is_deeper(body):
        raise ApiError(
            400, f"the JSON is nested more than {MAX_DEPTH} levels deep; send it flatter", code="invalid_json"
        )
    if has_more_values(body):
        raise ApiError(
            413, f"the JSON has more than {MAX_VALUES:,} values; send fewer at a time", code="body_too_large"
        )
    check_members(body, record, getattr(record, "known_fields", NONE))
    try:
        return msgspec.json.decode(body, type=record)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        name = path.rpartition("`$")[2].strip("`").removeprefix(".")
        unknown = _UNKNOWN_MEMBER.match(message)
        if unknown is not None:
            raise refused_member(f"{name}.{unknown[1]}".removeprefix(".")) from None
        raise ApiError(400, f"{name or 'the body'}: {message}", param=name or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        found = "empty" if not body.strip() else f"not JSON ({error})"
        raise ApiError(400, f"the body is {found}; send one JSON object in UTF-8", code="invalid_json") from None


def is_deeper(body: bytes, limit: int = MAX_DEPTH) -> bool:
    """Whether brackets, outside of strings, are nested deeper than `limit`."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    depth = 0
    for found in _STRING_OR_SIGN.finditer(body):
        match body[found.start()]:
            case 0x5B | 0x7B:
                depth += 1
                if depth > limit:
                    return True
            case 0x5D | 0x7D:
                depth -= 1
    return False


def has_more_values(body: bytes, limit: int = MAX_VALUES) -> bool:
    """Whether there are more values than `limit`, counted by the commas and opening brackets outside of strings."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") < limit:
        return False
    signs = (body[found.start()] for found in _STRING_OR_SIGN.finditer(body))
    return any(count >= limit for count, sign in enumerate(sign for sign in signs if sign in b",[{"))


async def _read_body(request: Request, settings: ServerSettings) -> bytes:
    limit = settings.max_body_bytes
    too_large = ApiError(413, f"the body is larger than {limit:,} bytes; send less", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > limit:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > limit:
                    raise too_large
                pieces.append(piece)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {settings.body_seconds:g} seconds", headers={"connection": "close"}
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(pieces)

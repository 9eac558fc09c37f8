"""Pictures and sounds that a request names by an http(s) URL: fetched within bounds, and only where the server may.

A client could otherwise have the server read what only this machine or its network can: so the address that a name
stands for must be one of the internet, the connection goes to that very address and not to what a second look-up gives,
and redirects are held to the same.
"""

import asyncio
import base64
import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import msgspec

from localinfer.apps.server.transport.http import ApiError

MOST_MEDIA_BYTES = 32 << 20
MEDIA_SECONDS = 20.0
_MOST_REDIRECTS = 3
_MOST_URLS = 32
_HOLDERS = {
    "image_url": "image_url",
    "input_image": "image_url",
    "image": "source",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
}
"""By the type of a part the member that may hold a URL, as text or as its member `url`."""


async def fetch_media(body: object) -> None:
    """Replace the http(s) URLs of pictures and sounds in a request's body by `data:` URLs. Raises: ApiError."""
    found = list(_urls_in(body, ""))
    if len(found) > _MOST_URLS:
        raise ApiError(400, f"{len(found)} pictures are named by URL; at most {_MOST_URLS} are fetched", param=None)
    for holder, name, path in found:
        data = await asyncio.to_thread(fetch, holder[name], path)
        holder[name] = f"data:;base64,{base64.b64encode(data).decode('ascii')}"


def fetch(url: str, path: str) -> bytes:
    """The bytes at a URL. path: of the member that holds it. Raises: ApiError."""
    for _ in range(_MOST_REDIRECTS + 1):
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ApiError(400, f"{path}: {url:.80} is no URL: {error}", param=path) from None
        address = _checked_address(parts, path)
        connection = _connection(parts, address)
        try:
            target = parts.path or "/"
            connection.request("GET", f"{target}?{parts.query}" if parts.query else target, headers={"accept": "*/*"})
            answer = connection.getresponse()
            if answer.status in (301, 302, 303, 307, 308) and answer.getheader("location"):
                url = urljoin(url, str(answer.getheader("location")))
                continue
            if answer.status != 200:
                raise ApiError(400, f"{path}: {url:.80} answered {answer.status}; send the bytes instead", param=path)
            data = _bounded(answer)
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(400, f"{path}: {url:.80} cannot be read: {error}", param=path) from None
        finally:
            connection.close()
        if len(data) > MOST_MEDIA_BYTES:
            raise ApiError(400, f"{path}: {url:.80} is longer than {MOST_MEDIA_BYTES:,} bytes", param=path)
        return data
    raise ApiError(400, f"{path}: {url:.80} redirects more than {_MOST_REDIRECTS} times", param=path)


def _bounded(answer: http.client.HTTPResponse) -> bytes:
    """The body of an answer, and one byte more than is allowed at most. Raises: OSError where it comes too slowly."""
    until = time.monotonic() + MEDIA_SECONDS
    pieces, left = [], MOST_MEDIA_BYTES + 1
    while left and (piece := answer.read1(min(left, 1 << 16))):
        pieces.append(piece)
        left -= len(piece)
        if time.monotonic() > until:
            raise TimeoutError(f"it took more than {MEDIA_SECONDS:.0f} seconds")
    return b"".join(pieces)


def _urls_in(value: object, path: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Every member with a URL to fetch: its object, its name, its path."""
    if isinstance(value, msgspec.Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _urls_in(inner, f"{path}[{index}]")
    elif isinstance(value, dict):
        holder = _HOLDERS.get(str(value.get("type")))
        for name, inner in value.items():
            place = f"{path}.{name}".lstrip(".")
            if name == holder and _is_url(inner):
                yield value, name, place
            elif name == holder and isinstance(inner, dict) and _is_url(inner.get("url")):
                yield inner, "url", f"{place}.url"
            else:
                yield from _urls_in(inner, place)


def _is_url(value: object) -> bool:
    return isinstance(value, str) and value[:8].lower().startswith(("http://", "https://"))


def _checked_address(parts: SplitResult, path: str) -> str:
    """The address of a URL's host, if it is one of the internet. Raises: ApiError."""
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise ApiError(400, f"{path}: only http and https URLs with a host are fetched", param=path)
    try:
        found = socket.getaddrinfo(host, port or parts.scheme, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ApiError(400, f"{path}: the host {host!r:.80} cannot be found: {error}", param=path) from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        known = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(known, "ipv4_mapped", None) or known
        if not mapped.is_global or mapped.is_multicast:
            raise ApiError(
                400,
                f"{path}: {host!r:.80} is {address}, which is no address of the internet; send the bytes",
                param=path,
            )
    return addresses[0]


def _connection(parts: SplitResult, address: str) -> http.client.HTTPConnection:
    """A connection that goes to this address, whatever its host's name stands for by then."""
    assert parts.hostname is not None, "checked"
    if parts.scheme == "http":
        connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=MEDIA_SECONDS)
    else:
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port or 443, timeout=MEDIA_SECONDS, context=ssl.create_default_context()
        )
    port = connection.port
    connection._create_connection = lambda _, *arguments: socket.create_connection(  # type: ignore[attr-defined]
        (address, port), *arguments
    )
    return connection

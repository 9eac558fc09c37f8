"""Codings of bodies: gzip and zstd, decoded as they arrive within what a body may have.

A few bytes may expand to gigabytes, so they are decoded in steps, and given up as soon as they come to more than a body
may have, or to far more than text does.
"""

import zlib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from starlette.datastructures import Headers

from localinfer.apps.server.transport.http import ApiError

_STEP_BYTES = 1 << 20
"""Decoded at a time, on the event loop: some milliseconds."""
_FREE_BYTES, _MOST_RATIO = 1 << 20, 256
"""Beyond so many bytes, so many may come of one. Conversations that repeat a file ten times have some fifty."""
_WINDOW_LOG = 23
"""Of zstd: 8 MiB, which decoders have to support; larger ones are for long files."""
_GZIP_BITS = 31
_SAME = {"x-gzip": "gzip"}


class _Decompressor(Protocol):
    """A decoder of Python's library."""

    @property
    def eof(self) -> bool:
        """True behind the end of what it decodes."""
        ...

    @property
    def unused_data(self) -> bytes:
        """Data behind that end."""
        ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Decode at most so many bytes."""
        ...


class _Gzip:
    """One member of gzip, with the methods of other decoders."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(_GZIP_BITS)
        self._rest = b""

    @property
    def eof(self) -> bool:
        """True behind its end."""
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        """Data behind its end."""
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Decode at most so many bytes."""
        made = self._inner.decompress(self._rest + data, max_length)
        self._rest = self._inner.unconsumed_tail
        return made


def coding_of(headers: Headers) -> str | None:
    """The coding of a body, None for a body as it is. Raises: ApiError for what cannot be decoded here."""
    codings = [one.strip().lower() for value in headers.getlist("content-encoding") for one in value.split(",")]
    codings = [_SAME.get(one, one) for one in codings if one not in ("", "identity")]
    if not codings:
        return None
    known = ["gzip"] if _zstd() is None else ["gzip", "zstd"]
    if codings in (["gzip"], ["zstd"]) and codings[0] in known:
        return codings[0]
    shown = ", ".join(codings)
    way_out = f"send it as it is, or as {' or '.join(known)}"
    if codings == ["zstd"]:
        way_out += "; pip install 'localinfer[zstd]' on the server makes it read zstd"
    elif codings[1:]:
        way_out = f"send one coding, {' or '.join(known)}, or none"
    raise ApiError(
        415,
        f"the body is encoded as {shown!r:.80}, which is not read here; {way_out}",
        code="encoding_not_read",
        headers={"accept-encoding": ", ".join(known)},
    )


class BodyDecoder:
    """Decodes one body as it arrives. limit: the most bytes that may come of it."""

    def __init__(self, coding: str, limit: int) -> None:
        self._coding = coding
        self._limit = limit
        self._read = self._made = 0
        self._decoder = self._begin()
        self._has_begun = False

    def push(self, data: bytes) -> Iterator[bytes]:
        """Decode the next bytes in steps. Raises: ApiError for what is no such coding, and what expands too far."""
        self._read += len(data)
        while True:
            if self._decoder.eof:
                # Several may stand one behind the other.
                data = self._decoder.unused_data + data
                if not data:
                    return
                self._decoder = self._begin()
            self._has_begun = self._has_begun or bool(data)
            try:
                made = self._decoder.decompress(data, _STEP_BYTES)
            except Exception as error:
                # Each library has errors of its own.
                raise self._refused(f"cannot be decoded ({error!s:.80})") from None
            data = b""
            self._made += len(made)
            if self._made > self._limit:
                raise ApiError(
                    413, f"the body is larger than {self._limit:,} bytes when decoded; send less", code="body_too_large"
                )
            if self._made > _FREE_BYTES and self._made > _MOST_RATIO * self._read:
                raise ApiError(
                    413,
                    f"the body expands more than {_MOST_RATIO} times; send it as it is",
                    code="body_too_large",
                )
            yield made
            if not made and not self._decoder.eof:
                return

    def finish(self) -> None:
        """Check that the body was whole. Raises: ApiError."""
        if not self._decoder.eof and self._has_begun:
            raise self._refused("ends too early")

    def _begin(self) -> _Decompressor:
        if self._coding == "gzip":
            return _Gzip()
        library = _zstd()
        assert library is not None, "checked with the headers"
        options = {library.DecompressionParameter.window_log_max: _WINDOW_LOG}
        made: _Decompressor = library.ZstdDecompressor(options=options)
        return made

    def _refused(self, found: str) -> ApiError:
        return ApiError(400, f"the body is encoded as {self._coding}, and {found}; send it whole", code="bad_encoding")


@cache
def _zstd() -> Any:
    """Python's module for zstd, of its own or as a package; None where there is none."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ImportError:
            continue
    return None

"""Encoded bodies: decoded however they are cut, and given up as soon as they come to too much."""

import gzip
import random
from typing import Any

import pytest
from starlette.datastructures import Headers

from localinfer.apps.server.transport import codings
from localinfer.apps.server.transport.codings import BodyDecoder, coding_of
from localinfer.apps.server.transport.http import ApiError

TEXT = bytes(random.Random(1).choices(b"abcdefgh \n", k=1 << 17)) * 12 + b"x" * (1 << 20)
LIMIT = 8 << 20


@pytest.fixture(params=["gzip", "zstd"])
def packed(request: pytest.FixtureRequest) -> Any:
    """The name of a coding and a function that encodes so."""
    if request.param == "gzip":
        return "gzip", gzip.compress
    library = codings._zstd()
    if library is None:
        pytest.skip("no module for zstd")
    return "zstd", library.compress


def decoded(coding: str, body: bytes, limit: int = LIMIT, size: int = 65_536) -> bytes:
    decoder = BodyDecoder(coding, limit)
    made = [step for at in range(0, len(body), size) for step in decoder.push(body[at : at + size])]
    decoder.finish()
    assert all(len(step) <= 1 << 20 for step in made)
    return b"".join(made)


def test_body_is_decoded_however_it_is_cut(packed):
    coding, encode = packed
    body = encode(TEXT)
    for size in (len(body), 65_536, 4_099):
        assert decoded(coding, body, size=size) == TEXT
    short = b'{"a": 1}'
    assert decoded(coding, encode(short), size=1) == short
    assert decoded(coding, encode(short) + encode(b" ") + encode(b""), size=3) == short + b" "
    assert decoded(coding, b"") == b""


def test_what_expands_too_far_is_given_up_while_it_is_decoded(packed):
    coding, encode = packed
    with pytest.raises(ApiError, match="when decoded") as caught:
        decoded(coding, encode(TEXT), limit=1 << 20)
    assert caught.value.status == 413
    bomb = encode(bytes(1 << 25))
    for limit, found in ((LIMIT, "when decoded|expands"), (1 << 40, "expands more than 256 times")):
        decoder = BodyDecoder(coding, limit)
        made = 0
        with pytest.raises(ApiError, match=found) as caught:
            for step in decoder.push(bomb):
                made += len(step)
        assert (caught.value.status, made <= max(256 * len(bomb), 1 << 20)) == (413, True)


def test_what_is_no_such_coding_or_ends_too_early_is_refused(packed):
    coding, encode = packed
    whole = encode(TEXT[:9999])
    for body in (b"{}", whole[:-1], whole[:40], whole + b"{}"):
        with pytest.raises(ApiError, match=f"encoded as {coding}") as caught:
            decoded(coding, body)
        assert (caught.value.status, caught.value.code) == (400, "bad_encoding")


def test_codings_that_are_not_read_are_named(monkeypatch):
    def read(*values: str) -> str | None:
        return coding_of(Headers(raw=[(b"content-encoding", value.encode()) for value in values]))

    assert [read(), read("identity"), read(""), read("GZIP"), read("identity, x-gzip")] == [None] * 3 + ["gzip"] * 2
    for values, found in ((("br",), "'br'"), (("gzip, gzip",), "'gzip, gzip'"), (("gzip", "br"), "'gzip, br'")):
        with pytest.raises(ApiError, match=found) as caught:
            read(*values)
        assert (caught.value.status, caught.value.code) == (415, "encoding_not_read")
    monkeypatch.setattr(codings, "_zstd", lambda: None)
    with pytest.raises(ApiError, match=r"zstd.*localinfer\[zstd\]"):
        read("zstd")

"""URLs of pictures: which are fetched, which are refused, and that no name leads to this machine's network."""

import asyncio
import base64
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from localinfer.apps.server.transport import media_urls
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.media_urls import fetch, fetch_media

BYTES = b"\x89PNG and more"


class Pages(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    def do_GET(self) -> None:
        answers = {"/a.png": (200, BYTES), "/large": (200, bytes(70)), "/missing": (404, b"")}
        if self.path.startswith("/to="):
            self.send_response(302)
            self.send_header("location", self.path.removeprefix("/to="))
            self.end_headers()
            return
        status, body = answers[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def open_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this machine's loopback for an address of the internet."""
    monkeypatch.setattr(media_urls.ipaddress, "ip_address", lambda _: FakeAddress())


class FakeAddress:
    is_global, is_multicast = True, False


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/", "http://localhost/", "http://[::1]/", "http://10.0.0.1/", "http://169.254.169.254/latest",
        "http://192.168.1.1/", "http://0.0.0.0/", "http://[::ffff:127.0.0.1]/", "http://[fe80::1]/", "http://[fd00::1]/",
        "http://224.0.0.1/", "http://2130706433/", "http://100.64.0.1/",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_internet_are_refused(url: str) -> None:
    with pytest.raises(ApiError, match=r"no address of the internet|cannot be found"):
        fetch(url, "messages[0]")


@pytest.mark.parametrize("url", ["ftp://a.b/c", "http:///x", "http://u:p@a.b/c", "http://a.b:99999/", "https://[/x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ApiError):
        fetch(url, "messages[0]")


@pytest.mark.usefixtures("open_world")
def test_bytes_are_fetched_within_bounds(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch(f"{site}/a.png", "p") == BYTES
    assert fetch(f"{site}/to=/a.png", "p") == BYTES
    for url, words in (("/missing", "404"), ("/to=/to=/to=/to=/to=/a.png", "redirects more")):
        with pytest.raises(ApiError, match=words):
            fetch(site + url, "p")
    monkeypatch.setattr(media_urls, "MOST_MEDIA_BYTES", 64)
    with pytest.raises(ApiError, match="longer than 64"):
        fetch(f"{site}/large", "p")


class Dripping:
    """An answer that never ends, of a byte at a time."""

    def __init__(self) -> None:
        self.now = 0.0

    def read1(self, _: int) -> bytes:
        self.now += 1.0
        return b"x"

    def monotonic(self) -> float:
        return self.now


def test_what_comes_too_slowly_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: Any = Dripping()
    monkeypatch.setattr(media_urls, "time", answer)
    with pytest.raises(TimeoutError, match="20 seconds"):
        media_urls._bounded(answer)
    assert answer.now == pytest.approx(media_urls.MEDIA_SECONDS + 1)


def test_a_redirect_is_held_to_the_same(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = media_urls.ipaddress.ip_address, []

    def first_is_public(address: str) -> Any:
        seen.append(address)
        return FakeAddress() if len(seen) == 1 else real(address)

    monkeypatch.setattr(media_urls.ipaddress, "ip_address", first_is_public)
    with pytest.raises(ApiError, match="no address of the internet"):
        fetch(f"{site}/to=/a.png", "p")


class Body(msgspec.Struct):
    messages: list[Any]


@pytest.mark.usefixtures("open_world")
def test_only_parts_that_are_pictures_or_sounds_are_fetched(site: str) -> None:
    url = f"{site}/a.png"
    fetched = f"data:;base64,{base64.b64encode(BYTES).decode()}"
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "text", "text": url},
        {"type": "search_result", "source": url},
        {"type": "image_url", "image_url": {"url": "data:,x"}},
    ]
    body = Body([{"role": "user", "content": parts}])
    asyncio.run(fetch_media(body))
    assert [parts[0]["image_url"]["url"], parts[1]["image_url"], parts[2]["source"]["url"]] == [fetched] * 3
    assert parts[3:] == [
        {"type": "text", "text": url},
        {"type": "search_result", "source": url},
        {"type": "image_url", "image_url": {"url": "data:,x"}},
    ]

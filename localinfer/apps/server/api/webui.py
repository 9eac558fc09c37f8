"""The chat page at `/`: one file that asks no other server than this one, under a policy that lets it do nothing else.

It is put together of the files beside `chat.html` when first asked for. The policy names its scripts and styles by
their hashes, which are taken of the served text: no other code runs, even if a text of a model were to become markup.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.replies.service import service_of
from localinfer.apps.server.transport.http import ApiError

_FOLDER = Path(__file__).resolve().parents[2] / "webui"
_PARTS = re.compile(r'<link rel="stylesheet" href="(?P<style>[\w.]+)">|<script src="(?P<script>[\w.]+)"></script>')


@dataclass(frozen=True)
class Page:
    """A page as it is served. body: its bytes. headers: what goes with them, and with an answer without them."""

    body: bytes
    headers: dict[str, str]


def make_page(body: bytes) -> Page:
    """A page whose own scripts and styles are all that may run in it."""
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(body, b"script"),
        "style-src": _hashes(body, b"style"),
        # The page's icon is part of it.
        "img-src": "data:",
        "connect-src": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        # Text can become markup through no function of the browser.
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        # Not no-referrer, under which some browsers also hide the origin from this server.
        "referrer-policy": "same-origin",
        "x-frame-options": "DENY",
        # Kept by browsers, and asked for each time: the next version of the server has another page.
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return Page(body, headers)


def _hashes(body: bytes, tag: bytes) -> str:
    contents = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _read(name: str) -> str:
    # In text mode: browsers take hashes of lines that end with one character, whatever a checkout made of them.
    return (_FOLDER / name).read_text(encoding="utf-8")


def _embedded(part: re.Match[str]) -> str:
    tag = str(part.lastgroup)
    return f"<{tag}>\n{_read(part[tag])}</{tag}>"


@cache
def _page() -> Page:
    return make_page(_PARTS.sub(_embedded, _read("chat.html")).encode())


async def chat_page(request: Request) -> Response:
    """The page, or 304 if the client has it. Raises: ApiError where it is switched off."""
    if not service_of(request).settings.serves_page:
        raise ApiError(404, "the chat page is switched off by --no-page; ask the API under /v1", code="not_found")
    page = _page()
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if page.headers["etag"] in known:
        return Response(status_code=304, headers=page.headers)
    return Response(page.body, headers=page.headers, media_type="text/html")

"""Authentication and origin checks, before every route and before any body is read.

A page that a browser shows can send requests to this machine. It cannot choose the `Host` header of a name that it
rebinds to a loopback address, nor leave out `Origin`, nor send JSON without asking first. So a foreign host or origin
and every body that is not JSON are refused, and pages of other origins get no permission. The one page that needs none
is the server's own: its origin is the very host that was asked, after that host has passed.
"""

import re
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localinfer.apps.server.transport.http import OLLAMA, ApiError, identifier
from localinfer.apps.server.transport.settings import LOOPBACK_NAMES, ServerSettings, ip_address, matching_token

_HOST = re.compile(r"(?:\[(?P<bracketed>[0-9a-fA-F:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::\d{1,5})?")
MAX_HEADER_BYTES = 32 << 10
_METHODS = "GET, POST, DELETE, OPTIONS"
EXPOSED_HEADERS = "x-request-id, retry-after, " + ", ".join(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
"""Headers that a page of an allowed origin may read."""
IS_UNIX_SOCKET = "is_unix_socket"
"""Set in the state of a request that came through the Unix socket, whose folder guards it."""
TOKEN_IDENTITY = "token_identity"
"""Set in the state of a request that has shown a token: `AccessToken.identity`."""
_OPEN_PATHS = ("", "/health", "/v1/health")
"""Without their last slash; the first is the chat page, the same for everybody, which asks for the token itself."""


_UNSTATED_KINDS = ("", "application/x-www-form-urlencoded")


class SecurityMiddleware:
    """ASGI middleware that checks hosts, origins and tokens, gives every request an id, and answers preflights.

    present: the settings now, where they may change while the server runs.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, present: Callable[[], ServerSettings] | None = None
    ) -> None:
        self._app = app
        self._present = present or (lambda: settings)
        self._use(settings)

    def _use(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._tokens = settings.access_tokens
        self._hosts = {*LOOPBACK_NAMES, *(name.lower() for name in settings.allowed_hosts)}
        if settings.host is not None and not settings.listens_everywhere:
            self._hosts.add(settings.host.lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (settings := self._present()) is not self._settings:
            self._use(settings)
        headers = Headers(scope=scope)
        request_id = identifier("req")
        scope.setdefault("state", {})["request_id"] = request_id
        granted = self._granted_headers(headers)

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                marked = MutableHeaders(scope=message)
                marked["x-request-id"] = request_id
                marked["x-content-type-options"] = "nosniff"
                for name, value in granted.items():
                    marked[name] = value
            await send(message)

        app = self._app
        try:
            self._check(scope, headers)
            if scope["method"] == "OPTIONS":
                app = Response(status_code=204, headers={"allow": _METHODS})
        except ApiError as error:
            app = error.response(scope["path"].removeprefix("/v1"))
        await app(scope, receive, send_marked)

    def _check(self, scope: Scope, headers: Headers) -> None:
        _check_message(scope, headers)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_allowed_host(hosts[0]):
            raise ApiError(
                403,
                f"the Host header is {', '.join(hosts)!r:.80}; use localhost or 127.0.0.1, or start the server "
                "with --allow-host NAME",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not _is_own(origin, scope, headers) and origin not in self._settings.allowed_origins:
            raise ApiError(
                403,
                f"pages of {origin!r:.80} may not use this server; start it with --allow-origin ORIGIN to let them",
                code="origin_not_allowed",
            )
        is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if origin is None and is_foreign and not _opens_the_page(scope, headers):
            raise ApiError(403, "a page of another site may not use this server", code="origin_not_allowed")
        if scope["method"] == "OPTIONS":
            return
        self._check_token(scope, headers)
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            coding = headers.get("content-encoding", "identity").strip().lower()
            if coding != "identity":
                raise ApiError(
                    415,
                    f"the body is encoded as {coding!r:.80}, which is not read here; send it as it is",
                    code="encoding_not_read",
                    headers={"accept-encoding": "identity"},
                )
            if kind != "application/json" and not _is_json_all_the_same(kind, scope, headers):
                raise ApiError(
                    415, f"the body is {kind or 'of no type'!r:.80}; send JSON, as application/json", code="not_json"
                )

    def _check_token(self, scope: Scope, headers: Headers) -> None:
        if not self._tokens or scope["state"].get(IS_UNIX_SOCKET) or self._is_open(scope["path"].rstrip("/")):
            return
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            shown = headers.get("x-api-key", "")
        token = matching_token(shown.strip(), self._tokens)
        if token is None:
            raise ApiError(
                401,
                "the token is missing or wrong; send it as 'Authorization: Bearer TOKEN'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        scope["state"]["token_name"], scope["state"][TOKEN_IDENTITY] = token.name, token.identity

    def _is_open(self, path: str) -> bool:
        return path in _OPEN_PATHS and (path != "" or self._settings.serves_page)

    def _is_allowed_host(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = (found["bracketed"] or found["name"]).lower()
        if name in self._hosts:
            return True
        # A name can be made to point anywhere; an address cannot, and here the token guards it.
        return self._settings.listens_everywhere and ip_address(name) is not None

    def _granted_headers(self, headers: Headers) -> Mapping[str, str]:
        """Headers by which a browser lets an allowed page send its request and read the reply."""
        origin = headers.get("origin")
        if origin is None or origin not in self._settings.allowed_origins:
            return {"vary": "Origin"} if self._settings.allowed_origins else {}
        granted = {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": EXPOSED_HEADERS,
            "vary": "Origin",
        }
        wanted = headers.get("access-control-request-headers")
        if headers.get("access-control-request-method") is not None:
            granted |= {"access-control-allow-methods": _METHODS, "access-control-max-age": "600"}
            if wanted is not None:
                granted["access-control-allow-headers"] = wanted
            if self._settings.allows_private_network and headers.get("access-control-request-private-network"):
                granted["access-control-allow-private-network"] = "true"
        return granted


def _has_body(headers: Headers) -> bool:
    """Return whether bytes follow a head, as it says itself."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _is_own(origin: str, scope: Scope, headers: Headers) -> bool:
    """Return whether the server's own page asks. No browser reaches a Unix socket: only a proxy could say so there."""
    is_from_elsewhere = headers.get("sec-fetch-site", "same-origin") != "same-origin"
    if is_from_elsewhere or scope["state"].get(IS_UNIX_SOCKET):
        return False
    return origin.lower() == f"http://{headers['host']}".lower()


def _opens_the_page(scope: Scope, headers: Headers) -> bool:
    """Return whether a link of another page is followed to the chat page, in a window that this page cannot read."""
    is_visit = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return is_visit and scope["method"] == "GET" and scope["path"] == "/"


def _is_json_all_the_same(kind: str, scope: Scope, headers: Headers) -> bool:
    """Return whether a body counts as JSON without that type: LiteLLM asks Ollama's API without a type, and curl with
    that of forms. Browsers say from where they send a body, and write no JSON into such a form. Without a body
    no type is needed.
    """
    if not kind and not _has_body(headers):
        return True
    is_from_a_program = "origin" not in headers and "sec-fetch-site" not in headers
    return kind in _UNSTATED_KINDS and is_from_a_program and scope["path"].removeprefix("/v1").startswith(OLLAMA)


def _check_message(scope: Scope, headers: Headers) -> None:
    """Refuse what two programs on the way might understand differently, and heads that are too long."""
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if scope["http_version"] not in ("1.0", "1.1"):
        found = f"the version of HTTP is {scope['http_version']}; use 1.1"
    elif num_bytes > MAX_HEADER_BYTES:
        found = f"the headers have {num_bytes:,} bytes; send at most {MAX_HEADER_BYTES:,}"
    elif "content-length" in headers and "transfer-encoding" in headers:
        found = "the body has a length and comes in chunks; give one of Content-Length and Transfer-Encoding"
    else:
        return
    raise ApiError(400, found, code="bad_http", headers={"connection": "close"})

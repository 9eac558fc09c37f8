"""Settings of a server: addresses, tokens and their limits, its role, and the limits of all requests."""

import hashlib
import hmac
import ipaddress
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args
from urllib.parse import urlsplit

from localinfer.apps.server_options import ServerOptions
from localinfer.arguments import MAX_PRIORITY, check_number
from localinfer.errors import RequestError
from localinfer.storage.response_store import ResponseStoreOptions

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.@-]{1,64}):(?P<rest>.*)")
_BOM = "\ufeff"
"""Mark that some editors write before the first line."""


_MOST = 10**12
_LEAST: Mapping[str, int] = MappingProxyType({"max_queued": 0, "min_priority": -MAX_PRIORITY})
_LIMIT = re.compile(r"(?P<name>[A-Za-z_-]+)=(?P<value>.*)")
_HOW = "write NAME: TOKEN LIMIT=NUMBER LIMIT=NUMBER"


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Limits of one token, or of each that has none of its own; None for no limit.

    Raises: RequestError naming the limit.
    """

    requests_per_minute: int | None = None
    """Requests in any minute."""
    tokens_per_minute: int | None = None
    """Tokens read and generated in any minute."""
    max_running: int | None = None
    """Texts that are generated at one time, by each model."""
    max_queued: int | None = None
    """Texts that wait for that."""
    min_priority: int | None = None
    """The most urgent priority; also the default priority where it is above 0."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            name = limit.name
            most = MAX_PRIORITY if name == "min_priority" else _MOST
            check_number(name, getattr(self, name), _LEAST.get(name, 1), most, none="for no limit")

    def over(self, other: "Quota") -> "Quota":
        """These limits, and another's where there is none."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return Quota(**{name: getattr(other, name) if value is None else value for name, value in given.items()})


class Quotas(dict[str, Quota]):
    """Limits by the name of a token; `default` for a token that has none of its own, or is no longer valid."""

    def __init__(self, default: Quota, own: Mapping[str, Quota]) -> None:
        super().__init__(own)
        self.default = default

    def __missing__(self, name: str) -> Quota:
        return self.default


def read_quota(words: Sequence[str]) -> Quota:
    """The limits behind a token on its line: `max_running=2 tokens_per_minute=5000`, in square brackets or without.

    Raises: RequestError for what is no limit.
    """
    written = " ".join(words)
    if written.startswith("[") and written.endswith("]"):
        written = written[1:-1]
    if "#" in written:
        raise RequestError("a comment stands behind the token; give it a line of its own, which begins with #")
    if "[" in written or "]" in written:
        raise RequestError(
            f"a bracket of the limits is missing, or one too many; {_HOW}, with [...] around all or none"
        )
    names = [limit.name for limit in fields(Quota)]
    limits: dict[str, int] = {}
    for item in written.replace(",", " ").split():
        found = _LIMIT.fullmatch(item)
        if found is None and not limits:
            raise RequestError(
                "there is white space in the token or its name, which neither may hold; "
                f"{_HOW}, and names of letters, digits and _ . @ -"
            )
        name = "" if found is None else found["name"].replace("-", "_")
        if found is None or name not in names or name in limits or not re.fullmatch(r"-?\d{1,12}", found["value"]):
            # What is no name of a limit may be a part of a token.
            shown = item if name in names else f"{name:.32}=..."
            raise RequestError(
                f"{shown!r:.80} is no limit of a token; write NAME=NUMBER, each once, of: {', '.join(names)}"
            )
        limits[name] = int(found["value"])
    return Quota(**limits)


def looks_like_a_limit(word: str) -> bool:
    """Return whether a word where the token should stand holds a limit, or the brackets of one."""
    names = "|".join(limit.name for limit in fields(Quota))
    return re.search(rf"^\[|\[[A-Za-z_]*=|(?:^|[,;(])(?:{names})=", word.replace("-", "_")) is not None


@dataclass(frozen=True)
class AccessToken:
    """A token and the name of its client. is_named: by the file, and not by its line there. quota: its own limits.

    Raises: RequestError for a value that no header can hold.
    """

    name: str
    value: str = field(repr=False)
    is_named: bool = True
    quota: Quota = Quota()

    def __post_init__(self) -> None:
        if not (self.value and self.value.isascii() and self.value.isprintable()):
            raise RequestError("the token is empty or has characters that no header can hold; use letters and digits")

    @property
    def identity(self) -> str:
        """Owner of the token's texts: its name, whatever the token is now; without a name the token itself.

        Unnamed tokens have no identity: other tokens may move to their lines.
        """
        return f"name {self.name}" if self.is_named else f"token {hashlib.sha256(self.value.encode()).hexdigest()}"


def parse_tokens(text: str) -> tuple[AccessToken, ...]:
    """The tokens of a file: one per line, `NAME:` before it if it is to have one, and behind it its own limits, as
    `LIMIT=NUMBER`; blank lines and `#` lines are none.

    Those without a name are called by their line, `token-3`.
    Raises: RequestError for a file without tokens, for two of one name or one value, and for a line with white space
    in a token or a name, or anything else that a token would have by mistake only.
    """
    tokens: list[AccessToken] = []
    for number, line in enumerate(text.removeprefix(_BOM).splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            token = _token_of_line(line, number)
        except RequestError as error:
            raise RequestError(f"line {number}: {error}") from None
        for other in tokens:
            if other.name == token.name or other.value == token.value:
                what = f"the name {token.name}" if other.name == token.name else f"the token of {other.name}"
                raise RequestError(f"line {number} has {what} a second time; give each token its own line and name")
        tokens.append(token)
    if not tokens:
        raise RequestError("there is no token in it; write one per line")
    return tuple(tokens)


def _token_of_line(line: str, number: int) -> AccessToken:
    named = _NAMED.fullmatch(line)
    value, *behind = (line if named is None else named["rest"]).split() or [""]
    if not value:
        raise RequestError("there is a name and no token; write NAME: TOKEN")
    if looks_like_a_limit(value):
        raise RequestError(
            "there is a limit where the token should stand; write NAME: TOKEN LIMIT=NUMBER, with a space before each"
        )
    quota = read_quota(behind)
    if named is None:
        return AccessToken(f"token-{number}", value, is_named=False, quota=quota)
    return AccessToken(named["name"], value, quota=quota)


def matching_token(shown: str, tokens: Sequence[AccessToken]) -> AccessToken | None:
    """The token that a client shows; how long that takes says nothing about how much of one was right, nor which."""
    given = shown.encode()
    found = None
    for token in tokens:
        if hmac.compare_digest(given, token.value.encode()):
            found = token
    return found


Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = get_args(Role)

DEFAULT_THRESHOLD = 256
"""Tokens from which on a prompt is handed over: 0.3 to 0.7 s of one core for 135M to 0.5B weights. An estimate."""
DEFAULT_DEADLINE_SECONDS = 120.0

_UNIX = "unix:"
_LONGEST_SOCKET_PATH = 107 if sys.platform.startswith("linux") else 103
"""Bytes of a path that Linux, or macOS and the BSDs, connect to."""
_HTTP = re.compile(r"http://[^/?#@]+/?")


@dataclass(frozen=True)
class PrefillAddress:
    """Address of a prefill server: host and port by TCP, or the path of a Unix socket.

    name: as it was given. Raises: RequestError.
    """

    name: str
    host: str = field(init=False, default="localhost")
    port: int = field(init=False, default=80)
    path: Path | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        wrong = RequestError(
            f"the prefill server is {self.name!r:.120}; give http://HOST:PORT, or unix:PATH for its Unix socket"
        )
        if self.name.startswith(_UNIX):
            path = self.name.removeprefix(_UNIX).removeprefix("//")
            if not path:
                raise wrong
            if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
                raise RequestError(
                    f"the prefill server's path has {len(os.fsencode(path))} bytes, and this system allows "
                    f"{_LONGEST_SOCKET_PATH}; let it listen on a shorter one (--socket)"
                )
            object.__setattr__(self, "path", Path(path))
            return
        if not _HTTP.fullmatch(self.name):
            raise wrong
        parts = urlsplit(self.name)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            raise wrong from None
        if not host:
            raise wrong
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "port", 80 if port is None else port)


@dataclass(frozen=True, kw_only=True)
class KVTransferOptions:
    """The role of a server in KV transfer; checked when it is made. Raises: RequestError."""

    role: Role = "both"
    """prefill: computes prompts for others, and generates no text; decode: has long prompts computed by `servers`;
    both: does all itself."""
    servers: tuple[PrefillAddress, ...] = ()
    """Prefill servers."""
    threshold: int = DEFAULT_THRESHOLD
    """Tokens of a prompt, cached nowhere, from which on a prefill server computes it."""
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
    """Time after which a prompt is computed here instead."""
    token: str | None = field(default=None, repr=False)
    """Shown to the servers."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise RequestError(f"the role is {self.role!r:.80}; give one of {', '.join(ROLES)}")
        if self.role == "decode" and not self.servers:
            raise RequestError(
                "a server of --role decode leaves long prompts to others, and none is named; give --prefill-server "
                "http://HOST:PORT or unix:PATH, of a server of --role prefill"
            )
        if self.role != "decode" and self.servers:
            raise RequestError(
                f"--prefill-server names who computes prompts for a server of --role decode, and this one is of --role "
                f"{self.role}; leave it out, or give --role decode"
            )
        if self.threshold < 1:
            raise RequestError(f"--prefill-threshold is {self.threshold}; give at least 1 token")
        if not self.deadline_seconds > 0:
            raise RequestError(f"--prefill-deadline is {self.deadline_seconds:g}; give more than 0 seconds")


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_ORIGIN = re.compile(r"file://|[a-z][a-z0-9+.-]*://(?:[A-Za-z0-9._~-]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?")
"""As browsers send it (RFC 6454), whatever the scheme; the wildcard is none, and neither is a path."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ServerOptions):
    """Settings of a server; checked when they are made. Raises: RequestError."""

    socket_path: Path | None = None
    """The Unix socket, guarded by its folder; None for none."""
    host: str | None = "127.0.0.1"
    """TCP address to listen on, None for none; anything but loopback needs a token."""
    token: str | None = None
    """Token that a client on TCP must show."""
    max_connections: int = 256
    """Connections that are open at one time."""
    max_body_bytes: int = 32 << 20
    """Size of one body."""
    body_memory: int = 128 << 20
    """Bytes for all bodies together, what they become and the work on their texts, see `bodies`."""
    header_seconds: float = 10.0
    """Time for the head of a request."""
    body_seconds: float = 30.0
    """Time for the body of a request, beside a second for each MiB of it and what this process was late in reading."""
    slow_reader_seconds: float = 60.0
    """Time that a client may read nothing of a reply."""
    ping_seconds: float = 15.0
    """Time between signs of life in a stream."""
    progress_seconds: float = 0.25
    """Time between reports of how far a prompt was read, where a request asks for them."""
    needs_socket: bool = True
    """True if a Unix socket that another server listens on is an error; else TCP alone is served."""
    kept_responses: ResponseStoreOptions = ResponseStoreOptions()
    """Limits and folder of responses and conversations that are kept."""
    slot_folder: Path | None = None
    """Folder in which clients may save what is in a slot, None for none."""
    handover: KVTransferOptions = KVTransferOptions()
    """The server's role in KV transfer, and the servers that compute prompts for it."""
    tokens: tuple[AccessToken, ...] = ()
    """Tokens that have names, beside `token`."""

    def __post_init__(self) -> None:
        if self.host is None and self.socket_path is None:
            raise RequestError("the server has nowhere to listen: allow TCP, or name a socket")
        if not 0 <= self.port <= 65535:
            raise RequestError(f"the port is {self.port}; it must be from 1 to 65535, or 0 for one that is free")
        if self.host is not None and not self.access_tokens and not is_loopback(self.host):
            raise RequestError(
                f"{self.host} can be reached from other machines; give a file with a token that clients must show "
                "(--token-file), or listen on 127.0.0.1"
            )
        self.check_options()
        # They refuse limits beyond what is counted.
        assert self.quotas, "requests without a token have some"
        if self.isolates_cache and not self.access_tokens:
            raise RequestError(
                "clients can only be kept apart by their tokens, and there are none; give a file with a token for each "
                "(--token-file)"
            )
        if self.isolates_cache and self.handover.role == "prefill":
            raise RequestError(
                "a prefill server keeps texts apart as the decode servers say; give --isolate-cache to those instead"
            )
        for origin in self.allowed_origins:
            if origin != "null" and not _ORIGIN.fullmatch(origin):
                raise RequestError(
                    f"{origin!r} is not the origin of a page; give its scheme, name and port, such as "
                    "http://localhost:3000, app://obsidian.md or chrome-extension://ID, or null for pages without one"
                )

    @property
    def access_tokens(self) -> tuple[AccessToken, ...]:
        """Every token that is valid."""
        return (*((AccessToken("token", self.token, is_named=False),) if self.token is not None else ()), *self.tokens)

    @cached_property
    def quotas(self) -> Quotas:
        """The limits of tokens, by name; of "", requests without one, which have those by the minute together.

        Of several clients none holds the others back, unless the server's options say so.
        """
        anyone = Quota(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_running=self.running_per_token,
            max_queued=self.queued_per_token,
            min_priority=self.min_priority,
        )
        holds_back = self.min_priority is None and self.tokens
        default = replace(anyone, min_priority=0) if holds_back else anyone
        return Quotas(default, {"": anyone, **{one.name: one.quota.over(default) for one in self.tokens}})

    @property
    def listens_everywhere(self) -> bool:
        """True if TCP listens on every address of the machine."""
        return self.host in ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    if host == "localhost":
        return True
    address = ip_address(host)
    return address is not None and address.is_loopback


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host as an address, None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None

"""The settings of a server: where it listens, which requests it answers, and its limits."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from localinfer.apps.server.transport.access_tokens import AccessToken
from localinfer.apps.server.transport.handover_options import HandoverOptions
from localinfer.apps.server.transport.quotas import Quota
from localinfer.arguments import check_number
from localinfer.errors import RequestError
from localinfer.storage.response_store import ResponseStoreOptions

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_ORIGIN = re.compile(r"file://|[a-z][a-z0-9+.-]*://(?:[A-Za-z0-9._~-]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?")
"""As browsers send it (RFC 6454), whatever the scheme; the wildcard is none, and neither is a path."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where and how to serve; checked when it is made.

    socket_path: the Unix socket, None for none. host, port: where to listen by TCP, host None for nowhere; port 0 lets
    the system choose.
    token: what a client on TCP must show; anything but loopback needs one. The Unix socket is guarded by its folder.
    allowed_hosts: names beside the loopback's that a `Host` header may hold. allowed_origins: web pages that may ask.
    allows_private_network: let browsers send pages of the internet here, those of `allowed_origins`.
    strict_model: refuse a model name that is not ours even where only one model is served.
    max_generations: texts generated and waiting at one time; one more is refused with 429.
    body_seconds: for the whole request. slow_reader_seconds: how long a client may read nothing of a reply.
    body_memory: bytes for all bodies together, what they become and the work on their texts, see `bodies`.
    shutdown_seconds: what running replies get to finish after SIGTERM. ping_seconds: between signs of life in a stream.
    progress_seconds: between reports of how far a prompt was read, where a request asks for them.
    needs_socket: whether a Unix socket that another server listens on is an error; else TCP alone is served.
    serves_page: whether there is a chat page at `/`, which everybody may read; without, a token is asked for there too.
    kept_responses: what is kept of responses and conversations, and where.
    num_slots: as many texts are generated at one time. slot_folder: where clients may save what is in a slot, None for
    nowhere. shows_slots, shows_metrics: whether /slots and /metrics are there. pooling: of vectors, None as models say.
    isolates_cache: what one token's texts left behind is of use to that token alone, and shown to no other.
    handover: the server's role, and who computes prompts for it.
    tokens: those that have names, beside `token`. requests_per_minute, tokens_per_minute, running_per_token,
    queued_per_token, min_priority: what one token may ask for that has no limits of its own, see `Quota`; with
    `tokens` and without a min_priority they may ask for priorities from 0 on.
    ttft_objective: seconds in which a first token is wanted; requests for which a later one is predicted are refused.
    Raises: RequestError.
    """

    socket_path: Path | None = None
    host: str | None = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allows_private_network: bool = False
    strict_model: bool = False
    max_generations: int = 64
    max_connections: int = 256
    max_body_bytes: int = 32 << 20
    body_memory: int = 128 << 20
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    slow_reader_seconds: float = 60.0
    shutdown_seconds: float = 5.0
    ping_seconds: float = 15.0
    progress_seconds: float = 0.25
    needs_socket: bool = True
    serves_page: bool = True
    kept_responses: ResponseStoreOptions = ResponseStoreOptions()
    num_slots: int = 16
    slot_folder: Path | None = None
    shows_slots: bool = True
    shows_metrics: bool = True
    pooling: str | None = None
    isolates_cache: bool = False
    handover: HandoverOptions = HandoverOptions()
    tokens: tuple[AccessToken, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    running_per_token: int | None = None
    queued_per_token: int | None = None
    min_priority: int | None = None
    ttft_objective: float | None = None

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
        for name in ("requests_per_minute", "tokens_per_minute"):
            if (limit := getattr(self, name)) is not None and limit < 1:
                raise RequestError(f"{name} is {limit}; give at least 1, or leave it out for no limit", field=name)
        # Limits that make no sense are refused by it.
        self.quota_of("")
        check_number("ttft_objective", self.ttft_objective, 0, kind=float, none="for none")
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

    def quota_of(self, token: str) -> Quota:
        """The limits of a token, by its name; "" for requests without one, which have those by the minute together.

        Of several clients none holds the others back, unless somebody who serves them says so.
        """
        least = self.min_priority
        if least is None and token and self.tokens:
            least = 0
        default = Quota(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_running=self.running_per_token,
            max_queued=self.queued_per_token,
            min_priority=least,
        )
        return next((one.quota.over(default) for one in self.tokens if one.name == token), default)

    @property
    def listens_everywhere(self) -> bool:
        """Whether TCP listens on every address of the machine."""
        return self.host in ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
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

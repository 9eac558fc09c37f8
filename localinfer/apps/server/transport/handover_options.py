"""What a server does of the two halves of a text, prefill and decode, and who does the other."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from localinfer.errors import RequestError

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = get_args(Role)

DEFAULT_THRESHOLD = 256
"""Tokens from which on a prompt is handed over: 0.3 to 0.7 s of one core for 135M to 0.5B weights. An estimate."""
DEFAULT_DEADLINE_SECONDS = 120.0

_UNIX = "unix:"
_HTTP = re.compile(r"http://[^/?#@]+/?")


@dataclass(frozen=True)
class PrefillAddress:
    """Where a prefill server listens: host and port by TCP, or the path of a Unix socket.

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
class HandoverOptions:
    """The role of a server; checked when it is made.

    role: prefill: computes prompts for others, and generates no text; decode: generates texts, whose long prompts the
    `servers` compute; both: does all itself. threshold: tokens of a prompt that are not cached anywhere from which on
    it is handed over. deadline_seconds: after which a prompt is computed here instead. token: shown to the servers.
    Raises: RequestError.
    """

    role: Role = "both"
    servers: tuple[PrefillAddress, ...] = ()
    threshold: int = DEFAULT_THRESHOLD
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
    token: str | None = field(default=None, repr=False)

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

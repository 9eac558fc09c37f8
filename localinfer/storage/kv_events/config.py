"""Where KV cache events are published, and how: the options, in vLLM's words, and what is refused of them."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from localinfer.arguments import shown
from localinfer.errors import RequestError

Encoding = Literal["map", "array"]
_TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:/@]+):(?P<port>\*|\d{1,5})")
_IPC = "ipc://"
_MOST_STEPS = 10_000_000


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Options of publishing KV cache events; checked when it is made. Raises: RequestError."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """Address of the ZMQ PUB socket, tcp://HOST:PORT or ipc://PATH; port * lets the system choose. Events hold the
    token ids of every prompt and reply, and a program that can connect reads them without a token."""
    replay_endpoint: str | None = None
    """Address of a ROUTER socket that sends past batches again; None: nothing is kept, and there is none."""
    topic: str = ""
    """Of every message, by which subscribers choose; llm-d wants kv@POD@MODEL."""
    buffer_steps: int = 10_000
    """Past batches that are kept for the replay endpoint."""
    hwm: int = 100_000
    """ZMQ's high-water mark: batches that wait for a slow subscriber, before it misses some."""
    encoding: Encoding = "map"
    """Of an event: "map" is that of vLLM 0.24 and later, "array" that of vLLM up to 0.23. A batch is an array."""
    connects: bool = False
    """Whether to connect `endpoint` to a subscriber that listens there, instead of listening; the replay endpoint
    listens."""
    allows_remote: bool = False
    """Whether to listen also where other machines can connect."""

    def __post_init__(self) -> None:
        self._check_endpoint("endpoint", self.endpoint, listens=not self.connects)
        if self.replay_endpoint is not None:
            self._check_endpoint("replay_endpoint", self.replay_endpoint, listens=True)
            if self.replay_endpoint == self.endpoint and not self.endpoint.endswith(":*"):
                raise RequestError(
                    f"events and their replay are both at {self.endpoint}; give the replay another port",
                    field="replay_endpoint",
                )
        if not isinstance(self.topic, str):
            raise RequestError(f"topic is {shown(self.topic)}; give a text, empty for none", field="topic")
        for name, least in (("buffer_steps", 1), ("hwm", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= _MOST_STEPS:
                reason = f"{name} is {shown(value)}; give a number of batches from {least} to {_MOST_STEPS:,}"
                raise RequestError(reason, field=name)
        if self.encoding not in get_args(Encoding):
            raise RequestError(f"encoding is {shown(self.encoding)}; give 'map' or 'array'", field="encoding")

    def _check_endpoint(self, name: str, endpoint: object, *, listens: bool) -> None:
        """Raise RequestError for what is no address, or one that others can reach and that was not opened to them."""
        if isinstance(endpoint, str) and endpoint.startswith(_IPC) and len(endpoint) > len(_IPC):
            return
        found = _TCP.fullmatch(endpoint) if isinstance(endpoint, str) else None
        if found is None or (found["port"] != "*" and int(found["port"]) > 65535):
            raise RequestError(
                f"{name} is {shown(endpoint)}; give an address of ZMQ such as tcp://127.0.0.1:5557 or ipc:///run/kv",
                field=name,
            )
        if not listens and "*" in (found["host"], found["port"]):
            raise RequestError(f"{name} is {endpoint}; to connect, give the subscriber's host and port", field=name)
        if listens and not self.allows_remote and not _is_loopback(found["host"]):
            raise RequestError(
                f"{endpoint} can be reached from other machines, and the events hold the tokens of every prompt and "
                "reply; listen on 127.0.0.1, or open it on purpose with allows_remote",
                field=name,
            )


def config_of(endpoint: str, **options: Any) -> KVEventsConfig:
    """The options with an endpoint that is called kv_events where it is given. Raises: RequestError."""
    try:
        return KVEventsConfig(endpoint=endpoint, **options)
    except RequestError as error:
        if error.field != "endpoint":
            raise
        raise RequestError(f"kv_events: {error}", field="kv_events") from None


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        # A name, an interface, or every address.
        return False

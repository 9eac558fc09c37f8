"""KV cache events on ZMQ sockets: the options, in vLLM's words, and the publisher with threads of its own.

A step puts what happened into a queue, which takes under a microsecond and never waits; one thread makes batches of it
and sends them, another answers requests to send batches again. PUB sockets drop what a slow subscriber does not take:
it sees that numbers are missing, and asks the replay endpoint for them.

A batch is [timestamp, events, data parallel rank] in MessagePack. An event is a map with its name as `type`, as of vLLM
0.24, or before that an array of its name and its values in order, without those at its end that say nothing.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from localinfer.arguments import shown
from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.errors import ClosedError, RequestError
from localinfer.system.extras import require
from localinfer.types import Closing

if TYPE_CHECKING:
    import zmq

    from localinfer.types import TokenIds


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
    """True: connect `endpoint` to a subscriber that listens there, instead of listening; the replay endpoint
    listens."""
    allows_remote: bool = False
    """True: listen also on addresses that other machines reach."""

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
    """Return True if only this machine can connect to an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        # A name, an interface, or every address.
        return False


logger = logging.getLogger(__name__)

_LINGER_MILLISECONDS = 500
"""Time for the last batches to be sent, after the end."""
_MOST_EVENTS = 1000
"""Of one batch."""
_MOST_REQUEST_BYTES = 1024


class KVEventPublisher(Closing):
    """Sockets that KV cache events are published on, those of one model at a time.

    endpoint, replay_endpoint: where they listen, with the ports that the system chose. Not usable in a forked child.
    Raises: MissingPackageError; RequestError if an address is not ours or taken.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        require("events", "publishing KV cache events")
        import zmq

        self.config = config
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()
        self._current: CacheEvents | None = None
        self._process = os.getpid()
        self._is_closed = False
        self._context = zmq.Context()
        self._stop_sender: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        try:
            publishing = self._socket(zmq.PUB, config.endpoint, hwm=config.hwm, connects=config.connects)
            self.endpoint: str = publishing.getsockopt_string(zmq.LAST_ENDPOINT)
            threads = [self._thread(self._publish, publishing, name="localinfer-kv-events")]
            if config.replay_endpoint is not None:
                # A whole replay waits for one client; messages that it does not take after that are dropped.
                replaying = self._socket(zmq.ROUTER, config.replay_endpoint, hwm=config.buffer_steps + 1)
                self.replay_endpoint = replaying.getsockopt_string(zmq.LAST_ENDPOINT)
                stop_address = f"inproc://{id(self)}"
                stop_receiver: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
                stop_receiver.bind(stop_address)
                self._stop_sender = self._context.socket(zmq.PAIR)
                self._stop_sender.connect(stop_address)
                threads.append(self._thread(self._replay, replaying, stop_receiver, name="localinfer-kv-replay"))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._threads = threads
        for thread in threads:
            thread.start()

    def attach(self, *, closes: bool = False) -> CacheEvents:
        """The observer of a cache, whose events are published until it ends or another is attached.

        The blocks of a former cache are reported as cleared first. closes: this publisher ends with that cache.
        Raises: ClosedError.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the publisher of KV events was closed; make another")
            on_close = (lambda _: self.close()) if closes else self._detach
            former, self._current = self._current, CacheEvents(self._queue.put, on_close)
            if former is not None:
                former.is_muted = True
                self._queue.put(AllBlocksCleared())
                logger.warning("KV events tell of the model that was loaded last, and no longer of the one before")
            return self._current

    @property
    def places(self) -> str:
        """Its addresses, in words."""
        return self.endpoint + (f", replayed at {self.replay_endpoint}" if self.replay_endpoint else "")

    def close(self) -> None:
        """Send the rest, and close the sockets; may be called again. A forked child does nothing."""
        if self._is_closed or os.getpid() != self._process:
            return
        with self._lock:
            self._is_closed = True
            if self._current is not None:
                self._current.is_muted = True
        self._queue.put(None)
        if self._stop_sender is not None:
            self._stop_sender.send(b"")
            self._stop_sender.close()
        for thread in self._threads:
            thread.join()
        self._context.term()

    def _detach(self, events: CacheEvents) -> None:
        with self._lock:
            events.is_muted = True
            if self._current is events:
                self._current = None

    @staticmethod
    def _thread(work: Callable[..., None], *sockets: zmq.Socket[bytes], name: str) -> threading.Thread:
        return threading.Thread(target=work, args=sockets, name=name, daemon=True)

    def _socket(self, kind: int, endpoint: str, *, hwm: int, connects: bool = False) -> zmq.Socket[bytes]:
        import zmq

        opened = self._context.socket(kind)
        opened.linger = _LINGER_MILLISECONDS
        opened.sndhwm = hwm
        opened.maxmsgsize = _MOST_REQUEST_BYTES
        opened.ipv6 = "[" in endpoint
        try:
            if connects:
                opened.connect(endpoint)
            else:
                opened.bind(endpoint)
                _make_private(endpoint)
        except (zmq.ZMQError, OSError) as error:
            raise RequestError(
                f"KV events cannot be published at {endpoint}: {error.strerror}; give another address with kv_events"
            ) from None
        return opened

    def _publish(self, socket: zmq.Socket[bytes]) -> None:
        """Send what is in the queue, as few batches as it can be, until its end."""
        number, is_over = 0, False
        keeps = self.config.replay_endpoint is not None
        topic = self.config.topic.encode()
        while not is_over:
            events = [self._queue.get()]
            while events[-1] is not None and len(events) < _MOST_EVENTS:
                try:
                    events.append(self._queue.get_nowait())
                except Empty:
                    break
            is_over = events[-1] is None
            batch = [event for event in events if event is not None]
            if batch:
                payload = encode_batch(time.time(), batch, self.config.encoding)
                if keeps:
                    # Kept before it is sent: a subscriber that misses it may ask for it at once.
                    self._past.append((sequence_bytes(number), payload))
                socket.send_multipart((topic, sequence_bytes(number), payload))
                number += 1
        socket.close()

    def _replay(self, socket: zmq.Socket[bytes], stop: zmq.Socket[bytes]) -> None:
        """Answer each request, the number of a batch, with that one and all after it, and a last message."""
        import zmq

        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        topic = self.config.topic.encode()
        while stop not in (ready := dict(poller.poll())):
            if socket not in ready:
                continue
            request = socket.recv_multipart()
            # The client's identity, an empty part, and the number.
            if len(request) != 3 or request[1] or len(request[2]) != 8:
                logger.warning("a request to replay KV events was no number of 8 bytes after an empty part")
                continue
            for number, payload in self._past.copy():
                if number >= request[2]:
                    socket.send_multipart((request[0], b"", topic, number, payload))
            socket.send_multipart((request[0], b"", b"", END_OF_REPLAY, b""))
        socket.close()
        stop.close()


class CacheEvents:
    """The observer of one cache (`cache.block_hashes.CacheObserver`). is_muted: its events are not published."""

    def __init__(self, put: Callable[[Event], object], on_close: Callable[[CacheEvents], object]) -> None:
        self._put = put
        self._on_close = on_close
        self.is_muted = False

    def stored(self, block_hashes: Sequence[int], parent_hash: int | None, token_ids: TokenIds, salt: bytes) -> None:
        """Publish BlockStored."""
        if not self.is_muted:
            self._put(BlockStored(block_hashes, parent_hash, token_ids, salt))

    def removed(self, block_hashes: Sequence[int]) -> None:
        """Publish BlockRemoved."""
        if not self.is_muted:
            self._put(BlockRemoved(block_hashes))

    def cleared(self) -> None:
        """Publish AllBlocksCleared."""
        if not self.is_muted:
            self._put(AllBlocksCleared())

    def close(self) -> None:
        """Free the publisher for another cache."""
        self._on_close(self)


def observer_of(kv_events: str | KVEventsConfig | KVEventPublisher | None) -> CacheEvents | None:
    """The observer of a cache for the option `kv_events` of `localinfer.load`; a text is an endpoint.

    Raises: RequestError, MissingPackageError.
    """
    if kv_events is None:
        return None
    if isinstance(kv_events, KVEventPublisher):
        return kv_events.attach()
    config = config_of(kv_events) if isinstance(kv_events, str) else kv_events
    if not isinstance(config, KVEventsConfig):
        raise RequestError(
            f"kv_events is {shown(kv_events)}; give an address such as tcp://127.0.0.1:5557, or a KVEventsConfig",
            field="kv_events",
        )
    return KVEventPublisher(config).attach(closes=True)


def _make_private(endpoint: str) -> None:
    """Let no other user connect to a socket that is a file."""
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and path != "*" and not path.startswith("@"):
        os.chmod(path, 0o600)


MEDIUM = "GPU"
"""Of blocks that the model computes from, in vLLM's words, whatever memory it is: routers prefer it to others."""
SALT_KEY = "dynamo-cache-salt:"
"""Before a text's salt, an extra key of its first block, by which routers that make hashes of their own from token ids
tell the text from others. Dynamo knows a salt by this word; llm-d counts any key as something that the block holds."""
_DATA_PARALLEL_RANK = 0
_GROUP = 0
_KIND = "full_attention"
"""Pages hold all layers together, so they are one group of blocks; routers count those of this kind."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class BlockStored(NamedTuple):
    """Blocks that follow each other are in memory, the first after `parent_block_hash`, None where a text begins."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: TokenIds
    salt: bytes = NO_SALT

    def fields(self) -> dict[str, object]:
        """The members in vLLM's order."""
        extra_keys = None
        if self.salt and self.parent_block_hash is None:
            extra_keys = [[SALT_KEY + self.salt.hex()], *[None] * (len(self.block_hashes) - 1)]
        return {
            "block_hashes": self.block_hashes,
            "parent_block_hash": self.parent_block_hash,
            "token_ids": self.token_ids.tolist(),
            "block_size": self.token_ids.size // len(self.block_hashes),
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
            "extra_keys": extra_keys,
            "group_idx": _GROUP,
            "kv_cache_spec_kind": _KIND,
        }


class BlockRemoved(NamedTuple):
    """Blocks are no longer in memory."""

    block_hashes: Sequence[int]

    def fields(self) -> dict[str, object]:
        """The members in vLLM's order."""
        return {"block_hashes": self.block_hashes, "medium": MEDIUM, "group_idx": _GROUP}


class AllBlocksCleared(NamedTuple):
    """There are no blocks any more."""

    def fields(self) -> Mapping[str, object]:
        """None."""
        return {}


Event = BlockStored | BlockRemoved | AllBlocksCleared


def encode_batch(timestamp: float, events: Sequence[Event], encoding: Encoding = "map") -> bytes:
    """The payload of a message; timestamp: seconds since 1970."""
    import msgspec

    written = [_as_map(event) if encoding == "map" else _as_array(event) for event in events]
    return msgspec.msgpack.encode([timestamp, written, _DATA_PARALLEL_RANK])


def sequence_bytes(number: int) -> bytes:
    """The second part of a message: the batch's number, from 0 on."""
    return number.to_bytes(8, "big")


def _as_map(event: Event) -> dict[str, object]:
    fields = {name: value for name, value in event.fields().items() if name != "extra_keys" or value is not None}
    return {"type": type(event).__name__, **fields}


def _as_array(event: Event) -> list[object]:
    return [type(event).__name__, *event.fields().values()]

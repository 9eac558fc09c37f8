"""KV transfer: prompts that a prefill server computes, read from the folder that both servers share."""

import http.client
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from localinfer.apps.server.operation.observation import Metrics
from localinfer.apps.server.transport.settings import KVTransferOptions, PrefillAddress
from localinfer.errors import ClosedError, LocalinferError

if TYPE_CHECKING:
    from localinfer.engine.request import Request
    from localinfer.generation.stream import TextStream
    from localinfer.llm import LLM


ROUTE = "/prefill"
CONNECT_SECONDS = 2.0
"""For a server to take a prompt on."""
SILENT_SECONDS = 5.0
"""A server that is silent for so long has gone: it reports its progress four times a second."""


class PrefillFailed(Exception):
    """A prefill server failed at a prompt; the text says why, and names no part of the prompt."""


class PrefillCancelled(Exception):
    """No request waits for the prompt any more."""


@dataclass(frozen=True)
class PrefillAnswer:
    """The outcome of a prompt on a prefill server."""

    stored_tokens: int
    """Leading ids that it wrote."""
    cached_tokens: int
    """Leading ids that it knew before."""
    problem: str | None = None
    """Reason why not all are written, None if they are."""
    has_failed: bool = False
    """True if it cannot write at all, and not only this prompt."""


class PrefillServer(Protocol):
    """A server that computes prompts, one or several at a time. name: as it is logged."""

    @property
    def name(self) -> str: ...

    def ask(self, body: bytes, *, deadline: float, is_cancelled: Callable[[], bool]) -> PrefillAnswer:
        """Have a prompt computed and written, and wait for the end; blocks the thread. Leaving early stops the work.

        body: of the route. deadline: on the monotonic clock. is_cancelled: asked four times a second at least.
        Raises: PrefillFailed, PrefillCancelled.
        """
        ...


def read_line(line: bytes) -> PrefillAnswer | None:
    """Parse a line of the route's answer: the outcome, or None for a report of progress. Raises: PrefillFailed."""
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise TypeError
        if "error" in found:
            raise PrefillFailed(_message(found))
        if "stored_tokens" not in found:
            return None
        problem = found.get("problem")
        return PrefillAnswer(
            int(found["stored_tokens"]), int(found["cached_tokens"]), problem, bool(found.get("has_failed", problem))
        )
    except (ValueError, TypeError, KeyError):
        raise PrefillFailed("its answer is none of a prefill server") from None


def refusal(status: int, content: bytes) -> PrefillFailed:
    """Reason of a server's refusal, in its own words."""
    try:
        return PrefillFailed(_message(json.loads(content)))
    except (ValueError, TypeError, KeyError):
        return PrefillFailed(f"it answers with status {status}; is it a server of --role prefill?")


def silence(deadline: float, now: float) -> PrefillFailed:
    """Reason to wait no longer, at a time."""
    return PrefillFailed("it is slower than the deadline" if now >= deadline else "it does not answer")


def _message(value: dict[str, Any]) -> str:
    return " ".join(str(value["error"]["message"]).split())[:500]


_MOST_LINE_BYTES = 1 << 16
_LOOK_SECONDS = 0.25
"""Between two looks at whether a client still waits."""


@dataclass(frozen=True)
class HttpPrefillServer:
    """A server of `--role prefill`. token: shown to it."""

    address: PrefillAddress
    token: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Its address."""
        return self.address.name

    def ask(self, body: bytes, *, deadline: float, is_cancelled: Callable[[], bool]) -> PrefillAnswer:
        """As of `PrefillServer`."""
        address = self.address
        connection = _UnixConnection(address) if address.path is not None else _connection(address)
        headers = {"content-type": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        sock: socket.socket | None = None
        try:
            connection.connect()
            sock = connection.sock
            connection.sock = cast(socket.socket, _BoundedSocket(sock, deadline, is_cancelled))
            connection.request("POST", ROUTE, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise refusal(response.status, response.read(_MOST_LINE_BYTES))
            while True:
                if (answer := read_line(_line(response))) is not None:
                    return answer
        except TimeoutError:
            raise silence(deadline, time.monotonic()) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PrefillFailed(f"it cannot be reached, or went away: {error or type(error).__name__}") from None
        finally:
            connection.close()
            if sock is not None:
                sock.close()


def http_servers(options: KVTransferOptions) -> tuple[HttpPrefillServer, ...]:
    """Prefill servers of a decode server's options."""
    return tuple(HttpPrefillServer(address, options.token) for address in options.servers)


def _connection(address: PrefillAddress) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(address.host, address.port, timeout=CONNECT_SECONDS)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, address: PrefillAddress) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = str(address.path)

    def connect(self) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("this system has no Unix sockets")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_SECONDS)
        self.sock.connect(self._path)


class _BoundedSocket(io.RawIOBase):
    """A connected socket for `http.client`, which gives it up where an answer says `Connection: close`; this one is
    closed by `HttpPrefillServer.ask`.

    Raises wherever it reads or sends: TimeoutError after the deadline or a long silence, PrefillCancelled.
    """

    def __init__(self, sock: socket.socket, deadline: float, is_cancelled: Callable[[], bool]) -> None:
        self._socket = sock
        self._deadline = deadline
        self._is_cancelled = is_cancelled

    def makefile(self, *_args: Any, **_options: Any) -> io.BufferedReader:
        """Stream that the answer is read from."""
        return io.BufferedReader(self)

    def close(self) -> None:
        """Nothing: another one reads on."""

    def sendall(self, data: bytes) -> None:
        """Send all of some bytes."""
        left = memoryview(data)
        while left:
            left = left[self._bounded(partial(self._socket.send, left)) :]

    def readable(self) -> bool:
        """It is read only by `readinto`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for some bytes; 0 at their end."""
        return self._bounded(partial(self._socket.recv_into, buffer))

    def _bounded(self, work: Callable[[], int]) -> int:
        latest = min(self._deadline, time.monotonic() + SILENT_SECONDS)
        while True:
            if self._is_cancelled():
                raise PrefillCancelled
            left = latest - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(min(left, _LOOK_SECONDS))
            try:
                return work()
            except TimeoutError:
                continue


def _line(response: http.client.HTTPResponse) -> bytes:
    line = response.readline(_MOST_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise PrefillFailed("it went away before it was done")
    return line


logger = logging.getLogger("localinfer.server.kv_transfer")

_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 2.0, 60.0
"""For which a server that failed is not asked: longer each time that it fails again."""


@dataclass(eq=False)
class _Server:
    """State of a prefill server."""

    asked: PrefillServer
    num_asked: int = 0
    """Prompts that it computes for this process now."""
    last_asked: int = 0
    """Number of the last prompt that it was sent, of all servers' together."""
    paused_until: float = 0.0
    """On the monotonic clock, after a failure."""
    pause_seconds: float = _LEAST_PAUSE_SECONDS
    """Length of the next pause."""
    failure: str | None = None
    """The last one, None once it has answered."""


class KVTransferClient:
    """Has prompts computed by prefill servers. Any thread may call; each call blocks its thread.

    options: which prompts, and how long one is waited for. servers: those to ask.
    """

    def __init__(self, options: KVTransferOptions, metrics: Metrics, servers: Sequence[PrefillServer]) -> None:
        self._options = options
        self._metrics = metrics
        self._lock = threading.Lock()
        self._servers = [_Server(server) for server in servers]
        self._num_asked = 0

    def prepare(self, llm: "LLM", model_id: str, stream: "TextStream", is_cancelled: Callable[[], bool]) -> None:
        """See to it that little of a stream's prompt is left to compute, before its first event; log what fails."""
        began = time.monotonic()
        try:
            prefilled = self._prepare(llm, model_id, stream.request, is_cancelled)
        except (PrefillCancelled, ClosedError):
            return
        except LocalinferError as error:
            logger.warning("prompts are not handed over: %s", error)
            return
        except Exception:
            # A text is made all the same, and what is wrong here can be found.
            logger.exception("a prompt was not handed over, and is computed here")
            return
        stream.note_prefilled(prefilled, time.monotonic() - began)

    def _prepare(self, llm: "LLM", model_id: str, request: "Request", is_cancelled: Callable[[], bool]) -> int:
        """Return how many ids another process computed for this text."""
        token_ids, salt = request.head, request.hints.salt
        if request.is_over or token_ids.size < self._options.threshold:
            return 0
        in_memory = llm.cached_tokens(token_ids, salt)
        if token_ids.size - in_memory < self._options.threshold:
            return 0
        on_disk = llm.stored_tokens(token_ids, salt)
        known = max(in_memory, on_disk)
        is_asked = token_ids.size - known >= self._options.threshold
        if is_asked:
            known = max(known, self._ask(llm, model_id, request, is_cancelled))
            on_disk = llm.stored_tokens(token_ids, salt)
        if on_disk <= in_memory:
            return 0
        found = llm.fetch_prompt(token_ids, salt)
        return max(0, found - known) if is_asked else 0

    def _ask(self, llm: "LLM", model_id: str, request: "Request", is_cancelled: Callable[[], bool]) -> int:
        """Ask one server after the other, until one has done it; return how many ids one of them knew before."""
        hints, token_ids = request.hints, request.head
        fingerprint = llm.handover_fingerprint()
        body = json.dumps(
            {
                "model": model_id,
                "token_ids": token_ids.tolist(),
                "salt": hints.salt.hex(),
                "system_tokens": hints.system_tokens,
                "branch_tokens": list(hints.branch_tokens),
                "fingerprint": dict(fingerprint.parts),
                "owner": str(request.owner) if isinstance(request.owner, str) else "",
            }
        ).encode()
        deadline, cached_tokens = time.monotonic() + self._options.deadline_seconds, 0
        while (server := self._take()) is not None:
            try:
                answer = _answer_of(server.asked, body, deadline, is_cancelled)
                cached_tokens = answer.cached_tokens
                self._check_stored(llm, request, answer)
            except PrefillFailed as error:
                self._note_failure(server, str(error))
                if time.monotonic() >= deadline:
                    break
            else:
                self._note_success(server)
                return cached_tokens
            finally:
                with self._lock:
                    server.num_asked -= 1
        self._metrics.handovers.labels("computed_here").inc()
        return cached_tokens

    def _check_stored(self, llm: "LLM", request: "Request", answer: PrefillAnswer) -> None:
        """Raise PrefillFailed unless all that a server says it wrote is where this process finds it.

        That it could not write all of a prompt is no failure of a server that can write.
        """
        if answer.has_failed:
            raise PrefillFailed(answer.problem or "it cannot write what it computes")
        if answer.problem is not None:
            logger.info("a prompt was handed over in part: %s", answer.problem)
        found = llm.stored_tokens(request.head, request.hints.salt)
        if found < answer.stored_tokens:
            raise PrefillFailed(
                f"of {answer.stored_tokens} tokens that it wrote, {found} are in {llm.handover_folder}; give both "
                "servers the same --disk-cache-folder, of a --disk-cache-size that holds their prompts (in Python "
                "disk_cache_folder and disk_cache)"
            )

    def _take(self) -> _Server | None:
        """The server with the fewest prompts, of those not paused; of several the one that was asked longest ago."""
        with self._lock:
            now = time.monotonic()
            ready = [server for server in self._servers if server.paused_until <= now]
            if not ready:
                return None
            server = min(ready, key=lambda one: (one.num_asked, one.last_asked))
            self._num_asked += 1
            server.num_asked += 1
            server.last_asked = self._num_asked
            return server

    def _note_failure(self, server: _Server, reason: str) -> None:
        """Leave a server alone for a while, and log that once per reason until it has answered again."""
        with self._lock:
            is_new = server.failure != reason
            server.failure = reason
            server.paused_until = time.monotonic() + server.pause_seconds
            server.pause_seconds = min(2 * server.pause_seconds, _MOST_PAUSE_SECONDS)
        self._metrics.handovers.labels("failed").inc()
        level = logging.WARNING if is_new else logging.INFO
        logger.log(level, "the prefill server %s: %s; prompts are computed here", server.asked.name, reason)

    def _note_success(self, server: _Server) -> None:
        with self._lock:
            was_failing, server.failure, server.pause_seconds = server.failure, None, _LEAST_PAUSE_SECONDS
        self._metrics.handovers.labels("handed_over").inc()
        if was_failing is not None:
            logger.warning("the prefill server %s computes prompts again", server.asked.name)


def _answer_of(server: PrefillServer, body: bytes, deadline: float, is_cancelled: Callable[[], bool]) -> PrefillAnswer:
    """Ask a server. Raises: PrefillFailed for whatever goes wrong, PrefillCancelled."""
    try:
        return server.ask(body, deadline=deadline, is_cancelled=is_cancelled)
    except (PrefillFailed, PrefillCancelled):
        raise
    except Exception as error:
        logger.exception("the prefill server %s could not be asked", server.name)
        raise PrefillFailed(f"it could not be asked: {type(error).__name__}") from error

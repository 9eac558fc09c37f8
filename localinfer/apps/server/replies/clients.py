"""Clients: the salt that keeps their texts apart, and the limits of each token on rates, running texts and priority.

Limits by the minute are buckets that refill all the time, as OpenAI's limits do. A request is counted at once, and
its tokens before anything of it is computed: those of its prompt, and as many as may be generated. What it did not use
comes back at its end. So requests that come at one time never take more than is there, with two exceptions, of which
there is one at a time for it leaves an empty bucket: a request that is larger than the limit takes a full bucket, and a
text without a maximum, which may fill the context, what is there beyond its prompt. What they use beside
that is owed, and waited for.
"""

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.types import Scope

from localinfer.apps.server.operation.observation import record_of
from localinfer.apps.server.transport.connection import TOKEN_IDENTITY
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.settings import Quota, ServerSettings
from localinfer.engine.admission import Owner

if TYPE_CHECKING:
    from localinfer.apps.server.replies.reply import Reply


_MINUTE = 60.0


@dataclass
class _Bucket:
    """A bucket of a limit per minute, which is also the most that it holds."""

    limit: int
    left: float
    updated: float

    def refill(self, now: float, limit: int) -> None:
        """Add what came since. limit: the present one."""
        if limit != self.limit:
            self.left += limit - self.limit
            self.limit = limit
        self.left = min(limit, self.left + (now - self.updated) * limit / _MINUTE)
        self.updated = now

    def seconds_until(self, amount: float) -> float:
        """Seconds until so much is there."""
        return max(0.0, amount - self.left) * _MINUTE / self.limit


class RateLimiter:
    """The limits of a server's settings, and of tokens that have their own; requests without one share those of "".

    settings: the present ones. clock: seconds that never go back. Any thread may call.
    """

    def __init__(self, settings: Callable[[], ServerSettings], clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._lock = threading.Lock()

    def admit(self, token: str) -> dict[str, str]:
        """Count a request, and return the headers with the rest of the limits. Raises: ApiError 429, with them."""
        with self._lock:
            buckets = self._present(token)
            waits = {kind: bucket.seconds_until(1.0) for kind, bucket in buckets.items()}
            kind = max(waits, key=lambda kind: waits[kind], default=None)
            if kind is not None and waits[kind] > 0:
                raise _refusal(buckets, kind, waits[kind])
            if "requests" in buckets:
                buckets["requests"].left -= 1.0
            return _headers(buckets)

    def headers(self, token: str) -> dict[str, str]:
        """Headers with the rest of a client's limits."""
        with self._lock:
            return _headers(self._present(token))

    def reserve(self, token: str, least: int, most: int) -> float:
        """Take tokens of the rest: `most` of them, or those there are from `least` on; return their number.

        Of a request that is larger than the limit no more is wanted than that. Raises: ApiError 429.
        """
        with self._lock:
            bucket = self._bucket(token, "tokens")
            if bucket is None:
                return 0.0
            wait = bucket.seconds_until(min(max(1, least), bucket.limit))
            if wait > 0:
                raise _refusal(self._present(token), "tokens", wait, least)
            taken = min(float(most), bucket.left)
            bucket.left -= taken
            return taken

    def charge(self, token: str, count: float) -> None:
        """Take so many tokens that were read and generated, whether they are there or not; below 0, give them back."""
        with self._lock:
            bucket = self._bucket(token, "tokens")
            if bucket is not None:
                bucket.left = min(bucket.left - count, bucket.limit)

    def _present(self, token: str) -> dict[str, _Bucket]:
        return {kind: bucket for kind in ("requests", "tokens") if (bucket := self._bucket(token, kind)) is not None}

    def _bucket(self, token: str, kind: str) -> _Bucket | None:
        quota = self._settings().quotas[token]
        limit = quota.requests_per_minute if kind == "requests" else quota.tokens_per_minute
        if limit is None:
            return None
        now = self._clock()
        bucket = self._buckets.setdefault((token, kind), _Bucket(limit, limit, now))
        bucket.refill(now, limit)
        return bucket


class Reservation:
    """The tokens that one request has taken from its client's limit. Any thread may reserve and settle."""

    def __init__(self, limiter: RateLimiter, token: str) -> None:
        self._limiter = limiter
        self._token = token
        self._taken = 0.0
        self._is_settled = False
        self._lock = threading.Lock()

    def reserve(self, least: int, most: int) -> None:
        """Take tokens, see `RateLimiter.reserve`; none once it is settled, for a client that has left meanwhile.

        Raises: ApiError 429.
        """
        with self._lock:
            if not self._is_settled:
                self._taken += self._limiter.reserve(self._token, least, most)

    def settle(self, used: int) -> None:
        """Give back what was not used, or take what was used beside it; at the end, and only once."""
        with self._lock:
            if not self._is_settled:
                self._is_settled = True
                self._limiter.charge(self._token, used - self._taken)


def _refusal(buckets: dict[str, _Bucket], kind: str, wait: float, wanted: int = 1) -> ApiError:
    seconds = math.ceil(wait)
    reason = f"the limit of {buckets[kind].limit:,} {kind} a minute is reached"
    if wanted > 1:
        reason = (
            f"this request may take {wanted:,} tokens, of {buckets[kind].limit:,} a minute, and "
            f"{max(0, math.floor(buckets[kind].left)):,} are left"
        )
    return ApiError(
        429,
        f"{reason}; try again in {seconds} seconds" + (", or lower max_tokens" if wanted > 1 else ""),
        code="rate_limit_exceeded",
        headers={**_headers(buckets), "retry-after": str(seconds)},
    )


def _headers(buckets: dict[str, _Bucket]) -> dict[str, str]:
    """OpenAI's headers: the limit, its rest, and the time until all of it is there again."""
    headers = {}
    for kind, bucket in buckets.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.left)))
        headers[f"x-ratelimit-reset-{kind}"] = _duration(bucket.seconds_until(bucket.limit))
    return headers


def _duration(seconds: float) -> str:
    """A time as in Go: 250ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(1e3 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"


def tenant_of(scope: Scope, settings: ServerSettings) -> str:
    """Owner of a request; "" where clients are not kept apart, and of what came through the Unix socket.

    Only the server's owner can open that, and may see and stop all that runs.
    """
    identity: str = scope["state"].get(TOKEN_IDENTITY, "")
    return identity if settings.isolates_cache else ""


def cache_salt_of(tenant: str, wanted: str | None) -> str | None:
    """The option `cache_salt` of a request. wanted: its member of that name, which keeps texts of one client apart."""
    return None if not tenant and wanted is None else json.dumps([tenant, wanted])


def salt_options(request: Request) -> dict[str, Any]:
    """The engine's options that keep the texts of a request apart, whose body has been read; none if nothing does."""
    cache_salt = record_of(request.scope).cache_salt
    return {} if cache_salt is None else {"cache_salt": cache_salt}


def digest_of(tenant: str, name: str = "") -> str:
    """Identifier of a client and of a name that it gave, where others could read it: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(["localinfer tenant", tenant, name]).encode()).hexdigest()[:32]


def may_see(tenant: str, other: str) -> bool:
    """Return whether a client may see what runs for another, and stop it."""
    return tenant in ("", other)


def may_see_reply(tenant: str, reply: "Reply | None") -> bool:
    """Return whether there is a reply that a client may see."""
    return reply is not None and may_see(tenant, reply.tenant)


TTFT_HEADER = "x-slo-ttft-ms"
"""Milliseconds in which a client wants its first token, as the gateways of llm-d and Kubernetes call it."""


class OwnedTexts(Protocol):
    """Texts of one request. token: the client's, by name; is_cancelled: nothing runs on."""

    @property
    def token(self) -> str: ...

    @property
    def num_texts(self) -> int: ...

    @property
    def is_cancelled(self) -> bool: ...


def ownership(request: Request, settings: ServerSettings) -> dict[str, Any]:
    """The engine's options that say whose a request is, when its first token is wanted, and how urgent it is if it
    does not say.

    The scheduler is fair among tokens; where there are none, among connections by TCP; by the Unix socket each request
    is on its own. Raises: ApiError for a header that is no time.
    """
    record, identity = record_of(request.scope), request.scope["state"].get(TOKEN_IDENTITY)
    quota = settings.quotas[record.token]
    if identity is None:
        options: dict[str, Any] = {"owner": str(request.client or request.state.request_id)}
    else:
        options = {"owner": Owner(identity, quota.max_running)}
    if record.priority is None and quota.min_priority is not None and quota.min_priority > 0:
        options["priority"] = quota.min_priority
    wanted = request.headers.get(TTFT_HEADER)
    objective = settings.ttft_objective if wanted is None else _seconds(wanted)
    return options if objective is None else {**options, "ttft_objective": objective}


def checked_priority(body: object, quota: Quota) -> int | None:
    """The priority that a request asks for, None if it does not say. Raises: ApiError for one that is too urgent."""
    asked = getattr(body, "priority", None)
    if asked is None:
        # Ollama's options are members of one.
        asked = getattr(getattr(body, "options", None), "priority", None)
    if not isinstance(asked, int):
        return None
    if quota.min_priority is not None and asked < quota.min_priority:
        raise ApiError(
            403,
            f"priority is {asked}, and the most urgent that this client may ask for is {quota.min_priority}; send that "
            "or a larger number",
            code="priority_not_allowed",
            param="priority",
        )
    return asked


def check_generations(running: int, count: int, most: int, *, is_first: bool) -> None:
    """Refuse so many texts more where others are generated or wait, and all of them are too many. Raises: ApiError.

    is_first: of a token that has none: it has a text whatever others have asked for, and there are as many tokens as
    the file has lines.
    """
    if running and running + count > most and not (is_first and count == 1):
        raise ApiError(
            429, f"{running} texts are being generated, of at most {most}; try again later", code="queue_full"
        )


def check_queue(token: str, count: int, replies: Collection[OwnedTexts], settings: ServerSettings) -> None:
    """Refuse so many texts more of a token than may run and wait. token: its name. Raises: ApiError."""
    quota = settings.quotas[token]
    if not token or quota.max_queued is None:
        return
    running = settings.num_slots if quota.max_running is None else quota.max_running
    present = sum(reply.num_texts for reply in replies if reply.token == token and not reply.is_cancelled)
    if present + count > running + quota.max_queued:
        raise ApiError(
            429,
            f"{present} texts of this token are generated or wait, and {count} more are asked for; {running} may be "
            f"generated and {quota.max_queued} wait at one time; try again later",
            code="queue_full",
        )


def _seconds(milliseconds: str) -> float:
    if not (milliseconds.isascii() and milliseconds.isdigit() and len(milliseconds) < 10 and int(milliseconds)):
        raise ApiError(
            400,
            f"the header {TTFT_HEADER} is {milliseconds!r:.80}; give whole milliseconds from 1 on, such as 500, or "
            "leave it out",
            param=TTFT_HEADER,
        )
    return int(milliseconds) / 1e3

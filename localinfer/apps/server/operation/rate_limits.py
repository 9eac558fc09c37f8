"""Limits of each token by the minute: buckets that refill all the time, as OpenAI's limits do.

A request takes its place at once, and its tokens before anything of it is computed: those of its prompt, and as many as
may be generated. What it did not use comes back at its end. So requests that come at one time never take more than is
there, with two exceptions, of which there is one at a time for it leaves an empty bucket: a request that is larger than
the limit takes a full bucket, and a text without a maximum, which may go on to the end of the context, what is there
beyond its prompt. What they use beside that is owed, and waited for.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.settings import ServerSettings

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
        """Take a request's place, and return the headers that tell what is left. Raises: ApiError 429, with them."""
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
        """Headers that tell a client what is left."""
        with self._lock:
            return _headers(self._present(token))

    def limits_tokens(self, token: str) -> bool:
        """Return whether a token has a limit of tokens."""
        return self._settings().quota_of(token).tokens_per_minute is not None

    def reserve(self, token: str, least: int, most: int) -> float:
        """Take tokens of what is left: `most` of them, or what is there from `least` on; return how many that were.

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
        quota = self._settings().quota_of(token)
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
    """OpenAI's headers: the limit, what is left, and how long it takes until all of it is there again."""
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

"""How much each token may ask for in a minute: buckets that refill all the time, as OpenAI's limits do.

A request takes its place at once. Its tokens are taken when it has ended, since nobody knows before how many there will
be; a bucket may owe some then, and the next request waits until it has been refilled.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from localinfer.server.transport.http import ApiError
from localinfer.server.transport.settings import ServerSettings

_MINUTE = 60.0


@dataclass
class _Bucket:
    """What is left of a limit per minute, which is also the most that it holds."""

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
        """How long it takes until so much is there."""
        return max(0.0, amount - self.left) * _MINUTE / self.limit


class RateLimiter:
    """The limits of a server's settings, and of tokens that have their own; requests without one share those of "".

    settings: the present ones. clock: seconds that never go back. Used on one event loop.
    """

    def __init__(self, settings: Callable[[], ServerSettings], clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def admit(self, token: str) -> dict[str, str]:
        """Take a request's place, and return the headers that tell what is left. Raises: ApiError 429, with them."""
        buckets = {kind: bucket for kind in ("requests", "tokens") if (bucket := self._bucket(token, kind)) is not None}
        waits = {kind: bucket.seconds_until(1.0) for kind, bucket in buckets.items()}
        kind = max(waits, key=lambda kind: waits[kind], default=None)
        if kind is not None and waits[kind] > 0:
            seconds = math.ceil(waits[kind])
            raise ApiError(
                429,
                f"the limit of {buckets[kind].limit:,} {kind} a minute is reached; try again in {seconds} seconds",
                code="rate_limit_exceeded",
                headers={**_headers(buckets), "retry-after": str(seconds)},
            )
        if "requests" in buckets:
            buckets["requests"].left -= 1.0
        return _headers(buckets)

    def charge(self, token: str, count: int) -> None:
        """Take so many tokens, which were read and generated."""
        bucket = self._bucket(token, "tokens")
        if bucket is not None:
            bucket.left -= count

    def _bucket(self, token: str, kind: str) -> _Bucket | None:
        quota = self._settings().quota_of(token)
        limit = quota.requests_per_minute if kind == "requests" else quota.tokens_per_minute
        if limit is None:
            return None
        now = self._clock()
        bucket = self._buckets.setdefault((token, kind), _Bucket(limit, limit, now))
        bucket.refill(now, limit)
        return bucket


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

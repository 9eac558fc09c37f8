"""How far the prompt of a reply was read, for streams that ask for `return_progress`."""

from collections.abc import Callable, Iterator
from typing import Any

from localinfer.apps.server.replies.reply import Reply


class PromptProgress:
    """Reports under llama-server's names: a first one before anything was read, a last one when all was.

    num_ahead: how many replies come before one, where that is told too.
    """

    def __init__(self, reply: Reply, num_ahead: Callable[[Reply], int] | None = None) -> None:
        self._reply = reply
        self._num_ahead = num_ahead
        self._processed: int | None = None
        self._is_done = False

    def reports(self, *, is_read: bool) -> Iterator[dict[str, Any]]:
        """What there is to report now, nothing if that was said. is_read: the first token is there."""
        if self._is_done:
            return
        found = self._reply.progress()
        if self._num_ahead is not None:
            found["position"] = self._num_ahead(self._reply)
        self._is_done = is_read
        if is_read:
            found["processed"] = found["total"]
        if self._processed is None:
            self._processed = found["cache"]
            yield {**found, "processed": found["cache"], "time_ms": 0.0}
        if found["processed"] > self._processed:
            self._processed = found["processed"]
            yield found


def progress_timings(report: dict[str, Any]) -> dict[str, Any]:
    """The `timings` of a reply of which no token was generated yet."""
    computed, milliseconds = report["processed"] - report["cache"], report["time_ms"]
    return {
        "cache_n": report["cache"],
        "prompt_n": computed,
        "prompt_ms": milliseconds,
        "prompt_per_token_ms": milliseconds / computed if computed else 0.0,
        "prompt_per_second": 1e3 * computed / milliseconds if milliseconds else 0.0,
        "predicted_n": 0,
        "predicted_ms": 0.0,
        "predicted_per_token_ms": 0.0,
        "predicted_per_second": 0.0,
    }

"""What is noted of every request: what it was, how it ended and what it cost, and none of its text.

The record lies in the request's state from its first byte to its last. Whoever answers fills it; those who observe read
it at the end: the log, the traces, the limits of rates.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import Scope

from localinfer.apps.server.transport.http import ApiError

if TYPE_CHECKING:
    from localinfer.generation.completion import Stats

_KEY = "record"
_NUMBERS = (
    "max_tokens max_completion_tokens max_output_tokens n temperature top_p top_k seed frequency_penalty"
    " presence_penalty"
).split()
"""Members of requests, of every API, that are no text."""
_MOST_TOKENS = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class ReplyFigures(Protocol):
    """What is read of a reply.

    finish_reasons, stats: one per text, None until it has ended. failure: what failed. is_cancelled: nothing runs on.
    """

    id: str
    model_id: str
    finish_reasons: "list[str | None]"
    stats: "list[Stats | None]"
    failure: BaseException | None
    is_cancelled: bool

    def num_used(self) -> tuple[int, int]:
        """Tokens of the prompts, each once, and tokens generated so far."""


@dataclass
class RequestRecord:
    """One request.

    id: the one that its client was told. route: the one that answered, without `/v1`; None where none did. token: the
    name of the token that was shown, "" for none. began: in seconds since 1970; seconds: to the last byte. model,
    numbers: what it asked for. reply: what was generated for it, or input_tokens: what was read by a request without
    one. tenant: whom it belongs to, where clients are kept apart; cache_salt: the option of that name. priority: what
    it asked for, None if it did not say. error: the code
    or the class of what failed. headers: of the request, of which only the parent of a trace is read. notices: what its
    answer says of members that were not read.
    """

    id: str = ""
    method: str = ""
    route: str | None = None
    status: int = 0
    token: str = ""
    began: float = field(default_factory=time.time)
    seconds: float = 0.0
    model: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    reply: ReplyFigures | None = None
    input_tokens: int = 0
    tenant: str = field(default="", repr=False)
    cache_salt: str | None = field(default=None, repr=False)
    priority: int | None = None
    error: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    notices: list[str] = field(default_factory=list, repr=False)

    @property
    def uses_model(self) -> bool:
        """Whether a model worked for it."""
        return self.reply is not None or self.input_tokens > 0

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that it allowed, None if it did not say."""
        found = next((self.numbers[name] for name in _MOST_TOKENS if name in self.numbers), None)
        return None if found is None else int(found)

    def num_tokens(self) -> tuple[int, int]:
        """Tokens that were read for it, and tokens that were generated."""
        return (self.input_tokens, 0) if self.reply is None else self.reply.num_used()

    def failure(self) -> str | None:
        """The code or class of what failed, also in a stream whose status says that all is well."""
        if self.error is not None or self.reply is None or self.reply.failure is None:
            return self.error
        return error_name(self.reply.failure)

    def take_body(self, body: object) -> None:
        """Note what a request asks for, of its body's record."""
        found = {name: getattr(body, name, None) for name in _NUMBERS}
        self.numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
        model = getattr(body, "model", None)
        self.model = model if isinstance(model, str) else None

    def facts(self) -> dict[str, Any]:
        """All of it by the names of a log, without what is unknown."""
        facts: dict[str, Any] = {
            "request_id": self.id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "seconds": round(self.seconds, 6),
            "token_name": self.token or None,
            "error": self.failure(),
        }
        if self.uses_model:
            facts["input_tokens"], facts["output_tokens"] = self.num_tokens()
        if self.reply is not None:
            facts |= {"reply_id": self.reply.id, "model": self.reply.model_id, **reply_facts(self.reply)}
        return {name: value for name, value in facts.items() if value is not None}


def reply_facts(reply: ReplyFigures) -> dict[str, Any]:
    """How the texts of a reply ended, and what the first one waited for."""
    without = "abort" if reply.is_cancelled else "running"
    facts: dict[str, Any] = {"finish_reasons": [reason or without for reason in reply.finish_reasons]}
    if (first := reply.stats[0]) is not None:
        facts["cached_tokens"] = sum(one.cached_tokens for one in reply.stats if one is not None)
        facts["time_to_first_token_seconds"] = round(first.time_to_first_token_seconds, 6)
        facts["queue_seconds"] = round(first.waited_seconds, 6)
    return facts


def error_name(error: BaseException) -> str:
    """What an error is, without its message: the code that a client reads, or the class."""
    return (error.code if isinstance(error, ApiError) else None) or type(error).__name__


def record_of(scope: Scope) -> RequestRecord:
    """The record of a request that is being answered."""
    state = scope.setdefault("state", {})
    record: RequestRecord = state.setdefault(_KEY, RequestRecord())
    return record


Observer = Callable[[RequestRecord], object]
"""Told of each request at its end, on the event loop; must not wait."""

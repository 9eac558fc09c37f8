"""Completions as records: what a request may hold, and the choices that answer it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta

from localinfer.server.replies.constraint_fields import ConstraintFields
from localinfer.server.replies.logprobs import LegacyLogprobs
from localinfer.server.replies.prompts import Prompts
from localinfer.server.replies.sampling_fields import Prediction, StreamOptions, TextCount
from localinfer.server.transport.errors import ApiError
from localinfer.server.transport.known_fields import COMPLETIONS

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.sampling.filters import TokenLogprobs
    from localinfer.stream import StreamEvent

_DEFAULT_TOKENS = 16
"""OpenAI's own default on this route."""


class CompletionRequest(ConstraintFields, kw_only=True):
    """The members of a completion request that are read.

    best_of: make so many texts and return the `n` of the largest mean log probability per token, best first.
    prompt_cache_key: names a place in an editor, say; a newer request with the same key ends the older one.
    """

    known_fields: ClassVar = COMPLETIONS

    prompt: Prompts
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: TextCount | None = None
    best_of: TextCount | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = _DEFAULT_TOKENS
    echo: bool | None = None
    suffix: str | None = None
    prediction: Prediction | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_cache_key: str | None = None

    @property
    def num_made(self) -> int:
        """Texts made per prompt."""
        return self.best_of or self.n or 1

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request. Raises: ApiError."""
        if self.best_of is not None and (self.best_of < (self.n or 1) or self.stream):
            raise ApiError(
                400,
                "best_of is smaller than n, or the reply is to be streamed; make at least n, and not as a stream",
                param="best_of",
            )
        options = {**self.options(), "max_tokens": self.max_tokens}
        constraint, logprobs = self.constraint(), self.logprobs
        if self.best_of is not None and logprobs is None:
            logprobs = 0
        if logprobs is not None:
            options["logprobs"] = logprobs
        if constraint is not None:
            options["constraint"] = constraint
        if self.prediction is not None:
            options["prediction"] = self.prediction.text()
        return options


class LegacyChoice:
    """One choice: its prompt first, where that is echoed, then its tokens as they come."""

    def __init__(
        self,
        body: CompletionRequest,
        tokenizer: "Tokenizer",
        prompt: str = "",
        prompt_ids: Sequence[int] = (),
        scores: "Sequence[TokenLogprobs | None]" = (),
    ) -> None:
        self.finish_reason: str | None = None
        self._texts = [prompt]
        self._sum = 0.0
        self._num_tokens = 0
        self._logprobs = None if body.logprobs is None else LegacyLogprobs(tokenizer)
        if self._logprobs is not None:
            self._logprobs.add_prompt(prompt_ids, scores)

    @property
    def mean_logprob(self) -> float:
        """Of the tokens that were generated."""
        return self._sum / max(1, self._num_tokens)

    def add(self, event: "StreamEvent") -> None:
        """Take the next token."""
        self._texts.append(event.text)
        if event.logprobs is not None:
            self._sum += event.logprobs.logprob
            self._num_tokens += 1
            if self._logprobs is not None:
                self._logprobs.add(event.token_id, event.logprobs)

    def part(self, index: int) -> dict[str, Any]:
        """What came since the last call, as a choice of a chunk."""
        text = "".join(self._texts)
        self._texts.clear()
        logprobs = None if self._logprobs is None else self._logprobs.take()
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason}

    def whole(self, index: int) -> dict[str, Any]:
        """All of it, as a choice of a whole reply."""
        return {**self.part(index), "finish_reason": self.finish_reason or "length"}

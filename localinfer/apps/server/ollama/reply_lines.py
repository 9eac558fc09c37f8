"""A reply as Ollama's lines of JSON: text as it comes, whole tool calls, and the figures on the last line."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from localinfer.apps.server.api.logprobs import chat_logprobs
from localinfer.apps.server.api.usage import timings
from localinfer.apps.server.api.writer import Delta, Event, ReplyWriter, deltas_of
from localinfer.apps.server.ollama.messages import written_call
from localinfer.apps.server.ollama.reply_fields import BegunRequest, ReplyFields
from localinfer.apps.server.ollama.wire import LineStream, line, nanoseconds
from localinfer.apps.server.replies.reply import Reply
from localinfer.apps.server.transport.http import OLLAMA, ApiError

if TYPE_CHECKING:
    from localinfer.generation.completion import Stats, StreamEvent


class OllamaLineWriter(ReplyWriter):
    """Lines: text and reasoning as they come, each tool call when it is whole, and the figures at the end.

    content: puts text, reasoning and calls under a route's names. context: gives what the last line has of the
    conversation.
    """

    stream = LineStream
    frame = staticmethod(line)

    def __init__(
        self,
        reply: Reply,
        begun: BegunRequest,
        body: ReplyFields,
        content: Callable[[str, str, list[Event]], Event],
        context: Callable[[], list[int]] | None = None,
    ) -> None:
        super().__init__(reply)
        self._begun = begun
        self._content = content
        self._context = context
        self._shows_logprobs = bool(body.logprobs)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Event] = []
        self._logprobs: list[Event] = []
        self._open: Delta | None = None
        self._arguments: list[str] = []
        self._last: Event = {}
        self._warnings: list[str] = []
        warning = None if body.options is None else body.options.context_warning(reply.llm.context_length)
        if warning is not None:
            self._warnings.append(warning)

    def add(self, index: int, token: "StreamEvent") -> Iterator[Event]:
        text, reasoning = "", ""
        calls: list[Event] = []
        for delta in deltas_of(token):
            if delta.kind == "call":
                if delta.call_id is not None:
                    text += self._close_call(calls)
                    self._open = delta
                self._arguments.append(delta.text)
            elif delta.kind == "text":
                text += delta.text
            else:
                reasoning += delta.text
        logprobs = self._logprobs_of(token)
        if text or reasoning or calls or logprobs:
            yield self._line(text, reasoning, calls, logprobs)

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterator[Event]:
        calls: list[Event] = []
        text = self._close_call(calls)
        if text or calls:
            yield self._line(text, "", calls, [])
        self._last = {"done": True, "done_reason": "length" if reason == "length" else "stop", **self._figures(stats)}

    def finish(self) -> Iterator[Event]:
        yield {**self._begun.head, **self._content("", "", []), **self._last}

    def failure(self, error: ApiError) -> Event:
        return error.body(OLLAMA)

    def whole(self) -> Event:
        content = self._content("".join(self._texts), "".join(self._reasoning), self._calls)
        logprobs = {"logprobs": self._logprobs} if self._shows_logprobs else {}
        return {**self._begun.head, **content, **self._last, **logprobs}

    def _line(self, text: str, reasoning: str, calls: list[Event], logprobs: list[Event]) -> Event:
        self._texts.append(text)
        self._reasoning.append(reasoning)
        self._calls += calls
        self._logprobs += logprobs
        told = {"logprobs": logprobs} if logprobs else {}
        return {**self._begun.head, **self._content(text, reasoning, calls), "done": False, **told}

    def _logprobs_of(self, token: "StreamEvent") -> list[Event]:
        if not self._shows_logprobs or token.logprobs is None:
            return []
        return [chat_logprobs(self.reply.llm.tokenizer, token.token_id, token.logprobs)]

    def _close_call(self, calls: list[Event]) -> str:
        """Append the call that is open to others; one that was cut short is returned as text."""
        delta, written = self._open, "".join(self._arguments)
        self._open, self._arguments = None, []
        if delta is None:
            return ""
        try:
            arguments = msgspec.json.decode(written or "{}", type=dict[str, Any])
        except msgspec.MsgspecError:
            return f'{{"name": "{delta.name}", "arguments": {written}'
        calls.append(written_call(delta.call, str(delta.call_id), str(delta.name), arguments))
        return ""

    def _figures(self, stats: "Stats | None") -> Event:
        now = time.monotonic()
        figures: Event = {
            "total_duration": nanoseconds(now - self._begun.began),
            "load_duration": nanoseconds(self.reply.opened_seconds - self._begun.began),
        }
        if stats is not None:
            times = timings(stats)
            figures |= {
                "prompt_eval_count": stats.prompt_tokens,
                "prompt_eval_cached_count": stats.cached_tokens,
                "prompt_eval_duration": nanoseconds(times["prompt_ms"] / 1e3),
                "eval_count": stats.completion_tokens,
                "eval_duration": nanoseconds(times["predicted_ms"] / 1e3),
            }
            self._warnings += stats.notices
        if self._context is not None:
            figures["context"] = self._context()
        if self._warnings:
            figures["warnings"] = self._warnings
        return figures

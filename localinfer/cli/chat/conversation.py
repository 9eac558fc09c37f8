"""A conversation with a model: the messages so far, and replies that may be stopped or regenerated."""

from bisect import bisect_left
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.stream import Stats

_REPLY_TOKENS = 1024
"""Reserved for a reply without a limit, at most a quarter of the context."""


class Conversation:
    """User messages, each followed by its reply, whole or cut short.

    `system` may be changed at any time and applies from the next reply on. `on_reasoning` is called with deltas of
    reasoning, which is not part of the conversation.

    A conversation that exceeds the context drops its oldest exchanges, unless the engine shifts the context
    (`context_shift` among the sampling options): so many that the rest takes half the context, so that the prompt is
    recomputed once in many replies only. `on_messages_dropped` is called with their number, before the reply.
    """

    def __init__(
        self, llm: "LLM", *, system: str | None, max_tokens: int | None, seed: int | None, **sampling: Any
    ) -> None:
        self.system = system
        self.on_reasoning: Callable[[str], None] | None = None
        self.on_messages_dropped: Callable[[int], None] | None = None
        self._llm = llm
        self._max_tokens = max_tokens
        self._seed = seed
        self._sampling = sampling
        self._turns: list[dict[str, str]] = []
        self._num_replies = 0
        self.last_stats: Stats | None = None
        self.finish_reason: str | None = None

    @property
    def context_is_full(self) -> bool:
        """Whether the last reply was cut by the end of the context."""
        stats = self.last_stats
        if self.finish_reason != "length" or stats is None:
            return False
        return stats.prompt_tokens + stats.completion_tokens >= self._llm.context_length

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system message, if any, then user messages and replies in turn."""
        return self._with_system(self._turns)

    @property
    def can_regenerate(self) -> bool:
        """Whether there is a reply."""
        return bool(self._turns)

    def clear(self) -> None:
        """Remove every message but the system message."""
        self._turns.clear()

    def reply(self, text: str) -> Generator[str]:
        """Send `text` and yield the deltas of the reply; closing the generator keeps the reply so far.

        Raises: LocalinferError if the message cannot be answered; it is then not in the conversation.
        """
        former = list(self._turns)
        return self._answer([*former, {"role": "user", "content": text}], fallback=former)

    def regenerate(self) -> Generator[str]:
        """Answer the last message again; the former reply is kept if the new one is empty."""
        return self._answer(self._turns[:-1], fallback=list(self._turns))

    def _answer(self, question: list[dict[str, str]], fallback: list[dict[str, str]]) -> Generator[str]:
        self.finish_reason = None
        question = self._fitting(question)
        self._turns = question
        deltas: list[str] = []
        try:
            with self._llm.stream_chat(self.messages, **self._options()) as stream:
                try:
                    for event in stream:
                        if event.reasoning and self.on_reasoning is not None:
                            self.on_reasoning(event.reasoning)
                        deltas.append(event.text)
                        self.finish_reason = event.finish_reason
                        yield event.text
                finally:
                    self.last_stats = stream.stats
        finally:
            answer = "".join(deltas)
            self._turns = [*question, {"role": "assistant", "content": answer}] if answer else fallback
            self._num_replies += 1

    def _fitting(self, question: list[dict[str, str]]) -> list[dict[str, str]]:
        """The last message with as many of the newest exchanges before it as leave room for a reply."""
        if self._sampling.get("context_shift") or len(question) < 3:
            return question
        context_length = self._llm.context_length
        reply_tokens = min(self._max_tokens or _REPLY_TOKENS, context_length // 4)
        if self._count_tokens(question) <= context_length - reply_tokens:
            return question
        num_exchanges = len(question) // 2
        dropped = bisect_left(
            range(num_exchanges),
            True,
            key=lambda first: self._count_tokens(question[2 * first :]) <= context_length // 2,
        )
        kept = question[2 * dropped :]
        # A message that is too long by itself is refused, and nothing is dropped.
        if self.on_messages_dropped is not None and self._count_tokens(kept) <= context_length:
            self.on_messages_dropped(2 * dropped)
        return kept

    def _count_tokens(self, turns: list[dict[str, str]]) -> int:
        return self._llm.count_chat_tokens(self._with_system(turns))

    def _with_system(self, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + turns

    def _options(self) -> dict[str, Any]:
        """Sampling options of the next reply; a fixed seed is incremented, or regenerating would repeat a reply."""
        seed = None if self._seed is None else self._seed + self._num_replies
        return {"max_tokens": self._max_tokens, "seed": seed, **self._sampling}

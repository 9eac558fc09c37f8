"""A conversation with a model: the messages so far, and replies that may be stopped or made again."""

from bisect import bisect_left
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.stream import Stats

_REPLY_TOKENS = 1024
"""Room for a reply without a limit, where a quarter of the context is more."""


class Conversation:
    """Keeps messages well formed: each question is followed by its answer, whole or cut short, or is not there.

    `system` may be changed at any time and counts from the next reply on. `on_reasoning`, where it is set, is called
    with what the model reasons before it answers, in pieces; that is not part of the conversation.

    A conversation that outgrows the context goes on without its oldest exchanges, unless the context is shifted by the
    engine (`context_shift` among the sampling options). So many are left out that what remains takes half the context:
    the prompt is then computed from its start once in many replies. `on_messages_dropped`, where it is set, is called
    with how many messages were left out, before the reply.
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
        """The system message, if any, then questions and answers in turn."""
        return self._with_system(self._turns)

    @property
    def can_regenerate(self) -> bool:
        """Whether there is an answer to make again."""
        return bool(self._turns)

    def clear(self) -> None:
        """Forget every question and answer; the system message stays."""
        self._turns.clear()

    def reply(self, text: str) -> Generator[str]:
        """Ask `text` and yield the answer in pieces; closing the generator keeps what was said so far.

        Raises: LocalinferError if the model refuses, and then the question is forgotten.
        """
        former = list(self._turns)
        return self._answer([*former, {"role": "user", "content": text}], fallback=former)

    def regenerate(self) -> Generator[str]:
        """Answer the last question again; the former answer comes back if the new one stays empty."""
        return self._answer(self._turns[:-1], fallback=list(self._turns))

    def _answer(self, question: list[dict[str, str]], fallback: list[dict[str, str]]) -> Generator[str]:
        self.finish_reason = None
        question = self._fitting(question)
        self._turns = question
        pieces: list[str] = []
        try:
            with self._llm.stream_chat(self.messages, **self._options()) as stream:
                try:
                    for event in stream:
                        if event.reasoning and self.on_reasoning is not None:
                            self.on_reasoning(event.reasoning)
                        pieces.append(event.text)
                        self.finish_reason = event.finish_reason
                        yield event.text
                finally:
                    self.last_stats = stream.stats
        finally:
            answer = "".join(pieces)
            self._turns = [*question, {"role": "assistant", "content": answer}] if answer else fallback
            self._num_replies += 1

    def _fitting(self, question: list[dict[str, str]]) -> list[dict[str, str]]:
        """The question with as many of the newest exchanges before it as leave room for a reply."""
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
        # A question that is too long by itself is refused, and then nothing is left out.
        if self.on_messages_dropped is not None and self._count_tokens(kept) <= context_length:
            self.on_messages_dropped(2 * dropped)
        return kept

    def _count_tokens(self, turns: list[dict[str, str]]) -> int:
        return self._llm.count_chat_tokens(self._with_system(turns))

    def _with_system(self, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + turns

    def _options(self) -> dict[str, Any]:
        """Sampling options of the next reply; a fixed seed moves on, or making a reply again would repeat it."""
        seed = None if self._seed is None else self._seed + self._num_replies
        return {"max_tokens": self._max_tokens, "seed": seed, **self._sampling}

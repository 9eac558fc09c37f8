"""A conversation with a model: the messages so far, and replies that may be stopped or made again."""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.text_stream import Stats


class Conversation:
    """Keeps messages well formed: each question is followed by its answer, whole or cut short, or is not there.

    `system` may be changed at any time and counts from the next reply on. `on_reasoning`, where it is set, is told what
    the model reasons before it answers, piece by piece; that is not part of the conversation.
    """

    def __init__(
        self, llm: "LLM", *, system: str | None, max_tokens: int | None, seed: int | None, **sampling: Any
    ) -> None:
        self.system = system
        self.on_reasoning: Callable[[str], None] | None = None
        self._llm = llm
        self._max_tokens = max_tokens
        self._seed = seed
        self._sampling = sampling
        self._turns: list[dict[str, str]] = []
        self._num_replies = 0
        self.last_stats: Stats | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system message, if any, then questions and answers in turn."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + list(self._turns)

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
        self._turns = question
        pieces: list[str] = []
        try:
            with self._llm.stream_chat(self.messages, **self._options()) as stream:
                try:
                    for event in stream:
                        if event.reasoning and self.on_reasoning is not None:
                            self.on_reasoning(event.reasoning)
                        pieces.append(event.text)
                        yield event.text
                finally:
                    self.last_stats = stream.stats
        finally:
            answer = "".join(pieces)
            self._turns = [*question, {"role": "assistant", "content": answer}] if answer else fallback
            self._num_replies += 1

    def _options(self) -> dict[str, Any]:
        """Sampling options of the next reply; a fixed seed moves on, or making a reply again would repeat it."""
        seed = None if self._seed is None else self._seed + self._num_replies
        return {"max_tokens": self._max_tokens, "seed": seed, **self._sampling}

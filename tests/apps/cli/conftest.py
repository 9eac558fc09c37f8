"""A scripted model for the faces: says what it is told to and remembers what it was asked."""

from typing import Any, Self

import numpy as np
import pytest

import localinfer
from localinfer.generation.stream import Completion, Stats, StreamEvent
from localinfer.generation.text_generation import EncodedPrompt
from localinfer.types import Beam, BeamCompletion


class FakeStream:
    """Yields `pieces`; a piece that is an exception is raised in its place, and an event is yielded as it is."""

    def __init__(self, pieces: list[str | BaseException | StreamEvent], dropped_tokens: int) -> None:
        self.dropped_tokens = dropped_tokens
        self.computed_tokens = 2
        self._pieces = iter(enumerate(pieces))
        self._num_events = 0
        self._text = ""

    @property
    def stats(self) -> Stats:
        return Stats(
            prompt_tokens=3,
            cached_tokens=1,
            cache_miss=None,
            dropped_tokens=self.dropped_tokens,
            completion_tokens=self._num_events,
            time_to_first_token_seconds=0.25,
            decode_tokens_per_second=12.5,
            drafted_tokens=0,
            accepted_tokens=0,
            seed=77,
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamEvent:
        index, piece = next(self._pieces)
        if isinstance(piece, BaseException):
            raise piece
        self._num_events += 1
        event = piece if isinstance(piece, StreamEvent) else StreamEvent(piece, index, None)
        self._text += event.text
        return event

    def completion(self) -> Completion:
        return Completion(self._text, [], "stop", self.stats)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces = iter(())


class FakeTokenizer:
    """One id per byte."""

    special_ids: dict[str, int] = {}

    def ids_containing(self, text: str) -> set[int]:
        return set(text.encode()) if len(text) == 1 else set()

    def encode(
        self, text: str, add_special: bool = True, parse_special: bool = False, *, max_tokens: int | None = None
    ) -> list[int]:
        return [1] * add_special + list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


class FakeLLM:
    """Answers with `pieces` and remembers what it was asked."""

    def __init__(self) -> None:
        self.pieces: list[str | BaseException] = ["Hello", " there"]
        self.load_options: dict[str, Any] = {}
        self.prompts: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.is_closed = False
        self.has_chat_template = False
        self.dropped_tokens = 0
        self.tokenizer = FakeTokenizer()
        self.context_length = 4096
        self.recommended_sampling: dict[str, float] = {}
        self.defaults: dict[str, Any] = {}

    def set_defaults(self, **options: Any) -> None:
        self.defaults = options

    def stream(self, prompt: Any, **options: Any) -> FakeStream:
        self.prompts.append(prompt)
        self.options.append(options)
        return FakeStream(self.pieces, self.dropped_tokens)

    def beam_search(self, prompt: Any, **options: Any) -> list[BeamCompletion]:
        self.prompts.append(prompt)
        self.options.append(options)
        return [BeamCompletion(text, Beam((1, 2), -1.0, -0.5, "stop")) for text in ("the best", "another")]

    def stream_chat(self, messages: list[dict[str, str]], **options: Any) -> FakeStream:
        return self.stream([dict(message) for message in messages], **options)

    def count_chat_tokens(self, messages: list[dict[str, str]], **options: Any) -> int:
        return sum(len(message["content"]) for message in messages)

    def encode_chat(self, messages: list[dict[str, str]], **options: Any) -> EncodedPrompt:
        text = "".join(message["content"] for message in messages)
        return EncodedPrompt(np.frombuffer(text.encode("utf-32-le"), np.int32))

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The model that `localinfer.load` gives during the test."""
    llm = FakeLLM()

    def load(model: str | None = None, **options: Any) -> FakeLLM:
        llm.load_options = {"model": model, **options}
        return llm

    monkeypatch.setattr(localinfer, "load", load)
    monkeypatch.setattr(localinfer, "load_tokenizer", lambda model=None: llm.tokenizer)
    return llm

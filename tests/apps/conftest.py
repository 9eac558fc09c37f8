"""A scripted model for the faces: says what it is told to and remembers what it was asked."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pytest

import localinfer


@dataclass(frozen=True)
class FakeEvent:
    text: str
    token_id: int


class FakeTokenizer:
    """One id per byte."""

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [1] * add_special + list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


class FakeLLM:
    """Answers with `pieces`; a piece that is an exception is raised in its place."""

    def __init__(self) -> None:
        self.pieces: list[str | BaseException] = ["Hello", " there"]
        self.load_options: dict[str, Any] = {}
        self.prompts: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.is_closed = False
        self.tokenizer = FakeTokenizer()

    def stream(self, prompt: str, **options: Any) -> Iterator[FakeEvent]:
        self.prompts.append(prompt)
        self.options.append(options)
        for index, piece in enumerate(self.pieces):
            if isinstance(piece, BaseException):
                raise piece
            yield FakeEvent(piece, index)

    def stream_chat(self, messages: list[dict[str, str]], **options: Any) -> Iterator[FakeEvent]:
        return self.stream([dict(message) for message in messages], **options)

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The model that `localinfer.load` gives during the test."""
    llm = FakeLLM()

    def load(model: str | None = None, **options: Any) -> FakeLLM:
        llm.load_options = {"model": model, **options}
        return llm

    monkeypatch.setattr(localinfer, "load", load, raising=False)
    monkeypatch.setattr(localinfer, "load_tokenizer", lambda model=None: llm.tokenizer, raising=False)
    return llm

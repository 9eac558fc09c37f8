"""Priorities and objectives for the first token, by every method that generates."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from localinfer.errors import OverloadedError, RequestError
from localinfer.llm import LLM
from tests.api.scripted_chat import scripted_chat
from tests.support.inside import engine_of

CHAT = [{"role": "user", "content": "hi"}]
WAYS: dict[str, Callable[..., Any]] = {
    "complete": lambda llm, **options: llm.complete([97, 259], **options),
    "stream": lambda llm, **options: list(llm.stream([97, 259], **options)),
    "acomplete": lambda llm, **options: asyncio.run(llm.acomplete([97, 259], **options)),
    "complete_many": lambda llm, **options: llm.complete_many([97, 259], n=2, **options),
    "chat": lambda llm, **options: llm.chat(CHAT, **options),
    "stream_chat": lambda llm, **options: list(llm.stream_chat(CHAT, **options)),
    "achat": lambda llm, **options: asyncio.run(llm.achat(CHAT, **options)),
    "chat_many": lambda llm, **options: llm.chat_many(CHAT, n=2, **options),
    "session": lambda llm, **options: llm.session(**options).ask("hi"),
    "ask": lambda llm, **options: llm.session().ask("hi", **options),
    "aask": lambda llm, **options: asyncio.run(llm.session().aask("hi", **options)),
    "session.stream": lambda llm, **options: list(llm.session().stream("hi", **options)),
    "defaults": lambda llm, **options: (llm.set_defaults(**options), llm.chat(CHAT)),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, list[tuple[int, float | None]]]:
    llm = scripted_chat("yes")
    generate, noted = engine_of(llm).generate, []

    def note(*args: Any, **options: Any) -> Any:
        noted.append((options["priority"], options["ttft_objective"]))
        return generate(*args, **options)

    monkeypatch.setattr(engine_of(llm), "generate", note)
    return llm, noted


@pytest.mark.parametrize("way", list(WAYS))
def test_every_way_to_generate_has_a_priority_and_an_objective(asked: Any, way: str) -> None:
    llm, noted = asked
    WAYS[way](llm, priority=-3, ttft_objective=2.0, max_tokens=3)
    # Of several texts of one prompt the later ones are not refused, once the first was begun.
    assert noted == ([(-3, 2.0), (-3, None)] if way.endswith("many") else [(-3, 2.0)])


@pytest.mark.parametrize("options", [{"priority": "high"}, {"priority": 0.5}, {"ttft_objective": -1}])
def test_what_is_no_priority_and_no_objective_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        scripted_chat("yes").complete("a", **options)


def test_a_refusal_says_what_was_predicted() -> None:
    error = OverloadedError("later", 3.0, predicted_ttft_seconds=4.5)
    assert (error.retry_after_seconds, error.predicted_ttft_seconds) == (3.0, 4.5)
    assert OverloadedError("full", 1.0).predicted_ttft_seconds is None

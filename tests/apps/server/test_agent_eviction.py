"""Titles and subagents beside a conversation, in a cache that holds little more than that: it stays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_models import given_replies, load_agent_model, write_agent_model

from localinfer.llm import LLM

RULES = "Rule: keep to what the whole list says. " * 12
TURN = "How many lines has the file, and which is the longest? " * 3
BYTES_PER_TOKEN = 64
"""Of keys and values of the model below: 2 of 16 float16 in one layer."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agent_model(tmp_path_factory.mktemp("agent") / "agent-test.gguf")


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    def script(*_: Any) -> dict[str, Any]:
        return {"content": "It has two lines."}

    with given_replies(), load_agent_model(path, script, threads=1, kv_memory=2000 * BYTES_PER_TOKEN) as loaded:
        yield loaded


class Conversation:
    """A chat that goes on turn by turn."""

    def __init__(self, llm: LLM, system: str) -> None:
        self._llm = llm
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}]

    def ask(self, text: str) -> tuple[int, int]:
        """How many tokens the prompt had and how many were cached."""
        self._messages.append({"role": "user", "content": text})
        with self._llm.stream_chat(self._messages) as stream:
            completion = stream.result()
        self._messages.append({"role": "assistant", "content": completion.text})
        return completion.stats.prompt_tokens, completion.stats.cached_tokens


def test_titles_and_subagents_do_not_evict_the_conversation(llm: LLM):
    main = Conversation(llm, f"You write programs. {RULES}")
    sizes = [main.ask(f"{turn}: {TURN}")[0] for turn in range(10)]
    assert sizes[-1] > 600
    read = 0
    for number in range(6):
        read += Conversation(llm, f"You write titles, {number}. {RULES}").ask(TURN)[0]
        helper = Conversation(llm, f"You are helper {number}. {RULES}")
        read += sum(prompt - cached for prompt, cached in (helper.ask(f"{turn}: {TURN}") for turn in range(3)))
    assert read > 2000, "more than the cache holds"
    prompt, cached = main.ask(TURN)
    assert cached >= sizes[-1]


def test_a_conversation_that_was_left_makes_room_for_those_that_go_on(llm: LLM):
    left = Conversation(llm, f"You write programs. {RULES}")
    for turn in range(10):
        left.ask(f"{turn}: {TURN}")
    caches = []
    for number in range(8):
        later = Conversation(llm, f"You write poems, {number}. {RULES}")
        caches = [later.ask(f"{turn}: {TURN}") for turn in range(12)]
        # Whoever goes on reads only what is new.
        assert all(prompt - cached < 120 for prompt, cached in caches[1:])
    prompt, cached = left.ask(TURN)
    assert cached < prompt // 2


def test_texts_that_were_continued_equally_often_go_by_last_use(llm: LLM):
    first, second = (Conversation(llm, f"You write {what}. {RULES}") for what in ("programs", "poems"))
    for turn in range(5):
        first.ask(f"{turn}: {TURN}")
        second.ask(f"{turn}: {TURN}")
    third = Conversation(llm, f"You write letters. {RULES}")
    for turn in range(20):
        third.ask(f"{turn}: {TURN}")
    (prompt, cached), (_, other) = second.ask(TURN), first.ask(TURN)
    assert cached > prompt // 2 > other

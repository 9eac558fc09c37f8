"""A context that fills is told in words before it is full, and there is always a way on."""

import io
from typing import Any

import pytest

from localinfer.apps.terminal.commands import Chat
from localinfer.apps.terminal.conversation import Conversation
from localinfer.errors import ContextLengthError, TemplateError
from localinfer.generation.compaction import SUMMARY_REQUEST, SUMMARY_TURN
from localinfer.generation.stream import StreamEvent
from tests.apps.cli.chat_session import TypedLines


class Session(TypedLines):
    """A chat over a scripted model that counts characters as tokens."""

    def __init__(self, llm: Any, context_length: int, **options: Any) -> None:
        llm.context_length = context_length
        self.conversation = Conversation(llm, system="Be kind.", max_tokens=None, seed=3, **options)
        self.notices = io.StringIO()
        self.chat = Chat(self.conversation, io.StringIO(), self.notices)


@pytest.fixture
def session(fake_llm) -> Session:
    """A context of 400 tokens, of which 100 are kept for a reply."""
    return Session(fake_llm, 400)


def test_the_end_is_told_before_it_comes_and_once(session):
    assert session.type("x" * 200) == ""
    told = session.type("y" * 30)
    assert "the context is filling: 260 of 400 tokens are used (65 %), 140 left" in told
    for choice in ("/compact", "/context shift", "/context new"):
        assert choice in told
    assert session.type("z") == "", "once"
    assert "the next reply may not fit" in session.type("w" * 20)
    assert "oldest messages are left out" in session.type("v" * 20)


def test_with_a_context_that_shifts_by_itself_the_notice_says_so(fake_llm):
    session = Session(fake_llm, 400, context_shift=True)
    told = session.type("x" * 300)
    assert "all but the system prompt and the recent half" in told


def test_shift_leaves_out_the_oldest_and_keeps_the_system_prompt(session):
    session.type("a" * 80, "b" * 80, "c" * 40)
    assert "the 2 oldest messages are left out" in session.type("/context shift")
    assert [message["content"][0] for message in session.conversation.messages] == ["B", "b", "H", "c", "H"]
    assert len(session.conversation.turns) == 6, "they are kept, to be saved and undone"
    assert "2 older messages are no longer read" in session.type("/tokens")
    session.type("/context shift")
    assert "but one exchange" in session.type("/context shift")


def test_the_summary_becomes_the_beginning_and_the_last_exchange_stays(session, fake_llm):
    session.type("a" * 80, "b" * 80, "c" * 40)
    fake_llm.pieces = [" All of ", "it. "]
    fake_llm.context_length = 800
    assert "continues from its summary" in session.type("/context summarise")
    assert fake_llm.prompts[-1][-1]["content"] == SUMMARY_REQUEST
    assert len(fake_llm.prompts[-1]) == 6, "the system prompt, two exchanges and the request"
    texts = [message["content"] for message in session.conversation.messages]
    assert texts == ["Be kind.", SUMMARY_TURN["content"], "All of it.", "c" * 40, "Hello there"]
    fake_llm.pieces = ["Yes."]
    session.type("d", "/edit 4 e")
    assert [message["content"] for message in fake_llm.prompts[-1]][1:] == [*texts[1:], "e"]
    session.type("/undo", "/undo", "/undo")
    assert [message["content"][0] for message in session.conversation.messages] == ["B", "a", "H", "b", "H"]


def test_a_summary_is_neither_made_again_nor_continued_without_what_it_sums_up(session, fake_llm):
    fake_llm.context_length = 4096
    session.type("a" * 30)
    fake_llm.pieces = [StreamEvent("Cut", 1, "length")]
    session.type("/context summarise")
    assert len(session.conversation.turns) == 4
    assert "no reply to make again" in session.type("/regen")
    assert "is whole" in session.type("/continue")
    fake_llm.pieces = ["Yes"]
    session.type("and?")
    assert [message["content"] for message in fake_llm.prompts[-1]][1:] == [SUMMARY_TURN["content"], "Cut", "and?"]


def test_a_template_that_cannot_count_a_reply_ends_no_chat(session, fake_llm, monkeypatch):
    def refuse(messages: Any, **_: Any) -> int:
        raise TemplateError("the last message must be the user's")

    monkeypatch.setattr(fake_llm, "count_chat_tokens", refuse)
    session.type("hi")
    assert session.conversation.context_used == 5, "as the statistics say"


@pytest.mark.parametrize("pieces", [[], ["All", KeyboardInterrupt()], ["  "]])
def test_a_summary_that_did_not_come_changes_nothing(session, fake_llm, pieces):
    fake_llm.context_length = 4096
    session.type("a" * 80, "b" * 80)
    before = session.conversation.turns
    fake_llm.pieces = pieces
    assert "as it was" in session.type("/context summarise")
    assert session.conversation.turns == before


def test_there_is_nothing_to_sum_up_at_first(session, fake_llm):
    assert "nothing to sum up" in session.type("/context summarise")
    assert fake_llm.prompts == []


def test_what_does_not_fit_beside_the_request_stays_word_for_word(session, fake_llm):
    fake_llm.context_length = 4096
    session.type("a" * 60, "b" * 160, "c" * 60)
    fake_llm.pieces, fake_llm.context_length = ["Short."], 660
    assert "continues from its summary" in session.type("/compact the names")
    assert fake_llm.prompts[-1][-1]["content"] == f"{SUMMARY_REQUEST} Above all keep: the names"
    assert [message["content"][0] for message in fake_llm.prompts[-1]] == ["B", "a", "H", "T"]
    read = [message["content"][0] for message in session.conversation.messages]
    assert read == ["B", "S", "S", "b", "H", "c", "H"]
    assert "as it was before" in session.type("/undo")
    assert [message["content"][0] for message in session.conversation.messages] == ["B", "a", "H", "b", "H", "c", "H"]
    fake_llm.context_length = 400
    with pytest.raises(ContextLengthError, match="too few for a summary"):
        list(session.conversation.summarise())


def test_a_chat_is_summed_up_before_the_context_ends(session, fake_llm):
    fake_llm.context_length, session.conversation.compact_at = 1000, 0.5
    session.type("a" * 200)
    before = session.conversation.turns
    fake_llm.pieces = ["The gist"]
    told = session.type("b" * 300)
    assert "sums up the older messages first" in told
    assert "continues from its summary: 519 tokens became 350" in told
    assert [message["content"][0] for message in fake_llm.prompts[-1]] == ["B", "S", "T", "b"]
    assert session.conversation.turns[:2] == before, "they stay, to be saved"
    session.type("/undo", "/undo")
    assert session.conversation.turns == before
    fake_llm.pieces = ["The", KeyboardInterrupt()]
    assert "stopped: the conversation is unchanged" in session.type("b" * 300)
    assert session.conversation.turns == before


def test_a_reply_cut_by_the_context_says_so_with_the_ways_on(session, fake_llm):
    fake_llm.context_length = 4  # a prompt of 3 tokens, and a reply of 1
    fake_llm.pieces = [StreamEvent("cut", 1, "length")]
    told = session.type("c")
    assert "end of the context (finish_reason: length)" in told and "/compact" in told and "/continue" in told


def test_a_reply_cut_by_its_limit_says_so_with_the_way_on(session, fake_llm):
    fake_llm.pieces = [StreamEvent("cut", 1, "length")]
    told = session.type("hi")
    assert "finish_reason: length" in told and "/continue" in told and "/set max_tokens" in told


def test_a_loaded_conversation_goes_on_from_its_last_summary(fake_llm):
    turns = [
        {"role": "user", "content": "old"},
        {"role": "assistant", "content": "older"},
        dict(SUMMARY_TURN),
        {"role": "assistant", "content": "the gist"},
    ]

    class Saved:
        system = None

    saved: Any = Saved()
    saved.turns = turns
    conversation = Conversation(fake_llm, system="Be kind.", max_tokens=None, seed=None, saved=saved)
    assert [message["content"] for message in conversation.messages] == [
        "Be kind.",
        SUMMARY_TURN["content"],
        "the gist",
    ]
    assert len(conversation.turns) == 4
    assert conversation.context_used == sum(len(message["content"]) for message in conversation.messages)


def test_new_starts_anew_with_the_system_prompt(session):
    session.type("a")
    assert "cleared" in session.type("/context new")
    assert [message["role"] for message in session.conversation.messages] == ["system"]
    assert "takes shift, summarise or new" in session.type("/context old")
    assert "/context shift" in session.type("/context")

"""Changing a conversation computes from the change on only: the demo model's statistics prove it."""

import io
from collections.abc import Iterator
from typing import Any

import pytest

import localinfer
from localinfer.apps.terminal.commands import Chat
from localinfer.apps.terminal.conversation import Conversation
from localinfer.llm import LLM

PAGE = 32
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localinfer.load(threads=1, disk_cache=False) as made:
        yield made


@pytest.fixture
def conversation(llm) -> Conversation:
    llm.clear_cache()
    made = Conversation(llm, system="You tell stories.", max_tokens=40, seed=1, **GREEDY)
    for text in ("Tell me a story about a dog named Tom.", "What did he do then?", "And how did it end?"):
        say(made.reply(text))
    return made


def say(reply: Iterator[str]) -> str:
    return "".join(reply)


def cached(conversation: Conversation) -> int:
    assert conversation.last_stats is not None
    return conversation.last_stats.cached_tokens


def tokens_before(conversation: Conversation, text: str) -> int:
    """Tokens of the prompt before the place of a text, which the messages have once."""
    rendered = conversation.llm.render_chat(conversation.messages)
    assert rendered.count(text) == 1
    return len(conversation.llm.tokenizer.encode(rendered[: rendered.index(text)], parse_special=True))


def test_a_regenerated_reply_computes_nothing_of_the_prompt_again(conversation):
    say(conversation.regenerate())
    assert cached(conversation) >= conversation.last_stats.prompt_tokens - PAGE


@pytest.mark.parametrize("index", [0, 1, -1])
def test_an_edit_computes_from_the_edited_word_on(conversation, index):
    edited = f"{conversation.user_message(index).rstrip('.?')} CHANGED?"
    say(conversation.edit(index, edited))
    assert conversation.messages[-2]["content"] == edited
    assert cached(conversation) >= tokens_before(conversation, " CHANGED") - 1
    say(conversation.reply("And?"))
    assert cached(conversation) >= tokens_before(conversation, "And?") - PAGE


def test_after_undo_the_rest_is_still_cached(conversation):
    conversation.undo()
    say(conversation.reply("Who was there?"))
    assert cached(conversation) >= tokens_before(conversation, "Who was") - 1


def test_a_copy_shares_what_was_computed(conversation):
    conversation.fork()
    say(conversation.reply("What next?"))
    assert cached(conversation) >= tokens_before(conversation, "What next") - PAGE


def test_a_continued_reply_is_what_it_would_have_been_and_computes_one_token_of_its_prompt(llm):
    llm.clear_cache()
    whole = Conversation(llm, system=None, max_tokens=40, seed=1, **GREEDY)
    text = say(whole.reply("Tell me a story about a dog."))
    cut = Conversation(llm, system=None, max_tokens=10, seed=1, **GREEDY)
    parts = [say(cut.reply("Tell me a story about a dog."))]
    for _ in range(3):
        assert cut.finish_reason == "length"
        parts.append(say(cut.resume()))
        assert cached(cut) == cut.last_stats.prompt_tokens - 1
    assert "".join(parts) == text
    assert cut.messages == whole.messages
    say(cut.reply("More."))
    assert cached(cut) >= tokens_before(cut, "More.") - PAGE


def test_a_stopped_reply_is_continued_where_it_was_stopped(llm):
    conversation = Conversation(llm, system=None, max_tokens=60, seed=1, **GREEDY)
    reply = conversation.reply("Tell me a story about a cat.")
    parts = [next(reply) for _ in range(8)]
    reply.close()
    assert conversation.turns[-1]["finish_reason"] == "cancelled"
    parts.append(say(conversation.resume()))
    assert cached(conversation) == conversation.last_stats.prompt_tokens - 1
    assert conversation.messages[-1]["content"] == "".join(parts)
    other = Conversation(llm, system=None, max_tokens=68, seed=1, **GREEDY)
    assert say(other.reply("Tell me a story about a cat.")) == "".join(parts)


def test_a_reply_that_reaches_the_end_of_the_context_goes_on_once_older_messages_are_left_out():
    with localinfer.load(threads=1, disk_cache=False, context_length=128) as llm:
        conversation = Conversation(llm, system=None, max_tokens=30, seed=1, **GREEDY)
        notices = io.StringIO()
        chat = Chat(conversation, io.StringIO(), notices)
        chat.handle("Tell me a story.")
        conversation.max_tokens = None
        conversation.sampling["ignore_eos"] = True
        chat.handle("Another story.")
        assert conversation.context_is_full
        assert "128 of 128 tokens" in shown(chat, notices, "/tokens")
        begun = conversation.messages[-1]["content"]
        assert "left out" in shown(chat, notices, "/continue")
        assert conversation.messages[0]["content"] == "Another story."
        assert conversation.messages[-1]["content"].startswith(begun)
        assert len(conversation.messages[-1]["content"]) > len(begun)
        assert "no room for more" in shown(chat, notices, "/continue")
        assert "too few for a summary" in shown(chat, notices, "/context summarise")
        chat.handle("Hello")
        assert conversation.messages[0]["content"] == "Hello", "never a dead end"


def shown(chat: Chat, notices: io.StringIO, line: str) -> str:
    """The notices of a line."""
    notices.seek(0)
    notices.truncate()
    chat.handle(line)
    return notices.getvalue()


def test_a_chat_longer_than_its_context_goes_on_by_each_of_the_choices():
    with localinfer.load(threads=1, disk_cache=False, context_length=256) as llm:
        conversation = Conversation(llm, system="You tell stories.", max_tokens=30, seed=1, **GREEDY)
        notices = io.StringIO()
        chat = Chat(conversation, io.StringIO(), notices)
        for number in range(5):
            chat.handle(f"Tell me a story about dog number {number}.")
        assert "the context is filling" in notices.getvalue()
        assert "oldest messages are left out from now on" not in notices.getvalue(), "it was told before"
        before = conversation.context_used
        for line, shorter in (("/context summarise", before), ("/context shift", before), ("/context new", 30)):
            chat.handle(line)
            assert conversation.context_used < shorter
            assert not conversation.messages or conversation.messages[0]["content"] == "You tell stories."
            for number in range(12):
                chat.handle(f"{line[-3:]} {number}?")
        assert len(conversation.turns) == 24

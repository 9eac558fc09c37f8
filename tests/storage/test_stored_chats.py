"""Replies keep the ids they were generated with over a restart, and files that are not sound are not used."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from localinfer.generation.chat_model import ChatHistory
from localinfer.llm import LLM
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.storage.chats import StoredChats
from localinfer.storage.prompt_cache import DiskOptions
from tests.generation.chat.test_history import REPLIES, STYLES, WordTokenizer, ask, chatting, odd_ids
from tests.models.text.vocabularies import spm_metadata
from tests.storage.test_prompt_cache import FakeIdentity

TOKENIZER = Tokenizer.from_metadata(spm_metadata())
TEMPLATE = ChatTemplate(STYLES["verbatim"].replace("END", TOKENIZER.token_text(min(TOKENIZER.eog_token_ids))))


def answered(reply: str, seed: int = 1) -> ChatHistory:
    """A history in which "Hi" was answered with a reply of odd ids."""
    history = ChatHistory(TEMPLATE, TOKENIZER)
    history.remember(history.encode(ask("Hi")), odd_ids(TOKENIZER, reply, seed))
    return history


def store(folder: Path, history: ChatHistory) -> StoredChats:
    stored = StoredChats(folder)
    stored.save(history._chats)
    return stored


@pytest.mark.parametrize("reply", REPLIES)
def test_history_that_was_stored_encodes_the_next_turn_as_the_first_would(tmp_path: Path, reply: str):
    history = answered(reply)
    store(tmp_path, history)
    again = ChatHistory(TEMPLATE, TOKENIZER)
    again.recall(StoredChats(tmp_path).load(TOKENIZER.vocab_size))
    before, after = (known.encode(ask("Hi", reply, "And then?")) for known in (history, again))
    np.testing.assert_array_equal(before.token_ids, after.token_ids)
    assert before.history is not None and after.history is not None
    np.testing.assert_array_equal(before.history, after.history)


def test_chat_goes_on_after_a_restart_with_the_ids_of_its_reply(tmp_path: Path):
    turns = ask("go", "and then", "on")
    cached = []
    for messages in (turns[:1], turns):
        _, model = chatting("and then")
        model.tokenizer = WordTokenizer()
        with LLM(model, identity=FakeIdentity(), disk=DiskOptions(tmp_path)) as llm:  # type: ignore[arg-type]
            cached.append(llm.chat(messages, temperature=0).stats.cached_tokens)
    # Begin, user, "go", bot, and the eight bytes of the reply, which its own tokenizer would make five ids.
    assert cached == [0, 5 + 8]


def test_a_chat_that_another_process_is_writing_is_left_alone(tmp_path: Path):
    stored = store(tmp_path, answered("Hello there"))
    (tmp_path / ".0123456789ab.tmp").write_bytes(b"half a chat")
    assert len(stored.load(TOKENIZER.vocab_size)) == 1
    assert (tmp_path / ".0123456789ab.tmp").exists()


def test_any_damage_leaves_a_chat_unused_and_deletes_it(tmp_path: Path):
    store(tmp_path, answered("Hello there"))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for offset in range(0, len(content), 7):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :])
        assert StoredChats(tmp_path).load(TOKENIZER.vocab_size) == []
        assert not path.exists()
    for size in range(0, len(content), 5):
        path.write_bytes(content[:size])
        assert StoredChats(tmp_path).load(TOKENIZER.vocab_size) == []


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"token_ids": "x"}', b"[" * 100_000, b"\xff"])
def test_hostile_text_with_the_right_checksum_is_not_used(tmp_path: Path, text: bytes):
    (tmp_path / f"{'0' * 32}.chat").write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    assert StoredChats(tmp_path).load(TOKENIZER.vocab_size) == []


def test_ids_outside_the_vocabulary_are_not_used(tmp_path: Path):
    assert store(tmp_path, answered("Hello there")).load(10) == []


def test_oldest_of_many_are_deleted_and_the_newest_read_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("localinfer.storage.chats._MOST_FILES", 4)
    for number in range(6):
        stored = store(tmp_path, answered(f"answer {number}"))
        for age, path in enumerate(sorted(tmp_path.iterdir(), key=lambda path: -path.stat().st_mtime_ns)):
            os.utime(path, ns=(10**18 - age, 10**18 - age))
    assert [chat.reply for chat in stored.load(TOKENIZER.vocab_size)] == [f"answer {number}" for number in (2, 3, 4, 5)]
    monkeypatch.setattr("localinfer.storage.chats._MOST_READ", 2)
    assert [chat.reply for chat in stored.load(TOKENIZER.vocab_size)] == ["answer 4", "answer 5"]


def test_folder_that_is_not_there_holds_nothing(tmp_path: Path):
    assert StoredChats(tmp_path / "no").load(TOKENIZER.vocab_size) == []

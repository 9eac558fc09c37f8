"""One store under every kind of record: torn and newer files, a lock that another program holds, the budget."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from localinfer.errors import SessionFileError
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.storage import conversations
from localinfer.storage.chats import StoredChats
from localinfer.storage.conversations import ConversationStore, SavedConversation
from localinfer.storage.hub.records import PulledFile, PullRecord, PullRecords
from localinfer.storage.records import NewerRecordError, RecordStore, TornRecordError
from localinfer.storage.response_store import ResponseStore, ResponseStoreOptions
from localinfer.system import disk
from tests.generation.chat.test_history import STYLES, ChatHistory, ask, odd_ids
from tests.models.text.vocabularies import spm_metadata

RESPONSE = f"resp_{1:024x}.json"


def put_response(folder: Path, content: bytes = b'{"a": 1}', name: str = RESPONSE, max_bytes: int = 1 << 20) -> None:
    with ResponseStore(ResponseStoreOptions(folder, max_bytes)) as store:
        store.put(name, content)


def responses(folder: Path) -> int:
    with ResponseStore(ResponseStoreOptions(folder)) as store:
        return int(store.get(RESPONSE) is not None)


def put_chat(folder: Path, reply: str = "Hello there") -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata())
    template = ChatTemplate(STYLES["verbatim"].replace("END", tokenizer.token_text(min(tokenizer.eog_token_ids))))
    history = ChatHistory(template, tokenizer)
    history.remember(history.encode(ask("Hi")), odd_ids(tokenizer, reply, 1))
    StoredChats(folder).save(history._chats)


def put_conversation(folder: Path) -> None:
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    ConversationStore(folder).save(SavedConversation.begin("demo", name="one").with_turns(turns, system=None))


def put_pull(folder: Path) -> None:
    file = PulledFile("a.gguf", 1, "0" * 64, None, False)
    PullRecords(folder).put(PullRecord("o/r:Q4_0", "o/r", "Q4_0", "c" * 40, folder, (file,), 1.0, False))


@dataclass(frozen=True)
class Kind:
    """A kind of records."""

    put: Callable[[Path], None]
    """Writes one."""
    count: Callable[[Path], int]
    """The number of those that can be read."""
    is_sealed: bool = False
    """Whether a damaged file is deleted, as it can be made again, and a file has a checksum."""


KINDS = {
    "response": Kind(put_response, responses, is_sealed=True),
    "chat": Kind(put_chat, lambda folder: len(StoredChats(folder).load(1 << 20)), is_sealed=True),
    "conversation": Kind(put_conversation, lambda folder: len(ConversationStore(folder).list())),
    "pull": Kind(put_pull, lambda folder: sum(isinstance(one, PullRecord) for one in PullRecords(folder).all())),
}


def written(kind: Kind, folder: Path) -> Path:
    """The file of a new record."""
    kind.put(folder)
    (path,) = (path for path in folder.iterdir() if path.name != ".lock")
    assert kind.count(folder) == 1
    return path


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_torn_record_is_never_read_and_only_what_can_be_made_again_is_deleted(kind: Kind, tmp_path: Path) -> None:
    path = written(kind, tmp_path / "records")
    content = path.read_bytes()
    for size in (0, 1, 64, 65, len(content) // 2, len(content) - 2):
        path.write_bytes(content[:size])
        assert kind.count(path.parent) == 0
        assert path.exists() is not kind.is_sealed
    path.write_bytes(content)
    assert kind.count(path.parent) == 1


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_record_of_a_later_version_is_neither_read_nor_deleted(kind: Kind, tmp_path: Path) -> None:
    path = written(kind, tmp_path / "records")
    content = path.read_bytes()
    if kind.is_sealed:
        newer = content.replace(b"\n", b" 2\n", 1)
    else:
        newer = json.dumps(json.loads(content) | {"version": 3}).encode()
    path.write_bytes(newer)
    assert kind.count(path.parent) == 0
    assert path.read_bytes() == newer


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_write_that_fails_or_is_killed_leaves_the_former_record(kind: Kind, tmp_path: Path, monkeypatch) -> None:
    path = written(kind, tmp_path / "records")
    content = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("localinfer.storage.records.write_all", refuse)
    try:
        kind.put(path.parent)
    except Exception as error:
        assert "No space left" in str(error)
    (path.parent / ".0123456789ab.tmp").write_bytes(content[: len(content) // 2])
    assert kind.count(path.parent) == 1
    assert path.read_bytes() == content


def test_a_lock_that_another_program_holds_is_waited_for_and_told(tmp_path: Path, monkeypatch) -> None:
    put_conversation(tmp_path / "conversations")
    put_pull(tmp_path / "pulls")
    monkeypatch.setattr(conversations, "_LOCK_SECONDS", 0.02)
    with disk.open_lock(tmp_path / "conversations" / ".lock") as held:
        assert disk.try_lock(held)
        with pytest.raises(SessionFileError, match="another program has held"):
            put_conversation(tmp_path / "conversations")
        assert len(ConversationStore(tmp_path / "conversations").list()) == 1
    put_conversation(tmp_path / "conversations")
    first, second = PullRecords(tmp_path / "pulls"), PullRecords(tmp_path / "pulls")
    taken = first.locked("o/r:Q4_0", waits=True), second.locked("o/r:Q4_0", waits=False)
    with taken[0] as is_first, taken[1] as is_second, second.locked("other", waits=False) as is_other:
        assert (is_first, is_second, is_other) == (True, False, True)
    with second.locked("o/r:Q4_0", waits=False) as is_second:
        assert is_second


def test_the_least_recently_used_are_deleted_beyond_the_budget(tmp_path: Path) -> None:
    by_bytes = RecordStore(tmp_path / "bytes", most_bytes=1000, max_bytes=500)
    by_number = RecordStore(tmp_path / "number", most_bytes=1000, most_files=4)
    for number in range(10):
        for store in (by_bytes, by_number):
            store.write(f"{number}", bytes(100))
            os.utime(store.folder / f"{number}", (1000 + number,) * 2)
    assert [Path(file.path).name for file in by_number.files()] == ["9", "8", "7", "6"]
    kept = by_bytes.files()
    assert sum(file.num_bytes for file in kept) <= 500
    assert Path(kept[0].path).name == "9"


def test_files_of_the_version_before_are_read(tmp_path: Path) -> None:
    """Seals are a checksum alone; what is older than they are begins with a brace, or is no record."""
    content = b'{"a": 1}'
    store = RecordStore(tmp_path, most_bytes=1000, is_sealed=True, unsealed=b"{")
    (tmp_path / "sealed").write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    (tmp_path / "unsealed").write_bytes(content)
    (tmp_path / "newer").write_bytes(hashlib.sha256(content).hexdigest().encode() + b" 7 x\n" + content)
    (tmp_path / "torn").write_bytes(b"0" * 64 + b"\n" + content)
    assert store.read("sealed") == store.read("unsealed") == content
    with pytest.raises(NewerRecordError, match="version 7 x, and this localinfer reads 1"):
        store.read("newer")
    with pytest.raises(TornRecordError, match="checksum"):
        store.read("torn")
    store.write("sealed", b"x")
    assert (tmp_path / "sealed").read_bytes() == hashlib.sha256(b"x").hexdigest().encode() + b"\nx"

"""Saved conversations: whole after every kill, never two of a name, and nothing that is damaged is lost from sight."""

import base64
import errno
import hashlib
import json
import os
import stat
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localinfer.errors import RequestError, SessionFileError
from localinfer.storage import conversation_media, conversations, records
from localinfer.storage.conversations import ConversationStore, SavedConversation, open_store
from localinfer.system import disk
from tests.kernels.subprocesses import run, start
from tests.support.limits import seconds

NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork and SIGKILL")


def exchange(question: str, answer: str = "Yes.", **more: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


def talk(question: str = "What is a dog?", **fields: str) -> SavedConversation:
    begun = SavedConversation.begin("demo", **fields)
    return begun.with_turns(exchange(question), system=begun.system)


@pytest.fixture
def store(tmp_path: Path) -> ConversationStore:
    return ConversationStore(tmp_path / "state" / "conversations")


def file_of(store: ConversationStore, name: str) -> Path:
    return store.folder / f"{store.load(name).id}.json"


def test_what_is_saved_is_loaded_by_name_and_by_id(store: ConversationStore) -> None:
    turns = [*exchange("Grüße, 犬 \udcff?", reasoning="Hm.", finish_reason="length"), *exchange("And?")]
    saved = SavedConversation.begin("demo", name="Über Hunde").with_turns(turns, system="Brief.")
    store.save(saved)
    for name in ("Über Hunde", "u\u0308BER hunde", saved.id):
        assert ConversationStore(store.folder).load(name) == saved
    assert saved.created.tzinfo is UTC and saved.changed >= saved.created


def test_list_is_of_the_last_changed_first_and_latest_is_its_first(store: ConversationStore) -> None:
    assert store.list() == [] and store.latest() is None
    first, second = talk("One?"), talk("Two,\n  " + "very " * 30 + "long?")
    store.save(first)
    store.save(second)
    assert [summary.id for summary in store.list()] == [second.id, first.id]
    longer = first.with_turns([*first.turns, *exchange("More?")], system=None)
    store.save(longer)
    newest, oldest = store.list()
    assert (newest.id, newest.name, newest.num_messages, newest.first_words) == (first.id, "one", 4, "One?")
    assert oldest.first_words.startswith("Two, very") and len(oldest.first_words) == 60
    assert newest.num_bytes == file_of(store, "one").stat().st_size
    latest = store.latest()
    assert latest is not None and latest.turns == longer.turns


@pytest.mark.skipif(sys.platform == "win32", reason="no modes there")
def test_files_and_folders_are_for_their_owner_only(store: ConversationStore) -> None:
    store.save(talk(name="mine"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in (store.folder, store.folder.parent)} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.folder.iterdir()} == {0o600}


def test_a_file_is_synced_before_it_takes_its_name_and_the_folder_after(store, monkeypatch) -> None:
    done = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda one: (done.append("folder" if stat.S_ISDIR(os.fstat(one).st_mode) else "file"), sync(one))
    )
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), rename(*names)))
    for _ in range(2):
        done.clear()
        store.save(talk())
    assert done == ["file", "rename", *(["folder"] if sys.platform != "win32" else [])]


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not synced there")
def test_names_of_new_folders_are_synced_by_the_first_save(store: ConversationStore, monkeypatch) -> None:
    synced = []
    monkeypatch.setattr(disk, "sync_folder", lambda folder: synced.append(Path(folder)))
    store.save(talk())
    assert synced[:-1] == [store.folder.parent.parent, store.folder.parent] and synced[-1] == store.folder
    store.save(talk())
    ConversationStore(store.folder).save(talk())
    assert synced[3:] == [store.folder, store.folder.parent, store.folder]


def test_renaming_does_not_make_the_turns_of_another_program_ones_own(store: ConversationStore) -> None:
    store.save(talk(name="shared"))
    ours, other = store.load("shared"), ConversationStore(store.folder)
    theirs = other.load("shared")
    theirs = theirs.with_turns([*theirs.turns, *exchange("Theirs?")], system=None)
    other.save(theirs)
    store.rename("shared", "renamed")
    store.save(ours.with_turns([*ours.turns, *exchange("Ours?")], system=None))
    assert ConversationStore(store.folder).load("renamed").turns == theirs.turns
    assert len(store.list()) == 2


def test_an_id_is_of_the_conversation_in_its_file_though_this_program_goes_on_under_another(
    store: ConversationStore,
) -> None:
    store.save(talk(name="shared"))
    ours, theirs = store.load("shared"), ConversationStore(store.folder).load("shared")
    theirs = theirs.with_turns([*theirs.turns, *exchange("Theirs?")], system=None)
    other = ConversationStore(store.folder)
    other.load("shared")
    other.save(theirs)
    ours = ours.with_turns([*ours.turns, *exchange("Ours?")], system=None)
    store.save(ours)
    assert store.id_of(ours) != ours.id
    assert store.load(store.id_of(ours)).turns == ours.turns
    store.delete(ours.id)
    assert [summary.id for summary in store.list()] == [store.id_of(ours)]


@pytest.mark.parametrize("step", ["status", "entries"])
def test_a_folder_that_cannot_be_seen_is_refused_or_saved_to(store: ConversationStore, monkeypatch, step: str) -> None:
    chat = talk(name="one")
    store.save(chat)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(disk, {"status": "exists"}.get(step, step), refuse)
        if step == "status":
            with pytest.raises(SessionFileError, match="cannot be read: Permission denied"):
                ConversationStore(store.folder).save(chat)
        else:
            with pytest.raises(SessionFileError, match="cannot be read: Permission denied"):
                ConversationStore(store.folder).save(talk())
    assert store.load("one").turns == chat.turns


def test_names_are_made_of_the_first_words_and_are_unique(store: ConversationStore) -> None:
    for _ in range(3):
        store.save(talk("What is a DOG? (in short)"))
    store.save(talk("...?"))
    store.save(talk("Loooo" + "o" * 80 + "ng"))
    names = {summary.name for summary in store.list()}
    dogs = {"what-is-a-dog-in-short", "what-is-a-dog-in-short-2", "what-is-a-dog-in-short-3"}
    assert names == {*dogs, "conversation", "l" + "o" * 39}


def test_turns_of_two_writers_are_kept_though_the_clock_stands_still(store: ConversationStore) -> None:
    first = talk(name="dogs")
    store.save(first)
    other = ConversationStore(store.folder)
    theirs = other.load("dogs")
    theirs = replace(theirs, turns=[*theirs.turns, *exchange("Theirs?")])
    other.save(theirs)
    ours = replace(first, turns=[*first.turns, *exchange("Ours?")])
    store.save(ours)
    fresh = ConversationStore(store.folder)
    kept = [fresh.load(summary.id).turns for summary in fresh.list()]
    assert ours.turns in kept and theirs.turns in kept


def test_a_turn_is_saved_though_its_name_was_taken_meanwhile(store: ConversationStore, caplog) -> None:
    store.save(talk(name="Dogs"))
    late = talk(name="dogs")
    store.save(late)
    assert store.load(late.id).name == "dogs-2"
    assert "'dogs-2'" in caplog.text


def test_rename_keeps_turns_and_times_and_refuses_what_is_taken(store: ConversationStore) -> None:
    store.save(talk(name="one"))
    store.save(talk(name="two"))
    before = store.load("one")
    for taken in ("two", "TWO"):
        with pytest.raises(RequestError, match="another conversation is named"):
            store.rename("one", taken)
    store.rename("one", "ONE")
    assert store.load(before.id) == replace(before, name="ONE")
    store.rename(before.id, "three")
    assert store.load("three") == replace(before, name="three")
    with pytest.raises(RequestError, match="no saved conversation 'one'"):
        store.load("one")


@pytest.mark.parametrize("name", ["", " x", "x\n", "a\x1b[2J", "-x", "20261122-140612-a1b2c3", "x" * 81])
def test_names_that_could_not_be_typed_or_shown_are_refused(store: ConversationStore, name: str) -> None:
    store.save(talk(name="one"))
    with pytest.raises(RequestError, match="cannot be the name"):
        store.rename("one", name)


def test_a_chat_that_goes_on_keeps_the_name_given_elsewhere(store: ConversationStore) -> None:
    chat = talk()
    store.save(chat)
    ConversationStore(store.folder).rename(chat.id, "renamed")
    chat = chat.with_turns([*chat.turns, *exchange("More?")], system=None)
    store.save(chat)
    store.rename(chat.id, "again")
    store.save(chat)
    assert store.load("again").turns == chat.turns
    assert len(store.list()) == 1
    store.save(replace(chat, name="by the chat"))
    assert store.load(chat.id).name == "by the chat"


def test_two_that_continue_one_conversation_lose_no_turn(store: ConversationStore, caplog) -> None:
    store.save(talk(name="shared"))
    others = ConversationStore(store.folder)
    ours, theirs = store.load("shared"), others.load("shared")
    theirs = theirs.with_turns([*theirs.turns, *exchange("Theirs?")], system=None)
    others.save(theirs)
    for question in ("Ours?", "Ours again?"):
        ours = ours.with_turns([*ours.turns, *exchange(question)], system=None)
        store.save(ours)
    assert caplog.text.count("was changed by another program") == 1
    assert others.load("shared").turns == theirs.turns
    assert ConversationStore(store.folder).load("shared-2").turns == ours.turns
    assert len(store.list()) == 2
    store.rename(store.id_of(ours), "ours")
    assert ConversationStore(store.folder).load("ours").turns == ours.turns


def test_a_chat_that_goes_on_after_its_file_was_deleted_saves_it_again(store: ConversationStore) -> None:
    chat = talk(name="kept")
    store.save(chat)
    ConversationStore(store.folder).delete("kept")
    store.save(chat)
    assert store.load("kept") == chat


DAMAGE = {
    "empty": (b"", "not JSON"),
    "cut": (b'{"format": "localinfer conv', "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "not text": (b"\xff\xfe\x00", "not JSON"),
    "of another program": (b'{"messages": []}', "not a saved conversation"),
    "of a later version": ({"version": 3}, "format version 3"),
    "without a name": ({"name": None}, "its name is not text"),
    "with foreign turns": ({"turns": [{"role": "user"}]}, "turns are not messages"),
    "with turns that are no list": ({"turns": {}}, "turns are not messages"),
    "with reasoning that is no text": ({"turns": [{"role": "user", "content": "", "reasoning": 1}]}, "turns are not"),
    "without a time": ({"changed": "soon"}, "is not a time"),
    "without a time zone": ({"changed": "2026-01-01T00:00:00"}, "no time zone"),
    "with the id of another": ({"id": "20200101-000000-000000"}, "does not fit its id"),
    "with an id that is none": ({"id": "../x"}, "its id is"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_and_kept_and_hides_nothing(store: ConversationStore, caplog, kind: str) -> None:
    store.save(talk(name="whole"))
    store.save(talk(name="damaged"))
    path = file_of(store, "damaged")
    content, reason = DAMAGE[kind]
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_bytes()) | content).encode()
    path.write_bytes(content)
    fresh = ConversationStore(store.folder)
    assert [summary.name for summary in fresh.list()] == ["whole"]
    assert str(path) in caplog.text and reason in caplog.text
    fresh.list()
    assert caplog.text.count(str(path)) == 1
    latest = fresh.latest()
    assert latest is not None and latest.name == "whole"
    for store_that_knows in (store, fresh):
        with pytest.raises(SessionFileError, match=reason):
            store_that_knows.load(path.stem)
    assert path.read_bytes() == content
    fresh.delete(path.stem)
    assert not path.exists()


def test_a_chat_whose_file_was_damaged_goes_on_in_another(store: ConversationStore, caplog) -> None:
    chat = talk(name="mine")
    store.save(chat)
    path = file_of(store, "mine")
    path.write_bytes(b"nonsense")
    store.save(chat)
    assert path.read_bytes() == b"nonsense"
    assert str(path) in caplog.text
    assert store.load("mine").turns == chat.turns


def test_foreign_files_in_the_folder_are_named(store: ConversationStore, caplog) -> None:
    store.save(talk(name="one"))
    copy = store.folder / "one copy.json"
    copy.write_bytes(file_of(store, "one").read_bytes())
    (store.folder / "folder").mkdir()
    assert [summary.name for summary in store.list()] == ["one"]
    assert "one copy.json" in caplog.text and "folder cannot be read" in caplog.text


def test_of_two_with_one_name_the_id_decides(store: ConversationStore) -> None:
    store.save(talk(name="one"))
    store.save(talk(name="two"))
    path = file_of(store, "two")
    path.write_text(path.read_text().replace('"two"', '"one"'))
    with pytest.raises(RequestError, match=f"several.*{path.stem}"):
        store.load("one")
    assert store.load(path.stem).name == "one"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_an_error_that_leaves_the_former_turns(store, monkeypatch, code: int) -> None:
    chat = talk(name="one")
    store.save(chat)

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    longer = chat.with_turns([*chat.turns, *exchange("More?")], system=None)
    for owner, place in ((records, "write_all"), (disk, "sync_folder")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, place, full)
            with pytest.raises(SessionFileError, match=f"cannot be written: {os.strerror(code)}; "):
                store.save(longer)
        names = sorted(os.listdir(store.folder))
        assert names == [".lock", f"{chat.id}.json"]
        assert ConversationStore(store.folder).load("one").turns in (chat.turns, longer.turns)
    store.save(longer)
    assert len(store.list()) == 1
    assert store.load("one").turns == longer.turns


def test_a_folder_that_cannot_be_used_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "conversations"):
        with pytest.raises(SessionFileError, match="--no-history"):
            ConversationStore(folder).save(talk())


@pytest.mark.skipif(sys.platform == "win32", reason="no modes there")
def test_a_folder_that_others_can_write_is_refused(store: ConversationStore) -> None:
    store.folder.mkdir(parents=True)
    store.folder.chmod(0o777)
    with pytest.raises(SessionFileError, match="can be written by other users"):
        store.save(talk())


@pytest.mark.skipif(sys.platform == "win32", reason="other locks there")
def test_a_lock_that_is_never_given_back_is_an_error_and_no_wait_for_ever(store, monkeypatch) -> None:
    store.save(talk())
    monkeypatch.setattr(conversations, "_LOCK_SECONDS", 0.0)
    with store._locked(), pytest.raises(SessionFileError, match="another program has held"):
        ConversationStore(store.folder).save(talk())
    store.save(talk())


def test_export_as_markdown_can_be_read(store: ConversationStore) -> None:
    time = datetime(2026, 3, 4, 5, 6, tzinfo=UTC)
    turns = [*exchange("A?", "```\nB\n```\n", reasoning="one\n\ntwo", finish_reason="length"), *exchange("C?")]
    turns.append({"role": "assistant", "content": "", "tool_calls": ["犬"], "finish_reason": "cancelled"})
    saved = SavedConversation("20260304-050600-abcdef", "Letters", "/home/me/demo.gguf", "Brief.", turns, time, time)
    assert saved.to_markdown() == (
        "# Letters\n\nModel: demo  \nBegun: 2026-03-04 05:06 UTC  \nLast changed: 2026-03-04 05:06 UTC\n\n"
        "## System\n\nBrief.\n\n## User\n\nA?\n\n## Assistant\n\n> **Reasoning**\n>\n> one\n>\n> two\n\n"
        "```\nB\n```\n\n*(cut at its maximum length)*\n\n## User\n\nC?\n\n## Assistant\n\nYes.\n\n"
        '## Assistant\n\n```json\n[\n "犬"\n]\n```\n\n*(stopped)*\n'
    )
    assert json.loads(saved.to_json())["changed"] == "2026-03-04T05:06:00.000000Z"
    assert SavedConversation.from_json(saved.to_json()) == saved


def test_a_user_without_a_home_has_no_store(monkeypatch) -> None:
    monkeypatch.setattr(conversations, "user_folder", lambda _: None)
    assert open_store() is None


WRITER = """
import os, sys
os.fsync = lambda _: None
from pathlib import Path
from typing import Any
from localinfer.storage.conversations import ConversationStore, SavedConversation
store = ConversationStore(Path(sys.argv[1]))
for number in range(10):
    begun = SavedConversation.begin("demo", name="same")
    store.save(begun.with_turns([{"role": "user", "content": str(number)}], system=None))
"""


def test_writers_of_several_processes_never_give_one_name_twice(store: ConversationStore) -> None:
    code = f"import sys; sys.argv[1:] = [{str(store.folder)!r}]\n{WRITER}"
    for process in [start(code) for _ in range(3)]:
        _, errors = process.communicate(timeout=seconds(30))
        assert process.returncode == 0, errors
    assert {summary.name for summary in store.list()} == {"same", *(f"same-{number}" for number in range(2, 31))}


KILLED = """
import hashlib, os, random, signal, sys
os.fsync = lambda _: None  # The system outlives the process: no disk is waited for.
from pathlib import Path
from typing import Any
from localinfer.storage.conversations import ConversationStore, SavedConversation

folder = Path(sys.argv[1])
chance = random.Random(int(sys.argv[2]))
first = SavedConversation.begin("demo", name="killed")

def turn(number):
    return {"role": "user", "content": f"{number} " + hashlib.sha256(str(number).encode()).hexdigest() * 200}

def number_of(turn):
    return int(turn["content"].split()[0])

def talk(announce):
    store = ConversationStore(folder)
    saved = store.load(first.id) if store.list() else first
    turns = list(saved.turns)
    while True:
        # Some turns are removed again, as an edit does.
        turns = turns[-chance.randrange(1, 9):] + [turn(number_of(turns[-1]) + 1 if turns else 0)]
        store.save(saved := saved.with_turns(turns, system=None))
        os.write(announce, b"%d\\n" % number_of(turns[-1]))

kills, finished, found, most = 0, -1, -1, 0
while kills < 100:
    listen, announce = os.pipe()
    child = os.fork()
    if not child:
        os.close(listen)
        chance.seed(kills)
        talk(announce)
    os.close(announce)
    heard = b""
    for _ in range(chance.randrange(4)):
        heard += os.read(listen, 1 << 16)
    for _ in range(chance.randrange(3000)):
        hashlib.sha256(b"some microseconds").digest()
    os.kill(child, signal.SIGKILL)
    kills += 1
    os.waitpid(child, 0)
    while part := os.read(listen, 1 << 16):
        heard += part
    os.close(listen)
    if heard:
        finished = int(heard.split()[-1])
    store = ConversationStore(folder)
    summaries = store.list()
    names = [name for name in os.listdir(folder) if name.endswith(".json")] if folder.exists() else []
    assert len(summaries) == len(names) <= 1, names
    if summaries:
        turns = store.load(first.id).turns
        numbers = [number_of(one) for one in turns]
        assert turns == [turn(number) for number in numbers], "a turn is not whole"
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert max(finished, found) <= numbers[-1] <= max(finished, found) + 1, (finished, found, numbers)
        found = numbers[-1]
    else:
        assert finished < 0
    most = max(most, sum(name.endswith(".tmp") for name in os.listdir(folder)) if folder.exists() else 0)
store = ConversationStore(folder)
store.save(store.load(first.id))
assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
print(kills, found, most)
"""


@NEEDS_FORK
def test_killed_at_random_moments_every_finished_turn_is_there(tmp_path: Path) -> None:
    code = f"import sys; sys.argv[1:] = [{str(tmp_path / 'conversations')!r}, '1']\n{KILLED}"
    output, _ = run(code)
    kills, turns, _ = map(int, output.split())
    assert kills == 100 and turns > 100, "the moments are spread over the work"


PICTURES = [bytes([number]) * 2000 for number in range(3)]


def part(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "image", **more, "data": base64.b64encode(PICTURES[number]).decode()}


def seen(*numbers: int, question: str = "What?") -> list[dict[str, Any]]:
    """A turn with pictures, and a reply."""
    parts = [*(part(number, name=f"{number}.png") for number in numbers), {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": "Yes."}]


def media_files(store: ConversationStore) -> list[Path]:
    return sorted((store.folder / "media").glob("*")) if (store.folder / "media").exists() else []


def test_a_picture_is_one_file_however_many_turns_show_it(store: ConversationStore) -> None:
    conversation = SavedConversation.begin("demo", name="pictures")
    turns: list[dict[str, Any]] = []
    for _ in range(10):
        turns += seen(0)
        conversation = conversation.with_turns(turns, system=None)
        store.save(conversation)
    (file,) = media_files(store)
    assert file.read_bytes() == PICTURES[0]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 or sys.platform == "win32"
    record = store.folder / f"{conversation.id}.json"
    assert len(record.read_bytes()) < 10 * 800 and "data" not in record.read_text()
    other = ConversationStore(store.folder)
    loaded = other.load("pictures")
    assert loaded == conversation
    assert other.list()[0].num_bytes == len(record.read_bytes()) + 2000
    # What goes out is whole.
    assert SavedConversation.from_json(loaded.to_json()) == conversation
    with pytest.raises(SessionFileError, match="sessions export"):
        SavedConversation.from_json(record.read_bytes())
    # Going on, renaming and editing keep what is shown, and nothing else.
    other.save(loaded.with_turns([*loaded.turns, *seen(1, 0)], system=None))
    other.rename("pictures", "seen")
    assert len(media_files(store)) == 2
    fresh = ConversationStore(store.folder)
    fresh.save(fresh.load("seen").with_turns(seen(1), system=None))
    assert [file.read_bytes() for file in media_files(store)] == [PICTURES[1]]
    fresh.save(talk(name="words"))
    fresh.delete("seen")
    assert not media_files(store) and [one.name for one in fresh.list()] == ["words"]


def test_conversations_of_before_have_their_pictures_inside_and_are_read(store: ConversationStore) -> None:
    conversation = SavedConversation.begin("demo", name="old").with_turns(seen(0, 1), system=None)
    store.save(talk())
    (store.folder / f"{conversation.id}.json").write_text(conversation.to_json())
    assert store.load("old") == conversation and not media_files(store)
    store.save(conversation.with_turns([*conversation.turns, *exchange("More?")], system=None))
    assert len(media_files(store)) == 2 and len(store.list()) == 2
    # What would not come back as it was stays inside.
    odd = [{"role": "user", "content": [{"type": "image", "data": "AAA=\n"}]}, {"role": "assistant", "content": "Yes."}]
    kept = SavedConversation.begin("demo", name="odd").with_turns(odd, system=None)
    store.save(kept)
    assert ConversationStore(store.folder).load("odd") == kept and len(media_files(store)) == 2


def test_a_picture_that_is_gone_or_damaged_is_named_and_the_conversation_continues(
    store: ConversationStore, caplog: pytest.LogCaptureFixture
) -> None:
    conversation = SavedConversation.begin("demo", name="lost").with_turns(seen(0, 1, 2), system=None)
    store.save(conversation)
    first, second = (file for data in PICTURES[:2] for file in media_files(store) if file.read_bytes() == data)
    first.unlink()
    second.write_bytes(b"something else")
    loaded = ConversationStore(store.folder).load("lost")
    content = loaded.turns[0]["content"]
    assert [one.get("text") for one in content] == ["[image 0.png]", "[image 1.png]", None, "What?"]
    assert content[2] == part(2, name="2.png")
    assert "its image 0.png is gone" in caplog.text and "its image 1.png is damaged" in caplog.text
    assert caplog.text.count("stands in its place") == 1
    fresh = ConversationStore(store.folder)
    fresh.save(fresh.load("lost").with_turns([*loaded.turns, *exchange("More?")], system=None))
    assert len(ConversationStore(store.folder).load("lost").turns) == 4


def test_a_picture_that_cannot_be_read_now_is_not_lost(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = SavedConversation.begin("demo", name="kept").with_turns(seen(0), system=None)
    store.save(conversation)
    fresh, real = ConversationStore(store.folder), records.RecordStore.read

    def fail(self: records.RecordStore, name: str) -> bytes:
        if not name.endswith(".json"):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(records.RecordStore, "read", fail)
        with pytest.raises(SessionFileError, match=r"pictures cannot be read: Input/output error; they are kept"):
            fresh.load("kept")
    assert fresh.load("kept") == conversation


def test_a_picture_of_a_conversation_saved_meanwhile_is_that_of_the_later_one(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = SavedConversation.begin("demo", name="edited").with_turns(seen(0), system=None)
    store.save(first)
    fresh, real = ConversationStore(store.folder), conversation_media.ConversationMedia.unpacked

    def save_before(self: Any, id: str, turns: Any) -> Any:
        monkeypatch.setattr(conversation_media.ConversationMedia, "unpacked", real)
        store.save(first.with_turns(seen(1), system=None))
        return real(self, id, turns)

    monkeypatch.setattr(conversation_media.ConversationMedia, "unpacked", save_before)
    assert fresh.load("edited").turns == seen(1) and not caplog.records


def test_files_of_no_conversation_are_deleted_and_others_left(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(SavedConversation.begin("demo", name="kept").with_turns(seen(0), system=None))
    unsaved = SavedConversation.begin("demo").with_turns(seen(1), system=None)
    with monkeypatch.context() as patch:
        real = records.RecordStore.write

        def fail(self: records.RecordStore, name: str, content: bytes) -> None:
            if name.endswith(".json"):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(self, name, content)

        patch.setattr(records.RecordStore, "write", fail)
        with pytest.raises(SessionFileError, match="No space"):
            store.save(unsaved)
    assert len(media_files(store)) == 2
    (store.folder / "media" / "mine.txt").write_text("not ours")
    broken = store.folder / f"{SavedConversation.begin('demo').id}.json"
    broken.write_text("{")
    of_broken = store.folder / "media" / f"{broken.stem}-{'0' * 64}"
    of_broken.write_bytes(b"its picture")
    ConversationStore(store.folder).save(talk())
    of_kept = f"{store.load('kept').id}-{hashlib.sha256(PICTURES[0]).hexdigest()}"
    assert {file.name for file in media_files(store)} == {"mine.txt", of_broken.name, of_kept}
    store.delete(broken.stem)
    assert not of_broken.exists()

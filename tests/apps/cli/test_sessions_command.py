"""`localinfer sessions`: saved conversations listed, shown, renamed, deleted, exported; and what the cache leaves."""

import json
import stat
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest

from localinfer.apps.cli import main
from localinfer.apps.cli.sessions import ago, sessions_command
from localinfer.apps.terminal.loop import open_history
from localinfer.storage.conversations import ConversationStore, SavedConversation
from tests.kernels.subprocesses import run as run_python

TURNS = [{"role": "user", "content": "What is\na dog?"}, {"role": "assistant", "content": "A pet."}]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConversationStore:
    """The store of this user, with two conversations."""
    for module in (
        "localinfer.system.folders",
        "localinfer.storage.conversations",
        "localinfer.apps.terminal.loop",
    ):
        monkeypatch.setattr(f"{module}.user_folder", lambda _: tmp_path / "state")
    found = ConversationStore(tmp_path / "state" / "conversations")
    for name in ("first", "犬 dog"):
        found.save(SavedConversation.begin("demo", name=name).with_turns(TURNS, system="Brief."))
    return found


def command(*words: str) -> int:
    return main(["sessions", *words])


def test_the_list_is_a_table_with_the_last_changed_first(store: ConversationStore, capsys) -> None:
    assert command() == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "model", "messages", "last", "change", "first", "words"]
    assert lines[0].startswith("犬 dog  demo          2  just now     What is a dog?")
    assert lines[1].startswith("first   demo ")


def test_the_list_as_json_can_be_read_by_programs(store: ConversationStore, capsys) -> None:
    assert command("--json") == 0
    newest, oldest = json.loads(capsys.readouterr().out)
    assert (newest["name"], newest["messages"], newest["first_words"]) == ("犬 dog", 2, "What is a dog?")
    assert datetime.fromisoformat(oldest["changed"]).tzinfo is not None


def test_without_any_the_list_says_how_one_begins(store: ConversationStore, capsys) -> None:
    assert command("delete", "first", "犬 DOG") == 0
    assert capsys.readouterr().out == "deleted first\ndeleted 犬 DOG\n"
    assert command() == 0
    assert "'localinfer chat' begins one" in capsys.readouterr().out
    assert command("--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_show_and_export_are_the_same_markdown(store: ConversationStore, tmp_path: Path, capsys) -> None:
    assert command("show", "first") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# first\n") and "## Assistant\n\nA pet.\n" in shown
    for words in (["x.md"], ["x.txt"], ["x.json", "--format", "markdown"]):
        assert command("export", "first", "-o", str(tmp_path / words[0]), *words[1:]) == 0
        assert (tmp_path / words[0]).read_text() == shown
    assert command("export", "first", "-o", "-") == 0
    assert capsys.readouterr().out == shown


def test_export_as_json_has_everything(store: ConversationStore, tmp_path: Path) -> None:
    for name, words in (("x.JSON", []), ("x", ["--format", "json"])):
        assert command("export", "first", "-o", str(tmp_path / name), *words) == 0
        assert SavedConversation.from_json((tmp_path / name).read_bytes()) == store.load("first")
        if sys.platform != "win32":
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_rename_says_what_it_did_and_refuses_what_is_taken(store: ConversationStore, capsys) -> None:
    assert command("rename", "first", "1st") == 0
    assert capsys.readouterr().out == "renamed first to 1st\n"
    assert command("rename", "1st", "犬 DOG") == 2
    assert "another conversation is named" in capsys.readouterr().err
    assert {summary.name for summary in store.list()} == {"1st", "犬 dog"}


def test_a_name_that_is_nearly_right_gets_a_hint(store: ConversationStore, capsys) -> None:
    assert command("show", "frist") == 2
    error = capsys.readouterr().err
    assert "did you mean 'first'?" in error and "'localinfer sessions' lists all" in error


def test_a_damaged_file_is_a_warning_beside_the_list(store: ConversationStore, capsys) -> None:
    path = store.folder / f"{store.load('first').id}.json"
    path.write_bytes(b"nonsense")
    listed = (
        "import sys, pathlib\nfrom localinfer.apps import cli\nfrom localinfer.storage import conversations\n"
        f"conversations.user_folder = lambda _: pathlib.Path({str(store.folder.parent)!r})\n"
        "code = cli.main(['sessions'])\nassert 'numba' not in sys.modules\nsys.exit(code)"
    )
    output, errors = run_python(listed)
    assert [line.split("  ")[0] for line in output.splitlines()] == ["name", "犬 dog"]
    assert errors.startswith("warning: ") and str(path) in errors and len(errors.splitlines()) == 1


def test_a_shell_completes_names_and_sees_no_warning(store: ConversationStore, monkeypatch, capsys) -> None:
    (store.folder / "foreign").write_text("")
    argument = next(one for one in sessions_command.commands["show"].params if one.name == "name")
    context = click.Context(sessions_command)
    assert [item.value for item in argument.shell_complete(context, "FI")] == ["first"]
    monkeypatch.setattr("localinfer.storage.conversations.user_folder", lambda _: None)
    assert argument.shell_complete(context, "") == []
    assert capsys.readouterr() == ("", "")


def test_a_user_without_a_home_is_told(monkeypatch, capsys) -> None:
    monkeypatch.setattr("localinfer.storage.conversations.user_folder", lambda _: None)
    assert command() == 2
    assert "set HOME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("passed", "words"),
    [
        (timedelta(seconds=-5), "just now"),
        (timedelta(seconds=59), "just now"),
        (timedelta(seconds=60), "1 minute ago"),
        (timedelta(minutes=59, seconds=59), "59 minutes ago"),
        (timedelta(hours=1), "1 hour ago"),
        (timedelta(days=6, hours=23), "6 days ago"),
    ],
)
def test_how_long_ago_is_said_in_words(passed: timedelta, words: str) -> None:
    now = datetime(2026, 3, 4, tzinfo=UTC)
    assert ago(now - passed, now) == words
    assert ago(now - timedelta(days=8), now).startswith("2026-02-2")


def test_clearing_the_cache_says_what_it_leaves(store: ConversationStore, tmp_path: Path, capsys) -> None:
    history = open_history()
    history.append_string("typed")
    words = ["cache", "--disk-cache-folder", str(tmp_path / "cache"), "--clear"]
    assert main(words) == 0
    told = capsys.readouterr().out
    path = tmp_path / "state" / "chat-history"
    assert f"kept 2 saved conversations in {store.folder}; 'localinfer sessions'" in told
    assert f"kept {path.stat().st_size} bytes of lines typed in chats, in {path}; --clear --typed-lines deletes" in told

    assert main([*words, "--typed-lines"]) == 0
    told = capsys.readouterr().out
    assert "bytes of typed lines from" in told and "kept 2 saved" in told
    history.append_string("typed later")
    assert "typed later" in path.read_text() and "+typed\n" not in path.read_text()
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    store.delete("first")
    store.delete("犬 dog")
    path.write_text("")
    assert main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1

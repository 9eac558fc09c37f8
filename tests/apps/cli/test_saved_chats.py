"""Chats that outlive their process: killed, continued and cached; and chats of which nothing is kept."""

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from localinfer.apps.cli import chat as chat_command, main
from localinfer.apps.terminal import continuing
from localinfer.apps.terminal.commands import Chat
from localinfer.apps.terminal.continuing import SavedChat, begin_saving, show_continued
from localinfer.apps.terminal.conversation import Conversation
from localinfer.errors import ContextLengthError, RequestError, SessionFileError
from localinfer.generation.stream import StreamEvent
from localinfer.storage.conversations import ConversationStore, SavedConversation
from tests.apps.cli.chat_command import CACHED, READY, ChatCommand
from tests.support.limits import wait_until

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello there", "finish_reason": "stop"}]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConversationStore:
    """The store of this user, whose folders are the test's."""
    for module in ("localinfer.storage.conversations", "localinfer.apps.terminal.loop"):
        monkeypatch.setattr(f"{module}.user_folder", lambda _: tmp_path / "state")
    return ConversationStore(tmp_path / "state" / "conversations")


def begin(continues: bool = False, session: str | None = None, system: str | None = None) -> SavedChat:
    options = {"model": None, "disk_cache": True}
    begun = begin_saving(options, continues=continues, session=session, system=system, no_history=False)
    assert begun is not None and options["disk_cache"]
    return begun


def converse(llm, saving: SavedChat, system: str | None = None) -> Conversation:
    return Conversation(llm, system=system, max_tokens=None, seed=3, saved=saving.saved, save=saving.save)


def save_talk(
    store: ConversationStore, name: str, turns: list[dict[str, str]] = TURNS, system: str | None = None
) -> None:
    store.save(SavedConversation.begin("demo", name=name).with_turns(turns, system=system))


def test_every_turn_is_saved_and_a_stopped_one_as_far_as_it_came(fake_llm, store: ConversationStore) -> None:
    conversation = converse(fake_llm, begin(session="greeting", system="Brief."), system="Brief.")
    list(conversation.reply("hi"))
    kept = store.load("greeting")
    assert [turn["content"] for turn in kept.turns] == ["hi", "Hello there"]
    assert (kept.system, kept.model) == ("Brief.", "demo")
    fake_llm.pieces = [StreamEvent("", 1, None, None, "Hm."), "Well"]
    stopped = conversation.reply("and?")
    next(stopped), next(stopped)
    stopped.close()
    last = store.load("greeting").turns[-1]
    assert (last["content"], last["reasoning"], last["finish_reason"]) == ("Well", "Hm.", "cancelled")
    assert conversation.messages[-1] == {"role": "assistant", "content": "Well"}


def test_a_continued_conversation_goes_on_where_it_was(fake_llm, store: ConversationStore) -> None:
    save_talk(store, "old")
    save_talk(store, "new", system="Brief.")
    for wish in ({"continues": True}, {"session": "NEW"}):
        saving = begin(**wish)
        assert saving.saved.name == "new"
        conversation = converse(fake_llm, saving)
        list(conversation.reply("and?"))
        assert [message["content"] for message in fake_llm.prompts[-1]] == ["Brief.", "hi", "Hello there", "and?"]
        assert len(store.load("new").turns) == 4
        store.save(store.load("new").with_turns(TURNS, system="Brief."))
    conversation = converse(fake_llm, begin(session="new"), system="Long.")
    list(conversation.reply("and?"))
    assert store.load("new").system == "Long."
    assert len(store.list()) == 2


def test_clear_begins_another_conversation(fake_llm, store: ConversationStore) -> None:
    conversation = converse(fake_llm, begin())
    list(conversation.reply("first"))
    conversation.clear()
    list(conversation.reply("second"))
    assert {summary.first_words for summary in store.list()} == {"first", "second"}


def test_a_disk_that_is_full_is_told_and_ends_no_chat(fake_llm) -> None:
    def full(_: SavedConversation) -> None:
        raise SessionFileError("no space left")

    conversation = Conversation(
        fake_llm, system=None, max_tokens=None, seed=3, saved=SavedConversation.begin("demo"), save=full
    )
    output, notices = io.StringIO(), io.StringIO()
    chat = Chat(conversation, output, notices)
    chat.handle("hi")
    chat.handle("hi")
    assert output.getvalue() == "Hello there\nHello there\n"
    assert "not saved: no space left" in notices.getvalue()


def test_ctrl_c_while_a_turn_is_saved_saves_it(store: ConversationStore, monkeypatch) -> None:
    saving = begin(session="one")
    write, attempts = ConversationStore.save, []

    def interrupted(self: ConversationStore, conversation: SavedConversation) -> None:
        attempts.append(conversation)
        if len(attempts) == 1:
            raise KeyboardInterrupt
        write(self, conversation)

    monkeypatch.setattr(ConversationStore, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saving.save(saving.saved.with_turns(TURNS, system=None))
    assert store.load("one").turns == TURNS


def test_nothing_to_continue_is_told_and_a_new_conversation_begun(store: ConversationStore, caplog) -> None:
    assert not begin(continues=True).saved.turns
    assert "no conversation is saved yet" in caplog.text


def test_a_name_that_is_nearly_that_of_another_is_told(store: ConversationStore, caplog) -> None:
    save_talk(store, "dogs")
    saved = begin(session="dosg").saved
    assert saved.name == "dosg" and not saved.turns
    assert "no conversation is named 'dosg'; this begins it, beside 'dogs'" in caplog.text


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"continues": True, "session": "x"}, "--continue and --session"),
        ({"continues": True, "no_history": True}, "--continue and --no-history"),
        ({"session": "x", "no_history": True}, "--session and --no-history"),
        ({"session": "-x"}, "cannot be the name"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(store: ConversationStore, wishes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        begin_saving(
            {"model": None}, **{"continues": False, "session": None, "system": None, "no_history": False, **wishes}
        )


def test_without_a_home_only_what_needs_it_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(continuing, "open_store", lambda: None)
    with pytest.raises(RequestError, match="--continue needs saved conversations: .*HOME"):
        begin(continues=True)
    saving = begin()
    with pytest.raises(SessionFileError, match="HOME"):
        saving.save(saving.saved)


def test_a_conversation_goes_on_with_its_model_unless_another_is_given(
    typed, fake_llm, store: ConversationStore, tmp_path: Path, monkeypatch, caplog
) -> None:
    (tmp_path / "other.gguf").write_text("")
    monkeypatch.chdir(tmp_path)
    loaded: list[object] = []
    monkeypatch.setattr(
        chat_command, "load_with", lambda options: (loaded.append(options["model"]), _Open(fake_llm))[1]
    )
    first = typed("hi\r\x04", "--session", "one", "-m", "other.gguf")
    assert "until now" not in first and store.load("one").model == str(tmp_path / "other.gguf")
    assert "with other, last changed" in typed("and?\r\x04", "--continue")
    typed("and?\r\x04", "--session", "one", "-m", "org/repo:q4")
    assert "'one' was with other until now, and continues with org/repo:q4" in caplog.text
    assert store.load("one").model == "org/repo:q4"
    save_talk(store, "demo talk")
    typed("\x04", "--session", "demo talk")
    assert loaded == ["other.gguf", str(tmp_path / "other.gguf"), "org/repo:q4", None]


def test_continuing_shows_the_last_exchange_without_its_control_sequences() -> None:
    question = "\n".join(f"line {number}" for number in range(20))
    turns = [*TURNS, {"role": "user", "content": question}, {"role": "assistant", "content": "Red \x1b[31m."}]
    saved = SavedConversation.begin("demo", name="one\x1b[2J").with_turns(turns, system=None)
    output, notices = Terminal(), io.StringIO()
    show_continued(saved, output, notices)
    assert output.getvalue() == "Red \u241b[31m.\n"
    told = notices.getvalue()
    assert "4 messages with demo, last changed just now" in told and "(2 earlier" in told
    assert "> line 0\n" in told and "> (8 more lines)\n" in told and "\x1b" not in told


@pytest.fixture
def typed(fake_llm, store: ConversationStore, monkeypatch) -> Callable[..., str]:
    """Run `localinfer chat` with a scripted model on a terminal and keys; what the terminal showed."""
    monkeypatch.setattr(chat_command, "load_with", lambda options: _Open(fake_llm))

    def run(keys: str, *words: str) -> str:
        output, notices = Terminal(), Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", notices)
        with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
            keyboard.send_text(keys)
            assert main(["chat", *words]) == 0
        return output.getvalue() + notices.getvalue()

    return run


class _Open:
    def __init__(self, llm: object) -> None:
        self._llm = llm

    def __enter__(self) -> object:
        return self._llm

    def __exit__(self, *_: object) -> None:
        pass


def test_a_terminal_keeps_the_conversation_and_the_typed_lines(typed, store: ConversationStore) -> None:
    typed("hi\r\x04")
    assert [summary.name for summary in store.list()] == ["hi"]
    assert "+hi" in (store.folder.parent / "chat-history").read_text()
    assert "continues 'hi'" in typed("and?\r\x04", "--continue")
    assert [summary.num_messages for summary in store.list()] == [4]


def test_no_history_keeps_nothing(typed, fake_llm, store: ConversationStore, monkeypatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        chat_command, "load_with", lambda options: (asked.append(options["disk_cache"]), _Open(fake_llm))[1]
    )
    assert "Hello there" in typed("hi\r\x04", "--no-history")
    assert asked == [False] and not store.folder.parent.exists()


def test_a_pipe_saves_nothing_and_may_continue(fake_llm, store: ConversationStore, monkeypatch, capsys) -> None:
    monkeypatch.setattr(chat_command, "load_with", lambda options: _Open(fake_llm))
    save_talk(store, "old")
    before = store.load("old")
    for words in ([], ["--continue"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("and?\n"))
        assert main(["chat", "--lines", *words]) == 0
    assert capsys.readouterr().out == "Hello there\n" * 2
    assert [len(prompt) for prompt in fake_llm.prompts] == [1, 3]
    assert store.load("old") == before and len(store.list()) == 1


@pytest.fixture
def once(fake_llm, store: ConversationStore, monkeypatch) -> Callable[..., int]:
    """Run `localinfer chat` with words and what is piped into it, nothing for a terminal."""
    monkeypatch.setattr(chat_command, "load_with", lambda options: _Open(fake_llm))

    def run(*words: str, piped: str | None = None) -> int:
        monkeypatch.setattr(sys, "stdin", Terminal() if piped is None else io.StringIO(piped))
        return main(["chat", *words])

    return run


def test_one_message_goes_on_with_a_saved_conversation_and_is_saved_in_it(once, fake_llm, store, capsys) -> None:
    save_talk(store, "old", system="Brief.")
    assert once("-p", "and?", "--continue", "--seed", "5") == 0
    assert capsys.readouterr() == ("Hello there\n", "")
    assert [message["content"] for message in fake_llm.prompts[-1]] == ["Brief.", "hi", "Hello there", "and?"]
    assert fake_llm.options[-1]["seed"] == 5
    assert [turn["content"] for turn in store.load("old").turns] == ["hi", "Hello there", "and?", "Hello there"]
    assert once("--session", "diff", piped="+ added\n") == 0
    assert once("-p", "Why?", "--session", "diff") == 0
    assert [turn["content"] for turn in store.load("diff").turns][::2] == ["+ added", "Why?"]
    assert len(store.list()) == 2
    assert once("-p", "kept nowhere") == 0
    assert len(store.list()) == 2 and len(fake_llm.prompts[-1]) == 1


def test_one_message_of_a_conversation_is_kept_as_far_as_its_answer_came(once, fake_llm, store, capsys) -> None:
    fake_llm.pieces = ["Hel", KeyboardInterrupt()]
    assert once("-p", "hi", "--session", "one") == 130
    assert capsys.readouterr().out == "Hel\n"
    last = store.load("one").turns[-1]
    assert (last["content"], last["finish_reason"]) == ("Hel", "cancelled")
    fake_llm.pieces = [ContextLengthError("too long")]
    assert once("-p", "more", "--session", "one") == 2
    assert "the message takes 4 tokens" in capsys.readouterr().err
    assert len(store.load("one").turns) == 2


def test_one_message_that_cannot_be_saved_is_answered_and_told(once, store, monkeypatch, capsys) -> None:
    def full(self: ConversationStore, _: SavedConversation) -> None:
        raise SessionFileError("no space left")

    monkeypatch.setattr(ConversationStore, "save", full)
    assert once("-p", "hi", "--session", "one") == 2
    captured = capsys.readouterr()
    assert captured.out == "Hello there\n" and "error: no space left" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--continue", "--no-history"], "--continue and --no-history exclude each other"),
        (["--session", "x", "--no-history"], "--session and --no-history exclude each other"),
        (["--session", "waits"], "waits for the result of a call of weather"),
    ],
)
def test_one_message_is_refused_where_it_cannot_go_on(once, fake_llm, store, capsys, words, message) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    save_talk(store, "waits", [TURNS[0], {"role": "assistant", "content": "", "tool_calls": calls}])
    assert once("-p", "and?", *words) == 2
    assert message in capsys.readouterr().err
    assert not fake_llm.prompts


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Callable[..., ChatCommand]]:
    pytest.importorskip("pty", reason="needs the terminals of Unix")
    running: list[ChatCommand] = []

    def start(*words: str) -> ChatCommand:
        running.append(ChatCommand(tmp_path, *words))
        running[-1].wait_for(READY)
        return running[-1]

    try:
        yield start
    finally:
        for one in running:
            one.close()


def test_a_killed_chat_is_shown_and_continued_without_computing_it_again(chat, tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "state" / "localinfer" / "conversations")
    first = chat("--session", "dog")
    first.type("Tell me a story about a little dog that finds a red ball in the garden.\r")
    first.wait_for(CACHED)
    assert wait_until(lambda: list((tmp_path / "cache").rglob("*.page"))), "the prompt cache writes behind"
    first.kill()
    kept = store.load("dog")
    assert [turn["role"] for turn in kept.turns] == ["user", "assistant"]

    second = chat("--continue")
    second.wait_for("continues 'dog'")
    assert " ".join(kept.turns[1]["content"].split())[:30] in " ".join(second.screen.split())
    second.type("And then?\r")
    num_prompt, num_cached = map(int, second.wait_for(CACHED).groups())
    assert 0 < num_cached < num_prompt
    assert wait_until(lambda: len(store.load("dog").turns) == 4)
    assert store.load("dog").turns[:2] == kept.turns
    assert len(store.list()) == 1

"""What is typed while a reply is printed: shown apart from it, never lost, one message for each Enter."""

import signal
from collections.abc import Iterator

import pytest

pytest.importorskip("pty", reason="needs the terminals of Unix")
pytest.importorskip("pyte", reason="reads the screen with pyte")

from tests.apps.cli.chat_on_terminal import ChatOnTerminal

STATUS = "scripted │"
SECOND_REPLY = "two"


@pytest.fixture
def chat() -> Iterator[ChatOnTerminal]:
    with ChatOnTerminal() as running:
        yield running.start()


def conversation(chat: ChatOnTerminal) -> list[str]:
    """Everything shown, without the last lines' status."""
    return [line for line in chat.text.split("\n") if line and not line.startswith(STATUS)]


def begin_reply(chat: ChatOnTerminal) -> None:
    """Send a first message, and wait until its reply has begun to show."""
    chat.type("first\r")
    chat.say("Some words ")
    chat.wait_for_row("Some words")


def reply_and_leave(chat: ChatOnTerminal) -> None:
    """Answer the message that is next, and end the chat."""
    chat.say("done ", ends="stop")
    chat.wait_for_row("done")
    chat.type("\x04")


def test_messages_typed_during_a_reply_are_shown_apart_and_follow_one_by_one(chat):
    begin_reply(chat)
    chat.type("second\rthird\rfourth, begu")
    chat.say("and more ")
    chat.wait_for_row("> fourth, begu_")
    chat.wait_for_row("Some words and more")
    below = chat.lines[-4:]
    assert below[:3] == ["next: second", "next: third", "> fourth, begu_"] and below[3].startswith(STATUS)
    chat.say(ends="stop")
    chat.say("Reply two ", ends="stop")
    chat.say("Reply three ", ends="stop")
    chat.wait_for_row("Reply three")
    chat.type("n and ended\r")
    chat.say("Reply four ", ends="stop")
    chat.wait_for_row("Reply four")
    chat.type("\x04")
    assert chat.asked() == ["first", "second", "third", "fourth, begun and ended"]
    shown = conversation(chat)
    assert shown[1:9] == [
        *["> first", "Some words and more", "> second", "Reply two"],
        *["> third", "Reply three", "> fourth, begun and ended", "Reply four"],
    ]


def test_keys_edit_what_is_typed_ahead(chat):
    chat.type("first\r")
    chat.say("a ")
    chat.wait_for_row("a")
    chat.type("wrod\x7f\x7f\x7ford\x01two \x05s\x1b[D\x1b[D!\x1b[3~\r")
    chat.wait_for_row("next: two wor!s")
    chat.type("\x1b[A\x17words, e\u0301\x7fi\x1b\rnext\nlast\r")
    chat.wait_for_row("next: (3 lines) two words, i↵next↵last")
    chat.say(ends="stop")
    chat.say("b ", ends="stop")
    chat.wait_for_row("b")
    chat.type("\x04")
    assert chat.asked() == ["first", "two words, i\nnext\nlast"]


def test_a_paste_of_5000_lines_during_a_reply_is_one_message(chat):
    lines = [f"line {number}" for number in range(5000)]
    begin_reply(chat)
    chat.type("\x1b[200~" + "\r".join(lines) + "\x1b[201~")
    chat.wait_for("> (5,000 lines)")
    chat.type("\r")
    chat.wait_for_row("next: (5,000 lines) line 0↵line 1")
    chat.say(ends="stop")
    chat.say("done ", ends="stop")
    chat.wait_for_row("done")
    assert "(4,988 more lines)" in chat.text
    chat.type("/exit\r")
    assert chat.asked() == ["first", "\n".join(lines)]


def test_a_paste_that_begins_in_a_reply_and_ends_after_it_is_one_message(chat):
    begin_reply(chat)
    chat.type("\x1b[200~line 1\r")
    chat.say(ends="stop")
    chat.type("line 2\x1b[201~\r")
    reply_and_leave(chat)
    assert chat.asked() == ["first", "line 1\nline 2"]


def test_keys_that_came_with_the_enter_come_before_those_typed_later(chat):
    chat.type("first\rsec")
    chat.say("Some words ")
    chat.wait_for_row("> sec_")
    chat.type("ond\r")
    chat.say(ends="stop")
    reply_and_leave(chat)
    assert chat.asked() == ["first", "second"]


def test_ctrl_d_typed_ahead_leaves_after_the_reply(chat):
    begin_reply(chat)
    chat.type("second\r\x04")
    chat.wait_for_row("leaves after this reply")
    chat.say(ends="stop")
    chat.say("done ", ends="stop")
    assert chat.asked() == ["first", "second"]


def test_wide_and_combining_characters_are_shown_whole(chat):
    chat.type("first\r")
    chat.say("日本語 and e\u0301\n")
    chat.wait_for_row("日本語 and")
    chat.type("漢字" * 50 + "ne\u0301")
    chat.wait_until(lambda: any(line.startswith("> ") and "né_" in line for line in chat.lines))
    row = next(line for line in chat.lines if "né_" in line)
    assert row.count("漢") > 15 and not row.startswith("> first")


@pytest.fixture
def modes_of_the_shell() -> Iterator[tuple[ChatOnTerminal, list]]:
    with ChatOnTerminal() as running:
        former = running.modes()
        yield running.start(), former


@pytest.mark.parametrize("leaving", ["\x04", "/exit\r", "\x03"])
def test_the_terminal_is_as_before_when_the_chat_has_ended(modes_of_the_shell, leaving):
    chat, former = modes_of_the_shell
    chat.type("first\r")
    chat.say("Some words ", ends="stop")
    chat.wait_until(lambda: "Some words" in chat.lines and ">" in chat.lines)
    if leaving == "\x03":
        chat.type(leaving)
        chat.wait_for_row("Ctrl-C again")
    chat.type(leaving)
    assert chat.asked() == ["first"]
    assert chat.process.wait() == 0
    assert chat.modes() == former
    assert not chat.screen.cursor.hidden and STATUS not in chat.text
    assert chat.received.rindex("\x1b[?2004l") > chat.received.rindex("\x1b[?2004h")


def test_the_terminal_is_as_before_when_the_chat_is_terminated_in_a_reply(modes_of_the_shell):
    chat, former = modes_of_the_shell
    begin_reply(chat)
    chat.interrupt_process(signal.SIGTERM)
    assert chat.asked() == ["first"]
    assert chat.process.wait() == 143
    assert chat.modes() == former
    assert not chat.screen.cursor.hidden and STATUS not in chat.text


def has_continued(chat: ChatOnTerminal, former: list) -> bool:
    """Continue the chat, which restores the modes just before it stops; whether it has its own again."""
    chat.interrupt_process(signal.SIGCONT)
    return chat.modes() != former


def test_ctrl_z_gives_the_terminal_back_and_the_reply_goes_on_afterwards(modes_of_the_shell):
    chat, former = modes_of_the_shell
    begin_reply(chat)
    held = chat.modes()
    chat.type("typed\x1a")
    chat.wait_until(lambda: chat.modes() == former and not chat.screen.cursor.hidden)
    assert STATUS not in chat.text
    chat.wait_until(lambda: has_continued(chat, former))
    chat.wait_for_row("> typed_")
    assert chat.modes() == held
    chat.say("after ", ends="stop")
    chat.wait_for("after")


def test_ctrl_z_at_the_prompt_gives_the_terminal_back(modes_of_the_shell):
    chat, former = modes_of_the_shell
    chat.type("typed")
    chat.wait_for_row("> typed")
    chat.type("\x1a")
    chat.wait_until(lambda: chat.modes() == former)
    chat.wait_until(lambda: has_continued(chat, former))
    chat.type(" on\r")
    reply_and_leave(chat)
    assert chat.asked() == ["typed on"]


def test_a_line_typed_before_the_chat_has_begun_is_its_first_message():
    with ChatOnTerminal(is_new=True) as chat:
        chat.type("early\r")
        chat.say("Yes.", ends="stop")
        chat.wait_for_row("Yes.")
        chat.type("\x04")
        assert chat.asked() == ["early"]


def test_a_line_typed_while_the_chat_begins_is_its_first_message():
    with ChatOnTerminal(WAITS_FOR_KEYS="1") as chat:
        chat.wait_until(lambda: "\x1b[?2004h" in chat.received)
        chat.type("earli\x7fy\r")
        chat.say("Yes.", ends="stop")
        chat.wait_for_row("Yes.")
        chat.type("\x04")
        assert chat.asked() == ["early"]


def test_what_is_typed_goes_through_the_editor_and_back(tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf ", edited" >> "$1"\n')
    editor.chmod(0o700)
    with ChatOnTerminal(VISUAL=str(editor)) as chat:
        chat.start()
        chat.type("words\x07")
        chat.wait_for_row(", edited")
        chat.type("\r")
        chat.say("Yes.", ends="stop")
        chat.wait_for_row("Yes.")
        chat.type("\x07")
        chat.wait_for_row("> , edited")
        chat.type("\x03\x04")
        assert chat.asked() == ["words\n, edited"]

"""A reply on a terminal, at every stage: what Ctrl-C does then, what is shown meanwhile, and what is left of it."""

from collections.abc import Iterator

import pytest

pytest.importorskip("pty", reason="needs the terminals of Unix")
pytest.importorskip("pyte", reason="reads the screen with pyte")

from tests.apps.cli.chat_on_terminal import ChatOnTerminal

STATUS = "scripted │"


@pytest.fixture
def chat() -> Iterator[ChatOnTerminal]:
    with ChatOnTerminal() as running:
        yield running.start()


def begin_reply(chat: ChatOnTerminal, stage: str) -> None:
    """Send a message, and let the reply come to a stage."""
    chat.type("long\r" if stage == "prefill" else "first\r")
    if stage == "prefill":
        chat.compute(100)
        chat.wait_for_row("reading the prompt")
    elif stage == "thinking":
        chat.say(reasoning="Let me see")
        chat.wait_for_row("thinking ... 1 tokens")
    elif stage == "decode":
        chat.say("Some words ")
        chat.wait_for_row("Some words")


def at_new_prompt(chat: ChatOnTerminal) -> bool:
    return chat.lines.count(">") == 1 and any(line.startswith("stopped") for line in chat.lines)


@pytest.mark.parametrize(
    ("stage", "kept"),
    [
        ("prefill", "the conversation is unchanged"),
        ("thinking", "the conversation is unchanged"),
        ("decode", "the partial reply stays in the conversation"),
    ],
)
def test_ctrl_c_stops_a_reply_at_every_stage_and_the_chat_goes_on(chat, stage, kept):
    begin_reply(chat, stage)
    chat.type("\x03")
    chat.wait_for_row(f"stopped: {kept}")
    chat.wait_until(lambda: at_new_prompt(chat))
    assert not chat.screen.cursor.hidden
    assert not any(line.startswith(("reading", "thinking")) for line in chat.text.split("\n"))
    chat.type("second\r")
    chat.say("done ", ends="stop")
    chat.wait_for_row("done")
    chat.type("\x04")
    assert chat.asked()[1:] == ["second"]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_second_ctrl_c_leaves(chat, stage):
    begin_reply(chat, stage)
    chat.type("\x03")
    chat.wait_for_row("stopped")
    chat.type("\x03")
    assert len(chat.asked()) == 1
    assert chat.process.wait() == 0
    assert STATUS not in chat.text


def test_a_second_ctrl_c_between_a_reply_and_the_prompt_leaves():
    with ChatOnTerminal(INTERRUPTED_AFTER_REPLY="1") as chat:
        begin_reply(chat.start(), "decode")
        chat.type("\x03")
        assert len(chat.asked()) == 1
        assert chat.process.wait() == 0


def test_a_ctrl_c_between_a_reply_and_the_prompt_leaves_with_the_next():
    with ChatOnTerminal(INTERRUPTED_AFTER_REPLY="1") as chat:
        chat.start().type("first\r")
        chat.say("done ", ends="stop")
        chat.wait_for_row("Ctrl-C again, or Ctrl-D, leaves")
        chat.type("\x03")
        assert len(chat.asked()) == 1
        assert chat.process.wait() == 0


def test_ctrl_c_at_the_prompt_clears_what_was_typed_and_then_says_what_leaves(chat):
    chat.type("never sent")
    chat.wait_for_row("> never sent")
    chat.type("\x03")
    chat.wait_until(lambda: ">" in chat.lines)
    assert "never" not in chat.text
    chat.type("\x03")
    chat.wait_for_row("Ctrl-C again, or Ctrl-D, leaves")
    chat.type("sent\r")
    chat.say("done ", ends="stop")
    chat.wait_for_row("done")
    chat.type("\x04")
    assert chat.asked() == ["sent"]


def test_progress_of_a_long_prompt_is_shown_and_gone_with_the_first_token(chat):
    chat.type("long\r")
    chat.compute(1000)
    chat.wait_for_row("reading the prompt: 1,000 of 4,000 tokens (25 %)")
    chat.say("Yes ", ends="stop")
    chat.wait_for_row("Yes")
    chat.wait_until(lambda: ">" in chat.lines)
    assert "reading" not in chat.text


def test_reasoning_is_one_line_until_a_key_unfolds_it(chat):
    chat.type("first\r")
    chat.say(reasoning="Let me ")
    chat.say(reasoning="see. ")
    chat.wait_for_row("thinking ... 2 tokens")
    assert "Let me" not in chat.text
    chat.type("\x0f")
    chat.wait_for_row("Let me see.")
    chat.say(reasoning="It is so.")
    chat.wait_for_row("Let me see. It is so.")
    chat.type("\x0f")
    chat.say("Yes ", ends="stop")
    chat.wait_for_row("Yes")
    chat.wait_until(lambda: ">" in chat.lines)
    assert chat.text.count("thought for 3 tokens") == 1 and "thinking" not in chat.text
    chat.type("\x0f")
    chat.wait_until(lambda: chat.text.count("Let me see. It is so.") == 2)


def test_the_status_line_leaves_nothing_in_the_scrollback_though_the_window_changes(chat):
    chat.type("first\r")
    for number in range(60):
        chat.say(f"line {number}\n")
        if number in (20, 40):
            chat.wait_for_row(f"line {number}")
            chat.resize(25 if number == 20 else 100, 8 if number == 20 else 30)
            chat.type("x")
    chat.wait_for_row("line 59")
    chat.wait_for_row(STATUS)
    assert sum(line.startswith(STATUS) for line in chat.text.split("\n")) == 1
    chat.say(ends="stop")
    chat.wait_until(lambda: "> xx" in chat.lines)
    chat.type("\x03\x04")
    chat.asked()
    said = [line for line in chat.text.split("\n") if line.startswith("line ")]
    assert said == [f"line {number}" for number in range(60)]
    assert STATUS not in chat.text and "> x" not in chat.text


def test_25_columns_are_enough():
    with ChatOnTerminal(25, 8) as chat:
        chat.start()
        chat.type("first\r")
        chat.say("Words that are wrapped over several lines. ")
        chat.type("typed ahead of everything")
        chat.wait_until(lambda: chat.lines[-2].endswith("everything_"))
        assert all(len(line) <= 25 for line in chat.lines)
        assert chat.lines[-1].endswith("t/s") and "/8,192 │" in chat.lines[-1]


def test_escape_sequences_of_the_model_do_nothing(chat):
    chat.type("first\r")
    chat.say("\x1b[2J\x1b]0;owned\x07\x1b[?1049h\x1b[31mred\x9b5A\x1b8\n")
    chat.wait_for("red")
    assert chat.lines[:3] == ["scripted: 8,192 tokens of context. /help lists commands, Ctrl-D exits", "", "> first"]
    assert "␛[2J" in chat.text and chat.screen.title == ""
    chat.say(ends="stop")


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_plain_terminals_get_no_styles(environment):
    with ChatOnTerminal(60, 10, **environment) as chat:
        chat.start()
        chat.type("first\r")
        chat.say("Some words ", ends="stop")
        chat.wait_for_row("Some words")
        drawn = chat.received.partition("Some words")[0].rpartition("first")[2]
        assert "\x1b[2m" not in drawn and "\x1b[7m" not in drawn
        if environment.get("TERM") == "dumb":
            assert STATUS not in chat.received and "\x1b[?2026h" not in chat.received

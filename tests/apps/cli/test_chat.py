"""The chat: conversations stay well formed, commands stay with us, keys do what the help says."""

import io
import re
import stat
import sys
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from localinfer.apps.terminal import loop as chat_module
from localinfer.apps.terminal.commands import Chat, Exit
from localinfer.apps.terminal.conversation import Conversation
from localinfer.apps.terminal.loop import CommandCompleter, open_history, run_chat
from localinfer.errors import ContextLengthError, RequestError
from localinfer.generation.stream import StreamEvent


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def conversation(fake_llm) -> Conversation:
    return Conversation(fake_llm, system=None, max_tokens=None, seed=3)


@pytest.fixture
def streams() -> tuple[io.StringIO, io.StringIO]:
    return Terminal(), io.StringIO()


@pytest.fixture
def chat(conversation, streams) -> Chat:
    return Chat(conversation, *streams)


def test_reply_keeps_question_and_answer(conversation):
    assert "".join(conversation.reply("hi")) == "Hello there"
    assert conversation.messages == [user("hi"), assistant("Hello there")]


@pytest.mark.parametrize(
    ("notices", "is_unfolded", "shown"),
    [
        (Terminal(), False, "thought for 2 tokens, 0 s\n\n"),
        (Terminal(), True, "Let me see.\n\nthought for 2 tokens, 0 s\n\n"),
        (io.StringIO(), True, ""),
    ],
)
def test_reasoning_is_folded_and_is_no_part_of_the_conversation(fake_llm, notices, is_unfolded, shown):
    fake_llm.pieces = [StreamEvent("", 1, None, None, "Let me"), StreamEvent("", 2, None, None, " see."), "Yes."]
    conversation = Conversation(fake_llm, system=None, max_tokens=None, seed=3)
    output = io.StringIO()
    chat = Chat(conversation, output, notices)
    chat.reply_output.shows_reasoning = is_unfolded
    chat.handle("hi")
    assert output.getvalue().strip() == "Yes."
    assert re.sub(r"\x1b\[\dm", "", notices.getvalue()) == shown
    assert conversation.messages == [user("hi"), assistant("Yes.")]


def test_closed_reply_keeps_the_part_that_was_said(conversation):
    reply = conversation.reply("hi")
    assert next(reply) == "Hello"
    reply.close()
    assert conversation.messages == [user("hi"), assistant("Hello")]


def test_refused_question_leaves_no_trace(conversation, fake_llm):
    list(conversation.reply("first"))
    fake_llm.pieces = [ContextLengthError("too long")]
    with pytest.raises(ContextLengthError):
        list(conversation.reply("second"))
    assert conversation.messages == [user("first"), assistant("Hello there")]


def test_regenerated_reply_replaces_the_former_under_another_seed(conversation, fake_llm):
    list(conversation.reply("hi"))
    fake_llm.pieces = ["Good day"]
    list(conversation.regenerate())
    assert conversation.messages == [user("hi"), assistant("Good day")]
    assert fake_llm.prompts[1] == [user("hi")]
    assert fake_llm.options[0]["seed"] != fake_llm.options[1]["seed"]


def test_empty_regeneration_brings_the_former_reply_back(conversation, fake_llm):
    list(conversation.reply("hi"))
    fake_llm.pieces = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        list(conversation.regenerate())
    assert conversation.messages == [user("hi"), assistant("Hello there")]


@pytest.mark.parametrize(("line", "words"), [("/nonsense and more", "/nonsense"), ("/regen", "no reply")])
def test_command_that_cannot_be_done_says_so_and_never_reaches_the_model(chat, fake_llm, streams, line, words):
    chat.handle(line)
    assert fake_llm.prompts == []
    assert words in streams[1].getvalue()


def test_space_before_a_slash_makes_it_a_message(chat, fake_llm):
    chat.handle(" /etc/hosts is what?")
    assert fake_llm.prompts == [[user(" /etc/hosts is what?")]]


@pytest.mark.parametrize("line", ["", "   ", "\n\n"])
def test_blank_line_is_no_message(chat, fake_llm, line):
    chat.handle(line)
    assert fake_llm.prompts == []


def test_interrupted_reply_says_so_and_stays_in_the_conversation(chat, conversation, fake_llm, streams):
    fake_llm.pieces = ["Once", KeyboardInterrupt()]
    chat.handle("story")
    assert conversation.messages == [user("story"), assistant("Once")]
    assert streams[0].getvalue() == "Once\n"
    assert "stopped" in streams[1].getvalue()


def test_reply_interrupted_before_its_first_word_changes_nothing(chat, conversation, fake_llm, streams):
    fake_llm.pieces = [KeyboardInterrupt()]
    chat.handle("story")
    assert conversation.messages == []
    assert "the conversation is unchanged" in streams[1].getvalue()


def test_control_sequences_in_a_reply_are_neutralised_on_a_terminal(chat, fake_llm, streams):
    fake_llm.pieces = ["\x1b", "]0;owned\x07", "\x9b2J", "\u202eabc", "tab\tline\r\n"]
    chat.handle("hi")
    assert streams[0].getvalue() == "\u241b]0;owned\u2407\ufffd2J\ufffdabctab line\n"


def test_control_sequences_in_a_command_are_neutralised(chat, streams):
    chat.handle("/\x1b[2J")
    assert "\x1b" not in streams[1].getvalue()


def test_undecodable_message_is_refused(chat, fake_llm):
    with pytest.raises(RequestError, match=r"U\+DCFF"):
        chat.handle("bad \udcff")
    assert fake_llm.prompts == []


def test_system_command_sets_and_drops_the_instructions(chat, conversation, streams):
    chat.handle("/system Be kind.")
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]
    chat.handle("/system")
    assert streams[1].getvalue().count("Be kind.") == 2
    chat.handle("/system off")
    assert conversation.messages == []


def test_clear_forgets_messages_and_keeps_the_instructions(chat, conversation):
    chat.handle("/system Be kind.")
    chat.handle("hi")
    chat.handle("/clear")
    assert [message["role"] for message in conversation.messages] == ["system"]


def test_stats_are_those_of_the_last_reply(chat, streams):
    chat.handle("/stats")
    assert "no reply" in streams[1].getvalue()
    chat.handle("hi")
    chat.handle("/stats")
    assert "completion 2 tokens at 12.5 tokens/s" in streams[1].getvalue()


def test_stats_follow_every_reply_where_they_are_wanted(conversation, streams):
    chat = Chat(conversation, *streams, shows_stats=True)
    chat.handle("hi")
    chat.handle("ho")
    assert streams[1].getvalue().count("prompt 3 tokens, 1 of them cached") == 2


def test_a_shifted_context_is_told(chat, fake_llm, streams):
    chat.handle("hi")
    assert streams[1].getvalue() == ""
    fake_llm.dropped_tokens = 40
    chat.handle("ho")
    assert "the context is full: 40 tokens" in streams[1].getvalue()


def test_a_full_context_leaves_out_the_oldest_messages_and_the_chat_goes_on(fake_llm, streams):
    fake_llm.context_length = 100
    conversation = Conversation(fake_llm, system="Be kind.", max_tokens=None, seed=3)
    chat = Chat(conversation, *streams)
    for number in range(20):
        chat.handle(f"message {number:2}")
    sent = [sum(len(message["content"]) for message in prompt) for prompt in fake_llm.prompts]
    assert max(sent) <= 75, "a quarter of the context is left for the reply"
    assert all(prompt[0]["content"] == "Be kind." for prompt in fake_llm.prompts)
    assert all(
        [message["role"] for message in prompt[1:3]] in (["user"], ["user", "assistant"]) for prompt in fake_llm.prompts
    )
    assert all(prompt[-1] == user(f"message {number:2}") for number, prompt in enumerate(fake_llm.prompts))
    told = re.findall(r"the (\d+) oldest messages are left out", streams[1].getvalue())
    assert 3 < len(told) < 10, "left out some at a time, not at every message"
    assert sum(map(int, told)) + len(conversation.messages) - 1 == 40


def test_a_message_longer_than_the_context_is_refused_and_nothing_is_left_out(conversation, fake_llm, streams):
    fake_llm.context_length = 100
    chat = Chat(conversation, *streams)
    for _ in range(3):
        chat.handle("hi")
    before = conversation.messages
    fake_llm.pieces = [ContextLengthError("too long")]
    with pytest.raises(ContextLengthError):
        chat.handle("x" * 101)
    assert fake_llm.prompts[-1] == [user("x" * 101)]
    assert conversation.messages == before
    assert "left out" not in streams[1].getvalue()


def test_a_shifted_context_leaves_out_no_messages(fake_llm, streams):
    fake_llm.context_length = 20
    conversation = Conversation(fake_llm, system=None, max_tokens=None, seed=3, context_shift=True)
    chat = Chat(conversation, *streams)
    for _ in range(4):
        chat.handle("hi")
    assert len(fake_llm.prompts[-1]) == 7


@pytest.mark.parametrize(("context_length", "is_told"), [(4, True), (5, False)])
def test_a_reply_cut_by_the_context_is_told(chat, fake_llm, streams, context_length, is_told):
    fake_llm.context_length = context_length  # a prompt of 3 tokens, and a reply of 1
    fake_llm.pieces = [StreamEvent("cut", 1, "length")]
    chat.handle("hi")
    assert ("cut at the end of the context" in streams[1].getvalue()) is is_told


def test_exit_leaves(chat):
    with pytest.raises(Exit):
        chat.handle("/exit")


def test_help_names_every_command(chat, streams):
    chat.handle("/help")
    for name in chat.commands:
        assert name in streams[1].getvalue()


def test_notices_have_no_colour_where_no_color_is_set(conversation, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    notices = Terminal()
    Chat(conversation, Terminal(), notices).notice("plain")
    assert notices.getvalue() == "plain\n"


@pytest.mark.parametrize(
    ("typed", "expected"), [("/", 26), ("/re", ["/regen"]), ("/system x", []), ("text", []), ("a /re", [])]
)
def test_completion_offers_commands_only(chat, typed, expected):
    completer = CommandCompleter(chat.commands.values())
    names = [found.text for found in completer.get_completions(Document(typed), CompleteEvent())]
    assert names == expected if isinstance(expected, list) else len(names) == expected


def test_history_file_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr("localinfer.apps.terminal.loop.user_folder", lambda _: tmp_path / "state")
    history = open_history()
    history.append_string("secret \udcff")
    path = tmp_path / "state" / "chat-history"
    assert "secret ?" in path.read_text()
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_history_stays_in_memory_where_no_file_can_be_made(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setattr("localinfer.apps.terminal.loop.user_folder", lambda _: blocker / "state")
    assert isinstance(open_history(), InMemoryHistory)


@pytest.fixture
def typed_chat(fake_llm, monkeypatch, tmp_path: Path):
    """Run the whole terminal chat on the keys given; returns what the terminal showed."""
    monkeypatch.setattr(chat_module, "open_history", InMemoryHistory)

    def run(keys: str) -> tuple[str, str]:
        output, notices = Terminal(), Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", notices)
        with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
            keyboard.send_text(keys)
            run_chat(fake_llm, system=None, max_tokens=None, seed=None, temperature=0.5)
        return output.getvalue(), notices.getvalue()

    return run


END = "\x04"


def test_terminal_enter_sends_and_ctrl_d_leaves(typed_chat, fake_llm):
    output, _ = typed_chat("hi\r" + END)
    assert output == "Hello there\n"
    assert fake_llm.prompts == [[user("hi")]]
    assert fake_llm.options == [{"max_tokens": None, "seed": None, "temperature": 0.5}]


@pytest.mark.parametrize("newline", ["\x1b\r", "\n"])
def test_terminal_alt_enter_and_ctrl_j_start_a_line(typed_chat, fake_llm, newline):
    typed_chat(f"one{newline}two\r{END}")
    assert fake_llm.prompts == [[user("one\ntwo")]]


def test_terminal_paste_of_many_lines_is_one_message(typed_chat, fake_llm):
    lines = "\r".join(f"line {number}" for number in range(5000))
    typed_chat(f"\x1b[200~{lines}\x1b[201~\r{END}")
    assert len(fake_llm.prompts) == 1
    assert fake_llm.prompts[0][0]["content"].split("\n") == [f"line {number}" for number in range(5000)]


def test_terminal_ctrl_c_clears_the_line(typed_chat, fake_llm):
    typed_chat(f"never sent\x03hi\r{END}")
    assert fake_llm.prompts == [[user("hi")]]


def test_terminal_tab_completes_a_command(typed_chat):
    _, notices = typed_chat(f"/he\t\r{END}")
    assert "/regen" in notices


def test_terminal_error_is_shown_and_the_chat_goes_on(typed_chat, fake_llm):
    fake_llm.pieces = [ContextLengthError("too long")]
    _, notices = typed_chat(f"hi\r/exit\r{END}")
    assert "error: too long" in notices

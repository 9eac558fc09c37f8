"""Every command of the chat does what its help says, and says why where it cannot."""

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

import localinfer
from localinfer.apps.cli import main
from localinfer.apps.terminal.commands import Chat
from localinfer.apps.terminal.conversation import Conversation
from localinfer.apps.terminal.conversation_commands import copy_to_clipboard
from localinfer.apps.terminal.loop import CommandCompleter
from localinfer.apps.terminal.markdown import code_blocks
from localinfer.apps.terminal.model_commands import SETTINGS
from localinfer.engine.sampling.params import NUMBER_OPTIONS
from localinfer.errors import ContextLengthError, OutOfMemoryError, RequestError
from localinfer.generation.stream import StreamEvent, ToolCallDelta
from tests.apps.cli.chat_session import Session, assistant, user
from tests.apps.cli.conftest import FakeLLM


@pytest.fixture
def session(fake_llm) -> Session:
    return Session(fake_llm)


def test_unknown_command_suggests_the_nearest_and_sends_nothing(session, fake_llm):
    assert "did you mean /undo?" in session.type("/unod")
    assert "did you mean /continue or /context?" in session.type("/cont")
    assert fake_llm.prompts == []


def test_two_slashes_begin_a_message_with_one(session, fake_llm):
    session.type("//etc/hosts is what?")
    assert fake_llm.prompts == [[user("/etc/hosts is what?")]]


def test_help_has_a_line_of_a_narrow_terminal_for_each_command_and_the_arguments_of_one(session):
    lines = session.type("/help").splitlines()
    shown = lines[: lines.index("")]
    assert [line.split()[0] for line in shown] == list(session.chat.commands)
    assert all(len(line) <= 80 for line in lines)
    assert session.type("/help forc") == "there is no command /forc; /help lists them\n"
    assert session.type("/help fork") == "/fork NAME: continue in a copy of the conversation, under a name\n"


def test_the_guide_names_every_command_and_option(session):
    guide = (Path(localinfer.__file__).parent / "apps" / "cli" / "README.md").read_text("utf-8")
    listed = guide.partition("## Commands of the chat")[2].partition("\n## ")[0].replace("\\|", "|")
    for command in session.chat.commands.values():
        arguments = command.arguments.replace("|default]", "]")
        assert f"`{f'{command.name} {arguments}'.strip()}`" in listed
    for name in SETTINGS.keys() - NUMBER_OPTIONS.keys():
        assert f"`{name}`" in listed


@pytest.mark.parametrize("argument", ["", "2", "1 other words"])
def test_edit_replaces_a_message_and_answers_from_there(session, fake_llm, argument):
    session.type("one", "two")
    fake_llm.pieces = ["new"]
    assert ("> edited" in session.type(f"/edit {argument}")) is not argument.startswith("1")
    if argument.startswith("1"):
        assert session.conversation.messages == [user("other words"), assistant("new")]
    else:
        assert session.conversation.messages[2:] == [user("edited"), assistant("new")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/edit 3", "there are 2"),
        ("/edit 0", "is no number"),
        ("/edit x", "is no number"),
        ("/edit", "as it is"),
    ],
)
def test_an_edit_that_cannot_be_done_says_so(session, line, words):
    session.type("one", "two")
    session.edited = None
    assert words in session.type(line)
    assert len(session.conversation.messages) == 4


def test_an_edit_that_cannot_be_answered_leaves_the_conversation(session, fake_llm):
    session.type("one", "two")
    fake_llm.pieces = [ContextLengthError("too long")]
    with pytest.raises(ContextLengthError):
        session.type("/edit 1 x")
    assert [message["content"] for message in session.conversation.messages][::2] == ["one", "two"]


def test_undo_removes_the_last_exchange_until_none_is_left(session):
    session.type("one", "two")
    assert 'removed "two"' in session.type("/undo")
    assert session.conversation.messages == [user("one"), assistant("Hello there")]
    session.type("/undo")
    assert "nothing to undo" in session.type("/undo")


def test_continue_goes_on_with_a_stopped_reply_and_not_with_a_whole_one(session, fake_llm):
    assert "no reply" in session.type("/continue")
    fake_llm.pieces = ["Once", KeyboardInterrupt()]
    assert "/continue completes" in session.type("story")
    fake_llm.pieces = [" upon", StreamEvent(" a time", 2, "stop")]
    session.type("/continue")
    assert fake_llm.prompts[-1] == [user("story"), assistant("Once")]
    assert fake_llm.options[-1]["continue_final_message"] is True
    assert session.conversation.messages == [user("story"), assistant("Once upon a time")]
    assert "is whole" in session.type("/continue")
    assert session.output.getvalue() == "Once\n upon a time\n"


def test_reasoning_that_was_cut_is_continued_and_is_nothing_the_model_reads_later(session, fake_llm):
    fake_llm.pieces = [StreamEvent("", 1, "length", None, "Let me")]
    assert "finish_reason: length" in session.type("hard?")
    fake_llm.pieces = [StreamEvent("", 2, None, None, " see."), StreamEvent("Yes", 3, "stop")]
    session.type("/continue")
    assert fake_llm.prompts[-1] == [user("hard?"), {**assistant(""), "reasoning": "Let me"}]
    assert session.conversation.turns[-1]["reasoning"] == "Let me see."
    assert session.conversation.messages == [user("hard?"), assistant("Yes")]


def test_a_reply_stopped_while_it_thinks_has_said_nothing_yet(session, fake_llm):
    fake_llm.pieces = [StreamEvent("", 1, None, None, "Let me"), KeyboardInterrupt()]
    assert "the conversation is unchanged" in session.type("hard?")
    assert session.conversation.messages == []


def test_a_refused_continuation_leaves_the_reply_as_it_was(session, fake_llm):
    fake_llm.pieces = [StreamEvent("cut", 1, "length")]
    session.type("hi")
    fake_llm.pieces = [ContextLengthError("full")]
    with pytest.raises(ContextLengthError):
        session.type("/continue")
    assert session.conversation.messages == [user("hi"), assistant("cut")]
    assert session.conversation.can_resume


def test_think_is_refused_where_the_template_knows_none(session, fake_llm, monkeypatch):
    session.type("/think 50", "hi")
    assert (fake_llm.options[-1]["thinking"], fake_llm.options[-1]["thinking_budget"]) == (True, 50)
    session.type("/think off", "hi")
    assert fake_llm.options[-1]["thinking"] is False and "thinking_budget" not in fake_llm.options[-1]
    assert "takes on, off" in session.type("/think maybe")

    def refuse(messages: Any, **_: Any) -> int:
        raise RequestError("no reasoning")

    monkeypatch.setattr(fake_llm, "count_chat_tokens", refuse)
    assert "knows no thinking" in session.type("/think on")
    assert session.conversation.thinking is False


def test_think_shows_and_hides_reasoning_without_a_change_of_the_model(session, fake_llm):
    output = session.chat.reply_output
    assert "folded into a line; Ctrl-O" in session.type("/think")
    assert "shown in full" in session.type("/think show") and output.shows_reasoning
    session.type("hi")
    assert "thinking" not in fake_llm.options[-1]
    assert "folded" in session.type("/think hide") and not output.shows_reasoning


def test_help_names_every_key(session):
    told = session.type("/help")
    for key in ("Enter", "Alt-Enter", "Ctrl-J", "Ctrl-C", "Ctrl-D", "Ctrl-G", "Ctrl-O", "Tab"):
        assert key in told


def test_models_that_are_here_are_completed_before_files(session, monkeypatch, tmp_path):
    (tmp_path / "qw.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("localinfer.apps.terminal.model_commands.known_models", lambda: ["Qwen/Small:Q4_K_M", "other"])
    completer = CommandCompleter(session.chat.commands.values())
    found = list(completer.get_completions(Document("/model qw"), CompleteEvent()))
    assert [one.text for one in found] == ["Qwen/Small:Q4_K_M", "qw.gguf"]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def called(*names: str) -> list[StreamEvent]:
    deltas = [ToolCallDelta(i, id=f"id{i}", name=name) for i, name in enumerate(names)]
    arguments = [ToolCallDelta(i, arguments="{}") for i in range(len(names))]
    return [
        StreamEvent("", 1, None, None, "", tuple(deltas)),
        StreamEvent("", 2, "tool_calls", None, "", tuple(arguments)),
    ]


def test_a_call_is_shown_and_the_line_typed_then_is_its_result(session, fake_llm, tmp_path: Path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps({"tools": [TOOL]}))
    assert "tools: weather" in session.type(f"/tools {path}")
    fake_llm.pieces = called("weather", "w\x1b[2Jx")
    told = session.type("Rain?")
    assert "call weather {}" in told and "result of weather" in told and "\x1b" not in told
    assert fake_llm.options[-1]["tools"] == (TOOL,)
    assert "waits for the result of weather" in session.type("/continue")
    session.type("/tokens", "sunny")
    assert len(fake_llm.prompts) == 1, "the second call has no result yet"
    fake_llm.pieces = ["No rain."]
    session.type("//2")
    sent = fake_llm.prompts[-1]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert [message["content"] for message in sent[2:]] == ["sunny", "/2"]
    assert [message["tool_call_id"] for message in sent[2:]] == ["id0", "id1"]
    assert session.conversation.messages[-1] == assistant("No rain.")
    session.type("/undo")
    assert session.conversation.messages == []
    session.type("/tools off", "hi")
    assert "tools" not in fake_llm.options[-1]


def test_what_are_no_tools_is_refused(session, tmp_path: Path):
    path = tmp_path / "tools.json"
    for text, words in (("[", "not JSON"), ("[{}]", "tool 0"), ("\0", "not text")):
        path.write_text(text)
        assert words in session.type(f"/tools {path}")
    assert session.conversation.tools == ()


def test_another_model_answers_the_same_messages_and_the_former_is_closed(session, fake_llm):
    session.type("hi")
    other = FakeLLM()
    session.loaded["other.gguf"] = other
    told: list[tuple[str, int]] = []
    session.chat.on_model_change = lambda name, length: told.append((name, length))
    assert "answers from here on" in session.type("/model other.gguf", "ho")
    assert other.prompts == [[user("hi"), assistant("Hello there"), user("ho")]]
    assert fake_llm.is_closed and not other.is_closed
    assert session.conversation.saved.model == "other.gguf"
    assert told == [("other.gguf", 4096)]
    session.chat.close()
    assert other.is_closed


def test_a_model_that_cannot_be_loaded_leaves_the_former(session, fake_llm):
    assert "was not loaded: there is no model" in session.type("/model nowhere")
    session.loaded["gone"] = OSError("the disk is gone")
    assert "was not loaded: the disk is gone" in session.type("/model gone")
    assert not fake_llm.is_closed
    session.type("hi")
    assert len(fake_llm.prompts) == 1


def test_the_command_loads_another_model_with_the_options_of_the_first(fake_llm, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    Path("other.gguf").touch()
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/model other.gguf\nho\n/paste\nlast\n"))
    assert main(["chat", "--lines", "-c", "4096"]) == 0
    assert (fake_llm.load_options["model"], fake_llm.load_options["context_length"]) == ("other.gguf", 4096)
    assert [len(prompt) for prompt in fake_llm.prompts] == [1, 3, 5]
    assert fake_llm.prompts[-1][-1] == user("last"), "input that ends sends what was pasted"


@pytest.mark.parametrize("fits", [True, False])
def test_where_memory_is_short_the_former_model_is_closed_first(session, fake_llm, fits):
    other, again = FakeLLM(), FakeLLM()
    session.loaded = {
        "big": [OutOfMemoryError("too much"), other if fits else OutOfMemoryError("still")],
        "tiny": again,
    }
    told = session.type("/model big", "hi")
    assert fake_llm.is_closed
    assert ("was not loaded" in told) is not fits
    assert len((other if fits else again).prompts) == 1


def test_a_file_goes_with_the_next_message_in_a_fence_of_its_own(session, fake_llm, tmp_path: Path):
    path = tmp_path / "a b.md"
    path.write_text("x\n```\ny")
    assert "a b.md takes" in session.type(f"/file {path}")
    fake_llm.pieces = [KeyboardInterrupt()]
    session.type("What is it?")
    fake_llm.pieces = ["A file."]
    session.type("What is it?", "And?")
    assert fake_llm.prompts[1] == [user("File a b.md:\n````\nx\n```\ny\n````\n\nWhat is it?")]
    assert fake_llm.prompts[2][-1] == user("And?")


def test_a_file_that_cannot_fit_is_refused_with_its_tokens(session, fake_llm, tmp_path: Path):
    fake_llm.context_length = 400
    path = tmp_path / "notes.txt"
    path.write_text("y" * 350)
    assert re.search(r"takes 37\d tokens.*room for 300.*not added", session.type(f"/file {path}"))
    path.write_text("y" * 150)
    session.type("x" * 200)
    assert "oldest messages will be left out" in session.type(f"/file {path}")
    assert "with the files that already wait" in session.type(f"/file {path}")
    assert "1 files" in session.type("/tokens")
    for wrong, words in ((tmp_path, "a folder"), (tmp_path / "none", "not there")):
        assert words in session.type(f"/file {wrong}")
    path.write_bytes(b"\xff\xfe")
    assert "not text in UTF-8" in session.type(f"/file {path}")


def test_a_file_name_with_control_sequences_does_nothing(session, tmp_path: Path):
    path = tmp_path / "a\x1b[2J"
    if os.name == "nt":
        pytest.skip("this system has no such names")
    path.write_text("x")
    assert "\x1b" not in session.type(f"/file {path}", "/file \x1b[2J")


def test_paste_takes_lines_as_they_are_up_to_the_mark(session, fake_llm):
    session.type("/paste", "/help is text", "", "  b")
    assert fake_llm.prompts == []
    session.type("/end")
    assert fake_llm.prompts == [[user("/help is text\n\n  b")]]
    session.type("/paste", "x", "/cancel", "hi")
    assert fake_llm.prompts[-1][-1] == user("hi")
    session.type("/paste one\ntwo\n/end")
    assert fake_llm.prompts[-1][-1] == user("one\ntwo")
    session.type("/paste", "unended")
    session.chat.end_input()
    assert fake_llm.prompts[-1][-1] == user("unended")


def test_copy_takes_the_last_block_or_the_whole_reply_and_says_how_long_it_is(session, fake_llm):
    assert "no reply yet" in session.type("/copy")
    session.type("hi")
    assert "no code block; /copy reply" in session.type("/copy code")
    assert "copied the whole last reply, 11 characters, by test" in session.type("/copy")
    fake_llm.pieces = ["a\n```py\nx = 1\n```\nb\n~~~~\n```\ny\n~~~~\n"]
    assert "copied the last code block, 2 lines of 5 characters" in session.type("code", "/copy")
    assert "the whole last reply, 9 lines of " in session.type("/copy code", "/copy reply")
    assert session.copied == ["Hello there", "```\ny", "```\ny", fake_llm.pieces[0]]
    assert "it takes nothing, code" in session.type("/copy all")


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("", []),
        ("```\na\n```", ["a"]),
        ("```a`b\nx", []),
        ("```\ncut", ["cut"]),
        ("````\n```\n````", ["```"]),
        ("1. Type:\n\n   ```sh\n   ls\n     a\n   ```\n", ["ls\n  a"]),
        ("> ```\n> quoted\n> ```\n", ["quoted"]),
        ("Type:\n\n    indented\n\nand so on", ["indented"]),
    ],
)
def test_code_blocks_are_those_of_fences(text, blocks):
    assert code_blocks(text) == blocks


def test_a_terminal_takes_the_clipboard_where_no_program_is(monkeypatch):
    for name in ("WAYLAND_DISPLAY", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    sent: list[str] = []
    assert copy_to_clipboard("hé", lambda text: sent.append(text) is None) == "the terminal"
    assert sent == ["\x1b]52;c;aMOp\x07"]
    with pytest.raises(RequestError, match="no terminal"):
        copy_to_clipboard("x", lambda _: False)
    with pytest.raises(RequestError, match="more than a terminal takes"):
        copy_to_clipboard("x" * 80_000, lambda _: True)


def test_every_reply_is_saved_and_a_saved_conversation_goes_on(session, fake_llm):
    session.type("hi")
    (one,) = session.store.saved.values()
    assert [turn["content"] for turn in one.turns] == ["hi", "Hello there"]
    assert "saved as first" in session.type("/save first")
    session.type("/clear", "other")
    assert len(session.store.saved) == 2
    printed = session.output.getvalue()
    assert "first: 2 messages" in session.type("/load first")
    assert session.output.getvalue() == printed, "a pipe gets new replies alone"
    session.type("more")
    assert fake_llm.prompts[-1] == [user("hi"), assistant("Hello there"), user("more")]
    assert len(session.store.saved[one.id].turns) == 4
    listed = session.type("/sessions")
    assert re.search(r"\* .* first  \(4 messages, tiny\)", listed)
    assert "no saved conversation" in session.type("/load nothing")


def test_a_copy_goes_on_and_the_former_stays(session, fake_llm):
    assert "nothing to copy" in session.type("/fork copy")
    session.type("hi", "/save first", "/fork copy", "only here")
    counts = {one.name: len(one.turns) for one in session.store.saved.values()}
    assert counts == {"first": 2, "copy": 4}
    assert "another conversation is named" in session.type("/fork first")
    assert session.conversation.saved.name == "copy"
    assert len(session.store.saved) == 2


def test_a_reply_that_could_not_be_saved_is_told_and_the_chat_goes_on(session):
    session.store.fails = True
    assert session.type("hi", "hi").count("not saved: the disk is full") == 1
    assert len(session.conversation.messages) == 4
    for line in ("/save x", "/fork x"):
        assert "the disk is full" in session.type(line)


def test_without_a_store_the_commands_say_that_nothing_is_kept(fake_llm):
    notices = io.StringIO()
    chat = Chat(Conversation(fake_llm, system=None, max_tokens=None, seed=None), io.StringIO(), notices)
    for line in ("hi", "/save x", "/load x", "/sessions", "/fork x"):
        chat.handle(line)
    assert notices.getvalue().count("not kept here") == 4
    chat.handle("/model x")
    assert "-m x" in notices.getvalue()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/set temp", ["temperature"]),
        ("/set top_k ", ["top_k default"]),
        ("/set nothing ", []),
        ("/load fi", ["first"]),
        ("/think o", ["on", "off"]),
        ("/think h", ["hide"]),
        ("/context s", ["shift", "summarise"]),
        ("/copy ", ["code", "reply"]),
        ("/show ", ["template"]),
        ("/system o", ["off"]),
        ("/tools of", ["off"]),
        ("/set stop o", ["stop off"]),
        ("/set format ", ["format json", "format off"]),
        ("/help for", ["fork"]),
        ("/nothing x", []),
        ("/set\nx", []),
    ],
)
def test_arguments_are_completed(session, typed, expected):
    session.type("hi", "/save first")
    completer = CommandCompleter(session.chat.commands.values())
    found = list(completer.get_completions(Document(typed), CompleteEvent()))
    assert [one.text for one in found] == expected
    assert all(typed[: len(typed) + one.start_position] + one.text for one in found)


def test_file_names_are_completed_and_unprintable_ones_left_out(session, tmp_path: Path):
    for name in ("notes.txt", ".hidden", "no\x07tes"):
        if name.isprintable() or os.name != "nt":
            (tmp_path / name).write_text("x")
    (tmp_path / "nothing here").mkdir()
    completer = CommandCompleter(session.chat.commands.values())

    def found(typed: str) -> list[str]:
        return [one.text for one in completer.get_completions(Document(f"/file {typed}"), CompleteEvent())]

    assert found(f"{tmp_path}{os.sep}no") == [f"{tmp_path}{os.sep}notes.txt", f"{tmp_path}{os.sep}nothing here{os.sep}"]
    assert found(f"{tmp_path}{os.sep}.h") == [f"{tmp_path}{os.sep}.hidden"]
    assert found(f"{tmp_path}{os.sep}none{os.sep}x") == []
    assert found("~nobody-of-this-name/x") == []

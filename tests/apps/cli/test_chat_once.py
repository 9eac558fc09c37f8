"""One message, one answer: what becomes the message, what is printed where, and the exit code."""

import io
import sys
from pathlib import Path

import pytest

from localinfer.apps.cli import main
from localinfer.apps.cli.chat import EXIT_CUT
from localinfer.errors import ContextLengthError
from localinfer.generation.options import JsonSchema
from localinfer.generation.stream import StreamEvent
from localinfer.terminal import CLEAR_LINE
from tests.support.limits import wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch):
    """Set what standard input holds; without a call it is a terminal on which nothing is typed."""

    def pipe(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))

    monkeypatch.setattr(sys, "stdin", Terminal())
    return pipe


def sent(llm) -> list[dict[str, str]]:
    """The messages of the only request."""
    (messages,) = llm.prompts
    return messages


def test_a_prompt_is_one_message_and_only_the_answer_is_printed(fake_llm, stdin, capsys):
    assert main(["chat", "-p", "Why?", "--system", "Be brief.", "--seed", "5", "-n", "9"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Hello there\n", "")
    assert sent(fake_llm) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert fake_llm.options[0]["seed"] == 5
    assert fake_llm.options[0]["max_tokens"] == 9
    assert fake_llm.is_closed


@pytest.mark.parametrize("words", [["-p", "-"], []])
def test_whole_standard_input_is_one_message(fake_llm, stdin, capsys, words):
    stdin("/first line\nsecond line\n\nlast\n")
    assert main(["chat", *words]) == 0
    assert sent(fake_llm) == [{"role": "user", "content": "/first line\nsecond line\n\nlast"}]
    assert capsys.readouterr().out == "Hello there\n"


def test_a_prompt_comes_before_what_is_piped(fake_llm, stdin, capsys):
    stdin("+ added\n- removed\n")
    assert main(["chat", "-p", "Review this"]) == 0
    assert sent(fake_llm)[0]["content"] == "Review this\n\n+ added\n- removed"


def test_nothing_in_the_pipe_leaves_the_prompt_alone(fake_llm, stdin, capsys):
    stdin("")
    assert main(["chat", "-p", "Why?"]) == 0
    assert sent(fake_llm)[0]["content"] == "Why?"


def test_files_are_labelled_parts_that_cannot_end_their_own_fence(fake_llm, stdin, capsys, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (tmp_path / "b.md").write_text("```\ncode\n```\n", encoding="utf-8")
    files = ["--file", str(tmp_path / "a.txt"), "--file", str(tmp_path / "b.md")]
    stdin("piped")
    assert main(["chat", "-p", "Compare", *files]) == 0
    assert sent(fake_llm)[0]["content"] == (
        "Compare\n\nFile a.txt:\n```\none\ntwo\n```\n\nFile b.md:\n````\n```\ncode\n```\n````\n\npiped"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"caf\xe9", "not UTF-8 text"), (b"\x89PNG\r\n", "not UTF-8 text"), (b"a\0b", "a NUL byte at 1")],
)
def test_a_file_that_is_not_text_is_refused_by_name(fake_llm, stdin, capsys, tmp_path, content, said):
    (tmp_path / "odd.bin").write_bytes(content)
    assert main(["chat", "-p", "Hi", "--file", str(tmp_path / "odd.bin")]) == 2
    error = capsys.readouterr().err
    assert "odd.bin" in error and said in error
    assert not fake_llm.prompts


def test_files_that_cannot_be_read_are_refused_by_name(fake_llm, stdin, capsys, tmp_path):
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "none.txt", "No such file")):
        assert main(["chat", "-p", "Hi", "--file", str(path)]) == 2
        error = capsys.readouterr().err
        assert str(path) in error and said in error


@pytest.mark.parametrize(
    ("words", "piped", "said"),
    [
        (["-p", ""], None, "the message is empty"),
        (["-p", " \n"], "", "the message is empty"),
        (["-p", "-"], "", "standard input is empty"),
        ([], "\n\n", "standard input is empty"),
        ([], "a\0b", "NUL"),
        (["-p", "Hi"], "caf\udce9", "U+DCE9"),
        (["--file", "x"], None, "--file is for one message"),
        (["--show-reasoning"], None, "--show-reasoning is for one message"),
        (["--lines"], None, "nothing is piped"),
        (["--lines", "-p", "Hi"], "Hi", "leave one out"),
    ],
)
def test_what_is_no_message_is_refused_before_a_model_is_loaded(fake_llm, stdin, capsys, words, piped, said):
    if piped is not None:
        stdin(piped)
    assert main(["chat", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
    assert fake_llm.load_options == {}


def test_input_beyond_what_any_context_holds_is_refused(fake_llm, stdin, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("localinfer.apps.cli.chat._MOST_BYTES", 10)
    stdin("eleven char")
    assert main(["chat"]) == 2
    assert "longer than 10 bytes" in capsys.readouterr().err
    (tmp_path / "long.txt").write_text("eleven char")
    assert main(["chat", "-p", "Hi", "--file", str(tmp_path / "long.txt")]) == 2
    assert "long.txt is longer than 10 bytes" in capsys.readouterr().err


def test_a_message_that_does_not_fit_is_refused_with_its_tokens(fake_llm, stdin, capsys, tmp_path):
    fake_llm.context_length = 20
    fake_llm.pieces = [ContextLengthError("too long")]
    (tmp_path / "a.txt").write_text("0123456789")
    assert main(["chat", "-p", "Short", "--file", str(tmp_path / "a.txt")]) == 2
    error = capsys.readouterr().err
    assert "the message takes 37 tokens (the prompt 5, " in error and "a.txt 30), but the context holds 20" in error
    assert "--context-length" in error


@pytest.mark.parametrize(("words", "way_out"), [(["-n", "2"], "a larger -n"), ([], "--context-length N")])
def test_a_cut_reply_is_told_in_words_and_by_the_exit_code(fake_llm, stdin, capsys, words, way_out):
    fake_llm.pieces = ["Hel", StreamEvent("lo", 1, "length")]
    assert main(["chat", "-p", "Hi", *words]) == EXIT_CUT
    captured = capsys.readouterr()
    assert captured.out == "Hello\n"
    assert "cut after 2 tokens" in captured.err and way_out in captured.err


def test_reasoning_is_left_out_unless_it_is_asked_for(fake_llm, stdin, capsys):
    fake_llm.pieces = [StreamEvent("", 1, None, reasoning="Let me see."), StreamEvent("Four.", 2, "stop")]
    assert main(["chat", "-p", "2 + 2?"]) == 0
    assert capsys.readouterr() == ("Four.\n", "")
    assert main(["chat", "-p", "2 + 2?", "--show-reasoning"]) == 0
    assert capsys.readouterr() == ("Four.\n", "Let me see.\n")


def test_long_prompts_and_reasoning_show_progress_that_is_gone_before_the_answer(fake_llm, stdin, monkeypatch, capsys):
    monkeypatch.setattr("localinfer.terminal.SILENT_SECONDS", -1.0)
    monkeypatch.setattr("localinfer.apps.cli.chat._LOOK_SECONDS", 0.001)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)

    def pieces():
        assert wait_until(lambda: "reading the message, tokens 2/3 ..." in screen.getvalue())
        yield from [StreamEvent("", 1, None, reasoning="So")] * 16
        assert screen.getvalue().endswith("reasoning, 16 tokens (--show-reasoning shows them) ...")
        yield StreamEvent("Four.", 2, "stop")

    fake_llm.pieces = pieces()
    assert main(["chat", "-p", "2 + 2?"]) == 0
    assert screen.getvalue().endswith(CLEAR_LINE)
    assert capsys.readouterr().out == "Four.\n"


def test_controls_of_the_model_do_nothing_on_a_terminal(fake_llm, stdin, monkeypatch):
    fake_llm.pieces = ["\x1b[2J", "Hi"]
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["chat", "-p", "Hi"]) == 0
    assert screen.getvalue() == "\u241b[2JHi\n"


def test_a_form_is_handed_on_and_stats_go_to_stderr(fake_llm, stdin, capsys, tmp_path):
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    assert main(["chat", "-p", "Hi", "--json-schema", str(tmp_path / "s.json"), "--stats"]) == 0
    captured = capsys.readouterr()
    assert fake_llm.options[0]["constraint"] == JsonSchema('{"type": "integer"}')
    assert captured.out == "Hello there\n"
    assert captured.err.startswith("prompt 3 tokens")


def test_an_interrupted_answer_keeps_what_was_printed(fake_llm, stdin, capsys):
    fake_llm.pieces = ["Hel", KeyboardInterrupt()]
    assert main(["chat", "-p", "Hi"]) == 130
    assert capsys.readouterr().out == "Hel\n"


def test_a_name_of_a_file_cannot_steer_the_terminal(fake_llm, stdin, capsys, tmp_path):
    odd = Path(tmp_path) / "a\x1b[2Jb"
    odd.write_text("x")
    assert main(["chat", "-p", "Hi", "--file", str(odd)]) == 0
    assert "\x1b" not in sent(fake_llm)[0]["content"]

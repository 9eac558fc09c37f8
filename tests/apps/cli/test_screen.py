"""The screen under a reply: the text is as if nothing else had been drawn, whatever the window and the rows do."""

import random

import pytest

pytest.importorskip("pyte", reason="reads the screen with pyte")

from localinfer.apps.terminal.display_width import (
    ColumnTracker,
    cut_to_width,
    end_of_width,
    most_columns,
    text_width,
    wrap_words,
)
from localinfer.apps.terminal.keyboard import TypedAhead
from localinfer.apps.terminal.live_terminal import Screen
from localinfer.apps.terminal.status_line import StatusLine
from localinfer.terminal import neutralise_controls
from tests.apps.cli.conftest import FakeStream
from tests.apps.cli.terminal_screen import TerminalScreen


class Window:
    """A terminal, and a Screen that draws on it."""

    def __init__(self, columns: int, lines: int) -> None:
        self.terminal = TerminalScreen(columns, lines)
        self.terminal.start_lines_at_newlines()
        self.sent: list[str] = []
        self.screen = Screen(self._take, lambda: (self.terminal.columns, self.terminal.lines))

    def _take(self, text: str) -> None:
        self.sent.append(text)
        self.terminal.show(text)

    @property
    def text(self) -> str:
        return self.terminal.text.rstrip("\n")


def plainly(text: str, columns: int, lines: int) -> str:
    window = Window(columns, lines)
    window.terminal.show(text)
    return window.text


PIECES = [
    *["a", "word ", "\n", "漢", "字字 ", "e\u0301", "\t", "long" * 9, "\x1b[1mbold\x1b[m", "x\n\n", " ", "\U0001f600"],
    *["\x1b]8;;http://a.b\x1b\\link\x1b]8;;\x1b\\", "one\ntwo\nthree\n"],
]


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (25, 6), (11, 3), (40, 2), (7, 5)])
def test_the_text_is_what_it_would_be_without_rows_under_it(columns, lines):
    for seed in range(12):
        chance = random.Random(seed)
        window, said = Window(columns, lines), ""
        for step in range(60):
            text = "".join(chance.choices(PIECES, k=chance.randrange(4)))
            rows = [f"row {step}"[: columns - 1]] * chance.randrange(4)
            window.screen.draw(text, chance.choice(["", "live"]), rows)
            said += text
        window.screen.clear()
        assert window.text == plainly(said, columns, lines)
        assert not window.terminal.cursor.hidden


def test_rows_are_at_the_bottom_and_change_alone():
    window = Window(30, 8)
    window.screen.draw("words", "", ["> typed", "status 1"])
    assert window.terminal.display[-2:] == [f"{'> typed':30}", f"{'status 1':30}"]
    before = len(window.sent)
    window.screen.draw("", "", ["> typed", "status 1"])
    assert len(window.sent) == before, "nothing changed, nothing is drawn"
    window.screen.draw("", "", ["> typed", "status 2"])
    assert "typed" not in window.sent[-1] and "words" not in window.sent[-1]
    assert window.terminal.display[-1].startswith("status 2")
    window.screen.draw(" more", "", ["> typed", "status 2"])
    assert window.sent[-1].count("more") == 1 and "\x1b[J" not in window.sent[-1]


def test_the_live_line_is_shown_where_text_is_to_come_and_leaves_nothing():
    window = Window(30, 8)
    window.screen.draw("", "thinking ... 1", ["status"])
    assert window.terminal.display[0].startswith("thinking ... 1")
    window.screen.draw("", "thinking ... 2", ["status"])
    window.screen.draw("Yes.", "", ["status"])
    window.screen.clear()
    assert window.text == "Yes."


@pytest.mark.parametrize(("columns", "lines"), [(20, 8), (60, 4), (60, 16), (12, 5)])
def test_a_resized_window_keeps_the_text_and_no_rows(columns, lines):
    window = Window(40, 8)
    for number in range(10):
        window.screen.draw(f"line {number}\n", "", ["> typed", f"status {number}"])
    window.screen.draw("unfinished", "", ["> typed", "status"])
    window.terminal.resize(lines, columns)
    window.screen.draw(", ended", "", ["> typed", "status"])
    window.screen.draw("\nlast\n", "", ["> typed", "status"])
    window.screen.clear()
    unfinished = ["unfinished,", "ended"] if columns == 12 else ["unfinished, ended"]
    assert window.text.split("\n") == [*(f"line {number}" for number in range(10)), *unfinished, "last"]
    assert "status" not in window.text and "typed" not in window.text


def test_a_suspended_screen_leaves_only_the_text():
    window = Window(30, 8)
    window.screen.draw("words", "", ["status"])
    window.screen.suspend()
    assert window.text == "words" and not window.terminal.cursor.hidden
    window.screen.draw("more", "", ["status"])
    window.screen.clear()
    assert window.text == "words\nmore"


def test_texts_are_cut_between_characters():
    assert cut_to_width("漢字漢字", 5) == "漢字…"
    assert cut_to_width("e\u0301e\u0301", 2) == "e\u0301e\u0301"
    assert end_of_width("漢字e\u0301", 3) == "字e\u0301"
    assert end_of_width("ae\u0301", 1) == "e\u0301"
    assert [cut_to_width("abc", width) for width in (3, 2, 1, 0)] == ["abc", "a…", "…", ""]


def test_what_has_to_fit_is_measured_as_the_terminal_that_joins_nothing_draws_it():
    for text in ("👩\u200d👩\u200d👧", "❤\ufe0f", "漢字", "e\u0301", "🇩🇪"):
        assert text_width(text) <= most_columns(text)
    assert most_columns("👩\u200d👩\u200d👧") == 6


def test_a_character_in_the_last_column_waits_for_the_next_one():
    tracker = ColumnTracker()
    assert tracker.advance("abc", 3) == ("ab", "c", False)
    assert tracker.advance("cd", 3) == ("cd", "", True)
    assert tracker.column == 1


@pytest.fixture
def status() -> StatusLine:
    line = StatusLine("a-model-7b", 8192)
    line.begin(FakeStream([], 0))
    return line


def test_the_status_line_fits_every_width_and_keeps_its_fields_in_place(status):
    for width in range(1, 160):
        before = StatusLine("a-model-7b", 8192).text(width)
        assert most_columns(status.text(width)) < width or status.text(width) == ""
        assert len(status.text(width)) == len(before), "numbers move nothing"
    assert status.text(25) == "    3/8,192 │   12.5 t/s"
    assert status.text(24) == "    3/8,192"
    assert status.text(12) == "    3/8,192"
    assert status.text(160) == ("a-model-7b │     3/8,192 │  99 % left │   12.5 t/s │ first 0.25 s │ cached  33 %")
    assert wrap_words("a line that is too long\nword", 10, hanging=2) == "a line\n  that is\n  too\n  long\nword"


def test_the_name_of_a_model_does_nothing_to_the_terminal():
    assert StatusLine("\x1b[2J" + "x" * 100, 8192).text(200).startswith("␛[2J" + "x" * 19 + "… │ ")


@pytest.mark.parametrize(
    ("text", "message", "draft"),
    [
        ("", None, ""),
        ("one\n", "one", ""),
        ("one", None, "one"),
        ("one\ntwo\n", None, "one\ntwo"),
        ("\n", None, ""),
        ("one\r", "one", ""),
        ("one\ntwo\r", None, "one\ntwo"),
        ("onf\x7fe\r", "one", ""),
        ("\x1b[200~one\rtwo\x1b[201~\r", "one\ntwo", ""),
        ("\x1b[200~one\rtw", None, "one\ntw"),
        ("one\x1b[D\x1b[D\x7f", None, "ne"),
    ],
)
def test_what_was_typed_before_keys_were_read_is_a_message_if_it_is_one_line(text, message, draft):
    typed = TypedAhead(lambda: None)
    typed.begin(text)
    assert (typed.take_message(), typed.take_text()) == (message, draft)


def test_a_paste_with_controls_is_shown_without_them():
    typed = TypedAhead(lambda: None)
    typed.feed("\x1b[200~one\x1b]0;title\x07\ttwo\x1b[201~")
    assert typed.rows(80, has_styles=False) == ["> one␛]0;title␇ two_"]
    assert typed.take_text() == "one\x1b]0;title\x07\ttwo"
    assert neutralise_controls("\x1b") == "␛"


@pytest.mark.parametrize("width", [1, 2, 5, 25])
def test_what_is_typed_ahead_fits_every_width(width):
    typed = TypedAhead(lambda: None)
    typed.feed("message of words\rmessage 漢字漢字\rthree\rfour\runfinished 漢字 e\u0301 " + "\x1b[D" * 5)
    for row in typed.rows(width, has_styles=False):
        assert most_columns(row) < max(width, 4)

"""Tables of streamed Markdown: held until they are complete, and drawn to fit."""

import pytest

from localinfer.apps.terminal.display_width import text_width
from localinfer.apps.terminal.markdown import MarkdownStream

TABLE = "| Name | Size |\n|:--|--:|\n| small | 1 |\n| `big one` | 20 |\n"
WIDE = "| Function | When |\n|---|:-:|\n| sorted | anything that can be iterated |\n| 漢字 | short<br>line |\n"


def plain(text: str, width: int = 40) -> str:
    stream = MarkdownStream(lambda: width, styles=False)
    return stream.feed(text) + stream.end()


def test_columns_are_aligned_as_the_dashes_say():
    assert plain(TABLE) == "Name    │ Size\n────────┼─────\nsmall   │    1\nbig one │   20\n"


def test_a_table_is_held_until_it_is_complete():
    stream = MarkdownStream(lambda: 40, styles=False)
    assert stream.feed(TABLE) == ""
    assert stream.feed("a") == "Name    │ Size\n────────┼─────\nsmall   │    1\nbig one │   20\n\n"
    assert stream.feed("fter\n") == "after\n"


def test_cells_wrap_where_the_table_is_too_wide():
    assert plain(WIDE, 26) == (
        "Function │      When\n"
        "─────────┼────────────────\n"
        "sorted   │  anything that\n"
        "         │ can be iterated\n"
        "┄┄┄┄┄┄┄┄┄┼┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄\n"
        "漢字     │      short\n"
        "         │      line\n"
    )


def test_rows_become_lists_where_columns_would_be_too_narrow():
    text = "| a | b | c |\n|--|--|--|\n| one two | three four | five six |\n| 1 | | 3 |\n"
    assert plain(text, 14) == ("a: one two\nb: three four\nc: five six\n┄┄┄┄┄┄┄┄┄┄┄┄┄┄\na: 1\nb:\nc: 3\n")


@pytest.mark.parametrize("width", range(8, 60))
def test_no_width_is_exceeded(width):
    for text in (TABLE, WIDE, f"> {TABLE}", "- a\n\n" + "".join(f"  {line}\n" for line in WIDE.splitlines())):
        assert max(map(text_width, plain(text, width).split("\n"))) <= width


def test_uneven_rows_lose_nothing_and_escaped_bars_are_text():
    assert plain("|a|b|\n|-|-|\n|1|\n|1|2|3 \\| 4|\n") == "a │ b │\n──┼───┼──────\n1 │   │\n1 │ 2 │ 3 | 4\n"


@pytest.mark.parametrize("text", ["| not a table\n", "| a |\n| b |\n| c |\n", "text\n| a |\nmore\n"])
def test_lines_with_bars_that_are_no_table_are_text(text):
    assert plain(text) == text


def test_a_table_may_follow_text_and_stand_in_lists_and_quotes():
    assert plain("Here:\n|a|\n|-|\n|b|\nend") == "Here:\n\na\n─\nb\n\nend\n"
    assert plain("- x\n  |a|\n  |-|\n  |b|\n- y") == "• x\n\n  a\n  ─\n  b\n\n• y\n"
    assert plain("> |a|\n> |-|\n> |b|\n") == "│ a\n│ ─\n│ b\n"

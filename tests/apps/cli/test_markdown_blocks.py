"""Blocks of streamed Markdown as they look: headings, lists, quotes, code and what is no block."""

import re

import pytest

from localinfer.apps.terminal.markdown import MarkdownStream

SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str, width: int = 40) -> str:
    stream = MarkdownStream(lambda: width, styles=False)
    return stream.feed(text) + stream.end()


def blocks(text: str) -> list[str]:
    stream = MarkdownStream(lambda: 40, styles=True)
    stream.feed(text)
    stream.end()
    return stream.code_blocks


def test_headings_are_underlined_to_their_width_and_stand_apart():
    assert plain("text\n# One\nmore\n## Two *and* on ##\n### Three") == (
        "text\n\nOne\n═══\nmore\n\nTwo and on ##\n─────────────\n\nThree\n"
    )
    assert plain("Title\n=====\n#hashtag\n####### seven") == "Title\n═════\n#hashtag\n####### seven\n"


def test_a_heading_that_is_wrapped_is_underlined_to_its_widest_line():
    assert plain("# one two three four", 10) == "one two\nthree four\n══════════\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("- a\n- b\n  - c\n    - d\n- e", "• a\n• b\n  ◦ c\n    ▪ d\n• e\n"),
        ("* a\n    * b\n        * c", "• a\n  ◦ b\n    ▪ c\n"),
        ("1. a\n   - b\n2. c", "1. a\n   • b\n2. c\n"),
        ("1. a\n  - b\n2. c", "1. a\n   • b\n2. c\n"),
        ("9) a\n10) b\n    more", "9) a\n10) b\n    more\n"),
        ("- a\n\n  second\n\nout", "• a\n\n  second\n\nout\n"),
        ("- [ ] open\n- [x] done", "• [ ] open\n• [x] done\n"),
        ("- a\n> b", "• a\n│ b\n"),
        ("- > b\n  > c", "• │ b\n  │ c\n"),
        ("+ a\n+\n+ b", "• a\n•\n• b\n"),
    ],
)
def test_lists_nest_by_their_indent(text, shown):
    assert plain(text) == shown


def test_items_hang_under_their_text():
    assert plain("- one two three\n  1. four five six\n", 17) == "• one two three\n  1. four five\n     six\n"


@pytest.mark.parametrize(
    "text",
    [
        "-5 degrees",
        "1984.",
        "3.5 times",
        "in\n1984. It was",
        "*starred",
        "--",
        "+1",
        "#tag",
        "~ten",
        "=",
        "|x| is size",
    ],
)
def test_what_only_begins_like_a_block_is_text(text):
    assert plain(text) == f"{text}\n"


def test_quotes_keep_their_bar_on_every_line_and_nest():
    assert plain("> one two three\n> > four\n>\n> five", 16) == "│ one two three\n│ │ four\n│\n│ five\n"
    assert plain("> one two three", 14) == "│ one two\n│ three\n"


@pytest.mark.parametrize("rule", ["---", "***", "_ _ _", "- - -", "* * *"])
def test_rules_fit_the_width(rule):
    assert plain(f"a\n\n{rule}\n\nb", 20) == f"a\n\n{'─' * 20}\n\nb\n"


def test_code_is_printed_from_the_first_column_and_never_wrapped():
    code = "    if a:  # " + "long " * 20 + "\n\n\n\tprint('*b*')   "
    shown = plain(f"1. Do:\n\n   ```python\n   {code}\n   ```\n", 25).split("\n")
    assert shown[2] == f"── python {'─' * 15}"
    assert "\n".join(shown[3:-2]) == code
    assert shown[-2] == "─" * 25


def test_code_of_a_list_loses_the_indent_of_its_fence_only():
    assert blocks("- a\n  ```\n  x\n    y\n z\n  ```\n") == ["x\n  y\nz"]
    assert blocks("1. a\n  ```\n  x\n    y\n  ```\n") == ["x\n  y"]
    assert blocks("- ```\n  x\n  ```") == ["x"]


def test_a_longer_fence_holds_shorter_ones():
    assert blocks("````markdown\n```python\nx\n```\n````\n~~~\n```\n~~~") == ["```python\nx\n```", "```"]


def test_code_in_a_quote_has_no_marks_and_ends_with_the_quote():
    assert blocks("> ```\n> x\n>  y\nout") == ["x\n y"]
    assert plain("> ```\n> x\nout") == f"{'─' * 40}\nx\n{'─' * 40}\n\nout\n"


def test_code_that_was_cut_off_can_be_copied():
    assert blocks("```\nx = 1\ny =") == ["x = 1\ny ="]


def test_code_for_its_indent_is_kept():
    assert blocks("a\n\n    x\n\n\n      y\n\nb") == ["x\n\n\n  y"]
    assert plain("a\n\n    *x*\n\nb") == "a\n\n    *x*\n\nb\n"


def test_windows_line_ends_are_line_ends():
    assert plain("# a\r\n\r\n- b\r\n---\r\n") == "a\n═\n\n• b\n" + "─" * 40 + "\n"
    assert plain("|a|\r\n|-|\r\n|b|\r\n") == "a\n─\nb\n"


def test_languages_are_coloured_over_the_ends_of_lines_and_code_stays_what_it_is():
    code = 'def f():\n    """One\n    two"""\n    return 1'
    stream = MarkdownStream(lambda: 40, styles=True)
    lines = (stream.feed(f"```python\n{code}\n") + stream.end()).split("\n")[1:-2]
    assert SEQUENCE.sub("", "\n".join(lines)) == code
    assert lines[0].startswith("\x1b[35mdef\x1b[0m")
    assert lines[2] == '\x1b[32m    two"""\x1b[0m'
    assert MarkdownStream(lambda: 40, styles=True).feed("```nolanguage\nx = 1\n").endswith("\nx = 1\n")


def test_a_long_block_is_coloured_to_its_end():
    stream = MarkdownStream(lambda: 40, styles=True)
    stream.feed("```c\n" + "int f(void) {\n  /* a\n  b */\n}\n" * 20)
    assert stream.feed("int g; /* one\n") == "\x1b[35mint\x1b[0m g; \x1b[2m/* one\x1b[0m\n"
    stream.feed("two\n" * 200)
    assert stream.feed("three */ int\n") == "\x1b[2mthree */\x1b[0m \x1b[35mint\x1b[0m\n"


def test_displayed_mathematics_passes_through():
    text = "$$\n- x_1 * y_2\n= *3*\n$$\n\\[ a * b * c \\]\n"
    assert plain(text) == text
    assert plain("$$\nx\n\n*y*") == "$$\nx\n\ny\n"


def test_blank_lines_are_one_and_none_at_the_ends():
    assert plain("\n\na\n\n\n\nb\n\n\n") == "a\n\nb\n"
    assert plain("") == plain("\n") == ""


@pytest.mark.parametrize("marks", ["> ", "1. ", "+ ", "- > "])
def test_a_model_that_repeats_a_marker_gets_no_endless_nesting(marks):
    count = 300
    text = marks * count + "end"
    shown = plain(text, 120)
    assert shown.endswith("end\n")
    assert shown.count(marks.strip()[0]) > count - 30

"""What holds for any Markdown in any deltas: the cuts change nothing, nothing is lost, no control gets through."""

import re

from hypothesis import HealthCheck, given, settings, strategies as st

from localinfer.apps.terminal.display_width import text_width
from localinfer.apps.terminal.line_writer import SMALLEST_WIDTH
from localinfer.apps.terminal.markdown import MarkdownStream

SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")
WORDS = st.sampled_from(
    "a word sentence, 42 1984. x_y_z 2*3*4 f(x) don't $5 antidisestablishmentarianism 漢字とかな、です。 한국어 é "
    "e\u0301 👍🏽 👨\u200d👩\u200d👧 ❤\ufe0f naïve C:\\dir https://example.org/a/very/long/address?with=query&and=more".split()
)
SPANS = st.sampled_from(
    '*it* **bold** ***both*** `code` ``a`b`` ~~gone~~ [label](https://example.org) [one](x "title") ![image](y.png) '
    "_under_ $a_1*b$ $$x$$ \\(y\\) \\[z\\] \\* \\_ <b> </b> [1] [x] * ** _ ` `` ~ ~~ [ ]( ] ) ! $ \\ *open **open "
    "`open [open [open]( **a*b** *a**b*".split()
)
INLINE = st.lists(WORDS | SPANS, min_size=1, max_size=12).flatmap(
    lambda words: st.sampled_from([" ", "  ", "", "\t"]).map(lambda between: between.join(words))
)
LONG = st.lists(WORDS | SPANS, min_size=30, max_size=60).map(" ".join)
"""Longer than what is held back for a delimiter that is not closed."""
STARTS = st.sampled_from(
    [
        "",
        "",
        "",
        "# ",
        "## ",
        "#### ",
        "####### ",
        "- ",
        "  - ",
        "    * ",
        "1. ",
        "10) ",
        "> ",
        ">> ",
        "> - ",
        "- > ",
        "+ ",
    ]
    + ["-", "--", "=", "***", "* * ", "\t", "    ", "- - ", "1.", "#", "$$", "\\[", "~", "```x`"]
)
LINE = st.tuples(STARTS, INLINE).map("".join)
RULES = st.sampled_from(
    ["---", "***", "* * *", "_____", "====", "--", "-", "1.", "", "", "  ", "$$", "\\]", ">", "- ", "#"]
)
FENCES = st.sampled_from(["```", "```python", "~~~~ rust", "  ```js", "> ```", "- ```", "````", "~~~", "```nolanguage"])
TABLES = st.sampled_from(["| a | b |", "|---|:-:|", "| c \\| d |", "| *e* | f | g |", "|", "||", "|--|"])
SYMBOLS = "ab*_`~[]()!$\\|#-=>1. \n\t\r\x1b\x07漢👍"
DOCUMENT = st.lists(LINE | LINE | RULES | FENCES, max_size=12).map("\n".join)
WITH_TABLES = st.lists(LINE | RULES | FENCES | TABLES | TABLES, max_size=12).map("\n".join)
WIDTHS = st.integers(SMALLEST_WIDTH, 100)
FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def render(text: str, width: int, cuts: list[int] | None = None, *, styles: bool = True) -> tuple[str, list[str]]:
    stream = MarkdownStream(lambda: width, styles=styles)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts or []), len(text)]
    printed = [stream.feed(text[start:end]) for start, end in zip(places, places[1:], strict=False)]
    return "".join(printed) + stream.end(), stream.code_blocks


def letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


@FEW
@given(WITH_TABLES | LONG | st.text(SYMBOLS, max_size=120), WIDTHS, st.lists(st.integers(0)))
def test_cuts_change_nothing(text, width, cuts):
    whole = render(text, width)
    assert render(text, width, cuts) == whole
    assert render(text, width, list(range(len(text)))) == whole


@FEW
@given(DOCUMENT, WIDTHS)
def test_every_letter_is_printed_in_order(text, width):
    assert letters(SEQUENCE.sub("", render(text, width)[0])) == letters(text)


@FEW
@given(WITH_TABLES)
def test_every_letter_of_a_table_that_fits_is_printed_in_order(text):
    assert letters(SEQUENCE.sub("", render(text, 10_000)[0])) == letters(text)


@FEW
@given(st.text(max_size=80) | WITH_TABLES, WIDTHS)
def test_styles_change_no_layout_and_no_control_gets_through(text, width):
    styled = render(text, width)[0]
    plain = render(text, width, styles=False)[0]
    assert SEQUENCE.sub("", styled) == plain
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066]", plain)
    assert styled == "" or styled.endswith("\n")


@FEW
@given(st.lists(st.tuples(STARTS.filter(lambda start: start[:1] not in "\t$\\`~ "), INLINE).map("".join)), WIDTHS)
def test_no_line_is_wider_than_the_terminal(lines, width):
    text = "\n".join(lines).replace("://", ":")
    assert max(map(text_width, render(text, width, styles=False)[0].split("\n"))) <= width


@FEW
@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="`~"), max_size=80),
    st.sampled_from(["", "python", "c", "html", "no such language"]),
    st.sampled_from(["```", "~~~~"]),
    st.lists(st.integers(0)),
    st.booleans(),
)
def test_code_is_kept_to_the_byte(code, language, fence, cuts, styles):
    text = f"Look:\n{fence}{language}\n{code}\n{fence}\ndone"
    printed, blocks = render(text, 20, cuts, styles=styles)
    assert blocks == [code]
    shown = SEQUENCE.sub("", printed)
    if code.isprintable():
        assert f"\n{code}\n──" in shown

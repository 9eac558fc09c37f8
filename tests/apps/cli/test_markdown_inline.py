"""Spans of streamed Markdown: emphasis, code and links, what is held back for them, and how lines are wrapped."""

import re

import pytest

from localinfer.apps.terminal.line_writer import CODE, EMPHASIS, FAINT, LINK, PLAIN, STRONG, STRUCK
from localinfer.apps.terminal.markdown import MarkdownStream
from localinfer.apps.terminal.markdown_inline import MOST_HELD, InlineStream

SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")


def spans(text: str) -> list[tuple[str, int]]:
    parts: list[tuple[str, int]] = []
    inline = InlineStream(lambda text, style: parts.append((text, style)))
    inline.begin()
    inline.feed(text)
    inline.end()
    joined: list[tuple[str, int]] = []
    for part, style in parts:
        if joined and joined[-1][1] == style:
            joined[-1] = joined[-1][0] + part, style
        else:
            joined.append((part, style))
    return joined


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("*a b*", [("a b", EMPHASIS)]),
        ("**a**", [("a", STRONG)]),
        ("***a***", [("a", STRONG | EMPHASIS)]),
        ("**a *b* c**", [("a ", STRONG), ("b", STRONG | EMPHASIS), (" c", STRONG)]),
        ("_a_ __b c__", [("a", EMPHASIS), (" ", PLAIN), ("b c", STRONG)]),
        ("~~a~~", [("a", STRUCK)]),
        ("`a * b`", [("a * b", CODE)]),
        ("`` a`b ``", [("a`b", CODE)]),
        ("**`a`**", [("a", STRONG | CODE)]),
        ("[a](http://b)", [("a", LINK), (" ", PLAIN), ("(http://b)", FAINT)]),
        ("[http://b](http://b)", [("http://b", LINK)]),
        ("[*a*](b(c))", [("a", LINK | EMPHASIS), (" ", PLAIN), ("(b(c))", FAINT)]),
        ("![a](b.png)", [("a", LINK), (" ", PLAIN), ("(b.png)", FAINT)]),
        ("\\*a\\*", [("*a*", PLAIN)]),
        ("**“引用”**后", [("“引用”", STRONG), ("后", PLAIN)]),
        ("这是*重点*内容", [("这是", PLAIN), ("重点", EMPHASIS), ("内容", PLAIN)]),
    ],
)
def test_spans_have_their_style(text, wanted):
    assert spans(text) == wanted


@pytest.mark.parametrize(
    "text",
    """2*3*4|a * b * c|snake_case_name|__init__.py|*open|**open|`open|[open|[a] (b)|[a](b c|[1]|f[0](|$5 or $6|$a*b*c$
    \\(a*b*c\\)|C:\\dir\\file|~5~|wow! [ok]|<b>bold</b>|&amp;|`` ` |$HOME|[a](see this one)|!|a\\|[ ]|**|_|``""".split(
        "|"
    ),
)
def test_what_is_no_span_is_text(text):
    assert spans(text.strip()) == [(text.strip(), PLAIN)]


@pytest.mark.parametrize("opener", ["*", "**", "`", "[", "$", "\\("])
def test_an_open_delimiter_holds_back_no_more_than_a_line_or_two(opener):
    stream = MarkdownStream(lambda: 80, styles=True)
    assert stream.feed(f"so {opener}a ") == "so"
    assert opener in stream.feed("word " * (MOST_HELD // 5 + 1))
    assert stream.feed("next ") == " next" or opener == "\\("


def test_a_word_is_printed_as_soon_as_it_is_complete():
    stream = MarkdownStream(lambda: 80, styles=True)
    assert [stream.feed(delta) for delta in ["One", " two", " th", "ree", ".\n", "- f", "our "]] == (
        ["", "One", " two", "", " three.\n", "\x1b[35m• \x1b[0m", "four"]
    )


def test_only_a_word_longer_than_the_line_is_broken():
    stream = MarkdownStream(lambda: 10, styles=False)
    assert stream.feed("one abcdefghijklmno two ") == "one\nabcdefghij\nklmno two"


def test_a_long_address_is_left_for_the_terminal_to_wrap():
    stream = MarkdownStream(lambda: 10, styles=False)
    address = "https://example.org/long"
    assert stream.feed(f"see {address} it was\n") == f"see\n{address} it\nwas\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("漢字漢字漢字", "漢字漢字\n漢字"),
        ("漢字漢字。漢", "漢字漢\n字。漢"),
        ("漢字漢「字」", "漢字漢\n「字」"),
        ("한국어 한국어", "한국어\n한국어"),
        ("e\u0301" * 10, "e\u0301" * 8 + "\n" + "e\u0301" * 2),
        ("👍🏽👍🏽👍🏽👍🏽👍🏽", "👍🏽👍🏽👍🏽👍🏽\n👍🏽"),
        ("👨\u200d👩\u200d👧abcdefg", "👨\u200d👩\u200d👧\nabcdefg"),
        ("abcdefg❤\ufe0f", "abcdefg\n❤\ufe0f"),
    ],
)
def test_wide_and_combining_characters_are_measured_in_cells(text, shown):
    stream = MarkdownStream(lambda: 8, styles=False)
    assert stream.feed(text) + stream.end() == f"{shown}\n"


def test_a_new_width_counts_from_the_next_line():
    width = 20
    stream = MarkdownStream(lambda: width, styles=False)
    shown = stream.feed("- one two thr")
    width = 12
    shown += stream.feed("ee four five six seven ")
    assert shown + stream.end() == "• one two three four\n  five six\n  seven\n"


def test_no_control_of_the_model_gets_through_though_it_is_cut():
    stream = MarkdownStream(lambda: 80, styles=True)
    deltas = [
        "\x1b",
        "[31mred \x1b]0;ti",
        "tle\x07 `\x1b[2J` [a](\x1b[H)\n",
        "```\x1b[5m\n\x1b[2Jx\x9b\n```\n",
        "|\x1b|\n|-|\n",
    ]
    shown = "".join(map(stream.feed, deltas)) + stream.end()
    assert set(SEQUENCE.findall(shown)) <= {"\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[4m", "\x1b[36m"}
    assert not re.search("[\x00-\x09\x0b-\x1f\x80-\x9f]", SEQUENCE.sub("", shown))
    assert stream.code_blocks == ["\x1b[2Jx\x9b"]


def test_every_style_ends_with_its_word():
    stream = MarkdownStream(lambda: 80, styles=True)
    for delta in ["# A title", " of words\n", "**bold and** ", "`co", "de` [a](b) **long ", "one** it"]:
        shown = stream.feed(delta)
        assert "\x1b" not in shown or shown.rfind("\x1b[0m") == shown.rfind("\x1b")

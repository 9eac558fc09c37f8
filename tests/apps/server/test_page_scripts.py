"""The chat page's scripts without a browser, in Node: Markdown as it comes, events, what a conversation becomes."""

import json
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localinfer.apps.webui
from tests.support.limits import seconds

FOLDER = Path(localinfer.apps.webui.__file__).parent
NAMES = ("elements", "keys", "settings", "highlight", "inline", "markdown", "server", "conversations")
SCRIPTS = [str(FOLDER / f"{name}.js") for name in NAMES]
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node in PATH, which would run the page's scripts")

EVERYTHING = """# Title #
Some *text*, **strong *both* words**, `a*b`, ~~gone~~, snake_case_name,
\\*no\\* [docs](https://a.b/c_(d) "t") and https://a.b/x_y_z.

1. One
   - deep `x`
   - deeper

   still in one
2. Two
lazy
- [other](mailto:a@b.c)

> quoted
> > twice

```python
def f():  # note
    '''text
    def in text'''
    return "a" + 1.5
```
| a | b |
|:--|--:|
| `1` | x \\| y |
| only |

---
***all*** end
"""


@pytest.fixture(scope="module", autouse=True)
def page() -> Iterator[None]:
    """The process that answers `call`."""
    command = [str(NODE), str(Path(__file__).with_name("page_stand_in.js")), *SCRIPTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as process:
        _pages.append(process)
        yield
        _pages.clear()


_pages: list[subprocess.Popen[str]] = []


def call(*calls: list[Any]) -> list[Any]:
    """What functions of the scripts give, in a page of their own."""
    (process,) = _pages
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(seconds(20), process.kill)
    timer.start()
    try:
        process.stdin.write(json.dumps(calls) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    finally:
        timer.cancel()
    assert line, "the page failed, or did not answer"
    results: list[Any] = json.loads(line)
    return results


def rendered(*texts: str) -> list[str]:
    return [
        made["whole"].removeprefix("<div>").removesuffix("</div>") for made in call(*(["render", [t]] for t in texts))
    ]


def test_markdown_becomes_elements() -> None:
    (made,) = rendered(EVERYTHING)
    for part in (
        "<h2>Title</h2><p>Some <em>text</em>, <strong>strong <em>both</em> words</strong>, <code>a*b</code>, "
        "<del>gone</del>, snake_case_name,\n*no* <a href=https://a.b/c_(d)>docs</a> and <a href=https://a.b/x_y_z>https://a.b/x_y_z</a>.</p>",
        "<ol><li><p>One</p><ul><li><p>deep <code>x</code></p></li><li><p>deeper</p></li></ul><p>still in one</p></li>"
        "<li><p>Two\nlazy</p></li></ol><ul><li><p><a href=mailto:a@b.c>other</a></p></li></ul>",
        "<blockquote><p>quoted</p><blockquote><p>twice</p></blockquote></blockquote>",
        "<span class=keyword>def</span> f():  <span class=comment># note</span>\n    <span class=string>'''text</span>"
        "\n<span class=string>    def in text'''</span>\n    <span class=keyword>return</span> "
        '<span class=string>"a"</span> + '
        "<span class=number>1.5</span>\n",
        "<tr><th>a</th><th class=end>b</th></tr><tr><td><code>1</code></td><td class=end>x | y</td></tr>"
        "<tr><td>only</td><td class=end></td></tr></table></div><hr></hr>",
        "<p><em><strong>all</strong></em> end</p>",
    ):
        assert part in made


def test_markdown_does_not_depend_on_how_the_text_is_cut() -> None:
    draw = random.Random(7)
    calls = []
    for _ in range(40):
        cuts = sorted(draw.sample(range(1, len(EVERYTHING)), draw.randint(1, 60)))
        pieces = [EVERYTHING[a:b] for a, b in zip([0, *cuts], [*cuts, len(EVERYTHING)], strict=True)]
        calls.append(["render", pieces])
    calls.append(["render", list(EVERYTHING)])
    whole, *others = (made["whole"] for made in call(["render", [EVERYTHING]], *calls))
    assert all(other == whole for other in others)


PARTS = [
    "*",
    "**",
    "***",
    "_",
    "~~",
    "`",
    "``",
    "[",
    "](",
    ")",
    "[a](https://a.b/c)",
    "https://a.b/c_d",
    "\\(",
    "\\)",
    "$$",
]
PARTS += [
    "\\*",
    "\\",
    "!",
    "|",
    "|-|",
    "\n",
    "\n\n",
    "\n- ",
    "\n  ",
    "\n> ",
    "\n1. ",
    "\n```",
    "\n# ",
    "\U0001f600",
    "\r\n",
]
WORDS = ["a", " ", "word ", " b", "x" * 30]


def test_no_text_depends_on_how_it_is_cut() -> None:
    """Marks of every kind at random, some of them farther apart than they may be, in lines of every length."""
    draw = random.Random(11)
    calls = []
    for number in range(120):
        most = 9000 if number % 10 == 0 else 60
        text, share = "", draw.choice([0.05, 0.3, 0.8])
        parts = [part for part in PARTS if "\n" not in part or number % 20] if most > 60 else PARTS
        while len(text) < most:
            text += draw.choice(parts if draw.random() < share else WORDS)
        size = draw.randint(1, 9) if most == 60 else draw.randint(50, 900)
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        calls += [["render", [text]], ["render", cut]]
    made = [one["whole"] for one in call(*calls)]
    for number, (whole, cut) in enumerate(zip(made[::2], made[1::2], strict=True)):
        assert cut == whole, calls[2 * number][1]


LONG = {
    "a paragraph of 26 kB in one line": "Some words of a story, with a few commas, go on. " * 525,
    "a paragraph of 26 kB in lines": "Some words of a story, with a few commas, go on\n" * 525,
    "a paragraph full of marks": "Some *words* of a `story`, **with** [a](https://a.b) https://a.b/c few ~~commas~~ "
    * 300,
    "10,000 stars": "*" * 10000,
    "stars that open": "*a " * 3500,
    "stars that open and close": "*a* **b*c** " * 1000,
    "stars that close what is far": ("*a " * 300 + "a* " * 300) * 12,
    "all kinds of emphasis, none closed": "**a _b ~~c *d __e " * 600,
    "brackets": "[" * 10000,
    "brackets in pairs": "[" * 4500 + "]" * 4500,
    "links without an end": "[a](b" * 2000,
    "long links": f"[{'a' * 400}](https://a.b/{'c' * 400}) " * 25,
    "long links without an end": f"[{'a' * 400}](https://a.b/{'c' * 400} " * 25,
    "one long address": "https://a.b/" + "c" * 10000,
    "two runs of backticks": "`" * 4999 + " " + "`" * 4998,
    "runs of backticks of every length": " ".join("`" * (number % 63 + 1) for number in range(300)),
    "single backticks": "` " * 3500,
    "backslashes": "\\" * 10000,
    "formulas without an end": "\\(a " * 2500,
    "dollars": "$$ a " * 2000,
    "quotations in quotations": "> " * 3000 + "x",
    "items in items": "- " * 3000 + "x",
    "nested lists": "".join("  " * (number % 6) + "- an item of a list\n" for number in range(450)),
    "a list": "- an item of a list\n" * 450,
    "a table": "| a | b |\n|--|--|\n" + "| cell | cell |\n" * 450,
    "a row without an end": "| a | b |\n|--|--|\n" + "| cell " * 1500,
    "lines that could be tables": "a | b\n" * 1500,
    "a code block of 31 kB": "```js\n" + "let x = 1; // note\n" * 1650 + "```\n",
    "a line of code of 10 kB": "```js\n" + "let x = 'a' + 1; " * 600,
    "quotes in code": "```js\n" + "'\"`" * 3000,
    "white space": " " * 10000 + "-",
    "a heading without an end": "# " + "word " * 2000,
    "a fence without an end": "```" + "word " * 2000,
    "no spaces at all": "\u4f60\u597d" * 4500,
}
PIECE = 200
MOST_LOOKS = 150


def test_markdown_costs_in_the_size_of_what_is_new() -> None:
    """Steps, not time: no character is looked at more often the longer a text becomes, in pieces as at once."""
    sizes = [(text[: len(text) // 2], PIECE) for text in LONG.values()]
    sizes += [(text, PIECE) for text in LONG.values()]
    sizes += [(text, len(text)) for text in LONG.values()]
    found = call(*(["steps", *one] for one in sizes))
    number = len(LONG)
    for what, half, whole, at_once in zip(LONG, found, found[number:], found[2 * number :], strict=False):
        size = len(LONG[what])
        assert whole < 2.3 * half + 20 * size, f"{what}: {half} steps became {whole} for twice the text"
        assert whole < MOST_LOOKS * size, f"{what}: {whole / size:.0f} steps a character"
        assert at_once < 40 * size, f"{what}: {at_once / size:.0f} steps a character at once"


ONE_LINE = {
    "a <b>c</b> &amp; <script>x</script>": None,
    "[x](javascript:alert(1)) [y](data:text/html,z) [z](//a.b)": None,
    "2 * 3 * 4 and a_b_c and **open": None,
    "![secret](https://a.b/p.png)": "<p><a href=https://a.b/p.png>secret</a></p>",
    "[https://good.example](https://evil.example)": "<p><a href=https://evil.example>https://good.example</a></p>",
    "2020. A year": "<ol start=2020><li><p>A year</p></li></ol>",
    "In\n2020. A year": "<p>In\n2020. A year</p>",
    r"so \(a_1 * b_1\) and \[x * y * z\]": None,
    "$$a *b* c$$ and $5": None,
    r"a \] b \) c": None,
    "```\n<b>\n": "<figure class=code><figcaption>text</figcaption><pre><code><b>\n</code><span></span></pre></figure>",
}
"""Markdown -> markup; None: it stays text."""


def test_what_is_no_markdown_stays_text() -> None:
    for (text, shown), made in zip(ONE_LINE.items(), rendered(*ONE_LINE), strict=True):
        assert made == (f"<p>{text}</p>" if shown is None else shown)


def test_unfinished_lines_are_shown_without_marks_that_may_mean_something() -> None:
    texts = ["a\n\n#", "a\n\n- b **c", "```py\nx = 1\ny", "a\n``", "1", "- a\n  - b", "x `y*", "**a** b**"]
    made = call(*(["render", [text]] for text in texts))
    unfinished = [re.sub(r"<div( class=tail)?>|</div>", "", one["unfinished"]) for one in made]
    assert unfinished[0] == "<p>a</p>"
    assert unfinished[1] == "<p>a</p><ul><li><p>b <strong>c</strong></p></li></ul>"
    assert unfinished[2].endswith("<span class=number>1</span>\n</code><span>y</span></pre></figure>")
    assert unfinished[3] == "<p>a</p>"
    assert unfinished[4] == ""
    assert unfinished[5] == "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li></ul>"
    assert unfinished[6:] == ["<p>x <code>y</code></p>", "<p><strong>a</strong> b</p>"]


def test_hostile_markdown_is_deep_nowhere_and_done_soon() -> None:
    texts = [
        "> " * 3000 + "x",
        "*a " * 7000,
        "[" * 20000,
        "`" * 9999 + " " + "`" * 9998,
        "- " * 5000 + "x",
        "|" * 20000,
        " " * 20000 + "-",
    ]
    for made in rendered(*texts):
        assert made.count("<blockquote>") + made.count("<li>") <= 6


def test_events_are_found_however_they_are_cut() -> None:
    stream = ': ping\n\nevent: x\ndata: {"a": 1}\n\ndata: two\ndata: lines\r\n\r\ndata: [DONE]\n\n'
    assert call(["events", [stream]], ["events", list(stream)]) == [['{"a": 1}', "two\nlines", "[DONE]"]] * 2


TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "reasoning": "", "error": "It failed."},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": "Yes.", "reasoning": "Hm.\nWell.", "finish_reason": "stop"},
    {"role": "user", "content": "Go on"},
]
CONVERSATION = {
    "id": "1",
    "name": "A name",
    "model": "demo",
    "system": "Be brief.",
    "options": {"seed": 7},
    "turns": TURNS,
}


def test_request_has_every_message_once_and_no_two_of_one_role_in_a_row() -> None:
    (body,) = call(["requestBody", CONVERSATION])
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n\nAgain"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.\nWell."},
        {"role": "user", "content": "Go on"},
    ]
    assert (body["model"], body["seed"], body["stream"]) == ("demo", 7, True)


def test_exports_hold_the_conversation() -> None:
    markdown, exported = call(["toMarkdown", CONVERSATION], ["toJson", CONVERSATION])
    assert markdown.startswith("# A name\n\n## System\n\nBe brief.\n\n## You\n\nHi\n")
    assert "## Assistant (demo)\n\n> Hm.\n> Well.\n\nYes.\n\n## You\n\nGo on\n" in markdown
    assert json.loads(exported) == CONVERSATION


def test_errors_say_what_to_do() -> None:
    too_long = {"code": "context_length_exceeded", "n_prompt_tokens": 5000, "n_ctx": 4096, "message": "x"}
    refused = {"type": "invalid_request_error", "message": "seed is -1"}
    full, unknown, wrong = call(["failure", too_long, 400], ["failure", None, 502], ["failure", refused, 400])
    assert "5,000 tokens" in full[0] and "4,096" in full[0] and "Make room" in full[0]
    assert "502" in unknown[0]
    assert [full[1], unknown[1], wrong[1]] == [False, True, False]


def test_replies_that_broke_off_can_be_continued() -> None:
    broken = {"role": "assistant", "content": "abc", "finish_reason": "error", "error": "Gone.", "may_try_again": True}
    begun, empty = call(["describeEnd", broken, 4096], ["describeEnd", {**broken, "content": ""}, 4096])
    assert begun == "Gone. Continue completes the reply."
    assert empty == "Gone. Regenerate tries again."
    reasons = ["length", "stopped", "interrupted", "error", "stop", None]
    can = call(*(["canContinue", {**broken, "finish_reason": reason}, 4096] for reason in reasons))
    assert can == [True, True, True, True, False, False]
    full = {"prompt_tokens": 4000, "completion_tokens": 96}
    assert call(["canContinue", {**broken, "stats": full}, 4096]) == [False]


def test_a_context_is_full_only_when_nothing_is_left() -> None:
    found = call(*(["fullnessOf", used, most] for used, most in ((1024, 1024), (1023, 1024), (500, 1024), (9, None))))
    assert found == ["full", "soon full", None, None]


@pytest.mark.parametrize(
    "kept", ["{", "null", "[]", "7", '"x"', '{"model": 3, "system": null, "options": {"seed": "x", "owned": 1}}']
)
def test_broken_options_of_the_browser_become_defaults(kept: str) -> None:
    ((value, left),) = call(["settings", {"localinfer.options": kept}])
    assert value in (None, {"model": "", "system": "", "options": {}})
    assert (left is None) == (value is None), "what cannot be read is not read again"


def test_stores_that_refuse_keep_texts_as_long_as_the_page() -> None:
    assert call(["refusing", "a text"]) == [["a text", False, None]]


KEYS: dict[str, dict[str, Any]] = {
    "Alt-N of the US": {"key": "n", "code": "KeyN"},
    "Alt-Shift-N": {"key": "N", "code": "KeyN"},
    "Alt-N of Dvorak": {"key": "n", "code": "KeyL"},
    "Alt and a Cyrillic letter": {"key": "\u0442", "code": "KeyN"},
    "Option-L of a German Mac": {"key": "@", "code": "KeyL", "apple": True},
    "Option-N of a US Mac": {"key": "Dead", "code": "KeyN", "apple": True},
    "Option-N of a Polish Mac": {"key": "\u0144", "code": "KeyN", "apple": True},
    "Option-N, hexadecimal input": {"key": "n", "code": "KeyN", "apple": True},
    "AltGr-L of Polish Windows": {"key": "\u0142", "code": "KeyL", "ctrlKey": True},
    "AltGr-L as Linux says it": {"key": "\u0142", "code": "KeyL", "graph": True},
    "AltGr-N that gives its letter": {"key": "n", "code": "KeyN", "graph": True},
    "while a word is composed": {"key": "n", "code": "KeyN", "isComposing": True},
    "without Alt": {"key": "n", "code": "KeyN", "altKey": False},
}
IN_A_TEXT = {"Alt-N of the US": "N", "Alt-Shift-N": "N", "Alt-N of Dvorak": "N"}
BESIDE_TEXTS = {
    **IN_A_TEXT,
    "Alt and a Cyrillic letter": "N",
    "Option-L of a German Mac": "L",
    "Option-N of a US Mac": "N",
    "Option-N of a Polish Mac": "N",
    "Option-N, hexadecimal input": "N",
    "AltGr-L as Linux says it": "L",
    "AltGr-N that gives its letter": "N",
}


@pytest.mark.parametrize("tag", ["TEXTAREA", "INPUT", "BUTTON"])
def test_no_key_that_types_is_a_shortcut(tag: str) -> None:
    found = dict(zip(KEYS, call(*(["chord", {"altKey": True, **key}, tag] for key in KEYS.values())), strict=True))
    expected = BESIDE_TEXTS if tag == "BUTTON" else IN_A_TEXT
    assert {name: letter for name, letter in found.items() if letter} == expected


def message(name: str, parent: str | None, role: str, **more: Any) -> dict[str, Any]:
    made = {"id": name, "parent": parent, "role": role, "content": name, "version": 1, "created": name, **more}
    return {"reasoning": "", "finish_reason": "stop", **made} if role == "assistant" else made


def test_what_two_tabs_write_behind_one_message_stands_side_by_side() -> None:
    tree = [message("a", None, "user"), message("b", "a", "assistant"), message("c", "b", "user")]
    tree += [message("d", "c", "assistant"), message("e", "b", "user"), message("f", "e", "assistant")]
    shown = call(["tree", {"id": "1", "head": "d"}, tree, "c"], ["tree", {"id": "1", "head": "f"}, tree[::-1], "e"])
    assert shown[0] == {
        "turns": ["a", "b", "c", "d"],
        "versions": ["c", "e"],
        "end": "d",
        "contents": ["a", "b", "c", "d"],
    }
    assert shown[1] == {
        "turns": ["a", "b", "e", "f"],
        "versions": ["c", "e"],
        "end": "f",
        "contents": ["a", "b", "e", "f"],
    }


def test_the_newest_state_of_a_message_stays_in_whatever_order_states_come() -> None:
    states = [
        message("b", None, "assistant", content="", finish_reason=None),
        message("b", None, "assistant", content="abc", finish_reason=None),
        message("b", None, "assistant", content="abcdef", finish_reason="stop", version=2),
        message("b", None, "assistant", content="abcdef", finish_reason=None, version=3),
        message("b", None, "assistant", content="abcdefghi", version=4),
    ]
    draw = random.Random(3)
    orders = [draw.sample(states, len(states)) for _ in range(12)]
    found = call(*(["tree", {"id": "1", "head": "b"}, order, "b"] for order in orders))
    assert all(one["contents"] == ["abcdefghi"] for one in found)


def test_files_that_are_imported_give_what_was_exported() -> None:
    tree = [message("a", None, "user"), message("b", "a", "assistant"), message("c", "a", "assistant")]
    tree += [message("d", "c", "user")]
    (exported,) = call(["exported", {"id": "1", "name": "N", "model": "m", "options": {"seed": 7}, "head": "d"}, tree])
    value = json.loads(exported)
    assert [turn["id"] for turn in value["turns"]] == ["a", "c", "d"] and value["others"][0]["id"] == "b"
    kept, again, old = call(
        ["brought", exported, False], ["brought", exported, True], ["brought", json.dumps(CONVERSATION), False]
    )
    for one in (kept, again):
        assert one["contents"] == ["a", "c", "d"] and one["all"] == ["a", "b", "c", "d"]
        assert (one["name"], one["options"]) == ("N", {"seed": 7})
    assert kept["id"] == "1" and again["id"] != "1"
    assert not set(kept["ids"]) & set(again["ids"]), "a second import of a file is another conversation"
    assert old["contents"] == [turn["content"] for turn in TURNS]


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"turns": 3}', '{"turns": [null]}', '{"turns": [{"role": "system"}]}']
)
def test_other_files_are_no_conversations(text: str) -> None:
    assert call(["brought", text, False]) == [None]


def test_room_in_a_context_is_found_by_the_share_of_texts() -> None:
    turns = [message(f"{i:02}" * 5, None, ("user", "assistant")[i % 2]) for i in range(10)]
    half, none, all_but_one = call(
        ["questionWithin", turns, 1000, 500], ["questionWithin", turns[:2], 9, 1], ["questionWithin", turns, 9000, 1]
    )
    assert half["content"] == turns[6]["content"]
    assert none is None
    assert all_but_one["content"] == turns[8]["content"]


def test_the_model_reads_from_the_last_summary_that_was_written() -> None:
    ask = {"is_summary": True}
    turns = [message("a", None, "user"), message("b", "a", "assistant"), message("s", "b", "user", **ask)]
    turns += [message("t", "s", "assistant"), message("u", "t", "user"), message("v", "u", "user", **ask)]
    turns += [message("w", "v", "assistant", content="", finish_reason=None)]
    read, shifted = call(["turnsRead", {"turns": turns}], ["turnsRead", {"turns": turns, "first": "u"}])
    assert [turn["id"] for turn in read] == ["s", "t", "u", "v", "w"]
    assert [turn["id"] for turn in shifted] == ["u", "v", "w"]
    (body,) = call(["requestBody", {"model": "m", "options": {}, "turns": turns[2:6]}])
    assert body["messages"][-1]["content"].endswith("Write nothing but the summary.")
    assert body["messages"][0]["content"] == "s"

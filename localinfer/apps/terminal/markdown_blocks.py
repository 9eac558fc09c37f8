"""Blocks of Markdown: lines classified from as few characters as possible, and fenced code in colours."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

_ORDERED = re.compile(r"(\d{1,9})([.)])")
_MAYBE_ORDERED = re.compile(r"\d{1,9}[.)]? *")
_HEADING = re.compile(r"#{1,6}(?= |$)")
_SHORTEST_RULE = 3
_DEEPEST = 24
"""Quotes and items inside one another; markers beyond are text. A model that repeats itself may write thousands."""
_CLOSERS = {"$$": "$$", "\\[": "\\]"}


class Kind(Enum):
    """Kinds of lines, by the part that follows quote and list markers."""

    BLANK = auto()
    TEXT = auto()
    HEADING = auto()
    RULE = auto()
    UNDERLINE = auto()
    """Of equals signs, under a title."""
    FENCE = auto()
    TABLE = auto()
    MATHEMATICS = auto()
    CODE = auto()
    """A line of code for its indent."""


@dataclass(frozen=True)
class Quote:
    """A block quote that a line is in."""


@dataclass(frozen=True)
class Item:
    """A list item that a line is in; columns count from the start of its container."""

    marker_column: int
    text_column: int
    marker: str
    """`-`, `*` or `+`, or a number with its delimiter."""

    @property
    def least_indent(self) -> int:
        """The indent that is inside the item; models indent by two columns under `1.`, where CommonMark wants three."""
        return min(self.text_column, self.marker_column + 2)


Container = Quote | Item


@dataclass(frozen=True)
class LineStart:
    """The decision about a line."""

    kept: int
    """Number of the open quotes and items that the line is in."""
    opened: tuple[Container, ...]
    """Quotes and items that begin on it, inside those."""
    kind: Kind
    text: str = ""
    """The beginning of the line after its markers, and after that of a heading or fence."""
    level: int = 0
    """Of a heading."""
    fence: str = ""
    """The run of backticks or tildes."""
    strip: int = 0
    """Columns of indent of the fence after the last quote marker, which its lines of code have too."""


@dataclass(frozen=True)
class Around:
    """The context of a line."""

    containers: Sequence[Container] = ()
    """Open quotes and items, outermost first."""
    in_paragraph: bool = False
    """The line before is text that this one may continue."""


def read_start(line: str, around: Around, *, is_whole: bool) -> LineStart | None:
    """Decide what a line is from its start, or None while more of it is needed; a whole line is always decided.

    line: without tabs and line end.
    Text and headings are decided for good; what else is decided from a start has to be read again as a whole line.
    """
    place, kept, quote_end = 0, 0, 0
    for container in around.containers:
        indent = _indent(line, place)
        if place + indent == len(line):
            return _blank(around, kept) if is_whole else None
        if isinstance(container, Quote):
            if line[place + indent] != ">":
                break
            place += indent + 1
            if place == len(line) and not is_whole:
                return None
            place += line.startswith(" ", place)
            quote_end = place
        elif indent >= container.least_indent:
            place += min(indent, container.text_column)
        else:
            break
        kept += 1
    opened: list[Container] = []
    while True:
        indent = _indent(line, place)
        if place + indent == len(line):
            if not is_whole:
                return None
            return LineStart(kept, tuple(opened), Kind.TEXT) if opened else _blank(around, kept)
        rest = line[place + indent :]
        if indent >= 4 and not opened and not around.in_paragraph and not _in_item(around.containers[:kept]):
            return LineStart(kept, (), Kind.CODE, line[place:])
        is_deep = kept + len(opened) >= _DEEPEST
        if rest[0] == ">" and not is_deep:
            if len(rest) == 1 and not is_whole:
                return None
            opened.append(Quote())
            place += indent + (2 if rest.startswith("> ") else 1)
            quote_end = place
            continue
        may_continue = around.in_paragraph and not opened and kept == len(around.containers)
        marker = "" if is_deep else _item_marker(rest, is_whole=is_whole, continues=may_continue)
        if marker is None:
            return None
        if not marker:
            break
        spaces = _indent(rest, len(marker))
        opened.append(Item(indent, indent + len(marker) + (spaces if 1 <= spaces <= 4 else 1), marker))
        place += indent + len(marker) + spaces
    leaf = _read_leaf(rest, in_paragraph=may_continue, is_whole=is_whole)
    if leaf is None:
        return None
    kind, text, level, fence = leaf
    if kind is Kind.TEXT and around.in_paragraph and not opened:
        kept = len(around.containers)
    return LineStart(kept, tuple(opened), kind, text, level, fence, place + indent - quote_end)


def mathematics_closer(text: str) -> str:
    """The end mark of displayed mathematics that the text opens; empty if the text closes it."""
    closer = _CLOSERS[text[:2]]
    return "" if closer in text[2:] else closer


def _indent(line: str, place: int) -> int:
    return len(line) - place - len(line[place:].lstrip(" "))


def _blank(around: Around, kept: int) -> LineStart:
    """A blank line is in every open item, and in the quotes that it is marked for."""
    while kept < len(around.containers) and isinstance(around.containers[kept], Item):
        kept += 1
    return LineStart(kept, (), Kind.BLANK)


def _in_item(containers: Sequence[Container]) -> bool:
    return any(isinstance(container, Item) for container in containers)


def _is_rule(rest: str) -> bool:
    marks = rest.replace(" ", "")
    return len(marks) >= _SHORTEST_RULE and marks[0] in "-*_" and marks == marks[0] * len(marks)


def _item_marker(rest: str, *, is_whole: bool, continues: bool) -> str | None:
    """The list marker that the text begins with, empty for none, None while that is undecided.

    continues: whether the text may continue a paragraph, which only the number 1 and full items interrupt.
    """
    first = rest[0]
    if first in "-*+":
        if _is_rule(rest) and is_whole:
            return ""
        after = rest[1:].lstrip(" ")
        if not after:
            if not is_whole:
                return None
            return "" if continues else first
        if rest[1] != " ":
            return ""
        if first != "+" and not is_whole and rest.replace(" ", "").strip(first) == "":
            return None
        return first
    if not first.isascii() or not first.isdigit():
        return ""
    if not is_whole and _MAYBE_ORDERED.fullmatch(rest):
        return None
    found = _ORDERED.match(rest)
    if found is None or not (rest[found.end() :].startswith(" ") or found.end() == len(rest)):
        return ""
    if continues and (int(found[1]) != 1 or not rest[found.end() :].strip()):
        return ""
    return found[0]


def _read_leaf(rest: str, *, in_paragraph: bool, is_whole: bool) -> tuple[Kind, str, int, str] | None:
    first = rest[0]
    text = Kind.TEXT, rest, 0, ""
    if first == "#":
        heading = _HEADING.match(rest)
        if heading and (is_whole or heading.end() < len(rest.rstrip(" "))):
            return Kind.HEADING, rest[heading.end() :].lstrip(" "), heading.end(), ""
        return None if not is_whole and (heading or rest == "#" * len(rest)) and len(rest.strip("# ")) == 0 else text
    if first in "`~":
        return _read_fence(rest, is_whole=is_whole)
    if first in "-*_":
        if is_whole:
            return (Kind.RULE, rest, 0, "") if _is_rule(rest) else text
        return None if rest.replace(" ", "").strip(first) == "" else text
    if first == "=" and in_paragraph:
        if is_whole and len(rest.rstrip(" ")) >= _SHORTEST_RULE and rest.strip(" ").strip("=") == "":
            return Kind.UNDERLINE, rest, 0, ""
        return None if not is_whole and rest.strip("= ") == "" else text
    if first == "|":
        return Kind.TABLE, rest, 0, ""
    if first in "$\\":
        if len(rest) == 1 and not is_whole:
            return None
        closer = _CLOSERS.get(rest[:2])
        if closer and (not is_whole or mathematics_closer(rest) or rest.rstrip(" ").endswith(closer)):
            return Kind.MATHEMATICS, rest, 0, ""
        return text
    return text


def _read_fence(rest: str, *, is_whole: bool) -> tuple[Kind, str, int, str] | None:
    mark = rest[0]
    run = rest[: len(rest) - len(rest.lstrip(mark))]
    text = Kind.TEXT, rest, 0, ""
    if len(run) == len(rest) and not is_whole:
        return None
    information = rest[len(run) :]
    if len(run) < 3 or (mark == "`" and mark in information):
        return text
    return (Kind.FENCE, information.strip(), 0, run) if is_whole else None


_FEWEST_LINES = 12
"""Lines before the current one that are read again for its state, and those up to a line to begin with."""
_MOST_CHARACTERS = 8_000
_LONGEST_LINE = 2_000
_SEQUENCES = {
    # Neither yellow nor bright black: light themes and Solarized show those hardly or not at all.
    "Comment": "\x1b[2m",
    "Keyword": "\x1b[35m",
    "Operator.Word": "\x1b[35m",
    "Literal.String": "\x1b[32m",
    "Literal.Number": "\x1b[36m",
    "Name.Function": "\x1b[34m",
    "Name.Class": "\x1b[34m",
    "Name.Decorator": "\x1b[36m",
    "Name.Builtin": "\x1b[36m",
    "Name.Exception": "\x1b[36m",
    "Name.Tag": "\x1b[34m",
    "Name.Attribute": "\x1b[36m",
    "Generic.Inserted": "\x1b[32m",
    "Generic.Deleted": "\x1b[31m",
    "Generic.Heading": "\x1b[34m",
    "Generic.Subheading": "\x1b[36m",
    "Generic.Prompt": "\x1b[34m",
}
_END = "\x1b[0m"


class CodeColours:
    """Styles the lines of one code block, each from the lines before it."""

    def __init__(self, language: str) -> None:
        self._lexer = _find_lexer(language)
        self._before = ""
        """Lines that the state of the next one is read from."""
        self._places: list[int] = []
        """Positions in them of lines that start something new, outside strings and comments."""

    def line(self, code: str) -> str:
        """The line, which has no line end, with colours; as it is where the language is unknown."""
        if self._lexer is None or len(code) > _LONGEST_LINE:
            return code
        start, text = len(self._before), f"{self._before}{code}\n"
        parts: list[str] = []
        position, is_inside = 0, False
        for _, kind, value in self._lexer.get_tokens_unprocessed(text):
            end = position + len(value)
            if position < start <= end:
                is_inside = str(kind).startswith(("Token.Literal.String", "Token.Comment.Multi"))
            if end > start:
                parts.append(_styled(text[max(position, start) : min(end, len(text) - 1)], kind))
            position = end
        if position != len(text):
            self._lexer = None
            return code
        if code[:1].strip() and code[0] not in "}])" and not is_inside:
            self._places.append(start)
        self._before = text
        self._forget()
        return "".join(parts)

    def _forget(self) -> None:
        """Keep the lines from the last position on that has enough lines after it."""
        while len(self._places) > 1 and self._before.count("\n", self._places[1]) >= _FEWEST_LINES:
            self._drop(self._places[1])
        if len(self._before) > _MOST_CHARACTERS:
            self._drop(self._before.index("\n", len(self._before) // 2) + 1)

    def _drop(self, length: int) -> None:
        self._before = self._before[length:]
        self._places = [place - length for place in self._places if place >= length]


def _find_lexer(language: str) -> Any:
    if not language:
        return None
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        # PHP from a model seldom has its opening tag.
        return get_lexer_by_name(language, startinline=True)
    except ClassNotFound:
        return None


def _styled(text: str, kind: Any) -> str:
    if not text.strip():
        return text
    names = str(kind).removeprefix("Token.").split(".")
    for count in range(len(names), 0, -1):
        sequence = _SEQUENCES.get(".".join(names[:count]))
        if sequence is not None:
            return f"{sequence}{text}{_END}"
    return text


_QUOTE_MARK = re.compile(r" {0,3}> ?")
_DEEPEST_CLOSING = 3
"""Spaces that a closing fence may have before it; with more it is code."""


class Fence:
    """The lines of a fenced block.

    run: the backticks or tildes that opened it; as many or more close it.
    quotes: block quotes that it is in, whose marks are no code.
    indent: columns of indent of the opening fence, which its lines may have too.
    colours: for its language; None to print it plain.
    """

    def __init__(self, run: str, *, quotes: int, indent: int, colours: CodeColours | None) -> None:
        self.colours = colours
        self._run = run
        self._quotes = quotes
        self._indent = indent
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        """The code so far, without the last line end."""
        return "\n".join(self._lines)

    def code_of(self, line: str) -> str | None:
        """The code of a line, without quote marks and the fence's indent; None if the line is outside the quote."""
        for _ in range(self._quotes):
            mark = _QUOTE_MARK.match(line)
            if mark is None:
                return None
            line = line[mark.end() :]
        spaces = len(line) - len(line.lstrip(" "))
        return line[min(spaces, self._indent) :]

    def is_closed_by(self, code: str) -> bool:
        """True if the code of a line is the closing fence."""
        mark = code.strip()
        return (
            len(mark) >= len(self._run)
            and mark == self._run[0] * len(mark)
            and len(code) - len(code.lstrip(" ")) <= _DEEPEST_CLOSING
        )

    def add(self, code: str) -> None:
        """Add the code of a line."""
        self._lines.append(code)

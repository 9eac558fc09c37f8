"""Emphasis, code, links and mathematics within one line of Markdown that arrives in deltas.

The rules of CommonMark for delimiter runs, with three departures for text of models: a span ends on the line where it
began, characters of Chinese and Japanese count as punctuation beside a delimiter (they have no spaces), and `2*3*4`
and `__init__` stay what they are.
"""

import re
import string
from collections.abc import Callable

from localinfer.apps.terminal.display_width import is_wide
from localinfer.apps.terminal.line_writer import CODE, EMPHASIS, FAINT, LINK, PLAIN, STRONG, STRUCK

MOST_HELD = 160
"""Characters after an opening delimiter that are held back; one that is not closed by then is text."""
_ORDINARY = re.compile(r"[^\\`*_~\[\]!$\n]+")
_PUNCTUATION = frozenset(string.punctuation)
_DESTINATION = re.compile(r"""<[^<>]*>|\S*|\S+\s+(?:"[^"]*"|'[^']*'|\([^()]*\))""")
_MATHEMATICS = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}


class _Token:
    """A part of the held text: `kind` is the delimiter that it may open, or empty for what is only text."""

    __slots__ = ("text", "style", "kind", "closes_too")

    def __init__(self, text: str, style: int = PLAIN, kind: str = "", *, closes_too: bool = False) -> None:
        self.text = text
        self.style = style
        self.kind = kind
        self.closes_too = closes_too


class InlineStream:
    """Writes one line of Markdown after another as styled text.

    write: takes text and its style (constants of `line_writer`). What it was given is decided for good.
    """

    def __init__(self, write: Callable[[str, int], None]) -> None:
        self._write = write
        self._base = PLAIN
        self._tokens: list[_Token] = []
        """Begins with a token that may open something; empty where nothing is open."""
        self._held = 0
        self._previous = " "
        self._run = ""
        self._is_escaped = False
        self._awaits_destination = False
        self._closer = ""
        self._opener = ""
        self._content = ""

    def begin(self, base: int = PLAIN) -> None:
        """Begin a line whose text has the style `base`."""
        self._base = base
        self._previous = " "

    def feed(self, text: str) -> None:
        """Read more of the line."""
        place = 0
        while place < len(text):
            if not (self._run or self._is_escaped or self._awaits_destination or self._closer):
                ordinary = _ORDINARY.match(text, place)
                if ordinary is not None:
                    self._text(ordinary[0])
                    self._previous = ordinary[0][-1]
                    place = ordinary.end()
                    continue
            self._step(text[place])
            place += 1

    def end(self) -> None:
        """Read the end of the line: what is open is text."""
        while self._run or self._is_escaped or self._awaits_destination or self._closer:
            if self._closer:
                self._end_span()
            elif self._is_escaped:
                self._is_escaped = False
                self._text("\\")
            elif self._awaits_destination:
                self._no_destination()
            else:
                self._end_run(" ")
        for token in self._tokens:
            token.kind = ""
        self._flush()

    def _step(self, character: str) -> None:
        if self._closer:
            self._in_span(character)
            return
        if self._awaits_destination:
            if character == "(":
                self._awaits_destination = False
                self._open_span("](", ")")
                return
            self._no_destination()
        if self._is_escaped:
            self._is_escaped = False
            if character in "([":
                self._open_span(f"\\{character}", _MATHEMATICS[f"\\{character}"])
            elif character in _PUNCTUATION and character not in ")]":
                self._text(character)
                self._previous = character
            else:
                self._text("\\")
                self._previous = "\\"
                self._step(character)
            return
        if self._run == "!" and character == "[":
            self._run, self._previous = "", "["
            self._open_token("![")
            return
        if self._run:
            if character == self._run[0] and character != "!":
                self._run += character
                return
            self._end_run(character)
            if self._closer:
                self._in_span(character)
                return
        if character == "\\":
            self._is_escaped = True
        elif character in "*_~`$!":
            self._run = character
        elif character == "[":
            self._open_token("[")
            self._previous = character
        elif character == "]":
            self._end_label()
            self._previous = character
        else:
            self._text(character)
            self._previous = character

    # Text and held tokens.

    def _text(self, text: str, style: int = PLAIN) -> None:
        if not self._tokens:
            self._write(text, self._base | style)
            return
        # One by one, so that the same is held however the text was cut.
        while text and self._tokens:
            taken = max(1, MOST_HELD - self._held)
            part, text = text[:taken], text[taken:]
            last = self._tokens[-1]
            if last.kind or last.style != style:
                self._tokens.append(_Token(part, style))
            else:
                last.text += part
            self._held += len(part)
            self._release_excess()
        if text:
            self._write(text, self._base | style)

    def _open_token(self, text: str, *, closes_too: bool = False) -> None:
        self._tokens.append(_Token(text, kind="[" if text[-1] == "[" else text[0], closes_too=closes_too))
        self._held += len(text)
        self._release_excess()

    def _release_excess(self) -> None:
        while self._tokens and self._held >= MOST_HELD:
            self._tokens[0].kind = ""
            self._flush()

    def _flush(self) -> None:
        count = next((place for place, token in enumerate(self._tokens) if token.kind), len(self._tokens))
        for token in self._tokens[:count]:
            if token.text:
                self._write(token.text, self._base | token.style)
            self._held -= len(token.text)
        del self._tokens[:count]

    # Runs of `*`, `_`, `~`, backticks and `$`, decided by the character after them.

    def _end_run(self, following: str) -> None:
        run, self._run = self._run, ""
        before, self._previous = self._previous, run[-1]
        if run[0] == "`":
            self._open_span(run, run)
        elif run == "!":
            self._text(run)
        elif run[0] == "$":
            opens = run == "$$" or (run == "$" and following not in " \t" and not following.isdigit())
            if opens:
                self._open_span(run, _MATHEMATICS[run])
            else:
                self._text(run)
        else:
            self._emphasis(run, before, following)

    def _emphasis(self, run: str, before: str, following: str) -> None:
        starts_word = not following.isspace() and (
            not _is_boundary(following) or before.isspace() or _is_boundary(before)
        )
        ends_word = not before.isspace() and (
            not _is_boundary(before) or following.isspace() or _is_boundary(following)
        )
        mark = run[0]
        opens, closes = starts_word, ends_word
        if mark == "_":
            opens = starts_word and (not ends_word or before in _PUNCTUATION)
            closes = ends_word and (not starts_word or following in _PUNCTUATION)
        elif mark == "~" and len(run) != 2:
            opens = closes = False
        elif run == "*" and before.isascii() and before.isalnum() and following.isascii() and following.isalnum():
            opens = False
            closes = any(token.kind == "*" for token in self._tokens)
        left = len(run)
        while closes and left:
            taken = self._close(mark, left, opens=opens)
            if not taken:
                break
            left -= taken
        if left and opens:
            self._open_token(mark * left, closes_too=closes)
        elif left:
            self._text(mark * left)
        self._flush()

    def _close(self, mark: str, count: int, *, opens: bool) -> int:
        for place in range(len(self._tokens) - 1, -1, -1):
            opener = self._tokens[place]
            if opener.kind != mark:
                continue
            opened = len(opener.text)
            if (opener.closes_too or opens) and (opened + count) % 3 == 0 and (opened % 3 or count % 3):
                continue
            if mark == "_" and opened == count == 2 and _is_name(self._tokens[place + 1 :]):
                continue
            taken = 2 if opened >= 2 and count >= 2 else 1
            if mark == "~" and taken != 2:
                continue
            style = STRUCK if mark == "~" else STRONG if taken == 2 else EMPHASIS
            for token in self._tokens[place + 1 :]:
                token.kind = ""
                token.style |= style
            opener.text = opener.text[taken:]
            self._held -= taken
            if not opener.text:
                opener.kind = ""
            return taken
        return 0

    # Spans whose content is read as it is: code, mathematics, the destination of a link.

    def _open_span(self, opener: str, closer: str) -> None:
        self._opener, self._closer, self._content = opener, closer, ""

    def _in_span(self, character: str) -> None:
        if self._closer[0] == "`" and character != "`" and self._ends_with_closer():
            self._end_span()
            self._step(character)
            return
        self._content += character
        is_closed = self._closer[0] != "`" and character == self._closer[-1] and self._ends_with_closer()
        if is_closed or len(self._content) > MOST_HELD:
            self._end_span()

    def _ends_with_closer(self) -> bool:
        content, closer = self._content, self._closer
        if not content.endswith(closer):
            return False
        if closer[0] == "`":
            return not content.endswith(f"`{closer}")
        if closer == ")":
            return content.count(")") > content.count("(")
        if closer == "$":
            return len(content) > 1 and not content[-2].isspace()
        return True

    def _end_span(self) -> None:
        opener, closer, content = self._opener, self._closer, self._content
        is_closed = self._ends_with_closer()
        self._opener = self._closer = self._content = ""
        inner = content[: len(content) - len(closer)] if is_closed else content
        self._previous = closer[-1]
        if is_closed and closer[0] == "`":
            if inner.strip() and inner[0] == inner[-1] == " ":
                inner = inner[1:-1]
            self._text(inner, CODE)
        elif is_closed and closer == ")":
            self._link(inner)
        elif is_closed:
            self._text(f"{opener}{content}")
        else:
            if closer == ")":
                self._no_destination()
                opener = "("
            self._text(opener)
            self._previous = opener[-1]
            self.feed(content)

    # Links.

    def _end_label(self) -> None:
        if any(token.kind == "[" for token in self._tokens):
            self._awaits_destination = True
        else:
            self._text("]")

    def _label_place(self) -> int | None:
        places = [place for place, token in enumerate(self._tokens) if token.kind == "["]
        return places[-1] if places else None

    def _no_destination(self) -> None:
        self._awaits_destination = False
        place = self._label_place()
        if place is not None:
            self._tokens[place].kind = ""
        self._text("]")
        self._flush()

    def _link(self, destination: str) -> None:
        destination = destination.strip()
        place = self._label_place()
        if place is None or not _DESTINATION.fullmatch(destination):
            self._no_destination()
            self._text("(")
            self.feed(f"{destination})")
            return
        opener = self._tokens[place]
        self._held -= len(opener.text)
        opener.text = opener.kind = ""
        label = ""
        for token in self._tokens[place + 1 :]:
            token.kind = ""
            token.style |= LINK
            label += token.text
        if destination and destination != label:
            address = f"({destination})"
            for text, style in ((" ", PLAIN), (address, FAINT)) if label else ((address, FAINT),):
                self._tokens.append(_Token(text, style))
                self._held += len(text)
        self._flush()
        self._release_excess()


def _is_name(tokens: list[_Token]) -> bool:
    """True if two underscores on both sides of the tokens make a name of Python."""
    text = "".join(token.text for token in tokens)
    return text.isidentifier() and text == text.lower()


def _is_boundary(character: str) -> bool:
    return character in _PUNCTUATION or (not character.isascii() and not character.isalnum()) or is_wide(character)

"""Columns of a terminal that text takes, and where it may be cut or broken."""

import re
from functools import lru_cache

from prompt_toolkit.utils import get_cwidth
from wcwidth import wcswidth, wcwidth

from localinfer.apps.cli import messages

_ZERO_WIDTH_JOINER = "\u200d"
_EMOJI_STYLE = "\ufe0f"
"""Makes the character before it wide."""
_LONGEST_CLUSTER = 16
_OPENING = frozenset("([{\u2018\u201c\u300a\u3008\u300c\u300e\u3010\u3014\u3016\uff08\uff3b\uff5b")
"""Never the last on a line."""
_CLOSING = frozenset(
    ")]}.,;:!?%\u2019\u201d\u2026\u3001\u3002\u3009\u300b\u300d\u300f\u3011\u3015\u3017\uff09\uff0c\uff0e\uff1a\uff1b"
    "\uff01\uff1f\uff3d\uff5d\uff05\u30fb\u30fc\u3005\u3041\u3043\u3045\u3047\u3049\u3063\u3083\u3085\u3087\u30a1\u30a3"
    "\u30a5\u30a7\u30a9\u30c3\u30e3\u30e5\u30e7"
)
"""Never the first on a line: closing punctuation, and the small kana."""


def text_width(text: str) -> int:
    """Cells of a text without line ends: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    width = wcswidth(text)
    return width if width >= 0 else sum(max(0, wcwidth(character)) for character in text)


@lru_cache(maxsize=4096)
def _is_wide(character: str) -> bool:
    # Korean puts spaces between its words, and breaks lines there.
    return wcwidth(character) == 2 and not "\uac00" <= character <= "\ud7a3"


def is_wide(character: str) -> bool:
    """True if a line may be broken beside the character: an ideograph, kana or an emoji."""
    return character >= "\u1100" and _is_wide(character)


def joins(before: str, character: str) -> bool:
    """True if the character is drawn in the cells of the text before it, and must stay with it."""
    if not before:
        return False
    cluster = before[-_LONGEST_CLUSTER:]
    return character == _EMOJI_STYLE or text_width(cluster + character) <= text_width(cluster)


def may_break(before: str, character: str) -> bool:
    """True if a line may end after the text `before`, which is not empty, though no space follows it."""
    last = before[-1]
    if last.isascii() and character.isascii():
        return False
    if last in _OPENING or character in _CLOSING or last == _ZERO_WIDTH_JOINER or joins(before, character):
        return False
    return is_wide(character) or any(map(is_wide, before[-2:]))


TAB_STOP = 8
_FIRST_PICTURE = "\U0001f000"
"""From here on several characters may be drawn as one, or not."""
ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[78DM])")
"""Sequences that take no column: control sequences, operating system commands such as links, cursor saving."""


def most_columns(text: str) -> int:
    """The most columns that terminals give a text without controls: some draw the characters of joined emoji apart.

    What has to fit a row is measured by this; `text_width`, which is never more, is how text is laid out.
    """
    return get_cwidth(text) + text.count(_EMOJI_STYLE)


def is_combining(character: str) -> bool:
    """True if a character is drawn in the columns of the one before it, which some may widen."""
    return not get_cwidth(character)


def cut_to_width(text: str, width: int, *, mark: str = "…") -> str:
    """The text, or as much of its beginning as fits into `width` columns with `mark` after it."""
    if most_columns(text) <= width:
        return text
    room = width - most_columns(mark)
    if room <= 0:
        return mark if room == 0 else ""
    return _beginning(text, room) + mark


def wrap_words(text: str, width: int, *, hanging: int = 0) -> str:
    """Wrap as `messages.wrap_words` does, measured by `most_columns`."""
    return messages.wrap_words(text, width, hanging=hanging, measure=most_columns)


def end_of_width(text: str, width: int) -> str:
    """As much of the text's end as fits into `width` columns, beginning with a character that is not combining."""
    taken, start = 0, len(text)
    for place in range(len(text) - 1, -1, -1):
        taken += most_columns(text[place])
        if taken > width:
            break
        if not is_combining(text[place]):
            start = place
    return text[start:]


def _beginning(text: str, width: int) -> str:
    taken = 0
    for place, char in enumerate(text):
        taken += most_columns(char)
        if taken > width:
            return text[:place]
    return text


class ColumnTracker:
    """The column in which text ends on a terminal of so many columns, and whether it has left its line.

    is_uncertain: the line has characters that terminals disagree about.
    """

    def __init__(self) -> None:
        self.column = 0
        self.is_uncertain = False

    def advance(self, text: str, width: int) -> tuple[str, str, bool]:
        """Follow a text; return what to print of it now, what to print with the text after it, and if a line ended.

        A terminal whose last column was just filled wraps with the next character, which it forgets when the cursor
        is moved in between; so a character in the last column waits for the one after it.
        """
        column, left_line = self.column, False
        last_place, column_before = 0, column
        place = 0
        while place < len(text):
            char = text[place]
            if char == "\x1b" and (sequence := ESCAPE_SEQUENCE.match(text, place)):
                place = sequence.end()
                continue
            if char == "\n":
                column, left_line, self.is_uncertain = 0, True, False
            elif char == "\t":
                column = min(column // TAB_STOP * TAB_STOP + TAB_STOP, width - 1)
            else:
                columns = get_cwidth(char)
                if not columns or char >= _FIRST_PICTURE:
                    self.is_uncertain = True
                if columns:
                    last_place, column_before = place, column
                    if column + columns > width:
                        self.is_uncertain = self.is_uncertain or column < width
                        column, left_line = 0, True
                        column_before = 0
                    column += columns
            place += 1
        if column < width or width < 3:
            self.column = column
            return text, "", left_line
        self.column = column_before
        return text[:last_place], text[last_place:], left_line

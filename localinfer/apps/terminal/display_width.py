"""How many columns of a terminal a text takes, and texts cut to so many."""

import re

from prompt_toolkit.utils import get_cwidth

from localinfer.apps.cli import word_wrap

TAB_STOP = 8
_EMOJI_STYLE = "\ufe0f"
"""Makes the character before it wide, on some terminals."""
_FIRST_PICTURE = "\U0001f000"
"""From here on several characters may be drawn as one, or not."""
ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[78DM])")
"""Sequences that take no column: control sequences, operating system commands such as links, cursor saving."""


def most_columns(text: str) -> int:
    """The most columns that terminals give a text without controls: some draw the characters of joined emoji apart.

    What has to fit a row is measured by this; `cell_width.text_width`, which is never more, is how text is laid out.
    """
    return get_cwidth(text) + text.count(_EMOJI_STYLE)


def is_combining(character: str) -> bool:
    """Whether a character is drawn in the columns of the one before it, which some may widen."""
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
    """As `word_wrap.wrap_words`, by `most_columns`."""
    return word_wrap.wrap_words(text, width, hanging=hanging, measure=most_columns)


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

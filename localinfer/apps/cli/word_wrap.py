"""Text in lines that a terminal need not break: broken at spaces, with a hanging indent."""

import os
import re
import unicodedata
from collections.abc import Callable
from typing import TextIO

_COMMAND = re.compile(r"`[^`]+`")
_KEPT_SPACE = "\0"
_LEAST_COLUMNS = 20


def wrap_words(text: str, width: int, *, hanging: int = 0, measure: Callable[[str], int]) -> str:
    """The text in lines of less than `width` columns, broken at spaces; a longer word is left to the terminal.

    hanging: spaces before the lines that a line becomes after its own, two where the terminal has no room for more.
    measure: the columns of a text.
    """
    hanging = hanging if hanging * 3 < width else 2
    made = []
    for line in text.split("\n"):
        column = 0
        words = line.split(" ")
        for place, word in enumerate(words):
            columns = measure(word)
            if place and column + 1 + columns < width:
                made.append(" " + word)
                column += 1 + columns
            elif place and word:
                made.append("\n" + " " * hanging + word)
                column = hanging + columns
            else:
                made.append(word)
                column += columns
        made.append("\n")
    return "".join(made[:-1])


def wrapped_for(stream: TextIO | None, message: str) -> str:
    """A message of one line, wrapped behind its first word where the stream is a terminal, as it is elsewhere.

    Commands between backticks are not broken where they fit into a line, so that they can be copied.
    """
    columns = _columns(stream)
    if columns < _LEAST_COLUMNS:
        return message
    hanging = len(message.partition(" ")[0]) + 1
    room = columns - hanging - 1

    def kept(found: re.Match[str]) -> str:
        return found[0].replace(" ", _KEPT_SPACE) if _columns_of(found[0]) < room else found[0]

    # No message has a NUL character, for which there is a picture.
    wrapped = wrap_words(_COMMAND.sub(kept, message), columns, hanging=hanging, measure=_columns_of)
    return wrapped.replace(_KEPT_SPACE, " ")


def _columns(stream: TextIO | None) -> int:
    """How wide the terminal is that a stream writes to; 0 where it is none, or does not tell."""
    try:
        if stream is None or not stream.isatty():
            return 0
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def _columns_of(text: str) -> int:
    """Columns of a text without controls, by Unicode's tables: what prompts need is not installed everywhere."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )

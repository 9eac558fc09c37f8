"""Errors and warnings on the command line: one line each, with option names, wrapped on a terminal; crash reports."""

import contextlib
import faulthandler
import logging
import os
import re
import sys
import unicodedata
import warnings
from collections.abc import Callable
from typing import TextIO

import click

from localinfer.system.crash_files import report_crashes, reports_folder, take_untold
from localinfer.terminal import neutralise_controls

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
    """Columns of the terminal that a stream writes to; 0 if it is none, or does not tell."""
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


_NAME = re.compile(r"(?<![\w./'-])[a-z]+(?:_[a-z]+)+(?![\w(/'-])")
"""A snake_case name that is not part of a path, of a metadata key or of a quoted value."""


def in_options(message: str, command: click.Command) -> str:
    """Replace argument names of the library by the options of `command`, such as context_length by --context-length.

    Names of one word are kept: they cannot be told from English.
    """
    flags = {
        parameter.name: max(parameter.opts, key=len)
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name is not None
    }
    return _NAME.sub(lambda found: flags.get(found[0], found[0]), message)


def one_line(message: str) -> str:
    """A message without line breaks and terminal controls."""
    return neutralise_controls(message).replace("\n", " ").replace("\t", " ")


def send_messages_to_stderr(command: click.Command) -> None:
    """Print each warning of the library as one line, without its source location; of a fault its traceback too."""

    def line(message: str) -> str:
        return wrapped_for(sys.stderr, f"warning: {one_line(in_options(message, command))}")

    class LineFormatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            told = line(record.getMessage())
            if record.exc_info and record.exc_info[0] is not None:
                told += f"\n{neutralise_controls(self.formatException(record.exc_info))}"
            return told

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    warnings.formatwarning = lambda message, *_, **__: f"{line(str(message))}\n"


def begin_crash_reports(command: str) -> None:
    """Report a crash of this process, with Python's stack behind it, and mention the last one's report."""
    # Standard error may be closed, or no file.
    with contextlib.suppress(RuntimeError, ValueError, OSError, AttributeError):
        faulthandler.enable()
    report_crashes()
    report = None if command == "doctor" else take_untold(reports_folder())
    if report is not None:
        where = f" {report.place}" if report.place else ""
        click.echo(
            f"note: localinfer crashed before{where}; `localinfer doctor` shows the report, which was sent nowhere",
            err=True,
        )

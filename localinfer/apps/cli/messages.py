"""Errors and warnings of the library on the command line: one line, with option names in place of argument names.

A terminal gets a long one wrapped at words.
"""

import logging
import re
import sys
import warnings

import click

from localinfer.apps.cli.word_wrap import wrapped_for
from localinfer.terminal import neutralise_controls

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

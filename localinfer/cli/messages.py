"""Errors and warnings of the library as the command line says them: one line, in the names of its options."""

import logging
import re
import sys
import warnings

import click

from localinfer.terminal import neutralise_controls

_NAME = re.compile(r"(?<![\w./'-])[a-z]+(?:_[a-z]+)+(?![\w(/'-])")
"""A name of several words that stands alone: neither part of a path or of a file's key, nor a value in quotes."""


def in_options(message: str, command: click.Command) -> str:
    """Put the options of `command` in place of the arguments that the library names.

    context_length, say, becomes --context-length. Names of one word cannot be told from English, and stay.
    """
    flags = {
        parameter.name: max(parameter.opts, key=len)
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name is not None
    }
    return _NAME.sub(lambda found: flags.get(found[0], found[0]), message)


def one_line(message: str) -> str:
    """A message without line breaks, and without what could change a terminal."""
    return neutralise_controls(message).replace("\n", " ").replace("\t", " ")


def send_messages_to_stderr(command: click.Command) -> None:
    """Show what the library warns of as one line each, without the place in our source that gave it."""

    def line(message: str) -> str:
        return f"warning: {one_line(in_options(message, command))}"

    class LineFormatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return line(record.getMessage())

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    warnings.formatwarning = lambda message, *_, **__: f"{line(str(message))}\n"

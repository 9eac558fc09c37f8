"""Errors and warnings of commands: one line each, with option names and the command to type next; crash reports."""

import contextlib
import difflib
import faulthandler
import logging
import os
import re
import shlex
import sys
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from typing import TextIO

import click

from localinfer.errors import LocalinferError, ModelFileError
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
        for index, word in enumerate(words):
            columns = measure(word)
            if index and column + 1 + columns < width:
                made.append(" " + word)
                column += 1 + columns
            elif index and word:
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


_MEANT = {
    "ask": "chat -p",
    "complete": "run",
    "completions": "completion",
    "config": "doctor",
    "convert": "quantize",
    "delete": "rm",
    "download": "pull",
    "generate": "run",
    "info": "show",
    "install": "pull",
    "ls": "list",
    "models": "list",
    "ppl": "perplexity",
    "prompt": "chat -p",
    "remove": "rm",
    "server": "serve",
    "start": "serve",
    "status": "doctor",
    "talk": "chat",
    "uninstall": "rm",
    "version": "--version",
}
"""Words that people type for what is called otherwise here."""

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_EXTRA = re.compile(r"unexpected extra arguments? \((?P<words>.*)\)", re.DOTALL)


def unknown_command(word: str, rest: Sequence[str], group: click.Group) -> str:
    """The error for a first word that is no command: what it could mean, as a command to type."""
    names = list(group.commands)
    typed = shlex.quote(word)
    if word == "help":
        known = [name for name in rest[:1] if name in names]
        return f"There is no command 'help'; type `{' '.join(['localinfer', *known, '--help'])}`."
    refused = f"There is no command {typed}"
    if _is_model(word):
        return f"{refused}, but this looks like a model; type `localinfer chat -m {typed}`."
    others = {said: meant for said, meant in _MEANT.items() if meant.startswith("-") or meant.split()[0] in names}
    meant = {**others, **{name: name for name in names}}
    near = [word.lower()] if word.lower() in meant else difflib.get_close_matches(word.lower(), meant, n=1)
    if near:
        return f"{refused}; did you mean `localinfer {meant[near[0]]}`?"
    if " " in word:
        return f"{refused}; to ask a model, type `localinfer chat -p {typed}`."
    return f"{refused}; the commands are {', '.join(sorted(names))}. Type `localinfer --help` for what they do."


def usage_error(error: click.UsageError, command: click.Command, group: click.Group) -> str:
    """The message of a command line that `command` cannot read, with the command to type next."""
    context = error.ctx
    text = error.format_message()
    path = context.command_path if context is not None else _path(command, group)
    hint = None
    if isinstance(error, click.NoSuchOption):
        hint = _owner_of(error.option_name, command, group)
    elif isinstance(error, click.MissingParameter) and context is not None:
        usage = " ".join([path, *context.command.collect_usage_pieces(context)])
        hint = f"Type `{usage.strip()}`."
    elif found := _EXTRA.search(text):
        hint = _with_option(found["words"], command, group)
    elif "`localinfer" in text:
        return with_notes(error, text)
    end = "" if text.endswith((".", "?", "?)")) else "."
    return with_notes(error, f"{text}{end} {hint or f'See `{path} --help`.'}")


def library_error(error: LocalinferError, text: str, command: click.Command, group: click.Group) -> str:
    """The message of an error of the library, with the commands that help where a model file cannot be used.

    text: the message, with options in place of arguments. Notes of the error end it.
    """
    has_model = any(parameter.name == "model" for parameter in command.params)
    if type(error) is ModelFileError and has_model and "`localinfer" not in text:
        if "pull" in group.commands:
            text += "; `localinfer list --all` shows the models on this machine, `localinfer pull ORG/REPO` brings one"
        else:
            text += f"; `{_path(command, group)} --help` says what a model can be"
    return with_notes(error, text)


def with_notes(error: Exception, text: str) -> str:
    """A message with the notes that were added to its error."""
    return "; ".join([text, *getattr(error, "__notes__", [])])


def _path(command: click.Command, group: click.Group) -> str:
    return "localinfer" if command is group else f"localinfer {command.name}"


def _owner_of(option: str, command: click.Command, group: click.Group) -> str | None:
    """A command that has an option, where the one that was typed has not."""
    owners = [name for name, one in group.commands.items() if any(option in named.opts for named in one.params)]
    if not owners:
        return None
    best = next((name for name in ("chat", "run", "serve") if name in owners), owners[0])
    what = "comes after a command" if command is group else f"is an option of {', '.join(owners)}"
    return f"{option} {what}: type `localinfer {best} {option} ...`."


def _with_option(words: str, command: click.Command, group: click.Group) -> str | None:
    """The option that a word without one was meant for."""
    if command is group or command.name is None:
        return None
    options = {name for parameter in command.params for name in parameter.opts}
    first = words.split(" ")[0]
    if "-m" in options and _is_model(first):
        return f"A model is named by -m: type `localinfer {command.name} -m {shlex.quote(first)}`."
    if "--models" in options and os.path.isdir(first):
        return f"A folder of models is named by --models: type `localinfer serve --models {shlex.quote(first)}`."
    if {"-p", "-m"} <= options:
        return f"A text is given by -p: type `localinfer {command.name} -p {shlex.quote(words)}`."
    return None


def _is_model(word: str) -> bool:
    """True if a word looks like the path or the name of a model."""
    is_folder = os.path.isfile(os.path.join(word, "config.json"))
    return word.lower().endswith(".gguf") or is_folder or _REPOSITORY.fullmatch(word) is not None

"""Suggest the command to type next, at the end of errors about command lines."""

import difflib
import os
import re
import shlex
from collections.abc import Sequence

import click

from localinfer.errors import LocalinferError, ModelFileError

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
    place = "comes after a command" if command is group else f"is an option of {', '.join(owners)}"
    return f"{option} {place}: type `localinfer {best} {option} ...`."


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

"""Options of `localinfer run` that hold the completion to a form."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from localinfer.chat.constraints import Constraint, Grammar, JsonObject, JsonSchema, Regex

_NAMES = ("json_object", "json_schema", "grammar", "regex")


def _text_of(context: click.Context, parameter: click.Parameter, value: Path | None) -> str | None:
    if value is None:
        return None
    try:
        return value.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value} cannot be read as text: {error}") from None


def constraint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets them as one argument, `constraint`."""

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        given = {name: value for name in _NAMES if (value := values.pop(name)) is not None and value is not False}
        if len(given) > 1:
            raise click.UsageError("Only one of --json, --json-schema, --grammar and --regex can hold.")
        return command(constraint=_constraint(given), **values)

    for option in reversed(_OPTIONS):
        call = option(call)
    return call


_FILE = click.Path(dir_okay=False, path_type=Path)
_OPTIONS = (
    click.option("--json", "json_object", is_flag=True, help="Complete with one JSON object."),
    click.option("--json-schema", metavar="FILE", type=_FILE, callback=_text_of, help="With JSON of this schema."),
    click.option("--grammar", metavar="FILE", type=_FILE, callback=_text_of, help="With a text of this Lark or GBNF."),
    click.option("--regex", metavar="PATTERN", help="With a text that this matches as a whole."),
)


def _constraint(given: dict[str, Any]) -> Constraint | None:
    match given:
        case {"json_object": True}:
            return JsonObject()
        case {"json_schema": text}:
            return JsonSchema(text)
        case {"grammar": text}:
            return Grammar(text)
        case {"regex": pattern}:
            return Regex(pattern)
    return None

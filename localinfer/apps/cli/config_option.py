"""The option --no-config, and how defaults of the configuration file reach a command's other options."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localinfer.apps.cli.grouped_help import Command, Decorator
from localinfer.errors import LocalinferError, RequestError

if TYPE_CHECKING:
    from localinfer.storage.config import Config

_KEY = "localinfer.storage.config"
"""Of the configuration that gives the running command its model, in click's context."""


def takes_config(*names: str) -> Decorator:
    """Let the configuration file give defaults of a command's options; of these parameters only, if any are named.

    Options of the command line win. The file is read before the other options, and not for --help.
    """

    def decorate(command: Command) -> Command:
        def read(context: click.Context, parameter: click.Parameter, is_ignored: bool) -> None:
            if not is_ignored and not context.resilient_parsing:
                _apply(context, names)

        return click.option(
            "--no-config",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=read,
            help="Ignore the configuration file.",
        )(command)

    return decorate


def is_from_config(name: str) -> bool:
    """Whether the running command has a parameter's value from the configuration file."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.DEFAULT_MAP


def _apply(context: click.Context, names: tuple[str, ...]) -> None:
    from localinfer.storage.config import read_config

    try:
        config = read_config()
    except RequestError as error:
        # The names in it are those of the file's keys, not of options.
        raise click.ClickException(str(error)) from None
    taken = names or {parameter.name for parameter in context.command.params}
    context.default_map = {name: value for name, value in config.defaults().items() if name in taken}
    if "model" in context.default_map:
        context.meta[_KEY] = config


@contextmanager
def config_model_named(context: click.Context) -> Iterator[None]:
    """Add to an error about the model that the configuration file named it; the user did not type it."""
    try:
        yield
    except (LocalinferError, click.ClickException) as error:
        config: Config | None = context.meta.get(_KEY)
        if config is not None and config.model is not None and Path(config.model).name in str(error):
            error.add_note(f"the model is set in {config.path}, and -m FILE or --no-config takes another")
        raise

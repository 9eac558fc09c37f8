"""The option --no-config, and how defaults of the configuration file reach a command's other options."""

from collections.abc import Collection
from typing import Any

import click

from localinfer.cli.options import Command, Decorator
from localinfer.errors import RequestError


def takes_config(*names: str) -> Decorator:
    """Let the configuration file give defaults of a command's options; of these parameters only, if any are named.

    Options of the command line win. The file is read before the other options, and not for --help.
    """

    def decorate(command: Command) -> Command:
        def read(context: click.Context, parameter: click.Parameter, is_ignored: bool) -> None:
            if not is_ignored and not context.resilient_parsing:
                try:
                    context.default_map = _defaults(context.command, names)
                except RequestError as error:
                    # The names in it are those of the file's keys, not of options.
                    raise click.ClickException(str(error)) from None

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


def _defaults(command: click.Command, names: Collection[str]) -> dict[str, Any]:
    from localinfer.config import read_config

    taken = names or {parameter.name for parameter in command.params}
    return {name: value for name, value in read_config().defaults().items() if name in taken}

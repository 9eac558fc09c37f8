"""Help of commands with many options: a short list by --help, and all of them in groups by --help-all."""

from collections.abc import Callable, Sequence
from typing import Any

import click

ALL_HELP = "--help-all"
_WANTS_ALL = "localinfer.apps.cli.grouped_help.wants_all"
_NAMES_SHOWN = 3
"""Of the options of a group that the short help leaves out."""

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class GroupedOption(click.Option):
    """An option that help lists under a title."""

    title = ""
    """Of its group; empty for the command's own options, which come first."""
    is_common = True
    """True if the short help lists it."""


def titled(title: str, decorator: Decorator, common: str = "") -> Decorator:
    """Options as one group of help. common: names of those that the short help lists too, separated by spaces."""
    names = set(common.split())

    def decorate(command: Command) -> Command:
        before = list(getattr(command, "__click_params__", ()))
        made = decorator(command)
        for parameter in getattr(made, "__click_params__", ()):
            is_new = all(parameter is not one for one in before)
            if is_new and isinstance(parameter, GroupedOption) and not parameter.title:
                parameter.title, parameter.is_common = title, parameter.name in names
        return made

    return decorate


class GroupedCommand(click.Command):
    """A command whose --help lists its own options and the common ones of each group; --help-all lists all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters, and the two options that ask for help."""

        def tell_all(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
            if is_wanted and not context.resilient_parsing:
                context.meta[_WANTS_ALL] = True
                click.echo(context.get_help(), color=context.color)
                context.exit()

        all_help = click.Option(
            [ALL_HELP],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=tell_all,
            help="Show all options, in groups, and exit.",
        )
        return [*super().get_params(ctx), all_help]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options: in one list and a line for each group, or all of them under the groups' titles."""
        wants_all = bool(ctx.meta.get(_WANTS_ALL))
        first: list[tuple[str, str]] = []
        groups: dict[str, list[tuple[click.Parameter, tuple[str, str]]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is None:
                continue
            title = getattr(parameter, "title", "")
            if not title or (getattr(parameter, "is_common", True) and not wants_all):
                first.append(row)
            else:
                groups.setdefault(title, []).append((parameter, row))
        with formatter.section("Options"):
            formatter.write_dl(first)
        if wants_all:
            for title, members in groups.items():
                with formatter.section(title):
                    formatter.write_dl([row for _, row in members])
        elif groups:
            with formatter.section(f"More, shown by `{ctx.command_path} {ALL_HELP}`"):
                formatter.write_dl([(title, _summary([one for one, _ in group])) for title, group in groups.items()])


def _summary(parameters: Sequence[click.Parameter]) -> str:
    names = [parameter.opts[0] for parameter in parameters]
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" * (len(names) > _NAMES_SHOWN))


def first_sentence(text: str) -> str:
    """The first sentence of a command's help, for lists of commands."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".") + "."

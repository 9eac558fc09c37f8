"""Help of commands: a short list by --help, all options in groups by --help-all, and the text of `localinfer` alone."""

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import click

from localinfer.errors import RequestError
from localinfer.terminal import neutralise_controls

ALL_HELP = "--help-all"
_WANTS_ALL = "localinfer.apps.cli.help.wants_all"
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


_EXAMPLE = "Qwen/Qwen3-4B-GGUF:Q4_K_M"
_QUESTION = 'localinfer chat -p "Why is the sky blue?"'
_FEWEST_COLUMNS = 40


def welcome(version: str, *, can_pull: bool) -> str:
    """Ten lines, each as wide as the terminal at most. can_pull: whether there is a command that brings models."""
    from localinfer.apps.cli.models import known_models

    model, settings = _configured()
    names = known_models()
    pull = f"localinfer pull {_EXAMPLE}" if can_pull else "localinfer chat -m FILE.gguf"
    if model is None:
        default = "the small demo model, which shows that everything works and knows little"
    else:
        is_missing = os.path.isabs(model) and not os.path.exists(model)
        default = f"{model}, as configured" + (", but it does not exist" if is_missing else "")
    if names:
        found = f"{len(names)} here: {', '.join(names)}"
    else:
        found = "none found yet; the command below brings one" if can_pull else "any GGUF file or Hugging Face folder"
    chosen = f"-m {shlex.quote(names[0])} " if model is None and names else ""
    last = ("localinfer serve", "an API for other programs") if model or names else (pull, "a model that knows more")
    steps = [
        (f"localinfer chat {chosen}".rstrip(), "a conversation"),
        (_QUESTION.replace("chat ", f"chat {chosen}"), "one answer"),
        last,
    ]
    width = max(len(step) for step, _ in steps)
    lines = [
        f"localinfer {version}: language models on this machine, {_machine()}",
        "",
        f"default model  {default}",
        f"models         {found}",
        f"settings       {settings}",
        "",
        "Type next (`localinfer --help` lists all commands):",
        *(f"  {step:<{width}}  {what}" for step, what in steps),
    ]
    columns = max(shutil.get_terminal_size((100, 24)).columns, _FEWEST_COLUMNS)
    return "\n".join(_cut(neutralise_controls(line), columns) for line in lines)


def _configured() -> tuple[str | None, str]:
    """The default model of the configuration file, and a description of that file."""
    from localinfer.apps.config import config_path, read_config

    path = config_path()
    if path is None:
        return None, "none, as this user has no home folder"
    try:
        config = read_config(path)
    except RequestError as error:
        return None, str(error)
    if config.path is None:
        return None, f"none; {path} may give defaults"
    names = ", ".join(config.defaults()) or "nothing yet"
    return config.model, f"{names} from {path}"


def _machine() -> str:
    from localinfer.system.machine_limits import memory_limits

    free = memory_limits().available_bytes / 1e9
    return f"{os.cpu_count() or 1} processors, {free:.1f} GB of memory free"


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: columns - 3]}..."

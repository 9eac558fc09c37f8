"""What `localinfer serve` answers by where a request says nothing, and under which name and token."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.grouped_help import Command
from localinfer.apps.cli.options import COUNT, SAMPLING_NAMES, LoadOptions, option, options_group, sampling_options
from localinfer.errors import RequestError
from localinfer.terminal import check_text

if TYPE_CHECKING:
    from localinfer.apps.server.router.model_folder import ModelSource
    from localinfer.llm import LLM

_REASONING = {"on": True, "off": False, "auto": None}


@dataclass(frozen=True, kw_only=True)
class ServerDefaults:
    """Options of generations that requests do not name, and what the server is called by.

    options: of generation, by name. thinking, thinking_budget: for models that reason. aliases: names of the model of
    -m, the first of which is its id. api_key: the token that clients must show; None for none, or for another option's.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool | None = None
    thinking_budget: int | None = None
    aliases: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)

    def apply(self, llm: "LLM", own: Mapping[str, Any]) -> None:
        """Let a model that was just loaded follow them, over what its file recommends and under what is its own.

        Closes it where it cannot. own: options that are set for this model alone. Raises: RequestError.
        """
        thinking: dict[str, Any] = {"thinking": self.thinking, "thinking_budget": self.thinking_budget}
        try:
            if not llm.can_think:
                thinking = {}
            llm.set_defaults(**{**llm.defaults, **self.options, **thinking, **own})
        except BaseException:
            llm.close()
            raise

    def named(self, sources: "Sequence[ModelSource]", preload: Sequence[str]) -> "tuple[list[ModelSource], list[str]]":
        """The models to serve, and the ids of those to load at once, where the one of -m has its aliases.

        preload: begins with the id of that model, which is the first, if there is one. Raises: RequestError.
        """
        if not self.aliases:
            return list(sources), list(preload)
        if not preload or sources[0].id != preload[0]:
            raise RequestError("--alias names the model of -m, and there is none; give one, or --models-config")
        first, *others = sources
        taken = {name for other in others for name in (other.id, *other.aliases)}
        twice = next((name for name in self.aliases if name in taken), None)
        if twice is not None:
            raise RequestError(f"--alias {twice} is the name of another model that is served; give another name")
        aliases = dict.fromkeys((*self.aliases[1:], first.id, *first.aliases))
        renamed = replace(first, id=self.aliases[0], aliases=tuple(aliases.keys() - {self.aliases[0]}))
        return [renamed, *others], [renamed.id, *preload[1:]]


def _aliases(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    if value is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in check_text(value, "--alias").split(",")))
    if not all(name.isprintable() and 0 < len(name) <= 256 for name in names):
        raise click.BadParameter(f"{value!r:.80} is not a name, or names with commas between.")
    return names


def _gather(command: Command) -> Command:
    """Pass the options below as one argument, `defaults`."""

    @functools.wraps(command)
    def call(
        *,
        options: LoadOptions,
        max_tokens: int | None,
        reasoning: str,
        reasoning_budget: int,
        alias: tuple[str, ...],
        chat_template_file: Path | None,
        api_key: str | None,
        **values: Any,
    ) -> Any:
        if chat_template_file is not None:
            if options["chat_template"] is not None:
                raise RequestError("--chat-template and --chat-template-file are one option; leave one of them out")
            options["chat_template"] = chat_template_file
        given = {name: values.pop(name) for name in SAMPLING_NAMES if name in values}
        defaults = ServerDefaults(
            options={name: value for name, value in {**given, "max_tokens": max_tokens}.items() if value is not None},
            thinking=_REASONING[reasoning],
            thinking_budget=None if reasoning_budget < 0 else reasoning_budget,
            aliases=alias,
            api_key=api_key,
        )
        return command(options=options, defaults=defaults, **values)

    return call


default_options = options_group(
    sampling_options,
    option(
        "-n --max-tokens --predict --n-predict max_tokens",
        "N",
        "Maximum length of a reply. Default: what fits; 16 for /v1/completions.",
        type=COUNT,
    ),
    option(
        "--reasoning",
        None,
        "Whether models that can reason do so; auto: as their template says.",
        type=click.Choice(list(_REASONING)),
        default="auto",
    ),
    option(
        "--reasoning-budget",
        "N",
        "Maximum tokens of reasoning; -1: no limit.",
        type=click.IntRange(min=-1),
        default=-1,
    ),
    option("--alias", "NAME", "Name of the model of -m to clients, or several with commas.", callback=_aliases),
    option("--chat-template-file", "FILE", "The same as --chat-template.", type=click.Path(path_type=Path)),
    option(
        "--api-key",
        "KEY",
        "Bearer token required over TCP. Others see it among the processes of this machine: prefer --token-file.",
    ),
    _gather,
)
"""Of a command with `load_options`, which stand above."""

"""Options of every command that samples, made of the table in `localinfer.sampling.params`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import click

from localinfer.cli.model_options import Command, options_group
from localinfer.sampling.params import NUMBER_OPTIONS, NumberOption
from localinfer.terminal import check_text

_LARGEST_SHOWN_BOUND = 10
_IN_HELP = sorted(NUMBER_OPTIONS.items(), key=lambda named: not named[1].is_common)
_RARE_NAMES = (*(name for name, option in _IN_HELP if not option.is_common), "logit_bias")


def _token_biases(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[int, float] | None:
    """Read ID=NUMBER, several times."""
    biases: dict[int, float] = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=NUMBER, such as 42=-5 or 42=-inf.") from None
    return biases or None


def _leave_out_what_is_not_given(command: Command) -> Command:
    """Hand rare options on only where they are given, so that the library's defaults hold."""

    @functools.wraps(command)
    def call(*, dry_sequence_breakers: tuple[str, ...], **values: Any) -> Any:
        for text in dry_sequence_breakers:
            check_text(text, "--dry-sequence-breaker")
        if dry_sequence_breakers:
            values["dry_sequence_breakers"] = list(dry_sequence_breakers)
        for name in _RARE_NAMES:
            if values[name] is None:
                del values[name]
        return command(**values)

    return call


def _flag(name: str, option: NumberOption) -> Callable[[Command], Command]:
    """The flag of a numeric option. Bounds that only keep arithmetic finite are left to the library's own check."""
    least, most = (bound if abs(bound) <= _LARGEST_SHOWN_BOUND else None for bound in (option.least, option.most))
    kind: click.ParamType[Any] = click.FLOAT
    if option.kind is int:
        kind = click.IntRange(None if least is None else int(least), None if most is None else int(most))
    elif least is not None:
        kind = click.FloatRange(math.floor(least), most, min_open=not float(least).is_integer())
    return click.option(
        f"--{name.replace('_', '-')}",
        type=kind,
        metavar=option.metavar,
        help=option.help.format(default=f"{option.default:g}"),
        default=option.default if option.is_common else None,
        show_default=option.is_common,
    )


sampling_options = options_group(
    *(_flag(name, option) for name, option in _IN_HELP),
    click.option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        multiple=True,
        metavar="TEXT",
        help='DRY stops here; may be repeated. Default: : * " and newline.',
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=_token_biases,
        metavar="ID=B",
        help="Add B to a token's logit; may be repeated.",
    ),
    click.option("--seed", type=click.IntRange(min=0), metavar="S", help="Same seed, same text. Default: random."),
    _leave_out_what_is_not_given,
)

"""Options of every command that samples: the usual ones with their defaults, and those that few ask for."""

import functools
from typing import Any

import click

from localinfer.cli.model_options import Command, options_group
from localinfer.terminal import check_text


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


_SHARE = click.FloatRange(min=0, max=1)
_POSITIVE = click.FloatRange(min=0)

_RARE_OPTIONS = {
    "--typical-p": (_SHARE, "P", "Sample among the most typical that sum to P; 1: off."),
    "--top-n-sigma": (_POSITIVE, "N", "Drop logits N standard deviations below the best; 0: off."),
    "--xtc-probability": (_SHARE, "P", "How often XTC drops the likeliest choices; 0: off."),
    "--xtc-threshold": (_SHARE, "P", "From which probability a token is a choice for XTC. Default: 0.1."),
    "--dynatemp-range": (_POSITIVE, "R", "Let entropy move the temperature by up to R; 0: off."),
    "--dynatemp-exponent": (_POSITIVE, "E", "How entropy moves it. Default: 1."),
    "--mirostat": (
        click.IntRange(min=0, max=2),
        "2",
        "Hold the surprise of the text, in place of the filters; 0: off.",
    ),
    "--mirostat-tau": (_POSITIVE, "BITS", "The surprise per token to hold. Default: 5."),
    "--mirostat-eta": (_SHARE, "ETA", "How fast it is corrected. Default: 0.1."),
    "--repetition-last-n": (click.IntRange(min=-1), "N", "Tokens the penalties look at; -1: all. Default: 64."),
    "--frequency-penalty": (click.FLOAT, "F", "Taken from a logit per occurrence; 0: off."),
    "--presence-penalty": (click.FLOAT, "F", "Taken from a logit that occurred; 0: off."),
    "--dry-multiplier": (_POSITIVE, "M", "Weight of DRY, which ends repetitions; 0: off."),
    "--dry-base": (click.FloatRange(min=1), "B", "How it grows with their length. Default: 1.75."),
    "--dry-allowed-length": (click.IntRange(min=1), "N", "Shorter repetitions are free. Default: 2."),
    "--dry-last-n": (click.IntRange(min=-1), "N", "Tokens DRY looks at; -1: all, the default."),
}
_RARE_NAMES = (*(flag[2:].replace("-", "_") for flag in _RARE_OPTIONS), "logit_bias")

sampling_options = options_group(
    click.option(
        "--temperature",
        metavar="T",
        type=click.FloatRange(min=0),
        default=0.8,
        show_default=True,
        help="0 always takes the likeliest token.",
    ),
    click.option(
        "--top-k",
        metavar="K",
        type=click.IntRange(min=0),
        default=40,
        show_default=True,
        help="Sample among the K likeliest; 0: off.",
    ),
    click.option(
        "--top-p",
        metavar="P",
        type=click.FloatRange(min=0, max=1),
        default=0.95,
        show_default=True,
        help="Sample among the likeliest that sum to P; 1: off.",
    ),
    click.option(
        "--min-p",
        metavar="P",
        type=click.FloatRange(min=0, max=1),
        default=0.05,
        show_default=True,
        help="Drop tokens below this share of the likeliest one; 0: off.",
    ),
    click.option(
        "--repetition-penalty",
        metavar="R",
        type=click.FloatRange(min=0, min_open=True),
        default=1.0,
        show_default=True,
        help="Above 1 discourages tokens already present; 1: off.",
    ),
    *(
        click.option(flag, type=kind, metavar=metavar, help=text)
        for flag, (kind, metavar, text) in _RARE_OPTIONS.items()
    ),
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

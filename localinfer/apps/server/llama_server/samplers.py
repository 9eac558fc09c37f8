"""The member `samplers`: which steps of sampling are taken. Their order is the engine's."""

from collections.abc import Mapping, Sequence
from typing import Any

from localinfer.apps.server.transport.http import ApiError

OFF_VALUES: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
}
"""The steps by llama-server's names, in the order in which they are taken here, each with what switches it off."""
_OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "top-k": "top_k", "top-p": "top_p"}
_LETTERS = dict(zip("edstkypmx", OFF_VALUES, strict=True))


def options_without(samplers: Sequence[str] | str | None) -> dict[str, Any]:
    """The options that switch off what is not among the samplers: names in a list, or a letter each.

    Raises: ApiError for a name that is none, and for another order than the one in which they are taken.
    """
    if samplers is None:
        return {}
    if isinstance(samplers, str):
        names = [_LETTERS.get(letter, letter) for letter in samplers]
    else:
        names = [_OTHER_NAMES.get(name, name) for name in samplers]
    order = list(OFF_VALUES)
    for name in names:
        if name not in OFF_VALUES:
            raise ApiError(400, f"samplers has {name!r:.40}; there are {', '.join(order)}", param="samplers")
    if names != [name for name in order if name in names]:
        raise ApiError(
            400,
            f"samplers has another order than {', '.join(order)}, in which they are taken here; send it in this order, "
            "or leave it out",
            code="unsupported_parameter",
            param="samplers",
        )
    return {option: value for name in order if name not in names for option, value in OFF_VALUES[name].items()}

"""Sampling that a model's file recommends: `general.sampling.*` of GGUF, to which generation_config.json is converted.

Source: the keys that llama.cpp's converter writes.
"""

import logging
from collections.abc import Mapping
from typing import Any

from localinfer.engine.sampling.params import NUMBER_OPTIONS, SamplingParams
from localinfer.errors import RequestError
from localinfer.models.decoder.metadata_keys import SAMPLING_PREFIX
from localinfer.types import is_finite_number

logger = logging.getLogger(__name__)

_OTHER_NAMES = {"temp": "temperature", "penalty_last_n": "repetition_last_n", "penalty_repeat": "repetition_penalty"}
"""Name in a file -> ours, where they differ."""
_NO_OPTIONS = ("sequence",)
"""Keys that are no option here: the order of the steps is fixed."""


def file_sampling(metadata: Mapping[str, object], *, name: str) -> dict[str, float | int]:
    """The sampling options that a file recommends, by the names of SamplingParams, in their order.

    A value that the option cannot have is left out, with a warning that names it. name: of the file, for warnings.
    """
    found: dict[str, float | int] = {}
    for key in metadata:
        if not key.startswith(SAMPLING_PREFIX):
            continue
        own = key.removeprefix(SAMPLING_PREFIX)
        own = _OTHER_NAMES.get(own, own)
        if own in _NO_OPTIONS:
            continue
        try:
            found[own] = _checked(own, metadata[key])
        except RequestError as error:
            logger.warning("%s: the sampling it recommends is ignored in one point: %s", name, error)
    return {option: found[option] for option in NUMBER_OPTIONS if option in found}


def _checked(name: str, value: object) -> float | int:
    option = NUMBER_OPTIONS.get(name)
    if option is None:
        raise RequestError(f"there is no option {name!r:.60}")
    if not is_finite_number(value):
        raise RequestError(f"{name} is {value!r:.60}; wanted a number")
    if option.kind is int:
        if value != int(value):
            raise RequestError(f"{name} is {value!r:.60}; wanted a whole number")
        # "All tokens" is -1 in some files.
        number: float | int = max(0, int(value)) if name == "top_k" else int(value)
    else:
        # Single precision in the file: 0.6 is what was meant by 0.6000000238418579.
        number = float(f"{value:.6g}")
    checked: dict[str, Any] = {name: number}
    SamplingParams(**checked)
    return number

"""Pooling of an embedding model: how the hidden states of a text become one vector."""

from collections.abc import Mapping
from enum import Enum

import numpy as np

from localinfer.errors import UnsupportedFormatError


class Pooling(Enum):
    """Which hidden states of a text make its embedding."""

    MEAN = "mean"
    FIRST = "first"
    LAST = "last"


_BY_NUMBER = {0: Pooling.MEAN, 1: Pooling.MEAN, 2: Pooling.FIRST, 3: Pooling.LAST}
"""GGUF's numbers: none, mean, cls, last. A model without pooling gets the mean."""


def read_pooling(metadata: Mapping[str, object]) -> Pooling:
    """Read the pooling from GGUF metadata. Raises: UnsupportedFormatError for an unsupported one."""
    key = f"{metadata.get('general.architecture')}.pooling_type"
    found = metadata.get(key, 0)
    if isinstance(found, int | np.integer) and int(found) in _BY_NUMBER:
        return _BY_NUMBER[int(found)]
    raise UnsupportedFormatError(
        f"{key} is {found!r:.40}; this version pools by the mean, the first or the last token. Use another model."
    )

"""Pooling of an embedding model: how the hidden states of a text become one vector, or a reranker's scores."""

from collections.abc import Mapping
from enum import Enum

import numpy as np

from localinfer.errors import UnsupportedFormatError
from localinfer.models.decoder.metadata import shown


class Pooling(Enum):
    """Which hidden states of a text make its embedding."""

    NONE = "none"
    """All of them: one vector per token."""
    MEAN = "mean"
    FIRST = "first"
    LAST = "last"
    RANK = "rank"
    """Those of one row, or their mean, through a classifier: scores in place of a vector."""


_BY_NUMBER = {0: Pooling.MEAN, 1: Pooling.MEAN, 2: Pooling.FIRST, 3: Pooling.LAST, 4: Pooling.RANK}
"""GGUF's numbers: none, mean, cls, last, rank. A model without pooling gets the mean."""


def read_pooling(metadata: Mapping[str, object]) -> Pooling:
    """Read the pooling from GGUF metadata. Raises: UnsupportedFormatError for an unsupported one."""
    key = f"{metadata.get('general.architecture')}.pooling_type"
    found = metadata.get(key, 0)
    if isinstance(found, int | np.integer) and int(found) in _BY_NUMBER:
        return _BY_NUMBER[int(found)]
    raise UnsupportedFormatError(
        f"{key} is {shown(found)}; this version pools by the mean, the first or the last token, or ranks (0 to 4). Use "
        "another model."
    )


def classified_rows(metadata: Mapping[str, object], *, is_encoder: bool) -> Pooling:
    """What a reranker's classifier reads: the mean, the first row, or of a decoder the last.

    Raises: UnsupportedFormatError for another kind.
    """
    key = f"{metadata.get('general.architecture')}.classifier.pooling_type"
    found = metadata.get(key, 0)
    found = int(found) if isinstance(found, int | np.integer) else found
    is_number = isinstance(found, int)
    if is_number and found in (0, 2):
        return Pooling.FIRST if is_encoder else Pooling.LAST
    if is_number and found == 1 and is_encoder:
        return Pooling.MEAN
    wanted = "1 (mean) or 2 (first)" if is_encoder else "none, the last token"
    raise UnsupportedFormatError(f"{key} is {shown(found)}; this version classifies by {wanted}. Use another model.")

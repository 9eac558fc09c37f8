"""Small wrappers as transformers saves them: models that see or hear around a text model, whose text is compared.

`tests/data/checkpoint/wrappers.json.xz` has config.json and the shapes of tensors by model type, `wrappers.npz` the
logits of a text for weights that follow from the tensors' names. `python -m tests.models.checkpoint.make_wrappers`
writes both.
"""

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DATA = Path(__file__).parents[2] / "data" / "checkpoint"
CASES_FILE, LOGITS_FILE = _DATA / "wrappers.json.xz", _DATA / "wrappers.npz"
ROWS = np.array([3, 12, 23])
"""Whose logits the file has."""


def read_wrappers() -> dict[str, dict[str, Any]]:
    """By model type: `config` and `shapes`."""
    found: dict[str, dict[str, Any]] = json.loads(lzma.decompress(CASES_FILE.read_bytes()))
    return found


def read_wrapper_logits() -> dict[str, NDArray[np.float32]]:
    """float32[rows, vocab_size] of ROWS by model type."""
    with np.load(LOGITS_FILE) as file:
        return dict(file)

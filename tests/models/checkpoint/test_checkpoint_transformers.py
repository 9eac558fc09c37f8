"""The stored logits of every family of folders against the transformers library, where that is installed."""

from pathlib import Path

import numpy as np
import pytest

from tests.models.checkpoint.make_published import compute
from tests.models.checkpoint.published_cases import CASES
from tests.models.checkpoint.published_models import ROWS, normalized_error, read_logits

pytest.importorskip("transformers", reason="the transformers library is not installed")
pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::Warning")
def test_stored_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    _, wanted = compute(CASES[name], tmp_path)
    # Which the folders' own are compared with by test_published_models.py.
    assert normalized_error(read_logits(name), wanted[ROWS]) <= 1e-6
    assert np.abs(wanted[ROWS] - read_logits(name)).max() <= 1e-3 * np.abs(wanted).max()

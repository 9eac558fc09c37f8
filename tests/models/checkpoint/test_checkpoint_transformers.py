"""The stored logits of every class of models against the transformers library, where that is installed."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.models.checkpoint.make_published import compute
from tests.models.checkpoint.published_cases import CASES
from tests.models.checkpoint.published_models import ROWS, normalized_error, read_logits
from tests.support.samples import one_of_each

# Looked up: importing them takes seconds.
if not all(find_spec(name) for name in ("transformers", "torch")):
    pytest.skip("transformers and torch are not installed", allow_module_level=True)


@pytest.mark.parametrize("name", one_of_each(CASES, lambda name: (CASES[name].config, CASES[name].model)))
@pytest.mark.filterwarnings("ignore::Warning")
def test_stored_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    _, wanted = compute(CASES[name], tmp_path)
    # Which the folders' own are compared with by test_published_models.py.
    assert normalized_error(read_logits(name), wanted[ROWS]) <= 1e-6
    assert np.abs(wanted[ROWS] - read_logits(name)).max() <= 1e-3 * np.abs(wanted).max()

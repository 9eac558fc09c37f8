"""Every architecture's graph, run by the NumPy oracle, against the logits of another runtime."""

from pathlib import Path

import numpy as np
import pytest

from tests.models.arch_models import architectures, build_model, normalized_error, run_logits
from tests.models.numpy_device import NumpyDevice


@pytest.mark.parametrize("name", architectures())
def test_logits_equal_those_of_the_reference_runtime(name: str, folder: Path) -> None:
    model = build_model(folder, name)
    found = run_logits(model, NumpyDevice())
    assert normalized_error(found, model.logits) <= 1e-6


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3moe-moe"])
def test_logits_do_not_depend_on_the_chunks_a_prompt_comes_in(name: str, folder: Path) -> None:
    model = build_model(folder, name)
    whole = run_logits(model, NumpyDevice())
    for chunk_rows in (1, 7):
        np.testing.assert_allclose(run_logits(model, NumpyDevice(), chunk_rows), whole, rtol=1e-5, atol=1e-6)

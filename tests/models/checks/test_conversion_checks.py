"""Rules of conversion that were forgotten or applied twice are found in the vectors of a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.quant.gguf.reader import read_gguf
from tests.models.arch_models import build_model
from tests.models.checks.broken_models import demo, edited, findings_of

ADDED: list[tuple[float, str]] = [(-1.0, "as if 1 had been taken off"), (1.0, "as if 1 had been added")]


def changed(good: Path, folder: Path, pattern: str, change: Callable[[Any], Any]) -> list[tuple[str, str]]:
    """Checks and messages of a copy whose float32 tensors with names that end so are changed."""
    with read_gguf(good) as file:
        names = [name for name in file.tensors if name.endswith(pattern)]
    assert names
    found = findings_of(edited(good, folder / "broken.gguf", changes=dict.fromkeys(names, change)))
    return [(finding.check, finding.message) for finding in found]


@pytest.mark.parametrize(("offset", "words"), ADDED)
def test_norms_off_by_one_are_found(offset: float, words: str, tmp_path: Path) -> None:
    ((check, message),) = changed(demo(), tmp_path, "_norm.weight", lambda weights: weights + np.float32(offset))
    assert check == "norm offset" and words in message


@pytest.mark.parametrize("name", ["gemma3-dense", "qwen35-hybrid", "qwen3next-hybrid", "gemma2-gqa"])
def test_norms_that_conversion_should_have_moved_are_found(name: str, tmp_path: Path) -> None:
    good = build_model(tmp_path, name).path
    assert findings_of(good) == []
    ((check, message),) = changed(good, tmp_path, "_norm.weight", lambda weights: weights - np.float32(1))
    assert check == "norm offset" and "conversion adds 1 to them and did not" in message


@pytest.mark.parametrize("name", ["qwen35-hybrid", "mamba-recurrent", "mamba2-recurrent", "bailingmoe3-hybrid"])
def test_decays_of_the_wrong_sign_are_found(name: str, tmp_path: Path) -> None:
    good = build_model(tmp_path, name).path
    assert findings_of(good) == []
    ((check, message),) = changed(good, tmp_path, ".ssm_a", lambda decays: -decays)
    assert check == "decay sign" and "states grow" in message


@pytest.mark.parametrize(("name", "pattern"), [("qwen2-gqa", "attn_q.bias"), ("gpt-oss-gqa", "attn_sinks.weight")])
def test_biases_and_sinks_out_of_proportion_are_found(name: str, pattern: str, tmp_path: Path) -> None:
    good = build_model(tmp_path, name).path
    assert findings_of(good) == []
    ((check, message),) = changed(good, tmp_path, pattern, lambda values: values * 10000)
    assert check == "bias size" and pattern in message

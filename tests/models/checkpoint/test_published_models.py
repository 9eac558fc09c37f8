"""Folders of every family against logits that its published implementation computed."""

from pathlib import Path

import pytest

from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.checks.quick import check_loaded
from localinfer.models.load.loader import read_config
from tests.kernels.cpu.device import CpuDevice
from tests.models.arch_models import ArchModel, run_logits
from tests.models.checkpoint.checkpoint_oracle import oracle_logits
from tests.models.checkpoint.published_models import (
    ROWS,
    TOKEN_IDS,
    cases_of_folders_alone,
    normalized_error,
    read_cases,
    read_logits,
    write_case,
)

CASES = read_cases()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_published_implementation(name: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path, CASES[name])
    with open_checkpoint(folder) as file:
        assert file.unknown_settings == (), "a file that its own library writes raises no alarm"
        alarms = {finding.check for finding in check_loaded(file, read_config(file), None)}
    # Some cases have an epsilon larger than any model's, so that another in its place is seen.
    assert alarms <= ({"norm epsilon"} if (CASES[name]["config"].get("rms_norm_eps") or 0.0) > 1e-3 else set())
    found = oracle_logits(folder, TOKEN_IDS)[ROWS]
    assert normalized_error(found, read_logits(name)) <= 1e-6


@pytest.mark.parametrize("name", cases_of_folders_alone())
def test_the_cpu_computes_them(name: str, tmp_path: Path) -> None:
    """A long batch, and a shorter one after it."""
    model = ArchModel(name, write_case(tmp_path, CASES[name]), TOKEN_IDS, read_logits(name))
    found = run_logits(model, CpuDevice(2), 17)[ROWS]
    assert normalized_error(found, model.logits) <= 1e-6

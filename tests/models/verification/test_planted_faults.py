"""What a load and `show --verify` say of the faults that are planted on whole models."""

from pathlib import Path

import pytest

from tests.models.verification.editable_model import EditableModel, base_model
from tests.models.verification.planted_faults import FAULTS, names, plant


def test_kinds_of_faults_are_as_many_as_are_promised() -> None:
    assert len(names()) >= 56


@pytest.mark.parametrize("name", ["demo-f16", "demo-q4_k_m", "llama"])
def test_a_model_that_is_not_changed_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    whole = base_model(name, tmp_path)
    again = EditableModel.read(EditableModel.read(whole).write(tmp_path / "again.gguf"))
    wanted = EditableModel.read(whole)
    assert again.values.keys() == wanted.values.keys()
    assert {key: one.shape for key, one in again.weights.items()} == {
        key: one.shape for key, one in wanted.weights.items()
    }
    assert all((one.blocks == wanted.weights[key].blocks).all() for key, one in again.weights.items())


@pytest.mark.parametrize("name", ["hole of zeros", "norms less one", "window of one", "one expert zero"])
def test_a_fault_changes_the_file(name: str, tmp_path: Path) -> None:
    whole = base_model(FAULTS[name][0], tmp_path).read_bytes()
    assert plant(name, tmp_path).read_bytes() != whole

"""What a load and `show --verify` say of the faults that are planted on whole models."""

from pathlib import Path

import pytest

from tests.models.checks.editable_model import EditableModel, base_model
from tests.models.checks.planted_faults import FAULTS, names, plant, said_at_load, said_by_checks, said_of_header
from tests.models.checks.planted_settings import HEADERS
from tests.models.checks.test_damage import AT_LOAD

UNSAID_AT_LOAD = {
    *("repeated blocks", "NaN in a block", "bit flips in scales", "large scales of a row", "halves swapped"),
    *("half of noise", "experts alike", "experts permuted", "transposed", "layers swapped", "layers in another order"),
    *("embeddings off by a row", "output off by a row", "random output", "few bits of embeddings"),
    *("heads permuted twice", "heads not permuted", "keys permuted", "half of the heads", "keys and values swapped"),
    *("queries and outputs swapped", "gate and up swapped", "norms all one", "norms swapped", "biases dropped"),
    *("RoPE base too large", "RoPE dimension halved", "head count doubled", "attention scale of one"),
    *("positions stretched", "window of one", "windows everywhere", "softcaps dropped", "residual scale dropped"),
    *("end of turn missing", "end missing", "beginning missing", "beginning not added"),
    *("beginning not added, story model", "byte tokens reversed", "bytes typed normal"),
}
"""What only reading every weight, or a text, tells; or nothing."""


def test_kinds_of_faults_are_as_many_as_are_promised() -> None:
    assert len(names()) >= 56


@pytest.mark.parametrize("name", ["demo-f16", "demo-q4_k_m", "llama"])
def test_a_model_that_is_not_changed_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    whole = base_model(name)
    again = EditableModel.read(EditableModel.read(whole).write(tmp_path / "again.gguf"))
    wanted = EditableModel.read(whole)
    assert again.values.keys() == wanted.values.keys()
    assert {key: one.shape for key, one in again.weights.items()} == {
        key: one.shape for key, one in wanted.weights.items()
    }
    assert all((one.blocks == wanted.weights[key].blocks).all() for key, one in again.weights.items())


@pytest.mark.parametrize("name", ["hole of zeros", "norms less one", "window of one", "one expert zero"])
def test_a_fault_changes_the_file(name: str, tmp_path: Path) -> None:
    whole = base_model(FAULTS[name][0]).read_bytes()
    assert plant(name, tmp_path).read_bytes() != whole


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in UNSAID_AT_LOAD and name not in AT_LOAD])
def test_a_fault_is_said_by_the_checks_of_a_load(name: str, tmp_path: Path) -> None:
    """`test_damage.py` has those of weights, and what is said of each."""
    assert said_by_checks(plant(name, tmp_path))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    ["hole of zeros", "beginning added", "template of another family", "merges missing", "unknown word splitting"],
)
def test_a_load_says_what_its_checks_do(name: str, tmp_path: Path) -> None:
    path = plant(name, tmp_path)
    said = said_by_checks(path)
    assert said and all(any(one in line for line in said_at_load(path)) for one in said)


@pytest.mark.parametrize("name", list(HEADERS))
def test_a_fault_of_a_header_is_said(name: str) -> None:
    whole, broken = said_of_header(name)
    assert whole == [] and len(broken) == 1


def test_as_many_kinds_are_said_at_load_as_are_promised() -> None:
    assert FAULTS.keys() >= UNSAID_AT_LOAD
    assert len(names()) - len(UNSAID_AT_LOAD) >= 50

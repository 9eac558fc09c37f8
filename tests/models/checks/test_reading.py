"""`show --verify` lets a model read, and says when it guesses."""

import math
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.apps.show.verify import Reading, _judge, check_reading, passages, verify_model
from localinfer.models.load.loader import open_model_file
from tests.models.checks.broken_models import edited
from tests.models.checks.editable_model import base_model
from tests.models.checks.planted_faults import plant
from tests.models.talking_models import build_talking_model
from tests.support.samples import by_turns

GUESSING = [
    *("norms less one", "norms plus one", "norms all one", "norms swapped"),
    *("embeddings off by a row", "output off by a row", "random output", "tokens off by one"),
    *("head count doubled", "keys permuted", "keys and values swapped", "queries and outputs swapped"),
    *("gate and up swapped", "transposed", "half of noise", "layers in another order", "window of one"),
    *("positions stretched", "byte tokens reversed"),
]


def reading_of(path: Path) -> tuple[list[str], str | None]:
    """What reading finds of a file, and why it found nothing."""
    file = open_model_file(path)
    tensors = dict(file.tensors)
    file.close()
    with localinfer.load(path, device="cpu", speculation=None, may_measure=False, verify=False) as llm:
        found, unread = check_reading(llm, tensors)
    assert all(one.check == "reading" and not one.is_error for one in found)
    return [one.message for one in found], unread


@pytest.mark.parametrize("name", by_turns(GUESSING, 0, 2))
def test_a_model_that_was_converted_wrongly_reads_badly(name: str, tmp_path: Path) -> None:
    (message,), unread = reading_of(plant(name, tmp_path))
    assert unread is None and "which it reads best, takes the model" in message
    assert "\n" not in message and "download the model again, or get another conversion" in message


def test_a_small_model_of_stories_speaks(shared: Path) -> None:
    assert reading_of(shared / "models" / "stories260K.gguf") == ([], None)


def test_a_model_that_was_never_trained_is_said_to_read_so(tmp_path: Path) -> None:
    (message,), _ = reading_of(build_talking_model(tmp_path, "llama-gqa"))
    assert "a model that was not trained reads so too" in message


def test_reading_is_part_of_verify(tmp_path: Path) -> None:
    (finding,) = verify_model(str(plant("embeddings off by a row", tmp_path))).findings
    assert finding.check == "reading"


def test_a_model_without_a_vocabulary_is_not_judged() -> None:
    assert reading_of(base_model("llama")) == ([], None)


@pytest.mark.parametrize(
    ("loss", "again", "left", "is_found"),
    [(2.5, 0.2, 0.4, False), (2.5, 2.4, 0.4, True), (2.5, 2.4, None, False), (2.5, math.nan, 0.4, False)],
)
def test_a_repeated_text_is_easier_for_a_model_of_some_size(
    loss: float, again: float, left: float | None, is_found: bool
) -> None:
    found = [one.message for one in _judge(Reading("English", 0.9, loss, again), 1.5, left)]
    assert len(found) == is_found and all("little easier for the model when it is repeated" in one for one in found)


def test_a_decoder_that_was_made_for_vectors_need_not_speak(tmp_path: Path) -> None:
    settings = {"llama.pooling_type": 3}
    path = edited(build_talking_model(tmp_path, "llama-gqa"), tmp_path / "vectors.gguf", settings=settings)
    assert verify_model(str(path)).findings == []


def test_passages_are_of_many_languages_and_long_enough() -> None:
    assert len({one.language for one in passages()}) >= 8
    assert np.min([len(one.text) for one in passages()]) > 100

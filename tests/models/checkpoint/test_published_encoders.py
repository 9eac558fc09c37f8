"""Folders of encoders against what their published implementations computed."""

from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.engine.pooling import TextPooler
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.decoder.pooling import Pooling
from localinfer.models.load.loader import read_config
from localinfer.models.verification.quick import check_loaded
from tests.inside import engine_of, model_of
from tests.models.checkpoint.published_encoders import ROWS, TOKEN_IDS, read_cases, read_result, write_case
from tests.models.checkpoint.published_models import normalized_error

CASES = read_cases()


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_scores_are_those_of_the_published_implementation(name: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path, CASES[name])
    with open_checkpoint(folder) as file:
        assert file.unknown_settings == (), "a file that its own library writes raises no alarm"
        assert check_loaded(file, read_config(file), None, None) == ()
        assert any("one type of token" in notice for notice in file.notices) == (name == "bert-ranker")
    wanted = read_result(name)
    with localinfer.load(folder, threads=1, kv_type="f32") as llm:
        if wanted.ndim == 1:
            assert llm.capabilities == ("rerank",)
            model = model_of(llm)
            assert len(model.labels) == len(wanted)
            (found,) = TextPooler(engine_of(llm), model).pool([TOKEN_IDS], Pooling.RANK)
            assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()
            return
        assert llm.capabilities == ("embeddings",)
        found = llm.embed(TOKEN_IDS, pooling="none", normalize=False)[ROWS]
    assert normalized_error(found, wanted) <= 1e-6
    cosines = (found * wanted).sum(axis=1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
    assert 1 - cosines.min() <= 1e-4

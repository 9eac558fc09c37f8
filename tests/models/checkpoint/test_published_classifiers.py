"""Folders of classifiers over decoders against the scores that their published implementations computed."""

from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.kernels.program import Batch, Segment, StateStep
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.decoder.block_config import Pooling, classified_rows, read_pooling
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.text_head import write_text_model
from localinfer.types import FloatArray
from tests.models.checkpoint.checkpoint_oracle import OracleWeights
from tests.models.checkpoint.published_classifiers import read_cases, read_scores
from tests.models.checkpoint.published_encoders import TOKEN_IDS, write_case
from tests.models.checkpoint.published_models import normalized_error
from tests.support.oracle import NumpyProgram

CASES = read_cases()


def oracle_scores(folder: Path) -> FloatArray:
    """float32[labels] of TOKEN_IDS."""
    with open_checkpoint(folder) as file:
        assert file.unknown_settings == (), "a file that its own library writes raises no alarm"
        assert any("scores texts" in notice for notice in file.notices)
        weights = OracleWeights(file)
        config = ModelConfig.from_metadata(file.metadata, weights.shapes)
        assert read_pooling(file.metadata) is Pooling.RANK
        rows = classified_rows(file.metadata, is_encoder=config.is_encoder)
        program = NumpyProgram(write_text_model(config, weights, Pooling.RANK, rows))
        count = len(TOKEN_IDS)
        segment = Segment(0, count, np.array([1], dtype=np.int64), state=StateStep(0))
        return program.run(Batch(TOKEN_IDS, [segment], np.array([count - 1], np.int32)))[0]


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_the_published_implementation(name: str, tmp_path: Path) -> None:
    found, wanted = oracle_scores(write_case(tmp_path, CASES[name])), read_scores(name)
    assert found.shape == wanted.shape
    assert normalized_error(found, wanted) <= 1e-6


def test_classifier_over_a_decoder_ranks(tmp_path: Path) -> None:
    folder = write_case(tmp_path, CASES["qwen3"])
    with localinfer.load(folder, threads=1, kv_type="f32") as llm:
        assert "rerank" in llm.capabilities

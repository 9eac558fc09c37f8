"""Folders of encoders against what their published implementations computed."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.generation.pooling import PooledText, TextPooler
from localinfer.kernels.kv_layout import KVLayout
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.checks.quick import check_loaded
from localinfer.models.decoder.block_config import Pooling
from localinfer.models.decoder.decoder import kv_layer_shapes
from localinfer.models.load.device_request import cpu_only
from localinfer.models.load.loader import Model, read_config
from localinfer.quant.gguf.writer import GGUFWriter, copy_values
from tests.models.checkpoint.published_encoders import NUM_FIRST, ROWS, TOKEN_IDS, read_cases, read_result, write_case
from tests.models.checkpoint.published_models import normalized_error
from tests.support.inside import engine_of, model_of

CASES = read_cases()
LARGEST_ERROR = 1e-9
"""What is left to the orders of sums: GELU's tanh form alone would make 1e-7 of it."""


def num_first(model: Model) -> int | None:
    """As the published implementation was asked: a pair, where there are types of tokens to tell its texts apart."""
    return NUM_FIRST if model.num_token_types > 1 else None


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_scores_are_those_of_the_published_implementation(name: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path, CASES[name])
    with open_checkpoint(folder) as file:
        assert file.unknown_settings == (), "a file that its own library writes raises no alarm"
        assert check_loaded(file, read_config(file), None) == ()
    wanted = read_result(name)
    compare(folder, wanted)


@pytest.mark.parametrize("name", ["bert-ranker", "albert-ranker", "electra", "mpnet", "deberta-v2", "gte"])
def test_files_made_of_a_folder_give_the_same(name: str, tmp_path: Path) -> None:
    folder, path = write_case(tmp_path / "folder", CASES[name]), tmp_path / "model.gguf"
    with (
        open_checkpoint(folder) as file,
        GGUFWriter(path, copy_values(file.metadata), list(file.tensors.values())) as writer,
    ):
        for tensor in file.tensors:
            writer.write(file.tensor_bytes(tensor))
    compare(path, read_result(name))


@pytest.mark.parametrize("name", ["mpnet", "deberta-v2", "gte"])
def test_biases_by_distance_keep_a_model_on_the_cpu(name: str, tmp_path: Path) -> None:
    with open_checkpoint(write_case(tmp_path, CASES[name])) as file:
        config = read_config(file)
        reason = cpu_only(config, KVLayout("f16", kv_layer_shapes(config)))
    assert (reason is not None) == (name != "gte")
    assert reason is None or "attention biases by distance" in str(reason)


def compare(path: Path, wanted: NDArray[np.float32]) -> None:
    """Hold a model's hidden states, or the scores of a pair, against the published implementation's."""
    with localinfer.load(path, threads=1, kv_type="f32") as llm:
        if wanted.ndim == 1:
            assert llm.capabilities == ("rerank",)
            model = model_of(llm)
            assert len(model.labels) == len(wanted)
            (found,) = TextPooler(engine_of(llm), model).pool(
                [PooledText(TOKEN_IDS, num_first=num_first(model))], Pooling.RANK
            )
            assert normalized_error(found, wanted) <= LARGEST_ERROR
            return
        assert llm.capabilities == ("embeddings",)
        found = llm.embed(TOKEN_IDS, pooling="none", normalize=False)[ROWS]
    assert normalized_error(found, wanted) <= LARGEST_ERROR

"""Folders of Sentence Transformers: the steps behind the model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.errors import CorruptFileError, ModelFileError, UnsupportedFormatError
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.quant.checkpoint.model_file import ModelFile
from tests.models.checkpoint import published_models
from tests.models.checkpoint.published_encoders import TOKEN_IDS, read_cases, write_case
from tests.support.checkpoint_files import safetensors_bytes, write_folder

PREFIX = "sentence_transformers.models."
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": f"{PREFIX}Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{PREFIX}Pooling"}
NORMALIZE = {"idx": 4, "name": "4", "path": "4_Normalize", "type": f"{PREFIX}Normalize"}
IDENTITY = "torch.nn.modules.linear.Identity"


def dense(index: int) -> dict[str, Any]:
    return {"idx": index, "name": str(index), "path": f"{index}_Dense", "type": f"{PREFIX}Dense"}


def write_modules(folder: Path, modules: object, pooling: object) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def write_dense(folder: Path, index: int, tensors: dict[str, Any], activation: str = IDENTITY) -> None:
    place = folder / f"{index}_Dense"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps({"activation_function": activation, "bias": False}))
    (place / "model.safetensors").write_bytes(safetensors_bytes(tensors))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_case(tmp_path, read_cases()["eurobert"])


def mode(name: str) -> dict[str, bool | int]:
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 64, **{f"pooling_mode_{one}": one == name for one in names}}


@pytest.mark.parametrize(
    ("pooling", "number", "row"),
    [
        (mode("mean_tokens"), 1, None),
        (mode("cls_token"), 2, 0),
        (mode("lasttoken"), 3, -1),
        ({"pooling_mode": "mean"}, 1, None),
    ],
)
def test_texts_are_pooled_as_the_folder_says(folder: Path, pooling: object, number: int, row: int | None) -> None:
    write_modules(folder, [TRANSFORMER, POOLING, NORMALIZE], pooling)
    with localinfer.load(folder, threads=1, kv_type="f32") as llm:
        tokens = llm.embed(TOKEN_IDS, pooling="none", normalize=False)
        wanted = tokens.mean(axis=0) if row is None else tokens[row]
        np.testing.assert_allclose(llm.embed(TOKEN_IDS, normalize=False), wanted, atol=1e-5)
    with open_checkpoint(folder) as file:
        assert file.metadata["eurobert.pooling_type"] == number


def test_matrices_after_pooling_are_read_from_their_folders(folder: Path) -> None:
    generator = np.random.default_rng(1)
    first, second = generator.standard_normal((96, 64)), generator.standard_normal((32, 96))
    write_modules(folder, [TRANSFORMER, POOLING, dense(2), dense(3), NORMALIZE], mode("mean_tokens"))
    write_dense(folder, 2, {"linear.weight": first.astype(np.float32)})
    bias = generator.standard_normal(32).astype(np.float32)
    write_dense(folder, 3, {"linear.weight": second.astype(np.float16), "linear.bias": bias})
    with localinfer.load(folder, threads=1, kv_type="f32") as llm:
        pooled = llm.embed(TOKEN_IDS, pooling="none", normalize=False).mean(axis=0)
        wanted = second.astype(np.float16).astype(np.float64) @ (first @ pooled) + bias
        np.testing.assert_allclose(llm.embed(TOKEN_IDS, normalize=False), wanted, rtol=1e-4, atol=1e-3)
    with open_checkpoint(folder) as file:
        assert {file.tensor(f"dense_{index}.weight").shape for index in (2, 3)} == {(96, 64), (32, 96)}
        assert folder / "3_Dense" / "model.safetensors" in file.paths


def test_decoders_that_embed_need_no_head_of_their_own(tmp_path: Path) -> None:
    """Published ones are saved without lm_head and without the names before it, yet say that it is not tied."""
    case = published_models.read_cases()["qwen3"]
    assert case["config"]["tie_word_embeddings"] is False
    shapes = {name.removeprefix("model."): shape for name, shape in case["shapes"].items() if "lm_head" not in name}
    folder = write_folder(tmp_path, published_models.weights(shapes), case["config"])
    with pytest.raises(CorruptFileError, match="lm_head"):
        opened(folder)
    write_modules(folder, [TRANSFORMER, POOLING, NORMALIZE], mode("lasttoken"))
    with open_checkpoint(folder) as file:
        assert any("no lm_head" in notice for notice in file.notices)
    with localinfer.load(folder, threads=1) as llm:
        last = llm.embed(TOKEN_IDS, pooling="none", normalize=False)[-1]
        np.testing.assert_array_equal(llm.embed(TOKEN_IDS, normalize=False), last)


def opened(folder: Path) -> ModelFile:
    with open_checkpoint(folder) as file:
        return file


def test_what_the_steps_cannot_be_is_named(folder: Path) -> None:
    plain = [TRANSFORMER, POOLING]
    for modules, pooling, kind, words in (
        (plain, mode("max_tokens"), UnsupportedFormatError, "pools by max_tokens"),
        (plain, mode("none"), UnsupportedFormatError, "pools by nothing"),
        (plain, {**mode("cls_token"), "pooling_mode_mean_tokens": True}, UnsupportedFormatError, "cls_token, mean_tok"),
        (plain, [], CorruptFileError, "wanted an object"),
        ({}, mode("cls_token"), CorruptFileError, "wanted a list"),
        ([3], mode("cls_token"), CorruptFileError, "wanted a list"),
        ([{"type": 3}], mode("cls_token"), CorruptFileError, "the type of a step"),
        ([{**POOLING, "path": "../1_Pooling"}], mode("cls_token"), CorruptFileError, "wanted a folder inside"),
        ([{**POOLING, "path": "other"}], mode("cls_token"), CorruptFileError, "no other/config.json"),
        (
            [{**POOLING, "type": f"{PREFIX}WordWeights"}],
            mode("cls_token"),
            UnsupportedFormatError,
            "step 'WordWeights'",
        ),
    ):
        write_modules(folder, modules, pooling)
        with pytest.raises(kind, match=words):
            opened(folder)
    (folder / "modules.json").write_text("[" * 100_000)
    with pytest.raises(CorruptFileError, match="not sound JSON"):
        opened(folder)
    (folder / "modules.json").write_text("[" + "[]," * (1 << 19) + "[]]")
    with pytest.raises(CorruptFileError, match="modules.json holds .* values; wanted at most"):
        opened(folder)


def test_what_matrices_after_pooling_cannot_be_is_named(folder: Path) -> None:
    matrix = {"linear.weight": np.zeros((32, 64), np.float32)}
    write_modules(folder, [TRANSFORMER, POOLING, dense(2)], mode("mean_tokens"))
    with pytest.raises(CorruptFileError, match="no 2_Dense/config"):
        opened(folder)
    write_dense(folder, 2, matrix, "torch.nn.modules.activation.Tanh")
    with pytest.raises(UnsupportedFormatError, match="activation_function"):
        opened(folder)
    for tensors in ({"linear.bias": np.zeros(32, np.float32)}, {"other.weight": np.zeros((2, 2), np.float32)}):
        write_dense(folder, 2, tensors)
        with pytest.raises(CorruptFileError, match=r"linear\.weight"):
            opened(folder)
    write_dense(folder, 2, {"linear.weight": np.zeros((32, 48), np.float32)})
    with pytest.raises(ModelFileError, match=r"dense_2"):
        localinfer.load(folder, threads=1)
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(UnsupportedFormatError, match=r"no model\.safetensors"):
        opened(folder)
    for index in (3, 4):
        write_dense(folder, index, matrix)
    write_dense(folder, 2, matrix)
    write_modules(folder, [TRANSFORMER, POOLING, dense(2), dense(3), dense(4)], mode("mean_tokens"))
    with pytest.raises(UnsupportedFormatError, match="more than 2 Dense"):
        opened(folder)

"""Models that see or hear around a text model: their text part runs and agrees, and what is left aside is said."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.checkpoint.families import FAMILIES, TEXT_DEFAULTS, WRAPPERS, read_text_config
from localinfer.models.checkpoint.model import open_checkpoint
from tests.models.checkpoint.checkpoint_oracle import oracle_logits
from tests.models.checkpoint.published_models import TOKEN_IDS, normalized_error, weights
from tests.models.checkpoint.wrapper_cases import ROWS, read_wrapper_logits, read_wrappers
from tests.support.checkpoint_files import LLAMA_CONFIG, llama_weights, write_folder

CASES = read_wrappers()
FLAGS = tuple(product((True, False, None), repeat=2))
"""Of a wrapper and of its text model."""
DROPPED_SCALES = {"granite_speech": "logits_scaling"}
"""transformers 5.24 drops the text model's factor of the logits, which the model that it was made of applies."""
ONLY_VECTORS = ("clip", "colpali", "colqwen2", "siglip", "siglip2")
"""Folders whose text has no logits; tests of `models/media` have their vectors."""

Weights = dict[str, NDArray[np.float32]]


def case_weights(name: str) -> Weights:
    """Those of the text model; of other parts, a number each, since nothing reads them."""
    shapes = CASES[name]["shapes"]
    text = prefix_of(shapes)
    of_text = [other for other in shapes if other.startswith(text) or "lm_head" in other]
    return weights({other: shape if other in of_text else (1,) for other, shape in shapes.items()})


def embedding_of(tensors: Mapping[str, object]) -> str:
    return next(name for name in tensors if re.search(r"(model\.embed_tokens|backbone\.embeddings)\.weight$", name))


def prefix_of(tensors: Mapping[str, object]) -> str:
    return re.sub(r"(embed_tokens|embeddings)\.weight$", "", embedding_of(tensors))


def head_of(tensors: Mapping[str, object]) -> str | None:
    return next((name for name in tensors if name.endswith("lm_head.weight")), None)


@pytest.mark.parametrize("name", CASES)
def test_text_of_a_wrapper_equals_that_of_the_published_implementation(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path, case_weights(name), CASES[name]["config"])
    with open_checkpoint(folder) as file:
        assert file.unknown_settings == ()
    said = [record.getMessage() for record in caplog.records if "of other parts" in record.getMessage()]
    shapes = CASES[name]["shapes"]
    text = prefix_of(shapes)
    others = [other for other in shapes if not other.startswith(text) and "lm_head" not in other]
    assert bool(said) == bool(others)
    parts = dict(re.findall(r"([\w.]+): (\d+)", said[0].partition("of other parts")[2])) if said else {}
    assert sum(map(int, parts.values())) == len(others), "every part is counted"
    assert all(any(other.startswith(part) for part in parts) for other in others), "and named"
    found = oracle_logits(folder, TOKEN_IDS)[ROWS]
    assert normalized_error(found, read_wrapper_logits()[name]) <= 1e-6


def layouts(tensors: Weights) -> dict[str, Weights]:
    """A wrapper's tensors as published folders, and writers between 4.52 and 5, name them."""
    prefix = prefix_of(tensors)
    head = head_of(tensors)

    def renamed(text: str, output: str, part: str) -> Weights:
        names = {}
        for name in tensors:
            if name == head:
                names[name] = output
            elif name.startswith(prefix):
                names[name] = text + re.sub(r"^(blocks|encoder\.layers)\.", "layers.", name.removeprefix(prefix))
            else:
                names[name] = part + name.removeprefix("model.")
        return {names[name]: tensors[name] for name in tensors}

    return {
        "a": renamed("language_model.model.", "language_model.lm_head.weight", ""),
        "b": renamed("model.language_model.", "lm_head.weight", "model."),
        "idefics": renamed("model.text_model.", "lm_head.weight", "model."),
        "omni": {
            **renamed("thinker.model.", "thinker.lm_head.weight", "thinker."),
            "talker.model.layers.0.mlp.up_proj.weight": np.ones((4, 4), np.float32),
            "talker.codec_head.weight": np.ones((4, 4), np.float32),
            "token2wav.dit.bias": np.ones(4, np.float32),
            "code2wav.bias": np.ones(4, np.float32),
        },
    }


@pytest.mark.parametrize("name", CASES)
def test_each_layout_of_names_is_the_same_text_model(name: str, tmp_path: Path) -> None:
    tensors = case_weights(name)
    with open_checkpoint(write_folder(tmp_path / "own", tensors, CASES[name]["config"])) as file:
        wanted = {key: file.tensor_bytes(key).tobytes() for key in file.tensors}
    number = list(CASES).index(name)
    for place, (layout, renamed) in enumerate(layouts(tensors).items()):
        # Every second layout of a wrapper, and the others of the next.
        if (place + number) % 2:
            continue
        config = CASES[name]["config"]
        if layout == "omni":
            config = {"model_type": f"{name}_omni", "thinker_config": config, "talker_config": {"model_type": "x"}}
        with open_checkpoint(write_folder(tmp_path / layout, renamed, config)) as file:
            assert {key: file.tensor_bytes(key).tobytes() for key in file.tensors} == wanted, layout


@pytest.mark.parametrize("name", CASES)
def test_what_may_change_the_text_is_never_left_aside(name: str, tmp_path: Path) -> None:
    tensors = case_weights(name)
    text = prefix_of(tensors)
    for number, other in enumerate((f"{text}layers.1.cross_attn.q_proj.weight", f"{text}gate.weight", "score.weight")):
        folder = write_folder(
            tmp_path / str(number), {**tensors, other: np.ones((4, 4), np.float32)}, CASES[name]["config"]
        )
        with pytest.raises(UnsupportedFormatError, match=re.escape(other)):
            open_checkpoint(folder)


def test_other_parts_of_a_text_model_without_sight_or_hearing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match="connector"):
        open_checkpoint(write_folder(tmp_path, {**llama_weights(), "connector.weight": np.ones((2, 2), np.float32)}))


def with_flags(config: Mapping[str, Any], outer: bool | None, inner: bool | None) -> dict[str, Any]:
    """A wrapper's config.json with these `tie_word_embeddings`, None for none."""
    text = {key: value for key, value in config["text_config"].items() if key != "tie_word_embeddings"}
    whole = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    if inner is not None:
        text["tie_word_embeddings"] = inner
    if outer is not None:
        whole["tie_word_embeddings"] = outer
    return {**whole, "text_config": text}


def is_tied(model_type: str, outer: bool | None, inner: bool | None) -> bool | None:
    """What flags say together: the wrapper's, its class's, the text model's, or nothing."""
    if outer is not None:
        return outer
    default = WRAPPERS[model_type].ties_embeddings
    return inner if default is None else (default or bool(inner))


@pytest.mark.parametrize("name", WRAPPERS)
def test_output_matrix_of_every_wrapper_is_that_of_its_flags_and_files(name: str, tmp_path: Path) -> None:
    """Its text model is a Llama's where the type is no family itself; what the flags mean, the wrapper decides."""
    text = {**LLAMA_CONFIG, "model_type": "llama"}
    plain = {"model_type": name, "text_config": text, "vision_config": {"model_type": "x"}}
    tensors = llama_weights()
    if name in FAMILIES:
        for outer, inner in FLAGS:
            config = with_flags(
                {**plain, "text_config": {**text, "model_type": WRAPPERS[name].text_type}}, outer, inner
            )
            found = read_text_config(config, FAMILIES).ties_embeddings
            assert found == is_tied(name, outer, inner), (outer, inner)
        return
    del tensors["lm_head.weight"]
    number = list(WRAPPERS).index(name)
    check_output_matrix(number, plain, tensors, "model.embed_tokens.weight", "lm_head.weight", tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_output_matrix_of_every_saved_wrapper(name: str, tmp_path: Path) -> None:
    tensors = case_weights(name)
    embedding = embedding_of(tensors)
    head = head_of(tensors) or (
        "language_model.lm_head.weight" if embedding.startswith("language_model.") else "lm_head.weight"
    )
    tensors.pop(head, None)
    check_output_matrix(list(CASES).index(name), CASES[name]["config"], tensors, embedding, head, tmp_path)


def check_output_matrix(
    number: int, config: Mapping[str, Any], tensors: Weights, embedding: str, head: str, folder: Path
) -> None:
    """Open a wrapper with all pairs of flags, the output matrix absent, equal to the embedding or different from it.

    Each pair is tried with one of the three, and with the others in the wrappers of the next numbers.
    """
    name, values = str(config["model_type"]), tensors[embedding]
    for turn, (state, matrix) in enumerate((("absent", None), ("equal", values), ("different", values[::-1]))):
        files = write_folder(folder / state, {**tensors, **({} if matrix is None else {head: matrix})}, dict(config))
        tried = [pair for index, pair in enumerate(FLAGS) if (index + index // 3 + turn + number) % 3 == 0]
        for outer, inner in tried:
            (files / "config.json").write_text(json.dumps(with_flags(config, outer, inner)))
            ties = is_tied(name, outer, inner)
            if ties is None and inner is None:
                ties = bool(FAMILIES[config["text_config"]["model_type"]].defaults.get("tie_word_embeddings")) or None
            if state == "absent" and ties is False:
                with pytest.raises(CorruptFileError, match=r"there is no lm_head\.weight"):
                    open_checkpoint(files)
                continue
            with open_checkpoint(files) as file:
                has_own = state == "different" or (state == "equal" and not ties)
                assert ("output.weight" in file.tensors) == has_own, (state, outer, inner)
                if state == "different":
                    assert file.tensor_bytes("output.weight").tobytes() == values[::-1].tobytes()
                said = [notice for notice in file.notices if "lm_head" in notice]
                assert bool(said) == (state == "different" and ties is True), (state, outer, inner)


def test_output_matrix_that_differs_in_its_last_number_is_used(tmp_path: Path) -> None:
    tensors = llama_weights()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1
    with open_checkpoint(write_folder(tmp_path, tensors, {**LLAMA_CONFIG, "tie_word_embeddings": True})) as file:
        assert "output.weight" in file.tensors


@pytest.mark.parametrize("text_type", TEXT_DEFAULTS)
def test_sizes_that_a_wrapper_leaves_out_are_those_of_the_class(text_type: str) -> None:
    """transformers says which they are."""
    transformers = pytest.importorskip("transformers")
    defaults = transformers.AutoConfig.for_model(text_type).to_dict()
    assert {key: defaults.get(key) for key in TEXT_DEFAULTS[text_type]} == TEXT_DEFAULTS[text_type]


def test_sizes_that_a_wrapper_leaves_out_are_read(tmp_path: Path) -> None:
    """As of published LLaVA 1.5 folders, whose text model is as large as its class says."""
    text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    found = read_text_config({"model_type": "llava", "text_config": text, "vision_config": {}}, FAMILIES)
    assert {**found.defaults, **found.settings}["hidden_size"] == 4096
    untyped = {key: value for key, value in text.items() if key != "model_type"}
    assert read_text_config({"model_type": "llava", "text_config": untyped}, FAMILIES).model_type == "llama"


@pytest.fixture(scope="session")
def folders(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of `../shared/vision/hf`, with their weights."""
    source = shared / "vision" / "hf"
    if not source.exists():
        pytest.skip("no folder ../shared/vision/hf")
    target = tmp_path_factory.mktemp("folders")
    subprocess.run([sys.executable, str(source / "weights.py"), str(target)], check=True, capture_output=True)
    return target


def test_text_of_every_shared_folder_agrees_or_is_refused_with_the_reason(folders: Path, shared: Path) -> None:
    answers = shared / "vision" / "hf" / "reference-1"
    names = sorted(path.name for path in folders.iterdir())
    assert len(names) == 40
    for name in names:
        if name in ONLY_VECTORS:
            continue
        with np.load(answers / f"{name}.npz") as answer:
            token_ids, rows = answer["text.input_ids"].reshape(-1), answer["text.logit_rows"]
            wanted = answer["text.logits"].reshape(len(rows), -1)
        if name in DROPPED_SCALES:
            config = json.loads((folders / name / "config.json").read_text())
            wanted = wanted / config["text_config"][DROPPED_SCALES[name]]
        found = oracle_logits(folders / name, token_ids.astype(np.int32))[rows][:, ::3]
        assert normalized_error(found, wanted) <= 1e-6, name

"""Whatever a model's file says of itself, loading it ends in a model or in a typed error, in bounded memory."""

import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.errors import LocalinferError, ModelFileError
from localinfer.loading.options import model_path
from localinfer.models.checkpoint.hyperparameters import read_hyperparameters
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.decoder.architectures import ARCHITECTURES, find_architecture
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes
from localinfer.models.decoder.metadata_keys import GENERAL_KEYS
from localinfer.models.load.loader import load_model
from localinfer.models.text.vocabulary import TOKENIZER_KEYS
from localinfer.quant.gguf.reader import read_gguf
from tests.models.arch_models import build_model, skeletons
from tests.models.checkpoint import published_encoders
from tests.models.checkpoint.family_folders import SETTINGS, family_config, write_family
from tests.models.checkpoint.published_models import read_cases, write_case
from tests.models.hostile_values import ALL, VALUES, load_in_child, metadata_keys
from tests.models.small_models import write_small_llama
from tests.support import quantized_checkpoints as packing
from tests.support.checkpoint_files import LLAMA_CONFIG, MODULES, llama_weights, write_folder

LIMITS_MEMORY = pytest.mark.skipif(sys.platform == "win32", reason="memory cannot be limited there")
MODULE = "model.layers.0.mlp.up_proj"
STEP = int(os.environ.get("HOSTILE_STEP", "7"))
"""How many changes of a folder's settings there are for each that is tried; HOSTILE_STEP=1 tries all."""


def replaced(settings: dict[str, Any], values: dict[str, Any], more: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """The settings with each value in turn in each place, inside of records and lists too."""
    for key in (*settings, *(key for key in more if key not in settings)):
        for value in values.values():
            yield {**settings, key: value}
        inner = settings.get(key)
        if isinstance(inner, dict):
            yield from ({**settings, key: changed} for changed in replaced(inner, values))
        if isinstance(inner, list) and inner:
            yield from ({**settings, key: [value, *inner[1:]]} for value in values.values())


def sampled(changes: Iterator[dict[str, Any]], first: int) -> Iterator[dict[str, Any]]:
    """One of `STEP` changes."""
    assert STEP == 1 or len(VALUES) % STEP, "every key gets other values than the one before"
    return itertools.islice(changes, first % STEP, None, STEP)


@LIMITS_MEMORY
def test_models_of_hostile_metadata_and_vocabularies_load_or_are_refused_in_little_memory(tmp_path: Path) -> None:
    """A sample; tests/models/hostile_values.py has all of it."""
    rng = random.Random(1)
    cases = []
    for name in ("deepseek2-moe", "gemma3-gqa", "llama4-moe", "bailingmoe2-groups", "bloom-dense", "gptneox-dense"):
        path = build_model(tmp_path, name).path
        every = list(itertools.product(metadata_keys(skeletons()[name]), ALL))
        cases += [(path, key, value) for key, value in rng.sample(every, 25)]
    every = list(itertools.product(sorted(TOKENIZER_KEYS | GENERAL_KEYS), ALL))
    cases += [(model_path(None), key, value) for key, value in rng.sample(every, 30)]
    counts = load_in_child(cases, timeout=200)
    assert counts["refused"] > len(cases) // 3 and counts["loaded"] > len(cases) // 6
    assert sum(counts.values()) == len(cases)


def test_configuration_of_every_architecture_is_read_or_refused() -> None:
    """A sample of the keys and values of all fixtures, without building them."""
    every = [
        (skeleton, key, value)
        for skeleton in skeletons().values()
        if skeleton["arch"] in ARCHITECTURES
        for key, value in itertools.product(metadata_keys(skeleton), ALL.values())
    ]
    num_refused = 0
    sample = random.Random(3).sample(every, 2000)
    for skeleton, key, value in sample:
        metadata = {"general.architecture": skeleton["arch"], **{name: found for name, _, _, found in skeleton["kv"]}}
        try:
            config = ModelConfig.from_metadata(
                {**metadata, key: value}, {tensor: tuple(shape) for tensor, shape in skeleton["tensors"]}
            )
            find_architecture(config)
            assert sum(shape.key_size for shape in kv_layer_shapes(config)) <= 1 << 16
        except LocalinferError:
            num_refused += 1
    assert num_refused > len(sample) // 3


@pytest.mark.parametrize(
    "extra",
    [
        {"attention.key_length": 4194304},
        {"attention.key_length": 4194304, "attention.value_length": 16},
        {"attention.head_count": 4194304, "attention.head_count_kv": 4194304},
        {"attention.head_count_kv": 4194304},
        {
            "attention.kv_lora_rank": 4194288,
            "attention.key_length_mla": 4194304,
            "attention.key_length": 4194304,
            "attention.value_length": 4194288,
            "attention.head_count_kv": 1,
            "attention.value_length_mla": 4194304,
        },
        {"block_count": 2147483648},
        {"block_count": 4096},
    ],
)
def test_sizes_that_no_tensor_has_are_refused_before_anything_is_built(extra: dict[str, Any], tmp_path: Path) -> None:
    with read_gguf(write_small_llama(tmp_path / "model.gguf")) as file:
        metadata = {**file.metadata, **{f"llama.{key}": value for key, value in extra.items()}}
        shapes = {name: info.shape for name, info in file.tensors.items()}
    with pytest.raises(ModelFileError, match="|".join(extra)):
        ModelConfig.from_metadata(metadata, shapes)


# One of every kind; those of others are read by the same functions.
_KINDS = (
    "lfm2_moe",
    "kimi_linear",
    "qwen3_next",
    "nemotron_h",
    "falcon_h1",
    "jamba",
    "mamba2",
    "mpt",
    "hunyuan_v1_moe",
)
_ENCODERS = ("xlm-roberta-ranker", "modernbert-ranker", "nomic_bert")
_CASES = read_cases() | published_encoders.read_cases()
PUBLISHED = {name: _CASES[name] for name in (*_KINDS, "llama4_text", "mistral4", "gpt_oss", *_ENCODERS)}


@pytest.mark.parametrize("name", [*SETTINGS, *PUBLISHED])
def test_settings_of_every_family_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """A part of all keys with all values, another for each family: a folder's settings first, then the few that were
    sound against its tensors."""
    config = family_config(name) if name in SETTINGS else PUBLISHED[name]["config"]
    folder = write_family(tmp_path, name) if name in SETTINGS else write_case(tmp_path, PUBLISHED[name])
    with open_checkpoint(folder) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
    more = ("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "sliding_window_pattern", "text_config")
    more += ("hidden_act", "hidden_activation", "partial_rotary_factor", "original_max_position_embeddings")
    outcomes = [0, 0, 0]
    for changed in sampled(replaced(config, VALUES, more), len(name)):
        try:
            metadata = read_hyperparameters(changed, "x").metadata
        except ModelFileError:
            outcomes[0] += 1
            continue
        try:
            find_architecture(ModelConfig.from_metadata(metadata, shapes))
            outcomes[1] += 1
        except ModelFileError:
            outcomes[2] += 1
    assert all(outcomes), outcomes


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn", "longrope", "default"])
def test_settings_of_every_rope_scaling_are_read_or_refused(kind: str) -> None:
    record: dict[str, Any] = {
        "rope_type": kind,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.2,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    nested = {"full_attention": record, "sliding_attention": {"rope_theta": 1e4}}
    config = family_config("gemma3")
    read_hyperparameters({**config, "rope_scaling": record}, "x")
    num_refused = 0
    for scaling in (*replaced(record, VALUES), *replaced(nested, VALUES)):
        try:
            hyperparameters = read_hyperparameters({**config, "rope_scaling": scaling}, "x")
        except ModelFileError:
            num_refused += 1
            continue
        assert all(np.isfinite(values).all() for values in hyperparameters.tensors.values())
    assert num_refused > 20


QUANTIZED: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "sym": True,
            "is_marlin_format": False,
            "dynamic": {"-:.*lm_head": {}, "+:.*up.*": {"group_size": 32}},
        },
        packing.gptq_tensors,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        packing.awq_tensors,
    ),
    "compressed-tensors": (
        {**packing.packed_settings(4, 32, False), "sparsity_config": {"format": "dense"}},
        lambda codes: packing.packed_tensors(codes, is_symmetric=False),
    ),
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_settings_of_every_quantization_are_read_or_refused(method: str, tmp_path: Path) -> None:
    settings, pack = QUANTIZED[method]
    tensors: dict[str, Any] = dict(llama_weights())
    del tensors[f"{MODULE}.weight"]
    tensors |= packing.in_module(
        MODULE, pack(packing.random_codes(np.random.default_rng(1), MODULES["mlp.up_proj"], group_size=32))
    )
    folder = write_folder(tmp_path, tensors, {**LLAMA_CONFIG, "quantization_config": settings})
    open_checkpoint(folder).close()
    num_refused = num_read = 0
    for changed in sampled(replaced(settings, VALUES), len(method)):
        (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, "quantization_config": changed}))
        try:
            with open_checkpoint(folder) as file:
                file.tensor_bytes("blk.0.ffn_up.weight")
            num_read += 1
        except ModelFileError:
            num_refused += 1
    assert num_refused and num_read


def test_whole_settings_of_another_kind_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, llama_weights())
    for value in (value for value in VALUES.values() if value is not None):
        (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, "quantization_config": value}))
        with pytest.raises(ModelFileError):
            load_model(folder, threads=1)

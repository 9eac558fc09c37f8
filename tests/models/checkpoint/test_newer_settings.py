"""Settings of newer decoders: older names, what files leave out, and what does not run."""

from typing import Any

import pytest

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.hyperparameters import Hyperparameters, read_hyperparameters
from tests.models.checkpoint.published_models import read_cases

CASES = read_cases()
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}


def changed(name: str, changes: dict[str, Any], without: tuple[str, ...] = ()) -> Hyperparameters:
    """What is read of a published case with other settings."""
    config = {key: value for key, value in CASES[name]["config"].items() if key not in without}
    return read_hyperparameters({**config, **changes}, "x")


def read(name: str) -> Hyperparameters:
    return changed(name, {})


def assert_same(found: Hyperparameters, wanted: Hyperparameters) -> None:
    assert found.metadata == wanted.metadata
    assert found.tensors.keys() == wanted.tensors.keys()
    assert found.unknown_settings == ()


OLDER: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "exaone": (
        {"num_layers": 4, "layer_norm_epsilon": 1e-5, "activation_function": "silu"},
        ("num_hidden_layers", "rms_norm_eps", "hidden_act"),
    ),
    "sarvam_moe": ({"num_experts": 8, "num_shared_experts": 2}, ("n_routed_experts", "n_shared_experts")),
    "sarvam_mla": (
        {
            "num_experts": 8,
            "q_head_dim": 20,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "deepseek_yarn", **YARN},
        },
        ("n_routed_experts", "rope_parameters"),
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_names_of_the_first_files_mean_the_same(name: str) -> None:
    assert_same(changed(name, *OLDER[name]), read(name))


LEFT_OUT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "cwm": ({}, ("layer_types",)),
    "granite_swa-bases": ({}, ("layer_types",)),
    "granitemoe_swa": ({}, ("layer_types",)),
    "cohere2_moe": ({"first_k_dense_replace": 1}, ("layer_types", "mlp_layer_types")),
    "cohere2_moe-softmax": ({}, ("layer_types", "mlp_layer_types")),
    "olmo_hybrid": ({}, ("layer_types",)),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_file_leaves_out_is_as_in_the_published_class(name: str) -> None:
    assert changed(name, *LEFT_OUT[name]).metadata == read(name).metadata


def test_without_a_list_of_bases_all_layers_rotate_alike() -> None:
    found = changed("granitemoe_swa-unshared", {"rope_parameters": {"rope_theta": 5e5}}, ("layer_rope_theta",)).metadata
    assert found["granite_swa.rope.freq_base"] == 5e5
    assert not {"granite_swa.rope.freq_base_swa", "granite_swa.attention.rope_pattern"} & found.keys()


def test_lfm3_alternates_windows_and_full_attention_between_convolutions() -> None:
    found = changed("lfm3", {"num_hidden_layers": 9}, ("layer_types",)).metadata
    assert found["lfm3.attention.head_count_kv"] == [0, 0, 2, 0, 2, 0, 2, 0, 2]
    assert found["lfm3.attention.sliding_window_pattern"] == [0, 0, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("rope", [{"rope_type": None}, {"rope_theta": None, "rope_type": "default"}, None])
def test_a_rotation_without_kind_or_base_is_none(rope: dict[str, Any] | None) -> None:
    assert changed("olmo_hybrid", {"rope_parameters": rope}).metadata["olmo-hybrid.rope.scaling.finetuned"] is False


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv"),
    ("iquestcoder", {"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window"),
    ("granite_swa", {"layer_rope_theta": [0, 1e4, 1e5, 1e4, 0]}, "layer_rope_theta"),
    ("granite_swa-bases", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "layer_rope_theta"),
    ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}, "shared_expert_combination_strategy"),
    ("cohere2_moe", {"expert_selection_fn": "tanh"}, "expert_selection_fn"),
    ("cohere2_moe", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types"),
    ("lfm3", {"conv_bias": True}, "conv_bias"),
    (
        "lfm3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default"},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0},
            }
        },
        "rope_type",
    ),
    ("olmo_hybrid", {"linear_num_value_heads": 8}, "linear_num_value_heads"),
    ("minimax", {"sliding_window": 16}, "sliding_window"),
    ("minicpm3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}}, "mscale_all_dim"),
    ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
]


@pytest.mark.parametrize(("name", "changes", "key"), REFUSED)
def test_what_does_not_run_is_refused_by_its_name(name: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=f"config.json: {key} is "):
        changed(name, changes)

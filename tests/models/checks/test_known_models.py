"""Published models in the list of known ones: their own settings are right, and others are found."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from localinfer.models.checks.quick import KnownModel, check_hyperparameters, known_model
from localinfer.models.decoder.block_config import ExpertConfig, RopeConfig
from localinfer.models.decoder.config import ModelConfig
from tests.models.checks.broken_models import all_known, sized_config

KNOWN = all_known()
NAMES = [f"{one.architecture}-{one.name}" for one in KNOWN]


def config_of(known: KnownModel) -> ModelConfig:
    """The configuration of a known model, as far as checks of settings read it."""
    _, config = sized_config("llama", (2, 128, 256, 400), 512)
    base, context = next(iter(known.contexts.items()), (10000.0, 4096))
    experts = ExpertConfig(num_experts=known.num_experts, num_selected=1, intermediate_size=known.intermediate_size)
    return replace(
        config,
        architecture=known.architecture,
        num_layers=known.num_layers,
        hidden_size=known.hidden_size,
        intermediate_size=(known.intermediate_size,),
        vocab_size=known.vocab_size,
        num_heads=(known.num_heads, 0),
        num_kv_heads=(known.num_kv_heads, 0),
        experts=experts if known.num_experts else None,
        context_length=context,
        rope=RopeConfig(rotary_size=64, base=base),
        norm_epsilon=known.epsilon,
    )


def checks(config: ModelConfig, *, has_output: bool = True, **metadata: Any) -> list[str]:
    file = SimpleNamespace(tensors={"output.weight": None} if has_output else {}, metadata=metadata)
    return [finding.check for finding in check_hyperparameters(file, config)]  # type: ignore[arg-type]


def test_the_list_names_each_model_once_with_its_source() -> None:
    assert len({(one.architecture, one.name) for one in KNOWN}) == len(KNOWN) > 60
    assert all(one.source.startswith("https://") for one in KNOWN)
    assert {one.architecture for one in KNOWN if one.num_experts} >= {"llama", "qwen3moe", "qwen35moe", "deepseek2"}


@pytest.mark.parametrize("known", KNOWN, ids=NAMES)
def test_a_known_model_is_recognized_and_its_own_settings_are_right(known: KnownModel) -> None:
    config = config_of(known)
    assert known_model(config) == known
    assert checks(config) == []


@pytest.mark.parametrize("known", KNOWN, ids=NAMES)
def test_other_heads_bases_epsilons_and_a_missing_matrix_are_found(known: KnownModel) -> None:
    config = config_of(known)
    half = replace(config, num_heads=(known.num_heads // 2,), num_kv_heads=(known.num_kv_heads // 2,))
    assert checks(half) == ["attention heads"]
    if known.num_kv_heads > 1:
        assert checks(replace(config, num_kv_heads=(known.num_kv_heads // 2,))) == ["attention heads"]
    assert checks(replace(config, norm_epsilon=known.epsilon * 1000)) == ["norm epsilon"]
    if known.contexts:
        assert checks(replace(config, rope=replace(config.rope, base=77.0))) == ["RoPE base"]
    assert checks(config, has_output=False) == (["output matrix"] if known.has_output else [])


def test_a_mixture_is_no_dense_model_of_its_sizes() -> None:
    (mixtral,) = (one for one in KNOWN if one.name == "Mixtral 8x7B")
    config = config_of(mixtral)
    found = known_model(replace(config, experts=None))
    assert found is not None and found.name == "Mistral 7B"
    assert known_model(replace(config, experts=ExpertConfig(num_experts=4, num_selected=2))) is None


def test_settings_that_a_user_has_replaced_are_theirs() -> None:
    (known,) = (one for one in KNOWN if one.name == "Qwen3 0.6B")
    config = replace(config_of(known), num_heads=(8,))

    class Replaced(dict[str, Any]):
        replaced_keys = frozenset({"qwen3.attention.head_count"})

    file = SimpleNamespace(tensors={}, metadata=Replaced())
    assert list(check_hyperparameters(file, config)) == []  # type: ignore[arg-type]
    assert checks(config) == ["attention heads"]


@pytest.mark.parametrize("factor", [4.0, 1.0])
def test_yarn_without_its_original_length_is_found(factor: float) -> None:
    config = config_of(next(one for one in KNOWN if one.name == "Qwen3 0.6B"))
    config = replace(config, rope=replace(config.rope, scaling="yarn", factor=factor))
    key = "qwen3.rope.scaling.original_context_length"
    assert checks(config) == (["RoPE scaling"] if factor > 1 else [])
    assert checks(config, **{key: 32768}) == []


@pytest.mark.parametrize(("architecture", "period"), [("gemma2", 2), ("gemma3", 6), ("gpt-oss", 2), ("cohere2", 4)])
def test_a_list_of_windows_that_the_family_does_not_have_is_found(architecture: str, period: int) -> None:
    _, config = sized_config("llama", (12, 128, 256, 400), 512)
    config = replace(config, architecture=architecture, sliding_window=64)
    own = tuple(layer % period < period - 1 for layer in range(12))
    assert checks(replace(config, windowed_layers=own)) == []
    for other in (own[1:] + own[:1], tuple(not one for one in own), (True,) * 12, (False,) * 12):
        assert checks(replace(config, windowed_layers=other)) == ["attention pattern"]

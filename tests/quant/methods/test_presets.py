"""Types by preset against what llama-quantize gave the same models (recorded)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from localinfer.errors import RequestError
from localinfer.quant.formats.types import TensorType
from localinfer.quant.methods.presets import PRESETS, ModelFacts, choose_types, find_preset, is_quantized

# From llama-quantize's dry run. Types are letters, one for all layers or one per layer.
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "preset_types.json").read_text())

OF_ONE_RULE = ("F16", "BF16", "MXFP4_MOE")


@dataclass(frozen=True)
class Record:
    name: str
    shape: tuple[int, ...]
    type: TensorType = TensorType.F16
    num_bytes: int = 0


def model(recorded: dict[str, Any]) -> tuple[ModelFacts, dict[str, Record]]:
    facts = ModelFacts(**recorded["facts"])
    tensors = {}
    for role, shape in recorded["shapes"].items():
        is_global = role.endswith(".weight")
        names = [role] if is_global else [f"blk.{layer}.{role}.weight" for layer in range(facts.num_layers)]
        for name in names:
            type = TensorType.F32 if "gate_inp" in name else TensorType.F16
            tensors[name] = Record(name, tuple(shape), type)
    return facts, tensors


def by_role(choices: dict[str, str]) -> dict[str, str]:
    """Letters of each role, layer after layer, as recorded."""
    letters: dict[str, str] = {}
    for name, letter in choices.items():
        role = name if not name.startswith("blk.") else name.split(".", 2)[2].removesuffix(".weight")
        letters[role] = letters.get(role, "") + letter
    return {role: text[0] if len(set(text)) == 1 else text for role, text in letters.items()}


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in OF_ONE_RULE])
@pytest.mark.parametrize("name", GOLDEN["models"])
def test_every_tensor_gets_the_type_of_llama_quantize(name: str, preset: str) -> None:
    recorded = GOLDEN["models"][name]
    facts, tensors = model(recorded)
    letters = {type: letter for letter, type in GOLDEN["letters"].items()}
    for has_importance in (False, True):
        choices = choose_types(PRESETS[preset], tensors, facts, has_importance=has_importance)
        kept = {tensor: choice.type.name for tensor, choice in choices.items() if choice.type is not TensorType.F32}
        wanted = recorded["types"][preset]
        if has_importance:
            wanted = recorded["types"].get(f"{preset}+imatrix", wanted)
        assert by_role({tensor: letters[type] for tensor, type in kept.items()}) == wanted


@pytest.mark.parametrize("preset", OF_ONE_RULE)
@pytest.mark.parametrize("name", GOLDEN["models"])
def test_types_of_presets_with_one_rule(name: str, preset: str) -> None:
    """Plain numbers everywhere; or MXFP4 for experts, and Q8_0 for what else has whole blocks."""
    facts, tensors = model(GOLDEN["models"][name])
    for tensor, choice in choose_types(PRESETS[preset], tensors, facts, has_importance=False).items():
        record = tensors[tensor]
        if "gate_inp" in tensor:
            wanted = "F32"
        elif preset != "MXFP4_MOE":
            wanted = preset
        elif record.shape[-1] % 32:
            wanted = "F16"
        else:
            wanted = "MXFP4" if "_exps" in tensor else "Q8_0"
        assert choice.type.name == wanted


def test_a_fallback_says_what_was_wanted() -> None:
    facts, tensors = model(GOLDEN["models"]["stories260K"])
    choices = choose_types(PRESETS["Q4_K_M"], tensors, facts, has_importance=False)
    narrow, odd = choices["blk.0.attn_q.weight"], choices["blk.0.ffn_down.weight"]
    assert (narrow.wanted, narrow.type, narrow.is_fallback) == (TensorType.Q4_K, TensorType.Q5_0, True)
    assert (odd.wanted, odd.type, odd.is_fallback) == (TensorType.Q4_K, TensorType.F16, True)


def test_small_tensors_stay_and_vectors_of_halves_become_f32() -> None:
    facts = ModelFacts("llama", 1, 4, 4, 0)
    records = [
        Record("blk.0.attn_norm.weight", (256,), TensorType.F16),
        Record("blk.0.attn_q.bias", (256,), TensorType.BF16),
        Record("blk.0.ffn_gate_inp.weight", (8, 256), TensorType.F16),
        Record("blk.0.attn_q.weight", (256, 256), TensorType.BF16),
    ]
    tensors = {record.name: record for record in records}
    choices = choose_types(PRESETS["Q8_0"], tensors, facts, has_importance=False)
    assert [choice.type.name for choice in choices.values()] == ["F32", "F32", "F16", "Q8_0"]
    assert [is_quantized(record) for record in records] == [False, False, False, True]


def test_facts_are_read_from_metadata() -> None:
    facts = ModelFacts.from_metadata(
        {
            "general.architecture": "llama",
            "llama.block_count": 3,
            "llama.attention.head_count": 8,
            "llama.attention.head_count_kv": [2, 2, 1],
        }
    )
    assert facts == ModelFacts("llama", 3, 8, 2, 0)
    assert facts.shares_values
    with pytest.raises(RequestError, match="no architecture"):
        ModelFacts.from_metadata({"general.architecture": "llama"})


def test_presets_are_found_in_any_case() -> None:
    assert find_preset("q4_k_m") is PRESETS["Q4_K_M"]
    with pytest.raises(RequestError, match="'q4_k'; wanted one of F16, Q4_0.*MXFP4_MOE"):
        find_preset("q4_k")

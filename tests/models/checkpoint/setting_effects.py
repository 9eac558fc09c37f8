"""Settings that many families have, set in the config.json of one model of each: which of them its class reads.

`tests/data/checkpoint/setting_effects.npz` has what transformers computes then, by
`python -m tests.models.checkpoint.make_setting_effects`.
"""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

EFFECTS = Path(__file__).parents[2] / "data" / "checkpoint" / "setting_effects.npz"

Config = dict[str, Any]

_SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def _with(**values: object) -> Callable[[Config], Config]:
    return lambda text: {**text, **values}


def _rope_with(**values: object) -> Callable[[Config], Config | None]:
    """The record of the rotation with other values, in all kinds of layers; None without such a record."""

    def change(text: Config) -> Config | None:
        record = text.get("rope_parameters")
        if not isinstance(record, dict):
            return None
        kinds = [kind for kind in record.values() if isinstance(kind, dict)] or [record]
        for kind in kinds:
            if "rope_type" in values:
                for key in kind.keys() - {"rope_theta", "partial_rotary_factor"}:
                    del kind[key]
            kind.update(values)
        return text

    return change


def _old_rope(text: Config, **scaling: object) -> Config | None:
    """As files of earlier versions have it: `rope_theta`, and `rope_scaling` with a `type`."""
    record = text.pop("rope_parameters", None)
    if not isinstance(record, dict) or any(isinstance(kind, dict) for kind in record.values()):
        return None
    text["rope_theta"] = record.get("rope_theta", 10000.0)
    if "partial_rotary_factor" in record:
        text["partial_rotary_factor"] = record["partial_rotary_factor"]
    return {**text, "rope_scaling": scaling or None}


def _other_epsilon(text: Config) -> Config | None:
    found = [key for key in _EPSILONS if key in text]
    return {**text, **dict.fromkeys(found, 1e-2)} if found else None


def _half_windowed(text: Config) -> Config:
    num_layers = text.get("num_hidden_layers", 4)
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    return {**text, "layer_types": kinds, "sliding_window": 8, "use_sliding_window": True}


CHANGES: dict[str, Callable[[Config], Config | None]] = {
    "partial_rotary_factor": _with(partial_rotary_factor=0.5),
    "rope_parameters.partial_rotary_factor": _rope_with(partial_rotary_factor=0.5),
    "rope_parameters.rope_theta": _rope_with(rope_theta=500.0),
    "rope_parameters linear": _rope_with(rope_type="linear", **_SCALED),
    "rope_parameters yarn": _rope_with(rope_type="yarn", **_SCALED),
    "rope_parameters llama3": _rope_with(**_LLAMA3),
    "rope_theta": _old_rope,
    "rope_scaling linear": lambda text: _old_rope(text, type="linear", factor=4.0),
    "rope_scaling yarn": lambda text: _old_rope(text, type="yarn", **_SCALED),
    "head_dim": lambda text: {**text, "head_dim": 16 if text.get("head_dim") == 32 else 32},
    "attention_bias": _with(attention_bias=True),
    "mlp_bias": _with(mlp_bias=True),
    "sliding_window": _with(sliding_window=8),
    "layer_types": _half_windowed,
    "tie_word_embeddings": lambda text: {**text, "tie_word_embeddings": not text.get("tie_word_embeddings", False)},
    "hidden_act": _with(hidden_act="relu"),
    "epsilon": _other_epsilon,
}
"""By name, what is changed in the settings of a text model; None where that has no meaning for it."""


@dataclass(frozen=True)
class Effect:
    """One changed setting of one model: the shapes of its tensors, and the logits of the last token.

    outcome: read, ignored (logits and shapes as without), or refused by its class. logits: float32[vocab_size], none
    if refused.
    """

    outcome: str
    shapes: dict[str, tuple[int, ...]]
    logits: NDArray[np.float32]


def changed(config: Mapping[str, Any], name: str) -> Config | None:
    """A config.json with one setting changed; None where that has no meaning."""
    copy = deepcopy(dict(config))
    is_nested = isinstance(copy.get("text_config"), dict)
    found = CHANGES[name](copy["text_config"] if is_nested else copy)
    if found is None:
        return None
    return {**copy, "text_config": found} if is_nested else found


def save_effects(effects: Mapping[str, Mapping[str, Effect]], shapes: Mapping[str, Mapping[str, Any]]) -> None:
    """Write all effects. shapes: of the models as they are, by case."""
    found = {
        case: {
            name: [effect.outcome, None if effect.shapes == shapes[case] else effect.shapes]
            for name, effect in of_case.items()
        }
        for case, of_case in effects.items()
    }
    logits = [
        effect.logits for of_case in effects.values() for effect in of_case.values() if effect.outcome != "refused"
    ]
    text = np.frombuffer(json.dumps(found).encode(), np.uint8)
    np.savez_compressed(EFFECTS, effects=text, logits=np.array(logits, np.float16))


def read_effects(shapes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Effect]]:
    """All effects, by case and setting."""
    with np.load(EFFECTS) as file:
        found, logits = json.loads(bytes(file["effects"])), iter(file["logits"].astype(np.float32))
    nothing = np.zeros(0, np.float32)
    return {
        case: {
            name: Effect(outcome, own or dict(shapes[case]), nothing if outcome == "refused" else next(logits))
            for name, (outcome, own) in of_case.items()
        }
        for case, of_case in found.items()
    }

"""Settings of config.json that may change what a model answers, and that nothing here obeys.

config.json holds whatever its writer had at hand, most of it of no consequence to a forward pass. So two lists decide:
words in a name that speak of the forward pass, and names with such a word that change nothing, with the reason.
"""

import re
from collections.abc import Mapping
from typing import Any

from localinfer.models.checkpoint.settings import Settings

_OF_THE_FORWARD_PASS = re.compile(
    "rope|rotary|nope|alibi|position|scal|multiplier|factor|alpha|mup|temperature|attn|attention|qk|sink|softcap|window"
    "|chunk|clip|clamp|norm|residual|parallel|bias|activation|hidden_act|expert|moe|router|routed|topk|layer|^use_|embed"
)
_HARMLESS: dict[str, str] = {
    r".*(dropout|pdrop|_drop)(_.*)?": "training only",
    r"(initializer|init)_.*": "training only",
    r"(output_)?router_(logits|aux_loss_coef|jitter_noise|z_loss_coef)": "training only",
    r"(add_|use_)?((mlp|attn|attention|qkv|lm_head)_)?(out_)?bias": "a bias is added where the checkpoint holds one",
    r"use_cache|use_return_dict|output_attentions|chunk_size_feed_forward": "how a program calls the model",
    r"_?(use_)?(attn_implementation|flash_attn|sdpa)(_.*)?|use_flash_.*": "which kernels compute it",
    r"temperature|num_beams|num_beam_groups": "sampling, which the caller chooses",
    r"(vision|image|audio|video|mm|projector|multimodal)_.*": "of parts that do not run",
    r".*_config": "of parts that do not run, or read elsewhere",
    r"max_window_layers|_?sliding_window_pattern": "windows are given by the list of layers, or are off",
    r"sliding_window": "of a family whose published code has no window, or has it switched off",
    r"decoder_sparse_step|mlp_only_layers|first_k_dense_replace": "layers with experts are those that hold a router",
    r"(num|n)_shared_experts": "the shared experts' tensors are one matrix of all of them",
    r"layer_norm_eps(ilon)?": "these families have RMS norms, whose epsilon has another name",
}
_HARMLESS_NAME = re.compile("|".join(f"({pattern})" for pattern in _HARMLESS))
_NEUTRAL_AT_ONE = re.compile(".*(multiplier|factor|scale|scaling|step|interval)")

_ROPE_KEYS = frozenset(
    (
        *("type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
        *("short_factor", "long_factor", "mscale", "mscale_all_dim", "full_attention", "sliding_attention"),
        # A note of the writer; and sections, whose positions are equal for text.
        *("finetuned", "mrope_section", "mrope_interleaved"),
    )
)


def unknown_settings(settings: Settings) -> list[str]:
    """Names of the settings that were not read and may change results, sorted; those of the rotation with its name."""
    found = [
        key
        for key, value in settings.unread().items()
        if _OF_THE_FORWARD_PASS.search(key) and not _HARMLESS_NAME.fullmatch(key) and not _is_neutral(key, value)
    ]
    for name in ("rope_parameters", "rope_scaling"):
        record = settings.get(name)
        if isinstance(record, dict):
            found += [f"{name}.{key}" for key in _unknown_rope_keys(record)]
    return sorted(found)


def _unknown_rope_keys(record: Mapping[str, Any]) -> list[str]:
    found = [key for key, value in record.items() if key not in _ROPE_KEYS and not _is_neutral(key, value)]
    for kind in ("full_attention", "sliding_attention"):
        inner = record.get(kind)
        if isinstance(inner, dict):
            found += [f"{kind}.{key}" for key in inner if key not in _ROPE_KEYS]
    return found


def _is_neutral(key: str, value: object) -> bool:
    """Whether a value says 'nothing of the kind': nothing, false, 0, and 1 where something is multiplied by it."""
    return not value or (type(value) in (int, float) and value == 1 and _NEUTRAL_AT_ONE.fullmatch(key) is not None)

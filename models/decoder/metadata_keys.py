"""The metadata keys that this version reads, so that others which may change results can be reported.

Keys are written without `{architecture}.`. READ_KEYS: read by config.py for every architecture. ARCHITECTURE_KEYS: read
for some architectures only.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from localinfer.models.decoder.architectures import ARCHITECTURES
from localinfer.models.text.vocabulary import TOKENIZER_KEYS
from localinfer.quant.checkpoint.model_file import ModelFile

READ_KEYS = frozenset(
    (
        "block_count context_length embedding_length feed_forward_length vocab_size nextn_predict_layers"
        " pooling_type classifier.pooling_type attn_logit_softcapping final_logit_softcapping attention.causal"
        " attention.head_count"
        " attention.head_count_kv attention.scale attention.key_length attention.key_length_mla"
        " attention.key_length_swa attention.value_length attention.value_length_mla attention.value_length_swa"
        " attention.kv_lora_rank attention.q_lora_rank attention.layer_norm_epsilon"
        " attention.layer_norm_rms_epsilon attention.sliding_window attention.sliding_window_pattern expert_count"
        " expert_used_count expert_feed_forward_length expert_gating_func expert_group_count"
        " expert_group_used_count expert_weights_norm expert_weights_scale rope.dimension_count"
        " rope.dimension_count_swa rope.dimension_sections rope.freq_base rope.freq_base_swa rope.scale_linear"
        " rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor"
        " rope.scaling.finetuned rope.scaling.yarn_ext_factor rope.scaling.yarn_beta_fast"
        " rope.scaling.yarn_beta_slow rope.scaling.yarn_log_multiplier"
    ).split()
)

_MUP = ("granite", "granitemoe", "minicpm")
ARCHITECTURE_KEYS: dict[str, tuple[str, ...]] = {
    "attention.max_alibi_bias": ("bloom", "jina-bert-v2"),
    "attention.temperature_length": ("deepseek2", "llama4"),
    "attention.temperature_scale": ("deepseek2", "llama4", "mistral3"),
    "embedding_scale": _MUP,
    "hidden_activation": ("modern-bert",),
    "logit_scale": (*_MUP, "cohere2", "command-r"),
    "residual_scale": _MUP,
    "rope.scaling.alpha": ("hunyuan-dense", "hunyuan-moe"),
    "use_parallel_residual": ("gptneox",),
}
"""Keys that some architectures read, and which."""

HARMLESS_KEYS: dict[str, str] = {
    "classifier.output_labels": "names of scores; no logit depends on them",
    "embedding_length_out": "the width of what other models read of this one",
    "expert_shared_count": "the shared experts' tensors are one matrix of all of them",
    "expert_shared_feed_forward_length": "the tensor of the shared expert has that size",
    "interleave_moe_layer_step": "layers with experts are those that hold a router",
    "leading_dense_block_count": "layers without experts are those that hold no router",
    "moe_every_n_layers": "layers with experts are those that hold a router",
    "router_logit_softcapping": "obeyed by Grok alone, and written for others by some converters",
    "tensor_data_layout": "how the rows of an original checkpoint lay before they were converted",
}
"""Keys that are not read, and why they change no result."""

_NEUTRAL = {"attention.rope_pattern": 1, "embedding_scale": 1.0, "logit_scale": 1.0, "residual_scale": 1.0}
"""Values other than 0 and false that mean "off"."""

_MOST_LISTED = 64

GENERAL_KEYS = frozenset(
    ("general.architecture", "general.name", "tokenizer.chat_template", "tokenizer.chat_template.tool_use")
)

DYNAMIC_ROPE_KEY = "checkpoint.dynamic_rope"
"""Not GGUF's: true for folders whose rotation changes with every token beyond the context they were trained for."""


def unknown_settings(file: ModelFile) -> list[str]:
    """Settings of a model's file that may change results and are not read; empty for an unsupported architecture.

    They are keys of its metadata, and for a folder names in its config.json.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        return []
    return [*getattr(file, "unknown_settings", ()), *unknown_keys(file.metadata, architecture)]


def listed(keys: Sequence[str]) -> str:
    """Untrusted keys of a file on one line, shortened and without terminal controls."""
    texts = [f"{key:.80}" if key.isprintable() else ascii(key[:80]) for key in keys[:_MOST_LISTED]]
    more = len(keys) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def unknown_keys(metadata: Mapping[str, object], architecture: str) -> list[str]:
    """The keys of a file that are not read for its architecture, sorted.

    Without those that change no result: HARMLESS_KEYS, and values such as 0 and false that mean "off".
    """
    prefix = f"{architecture}."
    found = []
    for whole_key in metadata:
        key = whole_key.removeprefix(prefix)
        if key == whole_key or key in HARMLESS_KEYS or _is_read(key, architecture):
            continue
        if not _is_neutral(key, metadata[whole_key]):
            found.append(whole_key)
    return sorted(found)


def is_understood(whole_key: str, architecture: str) -> bool:
    """Whether this key is read for a model of this architecture."""
    if whole_key in GENERAL_KEYS or whole_key in TOKENIZER_KEYS:
        return True
    key = whole_key.removeprefix(f"{architecture}.")
    return key != whole_key and _is_read(key, architecture)


def _is_read(key: str, architecture: str) -> bool:
    return key in READ_KEYS or architecture in ARCHITECTURE_KEYS.get(key, ())


def _is_neutral(key: str, value: object) -> bool:
    if isinstance(value, str):
        return value == ""
    if key in _NEUTRAL and np.array_equal(np.asarray(value), _NEUTRAL[key]):
        return True
    values = np.asarray(value)
    return values.dtype.kind in "biuf" and not values.any()

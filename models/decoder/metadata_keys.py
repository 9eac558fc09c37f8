"""The metadata keys that this version reads, so that others which may change results can be reported.

Keys are written without `{architecture}.`. READ_KEYS: read by config.py for every architecture. ARCHITECTURE_KEYS: read
for some architectures only.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from localinfer.models.decoder.architectures import ARCHITECTURES
from localinfer.models.decoder.block_config import (
    ALL_LAYERS,
    BY_INTERVAL,
    BY_KV_HEADS,
    KIMI_DELTA,
    OF_ANOTHER_CACHE,
    SHORT_CONVOLUTION,
    STATE_SPACE,
)
from localinfer.models.decoder.config import BIDIRECTIONAL
from localinfer.models.text.vocabulary import TOKENIZER_KEYS
from localinfer.quant.checkpoint.model_file import ModelFile

READ_KEYS = frozenset(
    (
        "block_count decision.block_count context_length embedding_length feed_forward_length vocab_size"
        " nextn_predict_layers pooling_type classifier.pooling_type attn_logit_softcapping final_logit_softcapping"
        " attention.causal attention.head_count"
        " attention.head_count_kv attention.scale attention.key_length attention.key_length_mla"
        " attention.key_length_swa attention.value_length attention.value_length_mla attention.value_length_swa"
        " leading_dense_block_count attention.kv_lora_rank attention.q_lora_rank attention.layer_norm_epsilon"
        " attention.layer_norm_rms_epsilon attention.latent_norm_epsilon attention.sliding_window"
        " attention.sliding_window_pattern expert_count"
        " expert_used_count expert_feed_forward_length expert_gating_func expert_group_count"
        " expert_group_used_count expert_group_score_count expert_gating_margin expert_weights_norm"
        " expert_weights_scale"
        " rope.dimension_count"
        " rope.dimension_count_swa rope.dimension_sections rope.freq_base rope.freq_base_swa rope.scale_linear"
        " rope.scaling.plain_windows n_deepstack_layers"
        " rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor"
        " rope.scaling.finetuned rope.scaling.yarn_ext_factor rope.scaling.yarn_beta_fast"
        " rope.scaling.yarn_beta_slow rope.scaling.yarn_log_multiplier"
    ).split()
)

_DELTA_NETS = tuple(name for name in BY_INTERVAL if name != "minimax-01")
_MUP = ("granite", "granite_swa", "granitehybrid", "granitemoe", "hyperclovax", "minicpm")
_LATE = ("colpali", "colqwen2")
_GEMMA = ("gemma3n", "gemma4", "gemma-embedding2", *OF_ANOTHER_CACHE)
_INDEXED = ("deepseek32", "glm-dsa", "minimax-m3")

ARCHITECTURE_KEYS: dict[str, tuple[str, ...]] = {
    "activation_sparsity_scale": ("gemma3n",),
    "altup.active_idx": ("gemma3n",),
    **{f"attention.indexer.{key}": _INDEXED for key in ("block_size", "head_count", "key_length", "local_blocks")},
    "attention.indexer.top_k": _INDEXED,
    "attention.indexer.types": _INDEXED,
    "attention.shared_kv_layers": _GEMMA,
    "embedding_length_per_layer_input": _GEMMA,
    "attention.max_relative_positions": ("deberta-v2",),
    "attention.relative_buckets_count": ("deberta-v2", "mpnet"),
    "classifier.activation": tuple(sorted(BIDIRECTIONAL)),
    "exact_gelu": (*sorted(BIDIRECTIONAL), "modern-bert-decoder"),
    "attention.clamp_kqv": ("dbrx", "mpt", "olmo"),
    "attention.full_layers_see_pictures": ("gemma4",),
    "attention.max_alibi_bias": ("bloom", "jais", "jina-bert-v2", "mpt"),
    "attention.output_scale": ("grok",),
    "attention.rope_pattern": ("granite_swa", "smollm3"),
    "attention.recurrent_layers": (*ALL_LAYERS, *BY_INTERVAL, *BY_KV_HEADS),
    "attention.temperature_length": ("deepseek2", "llama4", "mistral4"),
    "attention.temperature_scale": ("deepseek2", "llama4", "mistral3", "mistral4"),
    "attention.value_scale": ("mimo2",),
    "embedding_length_out": tuple(OF_ANOTHER_CACHE),
    "embedding_scale": (*_MUP, "grok"),
    "full_attention_interval": tuple(BY_INTERVAL),
    "hidden_activation": ("bitnet", "clip-text", "modern-bert", "modern-bert-decoder"),
    "kda.gate_lower_bound": KIMI_DELTA,
    "kda.head_dim": KIMI_DELTA,
    "kda.safe_gate": KIMI_DELTA,
    "logit_scale": (*_MUP, "cohere2", "cohere2moe", "command-r", "grok", "muse-glimmer"),
    "num_loops": ("nanbeige",),
    "num_picture_tokens": ("colpali", "gemma", "gemma2"),
    **dict.fromkeys("late_interaction picture_before picture_behind query_before query_behind".split(), _LATE),
    **dict.fromkeys(("pooled_token_id", "pools_end_token"), ("clip-text",)),
    **dict.fromkeys(("lowers_texts", "padded_length", "pads_left", "strips_punctuation"), ("siglip-text",)),
    "residual_scale": (*_MUP, "minimax-01"),
    "rope.scaling.alpha": ("hunyuan-dense", "hunyuan-moe", "hunyuan_vl"),
    "shortconv.l_cache": SHORT_CONVOLUTION,
    "ssm.beta_scale": _DELTA_NETS,
    "ssm.conv_kernel": (*_DELTA_NETS, *KIMI_DELTA, *STATE_SPACE),
    "ssm.dt_b_c_epsilon": STATE_SPACE,
    "ssm.dt_b_c_rms": ("mamba",),
    "ssm.least_time_step": ("zamba2",),
    "shared_block_count": ("zamba2",),
    "ssm.group_count": (*_DELTA_NETS, *STATE_SPACE[2:]),
    "ssm.inner_size": (*_DELTA_NETS, *STATE_SPACE),
    "ssm.length_epsilon": (*_DELTA_NETS, *KIMI_DELTA),
    "ssm.norm_before_gate": STATE_SPACE[2:],
    "ssm.state_size": (*_DELTA_NETS, *STATE_SPACE),
    "ssm.time_step_rank": (*_DELTA_NETS, *STATE_SPACE),
    "swiglu_clamp_exp": ("bailingmoe3", "maple", "step35"),
    "swiglu_clamp_shexp": ("bailingmoe3", "step35"),
    "wkv.head_size": ("rwkv7",),
    "use_parallel_residual": ("gptneox",),
}
"""Keys that some architectures read, and which."""

HARMLESS_KEYS: dict[str, str] = {
    "attention.decay_lora_rank": "the tensors have that size",
    "attention.gate_lora_rank": "the tensors have that size",
    "attention.iclr_lora_rank": "the tensors have that size",
    "attention.value_residual_mix_lora_rank": "the tensors have that size",
    "altup.num_inputs": "the streams are as many as their matrices",
    "classifier.output_labels": "names of scores; no logit depends on them",
    "embedding_length_out": "the width of what other models read of this one",
    "expert_shared_count": "the shared experts' tensors are one matrix of all of them",
    "expert_shared_feed_forward_length": "the tensor of the shared expert has that size",
    "interleave_moe_layer_step": "layers with experts are those that hold a router",
    "moe_latent_size": "the tensors of the experts have that size",
    "moe_every_n_layers": "layers with experts are those that hold a router",
    "router_logit_softcapping": "no runtime of GGUF files obeys it, and converters write it for models without one",
    "skip_loop_final_norm": "of models that run their layers several times, which are refused",
    "tensor_data_layout": "how the rows of an original checkpoint lay before they were converted",
}
"""Keys that are not read, and why they change no result."""

_NEUTRAL = {"attention.rope_pattern": 1, "embedding_scale": 1.0, "logit_scale": 1.0, "residual_scale": 1.0}
"""Values other than 0 and false that mean "off"."""

_MOST_LISTED = 64

DECISION_PREFIX = "decision."
"""Begins the keys of models made for decisions, whose head or labels `localinfer.generation` reads, or refuses."""
SAMPLING_PREFIX = "general.sampling."
"""Begins the keys by which a file recommends how to sample."""
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
    if not isinstance(architecture, str) or architecture not in {*ARCHITECTURES, *OF_ANOTHER_CACHE}:
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
    """Return whether this key is read for a model of this architecture."""
    if whole_key in GENERAL_KEYS or whole_key in TOKENIZER_KEYS or whole_key.startswith(SAMPLING_PREFIX):
        return True
    key = whole_key.removeprefix(f"{architecture}.")
    return key != whole_key and _is_read(key, architecture)


def _is_read(key: str, architecture: str) -> bool:
    return key in READ_KEYS or key.startswith(DECISION_PREFIX) or architecture in ARCHITECTURE_KEYS.get(key, ())


def _is_neutral(key: str, value: object) -> bool:
    if isinstance(value, str):
        return value == ""
    if key in _NEUTRAL and np.array_equal(np.asarray(value), _NEUTRAL[key]):
        return True
    values = np.asarray(value)
    return values.dtype.kind in "biuf" and not values.any()

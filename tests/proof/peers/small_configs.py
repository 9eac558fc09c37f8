"""Settings of tiny models of any class of transformers, and of their variants, from a class's own defaults."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

Settings = dict[str, Any]

VOCAB, LAYERS, HIDDEN, HEADS = 96, 6, 64, 4
_LONGEST = 256
_WINDOW = 16

_TEXT_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|vocab_size_per_layer_input|padded_vocab_size|num_embeddings", VOCAB),
    (r"num_hidden_layers|n_layers?|num_layers|decoder_layers|num_decoder_layers|num_blocks", LAYERS),
    (r"hidden_size|d_model|n_embd|dim|embedding_size|embedding_dim|word_embed_proj_dim", HIDDEN),
    (r"num_attention_heads|n_heads?|num_heads|decoder_attention_heads|linear_num_heads|lightning_heads", HEADS),
    (r"num_key_value_heads|num_kv_heads|swa_num_key_value_heads", 2),
    (r"num_global_key_value_heads", 1),
    (r"moe_intermediate_size|expert_ffn_hidden_size|moe_ffn_hidden_size", 32),
    (r"(shared_expert_|moe_shared_expert_|shared_|dense_)?intermediate_size|intermediate_size_mlp", 88),
    (r"ffn_hidden_size|n_inner|ffn_dim|decoder_ffn_dim|d_ff|d_inner|dim_ff", 88),
    (r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|context_length", _LONGEST),
    (r"original_max_position_embeddings", 64),
    (
        r"sliding_window|window_size|sliding_window_size|attention_chunk_size|attention_window_size|local_window",
        _WINDOW,
    ),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts", 8),
    (r"num_experts_per_tok|moe_k|moe_topk|top_k_experts|num_experts_per_token|num_selected_experts", 3),
    (r"n_group", 4),
    (r"topk_group", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 2),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"num_kv_shared_layers|decoder_start_layer", 2),
    (r"hidden_size_per_layer_input", 8),
    (r"head_dim|attention_head_dim|kv_channels|swa_head_dim|index_head_dim|linear_(key|value)_head_dim", 16),
    (r"linear_head_dim|mamba_d_head|mamba_head_dim|v_head_dim", 16),
    (r"global_head_dim", 32),
    (r"kv_lora_rank", 24),
    (r"q_lora_rank", 20),
    (r"qk_nope_head_dim", 12),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"index_n_heads", 8),
    (r"linear_num_key_heads|mamba_n_groups|n_groups", 2),
    (r"index_topk", 12),
    (r"linear_num_value_heads", 4),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_d_state|ssm_state_size|state_size|mamba_dt_rank|time_step_rank", 16),
    (r"mamba_d_ssm", 128),
    (r"chunk_size|mamba_chunk_size", 8),
)
_SIGHT_SIZES: tuple[tuple[str, int], ...] = (
    (r"num_hidden_layers|n_layers?|num_layers|depth|num_blocks|encoder_layers|decoder_layers|num_block", 1),
    (r"hidden_size|d_model|embed_dim|dim|width|hidden_dim|qformer_hidden_size|conv_hidden_size", 32),
    (r"num_attention_heads|num_heads|n_heads?|num_key_value_heads|attention_heads|encoder_attention_heads", 2),
    (r"intermediate_size|ffn_dim|mlp_dim|encoder_ffn_dim|conv_intermediate_size", 32),
    (r"out_hidden_size|projection_dim|output_dim|output_hidden_size|projector_hidden_size", HIDDEN),
    (r"vocab_size", VOCAB),
    (r"head_dim", 16),
)
_SIGHT = re.compile(r"vision|image|audio|speech|vq|qformer|perceiver|projector|encoder|sam|vit|codec|siglip|high_res")
_TOKEN = re.compile(r".*token_(id|index)s?|(bos|eos|pad|sep|image|video|audio)_?.*_id|.*_token_?id|.*_index")
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}

_GROUPS: Settings = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
_MIXED = ["sliding_attention", "sliding_attention", "full_attention"] * 2
EXCEPTIONS: dict[str, Settings] = {
    "afmoe": {"mup_enabled": True},
    "bailing_hybrid": _GROUPS,
    "bamba": {"attn_layer_indices": [2, 4]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 3, "hidden_size": HIDDEN},
    },
    "deepseek_v2": {**_GROUPS, "moe_intermediate_size": 32},
    "dots1": {**_GROUPS, "moe_intermediate_size": 32, "n_shared_experts": 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_n_heads": 8},
    "gemma3n_text": {"layer_types": _MIXED, "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"] * 2, "num_local_experts": 8},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16},
    "mistral4": {"head_dim": 20, "qk_head_dim": 20},
    "mpt": {"expansion_ratio": 2},
}
"""What a class wants beside its sizes."""


def _size(name: str, value: int, sizes: tuple[tuple[str, int], ...]) -> int | None:
    for pattern, size in sizes:
        if re.fullmatch(pattern, name):
            return min(size, value) if value > 0 else None
    return None


def small_settings(kind: type, is_sight: bool = False, parent_default: Any = None) -> Settings:
    """Return what a configuration's class is called with for a tiny model, parts of the whole included."""
    default = parent_default if parent_default is not None else kind()
    parts = getattr(kind, "sub_configs", {})
    found: Settings = {}
    specials = 90
    for name, value in vars(default).items():
        if name in parts:
            if value is not None:
                sees = is_sight or bool(_SIGHT.search(name))
                found[name] = small_settings(type(value), sees, value)
                if "model_type" in type(value).__dict__ or hasattr(type(value), "model_type"):
                    found[name]["model_type"] = value.model_type
            continue
        if isinstance(value, bool) or name.startswith("_"):
            continue
        if name in _ENDS and value is not None:
            found[name] = _ENDS[name]
        elif isinstance(value, int) and _TOKEN.fullmatch(name):
            if value >= VOCAB:
                found[name] = min(specials, VOCAB - 1)
                specials += 1
        elif isinstance(value, int):
            size = _size(name, value, _SIGHT_SIZES if is_sight else _TEXT_SIZES)
            if size is not None:
                found[name] = size
        elif name == "deepstack_visual_indexes":
            found[name] = [0]
    if is_sight:
        return found
    if "kv_lora_rank" in found:
        latent = {"num_key_value_heads": HEADS, "head_dim": found.get("qk_rope_head_dim", 8)}
        found |= {name: size for name, size in latent.items() if name in vars(default)}
    return {**found, **EXCEPTIONS.get(getattr(default, "model_type", ""), {})}


def attempts(settings: Settings, default: Any) -> Iterator[Settings]:
    """Settings to try until a class accepts them: lists by layer left to the class, cut; heads as many as keys'."""
    yield settings
    lists = {
        name: value[:LAYERS]
        for name, value in vars(default).items()
        if isinstance(value, list) and len(value) > LAYERS and not name.startswith("_")
    }
    yield {**settings, **lists}
    yield {**settings, "num_key_value_heads": HEADS}
    yield {**settings, **lists, "num_key_value_heads": HEADS, "head_dim": 16}
    if "text_config" in settings:
        rope = getattr(default.text_config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
        for sections in ([2, 3, 3], [2, 1, 1]):
            text = {**settings["text_config"], "rope_parameters": {**rope, "mrope_section": sections}}
            yield {**settings, "text_config": text}


_STILL = re.compile(
    r"use_cache|output_.*|return_dict|is_decoder|is_encoder_decoder|add_cross_attention|torchscript|tie_.*|chunk_size_.*"
    r"|.*dropout.*|.*_coef|initializer_.*|.*_std|.*jitter.*|.*pdrop|use_mamba_kernels|use_bfloat16|tf_.*|pruned_heads"
    r"|gradient_checkpointing|.*_loss.*|pretraining_tp|.*_drop|layerdrop|scale_embedding_grad|residual_in_fp32"
    r"|rescale_prenorm.*"
    r"|time_step_.*|mamba_dt_.*|transformers_version"
)
_ROPES: dict[str, Settings] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 1.1,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64},
}
_OPTIONAL: Settings = {
    "clip_qkv": 0.5,
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 5.0,
    "q_lora_rank": 20,
    "sliding_window": _WINDOW,
    "attention_multiplier": 0.2,
    "router_logit_softcapping": 2.0,
    "rotary_dim": 8,
    "num_global_key_value_heads": 1,
}
"""Settings whose default is none."""


def _ropes(parameters: Mapping[str, Any]) -> Iterator[tuple[str, Settings]]:
    if any(isinstance(value, dict) for value in parameters.values()):
        for layers, inner in parameters.items():
            if isinstance(inner, dict):
                for name, changes in _ropes(inner):
                    yield f"{name} of {layers}", {"rope_parameters": {**parameters, layers: changes["rope_parameters"]}}
        return
    bare = {
        key: parameters[key] for key in ("rope_theta", "partial_rotary_factor", "mrope_section") if key in parameters
    }
    for name, changes in _ROPES.items():
        yield f"rope {name}", {"rope_parameters": {**bare, **changes}}
    yield "rope base", {"rope_parameters": {**parameters, "rope_theta": 777.0}}
    yield "rope partial inside", {"rope_parameters": {**parameters, "partial_rotary_factor": 0.5}}


def variants(text: Any) -> Iterator[tuple[str, Settings]]:
    """Yield the variants of the configuration of a text model, each a name and its changes."""
    has = vars(text)
    yield "tied", {"tie_word_embeddings": not getattr(text, "tie_word_embeddings", False)}
    parameters = has.get("rope_parameters")
    if isinstance(parameters, dict) and parameters:
        yield from _ropes(parameters)
        yield "partial_rotary_factor", {"partial_rotary_factor": 0.5}
    for name, value in has.items():
        if _STILL.fullmatch(name) or name.startswith("_"):
            continue
        if isinstance(value, bool):
            yield f"{name}={not value}", {name: not value}
        elif isinstance(value, float):
            other = 1e-2 if "eps" in name else value * 0.6 if value else 0.3
            yield f"{name}={other:g}", {name: other}
        elif value is None and name in _OPTIONAL:
            yield f"{name}={_OPTIONAL[name]}", {name: _OPTIONAL[name]}
    for changes in (
        {"sliding_window": _WINDOW, "use_sliding_window": True},
        {"sliding_window": _WINDOW, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": None},
        {"q_lora_rank": None},
        {"head_dim": 32},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": HEADS},
        {"n_group": 1, "topk_group": 1},
        {"num_experts_per_tok": 1},
        {"hidden_act": "gelu"},
        {"hidden_act": "silu"},
        {"hidden_activation": "silu"},
        {"scoring_func": "softmax"},
        {"scoring_func": "sigmoid"},
        {"topk_method": "greedy"},
        {"topk_method": "group_limited_greedy"},
    ):
        if set(changes) <= set(has) and any(has[key] != value for key, value in changes.items()):
            yield ", ".join(f"{key}={value}" for key, value in changes.items()), dict(changes)
    for name, value in has.items():
        if (
            name in ("layer_types", "mlp_layer_types", "no_rope_layers")
            and isinstance(value, list)
            and value[::-1] != value
        ):
            yield f"{name} reversed", {name: value[::-1]}


def part_ties(config: Any) -> Iterator[tuple[str, Settings]]:
    """Yield the four agreements of a wrapper's flag of a shared output matrix with its text part's."""
    for outer in (False, True):
        for inner in (False, True):
            changes = {"tie_word_embeddings": outer, "text_config": {"tie_word_embeddings": inner}}
            yield f"tied outside {outer}, inside {inner}", changes

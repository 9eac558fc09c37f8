"""Latent attention in config.json and in GGUF: one head of keys that all heads of queries share (arXiv 2405.04434)."""

from localinfer.models.checkpoint.changes import Change, latent_keys, latent_values
from localinfer.models.checkpoint.family import Metadata, Source, usual_epsilon
from localinfer.models.checkpoint.settings import Settings

LATENT_ATTENTION: dict[str, Source] = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}


def latent_sizes(settings: Settings) -> Metadata:
    """GGUF's keys. The rotation's size is that of the part of keys that rotates, whatever `head_dim` says."""
    rank, rotary_size = settings.integer("kv_lora_rank", low=1), settings.integer("qk_rope_head_dim", low=1)
    query_rank = settings.integer("q_lora_rank", 0)
    return {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": query_rank or None,
        "attention.key_length": rank + rotary_size,
        "attention.value_length": rank,
        "attention.key_length_mla": settings.integer("qk_nope_head_dim", low=1) + rotary_size,
        "attention.value_length_mla": settings.integer("v_head_dim", low=1),
        # Published classes leave out the model's for these norms.
        "attention.latent_norm_epsilon": usual_epsilon(settings),
        "rope.dimension_count": rotary_size,
    }


def split_keys_and_values(settings: Settings) -> dict[str, Change]:
    """How the matrix of keys and values is stored: apart."""
    sizes = (
        settings.integer("num_attention_heads", low=1),
        settings.integer("qk_nope_head_dim", low=1),
        settings.integer("v_head_dim", low=1),
    )
    return {"attn_k_b": latent_keys(*sizes), "attn_v_b": latent_values(*sizes)}

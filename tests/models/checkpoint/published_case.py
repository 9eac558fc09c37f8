"""What the cases of `published_cases.py` share."""

from dataclasses import dataclass, field
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """One model. changes: settings beside those of BASE. without: settings of BASE that it does not have. computed:
    last parts of the names of tensors that follow from the settings, although they are saved."""

    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    without: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """What the configuration's class is called with."""
        return {key: value for key, value in {**BASE, **self.changes}.items() if key not in self.without}


EXP: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LIN: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "head_dim": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
DS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
SW: dict[str, Any] = {"sliding_window": 16}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + 0.1 * i for i in range(8)],
    "long_factor": [2 + 0.3 * i for i in range(8)],
}
NO_HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}

"""Every family of folders against its published implementation, where the transformers library is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.checkpoint.checkpoint_oracle import oracle_logits

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {**YARN, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + 0.1 * i for i in range(8)],
    "long_factor": [2 + 0.3 * i for i in range(8)],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "sliding_window": 16,
    "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-biases-tied": ("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama-3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {**YARN, "rope_type": "linear"}}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama-yarn-factor": ("LlamaConfig", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "mistral": ("MistralConfig", {"sliding_window": 16, "head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 20}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 20, "num_hidden_layers": 7},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 16}),
    "phi3-longrope": ("Phi3Config", {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "granite": ("GraniteConfig", GRANITE),
    "olmo2": ("Olmo2Config", {}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "smollm3": ("SmolLM3Config", {}),
    "gpt_oss": ("GptOssConfig", GPT_OSS),
    "seed_oss": ("SeedOssConfig", {"head_dim": 32}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::Warning")
def test_logits_equal_those_of_the_published_implementation(name: str, tmp_path: Path) -> None:
    config_name, changes = CASES[name]
    config = getattr(transformers, config_name)(**{**BASE, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    token_ids = np.random.default_rng(0).integers(3, 100, 40).astype(np.int32)
    with torch.no_grad():
        for parameter_name, values in model.named_parameters():
            scale = 0.2 if values.ndim == 1 else 1.2 / values.shape[-1] ** 0.5
            center = 1.0 if "norm" in parameter_name and "gemma" not in name else 0.0
            values.copy_(torch.randn_like(values) * scale + center)
        wanted = model(torch.tensor(token_ids.astype(np.int64))[None]).logits[0].numpy()
    model.save_pretrained(tmp_path)
    found = oracle_logits(tmp_path, token_ids)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()

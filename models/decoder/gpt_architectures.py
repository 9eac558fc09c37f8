"""Dense decoders with layer norms, most without a gate: GPT's form."""

from collections.abc import Callable
from dataclasses import replace

from localinfer.kernels.ops import Activation
from localinfer.models.decoder.architecture import Architecture, Norm, QueryKeyNorm
from localinfer.models.decoder.base_architectures import COHERE, GELU_MLP, LLAMA, named_windows
from localinfer.models.decoder.config import ModelConfig

_NEMOTRON = Architecture(norm=Norm.LAYER, activation=Activation.RELU_SQUARED, gated=False)


def _gpt2(config: ModelConfig) -> Architecture:
    """GPT-2: learned positions, no RoPE."""
    return replace(GELU_MLP, learned_positions=True, has_rope=(False,) * config.num_layers)


def _falcon(config: ModelConfig) -> Architecture:
    """Falcon (arXiv 2311.16867): branches in parallel; the 40B has a second norm, for attention."""
    attention_norm = "attn_norm_2" if "attn_norm_2.weight" in config.block_tensors else "attn_norm"
    return replace(GELU_MLP, attention_norm=attention_norm, feed_forward_norm="attn_norm", parallel=True)


def _stablelm(config: ModelConfig) -> Architecture:
    """StableLM 1 and 2 (arXiv 2402.17834): layer norms; the 12B runs its branches in parallel on one norm."""
    is_parallel = "ffn_norm.weight" not in config.block_tensors
    return Architecture(
        norm=Norm.LAYER,
        feed_forward_norm="attn_norm" if is_parallel else "ffn_norm",
        parallel=is_parallel,
        query_key_norm=QueryKeyNorm.OPTIONAL,
    )


GPT_KIN: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    # BLOOM (arXiv 2211.05100): ALiBi, and a norm on the embeddings.
    "bloom": lambda config: replace(
        GELU_MLP,
        embedding_norm="token_embd_norm",
        max_alibi_bias=config.max_alibi_bias or 8.0,
        has_rope=(False,) * config.num_layers,
    ),
    # CodeShell 7B.
    "codeshell": GELU_MLP,
    # Command R; the larger one norms each head of its queries and keys.
    "command-r": lambda config: replace(
        COHERE, query_key_norm=QueryKeyNorm.OPTIONAL, logit_scale=config.logit_scale or 1.0
    ),
    "falcon": _falcon,
    "gpt2": _gpt2,
    # GPT-NeoX (arXiv 2204.06745) and Pythia: branches in parallel, each with its own norm.
    "gptneox": lambda config: replace(GELU_MLP, parallel=config.parallel_residual is not False),
    # Jais (arXiv 2308.16149): ALiBi, a SiLU gate, scores divided by the head size itself.
    "jais": lambda config: Architecture(
        norm=Norm.LAYER,
        attention_scale=1.0 / config.head_dim,
        max_alibi_bias=config.max_alibi_bias,
        has_rope=(False,) * config.num_layers,
    ),
    # Jais 2: Nemotron's block.
    "jais2": _NEMOTRON,
    # MPT: ALiBi, optional norms and a limit of queries, keys and values.
    "mpt": lambda config: replace(
        GELU_MLP,
        learned_positions=config.has_learned_positions,
        query_key_norm=QueryKeyNorm.OPTIONAL,
        projection_clamp=config.projection_clamp,
        max_alibi_bias=config.max_alibi_bias,
        has_rope=(False,) * config.num_layers,
    ),
    # Nemotron and Minitron (arXiv 2402.16819): squared ReLU; GGUF stores the norm weights as 1 + w.
    "nemotron": _NEMOTRON,
    # OLMo 1 (arXiv 2402.00838): norms without weights, a limit of queries, keys and values.
    "olmo": lambda config: replace(
        LLAMA, norm=Norm.LAYER, weighted_norms=False, projection_clamp=config.projection_clamp
    ),
    # Orion 14B (arXiv 2401.12246): layer norms with biases, a SiLU gate.
    "orion": Architecture(norm=Norm.LAYER),
    # Phi 1.5 and 2: both branches read one layer norm.
    "phi2": replace(GELU_MLP, feed_forward_norm="attn_norm", parallel=True),
    "stablelm": _stablelm,
    # StarCoder (arXiv 2305.06161): GPT-2 with one head of keys and values.
    "starcoder": _gpt2,
    # StarCoder 2 (arXiv 2402.19173): layer norms, biases everywhere, no gate.
    # Its windows are in folders only.
    "starcoder2": lambda config: replace(GELU_MLP, windows=named_windows(config)),
}

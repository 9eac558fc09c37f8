"""Dense decoders with RMS norms, a gated feed-forward block and one kind of layer: Llama's form."""

import math
from collections.abc import Callable
from dataclasses import replace

from localinfer.errors import CorruptFileError
from localinfer.kernels.ops import Activation, Pairing
from localinfer.models.decoder.architecture import Architecture, QueryKeyNorm
from localinfer.models.decoder.base_architectures import (
    LLAMA,
    QK_NORMED,
    granite,
    hunyuan,
    named_windows,
    same_windows,
    windows,
)
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.graph import refuse


def _apertus(config: ModelConfig) -> Architecture:
    """Apertus (arXiv 2509.14233): one learned activation in place of the gate, queries and keys normed."""
    if not config.xielu:
        raise CorruptFileError(
            "xielu.alpha_p is missing; this architecture has the parameters of its activation in keys of that name. "
            "Convert the model again or download another copy."
        )
    return replace(QK_NORMED, gated=False, xielu=config.xielu)


def _bitnet(config: ModelConfig) -> Architecture:
    """BitNet b1.58: the first models, and GGUF's runtimes, have SiLU, the 2B of 2025 (2504.12285) a squared ReLU."""
    is_squared = config.hidden_activation == "relu2"
    return Architecture(activation=Activation.RELU_SQUARED if is_squared else Activation.SILU)


def _nanbeige(config: ModelConfig) -> Architecture:
    """Nanbeige 4, of which some run all their layers several times."""
    if config.num_loops > 1:
        raise refuse(config, f"runs its layers {config.num_loops} times")
    return LLAMA


def _baichuan(config: ModelConfig) -> Architecture:
    """Baichuan 1 and 2 (arXiv 2309.10305): the 7B has RoPE, the 13B ALiBi; only the number of layers differs."""
    has_rope = (config.num_layers == 32,) * config.num_layers
    return replace(LLAMA, has_rope=has_rope, max_alibi_bias=8.0 if config.num_layers == 40 else 0.0)


def _hyperclovax(config: ModelConfig) -> Architecture:
    """HyperCLOVA X Think (arXiv 2506.22403): Granite's scalars, its logits multiplied; norms behind the branches too,
    where the file has them.
    """
    has_norms = "post_attention_norm.weight" in config.block_tensors
    return replace(
        granite(config),
        pairing=Pairing.HALVES,
        logit_scale=config.logit_scale or 1.0,
        attention_post_norm="post_attention_norm" if has_norms else None,
        feed_forward_post_norm="post_ffw_norm" if has_norms else None,
    )


def _minicpm(config: ModelConfig) -> Architecture:
    """MiniCPM 1 (arXiv 2404.06395): muP's scalars, those of its 2B model where the file has none."""
    return replace(
        LLAMA,
        embedding_scale=config.embedding_scale or 12.0,
        residual_scale=config.residual_scale or 1.4 / math.sqrt(config.num_layers),
        logit_scale=1.0 / (config.logit_scale or config.hidden_size / 256.0),
    )


LLAMA_KIN: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    "apertus": _apertus,
    # Arcee AFM: one squared ReLU in place of the gate.
    "arcee": replace(LLAMA, activation=Activation.RELU_SQUARED, gated=False),
    "baichuan": _baichuan,
    # BitNet b1.58 (arXiv 2402.17764): ternary matrices, and a norm before the last one of each block.
    "bitnet": _bitnet,
    # CogVLM (arXiv 2311.03079), on text: matrices for images are left aside.
    "cogvlm": Architecture(rope_base=10000.0),
    # ChatGLM 2 and 3, GLM 4 9B Chat (arXiv 2406.12793): half of each head rotates.
    "chatglm": LLAMA,
    # ERNIE 4.5.
    "ernie4_5": LLAMA,
    # EXAONE 3 (arXiv 2408.03541).
    "exaone": Architecture(),
    # GLM 4 0414: pre- and post-norms; vision models (sectioned RoPE) pair the halves of a head.
    "glm4": lambda config: Architecture(
        pairing=Pairing.HALVES if any(config.rope.sections) else Pairing.ADJACENT,
        attention_post_norm="post_attention_norm",
        feed_forward_post_norm="post_ffw_norm",
    ),
    # Granite 3 and 4, dense; some have no RoPE.
    "granite": lambda config: replace(granite(config), has_rope=(config.rope.is_used,) * config.num_layers),
    "hunyuan-dense": hunyuan,
    # Its vision-language model, on text.
    "hunyuan_vl": hunyuan,
    "hyperclovax": _hyperclovax,
    # InternLM 2 and 3 (arXiv 2403.17297): Llama with its projections fused in the checkpoint.
    "internlm2": LLAMA,
    # Llama 1 to 3.x (arXiv 2302.13971), TinyLlama, SmolLM; Mistral (the first has a window), Mixtral (2401.04088).
    "llama": lambda config: replace(LLAMA, windows=same_windows(config)),
    # Maincoder: queries and keys normed after their rotation.
    "maincoder": replace(LLAMA, query_key_norm=QueryKeyNorm.AFTER_ROPE),
    "minicpm": _minicpm,
    # Ministral 3: queries sharpen with the logarithm of the position.
    "mistral3": lambda config: replace(
        LLAMA,
        temperature_scale=config.temperature_scale,
        temperature_length=config.rope.original_context_length,
        windows=named_windows(config),
    ),
    "nanbeige": _nanbeige,
    # Karpathy's NanoChat: norms without weights, of the embedding and of rotated queries and keys too; no gate.
    "nanochat": Architecture(
        weighted_norms=False,
        normalises_embedding=True,
        unweighted_query_key_norm=True,
        activation=Activation.RELU_SQUARED,
        gated=False,
    ),
    # PaddleOCR-VL (arXiv 2510.14528), on text.
    "paddleocr": Architecture(),
    # Pangu Embedded (arXiv 2505.22375).
    "pangu-embedded": Architecture(),
    # PLaMo 13B: both branches read one norm.
    "plamo": Architecture(feed_forward_norm="attn_norm", parallel=True),
    # Phi 3 and 4 (arXiv 2404.14219): fused projections, LongRoPE, one window for all layers in the 4K models.
    "phi3": lambda config: Architecture(windows=same_windows(config)),
    # Qwen 1 (arXiv 2309.16609) with fused projections; Qwen 2 and 2.5 (2407.10671). Their biases are in the file.
    "qwen": Architecture(),
    "qwen2": lambda config: Architecture(windows=named_windows(config)),
    # Qwen 2 VL (arXiv 2409.12191) and 3 VL, on text: the sections of their rotation have equal positions there, and
    # pairs beyond the sections turn like the others, as in the published code.
    "qwen2vl": lambda config: Architecture(has_output_bias=False, windows=named_windows(config)),
    "qwen3vl": QK_NORMED,
    # Qwen 3 (arXiv 2505.09388): queries and keys normed per head.
    "qwen3": lambda config: replace(QK_NORMED, windows=named_windows(config)),
    # Refact 1.6B: ALiBi.
    "refact": lambda config: Architecture(has_rope=(False,) * config.num_layers, max_alibi_bias=8.0),
    # ByteDance's Seed-OSS: its feed-forward norm has another name.
    "seed_oss": Architecture(feed_forward_norm="post_attention_norm"),
    # Spark 2.5: gated heads, a GELU gate, sliding windows as the file says.
    "spark2_5": lambda config: Architecture(activation=Activation.GELU_TANH, windows=windows(config, period=1)),
    "xverse": LLAMA,
}

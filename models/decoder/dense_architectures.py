"""Architectures of dense decoders: Llama's and GPT's forms, layers of several kinds; and parts that tables share."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from localinfer.errors import CorruptFileError
from localinfer.kernels.ops import Activation, Pairing
from localinfer.models.decoder.architecture import Architecture, Blocks, Norm, QueryKeyNorm, SelfSight
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.graph import refuse

LLAMA = Architecture(pairing=Pairing.ADJACENT)
QK_NORMED = Architecture(query_key_norm=QueryKeyNorm.BEFORE_ROPE)
GELU_MLP = Architecture(norm=Norm.LAYER, activation=Activation.GELU_TANH, gated=False)
COHERE = replace(LLAMA, norm=Norm.LAYER, feed_forward_norm="attn_norm", parallel=True)
FOUR_NORMS = replace(QK_NORMED, attention_post_norm="post_attention_norm", feed_forward_post_norm="post_ffw_norm")
NORMS_BEHIND = replace(FOUR_NORMS, attention_norm=None, feed_forward_norm=None)


def windowed_layers(config: ModelConfig, period: int) -> tuple[bool, ...]:
    """Layers with a sliding window: the file's pattern, or all but every period-th layer."""
    if not config.sliding_window:
        return (False,) * config.num_layers
    return config.windowed_layers or tuple(layer % period < period - 1 for layer in range(config.num_layers))


def windows(config: ModelConfig, period: int) -> tuple[int, ...]:
    """The window of each layer, 0 for full attention."""
    return tuple(config.sliding_window if is_windowed else 0 for is_windowed in windowed_layers(config, period))


def rope_in_windows(record: Architecture, config: ModelConfig, period: int) -> Architecture:
    """A record with sliding windows, and with RoPE in those layers only."""
    is_windowed = windowed_layers(config, period)
    return replace(record, windows=windows(config, period), has_rope=is_windowed)


def named_windows(config: ModelConfig) -> tuple[int, ...]:
    """The windows of families that mostly have none: those of a file that names the layers which have one."""
    return windows(config, period=1) if config.windowed_layers else ()


def same_windows(config: ModelConfig) -> tuple[int, ...]:
    """The file's window in every layer, or in those of its pattern."""
    is_windowed = config.windowed_layers or (True,) * config.num_layers
    return tuple(config.sliding_window if windowed else 0 for windowed in is_windowed)


def rope_except_every_fourth(config: ModelConfig) -> tuple[bool, ...]:
    """Layers with RoPE: all but every fourth (NoPE, arXiv 2501.18795)."""
    return tuple(layer % 4 < 3 for layer in range(config.num_layers))


def normalises_experts(config: ModelConfig, default: bool = False) -> bool:
    """Return whether expert weights sum to 1, as the file says, or else `default`."""
    found = None if config.experts is None else config.experts.normalise
    return default if found is None else found


def granite(config: ModelConfig) -> Architecture:
    """Granite 3, dense or with experts: four scalars from muP training, logits divided by theirs."""
    return replace(
        LLAMA,
        embedding_scale=config.embedding_scale or 1.0,
        scales_media=True,
        residual_scale=config.residual_scale or 1.0,
        logit_scale=1.0 / (config.logit_scale or 1.0),
    )


def hunyuan(config: ModelConfig) -> Architecture:
    """Tencent's Hunyuan (arXiv 2411.02265), dense or with experts: NTK-aware scaling stretches the RoPE base.

    The base is multiplied by alpha^(d / (d - 2)), d elements rotating.
    """
    rope = config.rope
    base = rope.base
    if rope.alpha and rope.rotary_size > 2:
        base = float(rope.base * rope.alpha ** (rope.rotary_size / (rope.rotary_size - 2)))
    return Architecture(query_key_norm=QueryKeyNorm.AFTER_ROPE, rope_base=base)


def _apertus(config: ModelConfig) -> Architecture:
    """Apertus (arXiv 2509.14233): one learned activation in place of the gate, queries and keys normed."""
    if not config.xielu:
        raise CorruptFileError(
            "xielu.alpha_p is missing; this architecture has the parameters of its activation in keys of that name. "
            "Convert the model again or download another copy."
        )
    return replace(QK_NORMED, gated=False, xielu=config.xielu)


def _nanbeige(config: ModelConfig) -> Architecture:
    """Nanbeige 4, of which some run all their layers several times."""
    if config.num_loops > 1:
        raise refuse(config, f"runs its layers {config.num_loops} times")
    return LLAMA


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


LLAMA_FAMILY: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    "apertus": _apertus,
    # Arcee AFM: one squared ReLU in place of the gate.
    "arcee": replace(LLAMA, activation=Activation.RELU_SQUARED, gated=False),
    # Baichuan 1 and 2 (arXiv 2309.10305): the 7B has RoPE, the 13B ALiBi; only the number of layers differs.
    "baichuan": lambda config: replace(
        LLAMA,
        has_rope=(config.num_layers == 32,) * config.num_layers,
        max_alibi_bias=8.0 if config.num_layers == 40 else 0.0,
    ),
    # BitNet b1.58 (arXiv 2402.17764): ternary matrices, and a norm before the last one of each block. The first models,
    # and GGUF's runtimes, have SiLU, the 2B of 2025 (2504.12285) a squared ReLU.
    "bitnet": lambda config: Architecture(
        activation=Activation.RELU_SQUARED if config.hidden_activation == "relu2" else Activation.SILU
    ),
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
    "qwen3vl": replace(QK_NORMED, interleaves_axes=True),
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


GPT_FAMILY: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
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


_GEMMA = Architecture(activation=Activation.GELU_TANH)
_PROMPT_WORDS = 512
"""Rows of a prompt beside those of its picture, where all see each other."""
_GEMMA_FOUR_NORMS = replace(_GEMMA, attention_post_norm="post_attention_norm", feed_forward_post_norm="post_ffw_norm")


def _exaone4(config: ModelConfig) -> Architecture:
    """EXAONE 4 (arXiv 2507.11407): post-norms; the 32B has sliding windows, and RoPE in those layers only."""
    if not config.windowed_layers and config.num_layers != 64:
        return NORMS_BEHIND
    return rope_in_windows(NORMS_BEHIND, config, period=4)


def _muse_glimmer(config: ModelConfig) -> Architecture:
    """Muse Glimmer: four norms, gated attention, RoPE in the sliding-window layers only."""
    return replace(
        rope_in_windows(FOUR_NORMS, config, period=4),
        pairing=Pairing.ADJACENT,
        normalises_embedding=True,
        post_norm_epsilon=1e-8,
        logit_scale=config.logit_scale or 1.0,
    )


def _paligemma_sight(config: ModelConfig) -> dict[str, Any]:
    """PaliGemma (arXiv 2407.07726): a prompt with a picture sees itself, and one batch holds it with some words."""
    num_tokens = config.num_picture_tokens
    return {"picture_sight": SelfSight.ALL, "picture_rows": num_tokens + _PROMPT_WORDS if num_tokens else 0}


def _gemma2(config: ModelConfig) -> Architecture:
    """Gemma 2 (arXiv 2408.00118): pre- and post-norms, a sliding window in every other layer, soft caps."""
    return replace(
        _GEMMA_FOUR_NORMS,
        **_paligemma_sight(config),
        embedding_scale=math.sqrt(config.hidden_size),
        attention_scale=_gemma_scale(config, layers_of_27b=46),
        windows=windows(config, period=2),
    )


def _gemma3(config: ModelConfig) -> Architecture:
    """Gemma 3 (arXiv 2503.19786): five sliding-window layers to one of full attention, each kind with its RoPE base."""
    return replace(
        _GEMMA_FOUR_NORMS,
        embedding_scale=math.sqrt(config.hidden_size),
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        attention_scale=_gemma_scale(config, layers_of_27b=62),
        windows=windows(config, period=6),
        windowed_rope_base=config.rope.base_windowed or 10000.0,
        scales_windowed_rope=False,
        picture_sight=SelfSight.ALL,
    )


def gemma_with_shared_keys(config: ModelConfig, blocks: Blocks, period: int) -> Architecture:
    """Gemma 3n and Gemma 4: unscaled scores of normed queries and keys."""
    return replace(
        _GEMMA_FOUR_NORMS,
        blocks=blocks,
        embedding_scale=math.sqrt(config.hidden_size),
        attention_scale=1.0,
        windows=windows(config, period),
        windowed_rope_base=config.rope.base_windowed or 10000.0,
        divides_windowed_rope=False,
        logit_softcap=30.0 if blocks is Blocks.GEMMA3N else 0.0,
        picture_sight=_gemma4_sight(config) if blocks is Blocks.GEMMA4 else SelfSight.NONE,
        picture_rows=1120 if blocks is Blocks.GEMMA4 else 0,
    )


def _gemma4_sight(config: ModelConfig) -> SelfSight:
    return SelfSight.ALL if config.full_layers_see_pictures else SelfSight.WINDOWED


def _gemma_scale(config: ModelConfig, layers_of_27b: int) -> float | None:
    """The largest models divide by the root of hidden_size / num_heads, which differs from their head size."""
    if config.attention_scale is None and config.num_layers == layers_of_27b:
        return 1.0 / math.sqrt(config.hidden_size / config.num_heads[0])
    return None


WINDOWED: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    # Command R7B and Command A: three sliding-window layers with RoPE to one of full attention without.
    "cohere2": lambda config: replace(rope_in_windows(COHERE, config, period=4), logit_scale=config.logit_scale or 1.0),
    # Nemotron's models found by Puzzle (arXiv 2411.19146): layers without attention, or with one matrix in its place.
    "deci": LLAMA,
    "exaone4": _exaone4,
    # Gemma (arXiv 2403.08295): scaled embeddings and a GELU gate. GGUF stores the norms of this family as 1 + w.
    "gemma": lambda config: replace(_GEMMA, embedding_scale=math.sqrt(config.hidden_size), **_paligemma_sight(config)),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": lambda config: gemma_with_shared_keys(config, Blocks.GEMMA3N, period=5),
    "gemma4": lambda config: gemma_with_shared_keys(config, Blocks.GEMMA4, period=6),
    "muse-glimmer": _muse_glimmer,
    # OLMo 2 (arXiv 2501.00656): post-norms; OLMo 3 adds sliding windows, without YaRN in those layers.
    "olmo2": lambda config: replace(NORMS_BEHIND, windows=windows(config, period=4), scales_windowed_rope=False),
    # OpenELM (arXiv 2404.14619): heads and feed-forward sizes grow with the layers.
    "openelm": QK_NORMED,
    # PLaMo 3: four norms.
    "plamo3": lambda config: replace(FOUR_NORMS, windows=windows(config, period=8)),
    # SmolLM3: every fourth layer has no RoPE, unless the file says otherwise.
    "smollm3": lambda config: replace(
        LLAMA,
        has_rope=config.rope_pattern or rope_except_every_fourth(config),
        windows=named_windows(config),
    ),
    # VaultGemma (arXiv 2510.15001): Gemma 2 without norms behind the branches.
    "vaultgemma": lambda config: replace(_gemma2(config), attention_post_norm=None, feed_forward_post_norm=None),
}

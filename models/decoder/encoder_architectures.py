"""The supported encoders: text models whose positions see later ones, for embeddings and rerankers; and a decoder of
their blocks.

Each is a record of `Architecture` as those of decoders are, or a function of the `ModelConfig` that returns one.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from localinfer.errors import UnsupportedFormatError
from localinfer.kernels.ops import Activation, Pairing
from localinfer.models.decoder.architecture import Architecture, Blocks, Norm, QueryKeyNorm, RelativeBias
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.dense_architectures import gemma_with_shared_keys, named_windows

# BERT (arXiv 1810.04805): each branch is normed after it was added.
_BERT = Architecture(
    causal=False,
    norm=Norm.LAYER,
    attention_norm=None,
    attention_sum_norm="attn_output_norm",
    feed_forward_norm=None,
    feed_forward_sum_norm="layer_output_norm",
    embedding_norm="token_embd_norm",
    output_norm=None,
    has_token_types=True,
    activation=Activation.GELU_TANH,
    gated=False,
)
_MODERN_BERT_PERIOD, _GEMMA_PERIOD = 3, 6
_CLASSIFIER_ACTIVATIONS = {"tanh": None, "gelu": Activation.GELU_ERF, "relu": Activation.RELU}


def _without_rope(config: ModelConfig) -> tuple[bool, ...]:
    return (False,) * config.num_layers


def _windows(config: ModelConfig, is_full: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer, 0 for full attention: the file's pattern, or else is_full."""
    if config.windowed_layers:
        return tuple(config.sliding_window if is_windowed else 0 for is_windowed in config.windowed_layers)
    return tuple(0 if is_full(layer) else config.sliding_window for layer in range(config.num_layers))


def _gelu(config: ModelConfig) -> Activation:
    """The form of GELU: that of the error function where a file says so, else tanh, as GGUF's models are run."""
    return Activation.GELU_ERF if config.has_exact_gelu else Activation.GELU_TANH


def _plain(config: ModelConfig) -> Architecture:
    """BERT with what a model's settings say of it."""
    name = config.classifier_activation or "tanh"
    if name not in _CLASSIFIER_ACTIVATIONS:
        raise UnsupportedFormatError(
            f"{config.architecture}.classifier.activation is {name!r:.40}; this version computes "
            f"{', '.join(_CLASSIFIER_ACTIVATIONS)}. Update localinfer or choose another model."
        )
    return replace(_BERT, activation=_gelu(config), classifier_activation=_CLASSIFIER_ACTIVATIONS[name])


def _bert(config: ModelConfig) -> Architecture:
    """BERT, RoBERTa and XLM-R, whose positions start behind an offset that converters take away; ALBERT and ELECTRA
    (arXiv 1909.11942, 2003.10555), whose embeddings may be narrower; DistilBERT (1910.01108)."""
    return replace(_plain(config), learned_positions=True, has_rope=_without_rope(config), projects_embedding=True)


def _deberta(config: ModelConfig) -> Architecture:
    """DeBERTa V2 and V3 (arXiv 2006.03654, 2111.09543): scores also have products with vectors of distances."""
    is_positioned = config.has_learned_positions
    return replace(
        _plain(config),
        learned_positions=is_positioned,
        has_rope=_without_rope(config),
        relative_bias=RelativeBias.PRODUCTS if config.max_relative_distance else None,
    )


def _jina_bert_v2(config: ModelConfig) -> Architecture:
    """Jina embeddings 2 (arXiv 2310.19923): ALiBi; the code model norms queries and keys, and adds each layer's input
    a second time."""
    return replace(
        _plain(config),
        has_rope=_without_rope(config),
        max_alibi_bias=config.max_alibi_bias or 8.0,
        gated=True,
        query_key_norm=QueryKeyNorm.OPTIONAL,
        second_sum_norm="attn_norm_2" if "attn_norm_2.weight" in config.block_tensors else None,
    )


def _modern_bert(config: ModelConfig) -> Architecture:
    """ModernBERT (arXiv 2412.13663): the first of every three layers sees all, the others a window."""
    activation = {"": _gelu(config), "gelu": _gelu(config), "silu": Activation.SILU}
    if config.hidden_activation not in activation:
        raise UnsupportedFormatError(
            f"modern-bert.hidden_activation is {config.hidden_activation!r:.40}; this version computes gelu and silu. "
            "Update localinfer or choose another model."
        )
    plain = Architecture(
        causal=False,
        norm=Norm.LAYER,
        first_attention_norm=False,
        embedding_norm="token_embd_norm",
        activation=activation[config.hidden_activation],
        windows=_windows(config, lambda layer: layer % _MODERN_BERT_PERIOD == 0),
        classifier_activation=_gelu(config),
    )
    if not config.num_decision_layers:
        return plain
    # Laya's head sees all rows, and no positions.
    first = config.num_layers - config.num_decision_layers
    return replace(
        plain,
        windows=(*plain.windows[:first], *(0,) * config.num_decision_layers),
        has_rope=tuple(layer < first for layer in range(config.num_layers)),
        first_decision_layer=first,
        classifier_activation=Activation.GELU_ERF,
    )


def _gemma_embedding2(config: ModelConfig) -> Architecture:
    """EmbeddingGemma 2: Gemma 4's blocks, with symmetric windows, and inputs of layers that no token is looked up for;
    a matrix follows the last norm."""
    return replace(
        gemma_with_shared_keys(config, Blocks.GEMMA4, _GEMMA_PERIOD),
        causal=False,
        windows=_windows(config, lambda layer: layer % _GEMMA_PERIOD == _GEMMA_PERIOD - 1),
        windowed_rope_base=config.rope.base_windowed or 10000.0,
        has_output_projection=True,
    )


def _gemma_embedding(config: ModelConfig) -> Architecture:
    """EmbeddingGemma (arXiv 2509.20354): Gemma 3's blocks, with symmetric windows; two matrices after pooling."""
    return Architecture(
        causal=False,
        activation=Activation.GELU_TANH,
        attention_post_norm="post_attention_norm",
        feed_forward_post_norm="post_ffw_norm",
        embedding_scale=math.sqrt(config.hidden_size),
        query_key_norm=QueryKeyNorm.BEFORE_ROPE,
        windows=_windows(config, lambda layer: layer % _GEMMA_PERIOD == _GEMMA_PERIOD - 1),
        windowed_rope_base=config.rope.base_windowed or 10000.0,
        scales_windowed_rope=False,
    )


def _contrastive(config: ModelConfig) -> Architecture:
    """The text towers of CLIP (arXiv 2103.00020) and SigLIP (2303.15343): GPT-2's blocks; SigLIP's see later rows."""
    activation = {"quick_gelu": Activation.GELU_QUICK, "gelu": Activation.GELU_ERF}
    is_clip = config.architecture == "clip-text"
    if is_clip and config.hidden_activation not in activation:
        raise UnsupportedFormatError(
            f"clip-text.hidden_activation is {config.hidden_activation!r:.40}; this version computes "
            f"{' and '.join(activation)}. Update localinfer or choose another model."
        )
    return Architecture(
        causal=is_clip,
        hides_start=is_clip,
        compares_pictures=True,
        norm=Norm.LAYER,
        learned_positions=True,
        has_rope=_without_rope(config),
        activation=activation[config.hidden_activation] if is_clip else Activation.GELU_TANH,
        gated=False,
    )


ENCODERS: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    "bert": _bert,
    "clip-text": _contrastive,
    # ColPali and ColQwen2 (arXiv 2407.01449): PaliGemma's text model, all of whose prompt sees itself, and Qwen2-VL's.
    "colpali": lambda config: Architecture(
        causal=False, activation=Activation.GELU_TANH, embedding_scale=math.sqrt(config.hidden_size)
    ),
    "colqwen2": lambda config: Architecture(windows=named_windows(config)),
    "deberta-v2": _deberta,
    # EuroBERT (arXiv 2503.05500): Llama's blocks.
    "eurobert": Architecture(causal=False),
    "gemma-embedding": _gemma_embedding,
    "gemma-embedding2": _gemma_embedding2,
    # GTE 1.5 and multilingual (arXiv 2407.19669): BERT with RoPE and a gate.
    "gte": lambda config: replace(_plain(config), gated=True),
    "jina-bert-v2": _jina_bert_v2,
    # Jina embeddings 3 (arXiv 2409.10173), without its adapters.
    "jina-bert-v3": _plain,
    "modern-bert": _modern_bert,
    # MPNet (arXiv 2004.09297): BERT with a learned bias by distance in every layer's scores.
    "mpnet": lambda config: replace(_bert(config), relative_bias=RelativeBias.TABLE),
    # NeoBERT (arXiv 2502.19587).
    "neo-bert": Architecture(causal=False, pairing=Pairing.ADJACENT, output_norm="enc.output_norm"),
    # Nomic Embed (arXiv 2402.01613), and with experts in every other layer (2502.07972).
    "nomic-bert": replace(_BERT, gated=True, activation=Activation.SILU),
    "nomic-bert-moe": replace(_BERT, normalise_experts=False),
    "siglip-text": _contrastive,
}

DECODERS_OF_THEIR_KIND: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    # ModernBERT (arXiv 2507.11412), where positions see none after them.
    "modern-bert-decoder": lambda config: replace(_modern_bert(config), causal=True, has_prediction_head=True),
}
"""Decoders that have an encoder's blocks."""

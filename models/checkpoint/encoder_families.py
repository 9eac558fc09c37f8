"""Encoders: BERT and its kin, whose positions see later ones, as embedding models and as rerankers."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.changes import FIRST_HALF, SECOND_HALF, Change, Rows, parts_of_groups
from localinfer.models.checkpoint.family import GELU_TANH, LLAMA, Family, Metadata, Part, Source
from localinfer.models.checkpoint.settings import Settings

Variant = Callable[[Settings, Family], Family]

NO_ROPE: Metadata = {"rope.dimension_count": None, "rope.freq_base": None}
_RANK = 4
_CLASSIFIER = "ForSequenceClassification"
_FIRST_ROW, _MEAN = 2, 1
_POOLED_ROWS = {"cls": _FIRST_ROW, "mean": _MEAN}
# Of pretraining, and of the first token's dense layer, which no vector goes through.
_UNUSED = r"(.*\.)?(embeddings\.position_ids|pooler\.dense\.(weight|bias))|cls\..*|lm_head\..*"

BERT_BLOCKS: dict[str, Source] = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
BERT_ENDS: dict[str, Source] = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
# The model of texts has its gate first, that of code second.
_JINA_V2_BLOCKS: dict[str, Source] = {
    **{name: source for name, source in BERT_BLOCKS.items() if name.startswith("attn")},
    "attn_q_norm": "attention.self.layer_norm_q",
    "attn_k_norm": "attention.self.layer_norm_k",
    "attn_norm_2": "layer_norm_1",
    "ffn_gate": (Part("mlp.gated_layers", FIRST_HALF), Part("mlp.up_gated_layer", SECOND_HALF)),
    "ffn_up": (Part("mlp.gated_layers", SECOND_HALF), Part("mlp.up_gated_layer", FIRST_HALF)),
    "ffn_down": ("mlp.wo", "mlp.down_layer"),
    "layer_output_norm": ("mlp.layernorm", "layer_norm_2"),
}
_FUSED_ENDS: dict[str, Source] = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "emb_ln",
}
_NORMS_BEHIND: dict[str, Source] = {"attn_output_norm": "norm1", "layer_output_norm": "norm2"}


def is_ranker(settings: Settings) -> bool:
    """Whether a folder holds a classifier of whole texts."""
    return any(isinstance(name, str) and name.endswith(_CLASSIFIER) for name in settings.entries("architectures"))


def ranker_metadata(settings: Settings) -> Metadata:
    """That a model ranks, and the names of its scores."""
    labels = settings.record("id2label")
    names = [labels[key] for key in sorted(labels, key=lambda key: (len(key), key))]
    if not all(isinstance(name, str) for name in names):
        raise settings.wrong("id2label", "a text for each label")
    return {"pooling_type": _RANK, "classifier.output_labels": names or ["LABEL_0"]}


def with_classifier(heads: Mapping[str, Source], inside: Mapping[str, Source] | None = None) -> Variant:
    """The family whose folder may hold a classifier: modules beside the encoder, and within it."""

    def variant(settings: Settings, family: Family) -> Family:
        if not is_ranker(settings):
            return family
        plain = family.metadata
        return replace(
            family,
            heads=heads,
            outside={**family.outside, **(inside or {})},
            unused=r"(.*\.)?embeddings\.position_ids",
            metadata=lambda settings: {**plain(settings), **ranker_metadata(settings)},
        )

    return variant


def encoder_metadata(settings: Settings) -> Metadata:
    """That positions see later ones."""
    settings.must_be("is_decoder", False, False)
    settings.must_be("add_cross_attention", False, False)
    return {"attention.causal": False}


def gelu_metadata(settings: Settings) -> Metadata:
    """The same, and which form of GELU a model has: "gelu" is that of the error function."""
    key = "hidden_activation" if "hidden_activation" in settings else "hidden_act"
    return {**encoder_metadata(settings), "exact_gelu": True if settings.text(key, "gelu") == "gelu" else None}


def _bert(settings: Settings) -> Metadata:
    settings.must_be("position_embedding_type", "absolute", "absolute")
    return {**gelu_metadata(settings), **NO_ROPE}


def _jina_v2(settings: Settings) -> Metadata:
    settings.must_be("feed_forward_type", "geglu", "original")
    settings.mark_read(("emb_pooler",))
    return {**gelu_metadata(settings), **NO_ROPE}


def _bert_variant(settings: Settings, family: Family) -> Family:
    """Jina embeddings 2 (arXiv 2310.19923) call themselves BERT, with ALiBi."""
    if settings.get("position_embedding_type") == "alibi":
        ends = {name: source for name, source in BERT_ENDS.items() if name != "position_embd"}
        family = replace(family, architecture="jina-bert-v2", blocks=_JINA_V2_BLOCKS, outside=ends, metadata=_jina_v2)
    return _BERT_CLASSIFIER(settings, family)


def _neo_bert(settings: Settings) -> Metadata:
    """NeoBERT's matrices are two thirds as wide as the file says, in whole eights."""
    settings.mark_read(("embedding_init_range",))
    width = 2 * settings.integer("intermediate_size", low=1) // 3
    return {**encoder_metadata(settings), "feed_forward_length": (width + 7) // 8 * 8}


def _neo_bert_changes(settings: Settings) -> dict[str, Change]:
    """Queries, keys and values take turns, head by head."""
    num_heads = settings.integer("num_attention_heads", low=1)
    head_dim = settings.integer("hidden_size", low=1) // num_heads
    return {"attn_qkv.weight": parts_of_groups(num_heads, (head_dim,) * 3, (0, 1, 2))}


def _first_position(settings: Settings) -> int:
    """Positions count from behind the padding's, which the table has rows for."""
    return settings.integer("pad_token_id", 1) + 1


def _roberta(settings: Settings) -> Metadata:
    offset = _first_position(settings)
    length = settings.integer("max_position_embeddings", low=offset + 1)
    return {**_bert(settings), "context_length": length - offset}


def _roberta_changes(settings: Settings) -> dict[str, Change]:
    offset = _first_position(settings)
    return {"position_embd.weight": Rows(lambda num_rows: np.arange(offset, num_rows))}


def _nomic(settings: Settings) -> Metadata:
    for key, wanted in (("prenorm", False), ("parallel_block", False), ("use_rms_norm", False), ("causal", False)):
        settings.must_be(key, wanted, wanted)
    settings.must_be("rotary_emb_interleaved", False, False)
    settings.must_be("rotary_emb_fraction", 1.0, 1.0)
    settings.must_be("rotary_emb_scale_base", None, None)
    if settings.integer("num_experts", 0):
        raise settings.unsupported("num_experts", "folders of nomic_bert without experts, or GGUF files with them")
    settings.must_be("rotary_scaling_factor", None, None)
    settings.mark_read(("fused_bias_fc", "scale_attn_weights"))  # how a program computes it; the usual scale
    # Beyond the length it was trained for, its own code stretches positions by what a text needs.
    length = settings.integer("max_position_embeddings", low=1)
    trained = settings.integer("max_trained_positions", length, low=1)
    return {**encoder_metadata(settings), "context_length": min(length, trained)}


def _modern_bert(settings: Settings) -> Metadata:
    period = settings.integer("global_attn_every_n_layers", 3, low=1)
    # Read for a classifier only, of pretraining, and of a parent class.
    settings.mark_read(("classifier_activation", "decoder_bias", "position_embedding_type", "layer_norm_eps"))
    found: Metadata = {**gelu_metadata(settings), "hidden_activation": settings.text("hidden_activation", "gelu")}
    if "layer_types" not in settings:
        layers = range(settings.integer("num_hidden_layers", low=1))
        found["attention.sliding_window_pattern"] = [int(layer % period != 0) for layer in layers]
    return found


def _modern_bert_decoder(settings: Settings) -> Metadata:
    """The same as a decoder, whose window is half of what the setting says, its own position included."""
    settings.must_be("classifier_activation", "gelu", "gelu")
    return {**_modern_bert(settings), "attention.causal": True}


def _modern_bert_decoder_variant(settings: Settings, family: Family) -> Family:
    if "sliding_window" not in settings:
        settings.put("sliding_window", settings.integer("local_attention", 128) // 2)
    settings.mark_read(("local_attention",))
    return family


def _modern_bert_ranker(settings: Settings) -> Metadata:
    rows = settings.text("classifier_pooling", "cls")
    settings.must_be("classifier_activation", "gelu", "gelu")
    if rows not in _POOLED_ROWS:
        raise settings.unsupported("classifier_pooling", "cls and mean")
    return {"classifier.pooling_type": _POOLED_ROWS[rows]}


def _modern_bert_variant(settings: Settings, family: Family) -> Family:
    found = with_classifier({"cls": "head.dense", "cls.norm": "head.norm", "cls.output": "classifier"})(
        settings, family
    )
    if not is_ranker(settings):
        return found
    plain = found.metadata
    return replace(found, metadata=lambda settings: {**plain(settings), **_modern_bert_ranker(settings)})


def _xlm_roberta_variant(settings: Settings, family: Family) -> Family:
    if settings.get("lora_adaptations"):
        raise UnsupportedFormatError(
            "config.json: lora_adaptations names adapters for tasks; this version runs such a model without them. Save "
            "the model without adapters, or use a GGUF file"
        )
    return _ROBERTA_VARIANT(settings, family)


def _jina_v3(settings: Settings) -> Metadata:
    settings.must_be("lora_adaptations", None, None)
    return gelu_metadata(settings)


BERT = Family(
    architecture="bert",
    blocks=BERT_BLOCKS,
    outside=BERT_ENDS,
    layers="encoder.layer",
    unused=_UNUSED,
    activations=("gelu", *GELU_TANH),
    has_layer_norms=True,
    epsilon="layer_norm_eps",
    defaults={"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "vocab_size": 30522},
    metadata=_bert,
    variant=_bert_variant,
)
_BERT_CLASSIFIER = with_classifier({"cls.output": "classifier"}, {"cls": "pooler.dense"})
_ROBERTA_VARIANT = with_classifier({"cls": "classifier.dense", "cls.output": "classifier.out_proj"})
_ROBERTA = replace(
    BERT,
    defaults={**BERT.defaults, "max_position_embeddings": 514, "pad_token_id": 1},
    metadata=_roberta,
    changes=_roberta_changes,
    variant=_xlm_roberta_variant,
)
_FUSED = replace(BERT, outside=_FUSED_ENDS, layers="encoder.layers", variant=None)

_MODERN_BERT = Family(
    architecture="modern-bert",
    blocks={
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
    outside={
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
    },
    unused=r"head\..*|decoder\..*",
    activations=("gelu", *GELU_TANH, "silu"),
    has_layer_norms=True,
    has_windows=True,
    epsilon="norm_eps",
    aliases={
        "sliding_window": "local_attention",
        "rope_theta": "global_rope_theta",
        "rope_local_base_freq": "local_rope_theta",
    },
    defaults={"norm_eps": 1e-5, "local_attention": 128, "hidden_activation": "gelu"},
    metadata=_modern_bert,
    variant=_modern_bert_variant,
)
_MODERN_BERT_DECODER = replace(
    _MODERN_BERT,
    architecture="modern-bert-decoder",
    blocks={
        **{name: source for name, source in _MODERN_BERT.blocks.items() if name != "attn_qkv"},
        **{f"attn_{letter}": f"attn.{letter}_proj" for letter in "qkv"},
    },
    heads={"output": "decoder", "output_proj": "lm_head.dense", "output_proj_norm": "lm_head.norm"},
    unused="",
    aliases={name: alias for name, alias in _MODERN_BERT.aliases.items() if name != "sliding_window"},
    defaults={**_MODERN_BERT.defaults, "tie_word_embeddings": True},
    metadata=_modern_bert_decoder,
    variant=_modern_bert_decoder_variant,
)

ENCODERS: dict[str, Family] = {
    "bert": BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "nomic_bert": replace(
        _FUSED,
        architecture="nomic-bert",
        blocks={
            **_NORMS_BEHIND,
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
        },
        activations=("silu", "swiglu"),
        aliases={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "layer_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
            "rope_theta": "rotary_emb_base",
        },
        metadata=_nomic,
    ),
    "jina_embeddings_v3": replace(
        _FUSED,
        architecture="jina-bert-v3",
        blocks={
            **_NORMS_BEHIND,
            "attn_qkv": "mixer.Wqkv",
            "attn_output": "mixer.out_proj",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        defaults={"layer_norm_eps": 1e-5},
        metadata=_jina_v3,
    ),
    "modernbert": _MODERN_BERT,
    "modernbert-decoder": _MODERN_BERT_DECODER,
    "eurobert": Family(
        architecture="eurobert",
        blocks=LLAMA,
        unused=r"lm_head\..*",
        defaults={"rms_norm_eps": 1e-5},
        metadata=encoder_metadata,
    ),
    # NeoBERT (arXiv 2502.19587).
    "neobert": Family(
        architecture="neo-bert",
        blocks={
            "attn_norm": "attention_norm",
            "attn_qkv": "qkv",
            "attn_output": "wo",
            "ffn_norm": "ffn_norm",
            "ffn_up": "ffn.w12",
            "ffn_down": "ffn.w3",
        },
        outside={"token_embd": "encoder", "enc.output_norm": "layer_norm"},
        layers="transformer_encoder",
        unused=r"decoder\..*",
        epsilon="norm_eps",
        aliases={"max_position_embeddings": "max_length"},
        defaults={"norm_eps": 1e-6, "max_length": 1024},
        metadata=_neo_bert,
        changes=_neo_bert_changes,
    ),
}

"""Families of encoders: BERT and its relatives, and the classifiers over them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.changes import FIRST_HALF, SECOND_HALF, Change, Derived, RowOrder, parts_of_groups
from localinfer.models.checkpoint.family import GELU_TANH, LLAMA, NO_ROPE, Family, Metadata, Part, Source
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.decoder.block_config import MAX_CONTEXT, MAX_LAYERS
from localinfer.types import FloatArray

Variant = Callable[[Settings, Family], Family]

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
    """Return whether a folder holds a classifier of whole texts."""
    return any(isinstance(name, str) and name.endswith(_CLASSIFIER) for name in settings.entries("architectures"))


def ranker_metadata(settings: Settings) -> Metadata:
    """Metadata of a model that ranks, with the names of its scores."""
    labels = settings.record("id2label")
    names = [labels[key] for key in sorted(labels, key=lambda key: (len(key), key))]
    if not all(isinstance(name, str) for name in names):
        raise settings.wrong("id2label", "a text for each label")
    return {"pooling_type": _RANK, "classifier.output_labels": names or ["LABEL_0"]}


def with_classifier(
    heads: Mapping[str, Source],
    inside: Mapping[str, Source] | None = None,
    further: Callable[[Settings], Metadata] = lambda settings: {},
) -> Variant:
    """The family whose folder may hold a classifier: modules beside the encoder and within it, and further metadata."""

    def variant(settings: Settings, family: Family) -> Family:
        if not is_ranker(settings):
            return family
        plain = family.metadata
        return replace(
            family,
            heads=heads,
            outside={**family.outside, **(inside or {})},
            unused=r"(.*\.)?embeddings\.position_ids",
            metadata=lambda settings: {**plain(settings), **ranker_metadata(settings), **further(settings)},
        )

    return variant


def encoder_metadata(settings: Settings) -> Metadata:
    """Metadata of a model whose positions see later ones."""
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
    return {"position_embd.weight": RowOrder(lambda num_rows: np.arange(offset, num_rows))}


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


def _xlm_roberta_variant(settings: Settings, family: Family) -> Family:
    if settings.get("lora_adaptations"):
        raise UnsupportedFormatError(
            "config.json: lora_adaptations names adapters for tasks; this version runs such a model without them. Save "
            "the model without adapters, or use a GGUF file"
        )
    return _ROBERTA_VARIANT(settings, family)


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
    variant=with_classifier(
        {"cls": "head.dense", "cls.norm": "head.norm", "cls.output": "classifier"}, further=_modern_bert_ranker
    ),
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
        fixed={"lora_adaptations": None},
        metadata=gelu_metadata,
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


_PRETRAINED_HEADS = r"(lm_head|cls|vocab_.*|generator_.*|discriminator_.*|(lm|mask)_predictions|predictions|sop_.*)\..*"
_NEEDLESS = rf"(.*\.)?(embeddings\.position_ids|pooler\.(dense\.)?(weight|bias))|{_PRETRAINED_HEADS}"
_NARROW_SEEN = "embedding_size summary_activation summary_type"
"""Settings of ELECTRA and ALBERT, whose tensors say how wide the embedding is; a summary is for multiple choice."""
_MPNET_OFFSET = 2
"""Positions of MPNet count from behind those of padding, whatever its id."""


def _classifier(activation: str, heads: Mapping[str, Source]) -> Variant:
    """The same of a classifier whose first matrix has another activation than tanh."""
    return with_classifier(heads, further=lambda settings: {"classifier.activation": activation})


def _mpnet(settings: Settings) -> Metadata:
    # As many as its class computes with, whatever config.json says.
    settings.must_be("relative_attention_num_buckets", 32, 32)
    length = settings.integer("max_position_embeddings", low=_MPNET_OFFSET + 1)
    return {**_bert(settings), "context_length": length - _MPNET_OFFSET, "attention.relative_buckets_count": 32}


def _mpnet_changes(settings: Settings) -> dict[str, Change]:
    return {"position_embd.weight": RowOrder(lambda num_rows: np.arange(_MPNET_OFFSET, num_rows))}


def _albert_variant(settings: Settings, family: Family) -> Family:
    """Groups of layers share their weights, which GGUF has once for each layer."""
    settings.must_be("inner_group_num", 1, 1)
    num_layers = settings.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    num_groups = settings.integer("num_hidden_groups", 1, low=1, high=num_layers)
    outside: dict[str, Source] = dict(family.outside)
    for layer in range(num_layers):
        module = f"encoder.albert_layer_groups.{int(layer / (num_layers / num_groups))}.albert_layers.0"
        for name, source in _ALBERT_LAYER.items():
            outside[f"blk.{layer}.{name}"] = f"{module}.{source}"
    found = replace(family, outside=outside)
    return with_classifier({"cls.output": "classifier"}, {"cls": "pooler"})(settings, found)


def _deberta(settings: Settings) -> Metadata:
    settings.must_be("conv_kernel_size", 0, 0)
    if settings.integer("embedding_size", settings.integer("hidden_size")) != settings.integer("hidden_size"):
        raise settings.unsupported("embedding_size", "models whose embedding is as wide as their hidden states")
    # Read for a classifier only, and of pretraining.
    settings.mark_read(("position_biased_input", "pooler_hidden_size", "legacy", "norm_rel_ebd"))
    found: Metadata = {**gelu_metadata(settings), **NO_ROPE}
    if not settings.boolean("relative_attention", False):
        return found
    head_dim = settings.integer("hidden_size") // settings.integer("num_attention_heads", low=1)
    buckets, distance = _distances(settings)
    scale = 1.0 / float(np.sqrt(head_dim * (1.0 + len(_products(settings)))))
    found |= {"attention.scale": scale, "attention.max_relative_positions": distance}
    return {**found, "attention.relative_buckets_count": 2 * buckets or None}


def _distances(settings: Settings) -> tuple[int, int]:
    """Buckets of distances to one side, 0 where every distance has its own, and how many are told apart."""
    found = []
    for key in ("position_buckets", "max_relative_positions"):
        value = settings.get(key, -1)
        is_number = type(value) is int and value <= MAX_CONTEXT
        if not is_number:
            raise settings.wrong(key, f"a whole number up to {MAX_CONTEXT}")
        found.append(max(value, 0))
    return found[0], found[1] or settings.integer("max_position_embeddings", low=1, high=MAX_CONTEXT)


def _products(settings: Settings) -> tuple[str, ...]:
    """Products with vectors of distances: of queries (c2p), of keys (p2c)."""
    value = settings.get("pos_att_type") or []
    names = [name.strip() for name in value.lower().split("|")] if isinstance(value, str) else value
    known = ("c2p", "p2c")
    if not isinstance(names, list) or any(name not in known for name in names):
        raise settings.unsupported("pos_att_type", "c2p and p2c")
    return tuple(name for name in known if name in names)


def _deberta_derived(settings: Settings) -> dict[str, Derived]:
    """The vectors of distances in the space of keys and of queries, for each head: they follow from weights alone.

    Source: transformers, modeling_deberta_v2.py, disentangled_attention_bias.
    """
    if not settings.boolean("relative_attention", False):
        return {}
    buckets, distance = _distances(settings)
    num_rows, num_heads = 2 * (buckets or distance), settings.integer("num_attention_heads", low=1)
    hidden_size = settings.integer("hidden_size", low=1)
    is_normed = "layer_norm" in settings.text("norm_rel_ebd", "none").lower()
    is_shared = settings.boolean("share_att_key", False)
    epsilon = settings.number("layer_norm_eps", low=0.0, high=1.0)
    vectors = ("rel_embd.weight", *(("rel_embd_norm.weight", "rel_embd_norm.bias") if is_normed else ()))
    shape = num_heads, num_rows, hidden_size // num_heads
    found = {}
    for product in _products(settings):
        letter = {"c2p": "k", "p2c": "q"}[product]
        for layer in range(settings.integer("num_hidden_layers", low=1, high=MAX_LAYERS)):
            matrix = f"blk.{layer}.attn_{letter}" if is_shared else f"blk.{layer}.attn_pos_{letter}"
            sources = (f"{matrix}.weight", f"{matrix}.bias", *vectors)
            found[f"blk.{layer}.attn_rel_{letter}.weight"] = Derived(shape, sources, _projected(shape, epsilon))
    return found


def _projected(shape: tuple[int, int, int], epsilon: float) -> Callable[..., FloatArray]:
    num_heads, num_rows, head_dim = shape

    def function(
        matrix: FloatArray,
        bias: FloatArray,
        vectors: FloatArray,
        weight: FloatArray | None = None,
        shift: FloatArray | None = None,
    ) -> FloatArray:
        rows = vectors[:num_rows].astype(np.float64)
        if weight is not None and shift is not None:
            rows = rows - rows.mean(axis=1, keepdims=True)
            rows = rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + epsilon) * weight + shift
        projected = rows @ matrix.T.astype(np.float64) + bias
        return projected.reshape(num_rows, num_heads, head_dim).swapaxes(0, 1).astype(np.float32)

    return function


def _deberta_variant(settings: Settings, family: Family) -> Family:
    activation = settings.text("pooler_hidden_act", "gelu")
    if is_ranker(settings) and activation not in ("gelu", "tanh", "relu"):
        raise settings.unsupported("pooler_hidden_act", "gelu, tanh and relu")
    return _classifier(activation, {"cls": "pooler.dense", "cls.output": "classifier"})(settings, family)


def _gte(settings: Settings) -> Metadata:
    """GTE, by the settings of transformers and by those of its own code, where it is called `new`."""
    settings.must_be("position_embedding_type", "rope", "rope")
    settings.must_be("layer_norm_type", "layer_norm", "layer_norm")
    settings.must_be("logn_attention_scale", False, False)
    settings.mark_read(("pack_qkv", "unpad_inputs", "use_memory_efficient_attention", "logn_attention_clip1"))
    found = gelu_metadata(settings)
    scaling = Settings(settings.record("rope_scaling"), {})
    if scaling.get("type", scaling.get("rope_type")) != "ntk":
        return found
    # The base grows, and all frequencies are divided by the same (arXiv 2309.00071, section 2, of a fixed factor).
    factor = scaling.number("factor", low=1.0)
    scaling.must_be("mixed_b", None, None)
    head_dim = settings.integer("hidden_size") // settings.integer("num_attention_heads", low=1)
    found["rope.freq_base"] = settings.number("rope_theta", 10000.0) * factor
    return {**found, "rope.scaling.type": "linear", "rope.scaling.factor": factor ** (2.0 / head_dim)}


_ALBERT_LAYER: Mapping[str, str] = {
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.dense",
    "attn_output_norm": "attention.LayerNorm",
    "ffn_up": "ffn",
    "ffn_down": "ffn_output",
    "layer_output_norm": "full_layer_layer_norm",
}
_UNTYPED_ENDS = {name: source for name, source in BERT_ENDS.items() if name != "token_types"}
_DENSE_AND_OUT = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
_GTE_BLOCKS: dict[str, Source] = {
    "attn_qkv": "attention.qkv_proj",
    "attn_output": "attention.o_proj",
    "attn_output_norm": "attn_ln",
    "ffn_up": Part("mlp.up_gate_proj", FIRST_HALF),
    "ffn_gate": Part("mlp.up_gate_proj", SECOND_HALF),
    "ffn_down": "mlp.down_proj",
    "layer_output_norm": "mlp_ln",
}
_GTE = replace(
    BERT,
    architecture="gte",
    blocks=_GTE_BLOCKS,
    outside={name: source for name, source in BERT_ENDS.items() if name != "position_embd"},
    unused=_NEEDLESS,
    defaults={**BERT.defaults, "max_position_embeddings": 8192, "rope_theta": 160000.0},
    metadata=_gte,
    variant=with_classifier({"cls.output": "classifier"}, {"cls": "pooler.dense"}),
)

BERT_KIN: dict[str, Family] = {
    "mpnet": replace(
        BERT,
        architecture="mpnet",
        blocks={
            **BERT_BLOCKS,
            **{f"attn_{letter}": f"attention.attn.{letter}" for letter in "qkv"},
            "attn_output": "attention.attn.o",
            "attn_output_norm": "attention.LayerNorm",
        },
        outside={**_UNTYPED_ENDS, "attn_rel_b": "encoder.relative_attention_bias"},
        unused=_NEEDLESS,
        defaults={**BERT.defaults, "vocab_size": 30527},
        metadata=_mpnet,
        changes=_mpnet_changes,
        variant=with_classifier(_DENSE_AND_OUT),
    ),
    "distilbert": replace(
        BERT,
        blocks={
            **{f"attn_{letter}": f"attention.{letter}_lin" for letter in "qkv"},
            "attn_output": "attention.out_lin",
            "attn_output_norm": "sa_layer_norm",
            "ffn_up": "ffn.lin1",
            "ffn_down": "ffn.lin2",
            "layer_output_norm": "output_layer_norm",
        },
        outside=_UNTYPED_ENDS,
        layers="transformer.layer",
        unused=_NEEDLESS,
        aliases={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        seen="sinusoidal_pos_embds",  # the table is in the file either way
        variant=_classifier("relu", {"cls": "pre_classifier", "cls.output": "classifier"}),
    ),
    "electra": replace(
        BERT,
        outside={**BERT_ENDS, "token_embd_proj": "embeddings_project"},
        unused=_NEEDLESS,
        seen=_NARROW_SEEN,
        variant=_classifier("gelu", _DENSE_AND_OUT),
    ),
    "albert": replace(
        BERT,
        blocks={},
        outside={**BERT_ENDS, "token_embd_proj": "encoder.embedding_hidden_mapping_in"},
        unused=_NEEDLESS,
        defaults={**BERT.defaults, "vocab_size": 30000, "hidden_act": "gelu_new"},
        seen=_NARROW_SEEN,
        variant=_albert_variant,
    ),
    "deberta-v2": replace(
        BERT,
        architecture="deberta-v2",
        blocks={
            **BERT_BLOCKS,
            "attn_q": "attention.self.query_proj",
            "attn_k": "attention.self.key_proj",
            "attn_v": "attention.self.value_proj",
            "attn_pos_k": "attention.self.pos_key_proj",
            "attn_pos_q": "attention.self.pos_query_proj",
        },
        outside={**BERT_ENDS, "rel_embd": "encoder.rel_embeddings", "rel_embd_norm": "encoder.LayerNorm"},
        inner=tuple(
            f"{name}.{leaf}"
            for name in ("attn_pos_k", "attn_pos_q", "rel_embd", "rel_embd_norm")
            for leaf in ("weight", "bias")
        ),
        unused=_NEEDLESS,
        defaults={**BERT.defaults, "layer_norm_eps": 1e-7, "vocab_size": 128100},
        metadata=_deberta,
        derived=_deberta_derived,
        variant=_deberta_variant,
    ),
    "gte": _GTE,
    # The same by its own code.
    "new": replace(_GTE, defaults={**BERT.defaults, "max_position_embeddings": 8192, "rope_theta": 10000.0}),
}

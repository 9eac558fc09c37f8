"""Kin of BERT that store or compute something otherwise: MPNet, DistilBERT, ELECTRA, ALBERT, DeBERTa, GTE."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from localinfer.models.checkpoint.changes import FIRST_HALF, SECOND_HALF, Change, Derived, Rows
from localinfer.models.checkpoint.encoder_families import (
    BERT,
    BERT_BLOCKS,
    BERT_ENDS,
    NO_ROPE,
    Variant,
    gelu_metadata,
    is_ranker,
    with_classifier,
)
from localinfer.models.checkpoint.family import Family, Metadata, Part, Source
from localinfer.models.checkpoint.settings import Settings
from localinfer.models.decoder.block_config import MAX_CONTEXT, MAX_LAYERS
from localinfer.types import FloatArray

_PRETRAINED_HEADS = r"(lm_head|cls|vocab_.*|generator_.*|discriminator_.*|(lm|mask)_predictions|predictions|sop_.*)\..*"
_NEEDLESS = rf"(.*\.)?(embeddings\.position_ids|pooler\.(dense\.)?(weight|bias))|{_PRETRAINED_HEADS}"
_MPNET_OFFSET = 2
"""Positions of MPNet count from behind those of padding, whatever its id."""


def _with_activation(name: str, variant: Variant) -> Variant:
    """A classifier whose first matrix has another activation than tanh."""

    def changed(settings: Settings, family: Family) -> Family:
        found = variant(settings, family)
        if not is_ranker(settings):
            return found
        plain = found.metadata
        return replace(found, metadata=lambda settings: {**plain(settings), "classifier.activation": name})

    return changed


def _plain(settings: Settings) -> Metadata:
    settings.must_be("position_embedding_type", "absolute", "absolute")
    return {**gelu_metadata(settings), **NO_ROPE}


def _mpnet(settings: Settings) -> Metadata:
    # As many as its class computes with, whatever config.json says.
    settings.must_be("relative_attention_num_buckets", 32, 32)
    length = settings.integer("max_position_embeddings", low=_MPNET_OFFSET + 1)
    return {**_plain(settings), "context_length": length - _MPNET_OFFSET, "attention.relative_buckets_count": 32}


def _mpnet_changes(settings: Settings) -> dict[str, Change]:
    return {"position_embd.weight": Rows(lambda num_rows: np.arange(_MPNET_OFFSET, num_rows))}


def _distilbert(settings: Settings) -> Metadata:
    settings.mark_read(("sinusoidal_pos_embds",))  # the table is in the file either way
    return _plain(settings)


def _narrow(settings: Settings) -> Metadata:
    """ELECTRA and ALBERT, whose tensors say how wide the embedding is; `summary` is of a head for multiple choice."""
    settings.mark_read(("embedding_size", "summary_activation", "summary_type"))
    return _plain(settings)


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
    """What is multiplied by vectors of distances: queries (c2p), keys (p2c)."""
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
    heads = {"cls": "pooler.dense", "cls.output": "classifier"}
    return _with_activation(activation, with_classifier(heads))(settings, family)


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
        metadata=_distilbert,
        variant=_with_activation("relu", with_classifier({"cls": "pre_classifier", "cls.output": "classifier"})),
    ),
    "electra": replace(
        BERT,
        outside={**BERT_ENDS, "token_embd_proj": "embeddings_project"},
        unused=_NEEDLESS,
        metadata=_narrow,
        variant=_with_activation("gelu", with_classifier(_DENSE_AND_OUT)),
    ),
    "albert": replace(
        BERT,
        blocks={},
        outside={**BERT_ENDS, "token_embd_proj": "encoder.embedding_hidden_mapping_in"},
        unused=_NEEDLESS,
        defaults={**BERT.defaults, "vocab_size": 30000, "hidden_act": "gelu_new"},
        metadata=_narrow,
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

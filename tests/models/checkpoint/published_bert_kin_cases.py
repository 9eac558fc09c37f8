"""Cases of `published_encoders.py` that are kin of BERT: relative positions, narrow embeddings, shared layers."""

from typing import Any

from tests.models.checkpoint.published_case import Case

_PLAIN = ("num_key_value_heads", "tie_word_embeddings")
_LABEL: dict[str, Any] = {"num_labels": 1}
_DISTIL = {"dim": 64, "hidden_dim": 88, "n_layers": 4, "n_heads": 4, "sinusoidal_pos_embds": True}
_NOT_DISTIL = (*_PLAIN, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "position_buckets": 8,
    "max_relative_positions": -1,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0,
    "max_position_embeddings": 40,
}
_OWN_KEYS = {"position_buckets": -1, "share_att_key": False, "norm_rel_ebd": "none", "max_relative_positions": 6}

BERT_KIN_CASES: dict[str, Case] = {
    "mpnet": Case("MPNetConfig", {"pad_token_id": 1}, "MPNetModel", _PLAIN),
    "mpnet-ranker": Case("MPNetConfig", {"pad_token_id": 1, **_LABEL}, "MPNetForSequenceClassification", _PLAIN),
    "distilbert": Case("DistilBertConfig", _DISTIL, "DistilBertModel", _NOT_DISTIL),
    "distilbert-ranker": Case(
        "DistilBertConfig", {**_DISTIL, **_LABEL}, "DistilBertForSequenceClassification", _NOT_DISTIL
    ),
    "electra": Case("ElectraConfig", {"embedding_size": 48}, "ElectraModel", _PLAIN),
    "electra-ranker": Case(
        "ElectraConfig", {"embedding_size": 64, **_LABEL}, "ElectraForSequenceClassification", _PLAIN
    ),
    "albert": Case("AlbertConfig", {"embedding_size": 32, "num_hidden_groups": 2}, "AlbertModel", _PLAIN),
    "albert-ranker": Case("AlbertConfig", {"embedding_size": 64, **_LABEL}, "AlbertForSequenceClassification", _PLAIN),
    "deberta-v2": Case("DebertaV2Config", _DEBERTA, "DebertaV2Model", _PLAIN),
    "deberta-v2-own-keys": Case(
        "DebertaV2Config",
        {**_DEBERTA, **_OWN_KEYS, "position_biased_input": True, "type_vocab_size": 2},
        "DebertaV2Model",
        _PLAIN,
    ),
    "deberta-v2-queries": Case("DebertaV2Config", {**_DEBERTA, "pos_att_type": "c2p"}, "DebertaV2Model", _PLAIN),
    "deberta-v2-ranker": Case(
        "DebertaV2Config",
        {**_DEBERTA, "num_labels": 3},
        "DebertaV2ForSequenceClassification",
        _PLAIN,
    ),
    "embedding-gemma2": Case(
        "EmbeddingGemma2TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 3,
            "sliding_window": 4,
            "hidden_size_per_layer_input": 8,
            "embedding_dim": 48,
        },
        "EmbeddingGemma2TextModel",
        _PLAIN[1:],
    ),
    "gte": Case("GteConfig", model="GteModel", without=_PLAIN),
    "gte-ranker": Case("GteConfig", {**_LABEL, "type_vocab_size": 0}, "GteForSequenceClassification", _PLAIN),
}

BERT_DECODER_CASES: dict[str, Case] = {
    "modernbert-decoder": Case("ModernBertDecoderConfig", {"local_attention": 16}, without=_PLAIN[:1]),
    "modernbert-decoder-tied": Case(
        "ModernBertDecoderConfig",
        {"local_attention": 16, "tie_word_embeddings": True, "num_hidden_layers": 5},
        without=_PLAIN[:1],
    ),
}
"""Decoders of their blocks, for `published_cases.py`."""

"""What published encoders' config.json says becomes GGUF's metadata; what does not run is refused by its name."""

from typing import Any

import pytest

from localinfer.errors import ModelFileError
from localinfer.models.checkpoint.hyperparameters import read_hyperparameters

_BERT: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "position_embedding_type": "absolute",
    "use_cache": True,
}
BERT = {
    **_BERT,
    "architectures": ["BertModel"],
    "gradient_checkpointing": False,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
RANKER = {
    **_BERT,
    "architectures": ["XLMRobertaForSequenceClassification"],
    "classifier_dropout": None,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "max_position_embeddings": 8194,
    "model_type": "xlm-roberta",
    "output_past": True,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 250002,
}
NOMIC = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "vocab_size": 30528,
}
MODERN = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 4,
    "position_embedding_type": "absolute",
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "vocab_size": 50368,
}


def test_settings_of_published_files_are_read() -> None:
    for config, wanted in (
        (BERT, {"bert.context_length": 512, "bert.attention.causal": False, "bert.pooling_type": None}),
        (RANKER, {"bert.context_length": 8192, "bert.pooling_type": 4, "bert.classifier.output_labels": ["LABEL_0"]}),
        (
            NOMIC,
            {
                "nomic-bert.context_length": 2048,
                "nomic-bert.rope.freq_base": 1000.0,
                "nomic-bert.feed_forward_length": 3072,
                "nomic-bert.attention.layer_norm_epsilon": 1e-12,
            },
        ),
        (
            MODERN,
            {
                "modern-bert.rope.freq_base": 160000.0,
                "modern-bert.rope.freq_base_swa": 10000.0,
                "modern-bert.attention.sliding_window": 128,
                "modern-bert.attention.sliding_window_pattern": [0, 1, 1, 0],
                "modern-bert.classifier.pooling_type": None,
            },
        ),
    ):
        found = read_hyperparameters(dict(config), "x")
        assert found.unknown_settings == ()
        assert {key: found.metadata.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (BERT, {"is_decoder": True}, "is_decoder"),
        (BERT, {"hidden_act": "mish"}, "hidden_act"),
        (RANKER, {"lora_adaptations": ["retrieval.query"]}, "lora_adaptations"),
        (RANKER, {"id2label": {"0": 3}}, "id2label"),
        (RANKER, {"max_position_embeddings": 2}, "max_position_embeddings"),
        (NOMIC, {"num_experts": 8}, "num_experts"),
        (NOMIC, {"prenorm": True}, "prenorm"),
        (MODERN, {"classifier_pooling": "max", "architectures": ["ModernBertForSequenceClassification"]}, "_pooling"),
    ],
)
def test_settings_that_do_not_run_are_named(config: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        read_hyperparameters({**config, **changes}, "x")

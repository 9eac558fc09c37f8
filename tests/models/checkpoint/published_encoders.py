"""Small encoders and rerankers of the published implementations, as `published_models.py` has decoders.

`tests/data/checkpoint/encoders` has of each what transformers saves, and the hidden states of ROWS or the scores
that it computes. `python -m tests.models.checkpoint.make_published_encoders` writes the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.checkpoint import published_models
from tests.models.checkpoint.published_bert_kin_cases import BERT_KIN_CASES
from tests.models.checkpoint.published_case import SW, Case
from tests.models.checkpoint.published_models import weights
from tests.support.checkpoint_files import write_folder

DATA = Path(__file__).parents[2] / "data" / "checkpoint" / "encoders"
TOKEN_IDS = np.random.default_rng(0).integers(3, 90, 24).astype(np.int32)
ROWS = np.arange(2, 24, 7)
NUM_FIRST = 11
"""How many of the ids are the first text of a pair, for classifiers with several token types."""

_PLAIN = ("num_key_value_heads", "tie_word_embeddings")
_ONE_LABEL = {"num_labels": 1}

CASES: dict[str, Case] = {
    "bert": Case("BertConfig", model="BertModel", without=_PLAIN),
    "bert-ranker": Case("BertConfig", _ONE_LABEL, "BertForSequenceClassification", _PLAIN),
    "roberta": Case("RobertaConfig", {"pad_token_id": 1}, "RobertaModel", _PLAIN),
    "xlm-roberta-ranker": Case(
        "XLMRobertaConfig",
        {"pad_token_id": 1, "type_vocab_size": 1, "num_labels": 3},
        "XLMRobertaForSequenceClassification",
        _PLAIN,
    ),
    "modernbert": Case("ModernBertConfig", {"local_attention": 8}, "ModernBertModel", _PLAIN),
    "modernbert-silu": Case("ModernBertConfig", {"hidden_activation": "silu"}, "ModernBertModel", _PLAIN),
    "modernbert-ranker": Case(
        "ModernBertConfig",
        {"local_attention": 8, "classifier_pooling": "mean", **_ONE_LABEL},
        "ModernBertForSequenceClassification",
        _PLAIN,
    ),
    "nomic_bert": Case("NomicBertConfig", model="NomicBertModel", without=_PLAIN),
    "jina_embeddings_v3": Case("JinaEmbeddingsV3Config", {"lora_adaptations": None}, "JinaEmbeddingsV3Model", _PLAIN),
    "eurobert": Case("EuroBertConfig", model="EuroBertModel"),
    "gemma-embedding": Case(
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 7,
            "use_bidirectional_attention": True,
            **SW,
        },
        "Gemma3TextModel",
    ),
    **BERT_KIN_CASES,
}


def encoder_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """Weights by name, around 1 for those of norms and for factors on whole layers."""
    found = weights(shapes)
    for name in found:
        if name.endswith(("LayerNorm.weight", "_ln.weight", "layer_scalar")):
            found[name] = found[name] + np.float32(1)
    return found


def read_cases() -> dict[str, dict[str, Any]]:
    """By name: `config` and `shapes`."""
    return published_models.read_cases(DATA)


def read_result(name: str) -> NDArray[np.float32]:
    """float32[rows, width] hidden states of ROWS, or float32[labels] scores."""
    return published_models.read_logits(name, DATA)


def write_case(folder: Path, case: Mapping[str, Any]) -> Path:
    """Write a folder of one case; returns it."""
    return write_folder(folder, encoder_weights(case["shapes"]), case["config"])

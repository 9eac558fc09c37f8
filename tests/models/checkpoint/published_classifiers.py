"""Small classifiers over decoders of the published implementations: the decoders of `published_cases.py`.

`tests/data/checkpoint/classifiers` has of each what transformers saves, and the scores of TOKEN_IDS that it computes.
`python -m tests.models.checkpoint.make_published_classifiers` writes the files.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.checkpoint import published_models
from tests.models.checkpoint.published_case import Case
from tests.models.checkpoint.published_cases import CASES as DECODERS

DATA = Path(__file__).parents[2] / "data" / "checkpoint" / "classifiers"

_NAMES = (
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3 phi phi3 phimoe smollm3 glm glm4 gpt2"
    " gpt_neox gpt_bigcode falcon mpt bloom stablelm starcoder2 nemotron deepseek_v2-lite deepseek_v3 exaone4"
    " arcee seed_oss hunyuan_v1_dense gpt_oss jamba qwen3_next minicpm3"
).split()


def _classifier(case: Case, num_labels: int) -> Case:
    kind = case.config.removesuffix("Config")
    return replace(case, changes={**case.changes, "num_labels": num_labels}, model=f"{kind}ForSequenceClassification")


CASES: dict[str, Case] = {
    name: _classifier(DECODERS[name], 1 + index % 3) for index, name in enumerate(_NAMES) if name in DECODERS
}


def read_cases() -> dict[str, dict[str, Any]]:
    """By name: `config` and `shapes`."""
    return published_models.read_cases(DATA)


def read_scores(name: str) -> NDArray[np.float32]:
    """float32[labels]."""
    return published_models.read_logits(name, DATA)

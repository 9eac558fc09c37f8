"""Writes tests/data/checkpoint/encoders; needs transformers and torch. Names of cases may follow; others stay."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.checkpoint.published_case import Case
from tests.models.checkpoint.published_encoders import (
    CASES,
    DATA,
    NUM_FIRST,
    ROWS,
    TOKEN_IDS,
    encoder_weights,
)
from tests.models.checkpoint.published_models import save_case
from tests.support.checkpoint_files import safetensors_bytes


def compute(case: Case, folder: Path) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Save a model, give it other weights, compute; returns config.json and shapes, and hidden states or scores."""
    import safetensors
    import torch
    import transformers

    kind = getattr(transformers, case.model)
    options: dict[str, Any] = {"attn_implementation": "eager"}
    kind._from_config(getattr(transformers, case.config)(**case.settings()), **options).float().save_pretrained(folder)
    path = folder / "model.safetensors"
    with safetensors.safe_open(path, "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    path.write_bytes(safetensors_bytes(encoder_weights(shapes)))
    model = kind.from_pretrained(folder, dtype=torch.float32, **options).eval()
    ranks = "SequenceClassification" in case.model
    has_types = ranks and getattr(model.config, "type_vocab_size", 1) > 1
    with torch.no_grad():
        types = {"token_type_ids": (torch.arange(len(TOKEN_IDS)) >= NUM_FIRST).long()[None]} if has_types else {}
        found = model(torch.tensor(TOKEN_IDS.astype(np.int64))[None], **types)
    result = found.logits[0] if ranks else found.last_hidden_state[0][torch.tensor(ROWS)]
    saved = json.loads((folder / "config.json").read_text())
    for key in ("transformers_version", "dtype"):
        saved.pop(key, None)
    return {"config": saved, "shapes": shapes}, result.float().numpy()


def main(names: list[str]) -> None:
    """Compute the cases of these names, or all."""
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            case, result = compute(CASES[name], Path(folder))
        save_case(DATA, name, case, result)
        print(name, result.shape, float(np.abs(result).max()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

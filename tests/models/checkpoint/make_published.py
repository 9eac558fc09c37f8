"""Writes tests/data/checkpoint/published; needs transformers and torch. Names of cases may follow; others stay."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.checkpoint.published_case import Case
from tests.models.checkpoint.published_cases import CASES
from tests.models.checkpoint.published_models import DATA, ROWS, TOKEN_IDS, save_case, weights
from tests.support.checkpoint_files import safetensors_bytes


def compute(case: Case, folder: Path) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Save a model, give it other weights, compute; returns config.json and shapes, and float32[T, vocab_size]."""
    import safetensors
    import torch
    import transformers

    config = getattr(transformers, case.config)(**case.settings())
    options: dict[str, Any] = {"attn_implementation": "eager"}
    if case.model:
        kind = getattr(transformers, case.model)
        model = kind._from_config(config, **options)
    else:
        kind = transformers.AutoModelForCausalLM
        model = kind.from_config(config, **options)
    model.float().save_pretrained(folder)
    path = folder / "model.safetensors"
    with safetensors.safe_open(path, "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        computed = {name: file.get_tensor(name) for name in shapes if name.rpartition(".")[2] in case.computed}
    path.write_bytes(safetensors_bytes(weights(shapes) | computed))
    model = kind.from_pretrained(folder, dtype=torch.float32, **options).eval()
    # A second thread would only spin, beside the other processes of a run.
    torch.set_num_threads(1)
    with torch.no_grad():
        logits = model(torch.tensor(TOKEN_IDS.astype(np.int64))[None]).logits[0].float().numpy()
    saved = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "transformers_version", "dtype"):
        saved.pop(key, None)
    return {"config": saved, "shapes": shapes}, logits


def main(names: list[str]) -> None:
    """Compute the cases of these names, or all."""
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            case, logits = compute(CASES[name], Path(folder))
        save_case(DATA, name, case, logits[ROWS])
        print(name, float(np.abs(logits).max()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Writes tests/data/checkpoint/setting_effects.npz by transformers. Names of cases may follow; others stay."""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.models.checkpoint.published_case import Case
from tests.models.checkpoint.published_cases import CASES
from tests.models.checkpoint.published_models import TOKEN_IDS, read_cases, weights
from tests.models.checkpoint.setting_effects import CHANGES, EFFECTS, Effect, changed, read_effects, save_effects
from tests.support.checkpoint_files import safetensors_bytes


def compute(case: Case, config: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], NDArray[np.float32]]:
    """Shapes of the tensors of a model with this config.json, and float32[vocab_size] of the last token."""
    import safetensors
    import torch
    import transformers

    options: dict[str, Any] = {"attn_implementation": "eager"}
    kind = getattr(transformers, case.model or "AutoModelForCausalLM")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        settings = getattr(transformers, case.config).from_pretrained(folder)
        model = kind._from_config(settings, **options) if case.model else kind.from_config(settings, **options)
        model.float().save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        path = folder / "model.safetensors"
        with safetensors.safe_open(path, "np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        path.write_bytes(safetensors_bytes(weights(shapes)))
        # Not by `from_pretrained` alone, which would read the architecture's name.
        model = kind.from_pretrained(folder, config=settings, dtype=torch.float32, **options).eval()
        with torch.no_grad():
            logits = model(torch.tensor(TOKEN_IDS.astype(np.int64))[None]).logits[0, -1]
    return shapes, logits.float().numpy()


def effect(case: Case, config: Mapping[str, Any], base: tuple[dict[str, Any], NDArray[np.float32]]) -> Effect:
    """What a changed config.json does."""
    try:
        shapes, logits = compute(case, config)
    except Exception:
        return Effect("refused", base[0], np.zeros(0, np.float32))
    is_same = shapes == base[0] and np.abs(logits - base[1]).max() <= 1e-5 * np.abs(base[1]).max()
    return Effect("ignored" if is_same else "read", shapes, logits)


def main(names: list[str]) -> None:
    """Compute the effects of the cases of these names, or of one case of every type of model."""
    saved = read_cases()
    shapes = {name: {key: tuple(shape) for key, shape in case["shapes"].items()} for name, case in saved.items()}
    found = {name: dict(of_case) for name, of_case in read_effects(shapes).items()} if EFFECTS.exists() else {}
    of_type: dict[str, str] = {}
    for name in sorted(saved, key=len):
        of_type.setdefault(saved[name]["config"]["model_type"], name)
    for name in names or sorted(of_type.values()):
        config = saved[name]["config"]
        base = compute(CASES[name], config)
        effects = {key: effect(CASES[name], new, base) for key in CHANGES if (new := changed(config, key)) is not None}
        found[name] = effects
        shapes[name] = base[0]
        print(name, {key: effect.outcome for key, effect in effects.items()}, flush=True)
    save_effects(found, shapes)


if __name__ == "__main__":
    main(sys.argv[1:])

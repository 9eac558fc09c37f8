"""Settings of config.json that many families have: every family obeys, ignores or refuses them as its class does."""

import json
from pathlib import Path

import pytest

from localinfer.errors import LocalinferError
from localinfer.types import FloatArray
from tests.models.checkpoint.checkpoint_oracle import oracle_logits
from tests.models.checkpoint.published_models import TOKEN_IDS, normalized_error, read_cases, weights
from tests.models.checkpoint.setting_effects import changed, read_effects
from tests.support.checkpoint_files import write_folder
from tests.support.samples import by_turns

CASES = read_cases()
EFFECTS = read_effects({name: case["shapes"] for name, case in CASES.items()})
MAY_BE_REFUSED = ("hidden_act", "layer_types", "head_dim")
"""Other activations, windows in families that have none, and sizes of heads that their GGUF architecture fixes."""
NEWER_THAN_OLD_ROPE = {
    **dict.fromkeys(("cohere2_moe", "mellum"), ("rope_scaling linear", "rope_scaling yarn", "partial_rotary_factor")),
    **dict.fromkeys(("ministral3", "mistral4"), ("rope_theta",)),
}
"""What their classes do not read as older files have it, or replace by a rotation of their own; no file is so old."""


@pytest.mark.parametrize("case", EFFECTS)
def test_changed_settings_do_what_they_do_in_the_published_class(case: str, tmp_path: Path) -> None:
    wrong: dict[str, str] = {}
    folders: dict[str, Path] = {}
    # Settings that a family ignores leave a file as it is.
    known: dict[tuple[str, bytes], FloatArray] = {}
    turn = list(EFFECTS).index(case)
    for name, effect in by_turns(list(EFFECTS[case].items()), turn, 4):
        config = changed(CASES[case]["config"], name)
        if effect.outcome == "refused" or config is None or name in NEWER_THAN_OLD_ROPE.get(case, ()):
            continue
        shapes = repr(effect.shapes)
        if shapes not in folders:
            folders[shapes] = write_folder(tmp_path / name.replace(" ", "-"), weights(effect.shapes), config)
        folder = folders[shapes]
        (folder / "config.json").write_text(json.dumps(config))
        try:
            error = normalized_error(oracle_logits(folder, TOKEN_IDS, known)[-1], effect.logits)
        except LocalinferError as refusal:
            # Windows have no scaling of their own here, and a wrapper's own word on its head counts.
            is_known = "sliding windows without a scaling" in str(refusal) or "tie_word_embeddings" in str(refusal)
            if name not in MAY_BE_REFUSED and not is_known:
                wrong[name] = str(refusal)
        else:
            # The stored logits are rounded to float16.
            if not error <= 2e-6:
                wrong[name] = f"{effect.outcome} by the class, error {error:.2g}"
    assert wrong == {}

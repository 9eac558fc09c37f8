"""Decoders of every family on prompts with pictures and sounds, their embeddings given: logits are llama.cpp's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.engine.engine import Engine
from localinfer.engine.media import MediaRun, join_pieces, media_ids
from localinfer.models.load.loader import load_model
from localinfer.types import TokenIds
from tests.models.media import fixtures

NAMES: dict[str, list[str]] = {}
"""Families by the text model that they share, under the name of the first."""
for _name, _family in fixtures.skeletons().items():
    _text = json.dumps([_family["text"], len(_family["specials"])])
    NAMES.setdefault(_text, []).append(_name)
GROUPS = {names[0]: names for names in NAMES.values()}
SPOILED = {"pixtral.130x100", "pixtral.pair", "qwen3.5.333x217"}
"""The peer's own logits are not finite there."""


def prompt_of(key: str) -> tuple[TokenIds, list[MediaRun]]:
    """Ids and runs of a case, with the peer's embeddings and positions."""
    answers = fixtures.answers()
    kinds, counts, taken, tokens, embeddings, positions = (
        answers[f"{key}.{field}"] for field in ("kinds", "counts", "n_pos", "tokens", "embeddings", "positions")
    )
    pieces: list[Any] = []
    row = word = embedded = 0
    for kind, count, num_positions in zip(kinds, counts, taken, strict=True):
        if kind == 0:
            pieces.append(tokens[word : word + count].tolist())
            word += count
        else:
            rows = np.ascontiguousarray(embeddings[embedded : embedded + count])
            embedded += count
            across = positions[row : row + count] - positions[row]
            has_grid = (across[:, 0] == 0).all() and count > 1
            grid = (int(across[:, 1].max()) + 1, int(across[:, 2].max()) + 1) if has_grid else None
            sees_itself = bool(kind == 1) and key.startswith("gemma")
            ids = media_ids(b"the peer's", rows.tobytes(), int(count))
            pieces.append(MediaRun(ids, lambda check, rows=rows: rows, grid, int(num_positions), sees_itself))
        row += count
    return join_pieces(pieces)


@pytest.fixture(scope="module", params=list(GROUPS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Engine]]:
    """The text model of some families, and the name of the first."""
    name = request.param
    family = fixtures.skeletons()[name]
    path = Path(tmp_path_factory.mktemp("decoder")) / "model.gguf"
    fixtures.builder().write(family["text"], path, fixtures.SEED, family["specials"])
    model = load_model(path, threads=1, kv_type="f32", takes_media=True, verify=False, batch_rows=192)
    found = Engine(model)
    yield name, found
    found.close()


@pytest.mark.usefixtures("shared")
def test_logits_of_prompts_with_pictures_and_sounds_are_llama_cpps(engine: tuple[str, Engine]) -> None:
    first, model = engine
    answers = fixtures.answers()
    asked = 0
    for name in GROUPS[first]:
        fields = (key[: -len(".logits")] for key in answers.files if key.endswith(".logits"))
        for key in (field for field in fields if field.rpartition(".")[0] == name and field not in SPOILED):
            wanted = answers[f"{key}.logits"]
            ids, runs = prompt_of(key)
            found = model.logits(ids, runs)[-len(wanted) :]
            error = np.sum((found - wanted) ** 2) / np.sum(wanted**2)
            # The peer takes GELU from a table of half precision, and leaves Qwen2-VL's epsilon out.
            assert error < 2e-7, (key, error)
            asked += 1
    assert asked > 2

"""Small models of the published implementations: their settings, and weights that follow from the tensors' names.

`tests/data/checkpoint/published` has a file of each: what transformers saves, as config.json and shapes of tensors, and
the logits that it computes from such weights. `python -m tests.models.checkpoint.make_published` writes the files.
"""

import json
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checkpoint.families import FAMILIES
from tests.models.arch_models import skeletons
from tests.support.checkpoint_files import write_folder

DATA = Path(__file__).parents[2] / "data" / "checkpoint" / "published"
TOKEN_IDS = np.random.default_rng(0).integers(3, 90, 24).astype(np.int32)
ROWS = np.arange(2, 24, 3)
"""Whose logits the file has."""


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """Random weights for tensors of a checkpoint, the same for the same name: such that all parts of a model matter."""
    return {name: _weight(name, tuple(shape)) for name, shape in shapes.items()}


@cache
def _weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    constants = {"eps": -1e-6, "beta": 0.5}
    leaf = name.rpartition(".")[2]
    if leaf in constants:
        return np.full(shape, constants[leaf], np.float32)
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if leaf == "A_log":
        return np.log(1.0 + 4.0 * np.abs(values)).astype(np.float32)
    if len(shape) < 2:
        is_norm = "norm" in name or ".ln_" in name
        values = values * 0.2 + (is_norm and leaf == "weight")
    elif "conv" in name:
        values *= 0.5
    else:
        values *= 1.2 / shape[-1] ** 0.5
    made = values.astype(np.float32)
    made.setflags(write=False)
    return made


def read_cases(folder: Path = DATA) -> dict[str, dict[str, Any]]:
    """By name: `config` and `shapes`."""
    found = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            found[path.stem] = json.loads(bytes(file["case"]))
    return found


def cases_of_folders_alone() -> list[str]:
    """Names of the cases of architectures of which `architectures/skeletons.json.xz` has no file."""
    known = {str(skeleton["arch"]) for skeleton in skeletons().values()}
    types = {name: str(case["config"]["model_type"]) for name, case in read_cases().items()}
    return [name for name, kind in types.items() if FAMILIES[kind].architecture not in known]


def read_logits(name: str, folder: Path = DATA) -> NDArray[np.float32]:
    """float32[rows, vocab_size] of ROWS, or the result of another kind that a folder has by this name."""
    with np.load(folder / f"{name}.npz") as file:
        found: NDArray[np.float32] = file["result"]
    return found


def save_case(folder: Path, name: str, case: Mapping[str, Any], result: NDArray[np.float32]) -> None:
    """Write the file of one case: `config` and `shapes`, and what was computed."""
    folder.mkdir(exist_ok=True)
    text = json.dumps(case).encode()
    np.savez_compressed(folder / f"{name}.npz", case=np.frombuffer(text, np.uint8), result=result)


def write_case(folder: Path, case: Mapping[str, Any]) -> Path:
    """Write a folder of one case; returns it."""
    return write_folder(folder, weights(case["shapes"]), case["config"])


def normalized_error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Squared error over squared values."""
    return float(((found - wanted) ** 2).sum() / (wanted**2).sum())

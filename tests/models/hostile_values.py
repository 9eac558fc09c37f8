"""Loads models with one value of their metadata replaced by nonsense, in a process of little memory.

By hand, for every key of every fixture: `python -m tests.models.hostile_values WORK_FOLDER [NAME ...]`.
"""

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

MOST_BYTES = 4 << 30
VALUES: dict[str, Any] = {
    **{f"int {value}": value for value in (0, 1, -1, 3, 7, 1 << 15, 1 << 22, 1 << 31, 1 << 62, -(1 << 63), 10**400)},
    **{f"float {value}": value for value in (0.0, -1.0, 0.5, 1e-300, 1e30, 1e308, math.nan, math.inf, -math.inf)},
    **{f"text {value!a}": value for value in ("", "7", "yarn", "\ud800", "a" * 100_000)},
    "true": True,
    "false": False,
    "null": None,
    "list": [],
    "list 0": [0],
    "list -1": [-1] * 64,
    "list nan": [math.nan] * 64,
    "list text": ["a"] * 64,
    "list null": [None] * 64,
    "list list": [[1]] * 64,
    "list large": [1 << 22] * 64,
    "long list": [1] * 100_000,
    "object": {"a": 1},
}
ARRAYS: dict[str, Any] = {
    "array 0": np.zeros(64, np.uint32),
    "array -1": np.full(64, -1, np.int32),
    "array large": np.full(64, 1 << 22, np.int32),
    "array nan": np.full(64, np.nan, np.float32),
    "array true": np.ones(64, np.bool_),
}
ALL = {**VALUES, **ARRAYS}
_VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def metadata_keys(skeleton: dict[str, Any]) -> list[str]:
    """The keys of a fixture whose values describe the model, and those it lacks that are read."""
    from localinfer.models.decoder.metadata_keys import ARCHITECTURE_KEYS, READ_KEYS

    known = [*READ_KEYS, *(key for key, users in ARCHITECTURE_KEYS.items() if skeleton["arch"] in users)]
    keys = {f"{skeleton['arch']}.{key}" for key in known} | {key for key, *_ in skeleton["kv"]}
    return sorted(keys - set(_VOCABULARY) | {"general.architecture"})


def load_in_child(cases: Iterable[tuple[Path, str, str]], timeout: float) -> dict[str, int]:
    """Load models, each with the value of that name under that key; how many came out how.

    Raises: AssertionError naming the first case that neither loaded nor ended in an error of localinfer's.
    """
    lines = "".join(json.dumps([str(path), key, value]) + "\n" for path, key, value in cases)
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "tests.models.hostile_values", "--child"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    answer = json.loads(done.stdout)
    assert not answer["failures"], answer
    counts: dict[str, int] = answer["counts"]
    return counts


def _load_all() -> None:
    import logging
    import resource

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    from unittest import mock

    from localinfer.errors import LocalinferError
    from localinfer.models.load import loader

    counts = {"loaded": 0, "refused": 0}
    failures = []
    for line in sys.stdin:
        path, key, name = json.loads(line)
        file = loader.open_model_file(path)
        file.metadata = {**file.metadata, key: ALL[name]}
        try:
            with mock.patch.object(loader, "open_model_file", lambda *_, found=file: found):
                loader.load_model(path, threads=1).close()
            counts["loaded"] += 1
        except LocalinferError:
            counts["refused"] += 1
        except BaseException as error:
            failures.append(f"{Path(path).name}: {key} = {name}: {type(error).__name__}: {str(error):.200}")
        file.close()
    print(json.dumps({"counts": counts, "failures": failures[:10]}))


def _main(work: str, *names: str) -> None:
    from localinfer.models.decoder.architectures import ARCHITECTURES
    from tests.models.arch_models import build_model, skeletons

    for name, skeleton in skeletons().items():
        if skeleton["arch"] in ARCHITECTURES and (not names or name in names):
            path = build_model(Path(work), name).path
            cases = [(path, key, value) for key in metadata_keys(skeleton) for value in ALL]
            random.Random(name).shuffle(cases)
            try:
                print(name, len(cases), load_in_child(cases, 3000), flush=True)
            except AssertionError as error:
                print(name, "FAILED", error, flush=True)
            path.unlink()


if __name__ == "__main__":
    _load_all() if sys.argv[1:] == ["--child"] else _main(*sys.argv[1:])

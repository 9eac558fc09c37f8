"""Writes tests/data/checkpoint/classifiers; needs transformers and torch. Names of cases may follow; others stay."""

import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.models.checkpoint.make_published_encoders import compute
from tests.models.checkpoint.published_classifiers import CASES, DATA
from tests.models.checkpoint.published_models import save_case


def main(names: list[str]) -> None:
    """Compute the cases of these names, or all."""
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            case, scores = compute(CASES[name], Path(folder))
        save_case(DATA, name, case, scores)
        print(name, scores.shape, float(np.abs(scores).max()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Weights that try encoders: of integers, products and sums, so that every platform and NumPy has the same bits."""

import json
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

COLUMNS = 768
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "ggml_encoders.json").read_text())
"""Made with ggml_quantize_chunk of libggml-base, compiled for plain x86-64, from `hard_weights` and `importances`."""


def uniform(count: int, seed: int) -> NDArray[np.float32]:
    """float32[count] in -0.5..0.5, from a hash of index and seed."""
    with np.errstate(over="ignore"):
        word = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (word >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)


@cache
def hard_weights() -> dict[str, NDArray[np.float32]]:
    """Matrices float32[rows, COLUMNS] by what is hard about them; rows are not a multiple of any vector."""
    rows = 21
    size = rows * COLUMNS
    plain = uniform(size, 1).reshape(rows, COLUMNS)
    cubes = plain * plain * plain
    holes = cubes.copy()
    holes[3] = 0
    holes[:, :300] = 0
    holes[5, 512:] = 0
    signed_holes = holes.copy()
    signed_holes[:, ::2] *= np.where(holes[:, ::2] == 0, np.float32(-1), np.float32(1))
    signed_holes[7] = -0.0
    signed_holes[8] = np.abs(holes[3])
    signed_holes[8, ::32] = -0.0
    signed_holes[9] = -0.0
    signed_holes[9, 33] = -2
    spikes = cubes.copy()
    spikes[:, 700] = 900
    spikes[2, ::32] = -7
    steps = np.rint(plain * 16)
    blocks = plain * np.repeat(2.0 ** np.rint(uniform(size // 32, 2) * 24), 32).reshape(rows, COLUMNS).astype(
        np.float32
    )
    return {
        "even": plain,
        "heavy tails": cubes,
        "zeros": holes,
        "signed zeros": signed_holes,
        "spikes": spikes,
        "ties": steps,
        "one sign": np.abs(cubes),
        "other sign": -np.abs(cubes),
        "constant": np.full((3, COLUMNS), 0.37, np.float32),
        "large": plain * np.float32(60000),
        "small": plain * np.float32(1e-6),
        "tiny": plain * np.float32(1e-12),
        "unequal blocks": blocks,
        "float16": cubes.astype(np.float16).astype(np.float32),
    }


@cache
def importances() -> dict[str, NDArray[np.float32] | None]:
    """Importance float32[COLUMNS]: none, unequal, and with columns that never matter."""
    # NumPy's power has other bits on other processors.
    distance = np.abs(uniform(COLUMNS, 3))
    spread = distance * distance * distance + np.float32(1e-6)
    with_zeros = np.where(uniform(COLUMNS, 4) > 0, spread, np.float32(0))
    with_zeros[64:128] = 0
    return {"none": None, "unequal": spread.astype(np.float32), "zeros": with_zeros.astype(np.float32)}

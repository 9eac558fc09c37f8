"""Microseconds to choose a token, by settings and by the shape of the logits; one thread.

    python -m tests.bench.bench_sampling [--vocab-size 150000] [--repetitions 200]

Every repetition has its own position, and so its own noise. "flat" is the worst case of top-p: nothing stands out, and
the nucleus is most of the vocabulary.
"""

import argparse
import statistics
import time

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.sampling.sampler import Sampler, SamplingParams, SamplingPlan

OPEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "seed": 1}

SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "defaults": {"seed": 1},
    "no filter": OPEN,
    "no filter, temperature 0.1": OPEN | {"temperature": 0.1},
    "no filter, temperature 10": OPEN | {"temperature": 10.0},
    "top-k 40": OPEN | {"top_k": 40},
    "top-k 1000": OPEN | {"top_k": 1000},
    "top-k 20000": OPEN | {"top_k": 20_000},
    "top-p 0.5": OPEN | {"top_p": 0.5},
    "top-p 0.95": OPEN | {"top_p": 0.95},
    "top-p 0.95, temperature 0.1": OPEN | {"top_p": 0.95, "temperature": 0.1},
    "top-p 0.95, temperature 10": OPEN | {"top_p": 0.95, "temperature": 10.0},
    "min-p 0.05": OPEN | {"min_p": 0.05},
    "min-p 0.000001": OPEN | {"min_p": 1e-6},
    "defaults, penalties over 64 tokens": {"seed": 1, "repetition_penalty": 1.1},
    "defaults, penalties over 30,000": {"seed": 1, "repetition_penalty": 1.1, "repetition_last_n": -1},
    "typical-p 0.9": OPEN | {"typical_p": 0.9},
    "top-n-sigma 1": OPEN | {"top_n_sigma": 1.0},
    "defaults, XTC": {"seed": 1, "xtc_probability": 0.5},
    "defaults, dynamic temperature": {"seed": 1, "dynatemp_range": 0.5},
    "mirostat 2": OPEN | {"mirostat": 2},
    "defaults, DRY over 30,000": {"seed": 1, "dry_multiplier": 0.8},
    "defaults, 5 log probabilities": {"seed": 1, "logprobs": 5},
    "defaults, 1,000 biases": {"seed": 1, "logit_bias": {7 * token: -1.0 for token in range(1000)}},
}


def rows_of(vocab_size: int) -> dict[str, NDArray[np.float32]]:
    """Logits like a model's (a few tokens far above a normal bulk), and logits with no concentration."""
    generator = np.random.default_rng(1)
    peaked = generator.normal(0, 2.5, vocab_size)
    peaked[generator.integers(0, vocab_size, 30)] += np.linspace(4, 12, 30)
    return {
        "peaked": peaked.astype(np.float32),
        "normal": generator.normal(0, 1, vocab_size).astype(np.float32),
        "flat": generator.normal(0, 0.01, vocab_size).astype(np.float32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=150_000)
    parser.add_argument("--repetitions", type=int, default=200)
    arguments = parser.parse_args()
    rows = rows_of(arguments.vocab_size)
    history = (
        np.random.default_rng(2).integers(0, arguments.vocab_size, 30_000 + arguments.repetitions).astype(np.int32)
    )
    sampler = Sampler(arguments.vocab_size)
    print("| microseconds, median (slowest of 20) | " + " | ".join(rows) + " |")
    print("|---" * (1 + len(rows)) + "|")
    for name, values in SETTINGS.items():
        plan = SamplingPlan(SamplingParams(**values), arguments.vocab_size)  # type: ignore[arg-type]
        cells = []
        for row in rows.values():
            seconds = []
            for repetition in range(arguments.repetitions):
                start = time.perf_counter()
                sampler.choose(row, plan, 30_000 + repetition, history)
                seconds.append(time.perf_counter() - start)
            slow = statistics.quantiles(seconds, n=20)[-1]
            cells.append(f"{statistics.median(seconds) * 1e6:.0f} ({slow * 1e6:.0f})")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

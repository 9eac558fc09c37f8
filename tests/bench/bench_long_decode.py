"""Time decoding at the end of a long context with several types of keys and values, in turns.

`python -m tests.bench.bench_long_decode MODEL [--kv-types f16,q8_0] [--positions 8192] [--repetitions 15]`, from the
repository's root. The cache is filled with plausible bytes instead of a computed prompt, which takes as long to read.
"""

import argparse
import statistics
import time

import numpy as np

from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.kernels.program import Batch
from localinfer.models.load.loader import Model, load_model

_ROW = np.zeros(1, np.int32)
_PLAUSIBLE_BYTE = 0x3C
"""Twice, a float16 of 1.06; as a code of eight or four bits, some number."""


def filled(model: Model, positions: int) -> SequenceCache:
    """A sequence of so many positions, in memory that was written."""
    pool = PagePool(model.kv_layout)
    cache = SequenceCache(pool, max_length=positions + 1)
    cache.reserve(positions + 1)
    for page in cache.pages.tolist():
        pool.view(page)[:] = _PLAUSIBLE_BYTE
    cache.commit(positions)
    return cache


def seconds_per_token(model: Model, cache: SequenceCache, repetitions: int) -> list[float]:
    """Compute the token after what a cache holds, again and again."""
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        model.program.run(Batch(_ROW + 100, (cache.segment(1),), _ROW))
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    """Print one line per context and type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kv-types", default="f16,q8_0,q4_0")
    parser.add_argument("--positions", default="8192")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    names = options.kv_types.split(",")
    models = {name: load_model(options.model, kv_type=name, threads=options.threads) for name in names}
    for positions in map(int, options.positions.split(",")):
        caches = {name: filled(model, positions) for name, model in models.items()}
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name, model in models.items():
                times[name] += seconds_per_token(model, caches[name], options.repetitions)[1:]
        first = statistics.median(times[names[0]])
        for name in names:
            middle = statistics.median(times[name])
            print(
                f"{positions:6} positions {name:10} {1e3 * middle:8.2f} ms a token, {first / middle:.2f} x {names[0]}"
            )
    for model in models.values():
        model.close()


if __name__ == "__main__":
    main()

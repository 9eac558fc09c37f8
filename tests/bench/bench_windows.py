"""Count what the cache of models with sliding-window layers takes, beside what it took if every layer kept everything.

`python -m tests.bench.bench_windows [--kv-type f16] [--turn 1000] [--lengths 4096,16384,65536]`, from the repository's
root. No model is run: a chat of turns of `--turn` tokens, the last quarter of each decoded, goes through the cache with
pages of the shapes of real models. While it runs and after it, in MiB; and how much of the next turn is found.
"""

import argparse
from dataclasses import replace

import numpy as np

from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.kernels.cpu.lower import MAX_BATCH_ROWS
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import KVLayerShape

SHAPES = {
    "Gemma 3 1B": [KVLayerShape(1, 256, 256, 0 if layer % 6 == 5 else 512) for layer in range(26)],
    "Gemma 3 4B": [KVLayerShape(4, 256, 256, 0 if layer % 6 == 5 else 1024) for layer in range(34)],
    "gpt-oss 20B": [KVLayerShape(8, 64, 64, 0 if layer % 2 else 128) for layer in range(24)],
    "Gemma 2 2B": [KVLayerShape(4, 256, 256, 0 if layer % 2 else 4096) for layer in range(26)],
}
"""Layers as the models' own configurations have them."""
_MIB = 1 << 20


def measure(layout: KVLayout, length: int, turn: int) -> tuple[float, float, int]:
    """Bytes held at most and at the end of a chat of so many tokens, and tokens found when it goes on."""
    cache = PrefixCache(layout, max_bytes=None, context_length=2 * length, batch_tokens=MAX_BATCH_ROWS)
    ids, most = np.arange(length + 1, dtype=np.int32), 0
    for end in range(turn, length + 1, turn):
        admission = cache.admit(ids[: end - turn // 4], CacheHints())
        sequence = admission.sequence
        while sequence.length < end:
            is_prompt = sequence.length < end - turn // 4
            stop = min(end - turn // 4, sequence.length + MAX_BATCH_ROWS) if is_prompt else sequence.length + 1
            sequence.reserve(stop)
            sequence.commit(stop)
            if is_prompt:
                cache.publish(sequence, ids, CacheHints())
            most = max(most, _held(cache))
        cache.retire(sequence, ids[:end], CacheHints())
    kept, found = _held(cache), cache.tree.match(ids).usable
    cache.pool.close()
    return most / _MIB, kept / _MIB, found


def _held(cache: PrefixCache) -> int:
    pool = cache.pool
    return pool.num_bytes(pool.num_pages - pool.num_free_pages, pool.num_windowed)


def main() -> None:
    """Print one line per model and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--turn", type=int, default=1000)
    parser.add_argument("--lengths", default="4096,16384,65536")
    options = parser.parse_args()
    for name, layers in SHAPES.items():
        for length in map(int, options.lengths.split(",")):
            length -= length % options.turn
            whole = KVLayout(options.kv_type, [replace(layer, window=0) for layer in layers])
            most, kept, found = measure(KVLayout(options.kv_type, layers), length, options.turn)
            _, before, _ = measure(whole, length, options.turn)
            print(
                f"{name}, {length} tokens: all of it {before:.0f} MiB, at most {most:.0f}, kept {kept:.0f} "
                f"({kept / before:.2f}); found {found}"
            )


if __name__ == "__main__":
    main()

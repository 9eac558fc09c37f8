"""How much faster texts are embedded in batches than one by one, by a random encoder of a published one's shape.

python -m tests.bench.bench_embeddings [--width 384] [--texts 64] [--tokens 4,8,16,32,64] [--threads N] [--rounds 5]

A line per length: milliseconds of both, the least of several rounds, their ratio, tokens per second in batches, and
both as shares of what the machine multiplies at most, measured in the same run: 100 % divided by the share of one by
one is what batches could gain at most. With one thread, times are the processor's, which others hardly change.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import localinfer
from localinfer.apps.bench.roofline import measure_multiply_peak
from localinfer.apps.quantize import quantize
from tests.api.encoder_models import vocabulary_entries
from tests.models.arch_models import skeletons, write_skeleton
from tests.models.text.vocabularies import bert_metadata
from tests.support.inside import model_of

_LAYERS = 12


def write_bert(path: Path, width: int) -> None:
    """BERT of twelve layers with random weights, in Q8_0."""
    skeleton = dict(skeletons()["bert-encoder"])
    sizes = {"context_length": 512, "embedding_length": width, "block_count": _LAYERS, "feed_forward_length": 4 * width}
    sizes["attention.head_count"] = width // 32
    skeleton["kv"] = [
        [key, kind, element, sizes.get(key.removeprefix("bert."), value)]
        for key, kind, element, value in skeleton["kv"]
        if not key.startswith("tokenizer.ggml.") or key.endswith("type_count")
    ] + vocabulary_entries(bert_metadata(), 128)
    grown = {64: width, 96: 4 * width, 256: 512}
    plain = [[name, [grown.get(size, size) for size in shape]] for name, shape in skeleton["tensors"]]
    block = [(name.removeprefix("blk.0."), shape) for name, shape in plain if name.startswith("blk.0.")]
    layers = [[f"blk.{layer}.{name}", shape] for layer in range(_LAYERS) for name, shape in block]
    skeleton["tensors"] = [entry for entry in plain if not entry[0].startswith("blk.")] + layers
    whole = path.with_suffix(".f32")
    write_skeleton(skeleton, whole)
    quantize(whole, path, type="Q8_0", threads=1)


def least(work: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of some rounds."""
    found = []
    for _ in range(rounds):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("width", 384), ("texts", 64), ("rounds", 5), ("threads", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", default="4,8,16,32,64")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    multiply_adds = _LAYERS * 12 * options.width**2
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bert.gguf"
        write_bert(path, options.width)
        with localinfer.load(path, threads=options.threads) as llm:
            peak = measure_multiply_peak(model_of(llm).pool.num_threads, clock)
            print(
                f"width {options.width}, {multiply_adds / 1e6:.1f} M multiply-adds per token, peak {peak / 1e9:.0f} G/s"
            )
            for count in map(int, options.tokens.split(",")):
                texts = [generator.integers(5, 100, count).tolist() for _ in range(options.texts)]
                llm.embed_many(texts)
                together = least(lambda: llm.embed_many(texts), options.rounds, clock)  # noqa: B023
                alone = least(lambda: [llm.embed(text) for text in texts], options.rounds, clock)  # noqa: B023
                total = options.texts * count
                shares = [100 * multiply_adds * total / seconds / peak for seconds in (together, alone)]
                print(
                    f"{count:4d} tokens: {1e3 * together:8.2f} ms in batches, {1e3 * alone:8.2f} ms one by one, "
                    f"{alone / together:5.2f} times as fast, {total / together:7.0f} tokens/s, "
                    f"{shares[0]:3.0f} % and {shares[1]:3.0f} % of the peak"
                )


if __name__ == "__main__":
    main()

"""How much faster texts are embedded in batches than one by one, by a random encoder of a published one's shape.

python -m tests.bench.bench_embeddings [--width 384] [--texts 64] [--words 12] [--threads N]: seconds of both, the least
of several rounds, and their ratio.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import localinfer
from localinfer.evaluation.quantize import quantize
from tests.api.encoder_models import vocabulary_entries
from tests.models.arch_models import skeletons, write_skeleton
from tests.models.text.vocabularies import bert_metadata

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


def least(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of some rounds."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("width", 384), ("texts", 64), ("words", 12), ("rounds", 5), ("threads", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    words = "the cat hello world un re dog café naïve".split()
    texts = [" ".join(generator.choice(words, options.words)) for _ in range(options.texts)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bert.gguf"
        write_bert(path, options.width)
        with localinfer.load(path, threads=options.threads) as llm:
            tokens = sum(map(len, llm.embedding_ids(texts)))
            llm.embed_many(texts)
            together = least(lambda: llm.embed_many(texts), options.rounds)
            alone = least(lambda: [llm.embed(text) for text in texts], options.rounds)
    print(f"{options.texts} texts, {tokens} tokens: {together:.4f} s in batches, {alone:.4f} s one by one")
    print(f"{alone / together:.2f} times as fast, {tokens / together:.0f} tokens per second")


if __name__ == "__main__":
    main()

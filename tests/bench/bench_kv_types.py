"""Measure what quantized keys and values do to a model's predictions, with and without rotating them first.

`python -m tests.bench.bench_kv_types [MODEL] [--text FILE] [--kv-types q8_0,q4_0] [--context 512] [--chunks 8]`, from
the repository's root. Mean KL divergence of the output against a float32 cache, in nats. Without MODEL it is the demo
model, without --text the text that ships.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import localinfer
from localinfer.apps.evaluate.measure import compare
from localinfer.apps.evaluate.texts import evaluation_text
from localinfer.kernels.cpu.lower import attention as attention_words


@contextmanager
def rotating(rotates: bool) -> Iterator[None]:
    """Load models whose heads are, or are not, rotated before they are quantized."""
    usual = attention_words.rotation_size
    if not rotates:
        attention_words.rotation_size = lambda size, name: 1
    try:
        yield
    finally:
        attention_words.rotation_size = usual


def main() -> None:
    """Print one line per type of keys and values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--text", help="a file of plain text")
    parser.add_argument("--kv-types", default="f16,q8_0,q4_0,q8_0/q4_0,q4_0/f16,f16/q4_0")
    parser.add_argument("--context", type=int, default=512, help="tokens of a chunk, of which the second half counts")
    parser.add_argument("--chunks", type=int, default=8)
    options = parser.parse_args()
    text = evaluation_text(options.text)
    print(f"{'cache':10} {'rotated':24} {'not rotated':24} perplexity (f32, rotated, not rotated)")
    with localinfer.load(options.model, kv_type="f32", speculation=None) as base:
        for kv_type in options.kv_types.split(","):
            found = []
            for rotates in (True, False):
                with rotating(rotates), localinfer.load(options.model, kv_type=kv_type, speculation=None) as candidate:
                    found.append(
                        compare(base, candidate, text, context_length=options.context, max_chunks=options.chunks)
                    )
            columns = [f"{one.mean:.2e} +- {one.standard_error:.1e}" for one in found]
            perplexities = [found[0].base.perplexity, *(one.candidate.perplexity for one in found)]
            print(
                f"{kv_type:10} {columns[0]:24} {columns[1]:24} {', '.join(f'{one:.4f}' for one in perplexities)}"
                f"  ({found[0].num_tokens} tokens)",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Compact a conversation of many tokens once, and count what is computed for it and for the turn behind it.

`python -m tests.bench.bench_compaction [MODEL] [--tokens 30000] [--layers 6 --heads 16] [--speculation ngram]`, from
the repository's root. Without a model one of random weights is made, 64 wide for each head; `--half-billion` makes it
of Qwen2.5-0.5B's layers in Q8_0 (24 of them, 14 heads, 2 KV heads, 4,864 wide between, the demo model's vocabulary).
The summary has 64 tokens at most, as random weights never end one.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "apps" / "server"))

import gguf
from agent_models import write_agent_model

import localinfer
from localinfer.generation import compaction

PAGE = "The train of the morning leaves the town at nine, and on Fridays it is late by some minutes. " * 40
HALF_BILLION: dict[str, Any] = {
    "layers": 24,
    "heads": 14,
    "kv_heads": 2,
    "feed_forward": 4864,
    "matrix_type": gguf.GGMLQuantizationType.Q8_0,
}
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "seed": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--half-billion", action="store_true")
    parser.add_argument("--speculation")
    arguments = parser.parse_args()
    compaction.MOST_SUMMARY_TOKENS = 64
    with tempfile.TemporaryDirectory() as folder:
        shape: dict[str, Any] = {"layers": arguments.layers, "heads": arguments.heads}
        path = arguments.model or write_agent_model(
            Path(folder) / "compaction.gguf", head_size=64, **(HALF_BILLION if arguments.half_billion else shape)
        )
        context_length = arguments.tokens * 5 // 4 + 1024
        with localinfer.load(path, context_length=context_length, speculation=arguments.speculation) as llm:
            measure(llm, arguments.tokens)


def measure(llm: localinfer.LLM, wanted: int) -> None:
    """Fill a session with at least so many tokens, compact it, and print what each step computed."""
    page = len(llm.tokenizer.encode(PAGE))
    said = [{"role": role, "content": PAGE} for role in ("user", "assistant")] * -(-wanted // (2 * page))
    said += [{"role": "user", "content": "When is that?"}, {"role": "assistant", "content": "At nine."}]
    session = llm.session("You answer.", messages=said, **OPTIONS)
    began = time.perf_counter()
    print(f"read {session.prewarm():,} tokens in {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    made = session.compact()
    computed, request = made.prompt_tokens - made.cached_tokens, len(llm.tokenizer.encode(compaction.SUMMARY_REQUEST))
    print(
        f"summed {made.messages} messages up in {time.perf_counter() - began:.1f} s: of {made.prompt_tokens:,} tokens "
        f"{computed} were computed, the request's {request} among them; {made.completion_tokens} written"
    )
    for text in ("And on Fridays?", "And on Sundays?"):
        stats = session.ask(text).stats
        print(f"the next turn computed {stats.prompt_tokens - stats.cached_tokens} of {stats.prompt_tokens} tokens")


if __name__ == "__main__":
    main()

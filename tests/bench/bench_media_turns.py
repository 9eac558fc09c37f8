"""Count and time what the turns of a chat with three pictures compute: the first, the second, and after a restart.

python -m tests.bench.bench_media_turns [--layers N] [--text-layers N] [--type F16] [--threads 2]: pictures of 1,024 x
768 pixels, an encoder of Qwen2.5-VL-3B's shape and a text model of its width, in Q4_K, with fewer layers; weights are
random. Tokens and runs of the encoder are counted, seconds go to the first token. The restart has the session's JSON
and the prompt cache on disk; its reply is compared with the first process's, log probabilities included.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import localinfer
from localinfer.generation.stream import Completion
from localinfer.llm import LLM
from tests.bench.random_media import TEXTS, write_encoder, write_text_model

NAME, SIZE, REPLY = "Qwen2.5-VL", (1024, 768), 16
QUESTIONS = ("What do these three pictures show?", "Which of them is the brightest?", "And the darkest?")
# Letters alone: bytes at random are no text, whose tokens would come back.
LETTERS = list(range(ord("a") - 33, ord("s") - 33 + 1))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": REPLY, "ignore_eos": True, "logprobs": 1}
GREEDY["allowed_token_ids"] = LETTERS


class Counted:
    """Runs of the encoder and decoded pictures of a loaded model, since they were last asked for."""

    def __init__(self, llm: LLM) -> None:
        self._counts = {"encoder runs": 0, "pictures decoded": 0}
        media: Any = llm._media
        media._encoder.encode = self._counting("encoder runs", media._encoder.encode)
        media.prepare = self._counting("pictures decoded", media.prepare)

    def taken(self) -> str:
        """The counts in words, which begin anew."""
        words = ", ".join(f"{number} {name}" for name, number in self._counts.items())
        self._counts = dict.fromkeys(self._counts, 0)
        return words

    def _counting(self, name: str, real: Any) -> Any:
        def counted(*given: Any, **options: Any) -> Any:
            self._counts[name] += 1
            return real(*given, **options)

        return counted


def told(name: str, found: Completion, num_before: int, counted: Counted) -> int:
    """Print what a reply took; returns the tokens of prompt and reply. num_before: tokens of the chat before it."""
    stats = found.stats
    computed, total = stats.prompt_tokens - stats.cached_tokens, stats.prompt_tokens
    print(
        f"{name}: {computed:,} of {total:,} tokens computed ({total - num_before:,} new), {counted.taken()}, "
        f"{stats.time_to_first_token_seconds:.2f} s",
        flush=True,
    )
    return total + len(found.token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--text-layers", type=int, default=0)
    parser.add_argument("--type", default="F16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, mmproj = folder / "model.gguf", folder / "mmproj-model.gguf"
        write_text_model(model, NAME, layers=options.text_layers)
        write_encoder(mmproj, NAME, options.type, side=560, output=TEXTS[NAME]["width"], layers=options.layers)
        settings: dict[str, Any] = {"mmproj": mmproj, "threads": options.threads, "context_length": 8192}
        settings |= {"disk_cache": True, "disk_cache_folder": folder / "cache"}
        small = [np.random.default_rng(seed).integers(0, 256, (24, 32, 3), np.uint8) for seed in range(3)]
        pictures = [Image.fromarray(one).resize(SIZE, Image.Resampling.BICUBIC) for one in small]
        parts: list[Any] = [{"type": "image", "image": one} for one in pictures]
        with localinfer.load(model, **settings) as llm:
            counted, session = Counted(llm), llm.session(**GREEDY)
            tokens = told("turn 1", session.ask([*parts, QUESTIONS[0]]), 0, counted)
            kept = session.to_json()
            second = session.ask(QUESTIONS[1])
            told("turn 2", second, tokens, counted)
        with localinfer.load(model, **settings) as llm:
            counted, session = Counted(llm), localinfer.Session.from_json(llm, kept, **GREEDY)
            found = session.ask(QUESTIONS[1])
            tokens = told("restart, turn 2", found, tokens, counted)
            is_same = found.token_ids == second.token_ids and found.logprobs == second.logprobs
            print("equal bits" if is_same else "DIFFERENT BITS")
            told("restart, turn 3", session.ask(QUESTIONS[2]), tokens, counted)


if __name__ == "__main__":
    main()

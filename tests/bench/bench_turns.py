"""Count and time what the turns of a long chat compute on a hybrid model: next, edited, regenerated, after a restart.

`python -m tests.bench.bench_turns [--tokens 16000] [--layers 12] [--type Q4_0] [--threads N] [--verify] [--peer]`, from
the repository's root. The model has the shape of Qwen3.5 0.8B with so many of its layers, so states and pages have the
proportions of the real one; weights and token ids are random. Tokens are counted, seconds go to the first token of each
reply. Restarts go on from the disk alone. An edit anywhere is not computed: where it would begin is looked up.
`--verify`: each reply, with its log probabilities, is that of a cold start, bit for bit. `--peer`: llama-cpp-python on
the same file and ids, in one context that stays.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import localinfer
from localinfer.generation.stream import Completion
from localinfer.kernels.jit.host import cpu_name
from localinfer.llm import LLM
from localinfer.models.load.threads import available_threads
from tests.bench.bench_recurrent import VOCABULARY, write_model
from tests.support.inside import engine_of

REPLY, NEW = 16, 40
_GRID = 512


class Turns:
    """The prompts of one chat, each made of the replies before it."""

    def __init__(self, num_tokens: int) -> None:
        chooser = np.random.default_rng(1)
        self.first: list[int] = chooser.integers(1, VOCABULARY, num_tokens).tolist()
        self.news: list[list[int]] = chooser.integers(1, VOCABULARY, (6, NEW)).tolist()
        self.edit = num_tokens * 9 // 16

    def before_restart(self) -> Iterator[tuple[str, list[int], int]]:
        """Name, prompt and how many of its tokens are new of each turn; to be sent the reply of each."""
        reply = yield "cold", self.first, len(self.first)
        second = [*self.first, *reply, *self.news[0]]
        self.reply = yield "turn 2", second, NEW + 1
        self.second = second
        yield "edited last message", [*self.first, *reply, *self.news[1]], NEW + 1
        yield "regenerated", second, 1
        yield f"edit at token {self.edit:,}", [*self.first[: self.edit], *self.news[2]], NEW

    def after_restart(self) -> Iterator[tuple[str, list[int], int]]:
        """The same, each of a process that has only just been started."""
        yield "restart, turn 3", [*self.second, *self.reply, *self.news[3]], NEW + 1
        yield "restart, edited last message", [*self.second, *self.reply, *self.news[4]], NEW + 1


def answer(llm: LLM, prompt: list[int]) -> Completion:
    return llm.complete(prompt, max_tokens=REPLY, temperature=0, ignore_eos=True, logprobs=1)


def measure(path: Path, turns: Turns, threads: int, *, verify: bool) -> None:
    """Print a line per turn: tokens computed and seconds; and what the snapshots take."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"threads": threads, "speculation": None}
        disk = {"disk_cache": True, "disk_cache_folder": folder}

        def show(llm: LLM, name: str, prompt: list[int], num_new: int) -> list[int]:
            found = answer(llm, prompt)
            stats = found.stats
            computed, seconds = stats.prompt_tokens - stats.cached_tokens, stats.time_to_first_token_seconds
            grade = "" if name == "cold" or computed <= num_new + _GRID else f"; {stats.cache_miss}"
            if verify:
                with localinfer.load(path, **options) as cold:
                    wanted = answer(cold, prompt)
                is_same = found.token_ids == wanted.token_ids and found.logprobs == wanted.logprobs
                grade += "; equal bits" if is_same else "; DIFFERENT BITS"
            print(f"{name}: {computed:,} of {stats.prompt_tokens:,} computed ({num_new:,} new), {seconds:.3f} s{grade}")
            return found.token_ids

        with localinfer.load(path, **options, **disk) as llm:
            steps = turns.before_restart()
            step = next(steps, None)
            while step is not None:
                reply = show(llm, *step)
                if step[0] in ("cold", "turn 2"):
                    show_memory(llm, turns.first)
                try:
                    step = steps.send(reply)
                except StopIteration:
                    step = None
            show_memory(llm, turns.first)
        for step in turns.after_restart():
            with localinfer.load(path, **options, **disk) as llm:
                show(llm, *step)


def show_memory(llm: LLM, token_ids: list[int]) -> None:
    """Print what is cached, and what edits of a text at every place would compute of what is before them."""
    stats = llm.snapshot_stats
    assert stats is not None, "it is a hybrid"
    with engine_of(llm).exclusive_cache() as cache:
        held, state = cache.pool.held_bytes, cache.pool.states.slot_bytes
        per_token = cache.pool.page_bytes / cache.pool.page_tokens
        places = sorted(cache.tree.match(np.array(token_ids, np.int32)).snapshots)
    edits = np.arange(len(token_ids))
    ends = np.array([0, *places])
    mean = float(np.mean(edits - ends[np.searchsorted(ends, edits, "right") - 1]))
    print(
        f"  {held / 1e6:.0f} MB held; {stats.held} snapshots of {state / 1e6:.1f} MB ({state / per_token:,.0f} tokens' "
        f"pages), {stats.grid} of the grid: {100 * stats.grid_bytes / held:.1f} % of the cache; taken {stats.taken}, "
        f"evicted {stats.evicted}, gone on from {stats.hits}"
    )
    print(f"  snapshots at {places}: an edit anywhere computes {mean:,.0f} tokens before it on average")


def measure_peer(path: Path, turns: Turns, threads: int, context_length: int) -> None:
    """Print the same of llama-cpp-python; tokens are those that it evaluates until its first new one."""
    from llama_cpp import Llama

    llama = Llama(str(path), n_ctx=context_length, n_threads=threads, n_threads_batch=threads, verbose=False)
    counts: list[int] = []
    evaluate = llama.eval

    def counted(tokens: list[int]) -> None:
        counts.append(len(tokens))
        evaluate(tokens)

    llama.eval = counted  # type: ignore[method-assign,assignment]
    steps = turns.before_restart()
    name, prompt, _ = next(steps)
    while True:
        counts.clear()
        began = time.perf_counter()
        tokens = llama.generate(prompt, temp=0.0)
        reply = [next(tokens)]
        seconds, computed = time.perf_counter() - began, sum(counts)
        reply += [next(tokens) for _ in range(REPLY - 1)]
        tokens.close()
        print(f"peer, {name}: {computed:,} of {len(prompt):,} computed, {seconds:.3f} s", flush=True)
        try:
            name, prompt, _ = steps.send(reply)
        except StopIteration:
            return


def main() -> None:
    """Print the turns of one chat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, context_length = Path(folder) / "hybrid.gguf", options.tokens + 4 * (REPLY + NEW)
        write_model(path, options.type, is_hybrid=True, num_layers=options.layers, context_length=context_length)
        print(f"{cpu_name()}, {options.threads} threads, {options.layers} layers in {options.type}", flush=True)
        if options.peer:
            measure_peer(path, Turns(options.tokens), options.threads, context_length)
        measure(path, Turns(options.tokens), options.threads, verify=options.verify)


if __name__ == "__main__":
    main()

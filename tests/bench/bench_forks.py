"""Count what forks of a long session compute and take, before and after each has answered a question of its own.

`python -m tests.bench.bench_forks [MODEL] [--tokens 4000] [--forks 100] [--threads N]`, from the repository's root.
Bytes are those of the process (resident), of pages with keys and values that are held, and of Python's objects.
"""

import argparse
import gc
import time
import tracemalloc

import psutil

import localinfer
from localinfer.generation.session.session import Session
from tests.support.inside import engine_of

_WORDS = "the badger went to the market and saw a fox who sold red apples for two coins each "
_QUESTION = "What did fox number {number} say?"


def long_session(llm: localinfer.LLM, num_tokens: int) -> Session:
    """A session of about so many tokens, of several exchanges, all of it in the cache."""
    session = llm.session("You tell stories.", max_tokens=16, temperature=0)
    while session.context_used < num_tokens:
        missing = num_tokens - session.context_used
        session.ask(_WORDS * max(1, min(missing, 1000) // 24))
    session.prewarm()
    return session


def main() -> None:
    """Print what forking takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--forks", type=int, default=100)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    process = psutil.Process()
    with localinfer.load(given.model, context_length=given.tokens + 1000, threads=given.threads) as llm:
        session = long_session(llm, given.tokens)
        pool = engine_of(llm).pool
        print(f"a session of {session.context_used:,} tokens; {pool.held_bytes / 2**20:,.1f} MiB of keys and values")

        gc.collect()
        resident, held = process.memory_info().rss, pool.held_bytes
        began = time.perf_counter()
        forks = [session.fork() for _ in range(given.forks)]
        seconds = time.perf_counter() - began
        computed = sum(fork.prewarm() for fork in forks)
        resident, held = process.memory_info().rss - resident, pool.held_bytes - held
        print(
            f"{given.forks} forks: {computed} tokens prefilled, {seconds / given.forks * 1e6:,.0f} us, "
            f"{resident / given.forks / 1024:,.1f} KiB of the process and {held / given.forks / 1024:,.1f} KiB of keys "
            "and values each"
        )
        tracemalloc.start()
        more = [session.fork() for _ in range(given.forks)]
        objects = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        print(f"Python's objects: {objects / len(more):,.0f} bytes each")

        resident, held = process.memory_info().rss, pool.held_bytes
        began, computed, cached = time.perf_counter(), 0, 0
        for number, fork in enumerate(forks):
            stats = fork.ask(_QUESTION.format(number=number)).stats
            computed += stats.prompt_tokens - stats.cached_tokens
            cached += stats.cached_tokens
        seconds = time.perf_counter() - began
        resident, held = process.memory_info().rss - resident, pool.held_bytes - held
        own = session.measure(_QUESTION.format(number=50))
        print(
            f"a question each: {cached / given.forks:,.0f} tokens cached, {computed / given.forks:.1f} computed (a "
            f"message has {own}), {seconds / given.forks * 1e3:,.1f} ms, {resident / given.forks / 1024:,.1f} KiB of "
            f"the process and {held / given.forks / 1024:,.1f} KiB of keys and values each"
        )


if __name__ == "__main__":
    main()

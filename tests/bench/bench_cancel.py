"""How long a cancelled stream goes on: `python -m tests.bench.bench_cancel [MODEL] [--repetitions 30] [--tokens 1500]`.

From the call to the reader's last event, in the midst of a prompt and in the midst of a text: read by a thread and
cancelled by another one, read on an event loop and cancelled there, and by cancelling the task, until its thread has
ended. Also the time of a step of the text, which a cancellation may have to wait for, and what a token costs to be
passed to an event loop.
"""

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

import localinfer
from localinfer.apps.bench.figures import percentile
from localinfer.llm import LLM

OPTIONS: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}


def prompt(count: int, seed: int, vocab_size: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(300 % vocab_size, vocab_size - 8, count).tolist()
    return ids


class Cancellations:
    """Cancels streams of one kind, each some time after it began."""

    def __init__(self, llm: LLM, tokens: int, waits: list[float]) -> None:
        self.llm = llm
        self.tokens = tokens
        self.waits = waits

    def opened(self, number: int) -> localinfer.TextStream:
        self.llm.clear_cache()
        return self.llm.stream(prompt(self.tokens, number, self.llm.vocab_size), **OPTIONS)

    def by_threads(self) -> list[float]:
        """Seconds to the last event that a thread gets."""
        seconds = []
        for number, wait in enumerate(self.waits):
            stream, ends = self.opened(number), []

            def read(stream: Any = stream, ends: list[float] = ends) -> None:
                assert [event.finish_reason for event in stream][-1] == "cancelled"
                ends.append(time.perf_counter())

            reader = threading.Thread(target=read)
            reader.start()
            time.sleep(wait)
            called = time.perf_counter()
            stream.cancel()
            reader.join()
            seconds.append(ends[0] - called)
        return seconds

    async def on_a_loop(self) -> list[float]:
        """Seconds to the last event that a task gets."""
        seconds = []
        for number, wait in enumerate(self.waits):
            stream, ends = self.opened(number), []
            reader = asyncio.create_task(_last(stream, ends))
            await asyncio.sleep(wait)
            called = time.perf_counter()
            stream.cancel()
            await reader
            seconds.append(ends[0] - called)
        return seconds

    async def by_tasks(self) -> list[float]:
        """Seconds from the cancellation of the task until nothing of the stream runs any more."""
        seconds = []
        for number, wait in enumerate(self.waits):
            stream = self.opened(number)
            reader = asyncio.create_task(_last(stream, []))
            await asyncio.sleep(wait)
            called = time.perf_counter()
            reader.cancel()
            await asyncio.wait([reader])
            await stream.aclose()
            seconds.append(time.perf_counter() - called)
        return seconds


async def _last(stream: AsyncIterator[Any], ends: list[float]) -> None:
    reason = None
    async for event in stream:
        reason = event.finish_reason
    assert reason == "cancelled"
    ends.append(time.perf_counter())


def measure(llm: LLM, tokens: int, repetitions: int) -> None:
    """Print what cancelling takes."""
    began = time.perf_counter()
    next(llm.stream(prompt(tokens, 1000, llm.vocab_size), **OPTIONS))
    prefill = time.perf_counter() - began
    stream = llm.stream(prompt(32, 1001, llm.vocab_size), max_tokens=200, **OPTIONS)
    arrivals = [time.perf_counter() for _ in stream]
    step = statistics.median(np.diff(arrivals).tolist())
    print(f"a prompt of {tokens} tokens takes {prefill:.2f} s, a step of a text {1e3 * step:.2f} ms")
    shares = np.linspace(0.1, 0.9, repetitions).tolist()
    places = {
        "prompt": Cancellations(llm, tokens, [share * prefill for share in shares]),
        "text": Cancellations(llm, 32, [0.1 + 50 * share * step for share in shares]),
    }
    for place, cancellations in places.items():
        ways = {
            "thread, cancel()": cancellations.by_threads(),
            "event loop, cancel()": asyncio.run(cancellations.on_a_loop()),
            "event loop, task.cancel() and aclose()": asyncio.run(cancellations.by_tasks()),
        }
        for way, seconds in ways.items():
            print(
                f"in a {place}, {way}: {1e3 * statistics.median(seconds):.2f} ms in the median, "
                f"{1e3 * percentile(seconds, 95):.2f} ms at the 95th percentile, {1e3 * max(seconds):.2f} ms at most"
            )


def overhead(llm: LLM, repetitions: int) -> None:
    """Print seconds per token of a thread, of an event loop, and of a result that is awaited."""
    ids = prompt(32, 7, llm.vocab_size)
    options = {**OPTIONS, "max_tokens": 400}

    async def iterate() -> None:
        async for _ in llm.stream(ids, **options):
            pass

    async def ask() -> None:
        await llm.acomplete(ids, **options)

    ways = {
        "for": lambda: [None for _ in llm.stream(ids, **options)],
        "async for": lambda: asyncio.run(iterate()),
        "await acomplete": lambda: asyncio.run(ask()),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repetitions):
        for way, work in ways.items():
            began = time.perf_counter()
            work()
            times[way].append((time.perf_counter() - began) / 400)
    for way, seconds in times.items():
        print(f"{way}: {1e6 * statistics.median(seconds):.1f} us per token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    with localinfer.load(
        arguments.model, threads=arguments.threads, context_length=arguments.tokens + 2048, speculation=None
    ) as llm:
        measure(llm, arguments.tokens, arguments.repetitions)
        overhead(llm, 5)


if __name__ == "__main__":
    main()

"""What sharing steps brings and costs: `python -m tests.bench.bench_scheduler MODE MODEL [options]`.

alone: seconds per token of one stream; with two versions of localinfer, what the scheduler costs it. together: tokens
per second of several streams over those of one. stall: the longest wait of a running stream while a long prompt comes
in. cancel: from the call to the reader's last event, in the midst of a prompt and of a text.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import localinfer
from localinfer.llm import LLM

OPTIONS: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}


def prompt(count: int, seed: int, vocab_size: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(300 % vocab_size, vocab_size - 8, count).tolist()
    return ids


def in_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def alone(llm: LLM, tokens: int, repetitions: int) -> None:
    """Print the best and the median time of one token."""
    seconds = []
    for repetition in range(repetitions):
        stream = llm.stream(prompt(8, repetition, llm.vocab_size), max_tokens=tokens, **OPTIONS)
        next(stream)
        began = time.perf_counter()
        count = sum(1 for _ in stream)
        seconds.append((time.perf_counter() - began) / count)
    print(
        f"one token alone: {min(seconds) * 1e6:.2f} us at best, {statistics.median(seconds) * 1e6:.2f} us in the median"
    )


def rate(llm: LLM, num_streams: int, tokens: int, options: dict[str, Any]) -> float:
    """Tokens per second of all streams together, their prompts of 8 tokens included."""
    counts = [0] * num_streams

    def read(index: int) -> None:
        for _ in llm.stream(prompt(8, index, llm.vocab_size), max_tokens=tokens, **options):
            counts[index] += 1

    llm.clear_cache()
    began = time.perf_counter()
    in_threads([lambda index=index: read(index) for index in range(num_streams)])  # type: ignore[misc]
    seconds = time.perf_counter() - began
    assert counts == [tokens] * num_streams, "nothing is lost"
    return sum(counts) / seconds


def together(llm: LLM, num_streams: int, tokens: int, repetitions: int) -> None:
    """Print the rates of one stream and of several, in turns, greedy and drawn."""
    for name, options in (("greedy", OPTIONS), ("drawn", {"ignore_eos": True, "seed": 1})):
        one, several = [], []
        for _ in range(repetitions):
            one.append(rate(llm, 1, tokens, options))
            several.append(rate(llm, num_streams, tokens, options))
        a, b = statistics.median(one), statistics.median(several)
        print(f"{name}: one stream {a:.1f} tokens/s, {num_streams} streams {b:.1f} tokens/s, {b / a:.2f} times")


class Arrival:
    """A running stream, and a prompt that comes in after its 60th token."""

    def __init__(self, llm: LLM, tokens: int, seed: int) -> None:
        self.llm = llm
        self.prompt = prompt(tokens, seed, llm.vocab_size)
        self.times: list[float] = []
        self.asked = self.answered = 0.0
        self.has_ended = threading.Event()
        in_threads([self.read, self.arrive])

    def read(self) -> None:
        with self.llm.stream(prompt(32, 1, self.llm.vocab_size), **OPTIONS) as stream:
            for _ in stream:
                self.times.append(time.perf_counter())
                if self.has_ended.is_set():
                    return

    def arrive(self) -> None:
        while len(self.times) < 60:
            time.sleep(0.01)
        self.asked = time.perf_counter()
        next(self.llm.stream(self.prompt, max_tokens=1, **OPTIONS))
        self.answered = time.perf_counter()
        time.sleep(0.2)
        self.has_ended.set()


def stall(llm: LLM, tokens: int, repetitions: int) -> None:
    """Print what a running stream waits while a prompt comes in, and what the prompt takes."""
    for repetition in range(repetitions):
        llm.clear_cache()
        arrival = Arrival(llm, tokens, 100 + repetition)
        gaps = list(zip(arrival.times[1:], np.diff(arrival.times), strict=True))
        interval = statistics.median([gap for at, gap in gaps if at < arrival.asked][5:])
        during = [gap for at, gap in gaps if arrival.asked <= at <= arrival.answered]
        print(
            f"interval {interval * 1e3:.1f} ms; during {tokens} tokens {statistics.median(during) * 1e3:.1f} ms in the "
            f"median, {max(during) * 1e3:.1f} ms at most; first token after {arrival.answered - arrival.asked:.2f} s"
        )
        llm.clear_cache()
        began = time.perf_counter()
        next(llm.stream(prompt(tokens, 200 + repetition, llm.vocab_size), max_tokens=1, **OPTIONS))
        print(f"    alone the prompt takes {time.perf_counter() - began:.2f} s")


def cancel(llm: LLM, tokens: int, repetitions: int) -> None:
    """Print how long a cancelled stream goes on."""
    for place, length, wait in (("prompt", tokens, 1.0), ("text", 32, 0.7)):
        seconds = []
        for repetition in range(repetitions):
            llm.clear_cache()
            stream = llm.stream(prompt(length, repetition, llm.vocab_size), **OPTIONS)
            ends: list[float] = []

            def read(stream: Any = stream, ends: list[float] = ends) -> None:
                assert [event.finish_reason for event in stream][-1] == "cancelled"
                ends.append(time.perf_counter())

            reader = threading.Thread(target=read)
            reader.start()
            time.sleep(wait + 0.037 * repetition)
            called = time.perf_counter()
            stream.cancel()
            reader.join()
            seconds.append(ends[0] - called)
        print(f"cancelled in a {place}: {statistics.median(seconds) * 1e3:.0f} ms, at most {max(seconds) * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("alone", "together", "stall", "cancel"))
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    llm = localinfer.load(arguments.model, threads=arguments.threads, context_length=4608, speculation=None)
    with llm:
        if arguments.mode == "alone":
            alone(llm, arguments.tokens, arguments.repetitions)
        elif arguments.mode == "together":
            together(llm, arguments.streams, arguments.tokens, arguments.repetitions)
        elif arguments.mode == "stall":
            stall(llm, arguments.tokens, arguments.repetitions)
        else:
            cancel(llm, arguments.tokens, arguments.repetitions)


if __name__ == "__main__":
    main()

"""What publishing KV cache events costs: seconds of the same work without, with, and with a subscriber that reads.

    python -m tests.bench.bench_kv_events [-m MODEL] [--prompts 6] [--tokens 600] [--repetitions 5]

Each repetition computes prompts that begin alike, and replies to them, in a cache that evicts; the three ways take
turns, so that a busy machine is as busy for each. Printed are medians, and what steps pay themselves: the time in which
the tree makes hashes and tells its observer.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import zmq

import localinfer
from localinfer.engine.cache import prefix_tree
from localinfer.llm import LLM


@contextmanager
def subscriber(endpoint: str) -> Iterator[list[int]]:
    """Reads all that is published, in a thread; how many bytes each message had."""
    sizes: list[int] = []
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)

    def read() -> None:
        while True:
            sizes.append(sum(map(len, socket.recv_multipart())))
            if len(sizes) and stopping.is_set():
                return

    stopping = threading.Event()
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield sizes
    finally:
        stopping.set()


def work(llm: LLM, prompts: int, tokens: int, seed: int) -> float:
    """Seconds of prompts and replies."""
    chooser = np.random.default_rng(seed)
    opening = chooser.integers(1, 500, tokens // 2)
    began = time.perf_counter()
    for _ in range(prompts):
        llm.complete(np.concatenate((opening, chooser.integers(1, 500, tokens // 2))), max_tokens=48, ignore_eos=True)
    return time.perf_counter() - began


class Timed:
    """Processor time that telling of pages in the prefix tree took."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0
        prefix_tree.tell_stored = self._timed(prefix_tree.tell_stored)
        prefix_tree.tell_removed = self._timed(prefix_tree.tell_removed)

    def _timed(self, tell: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: object) -> None:
            began = time.thread_time()
            tell(*arguments)
            self.seconds += time.thread_time() - began
            self.calls += 1

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    config = localinfer.KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    loaded = {"model": options.model, "threads": 1, "speculation": None, "kv_memory": 6 << 20, "may_measure": False}
    with (
        localinfer.KVEventPublisher(config) as quiet,
        localinfer.KVEventPublisher(config) as heard,
        subscriber(heard.endpoint) as sizes,
        localinfer.load(**loaded) as without,
        localinfer.load(**loaded, kv_events=quiet) as alone,
        localinfer.load(**loaded, kv_events=heard) as read,
    ):
        ways = {"without events": without, "with events": alone, "with a subscriber": read}
        timed = Timed()
        found: dict[str, list[float]] = {name: [] for name in ways}
        for repetition in range(options.repetitions + 1):
            if repetition == 1:
                timed.seconds, timed.calls = 0.0, 0
            for name, llm in ways.items():
                seconds = work(llm, options.prompts, options.tokens, repetition)
                if repetition:
                    found[name].append(seconds)
        for name, times in found.items():
            print(f"{name:20} {statistics.median(times):8.3f} s, fastest {min(times):.3f} s")
        total = sum(found["with events"]) + sum(found["with a subscriber"])
        print(f"told {timed.calls} times in {timed.seconds * 1e3:.2f} ms of {total:.2f} s: {timed.seconds / total:.4%}")
        print(f"{len(sizes)} batches, {sum(sizes):,} bytes")


if __name__ == "__main__":
    main()

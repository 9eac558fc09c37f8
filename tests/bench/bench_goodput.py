"""Goodput above capacity: `python -m tests.bench.bench_goodput [options]`; two minutes on the demo model.

Requests arrive as they come (open loop: Poisson, seeded), at a multiple of what the machine can serve, which is
measured first. Two kinds: short questions of people, and long texts of a batch, each with its objectives: a time to the
first token, and a mean time between tokens. Goodput counts the replies per second that met both. Four policies see the
same arrivals: as they come; admission by predicted TTFT; priorities (people before the batch); both.
"""

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import localinfer
from localinfer.errors import OverloadedError
from localinfer.llm import LLM

CAPACITY_SECONDS = 8.0
_READERS = 16


@dataclass(frozen=True)
class Kind:
    """A kind of request: tokens of its prompt and its reply, its objectives in seconds, its share of arrivals."""

    name: str
    prompt_tokens: int
    reply_tokens: int
    first_token: float
    interval: float
    share: float
    priority: int


KINDS = (Kind("people", 100, 32, 0.5, 0.1, 0.7, 0), Kind("batch", 300, 96, 8.0, 0.25, 0.3, 5))


@dataclass
class Asked:
    """One request and the times of its tokens. arrived: in seconds from the beginning."""

    kind: Kind
    seed: int
    arrived: float
    tokens: list[float] = field(default_factory=list)
    is_refused: bool = False
    is_whole: bool = False

    @property
    def is_good(self) -> bool:
        """Whether it met both objectives, to its end."""
        if not self.is_whole:
            return False
        interval = (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)
        return self.tokens[0] - self.arrived <= self.kind.first_token and interval <= self.kind.interval


def prompt_of(asked: Asked, vocab_size: int) -> list[int]:
    """No two prompts share anything."""
    random = np.random.default_rng(asked.seed)
    ids: list[int] = random.integers(300 % vocab_size, vocab_size - 8, asked.kind.prompt_tokens).tolist()
    return ids


def arrivals(rate: float, seconds: float, seed: int) -> list[Asked]:
    """Requests of a Poisson process with so many per second."""
    random = np.random.default_rng(seed)
    found, now = [], 0.0
    while (now := now + float(random.exponential(1.0 / rate))) < seconds:
        kind = KINDS[int(random.choice(len(KINDS), p=[kind.share for kind in KINDS]))]
        found.append(Asked(kind, 1000 * seed + len(found), now))
    return found


def read(llm: LLM, asked: Asked, began: float, is_over: Callable[[], bool], options: dict[str, Any]) -> None:
    """Generate one reply and note when its tokens come; give up at the end of the run."""
    ids = prompt_of(asked, llm.vocab_size)
    options = {"max_tokens": asked.kind.reply_tokens, "ignore_eos": True, "temperature": 0.0, **options}
    try:
        with llm.stream(ids, **options) as stream:
            for _ in stream:
                asked.tokens.append(time.perf_counter() - began)
                if is_over():
                    return
            asked.is_whole = True
    except OverloadedError:
        asked.is_refused = True


def capacity(llm: LLM, seconds: float) -> float:
    """Replies per second where as many readers as may run ask again at once."""
    made = arrivals(1000.0, 4.0, 99)
    count, lock, began = 0, threading.Lock(), time.perf_counter()

    def work() -> None:
        nonlocal count
        while time.perf_counter() - began < seconds:
            with lock:
                asked = made.pop()
            read(llm, asked, began, lambda: time.perf_counter() - began > seconds, {})
            count += asked.is_whole

    threads = [threading.Thread(target=work) for _ in range(_READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count / seconds


def run(llm: LLM, rate: float, seconds: float, seed: int, *, admits: bool, has_priorities: bool) -> list[Asked]:
    """Let requests arrive; those that have not ended when so many seconds are over have missed their objectives."""
    asked = arrivals(rate, seconds, seed)
    # The same prompts were computed for other policies.
    llm.clear_cache()
    began = time.perf_counter()
    # The last ones have as long as their objectives allow.
    last = seconds + 2.0

    def is_over() -> bool:
        return time.perf_counter() - began > last

    threads = []
    for one in asked:
        options: dict[str, Any] = {"owner": one.seed}
        if admits:
            options["ttft_objective"] = one.kind.first_token
        if has_priorities:
            options["priority"] = one.kind.priority
        time.sleep(max(0.0, one.arrived - (time.perf_counter() - began)))
        threads.append(threading.Thread(target=read, args=(llm, one, began, is_over, options)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return asked


def line(name: str, asked: list[Asked], seconds: float) -> str:
    """Goodput in all and by kind, and how long people waited."""
    cells = [f"{name:34}", f"{sum(one.is_good for one in asked) / seconds:8.2f}"]
    for kind in KINDS:
        mine = [one for one in asked if one.kind is kind]
        cells.append(f"{sum(one.is_good for one in mine):4} of {len(mine):4}")
    waited = [one.tokens[0] - one.arrived for one in asked if one.tokens and one.kind is KINDS[0]]
    p50, p99 = (np.quantile(waited, share) for share in (0.5, 0.99)) if waited else (float("nan"),) * 2
    cells.append(f"{p50:7.2f} {p99:7.2f}")
    cells.append(f"{sum(one.is_refused for one in asked):6}")
    return "  ".join(cells)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the demo model")
    parser.add_argument("--load", type=float, default=1.5, help="arrivals over capacity; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    with localinfer.load(given.model, threads=given.threads, speculation=None) as llm:
        capacity(llm, 1.0)
        most = capacity(llm, CAPACITY_SECONDS)
        rate = given.load * most
        print(
            f"capacity {most:.2f} requests/s; {rate:.2f} arrive per second, for {given.seconds:g} s; seed {given.seed}"
        )
        for kind in KINDS:
            print(
                f"{kind.name}: {100 * kind.share:.0f} %, {kind.prompt_tokens} + {kind.reply_tokens} tokens, the first "
                f"in {kind.first_token:g} s, intervals of {1e3 * kind.interval:g} ms"
            )
        print(f"{'policy':34}  requests/s in time  people in time  batch in time  TTFT of people p50, p99  refused")
        for name, admits, has_priorities in (
            ("as they come", False, False),
            ("admission by predicted TTFT", True, False),
            ("priorities", False, True),
            ("both", True, True),
        ):
            asked = run(llm, rate, given.seconds, given.seed, admits=admits, has_priorities=has_priorities)
            print(line(name, asked, given.seconds), flush=True)
        stats = llm.engine_stats.ttft
        ratios = ", ".join(f"p{100 * share:.0f} {value:.2f}" for share, value in stats.ratio_quantiles.items())
        errors = ", ".join(f"p{100 * share:.0f} {value:.3f} s" for share, value in stats.error_quantiles.items())
        print(f"{stats.num_predicted} predictions; real TTFT over predicted: {ratios}; apart by: {errors}")
        print(f"preempted: {llm.engine_stats.preemptions}")


if __name__ == "__main__":
    main()

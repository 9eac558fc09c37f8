"""Where prefill in a process of its own pays: inter-token latency by measured step costs and the scheduler's rule.

`python -m tests.bench.roles_model --decode MS --row MS --context-row MS`. The costs are of one core: a step that gives
each of the streams a token; a row of a prompt; and what a row costs more for each token before it. A mixed server has
two cores and `speedup` of one; its chunks are as long as `StepCosts` allows, the code that runs in the engine. Apart,
a step decodes on one core, `slowdown` times as long beside a prefill on the other.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localinfer.engine.runner import StepCosts

_WARM_STEPS = 50


@dataclass(frozen=True)
class Costs:
    """Milliseconds on one core. decode: a step of all streams; row: of a prompt; context_row: more per token before."""

    decode: float
    row: float
    context_row: float


@dataclass(frozen=True)
class Outcome:
    """While one prompt is computed: intervals of the streams in milliseconds, and seconds to its first token."""

    intervals: np.ndarray
    prompt_seconds: float

    def percentile(self, which: float) -> float:
        """In milliseconds."""
        return float(np.percentile(self.intervals, which))


def mixed(costs: Costs, tokens: int, *, streams: int, speedup: float) -> Outcome:
    """Chunks of the prompt in the steps of the streams, on both cores."""
    rule, intervals, done = StepCosts(), [], 0
    decode = costs.decode / speedup
    for _ in range(_WARM_STEPS):
        rule.observe(streams, 0, 1e-3 * decode)
    while done < tokens:
        rows = min(rule.chunk_rows(num_streams=streams, num_prompts=1, most=512 - streams, depth=done), tokens - done)
        step = decode + rows * (costs.row + costs.context_row * (done + rows / 2)) / speedup
        rule.observe(streams, rows, 1e-3 * step, done + rows / 2)
        intervals.append(step)
        done += rows
    return Outcome(np.array(intervals), 1e-3 * sum(intervals))


def apart(costs: Costs, tokens: int, *, slowdown: float) -> Outcome:
    """The prompt on one core, the streams on the other."""
    seconds = 1e-3 * slowdown * tokens * (costs.row + costs.context_row * tokens / 2)
    step = costs.decode * slowdown
    return Outcome(np.full(max(1, int(1e3 * seconds / step)), step), seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", type=float, required=True)
    parser.add_argument("--row", type=float, required=True)
    parser.add_argument("--context-row", type=float, required=True)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--speedups", type=lambda text: [float(one) for one in text.split(",")], default=[1.7, 2.0])
    parser.add_argument("--slowdowns", type=lambda text: [float(one) for one in text.split(",")], default=[1.0, 1.2])
    args = parser.parse_args(arguments)
    costs = Costs(args.decode, args.row, args.context_row)
    for speedup in args.speedups:
        together = mixed(costs, args.tokens, streams=args.streams, speedup=speedup)
        shown = [f"{together.percentile(which):.1f}" for which in (50, 99)]
        print(f"mixed, speedup {speedup:g}: p50 {shown[0]}, p99 {shown[1]} ms; prompt {together.prompt_seconds:.1f} s")
        for slowdown in args.slowdowns:
            alone = apart(costs, args.tokens, slowdown=slowdown)
            ratio, longer = (
                together.percentile(99) / alone.percentile(99),
                alone.prompt_seconds / together.prompt_seconds,
            )
            print(
                f"  apart, slowdown {slowdown:g}: p99 {alone.percentile(99):.1f} ms, {ratio:.2f} times better; "
                f"prompt {alone.prompt_seconds:.1f} s, {longer:.2f} times as long"
            )


if __name__ == "__main__":
    main()

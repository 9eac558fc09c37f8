"""How often the two acceptance rules keep a draft model's tokens: `python -m tests.bench.bench_acceptance MODEL DRAFT`.

At each position of a text both models' logits are filtered alike. Rejection sampling accepts with probability
sum(min(p, q)); coupled noise is counted over seeds. A certain draft (n-gram) is kept with p(token) by both rules.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import localinfer
from localinfer.engine.sampling.sampler import Sampler, SamplingParams, SamplingPlan

SETTINGS = (
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.5, "top_k": 0, "top_p": 0.95, "min_p": 0.0},
)


def probabilities(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """float64[V]: what the sampler draws from, by sorting."""
    z = logits.astype(np.float64)
    order = np.lexsort((np.arange(z.size), -z))
    order = order[: params.top_k] if params.top_k else order
    weights = np.exp((z[order] - z[order[0]]) / params.temperature)
    size = order.size
    if params.top_p < 1:
        size = 1 + int(np.searchsorted(np.cumsum(weights), params.top_p * weights.sum()))
    size = max(1, min(size, int(np.count_nonzero(weights >= params.min_p))))
    result = np.zeros(z.size)
    result[order[:size]] = weights[:size] / weights[:size].sum()
    return result


def main() -> None:
    """Print one line per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompt", default="Once upon a time, there was a little dog who")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=60)
    options = parser.parse_args()
    with localinfer.load(options.model, threads=1) as target, localinfer.load(options.draft, threads=1) as draft:
        ids = [*target.tokenizer.encode(options.prompt)]
        ids += target.complete(ids, max_tokens=options.tokens, seed=1, ignore_eos=True).token_ids
        rows = target.logits(ids).copy(), draft.logits(ids).copy()
    sampler, history = Sampler(rows[0].shape[1]), np.array(ids, np.int32)
    print(f"{'':<58}{'rejection':>10}{'coupled':>9}{'ratio':>7}")
    for setting in SETTINGS:
        overlap = np.array(
            [
                np.minimum(*(probabilities(row, SamplingParams(**setting)) for row in pair)).sum()
                for pair in zip(*rows, strict=True)
            ]
        )
        same = 0
        for seed in range(options.seeds):
            plan = SamplingPlan(SamplingParams(**setting, seed=seed), rows[0].shape[1])
            for position, pair in enumerate(zip(*rows, strict=True)):
                one, other = (sampler.choose(row, plan, position, history) for row in pair)
                same += one == other
        coupled = same / options.seeds / len(ids)
        print(f"{setting!s:<58.58}{overlap.mean():>10.4f}{coupled:>9.4f}{coupled / overlap.mean():>7.3f}")


if __name__ == "__main__":
    main()

"""Simulate the engine and its cache: python -m tests.proof.simulation --steps N --seed S.

Runs of 2,500 steps, each from a seed of its own, S, S + 1 and so on, over the models in turn. The first violation ends
it with its seed and the fewest operations found that lead to it, and exit status 1. --plant applies a planted bug of
`planted.py`, which should be found.
"""

import argparse
import importlib
import logging
import multiprocessing
import sys
import time

from tests.proof.simulation import jobs

MODELS = ("dense", "window", "hybrid", "mixture")
KEPT = "disk"
"""No engine, and all that is kept on disk, by several processes: `disk_world.py`."""


def main() -> int:
    """Run as asked; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.simulation", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="operations in all; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; default: %(default)s")
    parser.add_argument("--model", choices=("all", *MODELS, KEPT), default="all", help="default: all but disk")
    parser.add_argument("--jobs", type=int, default=1, help="processes; default: %(default)s")
    parser.add_argument("--plant", metavar="NAME", help="apply a planted bug first")
    parser.add_argument("--no-shrink", action="store_true", help="tell the seed of a violation at once")
    options = parser.parse_args()
    if options.plant is not None:
        # Before anything of the product is imported that it changes.
        importlib.import_module("tests.proof.simulation.planting").plant(options.plant)
    logging.disable(logging.CRITICAL)
    if options.model == KEPT:
        return _keep(options.steps, options.seed, not options.no_shrink)
    from tests.proof.simulation.campaign import RUN_STEPS

    models = MODELS if options.model == "all" else (options.model,)
    runs = []
    left, seed = options.steps, options.seed
    while left > 0:
        runs.append((models[seed % len(models)], seed, min(left, RUN_STEPS)))
        left -= RUN_STEPS
        seed += 1
    began = time.monotonic()
    if options.jobs == 1:
        reports = [jobs.work((runs, not options.no_shrink, True, None))]
    else:
        context = multiprocessing.get_context("spawn")
        parts = [
            (runs[job :: options.jobs], not options.no_shrink, job == 0, options.plant) for job in range(options.jobs)
        ]
        with context.Pool(options.jobs) as pool:
            reports = []
            for report in pool.imap_unordered(jobs.work, parts):
                reports.append(report)
                if report.failure is not None:
                    break
            pool.terminate()
    steps, runs_done = sum(report.steps for report in reports), sum(report.runs for report in reports)
    seconds = time.monotonic() - began
    for report in reports:
        if report.failure is not None:
            print(report.failure.describe())
            return 1
    counts = sum((report.counts for report in reports), start=type(reports[0].counts)())
    told = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
    print(f"{steps:,} steps in {runs_done:,} runs from seed {options.seed}: no violation ({seconds:.1f} s; {told})")
    return 0


def _keep(steps: int, seed: int, shrinks: bool) -> int:
    from tests.proof.simulation.disk_world import simulate

    found = simulate(steps, seed, shrinks=shrinks)
    print(found or f"{steps:,} steps from seed {seed}: no violation")
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main())

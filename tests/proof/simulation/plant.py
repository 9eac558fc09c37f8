"""Measure how long the simulation takes to find each planted bug: python -m tests.proof.simulation.plant [NAME ...].

A table of what was found, and exit status 1 if a bug was not, in `--seconds` of processor time.
"""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.proof.simulation.planted import PLANTED
from tests.proof.simulation.planting import Planted

_STEPS = 10_000_000
_LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
runpy.run_module("tests.proof.simulation", run_name="__main__")
"""
"""The simulation, ended by the system after some seconds of the processor, however busy the machine is."""


@dataclass(frozen=True)
class Found:
    """What became of a bug. error: of the simulation; None if it found nothing. seconds: of the processor."""

    error: str | None
    seconds: float
    steps: int


def search(bug: Planted, *, seconds: float, seed: int = 1) -> Found:
    """Simulate with a bug until it is found, or for so many seconds of the processor.

    Raises: RuntimeError if the bug cannot be planted.
    """
    options = ["--plant", bug.name, "--steps", str(_STEPS), "--seed", str(seed), "--model", bug.model, "--no-shrink"]
    began = _children_seconds()
    words = [sys.executable, "-c", _LIMITED, str(int(seconds)), *options]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    taken = _children_seconds() - began
    found = re.search(r"violation in model \w+, seed (\d+), after (\d+) steps: (.*)", done.stdout)
    if found is not None:
        return Found(found[3], taken, int(found[2]))
    if done.returncode >= 0:
        raise RuntimeError(f"{bug.name}: {done.stderr[-600:] or done.stdout[-600:]}")
    return Found(None, taken, 0)


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> int:
    """Search for the bugs that are named, or for all."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.simulation.plant", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the processor for each; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    known = {bug.name: bug for bug in PLANTED}
    if unknown := sorted(set(options.names) - known.keys()):
        parser.error(f"there is no planted bug {', '.join(unknown)}")
    missed = 0
    print("| bug | seconds | found as |\n|---|---|---|", flush=True)
    for name in options.names or known:
        found = search(known[name], seconds=options.seconds, seed=options.seed)
        missed += found.error is None
        told = "NOT FOUND" if found.error is None else found.error[:100]
        print(f"| `{name}` | {found.seconds:.1f} | {told} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The fleet model beside a real fleet: the options of a comparison, each figure beside the model's, a file of both.

`fleet_engines` has engines measured, `tests.bench.bench_fleet_check` servers.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.proof.simulation.fleet import FleetOptions, simulate
from tests.proof.simulation.fleet_costs import StepCosts
from tests.proof.simulation.fleet_figures import Figures
from tests.proof.simulation.fleet_replica import ReplicaOptions
from tests.proof.simulation.fleet_users import visits_of
from tests.proof.simulation.fleet_workload import REPLICA_KV_TOKENS, Workload, make_workload

SHOWN = ("hit_rate", "tokens_per_second", "ttft_p50", "ttft_p99", "interval_p50", "interval_p99")

Measure = Callable[[Workload, FleetOptions, float], tuple[Figures, Mapping[str, float]]]
"""Figures of a real fleet for a workload, options and a scale of think times, and shares that tell how it was."""


def comparison_parser(description: str | None, *, think_scales: str) -> argparse.ArgumentParser:
    """The options of both comparisons, without the costs that they predict by."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--policies", default="prefix,random")
    parser.add_argument("--think-scales", default=think_scales, help="multiplies times of arrival and thinking")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", help="JSON file of both")
    return parser


def compare(words: argparse.Namespace, costs: StepCosts, measure: Measure) -> None:
    """Measure, predict, and print both. words: of `comparison_parser`."""
    workload = make_workload(words.seed)
    record: list[dict[str, Any]] = []
    for scale in map(float, words.think_scales.split(",")):
        for policy in words.policies.split(","):
            replica = ReplicaOptions(kv_tokens=REPLICA_KV_TOKENS)
            options = FleetOptions(replicas=words.replicas, policy=policy, replica=replica, seed=words.seed)
            figures, shares = measure(workload, options, scale)
            real, guess = asdict(figures), asdict(simulate(costs, options, visits_of(workload, think_scale=scale)))
            record.append({"policy": policy, "think_scale": scale, **shares, "measured": real, "predicted": guess})
            said = "".join(f", {name} {share:.0%}" for name, share in shares.items())
            print(f"{policy}, think times x {scale:g}{said}:")
            _print_beside(real, guess)
    if words.output:
        Path(words.output).write_text(json.dumps(record, indent=1) + "\n")


def _print_beside(real: dict[str, float], guess: dict[str, float]) -> None:
    for name in SHOWN:
        off = guess[name] / real[name] - 1 if real[name] else 0.0
        print(f"  {name:>18} measured {real[name]:10.5g} predicted {guess[name]:10.5g} {off:+7.1%}", flush=True)

"""From one replica to 1,000, by the fleet model: `python -m tests.proof.simulation.fleet_study --output STUDY.json`.

Two parts: policies by the number of replicas, and prompts computed apart. Of each number of replicas
and policy several loads are tried: the goodput that counts is the best, which is where a person who pays would run it.
At that load other seeds are run too, for the spread. `fleet_plots` draws the file.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.proof.simulation.fleet import Fleet, FleetOptions, PrefillApart
from tests.proof.simulation.fleet_costs import StepCosts
from tests.proof.simulation.fleet_figures import Objective
from tests.proof.simulation.fleet_replica import ReplicaOptions
from tests.proof.simulation.fleet_users import Population

POLICIES = ("random", "two-choices", "prefix")
REPLICAS = (1, 2, 4, 10, 30, 100, 300, 1_000)
LOADS = {
    "random": (1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 14.0),
    "two-choices": (1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 14.0),
    "prefix": (1.5, 2.5, 4.0, 6.0, 10.0, 14.0, 18.0),
}
"""Conversations per replica that would be open at a time if replies took no time."""
LOADS_OF_LARGE = {"random": (2.5, 4.0), "two-choices": (2.5, 4.0), "prefix": (10.0, 14.0)}
"""Those that are best in fleets of up to 100."""
LARGE = 300
PRICE = 0.05
"""Of a replica and hour: one core."""
KV_TOKENS = 65_536
OBJECTIVE = Objective(first_token=8.0, interval=0.1)
PEOPLE = Population(per_second=1.0)
READERS = replace(PEOPLE, first_tokens=1_200.0, later_tokens=120.0, reply_tokens=100.0, turns=3.0)
"""People who bring a long text along."""
APART_REPLICAS = 16
APART_SPLITS = (0, 4, 6, 8, 10)
APART_LOADS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 9.0, 12.0)
APART_FIRST_TOKEN = 15.0
LINK_BYTES_PER_SECOND = 1e9

Record = dict[str, Any]


def run_fleet(
    costs: StepCosts,
    people: Population,
    *,
    replicas: int,
    policy: str,
    load: float,
    split: int = 0,
    seed: int = 1,
) -> tuple[Fleet, Record]:
    """One simulation, counted after as long as a conversation and more takes; longer for few replicas."""
    lifetime = people.turns * people.think_seconds
    population = replace(people, per_second=load * replicas / lifetime)
    warm = (1.2 if replicas >= LARGE else 2.0) * lifetime
    counted = min(6_000.0, max(120.0 if replicas >= LARGE else 300.0, 12_000.0 / replicas))
    options = FleetOptions(
        replicas=replicas,
        policy=policy,
        replica=ReplicaOptions(kv_tokens=KV_TOKENS),
        seed=seed,
        apart=PrefillApart(replicas=split, bytes_per_second=LINK_BYTES_PER_SECOND) if split else None,
        objective=OBJECTIVE,
        warm_seconds=warm,
        until=warm + counted,
    )
    fleet = Fleet(costs, options)
    figures = fleet.run(population.visits(seed, warm + counted))
    cost = figures.cost_per_million(PRICE, replicas)
    return fleet, {
        "replicas": replicas,
        "policy": policy,
        "load": load,
        "split": split,
        "seed": seed,
        "cost_per_million": None if cost == float("inf") else cost,
        **asdict(figures),
    }


def study_policies(costs: StepCosts, numbers: Sequence[int], num_seeds: int) -> Iterator[Record]:
    """Some numbers of replicas, with every policy and load and the first seed; the best load with the others."""
    for replicas in numbers:
        for policy in POLICIES:
            found: list[Record] = []
            for load in LOADS_OF_LARGE[policy] if replicas >= LARGE else LOADS[policy]:
                found.append(run_fleet(costs, PEOPLE, replicas=replicas, policy=policy, load=load)[1])
                yield found[-1]
            load = max(found, key=lambda one: one["good_tokens_per_second"])["load"]
            for seed in range(2, num_seeds + 1):
                yield run_fleet(costs, PEOPLE, replicas=replicas, policy=policy, load=load, seed=seed)[1]


def study_apart(costs: StepCosts) -> Iterator[Record]:
    """The same replicas with and without some for prompts alone, by load, for two kinds of users.

    in_time: the share of requests whose first token comes within APART_FIRST_TOKEN.
    """
    in_time = Objective(first_token=APART_FIRST_TOKEN, interval=float("inf"))
    for name, people in (("chat", PEOPLE), ("documents", READERS)):
        for split in APART_SPLITS:
            for load in APART_LOADS:
                fleet, record = run_fleet(
                    costs, people, replicas=APART_REPLICAS, policy="prefix", load=load, split=split
                )
                yield {"people": name, **record, "in_time": fleet.figures(in_time).good_share}


def _tell(record: Record) -> None:
    sys.stderr.write(
        f"{record['replicas']:5d} {record['policy']:12} load {record['load']:4} split {record['split']} "
        f"seed {record['seed']} "
        f"hits {record['hit_rate']:.3f} good {record['good_share']:.3f} ttft {record['ttft_p50']:.2f}/"
        f"{record['ttft_p99']:.2f} itl {record['interval_p50']:.3f}/{record['interval_p99']:.3f} "
        f"{record['good_tokens_per_second'] / record['replicas']:.2f} tok/s each\n"
    )


def main() -> None:
    """Run both parts, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", default="tinyllama")
    parser.add_argument("--parts", default="policies,apart")
    parser.add_argument("--replicas", type=int, nargs="*", default=REPLICAS, help="those of the policies' part")
    parser.add_argument("--seeds", type=int, default=3, help="runs of the best load of each policy")
    parser.add_argument("--output", required=True)
    words = parser.parse_args()
    costs = StepCosts.read(words.costs)
    output = Path(words.output)
    record = json.loads(output.read_text()) if output.exists() else {}
    record["costs"] = costs.name
    began = time.perf_counter()
    for part in words.parts.split(","):
        # Other numbers of replicas may be there from a call before.
        record[part] = [
            one for one in record.get(part, ()) if part == "policies" and one["replicas"] not in words.replicas
        ]
        for one in study_policies(costs, words.replicas, words.seeds) if part == "policies" else study_apart(costs):
            _tell(one)
            record[part].append(one)
            # Each is kept as soon as it is there: the largest fleets take minutes.
            output.write_text(json.dumps(_rounded(record), separators=(",", ":")) + "\n")
    sys.stderr.write(f"{time.perf_counter() - began:.0f} s\n")


def _rounded(value: Any) -> Any:
    """Floats with four digits: no more are known."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()

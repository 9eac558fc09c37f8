"""A fleet of replicas as a discrete-event model, fed with measured step costs.

    python -m tests.proof.simulation.fleet --replicas 2 --policy prefix --seed 1
    python -m tests.proof.simulation.fleet --replicas 100 --policy random --users 10 --costs tinyllama --price 0.08

Without --users the conversations are those of `fleet_workload`, which `tests/bench/bench_fleet_check.py` runs on real
replicas; with it, so many users per replica at a time come at random. Users send a conversation's next message some
time after they have its reply, so a slow fleet is asked less.
"""

import argparse
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tests.proof.simulation.fleet_costs import StepCosts
from tests.proof.simulation.fleet_figures import Figures, Objective, Outcome, figures_of, interval_percentiles
from tests.proof.simulation.fleet_memory import Request
from tests.proof.simulation.fleet_replica import Intervals, Replica, ReplicaOptions
from tests.proof.simulation.fleet_router import POLICIES, Router, View
from tests.proof.simulation.fleet_users import Population, Visit, visits_of
from tests.proof.simulation.fleet_workload import REPLICA_KV_TOKENS, make_workload


@dataclass(frozen=True, kw_only=True)
class PrefillApart:
    """Prompts are computed by replicas of their own and handed over.

    replicas: of all, those that compute prompts. least_tokens: what is not cached of a shorter prompt is computed where
    it is decoded. bytes_per_second, seconds: of handing over.
    """

    replicas: int
    least_tokens: int = 128
    bytes_per_second: float = 1e9
    seconds: float = 0.005


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """replicas: all of them. objective: for goodput. warm_seconds: requests sent before are not counted;
    until: none are sent later, None for all."""

    replicas: int
    policy: str
    replica: ReplicaOptions
    seed: int = 1
    apart: PrefillApart | None = None
    objective: Objective = field(default_factory=Objective)
    warm_seconds: float = 0.0
    until: float | None = None


class Server(View, Protocol):
    """What a fleet needs of a replica. busy_seconds: in which it computed."""

    busy_seconds: float

    def match(self, request: Request) -> int:
        """Tokens of a prompt that are cached there."""
        ...

    def expect(self, request: Request) -> None:
        """Count a request that is on its way."""
        ...

    def arrive(self, request: Request) -> None:
        """Take on a request."""
        ...


MakeReplica = Callable[["Fleet", int, Callable[[Request], None]], Server]


class Fleet:
    """A simulation: `run` it once.

    make_replica: gives the replica of a number, which calls a function with each request that has ended; None for
    simulated ones.
    """

    def __init__(self, costs: StepCosts, options: FleetOptions, make_replica: MakeReplica | None = None) -> None:
        self.now = 0.0
        self.options, self.costs = options, costs
        self.intervals = Intervals()
        self.ended: list[Request] = []
        self.sent = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._systems: set[int] = set()
        self._visits: dict[int, tuple[Visit, int]] = {}
        apart = options.apart
        num_prefill = 0 if apart is None else apart.replicas
        if not 0 <= num_prefill < options.replicas:
            raise ValueError(f"of {options.replicas} replicas {num_prefill} cannot be for prompts alone")
        make = make_replica or _simulated
        self.replicas = [make(self, number, self._on_end) for number in range(options.replicas - num_prefill)]
        self.router = Router(options.policy, self.replicas, options.seed)
        self.prefill_replicas = [_simulated(self, number, self._on_prefilled) for number in range(num_prefill)]
        self._prefill_router = Router("prefix", self.prefill_replicas, options.seed) if num_prefill else None
        self._handed: dict[int, tuple[Request, Server]] = {}

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Do something at a moment, what was asked for first before others of the same moment."""
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, action))

    def run(self, visits: Iterable[Visit]) -> Figures:
        """Let all visits end; return the figures of those requests that count."""
        for visit in visits:
            self.at(visit.start_seconds, lambda visit=visit: self._send(visit, 0))  # type: ignore[misc]
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        return self.figures(self.options.objective)

    def _send(self, visit: Visit, index: int) -> None:
        turn = visit.turns[index]
        shareable = turn.own_tokens
        if not index and visit.system in self._systems:
            shareable = min(visit.system_tokens, turn.prompt - 1)
        self._systems.add(visit.system)
        request = Request(
            visit.number,
            visit.system,
            min(visit.system_tokens, turn.prompt - 1),
            turn.own_tokens,
            turn.prompt,
            turn.reply,
            shareable,
            sent=self.now,
        )
        self.sent += 1
        self._visits[visit.number] = visit, index
        replica = self.replicas[self.router.choose(request)]
        replica.expect(request)
        apart = self.options.apart
        if apart is not None and request.estimate >= apart.least_tokens:
            self.at(self.now + self.costs.request, lambda: self._prefill(request, replica))
        else:
            self.at(self.now + self.costs.request, lambda: replica.arrive(request))

    def _prefill(self, request: Request, replica: Server) -> None:
        """Have a prompt computed elsewhere, in whole pages."""
        assert self._prefill_router is not None
        whole = (request.prompt - 1) - (request.prompt - 1) % self.costs.page_tokens
        job = Request(
            request.conversation,
            request.system,
            min(request.system_tokens, whole),
            min(request.own_tokens, whole),
            whole,
            1,
            0,
            sent=self.now,
            hands_over=True,
        )
        number = self._prefill_router.choose(job)
        self._handed[request.conversation] = request, replica
        self.prefill_replicas[number].expect(job)
        self.prefill_replicas[number].arrive(job)

    def _on_prefilled(self, job: Request) -> None:
        apart = self.options.apart
        assert apart is not None and self._prefill_router is not None
        self._prefill_router.ended(job)
        request, replica = self._handed.pop(job.conversation)
        held = replica.match(request)
        moved = max(0, job.prompt - held) * self.costs.kv_bytes
        request.handed_tokens = job.prompt
        # What was computed for it is no hit, wherever that was.
        request.hits = max(held, job.cached)
        self.at(self.now + apart.seconds + moved / apart.bytes_per_second, lambda: replica.arrive(request))

    def _on_end(self, request: Request) -> None:
        self.ended.append(request)
        self.router.ended(request)
        visit, index = self._visits[request.conversation]
        more = visit.turns[index + 1 :]
        until = self.options.until
        if more and (until is None or self.now + more[0].think_seconds < until):
            self.at(self.now + more[0].think_seconds, lambda: self._send(visit, index + 1))
        else:
            del self._visits[request.conversation]

    def figures(self, objective: Objective) -> Figures:
        """What was done, by an objective."""
        options = self.options
        until = float("inf") if options.until is None else options.until
        counted = [Outcome.of(request) for request in self.ended if options.warm_seconds <= request.sent < until]
        seconds = None if options.until is None else until - options.warm_seconds
        p50, p99 = interval_percentiles(self.intervals)
        busy = sum(replica.busy_seconds for replica in self.replicas) / max(self.now, 1e-9) / len(self.replicas)
        return figures_of(counted, (p50, p99), objective, seconds=seconds, utilization=busy)


def _simulated(fleet: Fleet, number: int, on_end: Callable[[Request], None]) -> Replica:
    return Replica(number, fleet, fleet.costs, fleet.options.replica, fleet.intervals, on_end)


def simulate(costs: StepCosts, options: FleetOptions, visits: Iterable[Visit]) -> Figures:
    """The figures of one run."""
    return Fleet(costs, options).run(visits)


def main() -> None:
    """Simulate one fleet, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="prefix")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--costs", default="demo", help="measured step costs: a file, or a name in this folder")
    parser.add_argument("--kv-tokens", type=int, default=REPLICA_KV_TOKENS, help="memory of a replica")
    parser.add_argument("--think-scale", type=float, default=1.0, help="multiplies times of arrival and thinking")
    parser.add_argument("--users", type=float, help="conversations per replica at a time, in place of the workload")
    parser.add_argument("--seconds", type=float, default=600.0, help="in which users come")
    parser.add_argument("--ttft", type=float, default=0.5, help="objective in seconds")
    parser.add_argument("--interval", type=float, default=0.05, help="objective in seconds, of a reply's mean")
    parser.add_argument("--price", type=float, default=0.0, help="of a replica and hour, for the cost")
    parser.add_argument("--prefill-replicas", type=int, default=0, help="of all, those that compute prompts alone")
    words = parser.parse_args()
    warm, until = 0.0, None
    if words.users is None:
        visits: Iterable[Visit] = visits_of(make_workload(words.seed), think_scale=words.think_scale)
    else:
        population = Population(per_second=1.0)
        # Little's law: as many begin as end.
        lifetime = population.turns * population.think_seconds
        population = Population(per_second=words.users * words.replicas / lifetime)
        visits = population.visits(words.seed, words.seconds)
        warm, until = words.seconds / 3, words.seconds
    options = FleetOptions(
        replicas=words.replicas,
        policy=words.policy,
        replica=ReplicaOptions(kv_tokens=words.kv_tokens),
        seed=words.seed,
        apart=PrefillApart(replicas=words.prefill_replicas) if words.prefill_replicas else None,
        objective=Objective(words.ttft, words.interval),
        warm_seconds=warm,
        until=until,
    )
    figures = simulate(StepCosts.read(words.costs), options, visits)
    print(figures.lines())
    if words.price:
        print(f"{'cost_per_million':>22} {figures.cost_per_million(words.price, words.replicas):.6g}")


if __name__ == "__main__":
    main()

"""Two replicas beside what the fleet model says of them: `python -m tests.bench.bench_fleet_check --output CHECK.json`.

Starts `localinfer serve` processes of the demo model with one thread each, holds the conversations of
`tests.proof.simulation.fleet_workload` with them through a router in this client, and prints each figure beside the
model's. Servers are started anew for each line: their caches are empty. Latencies agree on a machine that does nothing
else: the share of its processor time that went to others is printed too. `tests.proof.simulation.fleet_engines`
compares without that condition, and without HTTP.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import psutil

from localinfer.apps.bench.figures import Failure, RequestTimes, percentile
from localinfer.apps.bench.processes import ServerProcess
from localinfer.apps.bench.serve import CHAT_PATH, LoadClient, chat, chat_body, read_reply
from localinfer.loading.options import model_path
from tests.proof.simulation.fleet import FleetOptions
from tests.proof.simulation.fleet_comparison import compare, comparison_parser
from tests.proof.simulation.fleet_costs import StepCosts
from tests.proof.simulation.fleet_figures import Figures, Objective, Outcome, figures_of
from tests.proof.simulation.fleet_memory import Request
from tests.proof.simulation.fleet_router import Router
from tests.proof.simulation.fleet_workload import (
    REPLICA_KV_BYTES,
    Conversation,
    Workload,
)


class ReplicaView:
    """A server, and how many requests it has."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.outstanding = 0


class Fleet:
    """Servers, and a client that routes."""

    def __init__(self, ports: list[int], policy: str, seed: int) -> None:
        self.views = [ReplicaView(port) for port in ports]
        self.router = Router(policy, self.views, seed)
        self.outcomes: list[Outcome] = []
        self.intervals: list[float] = []

    async def run(self, workload: Workload, think_scale: float) -> None:
        """Hold all conversations."""
        for number, view in enumerate(self.views):
            # The first request of a process takes longer; its text is none of the workload's.
            with closing(LoadClient(view.port)) as client:
                for _ in range(3):
                    await chat(client, chat_body(f"warm {number}", 16, 1))
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for conversation in workload.conversations:
                group.create_task(self._hold(conversation, began, think_scale))

    async def _hold(self, conversation: Conversation, began: float, think_scale: float) -> None:
        await asyncio.sleep(began + conversation.start_seconds * think_scale - time.perf_counter())
        replies: list[str] = []
        with ExitStack() as connections:
            clients = [connections.enter_context(closing(LoadClient(view.port))) for view in self.views]
            for index, turn in enumerate(conversation.turns):
                if index:
                    await asyncio.sleep(turn.think_seconds * think_scale)
                request = Request(
                    conversation.number,
                    conversation.system,
                    conversation.system_tokens,
                    turn.shareable_tokens if index else 0,
                    turn.prompt_tokens,
                    turn.reply_tokens,
                    turn.shareable_tokens,
                )
                number = self.router.choose(request)
                view = self.views[number]
                view.outstanding += 1
                answer = await clients[number].request("POST", CHAT_PATH, conversation.request_body(index, replies))
                view.outstanding -= 1
                self.router.ended(request)
                reply = read_reply(answer, turn.reply_tokens)
                if isinstance(reply, Failure):
                    raise SystemExit(f"conversation {conversation.number}, turn {index}: {reply.reason}")
                replies.append(reply.text)
                self._note(reply, request, next(_cached_tokens(answer.body)))

    def _note(self, reply: RequestTimes, request: Request, cached: int) -> None:
        times = reply.sent, reply.time_to_first_token_seconds + reply.sent, reply.tokens[-1]
        self.outcomes.append(Outcome(*times, reply.prompt_tokens, reply.num_tokens, cached, request.shareable))
        self.intervals += reply.intervals


def _cached_tokens(body: bytes) -> Iterator[int]:
    for line in body.split(b"\n"):
        if line.startswith(b"data: {") and (usage := json.loads(line[6:]).get("usage")):
            yield usage["prompt_tokens_details"]["cached_tokens"]


class OtherPrograms:
    """Measures which share of the machine's processor time goes to others than this process and its children."""

    def __init__(self) -> None:
        self._all, self._own = self._busy()

    def share(self) -> float:
        """Since the start, from 0 to 1."""
        (busy, total), own = self._busy()
        return max(0.0, (busy - self._all[0]) - (own - self._own)) / max(1e-9, total - self._all[1])

    @staticmethod
    def _busy() -> tuple[tuple[float, float], float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guests' time is counted among that of users.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        this = psutil.Process()
        own = [this.cpu_times(), *(child.cpu_times() for child in this.children(recursive=True))]
        return (total - idle, total), sum(one.user + one.system for one in own)


def measure(workload: Workload, options: FleetOptions, think_scale: float) -> tuple[Figures, dict[str, float]]:
    """The figures of real replicas, and what share of the processors other programs had meanwhile."""
    more = ["--speculation", "off", "--kv-memory", str(REPLICA_KV_BYTES)]
    with ExitStack() as servers:
        model = str(model_path(None))
        ports = [
            servers.enter_context(ServerProcess(model, device="cpu", threads=1, max_generations=64, more=more)).port
            for _ in range(options.replicas)
        ]
        fleet = Fleet(ports, options.policy, options.seed)
        others = OtherPrograms()
        asyncio.run(fleet.run(workload, think_scale))
        share = others.share()
    spread = percentile(fleet.intervals, 50), percentile(fleet.intervals, 99)
    return figures_of(fleet.outcomes, spread, Objective()), {"others": share}


def main() -> None:
    """Measure, predict, and print both."""
    parser = comparison_parser(__doc__, think_scales="1,0.2")
    parser.add_argument("--costs", default="demo")
    words = parser.parse_args()
    compare(words, StepCosts.read(words.costs), measure)


if __name__ == "__main__":
    main()

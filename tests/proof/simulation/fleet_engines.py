"""Real engines in the fleet's place: `python -m tests.proof.simulation.fleet_engines [--policies prefix,random]`.

Users, router and clock are those of the model; each replica is an engine of the demo model with its own cache, whose
steps are really computed, one after another in this thread. A step takes, on the simulated clock, the processor time
that it took here. So scheduler, cache, eviction and step costs are the real ones, HTTP is left out, and what else a
shared machine computes meanwhile disturbs little. Prints each figure beside the model's.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.params import SamplingParams
from localinfer.engine.scheduler import Generation
from localinfer.loading.options import model_path
from localinfer.models.load.loader import Model, load_model
from tests.bench.bench_step_costs import measure_engine, measure_steps
from tests.proof.simulation.fleet import Fleet, FleetOptions
from tests.proof.simulation.fleet_comparison import compare, comparison_parser
from tests.proof.simulation.fleet_costs import StepCosts
from tests.proof.simulation.fleet_figures import Figures
from tests.proof.simulation.fleet_memory import Request
from tests.proof.simulation.fleet_users import visits_of
from tests.proof.simulation.fleet_workload import REPLICA_KV_BYTES, Workload

_END_TOKEN_IDS = (1, 3)
CONTEXTS, REPETITIONS = (0, 256, 896), 12


class Texts:
    """Token ids of every conversation of a workload, as they grow."""

    def __init__(self, workload: Workload, model: Model) -> None:
        assert model.tokenizer is not None
        self._tokenizer = model.tokenizer
        self._conversations = {one.number: one for one in workload.conversations}
        self._ids: dict[int, list[int]] = {}
        self._turns: dict[int, int] = {}

    def prompt(self, number: int) -> tuple[list[int], int]:
        """The ids of a conversation's next prompt, and its seed."""
        conversation = self._conversations[number]
        index = self._turns.get(number, 0)
        turn = conversation.turns[index]
        head = f"<|im_start|>system\n{conversation.system_text}<|im_end|>\n" if not index else "<|im_end|>\n"
        text = f"{head}<|im_start|>user\n{turn.text}<|im_end|>\n<|im_start|>assistant\n"
        ids = self._tokenizer.encode(text, add_special=not index, parse_special=True)
        self._ids[number] = [*self._ids.get(number, ()), *ids]
        return self._ids[number], turn.seed

    def answer(self, number: int, reply: list[int]) -> None:
        """Add a reply."""
        self._ids[number] = [*self._ids[number], *reply]
        self._turns[number] = self._turns.get(number, 0) + 1


class EngineReplica:
    """As `fleet_replica.Replica`, with an engine."""

    def __init__(self, fleet: Fleet, engine: Engine, texts: Texts, on_end: Callable[[Request], None]) -> None:
        self.outstanding = self.pending_tokens = 0
        self.busy_seconds = 0.0
        self._fleet, self._engine, self._texts = fleet, engine, texts
        self._on_end = on_end
        self._held: dict[int, int] = {}
        self._systems: set[int] = set()
        self._running: list[tuple[Request, Generation, list[int]]] = []
        self._is_stepping = False

    def match(self, request: Request) -> int:
        """What of a prompt was sent here before: a router outside knows no more."""
        own = min(self._held.get(request.conversation, 0), request.own_tokens)
        return max(own, request.system_tokens if request.system in self._systems else 0)

    def expect(self, request: Request) -> None:
        """Count a request that is on its way."""
        request.estimate = request.prompt - self.match(request)
        self.outstanding += 1
        self.pending_tokens += request.estimate

    def arrive(self, request: Request) -> None:
        """Take on a request."""
        ids, seed = self._texts.prompt(request.conversation)
        assert len(ids) == request.prompt, "the workload's counts hold"
        generation = self._engine.generate(
            ids,
            SamplingParams(seed=seed, logit_bias=dict.fromkeys(_END_TOKEN_IDS, -100.0)),
            max_tokens=request.reply,
            ignore_eos=True,
            cache_hints=CacheHints(system_tokens=request.system_tokens - 3),
        )
        generation.request.is_started = True
        self._engine.scheduler.running.append(generation.request)
        self._running.append((request, generation, []))
        self._held[request.conversation] = request.length
        self._systems.add(request.system)
        if not self._is_stepping:
            self._begin()

    def _begin(self) -> None:
        if not self._running:
            return
        seconds = step_seconds(self._engine)
        self.busy_seconds += seconds
        self._is_stepping = True
        self._fleet.at(self._fleet.now + seconds, lambda: self._end(seconds))

    def _end(self, seconds: float) -> None:
        self._is_stepping = False
        over: list[tuple[Request, Generation, list[int]]] = []
        num_streams = 0
        for entry in self._running:
            request, generation, reply = entry
            new = [event.token_id for event in generation.request.events]
            generation.request.events.clear()
            num_streams += bool(reply) and bool(new)
            reply += new
            if new and request.first_token < 0:
                request.first_token = self._fleet.now
                self.pending_tokens -= request.estimate
            if generation.request.is_over:
                assert generation.request.error is None and len(reply) == request.reply
                over.append(entry)
        self._fleet.intervals.add(seconds, num_streams)
        for entry in over:
            request, generation, reply = entry
            self._running.remove(entry)
            self._texts.answer(request.conversation, reply)
            request.cached, request.ended = generation.record.cached_tokens, self._fleet.now
            request.computed, request.generated = request.prompt, request.reply
            self.outstanding -= 1
        self._begin()
        for request, _, _ in over:
            self._on_end(request)


def step_seconds(engine: Engine) -> float:
    """Take one step of all requests of an engine; return the processor time of this thread that it took."""
    began = time.thread_time()
    engine.scheduler._step()
    return time.thread_time() - began


@contextmanager
def processor_time() -> Iterator[None]:
    """Let engines choose the length of chunks by processor time."""
    with patch("localinfer.engine.runner.time", SimpleNamespace(perf_counter=time.thread_time)):
        yield


def measure(model: Model, costs: StepCosts, workload: Workload, options: FleetOptions, think_scale: float) -> Figures:
    """The figures of real engines on the simulated clock."""
    engines = [Engine(model, kv_memory=REPLICA_KV_BYTES) for _ in range(options.replicas)]
    texts = Texts(workload, model)
    for engine in engines:
        # What is made once and the first chunks' length are not measured.
        for _ in range(4):
            list(engine.generate(np.arange(300, 600), SamplingParams(temperature=0.0), max_tokens=8, ignore_eos=True))
        with engine.exclusive_cache() as cache:
            cache.clear()

    def make(fleet: Fleet, number: int, on_end: Callable[[Request], None]) -> EngineReplica:
        return EngineReplica(fleet, engines[number], texts, on_end)

    with processor_time():
        return Fleet(costs, options, make).run(visits_of(workload, think_scale=think_scale))


def measured_costs() -> StepCosts:
    """Step costs of the demo model in processor time, as they are now."""
    path = str(model_path(None))
    steps = measure_steps(path, 1, CONTEXTS, REPETITIONS, time.thread_time)
    record = {"model": Path(path).stem, **steps, "engine": measure_engine(path, steps, time.thread_time)}
    return StepCosts.from_record(record, beside="engine")


def main() -> None:
    """Measure, predict, and print both."""
    parser = comparison_parser(__doc__, think_scales="1,0.1")
    parser.add_argument("--costs", help="a measured file (default: measured now)")
    words = parser.parse_args()
    costs = StepCosts.read(words.costs, beside="engine") if words.costs else measured_costs()
    with closing(load_model(model_path(None), threads=1)) as model:
        compare(words, costs, lambda workload, options, scale: (measure(model, costs, workload, options, scale), {}))


if __name__ == "__main__":
    main()

"""Runs of a simulation, one after the other, each from a seed of its own; and what is told of one that fails."""

import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.proof.simulation.operations import Operation, draw_operation
from tests.proof.simulation.shrinking import shrink, signature
from tests.proof.simulation.world import World

RUN_STEPS = 2_500
"""Operations of one run: a run that fails is repeated many times while it is shrunk."""
_SHRINK_SECONDS = 45.0


@dataclass
class Failure:
    """A run that failed: its model and seed, the operations, those that are left of them, the error and its trace."""

    model: str
    seed: int
    operations: list[Operation]
    kept: list[Operation]
    error: str
    trace: str

    def describe(self) -> str:
        """All that is needed to find it again."""
        steps = len(self.operations)
        lines = [
            f"violation in model {self.model}, seed {self.seed}, after {steps} steps: {self.error}",
            f"again: python -m tests.proof.simulation --model {self.model} --seed {self.seed} --steps {steps}",
            f"{len(self.kept)} operations are enough:",
            *(f"    {tuple(operation)}" for operation in self.kept),
            self.trace,
        ]
        return "\n".join(lines)


@dataclass
class Report:
    """What some runs have done: steps, operations by name, seconds; and the first failure."""

    steps: int = 0
    runs: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None


def run_seed(model: str, seed: int, steps: int, report: Report, *, shrinks: bool = True) -> None:
    """One run; a failure is shrunk and noted in the report."""
    began = time.monotonic()
    chooser = random.Random(seed)
    operations: list[Operation] = []
    try:
        world = World(model, seed)
        with world.installed():
            try:
                for index in range(steps):
                    operation = draw_operation(world, index, chooser)
                    operations.append(operation)
                    world.apply(operation)
                world.finish()
            finally:
                report.counts.update(world.counts)
                report.counts.update(world.outcomes)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not operations:
            raise
        trace = traceback.format_exc()
        kept = _shrunk(model, seed, operations, signature(error)) if shrinks else operations
        report.failure = Failure(model, seed, operations, kept, signature_of(error), trace)
    report.runs += 1
    report.steps += len(operations)
    report.seconds += time.monotonic() - began


def signature_of(error: BaseException) -> str:
    """The kind of an error and its words."""
    return f"{type(error).__name__}: {error}"


def outcome(model: str, seed: int, operations: Sequence[Operation]) -> BaseException | None:
    """What operations end in, if it is an error."""
    try:
        world = World(model, seed)
        with world.installed():
            for operation in operations:
                world.apply(operation)
            world.finish()
    except BaseException as error:
        return error
    return None


def _shrunk(model: str, seed: int, operations: Sequence[Operation], wanted: str) -> list[Operation]:
    def fails(fewer: Sequence[Operation]) -> bool:
        error = outcome(model, seed, fewer)
        return error is not None and signature(error) == wanted

    if not fails(operations):
        print("the same operations do not fail again, so they are not shrunk", file=sys.stderr)
        return list(operations)
    return shrink(operations, fails, seconds=_SHRINK_SECONDS)

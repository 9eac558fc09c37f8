"""A simulation of everything that is kept on disk: processes that share folders, faults, kills and power cuts.

`python -m tests.proof.simulation.disk_world --steps N --seed S`; a violation prints the steps that lead to it, shrunk.
"""

import argparse
import logging
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from tests.proof.simulation.clock import Clock
from tests.proof.simulation.disk import Disk, Faults, Killed
from tests.proof.simulation.disk_conversations import Conversations
from tests.proof.simulation.disk_part import Member, Part, Setting, Violation, demand
from tests.proof.simulation.disk_prompt_cache import PromptCache
from tests.proof.simulation.disk_responses import Responses, queued
from tests.proof.simulation.disk_sessions import Sessions
from tests.proof.simulation.disk_turns import Turns

PARTS: tuple[type[Part], ...] = (PromptCache, Conversations, Responses, Sessions)
_FAULTS = ("torn_write", "bit_flip", "short_read", "full_disk", "permission_lost", "failed_read", "failed_sync")
_PROVEN = re.compile(r"\.(page|window|state|chat)$|/(resp|conv)_|/sessions/(one|two)$")
"""The files that have a checksum."""
_CHECK_EVERY = 16
_STEPS_PER_WORLD = 400


class World:
    """One run: its disk, its parts and its processes; every choice of step `i` comes from the seed and `i`."""

    def __init__(self, seed: int, parts: Sequence[type[Part]] = PARTS) -> None:
        random = Random(f"{seed} setting")
        self.seed = seed
        self.clock = Clock()
        self.disk = Disk(random, self.clock)
        is_roomy = random.random() < 0.5
        self.setting = Setting(random.choice((1, 2, 3)), 1 << 20 if is_roomy else 6000, is_roomy)
        self.parts = [make(self.disk, self.setting) for make in parts]
        self._turns = Turns(self.disk)
        self._members: list[Member] = []
        self.log: list[str] = []

    def run(self, steps: Sequence[int]) -> None:
        """Take steps. Raises: Violation."""
        with self.disk.installed(), queued():
            self._members = [self._begin(number) for number in range(self.setting.num_members)]
            for step in steps:
                self._take(step, Random(f"{self.seed} {step}"))
                if step % _CHECK_EVERY == 0:
                    self._check()
            self._check()
            self._check_rests()

    def _begin(self, number: int) -> Member:
        member = Member(number, self.disk.start_process(f"process {number}"))
        with self.disk.running(member.process):
            for part in self.parts:
                part.open(member)
        return member

    def _take(self, step: int, random: Random) -> None:
        self.disk.random = Random(random.random())
        kind = random.random()
        self.log.append(f"step {step}: ")
        if kind < 0.05:
            self.clock.advance(random.choice((0.001, 1.0, 60.0, 1800.0, 7200.0)))
            self.log[-1] += f"the time is {self.clock.monotonic():.3f}"
        elif kind < 0.06:
            self.clock.jump(random.choice((-7200.0, -60.0, 60.0, 7200.0)))
            self.log[-1] += "the clock jumps"
        elif kind < 0.09:
            self._end(random.choice(self._members))
        elif kind < 0.11:
            self._cut_power()
        elif kind < 0.13:
            self._flip_bit(random)
        elif kind < 0.15:
            self.log[-1] += "the system writes names"
            self.disk.sync_names()
        else:
            self._operate(random)
        demand(not self.disk.open_files, f"files are left open: {self.disk.open_files}")
        demand(not self.disk.forgotten, f"files were never closed: {self.disk.forgotten}")

    def _operate(self, random: Random) -> None:
        """One operation, or several of different processes at once, with what goes wrong meanwhile."""
        self.clock.advance(random.choice((0.0, 0.000_1, 0.01)))
        count = 1 if random.random() < 0.6 else random.randint(1, len(self._members))
        chosen: list[tuple[Member, Part, str]] = []
        for member in random.sample(self._members, count):
            part = random.choice(self.parts)
            names = list(part.operations)
            name = random.choices(names, [part.operations[name][0] for name in names])[0]
            chosen.append((member, part, name))
        if any(name in part.alone for _, part, name in chosen):
            del chosen[1:]
        fault = random.choice(_FAULTS) if random.random() < 0.2 else None
        if fault == "bit_flip" and any(name in part.unchecked for _, part, name in chosen):
            fault = None
        if fault is not None:
            setattr(self.disk.faults, fault, random.choice((0.05, 0.3, 1.0)))
        if random.random() < 0.1:
            chosen[0][0].process.kill_in = random.randint(0, 30)
        cut_after = random.randint(0, 20) if random.random() < 0.03 else None
        self.log[-1] += f"{[(member.number, name) for member, _, name in chosen]} {fault or ''} "
        jobs = [
            (member.process, partial(part.operations[name][1], member, Random(random.random())))
            for member, part, name in chosen
        ]
        outcomes = self._run(jobs, random, cut_after)
        self.disk.faults = Faults()
        for (member, part, name), outcome in zip(chosen, outcomes, strict=True):
            if isinstance(outcome, Violation):
                raise outcome
            if outcome is not None and not isinstance(outcome, Killed):
                raise Violation(f"{name} raised {outcome!r}") from outcome
            if fault is not None:
                part.has_failed(name)
            member.process.kill_in = None
        if cut_after is not None:
            self._cut_power()
            return
        for member, _, _ in chosen:
            if member.process.is_dead:
                self._end(member)

    def _run(
        self, jobs: list[tuple[object, Callable[[], None]]], random: Random, cut_after: int | None
    ) -> list[BaseException | None]:
        if len(jobs) > 1 or cut_after is not None:
            return self._turns.run(jobs, random, cut_after)  # type: ignore[arg-type]
        process, work = jobs[0]
        with self.disk.running(process):  # type: ignore[arg-type]
            try:
                work()
            except (Exception, Killed) as error:
                return [error]
        return [None]

    def _end(self, member: Member) -> None:
        self.log[-1] += f"process {member.number} is killed"
        self.disk.end(member.process)
        for part in self.parts:
            part.has_been_killed(member)
        self._members[self._members.index(member)] = self._begin(member.number)

    def _cut_power(self) -> None:
        self.log[-1] += "the power fails"
        for member in self._members:
            for part in self.parts:
                part.has_been_killed(member)
        self.disk.restart(power_cut=True)
        for part in self.parts:
            part.has_lost_power()
        self._check()
        self._members = [self._begin(member.number) for member in self._members]

    def _flip_bit(self, random: Random) -> None:
        """Damage a file that has a checksum, where it lies."""
        paths = sorted(path for path in self.disk.files if _PROVEN.search(path))
        if paths:
            path = random.choice(paths)
            self.log[-1] += f"a bit of {path} flips"
            self.disk.flip_bit(path)
            for part in self.parts:
                part.has_failed("flip")

    def _check(self) -> None:
        for part in self.parts:
            part.check()

    def _check_rests(self) -> None:
        """Start again hours later, and look for what unfinished writes left."""
        for member in self._members:
            self.disk.end(member.process)
        self.clock.advance(100 * 3600.0)
        member = self._begin(0)
        with self.disk.running(member.process):
            for part in self.parts:
                part.check_rests(member)


def failure_of(seed: int, steps: Sequence[int], parts: Sequence[type[Part]]) -> tuple[Exception, list[str]] | None:
    """What goes wrong in a run, and the log until then; None if nothing does."""
    world = World(seed, parts)
    try:
        world.run(steps)
    except Exception as error:
        return error, world.log
    return None


def shrunk(seed: int, steps: list[int], parts: Sequence[type[Part]]) -> list[int]:
    """Fewer steps that still go wrong: pieces are left out, of half the length each time."""
    size = len(steps) // 2
    while size:
        start = 0
        while start < len(steps):
            fewer = steps[:start] + steps[start + size :]
            if failure_of(seed, fewer, parts) is not None:
                steps = fewer
            else:
                start += size
        size //= 2
    return steps


def simulate(num_steps: int, seed: int, parts: Sequence[type[Part]] = PARTS, *, shrinks: bool = True) -> str | None:
    """Run worlds of some hundred steps each; what goes wrong first, as text, None if nothing does."""
    for first in range(0, num_steps, _STEPS_PER_WORLD):
        world, steps = seed * 1_000_003 + first, list(range(min(_STEPS_PER_WORLD, num_steps - first)))
        found = failure_of(world, steps, parts)
        if found is not None:
            fewer = shrunk(world, steps, parts) if shrinks else steps
            found = failure_of(world, fewer, parts) or found
            error, log = found
            told = "".join(traceback.format_exception(error))
            said = f"violation in model disk, seed {seed}, after {first + len(log)} steps: {error}"
            return "\n".join([said, f"world {world}, steps {fewer}", *log, told])
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=[part.name for part in PARTS])
    given = parser.parse_args()
    parts = [part for part in PARTS if given.part in (None, part.name)]
    logging.disable(logging.CRITICAL)
    found = simulate(given.steps, given.seed, parts)
    print(found or f"{given.steps:,} steps without a violation, seed {given.seed}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

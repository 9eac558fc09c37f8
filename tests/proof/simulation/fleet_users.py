"""Who asks a simulated fleet: the conversations of `fleet_workload`, or any number of users who come at random."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.proof.simulation.fleet_workload import Workload


class Turn(NamedTuple):
    """See `fleet_workload.Turn`; own_tokens: of the prompt, those of the conversation's text before."""

    think_seconds: float
    prompt: int
    reply: int
    own_tokens: int


@dataclass(frozen=True)
class Visit:
    """One conversation. number: each its own."""

    number: int
    start_seconds: float
    system: int
    system_tokens: int
    turns: tuple[Turn, ...]


def visits_of(workload: Workload, *, think_scale: float = 1.0) -> list[Visit]:
    """The conversations of a workload. think_scale: multiplies its times of arrival and thinking."""
    return [
        Visit(
            conversation.number,
            conversation.start_seconds * think_scale,
            conversation.system,
            conversation.system_tokens,
            tuple(
                Turn(
                    turn.think_seconds * think_scale,
                    turn.prompt_tokens,
                    turn.reply_tokens,
                    turn.shareable_tokens if index else 0,
                )
                for index, turn in enumerate(conversation.turns)
            ),
        )
        for conversation in workload.conversations
    ]


@dataclass(frozen=True, kw_only=True)
class Population:
    """Users who come as a Poisson process and then talk for some turns.

    per_second: conversations that begin. systems: different system prompts, of which the k-th is chosen in proportion
    to 1 / k. Means, of geometric numbers of turns, exponential times, and lognormal lengths (sigma 0.6); most_context:
    a conversation ends before it would be longer.
    """

    per_second: float
    systems: int = 32
    system_tokens: int = 500
    first_tokens: float = 250.0
    later_tokens: float = 60.0
    reply_tokens: float = 120.0
    turns: float = 5.0
    think_seconds: float = 30.0
    most_context: int = 2_048
    sigma: float = 0.6

    @property
    def mean_turns(self) -> float:
        """Of a conversation, those that are cut at the context's end not counted."""
        return self.turns

    def visits(self, seed: int, seconds: float) -> Iterator[Visit]:
        """The conversations that begin within a time, in order."""
        numbers = random.Random(f"users {seed}")
        weights = [1 / (rank + 1) for rank in range(self.systems)]
        lengths = [round(self.system_tokens * numbers.uniform(0.6, 1.4)) for _ in range(self.systems)]
        now, number = 0.0, 0
        while True:
            now += numbers.expovariate(self.per_second)
            if now >= seconds:
                return
            system = numbers.choices(range(self.systems), weights)[0]
            yield Visit(number, now, system, lengths[system], self._turns(lengths[system], numbers))
            number += 1

    def _turns(self, system_tokens: int, numbers: random.Random) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        text = own = 0
        while True:
            new = self._length(self.later_tokens if turns else self.first_tokens, numbers)
            reply = self._length(self.reply_tokens, numbers)
            prompt = (text or system_tokens) + new
            if turns and prompt + reply > self.most_context:
                break
            # A first message may be longer than everybody's; it still gets an answer.
            prompt = min(prompt, self.most_context - reply)
            turns.append(Turn(numbers.expovariate(1 / self.think_seconds) if turns else 0.0, prompt, reply, own))
            text, own = prompt + reply, prompt + reply - 1
            if numbers.random() < 1 / self.turns:
                break
        return tuple(turns)

    def _length(self, mean: float, numbers: random.Random) -> int:
        return max(2, round(numbers.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma)))

"""A machine of simulated time: what its steps cost, who else keeps it busy, and what drafts are worth on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.engine import Engine
from localinfer.engine.sampling.sampler import MAX_DRAFT_TOKENS, SamplingParams
from localinfer.engine.speculation.costs import VerificationCosts
from localinfer.engine.speculation.verify import Speculation
from localinfer.kernels.program import Batch
from localinfer.types import TokenIds
from tests.engine.fakes import FakeConfig, FakeLayout

VOCABULARY = 64
GREEDY = SamplingParams(temperature=0)
ROWS = range(1, MAX_DRAFT_TOKENS + 2)
LINEAR_ROWS = [float(rows) for rows in ROWS]
LIKE_1B = [1.0, 1.0, 1.03, 1.07, 1.15, 1.24, 1.33, 1.42, 1.6, 1.78, 1.96, 2.14, 2.32, 2.5, 2.69, 2.87]


def calm(_: float) -> float:
    return 1.0


def token_at(position: int) -> int:
    """The text: one without repetitions worth drafting."""
    return (position * position // 7 + position) % (VOCABULARY - 1)


@dataclass
class Machine:
    """Time that passes as rows are computed.

    curve: seconds by rows, of a machine that is calm, over those of one row. load: how many times longer everything
    takes at a time. spikes: interruptions of what is worked, how many a second and how long. plain_tokens: how many
    tokens plain decoding would have made of the time so far.
    """

    curve: Sequence[float]
    row_seconds: float = 1e-3
    load: Callable[[float], float] = calm
    spikes: tuple[float, float] = (0.0, 0.0)
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self.now = self.plain_tokens = 0.0

    def work(self, seconds: float) -> None:
        """Work that takes so long on a calm machine."""
        factor = self.load(self.now)
        self.plain_tokens += seconds / self.row_seconds
        self.now += seconds * factor
        spikes_per_second, spike_seconds = self.spikes
        if spikes_per_second and self._random.random() < seconds * factor * spikes_per_second:
            self.now += spike_seconds

    def clock(self) -> float:
        return self.now


@dataclass
class SimulatedProgram:
    """Says the text, in the machine's time."""

    machine: Machine
    max_batch_rows: int = 32
    max_output_rows: int = 32

    def run(self, batch: Batch) -> NDArray[np.float32]:
        rows = batch.token_ids.size
        if rows <= len(self.machine.curve):
            self.machine.work(self.machine.curve[rows - 1] * self.machine.row_seconds)
        positions = np.concatenate([segment.start_position + np.arange(segment.num_rows) for segment in batch.segments])
        logits = np.zeros((batch.output_rows.size, VOCABULARY), np.float32)
        for index, row in enumerate(batch.output_rows.tolist()):
            logits[index, token_at(int(positions[row]) + 1)] = 9.0
        return logits

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class SimulatedModel:
    program: SimulatedProgram
    config: FakeConfig = field(default_factory=lambda: FakeConfig(VOCABULARY, 1 << 17))
    kv_layout: FakeLayout = field(default_factory=FakeLayout)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class ScriptedDrafter:
    """Drafts each token rightly by a chance that depends on its place in the text; looking costs seconds."""

    machine: Machine
    chance: Callable[[int], float]
    seconds: float = 0.0
    seed: int = 1
    match_length: int = 5

    def __post_init__(self) -> None:
        self.asked = 0
        self._draws = np.random.default_rng(self.seed).random(1 << 17)

    def begin(self, prediction: TokenIds, salt: bytes) -> "ScriptedDrafter":
        return self

    def draft(self, tokens: TokenIds, out: TokenIds) -> int:
        self.machine.work(self.seconds)
        self.asked += 1
        for index in range(out.size):
            place = tokens.size + index
            is_right = self._draws[place] < self.chance(place)
            out[index] = token_at(place) if is_right else VOCABULARY - 1
        return int(out.size)


@dataclass
class Trace:
    """plain_tokens[i]: how many tokens plain decoding would have made until the i-th was there."""

    plain_tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]

    @property
    def speed(self) -> float:
        """Over plain decoding in the same time."""
        return float((self.plain_tokens.size - 1) / (self.plain_tokens[-1] - self.plain_tokens[0]))

    def worst_window(self, tokens: int) -> float:
        """The least speed over plain decoding in any stretch of so many tokens."""
        spent = self.plain_tokens[tokens:] - self.plain_tokens[:-tokens]
        return float(tokens / spent.max())

    def speed_between(self, first: int, last: int) -> float:
        return float((last - first) / (self.plain_tokens[last] - self.plain_tokens[first]))


def decode(machine: Machine, drafter: ScriptedDrafter, believed: Sequence[float], num_tokens: int) -> Trace:
    """Decode one text on an engine that begins with a belief about its costs, in seconds by rows."""
    speculation = Speculation(VerificationCosts(believed), ngram=drafter, model=None, clock=machine.clock)
    engine = Engine(SimulatedModel(SimulatedProgram(machine)), speculation=speculation)  # type: ignore[arg-type]
    plain_tokens, seconds = [], []
    generation = engine.generate([1, 2, 3], GREEDY, max_tokens=num_tokens)
    for index, event in enumerate(generation):
        assert event.token_id == token_at(3 + index), "drafts change no token"
        plain_tokens.append(machine.plain_tokens)
        seconds.append(machine.now)
    engine.close()
    return Trace(np.array(plain_tokens), np.array(seconds))

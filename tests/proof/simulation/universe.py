"""The texts and sampling options of simulated callers: few enough that they meet, and that cold answers are known."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.sampling.params import SamplingParams

TokenIds = NDArray[np.int32]

SAMPLING: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0.8, top_k=5, seed=1),
    SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=2),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3, repetition_penalty=1.3, repetition_last_n=9, logprobs=0),
    SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=0.3, repetition_last_n=-1),
    SamplingParams(temperature=1.0, seed=5, mirostat=2, mirostat_tau=3.0),
    SamplingParams(temperature=1.0, seed=6, xtc_probability=0.5, typical_p=0.9),
    SamplingParams(temperature=0.9, seed=7, dry_multiplier=0.8, dynatemp_range=0.3, logit_bias={3: 4.0, 5: -100.0}),
)
_SAMPLING_WEIGHTS = (14, 5, 6, 5, 3, 2, 0.5, 0.5, 0.5)
_NUM_PROMPTS = 90
_SYSTEM_LENGTHS = (0, 20, 32, 45, 70)
_TURN_LENGTHS = (1, 3, 7, 15, 16, 17, 25, 31, 32, 33, 40, 55)
MAX_TOKENS = (0, 1, 2, 5, 9, 17, 33)
_MAX_TOKENS_WEIGHTS = (1, 3, 3, 6, 8, 5, 2)


@dataclass(frozen=True)
class Universe:
    """Pieces of texts, system prompts and turns, of which the last two repeat themselves, as n-gram drafts like it.

    prompts: conversations' beginnings, and how many of their ids are the system prompt.
    """

    systems: tuple[TokenIds, ...]
    turns: tuple[TokenIds, ...]
    prompts: tuple[tuple[TokenIds, int], ...]

    @classmethod
    def of(cls, vocab_size: int, pictures: Sequence[TokenIds] = ()) -> "Universe":
        """The same for every run; turns share beginnings of different lengths. pictures: ids of some, for a third of
        the turns."""
        chooser = random.Random(20)

        def ids(count: int) -> TokenIds:
            return np.array([chooser.randrange(vocab_size) for _ in range(count)], np.int32)

        systems = tuple(ids(length) for length in _SYSTEM_LENGTHS)
        base, turns = ids(64), []
        for index, length in enumerate(_TURN_LENGTHS):
            turn = ids(length)
            shared = min(length - 1, (0, 5, 16, 32)[index % 4])
            turn[:shared] = base[:shared]
            if pictures and index % 3 == 1:
                place, picture = chooser.randrange(length + 1), pictures[index // 3 % len(pictures)]
                turn = np.concatenate((turn[:place], picture, turn[place:]))
            turns.append(turn)
        turns += [np.concatenate((picture, ids(2))) for picture in pictures]
        period = ids(6)
        turns += [np.tile(period, 4), np.tile(period, 8)[:41]]
        prompts = []
        for _ in range(_NUM_PROMPTS):
            system = systems[int(len(systems) * chooser.random() ** 1.5)]
            parts = [chooser.choice(turns) for _ in range(1 + (chooser.random() < 0.4) + (chooser.random() < 0.15))]
            prompts.append((np.concatenate((system, *parts)), system.size))
        return cls(systems, tuple(turns), tuple(prompts))

    def prompt(self, chooser: random.Random) -> tuple[TokenIds, int]:
        """One of a few, some of them much oftener than others."""
        return self.prompts[int(len(self.prompts) * chooser.random() ** 2.5)]

    def turn(self, chooser: random.Random) -> TokenIds:
        """One of a few, some of them much oftener than others."""
        return self.turns[int(len(self.turns) * chooser.random() ** 4)]


def draw_sampling(chooser: random.Random) -> int:
    """Which of SAMPLING."""
    return chooser.choices(range(len(SAMPLING)), _SAMPLING_WEIGHTS)[0]


def draw_max_tokens(chooser: random.Random) -> int:
    """How many tokens a caller wants."""
    return chooser.choices(MAX_TOKENS, _MAX_TOKENS_WEIGHTS)[0]

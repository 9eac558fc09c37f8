"""What tests of generations that run at once share: prompts, models with room for them, and a step that waits."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.engine import Engine
from localinfer.engine.request import TokenEvent
from localinfer.engine.sampling.sampler import SamplingParams
from tests.engine.fakes import FakeModel, fake_model, hashed_logits
from tests.support.limits import seconds

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3)
REPEATING = SamplingParams(temperature=0.7, top_k=3, seed=5, repetition_penalty=1.3, repetition_last_n=9)
PARAMS = (GREEDY, SEEDED, REPEATING)


def numbers(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 250, count).tolist()
    return ids


def wide_model(**sizes: Any) -> FakeModel:
    return fake_model(**{"max_batch_rows": 24, "max_output_rows": 12, "context_length": 96, **sizes})


def alone(prompt: list[int], params: SamplingParams, **options: Any) -> list[TokenEvent]:
    return list(Engine(wide_model()).generate(prompt, params, **options))


def in_threads(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds(15))
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"


class Gate:
    """Logits that stop a step where the text has a certain length, until they are let through."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reached, self.may_pass = threading.Event(), threading.Event()

    def __call__(self, history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        if history.size == self.length:
            self.reached.set()
            assert self.may_pass.wait(seconds(10))
        return hashed_logits(history, vocab_size)

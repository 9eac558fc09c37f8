"""When the first token comes: predictions on a machine of known speed, and what is refused for them."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine import admission, runner, scheduler
from localinfer.engine.admission import EngineLimits
from localinfer.engine.engine import Engine
from localinfer.engine.runner import StepFit
from localinfer.engine.scheduler import Generation
from localinfer.errors import OverloadedError, RequestError
from localinfer.generation.ttft import TtftPredictor
from localinfer.kernels.program import Batch
from tests.engine.fakes import FakeProgram
from tests.engine.generations import GREEDY, numbers, wide_model
from tests.engine.test_priorities import Readers

STEP_SECONDS, STREAM_SECONDS, ROW_SECONDS = 2e-3, 1e-3, 5e-4


class TimedProgram(FakeProgram):
    """Takes as long as its rows say, on a clock of its own, and says the same token for ever."""

    now = 100.0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        rows = [segment.num_rows for segment in batch.segments]
        self.now += STEP_SECONDS + sum(STREAM_SECONDS if count == 1 else ROW_SECONDS * count for count in rows)
        logits = np.zeros((batch.output_rows.size, self.vocab_size), np.float32)
        logits[:, 7] = 9.0
        return logits


class Machine(Readers):
    """An engine whose steps take a known time. waited: seconds until the first token of each request that had one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
        model = wide_model(context_length=400, max_batch_rows=48, max_output_rows=20)
        self.program = model.program = TimedProgram(260, max_batch_rows=48, max_output_rows=20)
        super().__init__(Engine(model, limits=EngineLimits(**limits), make_policy=TtftPredictor))
        stand_in = SimpleNamespace(monotonic=self.clock, perf_counter=self.clock, time=time.time)
        for module in (scheduler, admission, runner):
            monkeypatch.setattr(module, "time", stand_in)
        self.began: dict[Generation, float] = {}
        self.waited: dict[Generation, float] = {}

    def clock(self) -> float:
        return self.program.now

    def begin(self, prompt: list[int], **options: Any) -> Generation:
        generation = super().begin(prompt, **options)
        self.began[generation] = self.clock()
        return generation

    def step(self) -> None:
        super().step()
        for generation, text in self.texts.items():
            if text and generation not in self.waited and generation in self.began:
                self.waited[generation] = self.clock() - self.began[generation]

    def learn(self) -> None:
        """Let the engine see what steps take, and how long texts are."""
        for seed in range(12):
            self.begin(numbers(30 + 7 * seed, 100 + seed), max_tokens=20)
            for _ in range(6):
                self.step()
        self.finish()


def test_a_line_is_fitted_to_steps() -> None:
    fit = StepFit()
    assert fit.seconds(3, 40) == 0.0 and not fit.is_known
    random = np.random.default_rng(0)
    for _ in range(200):
        streams, rows = int(random.integers(0, 12)), int(random.integers(0, 90))
        fit.observe(streams, rows, 0.01 + 0.002 * streams + 0.0005 * rows)
    for streams, rows in ((0, 64), (8, 0), (12, 90)):
        assert fit.seconds(streams, rows) == pytest.approx(0.01 + 0.002 * streams + 0.0005 * rows, rel=0.05)
    fit.observe(8, 0, 100.0)
    assert fit.seconds(8, 0) < 0.1, "one step that was interrupted says little"


def test_no_part_of_the_line_is_negative() -> None:
    fit = StepFit()
    for streams in range(1, 30):
        fit.observe(streams, 0, 0.05 - 0.001 * streams)
    assert fit.seconds(0, 0) > 0 and fit.seconds(100, 0) > 0 and fit.seconds(0, 1000) >= fit.seconds(0, 0)


def test_predictions_are_near_what_comes_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, max_running=4)
    machine.learn()
    random = np.random.default_rng(3)
    for seed in range(60):
        prompt = numbers(int(random.integers(5, 200)), 200 + seed)
        machine.begin(prompt, max_tokens=20, ttft_objective=1e9, priority=int(random.integers(0, 2)))
        for _ in range(int(random.integers(2, 14))):
            machine.step()
    machine.finish(5000)
    stats = machine.engine.stats.ttft
    assert stats.num_predicted == 60 and stats.num_refused == 0
    assert 0.7 < stats.ratio_quantiles[0.5] < 1.4
    assert max(machine.waited.values()) > 10 * stats.error_quantiles[0.5], "some waited for long"


def test_what_is_cached_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.learn()
    prompt = numbers(200, 9)
    machine.begin(prompt, max_tokens=1)
    machine.finish()
    asked = machine.begin([*prompt[:160], 255, 2, 3], max_tokens=2, ttft_objective=10.0)
    assert asked.request.expected_rows == 3
    again = machine.begin([255, *prompt], max_tokens=2, ttft_objective=10.0)
    assert again.request.expected_rows == 201
    salted = machine.engine.generate(prompt, GREEDY, ttft_objective=10.0)
    assert (salted.request.expected_rows or 0) < 8
    salted.close()
    machine.finish()


def test_who_would_wait_too_long_is_refused_and_told_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, max_running=2)
    machine.learn()
    present = [machine.begin(numbers(150, seed), max_tokens=40) for seed in range(6)]
    objective = 0.2
    with pytest.raises(OverloadedError, match="first token .* predicted in .* wanted within 0.2; try again") as refused:
        machine.engine.generate(numbers(100, 50), GREEDY, max_tokens=5, ttft_objective=objective)
    assert refused.value.predicted_ttft_seconds > objective
    assert 1 <= refused.value.retry_after_seconds <= 60
    assert machine.engine.stats.ttft.num_refused == 1
    # More urgent, it would take a place at once.
    urgent = machine.begin(numbers(20, 51), max_tokens=5, ttft_objective=objective, priority=-1)
    machine.finish()
    assert machine.waited[urgent] <= objective
    assert all(len(machine.texts[one]) == 40 for one in present), "what was taken on is never refused"


def test_who_is_alone_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.learn()
    alone = machine.begin(numbers(300, 5), max_tokens=2, ttft_objective=0.0)
    with pytest.raises(OverloadedError, match="if nothing else ran"):
        machine.engine.generate(numbers(300, 6), GREEDY, ttft_objective=0.05)
    machine.finish()
    assert len(machine.texts[alone]) == 2


def test_nothing_is_refused_before_anything_is_known() -> None:
    engine = Engine(wide_model(), make_policy=TtftPredictor)
    first = engine.generate(numbers(9), GREEDY, ttft_objective=0.0)
    second = engine.generate(numbers(9, 1), GREEDY, max_tokens=3, ttft_objective=0.0)
    assert len(list(second)) == 3
    first.close()


@pytest.mark.parametrize("objective", [-1, "soon", True, float("inf")])
def test_wrong_objectives_are_refused(objective: Any) -> None:
    with pytest.raises(RequestError, match="ttft_objective"):
        Engine(wide_model()).generate([1], GREEDY, ttft_objective=objective)

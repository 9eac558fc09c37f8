"""How many threads decode: measured, remembered per machine and model size, and never a number that cannot run."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import RequestError
from localinfer.kernels.cpu.kernel_abi import MAX_THREADS
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import Batch
from localinfer.models.load import threads
from localinfer.models.load.threads import available_threads, checked_threads, choose_decode_threads
from localinfer.system.machine_limits import ProcessorLimits
from localinfer.types import FloatArray
from tests.support.limits import set_clock

LAYOUT = KVLayout("f32", [])


def calm(_: int) -> float:
    return 1.0


class ScriptedProgram:
    """Takes the time per token that the script says, on a clock of its own."""

    def __init__(
        self,
        seconds: dict[int, float],
        monkeypatch: pytest.MonkeyPatch,
        beside: Callable[[int], float] = calm,
        performance_cores: int = 0,
    ) -> None:
        self.num_threads = self.decode_threads = max(seconds)
        self.performance_cores = performance_cores
        self.runs = 0
        self._seconds = seconds
        self._now = 0.0
        self._beside = beside
        set_clock(monkeypatch, threads, perf_counter=lambda: self._now)

    def run(self, batch: Batch) -> FloatArray:
        self.runs += 1
        self._now += self._seconds[self.decode_threads] * self._beside(self.runs)
        return np.zeros((1, 1), np.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(threads, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(threads.OtherLoad, "measure", lambda _: 0.0)
    # As for a user; what a load of the tests measures matters less.
    monkeypatch.setattr(threads, "_PATIENCE_SECONDS", 0.6)
    return tmp_path


def choose(
    seconds: dict[int, float],
    monkeypatch: pytest.MonkeyPatch,
    num_bytes: int = 1 << 30,
    beside: Callable[[int], float] = calm,
) -> ScriptedProgram:
    program = ScriptedProgram(seconds, monkeypatch, beside)
    choose_decode_threads(program, LAYOUT, num_bytes)  # type: ignore[arg-type]
    return program


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({1: 1.0, 2: 0.5}, 2),
        ({1: 1.0, 2: 1.5}, 1),
        ({1: 1.0, 2: 0.98}, 1),
        ({1: 4.0, 2: 2.0, 3: 1.5, 4: 1.0, 6: 1.01, 8: 2.0}, 4),
    ],
)
def test_the_fewest_threads_within_three_percent_of_the_fastest_decode(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], wanted: int
) -> None:
    assert choose(seconds, monkeypatch).decode_threads == wanted


def test_one_thread_for_each_performance_core_is_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 5.0, 2: 2.5, 3: 1.7, 4: 1.4, 5: 1.0, 6: 1.3, 8: 1.2}
    program = ScriptedProgram(seconds, monkeypatch, performance_cores=5)
    choose_decode_threads(program, LAYOUT, 1 << 30)  # type: ignore[arg-type]
    assert program.decode_threads == 5


def test_the_choice_is_remembered_for_models_of_this_size_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert choose({1: 1.0, 2: 0.5}, monkeypatch).runs > 0
    again = choose({1: 0.1, 2: 0.5}, monkeypatch)
    assert (again.decode_threads, again.runs) == (2, 0)
    other = choose({1: 0.1, 2: 0.5}, monkeypatch, num_bytes=1 << 20)
    assert other.decode_threads == 1
    assert other.runs > 0


def test_a_choice_that_only_one_load_has_measured_is_not_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [choose(seconds, monkeypatch).decode_threads for seconds in ({1: 1.0, 2: 0.5}, {1: 0.1, 2: 0.5})]
    assert counts == [2, 1]
    assert choose({1: 0.1, 2: 0.5}, monkeypatch).runs > 0
    assert choose({1: 1.0, 2: 0.5}, monkeypatch).decode_threads == 1


def test_what_a_busy_machine_measures_is_not_kept_and_does_not_change_what_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(run: int) -> float:
        return 1.0 + 3.0 * (run * 5 % 7 / 7)

    choose({1: 1.0, 2: 0.5}, monkeypatch, beside=busy)
    assert not list(folder.iterdir())
    choose({1: 1.0, 2: 0.5}, monkeypatch)
    kept = [path.read_text("utf-8") for path in folder.iterdir()]
    assert choose({1: 0.1, 2: 0.5}, monkeypatch, beside=busy).decode_threads == 2
    assert [path.read_text("utf-8") for path in folder.iterdir()] == kept


def test_a_machine_that_is_always_busy_is_measured_by_every_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as busy:
        busy.setattr(threads.OtherLoad, "measure", lambda _: 0.4)
        for _ in range(3):
            found = choose({1: 1.0, 2: 1.5}, busy)
            assert (found.decode_threads, found.runs > 0) == (1, True)
        assert not list(folder.iterdir())
    for _ in range(2):
        assert choose({1: 1.0, 2: 0.5}, monkeypatch).decode_threads == 2
    with monkeypatch.context() as busy:
        busy.setattr(threads.OtherLoad, "measure", lambda _: 0.4)
        again = choose({1: 1.0, 2: 1.5}, busy)
    assert (again.decode_threads, again.runs) == (2, 0)
    (path,) = folder.iterdir()
    assert json.loads(path.read_text("utf-8"))["load"] == 0.0


@pytest.mark.parametrize("changes", [{"load": 0.4}, {"load": "x"}, {"measured_at": 0.0}])
def test_a_measurement_of_a_busy_machine_or_of_last_month_is_not_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    for _ in range(2):
        choose({1: 1.0, 2: 0.5}, monkeypatch)
    (path,) = folder.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    assert choose({1: 0.1, 2: 0.5}, monkeypatch).decode_threads == 1


def test_a_measurement_without_its_load_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        choose({1: 1.0, 2: 0.5}, monkeypatch)
    (path,) = folder.iterdir()
    record = json.loads(path.read_text("utf-8"))
    del record["load"]
    path.write_text(json.dumps(record), "utf-8")
    assert choose({1: 0.1, 2: 0.5}, monkeypatch).decode_threads == 1


def test_what_was_measured_is_measured_again_when_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        choose({1: 1.0, 2: 0.5}, monkeypatch)
    program = ScriptedProgram({1: 0.1, 2: 0.5}, monkeypatch)
    choose_decode_threads(program, LAYOUT, 1 << 30, measure_again=True)  # type: ignore[arg-type]
    assert (program.decode_threads, program.runs > 0) == (1, True)


def test_nothing_is_measured_where_that_is_not_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = ScriptedProgram({1: 0.1, 2: 0.5}, monkeypatch)
    program.decode_threads = 2
    choose_decode_threads(program, LAYOUT, 1 << 30, may_measure=False)  # type: ignore[arg-type]
    assert (program.decode_threads, program.runs) == (2, 0)
    # One load alone is not believed, but better than nothing.
    choose({1: 0.1, 2: 0.5}, monkeypatch)
    choose_decode_threads(program, LAYOUT, 1 << 30, may_measure=False)  # type: ignore[arg-type]
    assert (program.decode_threads, program.runs) == (1, 0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the scheduler's statistics are of Linux")
def test_load_by_others_is_the_time_that_threads_wait_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [(1.0, 0.5), (1.6, 0.9)]
    monkeypatch.setattr(threads, "_waiting_seconds", lambda: now.pop(0))
    assert threads.OtherLoad().measure() == pytest.approx(0.4)
    monkeypatch.undo()
    found = threads._waiting_seconds()
    assert found is None or (found[0] > 0 and found[1] >= 0)


@pytest.mark.parametrize("content", ["", "[]", '{"decode_threads": 9, "measured_at": 0}', '{"decode_threads": "x"}'])
def test_a_damaged_or_old_memory_is_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    choose({1: 1.0, 2: 0.5}, monkeypatch)
    (path,) = folder.iterdir()
    path.write_text(content, "utf-8")
    assert choose({1: 0.1, 2: 0.5}, monkeypatch).decode_threads == 1
    assert json.loads(path.read_text("utf-8"))["decode_threads"] == 1


def test_one_thread_is_not_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose({1: 1.0}, monkeypatch).runs == 0
    assert not list(folder.iterdir())


@pytest.mark.parametrize("threads", [0, -1, 10_000])
def test_a_count_the_machine_cannot_run_is_refused(threads: int) -> None:
    with pytest.raises(RequestError, match=f"threads is {threads}; this machine runs 1 to"):
        checked_threads(threads)
    assert checked_threads(1) == 1
    assert checked_threads(min(os.cpu_count() or 1, MAX_THREADS))


@pytest.mark.parametrize("processors", [64, MAX_THREADS, MAX_THREADS + 1, 1024])
def test_a_large_machine_runs_as_many_threads_as_a_pool_has_words_for(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    limits = ProcessorLimits(processors, processors, processors)
    monkeypatch.setattr(threads, "processor_limits", lambda: limits)
    most = min(processors, MAX_THREADS)
    assert available_threads() == checked_threads(most) == most >= 64
    with pytest.raises(RequestError) as raised:
        checked_threads(most + 1)
    reason = f", the most of any model, though it has {processors} processors" if processors > most else ""
    assert str(raised.value) == f"threads is {most + 1}; this machine runs 1 to {most}{reason}, and None chooses"

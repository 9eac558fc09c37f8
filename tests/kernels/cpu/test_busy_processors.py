"""How many threads take part beside other programs, on simulated machines: no clock, no thread, no kernel."""

from collections.abc import Callable

import numpy as np
import pytest

from localinfer.kernels.cpu.worker_threads import ThreadChoice, steps_of


class Machine:
    """Steps of a simulated machine. seconds, lost: of a step with so many threads on average, and the share of it that
    the first thread does not compute; noise: of the logarithm of a step's time; credit: by how much steps are faster in
    the first 50 ms after the number changed."""

    def __init__(
        self, seconds: Callable[[int], float], lost: Callable[[int], float], noise: float = 0.4, credit: float = 1.0
    ) -> None:
        self.seconds, self.lost, self.noise, self.credit = seconds, lost, noise, credit
        self._random = np.random.default_rng(1)

    def run(self, choice: ThreadChoice, seconds: float) -> tuple[float, list[int]]:
        """Take steps for so long; steps per second, and the numbers of threads that they were taken with."""
        now, changed, counts = 0.0, -1.0, []
        while now < seconds:
            counts.append(choice.next_count())
            if counts[-2:-1] not in ([], counts[-1:]):
                changed = now
            credit = self.credit if counts[-1] == 1 and now - changed < 0.05 else 1.0
            taken = (
                self.seconds(counts[-1]) / credit * float(np.exp(self._random.normal(-(self.noise**2) / 2, self.noise)))
            )
            choice.observe(taken, taken * (1 - self.lost(counts[-1])), 1.0)
            now += taken
        return len(counts) / now, counts

    def best(self, most: int) -> float:
        """Steps per second with the best number."""
        return max(1 / self.seconds(count) for count in range(1, most + 1))


def free(most: int, step: float = 0.01) -> Machine:
    """A machine that does nothing else, where every thread helps."""
    return Machine(lambda count: step * most / count, lambda count: 0.01, 0.1)


def test_a_free_machine_is_left_alone() -> None:
    choice = ThreadChoice(4, 8)
    assert set(free(8).run(choice, 30)[1]) == {4}
    assert not choice.is_busy


@pytest.mark.parametrize("step", [0.002, 0.01, 0.08])
@pytest.mark.parametrize(
    ("times", "lost"),
    [
        # Seconds with one and two threads, and the lost shares: two that wait for each other, two that still
        # help, two that are worth one, and another program that takes a processor which one thread does not want.
        ((1.0, 12.0), (0.5, 0.9)),
        ((1.0, 0.7), (0.5, 0.6)),
        ((1.0, 1.0), (0.5, 0.6)),
        ((1.0, 2.0), (0.0, 0.5)),
        ((1.0, 0.8), (0.0, 0.4)),
    ],
)
def test_beside_busy_programs_nearly_as_much_is_done_as_with_the_best_number(
    times: tuple[float, float], lost: tuple[float, float], step: float
) -> None:
    machine = Machine(lambda count: step * times[count - 1], lambda count: lost[count - 1])
    choice = ThreadChoice(2, 2)
    machine.run(choice, 8 + 100 * step)
    assert machine.run(choice, 8 + 500 * step)[0] >= 0.9 * machine.best(2)


def test_what_a_thread_is_owed_when_another_goes_does_not_count() -> None:
    machine = Machine(lambda count: (0.014, 0.01)[count - 1], lambda count: 0.5, credit=3.0)
    choice = ThreadChoice(2, 2)
    counts = machine.run(choice, 60)[1]
    assert counts.count(2) > 0.85 * len(counts)


@pytest.mark.parametrize("best", [1, 2, 3, 4, 6, 8, 12, 16])
def test_the_best_of_many_numbers_is_found_from_any(best: int) -> None:
    machine = Machine(lambda count: 0.02 * max(best / count, count / best) ** 0.7, lambda count: 0.3)
    for usual in (16, 1, 6):
        choice = ThreadChoice(usual, 16)
        machine.run(choice, 20)
        rate, counts = machine.run(choice, 60)
        assert rate >= 0.85 * machine.best(16)
        assert max(set(counts), key=counts.count) in steps_of(16)[max(0, steps_of(16).index(best) - 1) :][:3]


def test_the_usual_number_is_back_as_soon_as_processors_are_free() -> None:
    choice = ThreadChoice(2, 2)
    Machine(lambda count: 0.01 * count, lambda count: 0.5).run(choice, 20)
    assert choice.is_busy
    free(2).run(choice, 1.0)
    assert set(free(2).run(choice, 5)[1]) == {2} and not choice.is_busy


@pytest.mark.parametrize("step", [0.005, 0.05, 0.19])
def test_another_load_is_noticed_and_numbers_are_tried_again_soon(step: float) -> None:
    """Beside one program one thread is best; then two more come, and two threads get more of the machine."""
    choice = ThreadChoice(2, 2)
    Machine(lambda count: step * (1.0, 1.8)[count - 1], lambda count: (0.05, 0.5)[count - 1]).run(choice, 60)
    assert choice.next_count() == 1
    now = Machine(lambda count: step * (2.0, 1.4)[count - 1], lambda count: 0.5)
    now.run(choice, 2 + 16 * step)
    assert now.run(choice, 10)[0] >= 0.9 * now.best(2)


def test_one_interruption_changes_nothing() -> None:
    choice = ThreadChoice(2, 2)
    for _ in range(20):
        free(2).run(choice, 2)
        choice.observe(0.014, 0.004, 1.0)
        assert not choice.is_busy


def test_a_number_that_was_measured_beside_other_programs_is_measured_again_once_they_are_gone() -> None:
    for guessed, best in ((1, 2), (2, 1)):
        choice = ThreadChoice(guessed, 2, is_sure=False)
        Machine(lambda count: 0.01 * count, lambda count: 0.4).run(choice, 10)
        machine = Machine(lambda count: 0.01 if count == best else 0.015, lambda count: 0.01, 0.1)  # noqa: B023
        machine.run(choice, 5)
        assert choice.is_sure and choice.usual == best
        assert set(machine.run(choice, 20)[1]) == {best}


@pytest.mark.parametrize("best", [4, 6, 8])
def test_performance_cores_alone_are_tried_though_numbers_between_are_worse(best: int) -> None:
    """Four of each kind: how much the slow ones help or harm is found out on the free machine, and kept."""
    times = {4: 0.014, 6: 0.013, 8: 0.012} | {best: 0.01}
    machine = Machine(lambda count: times.get(count, 0.04 / min(count, 2)), lambda count: 0.01, 0.1)
    choice = ThreadChoice(8, 8, is_sure=False, performance_cores=4)
    machine.run(choice, 30)
    assert (choice.is_sure, choice.usual, choice.is_busy) == (True, best, False)
    assert set(machine.run(choice, 20)[1]) == {best}


def test_one_thread_for_each_performance_core_is_among_the_numbers() -> None:
    assert steps_of(8, 5) == [1, 2, 3, 4, 5, 6, 8]
    assert steps_of(4, 8) == steps_of(4, 0) == steps_of(4)


def test_a_pool_of_one_thread_has_no_choice() -> None:
    choice = ThreadChoice(1, 1)
    assert set(Machine(lambda count: 0.01, lambda count: 0.9).run(choice, 10)[1]) == {1}


def test_steps_without_a_time_or_without_work_do_no_harm() -> None:
    choice = ThreadChoice(2, 2)
    for _ in range(100):
        for seconds in (0.0, -1.0, 0.1):
            choice.observe(seconds, 0.0, 0.0)
    assert choice.is_busy and choice.next_count() == 2
    Machine(lambda count: 0.01 * count, lambda count: 0.4).run(choice, 10)
    assert choice.next_count() == 1

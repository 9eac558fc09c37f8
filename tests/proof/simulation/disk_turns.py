"""Jobs of several processes that take turns: one at a time runs, and at any operation of the disk another may go on.

Each job has a thread, which waits at its operation until it is let go on; which one that is comes from the seed alone.
"""

import threading
from collections.abc import Callable
from random import Random

from tests.proof.simulation.disk import Disk, Killed, Process


class _Job:
    """One job. outcome: what it raised, None if it came to its end."""

    def __init__(self, process: Process, work: Callable[[], None], back: threading.Semaphore) -> None:
        self.process = process
        self.outcome: BaseException | None = None
        self.is_done = False
        self.gate = threading.Semaphore(0)
        self._work, self._back = work, back
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.gate.acquire()
        try:
            self._work()
        except BaseException as error:
            self.outcome = error
        self.is_done = True
        self._back.release()


class Turns:
    """Runs jobs over a disk. switching: probability that another job goes on at an operation."""

    def __init__(self, disk: Disk, switching: float = 0.3) -> None:
        self._disk, self._switching = disk, switching
        self._back = threading.Semaphore(0)
        self._current: _Job | None = None

    def run(
        self, jobs: list[tuple[Process, Callable[[], None]]], random: Random, cut_after: int | None = None
    ) -> list[BaseException | None]:
        """Run jobs to their ends; return what each raised.

        cut_after: switches after which the power fails; every job then ends with `Killed`.
        """
        disk = self._disk
        running = [_Job(process, work, self._back) for process, work in jobs]

        def pause() -> None:
            job = self._current
            if job is not None and (len(jobs) > 1 or cut_after is not None) and random.random() < self._switching:
                self._back.release()
                job.gate.acquire()

        former, disk.before_operation, disk.clock.before_sleep = disk.process, pause, pause
        for job in running:
            job.thread.start()
        try:
            while left := [job for job in running if not job.is_done]:
                if cut_after == 0:
                    disk.restart(power_cut=True)
                    former = disk.process
                cut_after = None if not cut_after else cut_after - 1
                job = self._current = random.choice(left)
                disk.process = job.process
                job.gate.release()
                self._back.acquire()
        finally:
            self._current, disk.process = None, former
            disk.before_operation = disk.clock.before_sleep = lambda: None
        for job in running:
            job.thread.join()
            if isinstance(job.outcome, Killed):
                job.outcome.__traceback__ = None
        return [job.outcome for job in running]

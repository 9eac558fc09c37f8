"""A campaign: chooses inputs, gives them to workers, keeps what is new, and counts."""

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tests.proof.fuzz.findings import FOUND, Finding, save
from tests.proof.fuzz.line_coverage import HAS_MONITORING
from tests.proof.fuzz.shrinking import shrink
from tests.proof.fuzz.target import Target
from tests.proof.fuzz.worker import Report
from tests.proof.fuzz.worker_process import WorkerProcess

WATCHED_EVERY = 1 if HAS_MONITORING else 12
"""Of how many cases one has its lines watched: a trace function makes Python several times slower."""
SHRINK_SECONDS = 60.0
CASES_OF_A_WORKER = 3000
"""Then it is started anew, so that nothing that lasts hides what a fresh process would show."""
MOST_KEPT = 3000
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\d+|\[[^\]]*\]")


@dataclass
class Counts:
    """What a campaign has seen. outcomes: by their first line; repeated: findings that were known already."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    lines: set[str] = field(default_factory=set)
    details: set[str] = field(default_factory=set)
    kept: int = 0
    largest_peak: int = 0
    repeated: int = 0


class Campaign:
    """Fuzzes one target until a number of cases or seconds is over.

    seed: with one job the same seed gives the same cases. folder: for findings. told: gets each finding, shrunk, with
    the file that holds it. worker: runs the inputs and stays open; None for new ones, one for each job.
    """

    def __init__(
        self,
        target: Target,
        *,
        seed: int = 0,
        jobs: int = 1,
        seconds: float = 60.0,
        most_cases: int | None = None,
        folder: Path | None = None,
        shrink_seconds: float = SHRINK_SECONDS,
        worker: WorkerProcess | None = None,
        told: Callable[[Finding, Path], None] | None = None,
    ) -> None:
        self.target, self.seed = target, seed
        self.counts = Counts()
        self.findings: dict[tuple[str, str], tuple[Finding, Path]] = {}
        self.began = time.monotonic()
        self._jobs, self._seconds, self._most_cases = jobs, seconds, most_cases
        self._folder = FOUND / target.name if folder is None else folder
        self._shrink_seconds, self._worker, self._told = shrink_seconds, worker, told
        self._corpus = target.corpus()
        self._kept: dict[bool, list[bytes]] = {True: [], False: []}
        self._next = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._failure: BaseException | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def run(self, each_minute: Callable[[], None] | None = None) -> None:
        """Fuzz until it is over or the user interrupts. Raises: what ends a worker's thread."""
        self.began = time.monotonic()
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._jobs)]
        for thread in threads:
            thread.start()
        told_at = self.began
        try:
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(0.2)
                if each_minute is not None and time.monotonic() - told_at >= 60:
                    told_at += 60
                    each_minute()
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            with WorkerProcess(self.target) if self._worker is None else nullcontext(self._worker) as worker:
                num_cases = 0
                while (case := self._take()) is not None:
                    index, data = case
                    if num_cases % CASES_OF_A_WORKER == CASES_OF_A_WORKER - 1:
                        worker.stop()
                    num_cases += 1
                    is_sound = index < len(self._corpus)
                    is_watched = is_sound or index % WATCHED_EVERY == 0
                    report = worker.run(data, watches_lines=is_watched, is_sound=is_sound)
                    self._record(data, report, worker)
        except BaseException as error:
            self._failure = error
            self._is_over.set()

    def _take(self) -> tuple[int, bytes] | None:
        """The next input: the corpus itself first, then mutations of it and of what was kept."""
        with self._lock:
            is_enough = self._most_cases is not None and self._next >= self._most_cases
            if self._is_over.is_set() or is_enough or self.elapsed > self._seconds:
                return None
            index, self._next = self._next, self._next + 1
            if index < len(self._corpus):
                return index, self._corpus[index]
            generator = random.Random(f"{self.seed}:{index}")
            # What was refused is refused again after most changes, for the same reason.
            drawn = generator.random()
            kept = self._kept[True] if drawn < 0.08 else self._kept[False] if drawn < 0.5 else self._corpus
            return index, self.target.mutate(generator, generator.choice(kept or self._corpus), self._corpus)

    def _record(self, data: bytes, report: Report, worker: WorkerProcess) -> None:
        name, _, detail = report.outcome.partition("\n")
        finding = Finding(report.kind, report.place, report.text, data)
        with self._lock:
            counts = self.counts
            counts.cases += 1
            counts.outcomes[f"finding: {report.kind}" if report.kind else name] += 1
            counts.largest_peak = max(counts.largest_peak, report.peak)
            # Messages that differ in names and numbers alone are one outcome.
            pattern = f"{name}\n{_VARIABLE.sub('#', detail)}"
            is_new = pattern not in counts.details or not counts.lines.issuperset(report.lines)
            counts.details.add(pattern)
            counts.lines.update(report.lines)
            if is_new and not report.kind:
                counts.kept += 1
                kept = self._kept[name.startswith("refused")]
                kept.append(data)
                if len(kept) > MOST_KEPT:
                    del kept[: MOST_KEPT // 4]
            if not report.kind:
                return
            if finding.key in self.findings:
                counts.repeated += 1
                return
            self.findings[finding.key] = finding, Path()
        self._keep(finding, worker)

    def _keep(self, finding: Finding, worker: WorkerProcess) -> None:
        """Shrink a finding and write it down."""

        def shows(data: bytes) -> bool:
            if self._is_over.is_set():
                return False
            report = worker.run(data)
            return (report.kind, report.place) == finding.key

        small = shrink(finding.data, shows, self.target.simplify, self._shrink_seconds)
        finding = Finding(finding.kind, finding.place, finding.text, small)
        path = save(finding, self._folder)
        with self._lock:
            self.findings[finding.key] = finding, path
        if self._told is not None:
            self._told(finding, path)

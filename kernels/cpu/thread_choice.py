"""The number of threads of the next step, on a machine whose processors other programs may take.

A thread that computes is given a processor's whole time. If it gets less, because it was put off its processor or slept
until another that was came back, then processors are scarce, and fewer threads may do more: an op waits for every
thread that has begun a part of it. How many are best depends on the load, so it is tried: steps with another number in
turns with steps as before, rarely where that changes nothing. Once the processors are free, the usual number holds
again.
"""

from dataclasses import dataclass, field

_SAMPLE_SECONDS = 0.02
"""Steps are looked at together for so long: some systems count processor time in ticks of a 64th of a second."""
_MEMORY_SECONDS = 0.2
"""Time constant of the share of time that was lost."""
_BUSY_SHARE = 0.08
_CALM_SHARE = 0.03
"""Lost shares above which processors are scarce, and below which they are free."""
_CALM_SECONDS = 0.3, 8.0
"""Time that the share must be that low: at first, and at most, if scarcity keeps coming back."""
_CALM_GROWTH = 4
"""So many times longer each time that it came back soon."""
_SOON_SECONDS = 1.0
"""If it comes back within so long, they had not been free: the usual number hid it or caused it."""
_TRIAL_SECONDS = 0.5, 4.0
"""Between two trials: at first, and at most, if none changes anything. The load may be another one by then."""
_LOAD_SECONDS = 1.0
"""Time constant of the lost share by which loads are distinguished."""
_OTHER_LOAD = 0.15
"""If that share is by so much another one than after the last trial, the load is: what was rejected is tried again."""
_TURN_SECONDS = 0.2
_SETTLING_SECONDS = 0.06
"""Of a turn in a trial, and the time before it that does not count: a scheduler moves threads to other processors, and
gives back what they did not use, after tens of milliseconds. In turns of 50 ms one thread seemed to do 1240 tokens of a
prompt a second, and did 700 when it was left alone."""
_PAIRS = 3
_GAIN = 0.9, 0.95
"""Largest ratio of times with fewer threads, and with more, to the time before. More are given more time beside
other programs, so that fewer are seldom much better, and may be much worse."""
_CLEAR = ((1, 0.6, 1.4), (2, 0.8, 1.15))
"""After so many pairs of turns a trial is over already if the ratio is outside of these."""
_HOPELESS = 2.0
"""So is one whose first turn takes so many times the usual time."""
_LONGEST_RATIO = 4.0
"""A number that took several times as long is tried again that many times later, at most."""


def steps_of(most: int) -> list[int]:
    """Numbers of threads that are tried: 1, 2, 3, 4, 6, 8, 12, 16 ... and `most`."""
    counts, count = {1, most, min(3, most)}, 2
    while count < most:
        counts |= {count, min(count * 3 // 2, most)}
        count *= 2
    return sorted(counts)


@dataclass
class _Trial:
    """Steps with another number of threads, in turns with steps as before. gain: as in _GAIN."""

    candidate: int
    gain: float
    expected: float
    """Seconds per unit of work, as before."""
    ratio: float = 1.0
    """Of the candidate's seconds to those as before."""
    pairs: int = 0
    is_candidates_turn: bool = True
    settling: float = 0.0
    settling_work: float = 0.0
    turn: float = 0.0
    """Seconds of the turn that do not count, the work done in them, and seconds that do."""
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of all turns: as before, and with the candidate; and the work done in them."""
    work: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def observe(self, seconds: float, work: float) -> bool | None:
        """Take in a step; return whether the candidate is better once that is known."""
        if self.settling < _SETTLING_SECONDS:
            self.settling += seconds
            self.settling_work += work
            if self.is_candidates_turn and not self.pairs and self.settling > _TURN_SECONDS:
                # One long step.
                self.ratio = self.settling / self.settling_work / self.expected
                return False if self.ratio > _HOPELESS else None
            return None
        self.seconds[self.is_candidates_turn] += seconds
        self.work[self.is_candidates_turn] += work
        self.turn += seconds
        if self.turn < _TURN_SECONDS:
            return None
        self.settling = self.settling_work = self.turn = 0.0
        self.is_candidates_turn = not self.is_candidates_turn
        if not self.is_candidates_turn:
            return None
        self.pairs += 1
        before, candidate = (seconds / work for seconds, work in zip(self.seconds, self.work, strict=True))
        self.ratio = candidate / before
        if self.pairs == _PAIRS:
            return self.ratio < self.gain
        for pairs, low, high in _CLEAR:
            if self.pairs >= pairs and not low <= self.ratio <= high:
                return self.ratio < low
        return None


class ThreadChoice:
    """Chooses for steps of one kind; not thread-safe. It has no clock: time passes with the steps that are reported.

    usual: how many are best on a free machine, at most `most`. is_sure: that was measured on one; if not, it is found
    out as soon as processors are free. given: these three as they were at first.
    """

    def __init__(self, usual: int, most: int, *, is_sure: bool = True) -> None:
        self.given = usual, most, is_sure
        self.usual, self.most, self.is_sure = usual, most, is_sure
        self._steps = steps_of(most)
        self._count = usual
        self._is_busy = not is_sure
        self._seconds = self._computing = 0.0
        self._lost = 0.0
        self._load = self._load_at_choice = 0.0
        """The lost share over a longer time, and its value soon after the number was chosen."""
        self._since_choice = 0.0
        self._calm_seconds = 0.0
        self._calm_needed = _CALM_SECONDS[0]
        self._since_calm = _SOON_SECONDS
        self._trial: _Trial | None = None
        self._recent = 0.0, 0.0
        """Seconds and work of late, outside of trials."""
        self._interval = self._until_trial = _TRIAL_SECONDS[0]
        self._rejected: set[int] = set()

    @property
    def is_busy(self) -> bool:
        """Processors are taken to be scarce."""
        return self._is_busy

    def next_count(self) -> int:
        """Number of threads of the next step."""
        if not self._is_busy:
            return self.usual
        if self._trial is not None and self._trial.is_candidates_turn:
            return self._trial.candidate
        return self._count

    def observe(self, seconds: float, computing: float, work: float) -> None:
        """Take in a step with `next_count` threads: its time, the part that its first thread computed, and its work.

        work: in any unit that the time of a step of this kind is proportional to; steps without work say how much time
        was lost, and nothing of how many threads are best.
        """
        if self.most == 1 or seconds <= 0:
            return
        self._seconds += seconds
        self._computing += computing
        if self._seconds >= _SAMPLE_SECONDS:
            share = 1 - self._computing / self._seconds
            self._lost += min(1.0, self._seconds / _MEMORY_SECONDS) * (share - self._lost)
            self._note_load(self._seconds)
            self._compare_load(self._seconds, share)
            self._seconds = self._computing = 0.0
        if not self._is_busy or work <= 0:
            return
        if self._trial is None:
            kept = max(0.0, 1 - seconds / _MEMORY_SECONDS)
            self._recent = kept * self._recent[0] + seconds, kept * self._recent[1] + work
            self._until_trial -= seconds
            if self._until_trial <= 0:
                self._trial = self._next_trial()
            return
        is_better = self._trial.observe(seconds, work)
        if is_better is not None:
            self._end_trial(self._trial, is_better)

    def _note_load(self, seconds: float) -> None:
        self._since_calm += seconds
        if not self._is_busy:
            if self._lost > _BUSY_SHARE:
                self._begin_busy()
            return
        if self._lost >= _CALM_SHARE:
            self._calm_seconds = 0.0
            return
        if not self._calm_seconds and not self.is_sure:
            # The other programs have gone.
            self._try_again_soon()
        self._calm_seconds += seconds
        if self._calm_seconds >= self._calm_needed and self.is_sure:
            self._begin_calm()

    def _compare_load(self, seconds: float, share: float) -> None:
        """Try other numbers soon if the load is another one than when the present number was chosen."""
        if not self._is_busy or self._trial is not None:
            return
        self._load += min(1.0, seconds / _LOAD_SECONDS) * (share - self._load)
        self._since_choice += seconds
        if self._since_choice < 2 * _LOAD_SECONDS:
            self._load_at_choice = self._load
        elif abs(self._load - self._load_at_choice) > _OTHER_LOAD:
            self._try_again_soon()
            self._load_at_choice = self._load

    def _try_again_soon(self) -> None:
        """Forget which numbers were rejected: what was found says nothing any more."""
        self._rejected.clear()
        self._interval = _TRIAL_SECONDS[0]
        self._until_trial = min(self._until_trial, self._interval)

    def _begin_busy(self) -> None:
        is_soon = self._since_calm < _SOON_SECONDS
        longest = _CALM_SECONDS[1]
        self._calm_needed = min(_CALM_GROWTH * self._calm_needed, longest) if is_soon else _CALM_SECONDS[0]
        if not is_soon:
            self._count, self._interval = self.usual, _TRIAL_SECONDS[0]
            self._rejected.clear()
        self._until_trial = self._interval
        self._is_busy, self._calm_seconds = True, 0.0

    def _begin_calm(self) -> None:
        self._is_busy, self._trial, self._since_calm = False, None, 0.0

    def _neighbours(self) -> list[int]:
        place = self._steps.index(self._count) if self._count in self._steps else len(self._steps) - 1
        return [self._steps[other] for other in (place - 1, place + 1) if 0 <= other < len(self._steps)]

    def _next_trial(self) -> _Trial:
        neighbours = self._neighbours()
        fresh = [count for count in neighbours if count not in self._rejected]
        if not fresh:
            self._rejected.clear()
        candidate = (fresh or neighbours)[0]
        return _Trial(candidate, _GAIN[candidate > self._count], self._recent[0] / self._recent[1])

    def _end_trial(self, trial: _Trial, is_better: bool) -> None:
        self._trial, candidate = None, trial.candidate
        if is_better:
            self._since_choice = 0.0
            # The number before is known to be worse; the next beyond may be better still.
            self._rejected = {self._count}
            self._count, self._interval = candidate, _TRIAL_SECONDS[0]
        else:
            self._rejected.add(candidate)
            longest = _TRIAL_SECONDS[1] * min(max(1.0, trial.ratio), _LONGEST_RATIO)
            self._interval = min(2 * self._interval * max(1.0, trial.ratio), longest)
        self._until_trial = self._interval
        if self._calm_seconds and not self.is_sure and not set(self._neighbours()) - self._rejected:
            self.usual, self.is_sure = self._count, True
            self._begin_calm()

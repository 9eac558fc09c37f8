"""A bound on what drafting may lose against plain decoding: a token bucket in units of plain steps.

Every token earns six thousandths of a step; every round with drafting is charged what it took over what its tokens
would have taken plainly, its bookkeeping included, or credited where that is less. No draft is made that the credit
could not pay for, and once it cannot pay for any, steps are plain (backoff), for as long as earning takes and twice as
long each time: a stretch of W tokens loses at most 0.006 W and the largest credit. Both sides are timed in the same
period: plain steps now and then between rounds, and at once, before a round is charged, where it took longer or shorter
than expected, or where little is known yet. So a change of the machine's load is not mistaken for a change of the
drafts.
"""

import math
from typing import NamedTuple

from localinfer.engine.speculation.costs import RecentMedian, VerificationCosts

_EARNED_PER_TOKEN, _FIRST_CREDIT, _MOST_CREDIT, _SPARE_CREDIT = 0.006, 4.0, 6.0, 0.25
_SHORTEST_BACKOFF, _LONGEST_BACKOFF = 16, 256
# Plain steps: timed at a time, most timed at a time, whose median counts, and rounds until one is timed again.
_TIMED_STEPS, _MOST_TIMED_STEPS, _KEPT_STEPS, _ROUNDS_BETWEEN_PLAIN = 3, 5, 9, 32
_TRUSTED_ROUNDS = 4
"""Rounds after which a surprising one makes plain steps be timed again."""
_SURPRISE = 1.5
"""Times what was expected; more is not charged, as the round was interrupted, which plain steps are, too."""
_INVESTED_FOR_ROUNDS = 8
"""Rounds over which the prefill of a draft model is charged: a text that drafts once mostly drafts again."""


class StepKind(NamedTuple):
    """Kind of steps whose times are compared: number of streams, and whether a grammar constrains any."""

    streams: int
    is_constrained: bool = False


ALONE = StepKind(1)


class Round(NamedTuple):
    """One step for which drafters were called."""

    kind: StepKind
    rows: int
    """Computed rows, drafts included."""
    tokens: int
    """Sampled tokens of all streams."""
    seconds: float
    """Time of the whole step."""
    drafting_seconds: float = 0.0
    """Time of its drafting."""
    expected_drafting_seconds: float = 0.0
    """Usual time of its drafting."""
    reading_seconds: float = 0.0
    """Time of a draft model's prefill within the drafting, which is an investment."""


class DraftFloor:
    """Decides before each step whether it is plain, and observes what each took; one per engine.

    most_credit: in plain steps; infinite tries every draft. is_timed: whether the plain step that was just decided on
    is to be timed, for `observe_plain`.
    """

    def __init__(self, costs: VerificationCosts, *, most_credit: float = _MOST_CREDIT) -> None:
        self._costs = costs
        self._most_credit = most_credit
        self._credit = _FIRST_CREDIT if math.isfinite(most_credit) else most_credit
        self._debt = 0.0
        self._backoff = 0
        """Steps to take plainly: counted down by `in_backoff`, and credited later, by `_credit_backoff`."""
        self._credited_backoff = 0
        self._next_backoff = _SHORTEST_BACKOFF
        self._plain: dict[StepKind, RecentMedian] = {}
        self._plain_at: dict[StepKind, int] = {}
        self._wanted = _TIMED_STEPS
        self._num_timed = 0
        self._pending: Round | None = None
        self.is_timed = False

    def begin(self, *, is_expected: bool = False) -> None:
        """Another text begins: drafts that did not pay for the one before may pay for this one.

        is_expected: its caller gave a prediction, which is worth trying.
        """
        self._credit_backoff()
        if is_expected:
            self._credit = max(self._credit, _FIRST_CREDIT)
        self._backoff = self._credited_backoff = min(self._backoff, self._steps_to_earn())
        self._next_backoff = _SHORTEST_BACKOFF
        self._wanted = max(self._wanted, 1)

    def in_backoff(self) -> bool:
        """True if the next step is plain and need not be observed; called before it, and before `is_plain`.

        It is cheap, for the smallest models, whose steps take as long as a few calls.
        """
        if self._backoff <= _TIMED_STEPS:
            return False
        self._backoff -= 1
        return True

    def is_plain(self, kind: StepKind) -> bool:
        """True if no drafts are to be made for the next step; called once before each."""
        costs = self._costs
        self._credit_backoff()
        if self._backoff:
            self._backoff -= 1
            self.is_timed = self._backoff < _TIMED_STEPS
            return True
        costs.num_steps += 1
        if self._wanted or costs.num_steps - self._plain_at.get(kind, -_ROUNDS_BETWEEN_PLAIN) >= _ROUNDS_BETWEEN_PLAIN:
            self._wanted = self._wanted or (1 if kind in self._plain else _TIMED_STEPS)
            self.is_timed = True
            return True
        return False

    def affordable_draft_length(
        self, streams: int, rows: int, most: int, *, seconds_per_token: float = 0.0, seconds_per_draft: float = 0.0
    ) -> int:
        """The longest draft, up to `most`, that the credit can pay for if none of it is accepted.

        rows: what the step computes beside it, one for each of so many streams and other drafts.
        """
        plain = self._costs.seconds(streams)
        affordable = plain * (1.0 + self._credit) - seconds_per_draft
        length = most
        while length > 0 and self._costs.most_seconds(rows + length) + length * seconds_per_token > affordable:
            length -= 1
        return length

    def plain_seconds(self, kind: StepKind) -> float:
        """Present time of a plain step of this kind."""
        known = self._plain.get(kind)
        return self._costs.seconds(kind.streams) if known is None or known.value is None else known.value

    def observe_plain(self, kind: StepKind, seconds: float) -> None:
        """Learn from a plain step that was to be timed."""
        self._plain_at[kind] = self._costs.num_steps
        is_surprising = seconds > 0.0 and self._learn_plain(kind, seconds)
        if not self._wanted:
            return
        self._wanted -= 1
        self._num_timed += 1
        if not self._wanted and self._num_timed < _MOST_TIMED_STEPS:
            # An outlier is an interruption, or the first of another period: one more decides.
            self._wanted = int(is_surprising)
        if not self._wanted:
            self._num_timed = 0
            if self._pending is not None:
                self._settle(self._pending)

    def _learn_plain(self, kind: StepKind, seconds: float) -> bool:
        """Follow plain steps; return whether this one is an outlier."""
        known = self._plain.setdefault(kind, RecentMedian(_KEPT_STEPS))
        known.add(seconds)
        assert known.value is not None, "there is one at least"
        latest = list(known.values)[-_TIMED_STEPS:]
        if len(latest) == _TIMED_STEPS and _is_surprising(sorted(latest)[_TIMED_STEPS // 2], known.value):
            # The machine's load has changed: earlier times do not count any more.
            known.restart(latest)
        if not kind.is_constrained:
            self._costs.observe_plain(kind.streams, known.value)
        return _is_surprising(seconds, known.value)

    def observe_round(self, done: Round) -> None:
        """Learn from a step for which drafters were called, whether they drafted or not."""
        if done.seconds <= 0.0:
            return
        if self._is_doubtful(done):
            self._pending = done
        else:
            self._settle(done)

    def _is_doubtful(self, done: Round) -> bool:
        """True if the machine's load may have changed since the last plain steps; then those are timed again first."""
        expected = self._expected_seconds(done)
        plain_age = self._costs.num_steps - self._plain_at.get(done.kind, 0)
        seconds = done.seconds - done.reading_seconds
        if seconds * _SURPRISE < expected or (plain_age > _TRUSTED_ROUNDS and seconds > _SURPRISE * expected):
            self._wanted = max(self._wanted, 1)
            return True
        known = self._plain.get(done.kind)
        if done.rows == done.kind.streams or self._costs.is_known(done.rows):
            return False
        # The first steps of a process, or of a busy period, are like no others.
        if known is not None and len(known.values) >= _MOST_TIMED_STEPS:
            return False
        self._wanted = max(self._wanted, 1)
        return True

    def _expected_seconds(self, done: Round) -> float:
        steps = self._costs.seconds(done.rows) / self._costs.seconds(done.kind.streams)
        return steps * self.plain_seconds(done.kind) + done.expected_drafting_seconds

    def _most_seconds(self, done: Round) -> float:
        """Most that a round is charged. Rows whose cost is unknown yet may take as long as they seem to."""
        steps = self._costs.most_seconds(done.rows) / self._costs.seconds(done.kind.streams)
        unknown = steps * self.plain_seconds(done.kind) + done.drafting_seconds
        return max(_SURPRISE * self._expected_seconds(done), unknown)

    def _settle(self, done: Round) -> None:
        self._pending = None
        plain = self.plain_seconds(done.kind)
        taken = min(done.seconds - done.reading_seconds, self._most_seconds(done))
        if done.rows > done.kind.streams and not done.kind.is_constrained:
            self._costs.observe(done.rows, done.seconds - done.drafting_seconds)
        self._debt += done.reading_seconds / plain
        repaid = self._debt / _INVESTED_FOR_ROUNDS
        self._debt -= repaid
        tokens = done.tokens / done.kind.streams
        gained = tokens - taken / plain - repaid
        self._credit = min(self._credit + gained + _EARNED_PER_TOKEN * tokens, self._most_credit)
        if self._credit < self._cheapest_draft():
            self._credit -= self._debt
            self._debt = 0.0
            self.is_timed = False
            self._backoff = self._credited_backoff = max(self._steps_to_earn(), self._next_backoff)
            self._next_backoff = min(2 * self._next_backoff, _LONGEST_BACKOFF)
        elif gained > 0.0 and self._credit >= 1.0:
            self._next_backoff = _SHORTEST_BACKOFF

    def _credit_backoff(self) -> None:
        """Credit the plain steps that were taken in backoff since the last look."""
        taken = self._credited_backoff - self._backoff
        self._credited_backoff = self._backoff
        self._costs.num_steps += taken
        self._credit += _EARNED_PER_TOKEN * taken

    def _steps_to_earn(self) -> int:
        """Plain steps until the credit can pay for one drafted token that is rejected."""
        wanted = self._cheapest_draft() + _SPARE_CREDIT
        return math.ceil(max(0.0, wanted - self._credit) / _EARNED_PER_TOKEN)

    def _cheapest_draft(self) -> float:
        """Cost of one drafted token that is rejected."""
        return self._costs.most_seconds(2) / self._costs.seconds(1) - 1.0


def _is_surprising(seconds: float, expected: float) -> bool:
    return not expected / _SURPRISE < seconds < expected * _SURPRISE

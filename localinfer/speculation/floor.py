"""The floor under speculation: drafting may lose hardly anything against plain decoding, whatever it was hoped to gain.

An account in units of plain steps. Every token earns six thousandths of a step; every round with drafting is
charged what it took over what its tokens would have taken plainly, its bookkeeping included, and credited where that is
less. No draft is made that the account could not pay for, and once it cannot pay for any, steps are plain, for as long
as earning takes and twice as long each time: a stretch of W tokens loses at most 0.006 W and what the account can hold.
Both sides are of the same seconds: plain steps are timed now and then between rounds, and at once, before a round is
charged, where it took longer or shorter than expected, or where little is known yet. So a machine that gets busy, or
idle, is not mistaken for drafts that do.
"""

import math
from typing import NamedTuple

from localinfer.speculation.verification_costs import RecentMedian, VerificationCosts

_EARNED_PER_TOKEN = 0.006
_FIRST_CREDIT = 4.0
_MOST_CREDIT = 6.0
_SPARE_CREDIT = 0.25
_SHORTEST_REST, _LONGEST_REST = 16, 256
_TIMED_STEPS = 3
_MOST_TIMED_STEPS = 5
_KEPT_STEPS = 9
_ROUNDS_BETWEEN_PLAIN = 32
_TRUSTED_ROUNDS = 4
"""Rounds after which a surprising one makes plain steps be timed anew."""
_SURPRISE = 1.5
"""Times what was expected; more is not charged, as the round was interrupted, which plain steps are, too."""
_INVESTED_FOR_ROUNDS = 8
"""Rounds over which reading a text is charged: who drafts once mostly drafts again."""


class StepKind(NamedTuple):
    """What is alike of steps whose times are compared: streams that take part, and whether a grammar guides any."""

    streams: int
    is_guided: bool = False


ALONE = StepKind(1)


class Round(NamedTuple):
    """One step for which drafts were asked.

    rows: computed, drafts included; tokens: of all streams. seconds: of the whole step; drafting_seconds: of its
    drafting, expected_drafting_seconds: what that usually takes. reading_seconds: what reading text took of it, which
    is an investment.
    """

    kind: StepKind
    rows: int
    tokens: int
    seconds: float
    drafting_seconds: float = 0.0
    expected_drafting_seconds: float = 0.0
    reading_seconds: float = 0.0


class DraftFloor:
    """Says before each step whether it is to be plain, and learns from each what it took; one per engine.

    most_credit: what the account holds at most, in plain steps; without a limit it begins with as much, and every
    draft is tried.
    """

    def __init__(self, costs: VerificationCosts, *, most_credit: float = _MOST_CREDIT) -> None:
        self._costs = costs
        self._most_credit = most_credit
        self._credit = _FIRST_CREDIT if math.isfinite(most_credit) else most_credit
        self._debt = 0.0
        self._rest = 0
        """Steps to take plainly: taken off by who takes them, and accounted for when they are looked at."""
        self._rest_known = 0
        self._next_rest = _SHORTEST_REST
        self._plain: dict[StepKind, RecentMedian] = {}
        self._plain_at: dict[StepKind, int] = {}
        self._wanted = _TIMED_STEPS
        self._num_timed = 0
        self._pending: Round | None = None
        self.is_timed = False
        """Whether the plain step that was just decided on is to be timed, and told to `observe_plain`."""

    def begin(self, *, is_expected: bool = False) -> None:
        """Another text begins: what did not pay for the one before may pay for this one.

        is_expected: its caller says what it will be, and so has paid for trying.
        """
        self._account_for_rest()
        if is_expected:
            self._credit = max(self._credit, _FIRST_CREDIT)
        self._rest = self._rest_known = min(self._rest, self._steps_to_earn())
        self._next_rest = _SHORTEST_REST
        self._wanted = max(self._wanted, 1)

    def in_backoff(self) -> bool:
        """Ask before a step, and before `is_plain`: whether it is plain, and nothing is to be told of it.

        The smallest models take a hundred such steps in the time of a few questions.
        """
        if self._rest <= _TIMED_STEPS:
            return False
        self._rest -= 1
        return True

    def is_plain(self, kind: StepKind) -> bool:
        """Ask once before each step: whether no drafts are to be made for it."""
        costs = self._costs
        self._account_for_rest()
        if self._rest:
            self._rest -= 1
            self.is_timed = self._rest < _TIMED_STEPS
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
        """The deepest draft, up to `most`, that the account can pay for if none of it is accepted.

        rows: what the step computes beside it, one for each of so many streams and other drafts.
        """
        plain = self._costs.seconds(streams)
        affordable = plain * (1.0 + self._credit) - seconds_per_draft
        depth = most
        while depth > 0 and self._costs.most_seconds(rows + depth) + depth * seconds_per_token > affordable:
            depth -= 1
        return depth

    def plain_seconds(self, kind: StepKind) -> float:
        """What a plain step of this kind takes at present."""
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
            # One that stands apart is an interruption, or the first of a new time: another one tells.
            self._wanted = int(is_surprising)
        if not self._wanted:
            self._num_timed = 0
            if self._pending is not None:
                self._settle(self._pending)

    def _learn_plain(self, kind: StepKind, seconds: float) -> bool:
        """Follow plain steps; return whether this one stands apart from the others."""
        known = self._plain.setdefault(kind, RecentMedian(_KEPT_STEPS))
        known.add(seconds)
        assert known.value is not None, "there is one at least"
        latest = list(known.values)[-_TIMED_STEPS:]
        if len(latest) == _TIMED_STEPS and _is_surprising(sorted(latest)[_TIMED_STEPS // 2], known.value):
            # The machine got busy, or idle: what was before says nothing any more.
            known.begin_anew(latest)
        if not kind.is_guided:
            self._costs.observe_plain(kind.streams, known.value)
        return _is_surprising(seconds, known.value)

    def observe_round(self, done: Round) -> None:
        """Learn from a step for which drafts were asked, whether there were any or not."""
        if done.seconds <= 0.0:
            return
        if self._is_doubtful(done):
            self._pending = done
        else:
            self._settle(done)

    def _is_doubtful(self, done: Round) -> bool:
        """Whether a round and the plain steps before it may be of different times; then those are timed anew first."""
        expected = self._expected_seconds(done)
        plain_age = self._costs.num_steps - self._plain_at.get(done.kind, 0)
        seconds = done.seconds - done.reading_seconds
        if seconds * _SURPRISE < expected or (plain_age > _TRUSTED_ROUNDS and seconds > _SURPRISE * expected):
            self._wanted = max(self._wanted, 1)
            return True
        known = self._plain.get(done.kind)
        if done.rows == done.kind.streams or self._costs.is_known(done.rows):
            return False
        # The first steps of a process, or of a busy moment, are like no others.
        if known is not None and len(known.values) >= _MOST_TIMED_STEPS:
            return False
        self._wanted = max(self._wanted, 1)
        return True

    def _expected_seconds(self, done: Round) -> float:
        steps = self._costs.seconds(done.rows) / self._costs.seconds(done.kind.streams)
        return steps * self.plain_seconds(done.kind) + done.expected_drafting_seconds

    def _most_seconds(self, done: Round) -> float:
        """What a round is charged at most. Rows whose cost is not known yet may be as dear as it seems."""
        steps = self._costs.most_seconds(done.rows) / self._costs.seconds(done.kind.streams)
        unknown = steps * self.plain_seconds(done.kind) + done.drafting_seconds
        return max(_SURPRISE * self._expected_seconds(done), unknown)

    def _settle(self, done: Round) -> None:
        self._pending = None
        plain = self.plain_seconds(done.kind)
        taken = min(done.seconds - done.reading_seconds, self._most_seconds(done))
        if done.rows > done.kind.streams and not done.kind.is_guided:
            self._costs.observe(done.rows, done.seconds - done.drafting_seconds)
        self._debt += done.reading_seconds / plain
        repaid = self._debt / _INVESTED_FOR_ROUNDS
        self._debt -= repaid
        tokens = done.tokens / done.kind.streams
        gained = tokens - taken / plain - repaid
        self._credit = min(self._credit + gained + _EARNED_PER_TOKEN * tokens, self._most_credit)
        if self._credit < self._shallowest():
            self._credit -= self._debt
            self._debt = 0.0
            self.is_timed = False
            self._rest = self._rest_known = max(self._steps_to_earn(), self._next_rest)
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        elif gained > 0.0 and self._credit >= 1.0:
            self._next_rest = _SHORTEST_REST

    def _account_for_rest(self) -> None:
        rested = self._rest_known - self._rest
        self._rest_known = self._rest
        self._costs.num_steps += rested
        self._credit += _EARNED_PER_TOKEN * rested

    def _steps_to_earn(self) -> int:
        """Plain steps until the account can pay for the shallowest draft that is of no use."""
        wanted = self._shallowest() + _SPARE_CREDIT
        return math.ceil(max(0.0, wanted - self._credit) / _EARNED_PER_TOKEN)

    def _shallowest(self) -> float:
        """What the shallowest draft costs if it is of no use."""
        return self._costs.most_seconds(2) / self._costs.seconds(1) - 1.0


def _is_surprising(seconds: float, expected: float) -> bool:
    return not expected / _SURPRISE < seconds < expected * _SURPRISE

"""The length of drafts, and whether to draft at all: costs of verifying rows, acceptance, and a bound on the loss.

Costs measured at load time are only the prior. A row count's estimate is the lower median of its last three times, over
the time of plain steps around them, so that neither an interruption nor a busy period lasts; one that was not observed
lately decays until it is worth another try.

A round with k drafted tokens computes k + 1 rows and yields 1 + a1 + a1 a2 + ... tokens, a_i the probability that the
i-th drafted token is accepted after those before it. Those probabilities are running estimates per kind of draft, kept
across generations. The length of most expected tokens per second is taken; 0 is a choice.

What drafting may lose against plain decoding is bounded (`DraftFloor`): a token bucket in units of plain steps. Every
token earns six thousandths of a step; every round with drafting is charged what it took over what its tokens would have
taken plainly, its bookkeeping included, or credited where that is less. No draft is made that the credit could not pay
for, and once it cannot pay for any, steps are plain (backoff), for as long as earning takes and twice as long each
time: a stretch of W tokens loses at most 0.006 W and the largest credit. Both sides are timed in the same period: plain
steps now and then between rounds, and at once, before a round is charged, where it took longer or shorter than
expected, or where little is known yet. So a change of the machine's load is not mistaken for a change of the drafts.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from localinfer.engine.sampling.sampler import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from localinfer.engine.speculation.mtp import DraftHead

_SAMPLES = 3
_LEAST_RATIO = 0.9
"""More rows never take less than one: a smaller ratio compares times of different load."""
_NOTICEABLE = 0.02
"""Plain steps by which an estimate has to change for the curve to be recomputed, which takes 10 us."""
_FRESH_STEPS = 64
_HALF_LIFE_STEPS = 512
"""Steps in which an unconfirmed estimate is halved: optimism costs one round, and corrects itself."""


class RecentMedian:
    """The lower median of the last values; None before there is any."""

    def __init__(self, most: int) -> None:
        self.values: deque[float] = deque(maxlen=most)
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.values.append(value)
        self.value = sorted(self.values)[(len(self.values) - 1) // 2]

    def restart(self, values: Sequence[float]) -> None:
        """Forget all but these, at least one."""
        self.values.clear()
        for value in values:
            self.add(value)


class VerificationCosts:
    """Seconds of one step by number of rows: a measured prior, updated by what steps take.

    num_steps: steps taken so far, plain ones included; counted by `DraftFloor`.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        """seconds[n - 1]: of n rows, from 1 to the most that are verified at once, at most MAX_DRAFT_TOKENS + 1."""
        assert 1 <= len(seconds) <= MAX_DRAFT_TOKENS + 1, "one time per number of rows"
        self.num_steps = 0
        first = max(seconds[0], 1e-9)
        self._plain_seconds = first
        self._priors = list(itertools.accumulate((max(1.0, value / first) for value in seconds), max))
        self._observed = [RecentMedian(_SAMPLES) for _ in seconds]
        # The prior is trusted as far as a step that was taken a while ago.
        self._last_steps = [-_FRESH_STEPS] * len(seconds)
        self._curve: list[float] = []
        self._bounds: list[float] = []
        self._next_update = 0

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens that can be verified after the one that is certain."""
        return len(self._priors) - 1

    def seconds(self, num_rows: int) -> float:
        """Expected seconds of a step; infinite beyond what is verified at once."""
        return self._plain_seconds * self.ratios()[num_rows - 1] if num_rows <= len(self._priors) else math.inf

    def ratios(self) -> Sequence[float]:
        """Expected seconds of steps of 1, 2, 3 ... rows over those of a plain one."""
        if self.num_steps >= self._next_update:
            self._update()
        return self._curve

    def most_seconds(self, num_rows: int) -> float:
        """Longest time of a step, by what was observed of late; infinite beyond what is verified at once."""
        self.ratios()
        return self._plain_seconds * self._bounds[num_rows - 1] if num_rows <= len(self._priors) else math.inf

    def is_known(self, num_rows: int) -> bool:
        """True if steps of so many rows were observed often enough that one more says little."""
        return num_rows <= len(self._priors) and len(self._observed[num_rows - 1].values) > 1

    def observe_plain(self, num_rows: int, seconds: float) -> None:
        """Take what steps without drafts take at present; num_rows: of so many streams, one row each."""
        if num_rows <= len(self._priors):
            self._plain_seconds = seconds * self._plain_seconds / self.seconds(num_rows)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Follow what a step with drafts took, its drafting left out."""
        ratio = seconds / self._plain_seconds
        if not 1 < num_rows <= len(self._priors) or ratio < _LEAST_RATIO:
            return
        index = num_rows - 1
        observed = self._observed[index]
        if self.num_steps - self._last_steps[index] > _HALF_LIFE_STEPS and observed.value is not None:
            observed.restart([observed.value])
        observed.add(ratio)
        self._last_steps[index] = self.num_steps
        if abs((observed.value or 0.0) - self.ratios()[index]) > _NOTICEABLE:
            self._next_update = 0

    def _update(self) -> None:
        """Recompute the curve of ratios to a plain step: it never falls, and stale estimates decay."""
        curve, bounds, scale, now = [1.0], [1.0], 1.0, self.num_steps
        caps = self._caps()
        for index in range(1, len(caps)):
            prior, observed, age = self._priors[index], self._observed[index], now - self._last_steps[index]
            # One row more never costs more than the rows before it do on average.
            growth = (index + 1) / index
            ratio = prior * scale
            if observed.value is not None:
                if len(observed.values) > 1:
                    # Where rows cost more, or less, than the prior says, larger counts may, too.
                    ratio = observed.value
                    scale = ratio / prior
                else:
                    # A single observation may only lower it.
                    ratio = min(ratio, observed.value)
            cap = caps[index]
            if age >= _FRESH_STEPS:
                ratio = min(ratio * 0.5 ** ((age - _FRESH_STEPS) / _HALF_LIFE_STEPS), curve[-1] * growth)
            curve.append(max(min(ratio, cap), curve[-1]))
            bounds.append(max(min(bounds[-1] * growth, cap), bounds[-1]))
        self._curve, self._bounds = curve, bounds
        self._next_update = now + _FRESH_STEPS // 2

    def _caps(self) -> list[float]:
        """Upper bound of the cost of so many rows, as observed of as many, or more, of late."""
        caps, cap, oldest = [], math.inf, self.num_steps - _HALF_LIFE_STEPS
        for observed, last_step in zip(reversed(self._observed), reversed(self._last_steps), strict=True):
            if observed.value is not None and observed.value < cap and last_step > oldest:
                cap = observed.value
            caps.append(cap)
        return caps[::-1]


_PRIOR_WEIGHT = 3.0
"""Tokens that the prior counts as, where nothing else is said."""
_MEMORY = 0.985
"""Share of every count that is left after another draft of its kind: about the last 67 count."""
_FIRST_PROBE, _LAST_PROBE = 4, 512
"""Rounds without a draft before the next probe: doubled after each that yields nothing."""
_LEAST_GAIN = 1.01
"""Expected speed over plain decoding that a draft must promise, for estimates are noisy."""


class Acceptance:
    """Running probability, per position in a draft of one kind, that its token is accepted after those before it.

    prior, weight: before anything was seen, and tokens that it counts as. reach: how long drafts may be by what was
    accepted so far, for a drafter of which nothing is known: twice the longest, and one.
    """

    def __init__(self, prior: float, weight: float = _PRIOR_WEIGHT) -> None:
        self.reach = 1
        self._prior = prior
        self._weight = weight
        self._accepted = [0.0] * MAX_DRAFT_TOKENS
        self._tried = [0.0] * MAX_DRAFT_TOKENS
        self._probabilities: list[float] | None = None
        self._rounds_to_probe = 0
        self._next_probe = _FIRST_PROBE

    def probabilities(self) -> Sequence[float]:
        """The estimates; a position that was hardly tried leans on the one before it.

        Once a token was right the draft is likelier to be on the way: in prose and code the second probability was
        close to the square root of the first, whatever that was, and later ones to the second.
        """
        if self._probabilities is None:
            estimate = self._prior
            found: list[float] = []
            for accepted, tried in zip(self._accepted, self._tried, strict=True):
                prior = math.sqrt(estimate) if len(found) == 1 else estimate
                estimate = (accepted + self._weight * prior) / (tried + self._weight)
                found.append(estimate)
            self._probabilities = found
        return self._probabilities

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verified draft: the tokens accepted, and the first that was not."""
        for counts, most in ((self._accepted, num_accepted), (self._tried, num_accepted + 1)):
            counts[:] = [value * _MEMORY for value in counts]
            for index in range(min(num_drafted, most)):
                counts[index] += 1.0
        self.reach = max(self.reach, 2 * num_accepted + 1)
        self._probabilities = None

    def stop_probing(self) -> None:
        """Note that this kind promises a gain, so that the next time it does not, probes start over."""
        self._next_probe = _FIRST_PROBE
        self._rounds_to_probe = 0

    def is_probe_due(self) -> bool:
        """True if a round that would not draft should do so; called once for each. Waits double up to 512."""
        if self._rounds_to_probe > 0:
            self._rounds_to_probe -= 1
            return False
        self._rounds_to_probe = self._next_probe
        self._next_probe = min(2 * self._next_probe, _LAST_PROBE)
        return True


class DraftMode(NamedTuple):
    """A way in which a model can draft the next token."""

    share: float
    """Probability that it can be drafted at all."""
    seconds_per_token: float
    head: "DraftHead | None" = None
    """Head of draft layers, if it is by those."""


def best_draft_length(
    probabilities: Sequence[float],
    costs: VerificationCosts,
    most: int,
    other_rows: int = 0,
    other_tokens: int = 0,
    *,
    seconds_per_token: float = 0.0,
    seconds_per_draft: float = 0.0,
) -> tuple[int, float]:
    """Return the draft length of most expected tokens per second, up to `most`, and that speed over plain decoding.

    seconds_per_token, seconds_per_draft: what drafting itself costs. other_rows: rows of other sequences in the same
    pass, and other_tokens what they yield; the pass takes longer for those too, so drafts shrink as a batch grows.
    """
    ratios, plain = costs.ratios(), costs.seconds(1)
    drafting, per_token = seconds_per_draft / plain, seconds_per_token / plain
    scale = ratios[other_rows] / (other_tokens + 1) if other_rows < len(ratios) else 0.0
    best, best_rate = 0, _LEAST_GAIN
    tokens = probability = 1.0
    for length in range(1, min(most, costs.max_draft_tokens - other_rows) + 1):
        probability *= probabilities[length - 1]
        tokens += probability
        rate = scale * (other_tokens + tokens) / (ratios[other_rows + length] + drafting + length * per_token)
        if rate > best_rate:
            best, best_rate = length, rate
    return best, best_rate if best else 1.0


# Credit in plain steps: earned per token, at the start, at most, and beyond the cheapest draft when a backoff ends.
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

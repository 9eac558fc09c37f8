"""Speculative decoding: guess the next tokens, check them in one pass, keep what the model would have said anyway.

A pass over k + 1 rows costs little more than one over a single row while weights stream from memory (Leviathan, Kalman
and Matias, arXiv 2211.17192), and rows are sampled one after the other exactly as without drafts, so drafts change
speed and nothing else. Free drafts (`ngram_drafter`) and those of a small model (`draft_model`) compete each round by
the speed they promise, plain decoding among them (`draft_depth`).
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.acceptance import accept_coupled
from localinfer.device_draws import Results
from localinfer.draft_depth import MAX_DEPTH, Acceptance, VerificationCosts, best_depth
from localinfer.draft_model import DraftModel, DraftModelText
from localinfer.errors import LocalinferError
from localinfer.sampling import SamplingPlan

TokenIds = NDArray[np.int32]

_NGRAM_PRIORS = ((32, 0.97), (16, 0.9), (8, 0.75), (5, 0.55), (4, 0.4), (3, 0.35), (2, 0.27), (1, 0.14))
"""Shortest match of each kind of n-gram draft, and how likely its first token is before anything was seen: what 48 book
chapters gave."""
_MODEL_PRIOR = 0.7
_NO_TOKENS = np.empty(0, np.int32)
_NOTICEABLE = 0.005
"""Share of a plain step that drafting may take in every round; beyond it, a round that gains nothing is followed by
plain steps, twice as many each time, which do not even look."""
_LONGEST_SLEEP = 512
_PROBED_SHARE = 0.01
"""Of the time of plain steps, what probes of a draft model may take: it has to read all that it did not draft for."""
_READ_FOR_ROUNDS = 8
"""Rounds over which reading that is counted: a model that drafts once mostly drafts again."""
_CLOCK_MEMORY = 0.9


class LookupText(Protocol):
    """One text as a drafter from history follows it; `ngram_drafter.NgramText` is one."""

    @property
    def match_length(self) -> int:
        """How many tokens the last draft rests on."""
        ...

    def draft(self, tokens: TokenIds, out: TokenIds) -> int:
        """Write what may follow the text so far, int32[T], at most all of `out`; return how many tokens."""
        ...


class LookupDrafter(Protocol):
    """A drafter whose drafts cost next to nothing; `ngram_drafter.NgramDrafter` is one."""

    def begin(self, prediction: TokenIds) -> LookupText:
        """Follow another text, of which its caller expects something, or nothing."""
        ...


@dataclass
class SpeculationRecord:
    """What drafts did in one generation.

    forward_passes: those that decoded, and decoded_tokens what they gave. drafted, accepted: tokens by their place in
    the draft. seconds: of those passes with their drafting; plain_seconds: what as many plain steps would have taken.
    """

    forward_passes: int = 0
    decoded_tokens: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    seconds: float = 0.0
    plain_seconds: float = 0.0


class Others(NamedTuple):
    """What shares a pass with one generation: rows of others, drafts among them, and tokens they yield at least."""

    rows: int
    tokens: int


_ALONE = Others(0, 0)


class Speculation:
    """The drafters of one engine and what was learned about them; whoever has the engine's turn may use it."""

    def __init__(self, costs: VerificationCosts, *, ngram: LookupDrafter | None, model: DraftModel | None) -> None:
        self.costs = costs
        self.ngram = ngram
        self.model = model
        self.ngram_acceptance = [(least, Acceptance(prior)) for least, prior in _NGRAM_PRIORS]
        self.model_acceptance = Acceptance(_MODEL_PRIOR)
        self.lookup_seconds = 0.0

    def begin(self, plan: SamplingPlan, prediction: TokenIds = _NO_TOKENS) -> "SpeculativeText":
        """Follow one generation; prediction: int32[T], what its caller expects as the output."""
        return SpeculativeText(self, plan, prediction)

    def close(self) -> None:
        """Release the draft model."""
        if self.model is not None:
            self.model.close()


class SpeculativeText:
    """Drafts for one generation: `draft`, then `observe`, in turns."""

    def __init__(self, speculation: Speculation, plan: SamplingPlan, prediction: TokenIds) -> None:
        self.record = SpeculationRecord()
        self._speculation = speculation
        self._ngram: LookupText | None = None if speculation.ngram is None else speculation.ngram.begin(prediction)
        self._model: DraftModelText | None = None if speculation.model is None else speculation.model.begin(plan)
        self._buffer = np.empty(MAX_DEPTH, np.int32)
        self._acceptance: Acceptance | None = None
        self._rounds_asleep = 0
        self._probe_seconds = 0.0
        self._next_sleep = 1
        self._draft_seconds = 0.0
        self._others = _ALONE

    def is_awake(self) -> bool:
        """Ask before each pass: whether to draft for it and observe it, or to take a plain step."""
        if not self._rounds_asleep:
            return True
        self._rounds_asleep -= 1
        seconds = self._speculation.costs.seconds(1)
        self._count(1, seconds, seconds)
        return False

    def draft(self, tokens: TokenIds, most: int, others: Others | None = None) -> TokenIds:
        """Return at most `most` tokens, int32[k], likely to follow the text so far; valid until the next call.

        others: what shares the pass that is to verify them.
        """
        self._acceptance = None
        self._others = others or _ALONE
        began = time.perf_counter()
        costs = self._speculation.costs
        is_plain = costs.is_plain_due and others is None
        count = 0 if is_plain else self._choose(tokens, min(most, costs.max_depth - self._others.rows))
        self._draft_seconds = time.perf_counter() - began
        return self._buffer[:count]

    def expect_forced(self, others: Others | None = None) -> None:
        """Instead of `draft`: something else knows what follows, from which nothing is learned about drafts."""
        self._acceptance = None
        self._others = others or _ALONE
        self._draft_seconds = 0.0

    def observe(self, num_drafted: int, num_accepted: int, seconds: float) -> None:
        """Learn from the pass that verified the last draft, or had none.

        num_drafted: tokens of it that were verified; num_accepted: of those. One more token was sampled.
        seconds: of the pass and its sampling.
        """
        record = self.record
        plain_seconds = self._speculation.costs.seconds(min(self._others.rows, self._speculation.costs.max_depth) + 1)
        self._count(num_accepted + 1, seconds + self._draft_seconds, (num_accepted + 1) * plain_seconds)
        if self._acceptance is not None and num_drafted:
            for index in range(num_drafted):
                record.drafted[index] += 1
                record.accepted[index] += index < num_accepted
            self._acceptance.observe(num_drafted, num_accepted)
        if num_accepted:
            self._next_sleep = 1
        elif self._draft_seconds > _NOTICEABLE * plain_seconds:
            self._rounds_asleep = self._next_sleep
            self._next_sleep = min(2 * self._next_sleep, _LONGEST_SLEEP)

    def observe_plain(self, seconds: float) -> None:
        """Count a pass for which no draft was asked."""
        self._count(1, seconds, seconds)

    def close(self) -> None:
        """Leave what the draft model computed to its cache."""
        if self._model is not None:
            self._model.close()

    def _choose(self, tokens: TokenIds, most: int) -> int:
        """Draft by whatever promises the most speed, and return how many tokens are in the buffer."""
        shared, costs = self._speculation, self._speculation.costs
        depth, speed = 0, 1.0
        if self._ngram is not None and most > 0:
            began = time.perf_counter()
            found = self._ngram.draft(tokens, self._buffer[:most])
            if found:
                length = self._ngram.match_length
                acceptance = next(value for least, value in shared.ngram_acceptance if length >= least)
                depth, speed = best_depth(
                    acceptance.chances(),
                    costs,
                    found,
                    seconds_per_draft=shared.lookup_seconds,
                    other_rows=self._others.rows,
                    other_tokens=self._others.tokens,
                )
                self._acceptance = acceptance
            seconds = time.perf_counter() - began
            shared.lookup_seconds += (1 - _CLOCK_MEMORY) * (min(seconds, 1e-3) - shared.lookup_seconds)
        if self._model is not None and most > 0:
            model_depth = self._model_depth(tokens.size, most, depth, speed)
            if model_depth:
                self._acceptance = shared.model_acceptance
                return self._model.draft(tokens, self._buffer[:model_depth])
        if self._acceptance is None:
            return 0
        if depth:
            self._acceptance.stop_probing()
        elif self._acceptance.is_probe_due():
            depth = 1
        return depth

    def _model_depth(self, num_tokens: int, most: int, other_depth: int, other_speed: float) -> int:
        """How many tokens the draft model is to draft, 0 where another draft, or none, promises more."""
        shared, model, text = self._speculation, self._speculation.model, self._model
        assert model is not None and text is not None, "asked for only where there is one"
        acceptance = shared.model_acceptance
        reading = text.reading_seconds(num_tokens)
        self._probe_seconds += _PROBED_SHARE * shared.costs.seconds(1)
        depth, speed = best_depth(
            acceptance.chances(),
            shared.costs,
            most,
            seconds_per_token=model.seconds_per_token,
            seconds_per_draft=model.seconds_per_draft + reading / _READ_FOR_ROUNDS,
            other_rows=self._others.rows,
            other_tokens=self._others.tokens,
        )
        if speed > other_speed:
            acceptance.stop_probing()
            return depth
        probe = reading + model.seconds_per_draft + model.seconds_per_token
        if other_depth or probe > self._probe_seconds or not acceptance.is_probe_due():
            return 0
        self._probe_seconds -= probe
        return 1

    def _count(self, num_tokens: int, seconds: float, plain_seconds: float) -> None:
        record = self.record
        record.forward_passes += 1
        record.decoded_tokens += num_tokens
        record.seconds += seconds
        record.plain_seconds += plain_seconds


def choose_verified(
    choose: Callable[[NDArray[Any], SamplingPlan, int, TokenIds], int],
    results: Results,
    plan: SamplingPlan,
    position: int,
    history: TokenIds,
    drafted: Sequence[int],
    stops: Collection[int],
) -> list[int]:
    """Sample row after row while the draft was right, and write the tokens into the history from `position` on.

    Every row is sampled with the tokens before it in the history, so penalties, bias and masks are what they would be
    without a draft. Stops after a token of `stops`.

    Shapes: results float32[vocab_size] of len(drafted) + 1 rows, or the tokens that a device chose; history
    int32[>= position + len(drafted) + 1].
    """
    chosen: list[int] = []
    for index in range(len(results)):
        try:
            token_id = choose(results[index], plan, position + index, history)
        except LocalinferError:
            # The tokens before it come first; the next pass begins at this position and raises this again.
            if not chosen:
                raise
            break
        history[position + index] = token_id
        chosen.append(token_id)
        if token_id in stops or not accept_coupled(drafted, token_id, index):
            break
    return chosen

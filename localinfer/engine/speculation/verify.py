"""Speculative decoding: draft the next tokens, verify them in one pass, keep those the model would have chosen anyway.

A pass over k + 1 rows costs little more than one over a single row while weights stream from memory (Leviathan, Kalman
and Matias, arXiv 2211.17192), and rows are sampled one after the other exactly as without drafts, so drafts change
speed and nothing else. N-gram drafts (`ngram`) and those of a small model (`draft_model`), of the model's own draft
layers (`mtp`) or of a model that reads its cache (also `mtp`) compete each round by the speed they promise, plain
decoding among them, and only while they keep that promise (`costs`). A drafter that fails is switched
off, and the text continues without it.

Acceptance is by coupled noise. The sampler takes the largest of logit / temperature + Gumbel noise, and the noise is a
function of (seed, position, token), so a position has one answer whatever was drafted: a drafted token stays if it is
that answer. A draft model that draws with the same noise mostly draws the same token: two distributions p and q agree
with probability at least (1 - d) / (1 + d), d their total variation distance (Daliri, Musco and Suresh, Coupling
without Communication, arXiv 2408.07978). Rejection sampling would accept with probability 1 - d, the most that any rule
can, but the text would then depend on the drafts.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.sampling.sampler import MAX_DRAFT_TOKENS, SamplingPlan
from localinfer.engine.speculation.costs import (
    ALONE,
    Acceptance,
    DraftFloor,
    DraftMode,
    RecentMedian,
    Round,
    StepKind,
    VerificationCosts,
    best_draft_length,
)
from localinfer.types import TokenIds

if TYPE_CHECKING:
    from localinfer.engine.speculation.draft_model import DraftModel, DraftModelText
    from localinfer.engine.speculation.mtp import DraftHead, MTPDrafter, MTPText
    from localinfer.engine.speculation.ngram import NgramDrafter, NgramText

logger = logging.getLogger(__name__)


_NGRAM_PRIORS = ((32, 0.97), (16, 0.9), (8, 0.75), (5, 0.55), (4, 0.4), (3, 0.35), (2, 0.27), (1, 0.14))
"""Shortest match of each kind of n-gram draft, and how likely its first token is before anything was seen: what 48 book
chapters gave."""
_MODEL_PRIOR, _MODEL_PRIOR_WEIGHT = 0.7, 1.5
_NO_TOKENS = np.empty(0, np.int32)
_PROBED_SHARE = 0.01
"""Share of the time of plain steps for probes of a draft model, which prefills all it did not draft for."""
_READ_FOR_ROUNDS = 8
"""Rounds that share the cost of that prefill: a model that drafts once mostly drafts again."""
_KEPT_TIMES = 9
"""Times of a lookup, and of learning from a round, of which the median counts."""


@dataclass
class SpeculationRecord:
    """Results of drafting in one generation."""

    plain_steps: int = 0
    """Steps without a drafter."""
    observed_passes: int = 0
    """Other passes that decoded."""
    observed_tokens: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    """Tokens by their position in the draft; `accepted` likewise."""
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Both sums by the name of the drafter."""
    seconds: float = 0.0
    """Time of observed passes with their drafting."""
    plain_seconds: float = 0.0
    """Time that as many plain steps would have taken."""
    notices: list[str] = field(default_factory=list)
    """Why a drafter no longer drafts for this text; `engine_notices`: for any text."""
    engine_notices: list[str] = field(default_factory=list)

    def count_draft(self, drafter: str, num_drafted: int, num_accepted: int) -> None:
        """Count a draft that was verified."""
        for index in range(num_drafted):
            self.drafted[index] += 1
            self.accepted[index] += index < num_accepted
        drafted, accepted = self.by_drafter.get(drafter, (0, 0))
        self.by_drafter[drafter] = drafted + num_drafted, accepted + num_accepted

    @property
    def all_notices(self) -> list[str]:
        """Why a drafter no longer drafts, for this text or for any."""
        return self.engine_notices + self.notices

    def stats(self) -> dict[str, Any]:
        """The fields of `Stats` about drafts, except the notices."""
        if not self.forward_passes:
            return {"drafted_tokens": 0, "accepted_tokens": 0}
        longest = max((index + 1 for index, count in enumerate(self.drafted) if count), default=0)
        return {
            "drafted_tokens": sum(self.drafted),
            "accepted_tokens": sum(self.accepted),
            "drafted_by_position": tuple(self.drafted[:longest]),
            "accepted_by_position": tuple(self.accepted[:longest]),
            "drafted_by": dict(self.by_drafter),
            "tokens_per_pass": self.decoded_tokens / self.forward_passes,
            "speculation_speedup": self.speedup,
        }

    @property
    def forward_passes(self) -> int:
        """Passes of the model that decoded."""
        return self.plain_steps + self.observed_passes

    @property
    def decoded_tokens(self) -> int:
        """Tokens that those yielded."""
        return self.plain_steps + self.observed_tokens

    @property
    def speedup(self) -> float:
        """Over plain steps, as measured."""
        if self.seconds <= 0.0:
            return 1.0
        unobserved = self.plain_steps * self.plain_seconds / max(1, self.observed_tokens)
        return (self.plain_seconds + unobserved) / (self.seconds + unobserved)


class Others(NamedTuple):
    """Rows of others that share a pass, drafts among them, and the tokens that they yield at least."""

    rows: int
    tokens: int


_ALONE = Others(0, 0)


class Speculation:
    """The drafters of one engine and their statistics; used under the step lock.

    clock: seconds, for tests; nothing is learned from what is below its resolution. A drafter that fails is switched
    off for good, as its next draft may be as wrong, or as slow to fail. notices: which were, and why.
    """

    def __init__(
        self,
        costs: VerificationCosts,
        *,
        ngram: "NgramDrafter | None",
        model: "DraftModel | MTPDrafter | None",
        floor: DraftFloor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = costs
        self.floor = DraftFloor(costs) if floor is None else floor
        self.clock = clock
        self.ngram = ngram
        self.model = model
        self.ngram_acceptance = [(least, Acceptance(prior)) for least, prior in _NGRAM_PRIORS]
        self.model_acceptance = Acceptance(_MODEL_PRIOR, _MODEL_PRIOR_WEIGHT)
        self.lookup_seconds = RecentMedian(_KEPT_TIMES)
        self.learning_seconds = RecentMedian(_KEPT_TIMES)
        self.notices: list[str] = []
        self._owned_model = model

    def begin(self, plan: SamplingPlan, prediction: TokenIds = _NO_TOKENS, salt: bytes = NO_SALT) -> "SpeculativeText":
        """Follow one generation; prediction: int32[T], what its caller expects as the output. salt: of the texts that
        it may be drafted from."""
        return SpeculativeText(self, plan, prediction, salt)

    def may_draft(self, streams: int, *, is_constrained: bool) -> bool:
        """True if a step that only decodes so many streams is to be drafted for; called once before each."""
        if streams > self.costs.max_draft_tokens:
            return False
        return not self.floor.in_backoff() and not self.floor.is_plain(StepKind(streams, is_constrained))

    def observe_plain(self, streams: int, seconds: float, *, is_constrained: bool = False) -> None:
        """Learn from a step without drafts, which was to be timed."""
        self.floor.observe_plain(StepKind(streams, is_constrained), seconds)

    def observe_round(
        self,
        texts: "Sequence[SpeculativeText]",
        streams: int,
        rows: int,
        num_tokens: int,
        *,
        is_constrained: bool,
        began: float,
        drafted: float,
        ended: float,
    ) -> None:
        """Learn from a step for whose texts drafters were called. num_tokens: sampled by all streams, of which it
        computed so many rows. began, drafted, ended: times on `clock`."""
        # Learning from a round takes time, too, which small models notice.
        learning = self.learning_seconds.value or 0.0
        done = Round(
            StepKind(streams, is_constrained),
            rows,
            num_tokens,
            ended - began + learning,
            drafted - began + learning,
            sum(text.expected_seconds for text in texts) + learning,
            sum(text.reading_seconds for text in texts),
        )
        self.floor.observe_round(done)
        self.learning_seconds.add(self.clock() - ended)

    def switch_off_ngram(self, error: Exception) -> None:
        """Stop drafting from history."""
        self.ngram = None
        self._note("drafts from former text were switched off", error)

    def switch_off_model(self, error: Exception) -> None:
        """Stop drafting by the draft model, or by draft layers; its memory is released with the engine's."""
        what = (
            "the model's draft layers were"
            if self.model is not None and self.model.is_in_target
            else "the draft model was"
        )
        self.model = None
        self._note(f"{what} switched off", error)

    def close(self) -> None:
        """Release the draft model."""
        if self._owned_model is not None:
            self._owned_model.close()

    def _note(self, what: str, error: Exception) -> None:
        notice = f"{what}, and the text continues without its drafts: {str(error) or type(error).__name__}"
        self.notices.append(notice)
        logger.warning(notice)


class SpeculativeText:
    """Drafts for one generation: `draft`, then `observe`, alternately.

    expected_seconds: what drafting as it was done last usually takes; reading_seconds: of prefill before it.
    """

    def __init__(self, speculation: Speculation, plan: SamplingPlan, prediction: TokenIds, salt: bytes) -> None:
        self.record = SpeculationRecord(engine_notices=speculation.notices)
        self.clock = speculation.clock
        self.expected_seconds = self.reading_seconds = self.drafting_seconds = 0.0
        self._speculation = speculation
        self._floor = speculation.floor
        self._ngram: NgramText | None = None
        self._model: DraftModelText | MTPText | None = None
        self._sequence: SequenceCache | None = None
        if speculation.ngram is not None:
            try:
                self._ngram = speculation.ngram.begin(prediction, salt)
            except Exception as error:
                speculation.switch_off_ngram(error)
        if speculation.model is not None:
            try:
                self._model = speculation.model.begin(plan, salt)
            except Exception as error:
                speculation.switch_off_model(error)
        self._is_expected = prediction.size > 0
        self._buffer = np.empty(MAX_DRAFT_TOKENS, np.int32)
        self._acceptance: Acceptance | None = None
        self._drafter_name = ""
        self._head: DraftHead | None = None
        self._has_read = False
        self._vocab_size = plan.vocab_size
        self._probe_seconds = 0.0
        self._others = _ALONE

    def admit(self) -> None:
        """Note that the engine begins with this text."""
        self._floor.begin(is_expected=self._is_expected)

    def in_backoff(self) -> bool:
        """Ask before a step of this text alone, and before `takes_plain_step`: see `DraftFloor.in_backoff`."""
        if not self._floor.in_backoff():
            return False
        self.record.plain_steps += 1
        return True

    def takes_plain_step(self) -> bool:
        """Ask before a step of this text alone: whether to take it without drafts; see `DraftFloor.is_timed`."""
        if not self._floor.is_plain(ALONE) and (self._ngram is not None or self._model is not None):
            return False
        self.record.plain_steps += 1
        return True

    def draft(
        self,
        tokens: TokenIds,
        most: int,
        others: tuple[int, int] | None = None,
        sequence: SequenceCache | None = None,
    ) -> TokenIds:
        """Return at most `most` tokens, int32[k], likely to follow the text so far; valid until the next call.

        others: of those that share the pass, their rows and tokens (`Others`). sequence: the text's, for a model's own
        draft layers. Whatever goes wrong, there is just no draft.
        """
        self.expect_forced(others)
        self._sequence, self._head = sequence, None
        began = self.clock()
        count = self._choose(tokens, min(most, self._speculation.costs.max_draft_tokens - self._others.rows))
        self.drafting_seconds = self.clock() - began
        if not self._has_read:
            self._has_read, self.reading_seconds = True, self.drafting_seconds
        return self._buffer[:count]

    def expect_forced(self, others: tuple[int, int] | None = None) -> None:
        """Instead of `draft`: a grammar forces what follows, from which nothing is learned about drafts."""
        self._acceptance = None
        self._others = _ALONE if others is None else Others(*others)
        self.drafting_seconds = self.expected_seconds = self.reading_seconds = 0.0

    def observe(self, num_drafted: int, num_accepted: int, seconds: float, last_token: int = -1) -> None:
        """Learn from the pass that verified the last draft, or had none.

        num_drafted: tokens of it that were verified; num_accepted: of those. last_token: the one more that was sampled.
        seconds: of the pass and its sampling.
        """
        costs = self._speculation.costs
        plain_seconds = costs.seconds(min(self._others.rows, costs.max_draft_tokens) + 1)
        self._count(num_accepted + 1, seconds + self.drafting_seconds, (num_accepted + 1) * plain_seconds)
        if self._acceptance is not None and num_drafted:
            self.record.count_draft(self._drafter_name, num_drafted, num_accepted)
            if self._head is None or last_token < self._head.num_tokens:
                self._acceptance.observe(num_drafted, num_accepted)
            elif num_accepted:
                # That a short head lacks a token says nothing about the others.
                self._acceptance.observe(num_accepted, num_accepted)

    def observe_plain(self, seconds: float) -> None:
        """Count a pass for which no drafter was called."""
        self._count(1, seconds, seconds)

    def close(self) -> None:
        """Leave what the draft model computed to its cache."""
        if self._model is None or self._speculation.model is None:
            return
        try:
            self._model.close()
        except Exception as error:
            self._speculation.switch_off_model(error)

    def _choose(self, tokens: TokenIds, most: int) -> int:
        """Draft by what promises the most speed, and return how many tokens are in the buffer."""
        others = self._others
        most = self._floor.affordable_draft_length(others.tokens + 1, others.rows + 1, most)
        if most <= 0:
            return 0
        length, speed = self._look_up(tokens, most)
        count = self._draft_by_model(tokens, most, length, speed)
        if count:
            return count
        if self._acceptance is None:
            return 0
        if length:
            self._acceptance.stop_probing()
        elif self._acceptance.is_probe_due():
            length = 1
        return length

    def _look_up(self, tokens: TokenIds, most: int) -> tuple[int, float]:
        """Draft from history into the buffer; return the best length of that, and the speed it promises."""
        shared, text = self._speculation, self._ngram
        if text is None or shared.ngram is None:
            return 0, 1.0
        began = shared.clock()
        try:
            found = self._checked(text.draft(tokens, self._buffer[:most]), most)
            match_length = text.match_length if found else 0
        except Exception as error:
            shared.switch_off_ngram(error)
            return 0, 1.0
        length, speed = 0, 1.0
        if found:
            acceptance = next(value for least, value in shared.ngram_acceptance if match_length >= least or least == 1)
            seconds = (shared.lookup_seconds.value or 0.0) + (shared.learning_seconds.value or 0.0)
            length, speed = best_draft_length(
                acceptance.probabilities(), shared.costs, found, *self._others, seconds_per_draft=seconds
            )
            self._acceptance, self._drafter_name = acceptance, "ngram"
        if self._has_read:
            shared.lookup_seconds.add(shared.clock() - began)
        self.expected_seconds = shared.lookup_seconds.value or 0.0
        return length, speed

    def _draft_by_model(self, tokens: TokenIds, most: int, other_length: int, other_speed: float) -> int:
        """Draft by the draft model if it promises more; return how many tokens are in the buffer, 0 for none."""
        text, model = self._model, self._speculation.model
        if text is None or model is None:
            return 0
        length, way = self._model_draft_length(text, model, tokens, most, other_length, other_speed)
        if not length:
            return 0
        kept = self._buffer[:other_length].copy()
        count = 0
        try:
            count = self._checked(text.draft(tokens, self._buffer[:length], self._sequence, way.head), length)
            self.reading_seconds += text.reading_taken
            self.expected_seconds += model.seconds_per_draft + length * way.seconds_per_token
        except Exception as error:
            self._speculation.switch_off_model(error)
        if text.ending is not None:
            self.record.notices.append(text.ending)
            self._model = None
        if count:
            self._acceptance, self._drafter_name = self._speculation.model_acceptance, model.name
            self._head = way.head
        else:
            self._buffer[:other_length] = kept
        return count

    def _checked(self, count: int, most: int) -> int:
        """The length of a draft, proven to be tokens, for kernels check nothing."""
        drafted = self._buffer[:count].tolist() if 0 <= count <= most else [-1]
        if drafted and not 0 <= min(drafted) <= max(drafted) < self._vocab_size:
            raise ValueError("it drafted what is no token of the vocabulary")
        return count

    def _model_draft_length(
        self,
        text: "DraftModelText | MTPText",
        model: "DraftModel | MTPDrafter",
        tokens: TokenIds,
        most: int,
        other_length: int,
        other_speed: float,
    ) -> tuple[int, DraftMode]:
        """Number of tokens for the draft model, 0 where another draft, or none, promises more; and its mode."""
        shared, others, per_draft = self._speculation, self._others, model.seconds_per_draft
        acceptance = shared.model_acceptance
        most = min(most, acceptance.reach)
        reading = text.reading_seconds(tokens.size)
        self._probe_seconds += _PROBED_SHARE * shared.costs.seconds(1)
        best, best_speed, cheapest = 0, other_speed, math.inf
        chosen = probed = DraftMode(0.0, 0.0)
        for way in model.modes(tokens):
            affordable = self._floor.affordable_draft_length(
                others.tokens + 1,
                others.rows + 1,
                most,
                seconds_per_token=way.seconds_per_token,
                seconds_per_draft=per_draft,
            )
            if not affordable:
                continue
            length, speed = best_draft_length(
                [way.share * probability for probability in acceptance.probabilities()],
                shared.costs,
                affordable,
                *others,
                seconds_per_token=way.seconds_per_token,
                seconds_per_draft=per_draft + reading / _READ_FOR_ROUNDS,
            )
            if speed > best_speed:
                best, best_speed, chosen = length, speed, way
            if way.seconds_per_token < way.share * cheapest:
                cheapest, probed = way.seconds_per_token / way.share, way
        if best:
            acceptance.stop_probing()
            return best, chosen
        probe = reading + per_draft + probed.seconds_per_token
        can_probe = probed.share and not other_length and probe <= self._probe_seconds
        if not can_probe or not acceptance.is_probe_due():
            return 0, chosen
        self._probe_seconds -= probe
        return 1, probed

    def _count(self, num_tokens: int, seconds: float, plain_seconds: float) -> None:
        record = self.record
        record.observed_passes += 1
        record.observed_tokens += num_tokens
        record.seconds += seconds
        record.plain_seconds += plain_seconds

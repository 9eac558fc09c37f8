"""Speculative decoding: guess the next tokens, check them in one pass, keep what the model would have said anyway.

A pass over k + 1 rows costs little more than one over a single row while weights stream from memory (Leviathan, Kalman
and Matias, arXiv 2211.17192), and rows are sampled one after the other exactly as without drafts, so drafts change
speed and nothing else. Free drafts (`ngram_drafter`) and those of a small model (`draft_model`) compete each round by
the speed they promise, plain decoding among them (`draft_depth`).
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localinfer.acceptance import accept_coupled
from localinfer.draft_depth import MAX_DEPTH, Acceptance, VerificationCosts, best_depth
from localinfer.draft_model import DraftModel, DraftModelText
from localinfer.ngram_drafter import NgramDrafter, NgramText
from localinfer.sampling import SamplingPlan

TokenIds = NDArray[np.int32]

_NGRAM_PRIORS = ((64, 0.97), (32, 0.95), (16, 0.9), (8, 0.8), (5, 0.6), (4, 0.5), (3, 0.4), (2, 0.3), (1, 0.15))
"""Shortest match of each kind of n-gram draft, and how likely its first token is before anything was seen."""
_MODEL_PRIOR = 0.7
_NO_TOKENS = np.empty(0, np.int32)
_NOTICEABLE = 0.005
"""Share of a plain step that looking for drafts may take in every round; beyond it, rounds without a draft are spent
asleep."""
_LONGEST_SLEEP = 512
_CLOCK_MEMORY = 0.9


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


class Speculation:
    """The drafters of one engine and what was learned about them; whoever holds the engine's lock may use it."""

    def __init__(
        self, costs: VerificationCosts, *, ngram: NgramDrafter | None, model: DraftModel | None, max_depth: int
    ) -> None:
        """max_depth: most tokens to draft at once, such as a program has output rows for."""
        self.costs = costs
        self.ngram = ngram
        self.model = model
        self.max_depth = min(max_depth, MAX_DEPTH)
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
        self._ngram: NgramText | None = None if speculation.ngram is None else speculation.ngram.begin(prediction)
        self._model: DraftModelText | None = None if speculation.model is None else speculation.model.begin(plan)
        self._buffer = np.empty(MAX_DEPTH, np.int32)
        self._num_drafted = 0
        self._acceptance: Acceptance | None = None
        self._rounds_asleep = 0
        self._next_sleep = 1
        self._draft_seconds = 0.0

    def draft(self, tokens: TokenIds, most: int) -> TokenIds:
        """Return at most `most` tokens, int32[k], likely to follow the text so far; valid until the next call."""
        self._num_drafted = 0
        self._acceptance = None
        self._draft_seconds = 0.0
        if self._rounds_asleep:
            self._rounds_asleep -= 1
            return _NO_TOKENS
        began = time.perf_counter()
        self._num_drafted = self._choose(tokens, min(most, self._speculation.max_depth))
        self._draft_seconds = time.perf_counter() - began
        if self._num_drafted == 0:
            self._sleep_if_costly()
        return self._buffer[: self._num_drafted]

    def observe(self, num_accepted: int, seconds: float) -> None:
        """Learn from the pass that verified the last draft, or had none.

        num_accepted: of the drafted tokens; one more token was sampled. seconds: of the pass and its sampling.
        """
        record, costs, drafted = self.record, self._speculation.costs, self._num_drafted
        record.forward_passes += 1
        record.decoded_tokens += num_accepted + 1
        record.seconds += seconds + self._draft_seconds
        record.plain_seconds += (num_accepted + 1) * costs.seconds(1)
        if self._rounds_asleep == 0 or drafted:
            costs.observe(drafted + 1, seconds)
        if self._acceptance is None:
            return
        for index in range(drafted):
            record.drafted[index] += 1
            record.accepted[index] += index < num_accepted
        self._acceptance.observe(drafted, num_accepted)
        if num_accepted:
            self._next_sleep = 1

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
                depth, speed = best_depth(acceptance.chances(), costs, found, seconds_per_draft=shared.lookup_seconds)
                self._acceptance = acceptance
            seconds = time.perf_counter() - began
            shared.lookup_seconds += (1 - _CLOCK_MEMORY) * (min(seconds, 1e-3) - shared.lookup_seconds)
        if self._model is not None and shared.model is not None and most > 0:
            acceptance = shared.model_acceptance
            model_depth, model_speed = best_depth(
                acceptance.chances(), costs, most, seconds_per_token=shared.model.seconds_per_token
            )
            if model_speed > speed or (not max(depth, model_depth) and acceptance.is_probe_due()):
                self._acceptance = acceptance
                return self._model.draft(tokens, self._buffer[: max(model_depth, 1)])
        if depth == 0 and self._acceptance is not None and self._acceptance.is_probe_due():
            depth = 1
        return depth

    def _sleep_if_costly(self) -> None:
        if self._draft_seconds > _NOTICEABLE * self._speculation.costs.seconds(1):
            self._rounds_asleep = self._next_sleep
            self._next_sleep = min(2 * self._next_sleep, _LONGEST_SLEEP)


def choose_verified(
    choose: Callable[[NDArray[np.float32], SamplingPlan, int, TokenIds], int],
    logits: NDArray[np.float32],
    plan: SamplingPlan,
    position: int,
    history: TokenIds,
    drafted: Sequence[int],
    stops: Collection[int],
) -> list[int]:
    """Sample row after row while the draft was right, and write the tokens into the history from `position` on.

    Every row is sampled with the tokens before it in the history, so penalties, bias and masks are what they would be
    without a draft. Stops after a token of `stops`.

    Shapes: logits float32[len(drafted) + 1, vocab_size]; history int32[>= position + len(drafted) + 1].
    """
    chosen: list[int] = []
    for index in range(len(logits)):
        token_id = choose(logits[index], plan, position + index, history)
        history[position + index] = token_id
        chosen.append(token_id)
        if token_id in stops or not accept_coupled(drafted, token_id, index):
            break
    return chosen

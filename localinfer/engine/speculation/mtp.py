"""Drafts from hidden states: by a model's own layers for next-token prediction (MTP), or by an assistant model.

Each step of the model leaves the hidden states of its last position with the sequence; from those and the token sampled
there the layers draft one token after another. A draft takes the whole output head, or its first rows only, which is
faster and never drafts a token beyond them: whichever promises more, by how many of the text's last tokens are among
them. The layers' keys and values lie in the sequence's own pages, where the model's passes write them too, so cached
prefixes, edits and restarts need no prefill. Sampling takes the noise of the model, so where the two distributions are
alike the tokens mostly are too. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.

An assistant (such as Gemma 4's, `models.load.assistant`) attends to its target's keys and values and keeps none: every
token of a draft is asked for at the first position that the target has not computed, from the token before it and the
state that came with that.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.sampling.sampler import MAX_DRAFT_TOKENS, Sampler, SamplingPlan
from localinfer.engine.speculation.costs import DraftMode
from localinfer.errors import ContextLengthError, OutOfMemoryError
from localinfer.kernels.program import Batch, HiddenProgram

if TYPE_CHECKING:
    from localinfer.models.load.loader import Model


_CLOCK_MEMORY = 0.9
_MEASURED_TOKENS = 4
_RECENT_TOKENS = 256
_EXPECTED_SHARE, _EXPECTED_TOKENS = 0.85, 16
"""Share of a text that is expected to be among a short head's tokens, and tokens that the expectation counts as."""
_FIRST_ROW = np.zeros(1, np.int32)


class DraftHead:
    """The draft layers with one output head, of the first `num_tokens` of the vocabulary.

    seconds_per_token: what drafting a token takes, measured first, then followed.
    """

    def __init__(self, programs: tuple[HiddenProgram, ...], vocab_size: int) -> None:
        self.programs = programs
        self.num_tokens = vocab_size
        self.seconds_per_token = 0.0
        self._logits = np.full(vocab_size, -np.inf, np.float32)

    def run(self, layer: int, batch: Batch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Run one row: logits float32[vocab_size], -inf beyond the head, and hidden states."""
        program = self.programs[min(layer, len(self.programs) - 1)]
        logits = program.run(batch)[0]
        assert program.hidden is not None, "draft layers show what they draft from"
        self.num_tokens = logits.size
        if logits.size == self._logits.size:
            return logits, program.hidden[0]
        self._logits[: logits.size] = logits
        return self._logits, program.hidden[0]

    def share_of(self, tokens: NDArray[np.int32]) -> float:
        """Probability that a text's next token is among those of the head."""
        if self.num_tokens == self._logits.size:
            return 1.0
        recent = tokens[-_RECENT_TOKENS:]
        found = int(np.count_nonzero((recent >= 0) & (recent < self.num_tokens))) + _EXPECTED_SHARE * _EXPECTED_TOKENS
        return found / (recent.size + _EXPECTED_TOKENS)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Follow what drafting so many tokens took."""
        expected = num_tokens * self.seconds_per_token
        self.seconds_per_token += (1 - _CLOCK_MEMORY) * (min(seconds, 2 * expected) - expected) / num_tokens


class MTPDrafter:
    """The draft layers of a model; one thread at a time, between the model's own steps.

    heads: the ways to draft. seconds_per_draft: what a draft takes beside its tokens, nothing.
    """

    name = "mtp"
    is_in_target = True
    """It drafts from the cache of its target."""

    def __init__(self, model: "Model") -> None:
        self.vocab_size = model.config.vocab_size
        self.heads = tuple(DraftHead(programs, self.vocab_size) for programs in model.draft_programs)
        self.sampler = Sampler(self.vocab_size)
        self.seconds_per_draft = 0.0
        self._measure(PagePool(model.kv_layout))

    def begin(self, plan: SamplingPlan, salt: bytes = NO_SALT) -> "MTPText":
        """Follow one generation that is sampled by a plan, from what it computed itself: its salt does not matter."""
        return MTPText(self, plan)

    def modes(self, tokens: NDArray[np.int32]) -> Iterator[DraftMode]:
        """A mode for each head."""
        for head in self.heads:
            yield DraftMode(head.share_of(tokens), head.seconds_per_token, head)

    def draft_token(
        self, sequence: SequenceCache, index: int, token_id: int, hidden: NDArray[np.float32] | None, head: DraftHead
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Run one row: a token `index` positions after the sequence's last, and the hidden states before it.

        hidden: float32[hidden_size], in memory of whole vectors; None for those that the sequence carries.
        Returns: logits float32[vocab_size] of the token after it, -inf for those that the head lacks, and its hidden
        states, valid until the next call.
        """
        segment = sequence.draft_segment(index, hidden)
        return head.run(index, Batch(np.array([token_id], np.int32), [segment], _FIRST_ROW))

    def close(self) -> None:
        """Nothing of its own: programs and pages are the model's."""

    def _measure(self, pool: PagePool) -> None:
        sequence = SequenceCache(pool, max_length=_MEASURED_TOKENS)
        sequence.reserve_pages(_MEASURED_TOKENS)
        for head in self.heads:
            seconds = []
            for index in range(_MEASURED_TOKENS):
                began = time.perf_counter()
                self.draft_token(sequence, index, 0, None, head)
                seconds.append(time.perf_counter() - began)
            head.seconds_per_token = min(seconds)
        sequence.close()
        pool.close()


class MTPText:
    """One generation as draft layers follow it; made by `MTPDrafter.begin`.

    reading_taken, ending: as of a draft model, which has to read a text first, and may come to an end of its own.
    """

    reading_taken = 0.0
    ending: str | None = None

    def __init__(self, drafter: MTPDrafter, plan: SamplingPlan) -> None:
        self._drafter = drafter
        self._plan = SamplingPlan(replace(plan.params, logprobs=None, seed=plan.seed), drafter.vocab_size)
        self._tokens = np.empty(0, np.int32)
        self._num_tokens = 0
        programs = drafter.heads[0].programs
        width = max(program.hidden.shape[1] for program in programs if program.hidden is not None)
        self._hidden = np.zeros(-(-width // 16) * 16, np.float32)

    def draft(
        self,
        tokens: NDArray[np.int32],
        out: NDArray[np.int32],
        sequence: SequenceCache | None,
        head: DraftHead | None,
    ) -> int:
        """Draft what follows the whole text so far, int32[T], all of which but its last token the sequence holds.

        Writes at most all of `out`, int32[K], by one of the drafter's heads; returns how many.
        """
        drafter, position = self._drafter, tokens.size
        count = min(out.size, MAX_DRAFT_TOKENS)
        if sequence is None or head is None or sequence.length != position - 1 or not sequence.is_exact:
            return 0
        try:
            sequence.reserve_pages(sequence.length + count)
        except (ContextLengthError, OutOfMemoryError):
            return 0
        began, history, token_id = time.perf_counter(), self._with_room(tokens, count), int(tokens[-1])
        hidden: NDArray[np.float32] | None = None
        for index in range(count):
            logits, shown = drafter.draft_token(sequence, index, token_id, hidden, head)
            token_id = drafter.sampler.choose(logits, self._plan, position + index, history)
            out[index] = history[position + index] = token_id
            hidden = self._hidden
            hidden[: shown.size] = shown
        if count:
            head.observe(count, time.perf_counter() - began)
        return count

    def reading_seconds(self, num_tokens: int) -> float:
        """Nothing has to be read before drafting."""
        return 0.0

    def close(self) -> None:
        """Nothing of it outlasts the sequence."""

    def _with_room(self, tokens: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        """The text, int32[T + count or more], to write drafts behind; only what is new is copied."""
        if self._tokens.size < tokens.size + count:
            self._tokens = np.empty(2 * (tokens.size + count), np.int32)
            self._num_tokens = 0
        self._tokens[self._num_tokens : tokens.size] = tokens[self._num_tokens :]
        self._num_tokens = tokens.size
        return self._tokens


class AssistantDrafter(MTPDrafter):
    """A draft model over its target's cache; one thread at a time, between the target's own steps."""

    name = "assistant"

    def draft_token(
        self, sequence: SequenceCache, index: int, token_id: int, hidden: NDArray[np.float32] | None, head: DraftHead
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Run one row at the first position that the target has not computed, which is never 0."""
        return super().draft_token(sequence, 0 if sequence.length else 1, token_id, hidden, head)

"""Drafts of a small model of the same vocabulary, with a prefix cache of its own.

It samples with the noise of the target model, so where the two distributions are alike the tokens mostly are too.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.engine.sampling.sampler import OnDeviceSampling, OutputSpec, Results, Sampler, SamplingPlan
from localinfer.engine.speculation.costs import DraftMode
from localinfer.errors import OutOfMemoryError
from localinfer.types import UnitsCallback

if TYPE_CHECKING:
    from localinfer.models.load.loader import Model

_CLOCK_MEMORY = 0.9
_USUAL_PENDING = 2
"""Tokens to compute before drafting where nothing was rejected: the last one drafted, and the one sampled after it."""
_LONGEST_ROUND = 16
"""Tokens that may have come with the last pass, whose prefill is no extra cost."""
_FIRST_ROW = np.zeros(1, np.int32)
_NO_ROWS = np.zeros(0, np.int32)


class DraftModel:
    """A model that drafts for another one; one thread at a time.

    seconds_per_token, seconds_per_draft: what drafting a token takes, and the overhead of a draft; seconds_per_read:
    prefill of one token of the text, many at once. Measured first, then followed.
    """

    name = "draft"
    is_in_target = False

    def __init__(
        self, model: "Model", *, target_vocab_size: int, kv_memory: int | None = None, told: UnitsCallback | None = None
    ) -> None:
        """Take a loaded model; told: called before each pass that is measured."""
        self._model = model
        self.program = model.program
        self._device_sampling = OnDeviceSampling(model.program)
        self.vocab_size = model.config.vocab_size
        self.shared_vocab_size = min(self.vocab_size, target_vocab_size)
        self.context_length = model.config.context_length
        self.cache = PrefixCache.for_model(model, kv_memory)
        self.sampler = Sampler(self.vocab_size)
        self.seconds_per_token = self._measure(told)
        self.seconds_per_draft = 0.0
        self.seconds_per_read = self.seconds_per_token / 4

    def begin(self, plan: SamplingPlan, salt: bytes = NO_SALT) -> "DraftModelText":
        """Follow one generation that is sampled by a plan; salt: of the texts that it shares a prefix with."""
        return DraftModelText(self, plan, salt)

    def modes(self, _: object) -> Iterator[DraftMode]:
        """Its only one."""
        yield DraftMode(1.0, self.seconds_per_token)

    def forward(
        self,
        sequence: SequenceCache,
        token_ids: NDArray[np.int32],
        output_rows: NDArray[np.int32],
        outputs: Sequence[OutputSpec] = (),
    ) -> Results:
        """Compute the next positions of a sequence; see `OnDeviceSampling.run_for`."""
        return forward(self._device_sampling.run_for(outputs), (sequence,), (token_ids,), output_rows)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Follow what drafting so many tokens took; the more there were, the more it says about one."""
        expected = self.seconds_per_draft + num_tokens * self.seconds_per_token
        surprise = (1 - _CLOCK_MEMORY) * (min(seconds, 2 * expected) - expected)
        share = num_tokens / (num_tokens + 1)
        self.seconds_per_token += surprise * share / num_tokens
        self.seconds_per_draft = max(0.0, self.seconds_per_draft + surprise * (1 - share))

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """Follow what the prefill of so many tokens took."""
        self.seconds_per_read += 0.5 * (seconds / num_tokens - self.seconds_per_read)

    def close(self) -> None:
        """Release the model and its pages; may be called again."""
        self.cache.close()
        self._model.close()

    def _measure(self, told: UnitsCallback | None) -> float:
        sequence = self.cache.open()
        seconds: list[float] = []
        num_passes = min(4, self.context_length)
        while len(seconds) < num_passes:
            if told is not None:
                told(len(seconds), num_passes)
            began = time.perf_counter()
            self.forward(sequence, np.zeros(1, np.int32), _FIRST_ROW)
            seconds.append(time.perf_counter() - began)
        sequence.close()
        return min(seconds)


class DraftModelText:
    """One generation as the draft model follows it; made by `DraftModel.begin`.

    reading_taken: seconds of the last draft that were prefill. ending: why there will be no more drafts of this text,
    in words; None while there may be.
    """

    def __init__(self, model: DraftModel, plan: SamplingPlan, salt: bytes) -> None:
        self._model = model
        self._hints = CacheHints(salt=salt)
        bias = {token_id: value for token_id, value in plan.params.logit_bias.items() if token_id < model.vocab_size}
        params = replace(plan.params, logit_bias=bias, logprobs=None, seed=plan.seed)
        self._plan = SamplingPlan(params, model.vocab_size)
        self._sequence: SequenceCache | None = None
        self._tokens = np.empty(0, np.int32)
        self._num_tokens = 0
        self.reading_taken = 0.0
        self.ending: str | None = None

    def draft(self, tokens: NDArray[np.int32], out: NDArray[np.int32], *_: object) -> int:
        """Draft what follows the whole text so far, int32[T], which begins like the text of the call before.

        Writes at most all of `out`, int32[K]; returns how many: none any more where the text outgrows what the model
        can hold, or has tokens outside its vocabulary.
        """
        model = self._model
        self.reading_taken = 0.0
        count = min(out.size, model.context_length - tokens.size)
        if count <= 0:
            return self._end(f"the draft model's context of {model.context_length} tokens is full")
        if int(tokens[self._num_tokens :].min(initial=0)) < 0:
            return self._end("the text has pictures or sounds, which the draft model does not see")
        if int(tokens[self._num_tokens :].max(initial=0)) >= model.vocab_size:
            return self._end("the text has tokens that the draft model does not know")
        began = time.perf_counter()
        try:
            sequence, num_read = self._catch_up(tokens, count)
            drafted = self._extend(sequence, tokens[sequence.length :], tokens.size, out[:count])
        except OutOfMemoryError:
            return self._end("kv_memory holds no more of this text for the draft model")
        seconds = time.perf_counter() - began
        if num_read > _USUAL_PENDING:
            self.reading_taken = max(0.0, seconds - drafted * model.seconds_per_token)
            model.observe_reading(num_read, self.reading_taken)
        elif drafted:
            model.observe(drafted, seconds)
        return drafted

    def reading_seconds(self, num_tokens: int) -> float:
        """Seconds of prefill before drafting, for a text of so many tokens: of those since the last draft."""
        unread = num_tokens - self._num_tokens
        return self._model.seconds_per_read * unread if unread > _LONGEST_ROUND else 0.0

    def close(self) -> None:
        """Leave what was computed to the cache; may be called again."""
        if self._sequence is not None:
            self._model.cache.retire(self._sequence, self._tokens[: self._sequence.length], self._hints)
            self._sequence = None
            self._num_tokens = 0

    def _end(self, why: str) -> int:
        self.ending = f"{why}, so that the text continues without its drafts"
        self.close()
        return 0

    def _catch_up(self, tokens: NDArray[np.int32], count: int) -> tuple[SequenceCache, int]:
        """Roll back rejected drafts, and compute the text but its last chunk; return how much was not computed yet.

        A model with recurrent layers goes back to before its draft, and repeats what was accepted of it.
        """
        model = self._model
        num_repeated = 0
        if self._sequence is None:
            self._sequence = model.cache.admit(tokens, self._hints).sequence
        elif self._sequence.length > self._num_tokens:
            drafted = self._tokens[self._num_tokens : self._sequence.length]
            following = tokens[self._num_tokens : tokens.size - 1][: drafted.size]
            wrong = np.flatnonzero(drafted[: following.size] != following)
            agreed = self._num_tokens + int(wrong[0] if wrong.size else following.size)
            num_repeated = agreed - self._sequence.truncate(agreed)
        sequence = self._sequence
        if self._tokens.size < tokens.size + count:
            longer = np.empty(2 * (tokens.size + count), np.int32)
            longer[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = longer
        self._tokens[self._num_tokens : tokens.size] = tokens[self._num_tokens :]
        self._num_tokens = tokens.size
        num_unread = tokens.size - sequence.length - num_repeated
        chunk = model.program.max_batch_rows
        while tokens.size - sequence.length > chunk:
            model.forward(sequence, tokens[sequence.length : sequence.length + chunk], _NO_ROWS)
        return sequence, num_unread

    def _extend(
        self, sequence: SequenceCache, pending: NDArray[np.int32], position: int, out: NDArray[np.int32]
    ) -> int:
        """Sample token after token; the last one is not computed."""
        model, tokens = self._model, self._tokens
        rows = np.array([pending.size - 1], np.int32)
        for index in range(out.size):
            results = model.forward(sequence, pending, rows, ((self._plan, position + index),))
            if index == 0:
                sequence.keep_state()
            token_id = model.sampler.choose(results[0], self._plan, position + index, tokens)
            if token_id >= model.shared_vocab_size:
                return index
            out[index] = tokens[position + index] = token_id
            pending, rows = tokens[position + index : position + index + 1], _FIRST_ROW
        return out.size

"""The choice of the next token: the sampler, and the state that it keeps of one generation.

Order: mask, logit bias, penalties, DRY, top-n-sigma, temperature, top-k, typical-p, top-p, min-p, XTC (or mirostat in
place of the last five), dynamic temperature, then one draw with Gumbel noise. The noise of a candidate is a function of
(seed, position, token) alone, so a seed gives the same text whatever else was in the batch or the cache.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.sampling.filters import (
    Mirostat,
    dynamic_temperature,
    keep_candidates,
    penalise_repetitions,
    scaled,
    surprise_bits,
    token_logprobs,
)
from localinfer.engine.sampling.params import SamplingParams
from localinfer.errors import LocalinferError, ModelFileError, RequestError
from localinfer.kernels.cpu.kernel_abi import NOT_FINITE, NOTHING_LEFT
from localinfer.kernels.cpu.sampling import RowSampler, adjust, uniforms
from localinfer.kernels.program import UNDECIDED, Batch, Draw, DrawingProgram, Program
from localinfer.types import TokenIds, TokenLogprobs

__all__ = ["Sampler", "SamplingParams", "SamplingPlan", "TokenLogprobs", "TokenMask", "not_finite_error"]

TokenMask = Callable[[NDArray[np.int32]], NDArray[np.bool_]]
"""Given the ids so far, which tokens may come next: bool[vocab_size]. Asked once per sampled position, in order."""

MAX_DRAFT_TOKENS = 15
"""Most tokens drafted at once: 16 rows are verified."""
_FORBIDDEN = np.float32(-np.inf)
_XTC_TOKEN = np.array([2**31 - 1], np.int32)
"""Stands for no token, so that what it is given at a position is for XTC's decision."""


class SamplingPlan:
    """SamplingParams prepared for one generation: the seed drawn, the bias as arrays, a mask, and state by position.

    logprobs: what was asked for, by position, until its reader takes it out; any thread may. is_drawable: nothing but
    a token is wanted of a row, by steps that devices implement. takes_largest: and that is the largest logit's.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, mask: TokenMask | None = None) -> None:
        for token_id in params.logit_bias:
            if token_id >= vocab_size:
                raise RequestError(
                    f"logit_bias names token {token_id}, but the vocabulary ends at {vocab_size - 1}; remove it",
                    field="logit_bias",
                )
        self.params = params
        self.vocab_size = vocab_size
        self.mask = mask
        self.seed = secrets.randbits(32) if params.seed is None else int(params.seed)
        self.temperature = float(params.temperature)
        self.top_k = min(int(params.top_k), vocab_size)
        self.top_p = float(params.top_p)
        self.min_p = float(params.min_p)
        self.noise_key = np.uint64(self.seed)
        self.bias_ids = np.array(list(params.logit_bias), np.int32)
        self.bias_values = np.array(list(params.logit_bias.values()), np.float64)
        self.adjusts = bool(params.logit_bias) or params.has_penalties or params.has_dry_penalty
        self.is_rare = params.has_rare_steps and self.temperature > 0.0
        self.mirostat = Mirostat(float(params.mirostat_tau), float(params.mirostat_eta)) if params.mirostat else None
        self.logprobs: dict[int, TokenLogprobs] = {}
        is_plain = mask is None and not self.adjusts and params.logprobs is None
        self.is_drawable = is_plain and not self.is_rare
        self.takes_largest = is_plain and self.temperature == 0.0


OutputSpec = tuple[SamplingPlan, int]
"""Plan and position of an output row's token."""

Results = NDArray[Any] | list[NDArray[Any]]
"""Result of each output row: float32[vocab_size], or a single int32, the token that a device chose."""


class OnDeviceSampling:
    """Runs a program for what `Sampler.choose` is given of each output row: its token if the device can choose it, or
    its logits."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._device = program if isinstance(program, DrawingProgram) else None

    def run_for(self, outputs: Sequence[OutputSpec]) -> Callable[[Batch], Results]:
        """Function that runs a batch with these output rows; its results are valid until the next run."""
        device = self._device
        if device is None or not outputs or not all(plan.is_drawable for plan, _ in outputs):
            return self._program.run
        if all(plan.takes_largest for plan, _ in outputs):
            return device.run_greedy
        draws = [
            Draw(plan.temperature, plan.top_k, plan.top_p, plan.min_p, plan.seed, position)
            for plan, position in outputs
        ]
        return partial(self._draw, device, draws)

    def _draw(self, device: DrawingProgram, draws: Sequence[Draw], batch: Batch) -> Results:
        tokens = device.run_drawn(batch, draws)
        if not (tokens == UNDECIDED).any():
            return tokens
        return [device.logits_of(row) if token == UNDECIDED else token for row, token in enumerate(tokens)]


def not_finite_error(position: int) -> ModelFileError:
    """The error for logits with a NaN or an infinity in them."""
    return ModelFileError(
        f"the model computed logits that are not finite for position {position}: its weights are damaged, or too large "
        "for the type of its key-value cache; try kv_type='f32', or download the file again"
    )


def _no_token_error(code: int, position: int) -> ModelFileError | RequestError:
    if code == NOT_FINITE:
        return not_finite_error(position)
    assert code == NOTHING_LEFT, "the kernel returns an id or one of two codes"
    return RequestError(f"no token is left for position {position}: every logit is -inf; relax logit_bias or the mask")


class Sampler:
    """Chooses tokens for sequences over one vocabulary; holds scratch memory, so one call at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows = RowSampler(vocab_size)
        self._adjusted: NDArray[np.float32] | None = None
        self._counts: NDArray[np.int32] | None = None
        self._xtc_draw = np.ones(1)

    def choose(self, logits: NDArray[np.float32], plan: SamplingPlan, position: int, history: NDArray[np.int32]) -> int:
        """Choose the token for `position`; logits without a dimension are the token that a device chose.

        Shapes: logits float32[vocab_size], contiguous, left as they are; history int32[>= position], whose first
            `position` entries are the tokens before it.
        Raises: ModelFileError if a logit is NaN or +inf; RequestError if bias and mask forbid every token.
        """
        row = logits
        if plan.mask is not None:
            row = np.where(plan.mask(history[:position]), row, _FORBIDDEN)
        if plan.adjusts:
            row = self._adjust(row, plan, position, history)
        if logits.ndim == 0:
            token_id = int(logits)
        elif plan.is_rare:
            token_id = self._choose_rarely(row, plan, position)
        else:
            token_id = self.rows.choose(
                row, plan.temperature, plan.top_k, plan.top_p, plan.min_p, plan.noise_key, position
            )
        if token_id < 0:
            raise _no_token_error(token_id, position)
        if plan.params.logprobs is not None:
            plan.logprobs[position] = token_logprobs(logits, token_id, int(plan.params.logprobs))
        return token_id

    def _choose_rarely(self, row: NDArray[np.float32], plan: SamplingPlan, position: int) -> int:
        """Choose with the steps that only `filters` has, and leave the draw to the kernel."""
        params, temperature = plan.params, plan.temperature
        best = self.rows.choose(row, 0.0, 0, 1.0, 0.0, plan.noise_key, position)
        if best < 0:
            return best
        if params.xtc_probability > 0.0:
            uniforms(self._xtc_draw, plan.noise_key, position, _XTC_TOKEN, 1)
        ids = keep_candidates(row, params, temperature, float(self._xtc_draw[0]))
        if params.dynatemp_range > 0.0:
            reach, exponent = float(params.dynatemp_range), float(params.dynatemp_exponent)
            temperature = dynamic_temperature(row[ids], temperature, reach, exponent)
        if plan.mirostat is None or temperature == 0.0:
            return self._draw(row, ids, plan, temperature, position)
        bits = surprise_bits(scaled(row[ids], temperature))
        token_id = self._draw(row, ids[plan.mirostat.keep(bits, position)], plan, temperature, position)
        plan.mirostat.advance(float(bits[np.searchsorted(ids, token_id)]), position)
        return token_id

    def _draw(
        self, row: NDArray[np.float32], ids: NDArray[np.int64], plan: SamplingPlan, temperature: float, position: int
    ) -> int:
        """Draw among the tokens `ids` of a row."""
        kept = np.full_like(row, _FORBIDDEN)
        kept[ids] = row[ids]
        return self.rows.choose(kept, temperature, 0, 1.0, 0.0, plan.noise_key, position)

    def _adjust(
        self, logits: NDArray[np.float32], plan: SamplingPlan, position: int, history: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        if self._adjusted is None or self._counts is None:
            self._adjusted = np.empty(self._vocab_size, np.float32)
            self._counts = np.zeros(self._vocab_size, np.int32)
        params = plan.params
        start = position
        if params.has_penalties:
            start = 0 if params.repetition_last_n < 0 else max(0, position - params.repetition_last_n)
        adjust(
            self._adjusted,
            logits,
            plan.bias_ids,
            plan.bias_values,
            history,
            start,
            position,
            float(params.repetition_penalty),
            float(params.frequency_penalty),
            float(params.presence_penalty),
            self._counts,
        )
        if params.has_dry_penalty:
            first = 0 if params.dry_last_n < 0 else max(0, position - params.dry_last_n)
            penalise_repetitions(
                self._adjusted,
                history[first:position],
                multiplier=float(params.dry_multiplier),
                base=float(params.dry_base),
                allowed_length=int(params.dry_allowed_length),
                breakers=params.dry_breaker_ids,
            )
        return self._adjusted


def choose_verified(
    choose: Callable[[NDArray[np.float32], SamplingPlan, int, TokenIds], int],
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
        if token_id in stops or index >= len(drafted) or drafted[index] != token_id:
            break
    return chosen

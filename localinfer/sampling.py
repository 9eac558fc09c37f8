"""How the next token is chosen: what a caller may ask for, and the sampler that does it.

Order: logit bias, penalties, temperature, top-k, top-p, min-p, then one draw with Gumbel noise. The noise of a
candidate is a function of (seed, position, token) alone, so a seed gives the same text whatever else was in the batch
or the cache.
"""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ModelFileError, RequestError
from localinfer.kernels.cpu.sampling import NOT_FINITE, NOTHING_LEFT, RowSampler, adjust

TokenMask = Callable[[NDArray[np.int32]], NDArray[np.bool_]]
"""Given the ids so far, which tokens may come next: bool[vocab_size]. Asked once per sampled position, in order."""

_MAX_SEED = 2**64 - 1
_MAX_BIAS = 1000.0
_FORBIDDEN = np.float32(-np.inf)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a caller may ask of the sampler; checked when it is made.

    temperature: 0 always takes the largest logit, the lowest id on ties.
    top_k: keep this many of the likeliest tokens; 0 keeps all.
    top_p: then keep the fewest likeliest whose probabilities reach this sum (Holtzman et al., arXiv 1904.09751); 1
        keeps
        all; at least one stays.
    min_p: then keep tokens of at least this share of the likeliest one's probability (arXiv 2407.01082); 0 keeps all.
    repetition_penalty: divides positive and multiplies other logits of tokens in the window (arXiv 1909.05858); 1 is
        off.
    frequency_penalty, presence_penalty: subtracted per occurrence in the window, and once if there is any; 0 is off.
    repetition_last_n: the window of all three penalties, in tokens of prompt and completion; -1 is all of them.
    logit_bias: token id -> number added to its logit; -inf forbids the token.
    seed: 0 to 2^64 - 1; None draws one, which `Stats.seed` reports.
    Raises: RequestError naming the value and its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    repetition_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf, "0 takes the likeliest token")
        _check_whole("top_k", self.top_k, 0, None, "0 keeps every token")
        _check_number("top_p", self.top_p, 0.0, 1.0, "1 keeps every token")
        _check_number("min_p", self.min_p, 0.0, 1.0, "0 keeps every token")
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "1 switches it off")
        _check_whole("repetition_last_n", self.repetition_last_n, -1, None, "-1 is the whole text")
        _check_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0, "0 switches it off")
        _check_number("presence_penalty", self.presence_penalty, -100.0, 100.0, "0 switches it off")
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, _MAX_SEED, "None draws one")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {self.logit_bias!r}; give a mapping of token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            _check_whole("a token id of logit_bias", token_id, 0, None, "see tokenizer.encode")
            if bias != -math.inf:
                _check_number(f"logit_bias[{token_id}]", bias, -_MAX_BIAS, _MAX_BIAS, "-inf forbids the token")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty can change a logit."""
        return self.repetition_last_n != 0 and (
            self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        )


def _check_whole(name: str, value: object, least: int, most: int | None, hint: str) -> None:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or int(value) < least or (most is not None and int(value) > most):  # type: ignore[call-overload]
        wanted = f"{least} or more" if most is None else f"from {least} to {most}"
        raise RequestError(f"{name} is {value!r}; it must be a whole number, {wanted} ({hint})")


def _check_number(name: str, value: object, least: float, most: float, hint: str) -> None:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not least <= float(value) <= most or math.isinf(float(value)):  # type: ignore[arg-type]
        wanted = f"{least:g} or more, and finite" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise RequestError(f"{name} is {value!r}; it must be a number, {wanted} ({hint})")


class SamplingPlan:
    """SamplingParams made ready for one vocabulary: the seed drawn, the bias as arrays, and a mask if there is one."""

    def __init__(self, params: SamplingParams, vocab_size: int, mask: TokenMask | None = None) -> None:
        for token_id in params.logit_bias:
            if token_id >= vocab_size:
                raise RequestError(
                    f"logit_bias names token {token_id}, but the vocabulary ends at {vocab_size - 1}; remove it"
                )
        self.params = params
        self.mask = mask
        self.seed = secrets.randbits(32) if params.seed is None else int(params.seed)
        self.temperature = float(params.temperature)
        self.top_k = min(int(params.top_k), vocab_size)
        self.top_p = float(params.top_p)
        self.min_p = float(params.min_p)
        self.noise_key = np.uint64(self.seed)
        self.bias_ids = np.array(list(params.logit_bias), np.int32)
        self.bias_values = np.array(list(params.logit_bias.values()), np.float64)
        self.adjusts = bool(params.logit_bias) or params.has_penalties


def not_finite_error(position: int) -> ModelFileError:
    """The error for logits with a NaN or an infinity in them."""
    return ModelFileError(
        f"the model computed logits that are not finite for position {position}: its weights are damaged, or too large "
        "for the type of its key-value cache; try kv_type='f32', or download the file again"
    )


class Sampler:
    """Chooses tokens for sequences over one vocabulary; holds scratch memory, so one call at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows = RowSampler(vocab_size)
        self._adjusted: NDArray[np.float32] | None = None
        self._counts: NDArray[np.int32] | None = None

    def choose(self, logits: NDArray[np.float32], plan: SamplingPlan, position: int, history: NDArray[np.int32]) -> int:
        """Choose the token for `position`.

        Shapes: logits float32[vocab_size], contiguous, left as they are; history int32[>= position], whose first
            `position` entries are the tokens before it.
        Raises: ModelFileError if a logit is NaN or +inf; RequestError if bias and mask forbid every token.
        """
        if plan.mask is not None:
            logits = np.where(plan.mask(history[:position]), logits, _FORBIDDEN)
        if plan.adjusts:
            logits = self._adjust(logits, plan, position, history)
        token_id = self._rows.choose(
            logits, plan.temperature, plan.top_k, plan.top_p, plan.min_p, plan.noise_key, position
        )
        if token_id >= 0:
            return token_id
        if token_id == NOT_FINITE:
            raise not_finite_error(position)
        assert token_id == NOTHING_LEFT, "the kernel returns an id or one of two codes"
        raise RequestError(
            f"no token is left for position {position}: every logit is -inf; relax logit_bias or the mask"
        )

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
        return self._adjusted

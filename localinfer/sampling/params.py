"""What a caller may ask of the sampler, checked when it is made."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from localinfer.errors import RequestError

MAX_LOGPROBS = 100
"""Most alternatives per token that may be asked for."""

_MAX_SEED = 2**64 - 1
_MAX_BIAS = 1000.0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a caller may ask of the sampler; checked when it is made. The order of the steps is in `sampling`.

    temperature: 0 always takes the largest logit, the lowest id on ties, and no filter below matters.
    top_k: keep this many of the likeliest tokens; 0 keeps all.
    top_p: then keep the fewest likeliest whose probabilities reach this sum (Holtzman et al., arXiv 1904.09751); 1
        keeps all; at least one stays.
    min_p: then keep tokens of at least this share of the likeliest one's probability (arXiv 2407.01082); 0 keeps all.
    typical_p: keep the tokens whose surprise is nearest to the entropy until their probabilities reach this sum
        (Meister et al., arXiv 2202.00666); 1 keeps all.
    top_n_sigma: keep logits at most this many standard deviations of all logits below the largest (Tang et al., arXiv
        2411.07641); 0 keeps all.
    xtc_probability: how often "exclude top choices" drops the tokens of at least xtc_threshold but the least likely of
        them (P. E. Weidmann, text-generation-webui, 2024); 0 is off.
    xtc_threshold: above one half it can never find two, and does nothing.
    dynatemp_range: the draw's temperature lies this much around `temperature`, never below 0: low where the model is
        certain, by the entropy of the kept tokens (Kalomaze, KoboldCpp, 2024); 0 is off.
    dynatemp_exponent: of the entropy over the largest possible one; below 1 turns towards the high temperature.
    mirostat: 2 lets only tokens of less than a surprise that is adapted after every token, so that the mean surprise
        is mirostat_tau bits (Basu et al., arXiv 2007.14966), in place of every filter above but top_n_sigma; 0 is off.
    mirostat_eta: how fast it adapts.
    repetition_penalty: divides positive and multiplies other logits of tokens in the window (arXiv 1909.05858); 1 is
        off.
    frequency_penalty, presence_penalty: subtracted per occurrence in the window, and once if there is any; 0 is off.
    repetition_last_n: the window of these three penalties, in tokens of prompt and completion; -1 is all of them.
    dry_multiplier: subtract dry_multiplier * dry_base ^ (n - dry_allowed_length) from a token that would make a
        repetition of n tokens longer, if n is at least dry_allowed_length ("don't repeat yourself", P. E. Weidmann,
        text-generation-webui, 2024); 0 is off.
    dry_last_n: where repetitions are looked for, in tokens; -1 is the whole text.
    dry_breaker_ids: tokens that no repetition goes across.
    logit_bias: token id -> number added to its logit; -inf forbids the token.
    logprobs: report each token's log probability and those of so many likeliest ones, as the model gave them, before
        anything above; None reports none, and costs nothing.
    seed: 0 to 2^64 - 1; None draws one, which `Stats.seed` reports.
    Raises: RequestError naming the value and its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    repetition_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1
    dry_breaker_ids: Collection[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf, "0 takes the likeliest token")
        _check_whole("top_k", self.top_k, 0, None, "0 keeps every token")
        _check_number("top_p", self.top_p, 0.0, 1.0, "1 keeps every token")
        _check_number("min_p", self.min_p, 0.0, 1.0, "0 keeps every token")
        _check_number("typical_p", self.typical_p, 0.0, 1.0, "1 keeps every token")
        _check_number("top_n_sigma", self.top_n_sigma, 0.0, math.inf, "0 keeps every token")
        _check_number("xtc_probability", self.xtc_probability, 0.0, 1.0, "0 switches it off")
        _check_number("xtc_threshold", self.xtc_threshold, 0.0, 1.0, "0.1 is usual")
        _check_number("dynatemp_range", self.dynatemp_range, 0.0, math.inf, "0 switches it off")
        _check_number("dynatemp_exponent", self.dynatemp_exponent, 0.0, math.inf, "1 is usual")
        _check_whole("mirostat", self.mirostat, 0, 2, "2 switches its second version on, 0 off")
        if self.mirostat == 1:
            raise RequestError(
                "mirostat is 1, but only its second version is here; give 2, or 0 to switch it off", field="mirostat"
            )
        _check_number("mirostat_tau", self.mirostat_tau, 0.0, math.inf, "bits per token; 5 is usual")
        _check_number("mirostat_eta", self.mirostat_eta, 0.0, 1.0, "0.1 is usual")
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "1 switches it off")
        _check_whole("repetition_last_n", self.repetition_last_n, -1, None, "-1 is the whole text")
        _check_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0, "0 switches it off")
        _check_number("presence_penalty", self.presence_penalty, -100.0, 100.0, "0 switches it off")
        _check_number("dry_multiplier", self.dry_multiplier, 0.0, 1000.0, "0 switches it off")
        _check_number("dry_base", self.dry_base, 1.0, 1000.0, "1.75 is usual")
        _check_whole("dry_allowed_length", self.dry_allowed_length, 1, None, "2 is usual")
        _check_whole("dry_last_n", self.dry_last_n, -1, None, "-1 is the whole text")
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, _MAX_SEED, "None draws one")
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, "None reports none")
        self._check_token_ids()

    def _check_token_ids(self) -> None:
        if not isinstance(self.dry_breaker_ids, Collection) or isinstance(self.dry_breaker_ids, str | bytes):
            raise RequestError(
                f"dry_breaker_ids is {self.dry_breaker_ids!r}; give a collection of token ids", field="dry_breaker_ids"
            )
        if isinstance(self.dry_breaker_ids, np.ndarray) and self.dry_breaker_ids.ndim != 1:
            raise RequestError(
                f"dry_breaker_ids has {self.dry_breaker_ids.ndim} dimensions; give a flat collection",
                field="dry_breaker_ids",
            )
        for token_id in self.dry_breaker_ids:
            _check_whole(
                "a token id of dry_breaker_ids", token_id, 0, None, "see tokenizer.encode", field="dry_breaker_ids"
            )
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias is {self.logit_bias!r}; give a mapping of token ids to numbers", field="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _check_whole("a token id of logit_bias", token_id, 0, None, "see tokenizer.encode", field="logit_bias")
            if bias != -math.inf:
                _check_number(
                    f"logit_bias[{token_id}]",
                    bias,
                    -_MAX_BIAS,
                    _MAX_BIAS,
                    "-inf forbids the token",
                    field="logit_bias",
                )
        object.__setattr__(self, "dry_breaker_ids", frozenset(self.dry_breaker_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty on tokens of the window can change a logit."""
        return self.repetition_last_n != 0 and (
            self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        )

    @property
    def has_dry_penalty(self) -> bool:
        """Whether a repetition can change a logit."""
        return self.dry_multiplier > 0.0 and self.dry_last_n != 0

    @property
    def has_rare_steps(self) -> bool:
        """Whether a step is asked for that only `sampling_filters` has."""
        return (
            self.typical_p < 1.0
            or self.top_n_sigma > 0.0
            or self.xtc_probability > 0.0
            or self.dynatemp_range > 0.0
            or self.mirostat != 0
        )


def _check_whole(
    name: str, value: object, least: int, most: int | None, hint: str, *, field: str | None = None
) -> None:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or int(value) < least or (most is not None and int(value) > most):  # type: ignore[call-overload]
        wanted = f"{least} or more" if most is None else f"from {least} to {most}"
        raise RequestError(f"{name} is {value!r}; it must be a whole number, {wanted} ({hint})", field=field or name)


def _check_number(name: str, value: object, least: float, most: float, hint: str, *, field: str | None = None) -> None:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not least <= float(value) <= most or math.isinf(float(value)):  # type: ignore[arg-type]
        wanted = f"{least:g} or more, and finite" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise RequestError(f"{name} is {value!r}; it must be a number, {wanted} ({hint})", field=field or name)

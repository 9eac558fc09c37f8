"""Sampling options: the one table of them, the record that is checked by it, and the values that a model's file sets.

A numeric option is one field of `SamplingParams`, made by `_number` or `_whole`: from it come its checks, its flag on
the command line with help, and the server's field. `SamplingOptions` gives its type to callers. Recommended values are
`general.sampling.*` of GGUF (keys as llama.cpp's converter writes them), converted from generation_config.json.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, TypedDict

from localinfer.arguments import check_number
from localinfer.errors import RequestError
from localinfer.types import Record, is_finite_number

MAX_LOGPROBS = 100
"""Most alternatives per token."""

MAX_SEED = 2**64 - 1
_MAX_BIAS = 1000.0


class NumberOption(Record):
    """A numeric sampling option."""

    kind: type[float] | type[int]
    """float, which takes whole numbers too, or int."""
    default: float
    least: float
    """Smallest allowed value."""
    most: float
    """Largest allowed value; math.inf allows any whole number."""
    metavar: str
    """Name of the value in the help of its flag."""
    help: str
    """Help of its flag; `{default}` stands for the default."""
    hint: str
    """Last words of the error for a value out of range."""
    is_common: bool = False
    """Help lists it first."""
    alias: str | None = None
    """Another name of it that the server takes."""


def _number(default: float, least: float, most: float, metavar: str, help: str, hint: str, **more: Any) -> Any:
    option = NumberOption(float, default, least, most, metavar, help, hint, **more)
    return field(default=default, metadata={"option": option})


def _whole(default: int, least: int, most: float, metavar: str, help: str, hint: str, **more: Any) -> Any:
    option = NumberOption(int, default, least, most, metavar, help, hint, **more)
    return field(default=default, metadata={"option": option})


class SamplingParams(Record, kw_only=True):
    """Options of the sampler, checked when they are made. The order of the steps is in `sampling`.

    Raises: RequestError naming the value and its range.
    """

    # fmt: off
    temperature: float = _number(
        0.8, 0, 10, "T", "0 always takes the likeliest token.", "0 takes the likeliest token", is_common=True)
    """0 always takes the largest logit, the lowest id on ties, and no filter below matters."""
    top_k: int = _whole(
        40, 0, math.inf, "K", "Sample among the K likeliest; 0: off.", "0 keeps every token", is_common=True)
    """Keep this many of the likeliest tokens; 0 keeps all."""
    top_p: float = _number(
        0.95, 0, 1, "P", "Sample among the likeliest that sum to P; 1: off.", "1 keeps every token", is_common=True)
    """Then keep the fewest likeliest whose probabilities reach this sum (Holtzman et al., arXiv 1904.09751); 1
    keeps all; at least one stays."""
    min_p: float = _number(
        0.05, 0, 1, "P", "Drop tokens below this share of the likeliest one; 0: off.", "0 keeps every token",
        is_common=True)
    """Then keep tokens of at least this share of the likeliest one's probability (arXiv 2407.01082); 0 keeps all."""
    typical_p: float = _number(
        1.0, 0, 1, "P", "Sample among the most typical that sum to P; 1: off.", "1 keeps every token")
    """Keep the tokens whose surprise is nearest to the entropy until their probabilities reach this sum (Meister
    et al., arXiv 2202.00666); 1 keeps all."""
    top_n_sigma: float = _number(
        0.0, 0, 100, "N", "Drop logits N standard deviations below the best; 0: off.", "0 keeps every token")
    """Keep logits at most this many standard deviations of all logits below the largest (Tang et al., arXiv
    2411.07641); 0 keeps all."""
    xtc_probability: float = _number(
        0.0, 0, 1, "P", "Probability that XTC drops the likeliest choices; 0: off.", "0 switches it off")
    """Probability that "exclude top choices" drops the tokens of at least xtc_threshold but the least likely of them
    (P. E. Weidmann, text-generation-webui, 2024); 0 is off."""
    xtc_threshold: float = _number(
        0.1, 0, 1, "P", "Least probability of a choice for XTC. Default: {default}.", "0.1 is usual")
    """Above one half it can never find two, and does nothing."""
    dynatemp_range: float = _number(
        0.0, 0, 10, "R", "Vary the temperature by up to R with the entropy; 0: off.", "0 switches it off")
    """The draw's temperature lies this much around `temperature`, never below 0: low where the model is certain,
    by the entropy of the kept tokens (Kalomaze, KoboldCpp, 2024); 0 is off."""
    dynatemp_exponent: float = _number(
        1.0, 0, 100, "E", "Exponent of the entropy for it. Default: {default}.", "1 is usual")
    """Exponent of the entropy over the largest possible one; below 1 turns towards the high temperature."""
    mirostat: int = _whole(
        0, 0, 2, "2", "Mirostat 2.0, in place of the other filters; 0: off.",
        "2 switches its second version on, 0 off")
    """2 lets only tokens of less than a surprise that is adapted after every token, so that the mean surprise is
    mirostat_tau bits (Basu et al., arXiv 2007.14966), in place of every filter above but top_n_sigma; 0 is off."""
    mirostat_tau: float = _number(
        5.0, 0, 100, "BITS", "Target surprise of mirostat. Default: {default}.", "bits per token; 5 is usual")
    mirostat_eta: float = _number(
        0.1, 0, 1, "ETA", "Learning rate of mirostat. Default: {default}.", "0.1 is usual")
    """Learning rate of that threshold."""
    repetition_penalty: float = _number(
        1.0, 0.01, 100, "R", "Above 1 discourages tokens already present; 1: off.", "1 switches it off",
        is_common=True, alias="repeat_penalty")
    """Divides positive and multiplies other logits of tokens in the window (arXiv 1909.05858); 1 is off."""
    repetition_last_n: int = _whole(
        64, -1, math.inf, "N", "Tokens the penalties look at; -1: all. Default: {default}.", "-1 is the whole text",
        alias="repeat_last_n")
    """The window of these three penalties, in tokens of prompt and completion; -1 is all of them."""
    frequency_penalty: float = _number(
        0.0, -100, 100, "F", "Subtracted from a logit per occurrence; 0: off.", "0 switches it off")
    """Subtracted per occurrence in the window, and once if there is any; 0 is off."""
    presence_penalty: float = _number(
        0.0, -100, 100, "F", "Subtracted from a logit that occurred; 0: off.", "0 switches it off")
    dry_multiplier: float = _number(
        0.0, 0, 1000, "M", "Weight of DRY, a penalty on repetitions; 0: off.", "0 switches it off")
    """Subtract dry_multiplier * dry_base ^ (n - dry_allowed_length) from a token that would make a repetition of
    n tokens longer, if n is at least dry_allowed_length ("don't repeat yourself", P. E. Weidmann,
    text-generation-webui, 2024); 0 is off."""
    dry_base: float = _number(
        1.75, 1, 1000, "B", "Base of DRY's growth with their length. Default: {default}.", "1.75 is usual")
    dry_allowed_length: int = _whole(
        2, 1, math.inf, "N", "Shorter repetitions get no DRY penalty. Default: {default}.", "2 is usual")
    dry_last_n: int = _whole(
        -1, -1, math.inf, "N", "Tokens DRY looks at; -1: all, the default.", "-1 is the whole text")
    """Window of repetitions, in tokens; -1 is the whole text."""
    # fmt: on
    dry_breaker_ids: Collection[int] = ()
    """Tokens that no repetition goes across."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> number added to its logit; -inf forbids the token."""
    logprobs: int | None = None
    """Report each token's log probability and those of so many likeliest ones, as the model gave them, before
    anything above; None reports none, and costs nothing."""
    seed: int | None = None
    """Seed of the draws, 0 to 2^64 - 1; None draws one, which `Stats.seed` reports."""

    def __post_init__(self) -> None:
        for name, option in NUMBER_OPTIONS.items():
            check_number(name, getattr(self, name), option.least, option.most, kind=option.kind, hint=option.hint)
        if self.mirostat == 1:
            raise RequestError(
                "mirostat is 1, but only its second version is here; give 2, or 0 to switch it off", field="mirostat"
            )
        check_number("seed", self.seed, 0, MAX_SEED, none="to draw one")
        check_number("logprobs", self.logprobs, 0, MAX_LOGPROBS, none="to report none")
        self._check_token_ids()

    def _check_token_ids(self) -> None:
        import numpy as np

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
            _check_id("dry_breaker_ids", token_id)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias is {self.logit_bias!r}; give a mapping of token ids to numbers", field="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _check_id("logit_bias", token_id)
            if bias != -math.inf:
                name, hint = f"logit_bias[{token_id}]", "-inf forbids the token"
                check_number(name, bias, -_MAX_BIAS, _MAX_BIAS, kind=float, hint=hint, field="logit_bias")
        object.__setattr__(self, "dry_breaker_ids", frozenset(self.dry_breaker_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def has_penalties(self) -> bool:
        """True if any penalty on tokens of the window can change a logit."""
        return self.repetition_last_n != 0 and (
            self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        )

    @property
    def has_dry_penalty(self) -> bool:
        """True if a repetition can change a logit."""
        return self.dry_multiplier > 0.0 and self.dry_last_n != 0

    @property
    def has_rare_steps(self) -> bool:
        """True if a step is needed that only `filters` has."""
        return (
            self.typical_p < 1.0
            or self.top_n_sigma > 0.0
            or self.xtc_probability > 0.0
            or self.dynatemp_range > 0.0
            or self.mirostat != 0
        )


NUMBER_OPTIONS: Mapping[str, NumberOption] = {
    member.name: member.metadata["option"] for member in fields(SamplingParams) if member.metadata
}
"""The numeric sampling options by name, in the order of their fields."""


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keyword options."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    repetition_penalty: float
    repetition_last_n: int
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_last_n: int
    dry_breaker_ids: Collection[int]
    logit_bias: Mapping[int, float]
    logprobs: int | None
    seed: int | None


def _check_id(field: str, token_id: object) -> None:
    check_number(f"a token id of {field}", token_id, 0, hint="see tokenizer.encode", field=field)


class TokenRules(Record, kw_only=True):
    """Rules about single tokens of one generation; see `mask.rules_mask`."""

    allowed_ids: Collection[int] | None = None
    """The only ones that may come, with the ends of a text; None for all."""
    min_tokens: int = 0
    """So many come before any that ends the text."""
    bad_sequences: Sequence[Sequence[int]] = ()
    """Token ids of which the last does not come behind the others."""

    @property
    def is_empty(self) -> bool:
        """True if they forbid nothing."""
        return self.allowed_ids is None and not self.min_tokens and not self.bad_sequences


logger = logging.getLogger(__name__)

_OTHER_NAMES = {"temp": "temperature", "penalty_last_n": "repetition_last_n", "penalty_repeat": "repetition_penalty"}
"""Name in a file -> ours, where they differ."""
_NO_OPTIONS = ("sequence",)
"""Keys that are no option here: the order of the steps is fixed."""


def file_sampling(metadata: Mapping[str, object], *, name: str) -> dict[str, float | int]:
    """The sampling options that a file recommends, by the names of SamplingParams, in their order.

    A value that the option cannot have is left out, with a warning that names it. name: of the file, for warnings.
    """
    # Commands read the table of options at their start, and need no table of architectures for that.
    from localinfer.models.decoder.metadata_keys import SAMPLING_PREFIX

    found: dict[str, float | int] = {}
    for key in metadata:
        if not key.startswith(SAMPLING_PREFIX):
            continue
        own = key.removeprefix(SAMPLING_PREFIX)
        own = _OTHER_NAMES.get(own, own)
        if own in _NO_OPTIONS:
            continue
        try:
            found[own] = _checked(own, metadata[key])
        except RequestError as error:
            logger.warning("%s: the sampling it recommends is ignored in one point: %s", name, error)
    return {option: found[option] for option in NUMBER_OPTIONS if option in found}


def _checked(name: str, value: object) -> float | int:
    option = NUMBER_OPTIONS.get(name)
    if option is None:
        raise RequestError(f"there is no option {name!r:.60}")
    if not is_finite_number(value):
        raise RequestError(f"{name} is {value!r:.60}; wanted a number")
    if option.kind is int:
        if value != int(value):
            raise RequestError(f"{name} is {value!r:.60}; wanted a whole number")
        # "All tokens" is -1 in some files.
        number: float | int = max(0, int(value)) if name == "top_k" else int(value)
    else:
        # Single precision in the file: 0.6 is what was meant by 0.6000000238418579.
        number = float(f"{value:.6g}")
    checked: dict[str, Any] = {name: number}
    SamplingParams(**checked)
    return number

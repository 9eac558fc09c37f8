"""Members that every request for text may have, and what the engine makes of them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localinfer.server.replies.message_parts import joined_text

MAX_TEXTS = 8
"""Most texts of one request: `n` times its prompts."""
_SEEDS = 1 << 64
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 1024
_MAX_BIASES = 1024

Probability = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
TextCount = Annotated[int, Meta(ge=1, le=MAX_TEXTS)]
Width = Annotated[float, Meta(ge=0, le=100)]
StopText = Annotated[str, Meta(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
Stops = StopText | Annotated[list[StopText], Meta(max_length=_MAX_STOPS)]
Biases = Annotated[
    dict[Annotated[str, Meta(pattern=r"^\d{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=_MAX_BIASES),
]


_SAME_NAMES = (
    "temperature top_p min_p top_k typical_p top_n_sigma xtc_probability xtc_threshold dynatemp_range"
    " dynatemp_exponent mirostat mirostat_tau mirostat_eta dry_multiplier dry_base dry_allowed_length dry_last_n"
    " dry_sequence_breakers frequency_penalty presence_penalty ignore_eos context_shift pin_cache"
).split()


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream should carry beside text. include_obfuscation: ignored, as chunks are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Text that the reply is likely to have."""

    content: str | list[dict[str, Any]]
    type: Literal["content"] = "content"

    def text(self) -> str:
        """The text, of its parts if it has some. Raises: ApiError for parts that are no text."""
        return joined_text(self.content, "prediction.content")


class SamplingFields(msgspec.Struct):
    """How tokens are chosen, and when to stop; None is the engine's default."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    typical_p: Probability | None = None
    top_n_sigma: Width | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    dynatemp_range: Width | None = None
    dynatemp_exponent: Width | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    mirostat_tau: Width | None = None
    mirostat_eta: Probability | None = None
    dry_multiplier: Width | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Count | None = None
    dry_last_n: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    dry_sequence_breakers: Stops | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repetition_last_n: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] | None = None
    logit_bias: Biases | None = None
    seed: int | None = None
    stop: Stops | None = None
    ignore_eos: bool | None = None
    context_shift: bool | None = None
    pin_cache: bool | None = None

    def options(self) -> dict[str, Any]:
        """The engine's options."""
        bias = self.logit_bias
        options: dict[str, Any] = {
            **{name: getattr(self, name) for name in _SAME_NAMES},
            "repetition_penalty": self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty,
            "repetition_last_n": self.repeat_last_n if self.repetition_last_n is None else self.repetition_last_n,
            "logit_bias": None if bias is None else {int(token_id): value for token_id, value in bias.items()},
            # Clients mean "any" by -1, and may have signed numbers.
            "seed": None if self.seed is None or self.seed == -1 else self.seed % _SEEDS,
            "stop": self.stop or None,
        }
        return {name: value for name, value in options.items() if value is not None}


def seeded(options: dict[str, Any], index: int) -> dict[str, Any]:
    """Options for the text of this index: texts of one request differ, and the same seed gives the same ones."""
    seed = options.get("seed")
    return options if seed is None or index == 0 else {**options, "seed": (seed + index) % _SEEDS}

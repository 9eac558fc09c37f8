"""Requests for `/completion` and `/infill`, and the settings of a generation under llama-server's names."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from localinfer.apps.server.replies.fields import (
    CacheSalt,
    GenerationFields,
    ProbabilityCount,
    SlotNumber,
    TextCount,
    TokenLimit,
    first_limit,
    given,
)
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.known_fields import COMPLETIONS, KnownFields, Refusal
from localinfer.engine.sampling.params import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer


OFF_VALUES: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
}
"""The steps by llama-server's names, in the order in which they are taken here, each with what switches it off."""
_OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "top-k": "top_k", "top-p": "top_p"}
_LETTERS = dict(zip("edstkypmx", OFF_VALUES, strict=True))


def options_without(samplers: Sequence[str] | str | None) -> dict[str, Any]:
    """The options that switch off what is not among the samplers: names in a list, or a letter each.

    Raises: ApiError for a name that is none, and for another order than the one in which they are taken.
    """
    if samplers is None:
        return {}
    if isinstance(samplers, str):
        names = [_LETTERS.get(letter, letter) for letter in samplers]
    else:
        names = [_OTHER_NAMES.get(name, name) for name in samplers]
    order = list(OFF_VALUES)
    for name in names:
        if name not in OFF_VALUES:
            raise ApiError(400, f"samplers has {name!r:.40}; there are {', '.join(order)}", param="samplers")
    if names != [name for name in order if name in names]:
        raise ApiError(
            400,
            f"samplers has another order than {', '.join(order)}, in which they are taken here; send it in this order, "
            "or leave it out",
            code="unsupported_parameter",
            param="samplers",
        )
    return {option: value for name in order if name not in names for option, value in OFF_VALUES[name].items()}


_MOST_BIASES = 1024
_MOST_BIAS = 1000.0
_SAME_BITS = "the text is the same with it and without"


class LlamaFields(GenerationFields, kw_only=True):
    """Members of llama-server's own completions.

    n_predict: -1 for no limit but the context; max_tokens and max_completion_tokens are other names of it. n_probs:
    tell the probabilities of so many tokens, post_sampling_probs: as they were drawn from; logprobs is another name of
    the first. return_tokens: tell the token ids of a whole answer, as a stream does anyway. response_fields: the
    members of the last object, `a/b` for member b of member a. id_slot: the slot that the text shows in, to be saved
    by it.
    t_max_predict_ms: end at the first token after so long, counted from the first one, once there was a new line.
    dry_penalty_last_n: as dry_last_n. logit_bias: an object, or pairs in a list, of a token id, or a text whose tokens
    are meant, and a number, or false to forbid it.
    """

    model: str | None = None
    stream: bool | None = None
    n_predict: TokenLimit | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n: TextCount | None = None
    n_cmpl: TextCount | None = None
    n_probs: ProbabilityCount | None = None
    logprobs: ProbabilityCount | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=100)] | None = None
    id_slot: SlotNumber | None = None
    samplers: list[str] | str | None = None
    t_max_predict_ms: Annotated[int, Meta(ge=-1, le=1 << 40)] | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    cache_salt: CacheSalt | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None  # type: ignore[assignment]

    @property
    def num_made(self) -> int:
        """Texts made per prompt."""
        return self.n_cmpl or self.n or 1

    @property
    def num_probs(self) -> int:
        """How many probabilities are told per token."""
        return (self.logprobs if self.n_probs is None else self.n_probs) or 0

    def engine_options(self) -> dict[str, Any]:
        """The engine's options, all but `logit_bias`. Raises: ApiError."""
        shared = msgspec.structs.replace(self, logit_bias=None, json_schema=None if self.grammar else self.json_schema)
        limits = (self.n_predict, self.max_completion_tokens, self.max_tokens)
        return {
            **GenerationFields.sampling_options(shared),
            # No limit is said so: the model's own default may be one.
            **({} if limits == (None, None, None) else {"max_tokens": first_limit(*limits)}),
            **given(
                constraint=shared.constraint(),
                dry_last_n=self.dry_penalty_last_n if self.dry_last_n is None else self.dry_last_n,
            ),
            **options_without(self.samplers),
        }

    def biases(self, tokenizer: "Tokenizer") -> dict[int, float]:
        """`logit_bias` by token ids. Raises: ApiError."""
        found: dict[int, float] = {}
        for token, bias in _pairs(self.logit_bias):
            value = -math.inf if bias is False else float(bias)
            if bias is True or not (-_MOST_BIAS <= value <= _MOST_BIAS or bias is False):
                raise _bad_bias(f"has the value {bias} for {token!r:.40}", f"a number up to {_MOST_BIAS:g}, or false")
            for token_id in _token_ids(token, tokenizer):
                found[token_id] = value
        if len(found) > _MOST_BIASES:
            raise _bad_bias(f"names {len(found)} tokens", f"at most {_MOST_BIASES}")
        return found


_READ = frozenset(field.encode_name for field in msgspec.structs.fields(LlamaFields))
KNOWN = KnownFields(
    {
        **{name: reason for name, reason in COMPLETIONS.ignored.items() if name not in _READ},
        "backend_sampling": "there is one place where tokens are drawn, and it gives the same ones",
        "n_cache_reuse": "what begins alike is reused by itself",
        "sse_ping_interval": "the server sends signs of life at its own intervals",
        **dict.fromkeys(
            ("speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type"), _SAME_BITS
        ),
    },
    {
        **{name: refusal for name, refusal in COMPLETIONS.refused.items() if name not in _READ},
        "multimodal_data": Refusal("this server reads text only"),
        "adaptive_target": Refusal("send typical_p", (None, -1, -1.0)),
        "adaptive_decay": Refusal("leave it out", (None, 0, 0.0, 0.9)),
        "n_keep": Refusal("send context_shift, which keeps the first token and the recent half", (None, 0, -1)),
    },
)


class LlamaCompletionRequest(LlamaFields, kw_only=True):
    """A request for llama-server's own completion."""

    known_fields: ClassVar = KNOWN

    prompt: str | list[Any] | dict[str, Any]


def _pairs(bias: Mapping[str, float | bool] | Iterable[tuple[int | str, float | bool]] | None) -> Any:
    if bias is None:
        return ()
    return bias.items() if isinstance(bias, Mapping) else bias


def _token_ids(token: int | str, tokenizer: "Tokenizer") -> list[int]:
    if isinstance(token, str) and not token.isdecimal():
        return tokenizer.encode(token, add_special=False)
    token_id = int(token)
    if token_id >= tokenizer.vocab_size or token_id < 0:
        raise _bad_bias(f"names the token {token_id}", f"ids from 0 to {tokenizer.vocab_size - 1}, see /tokenize")
    return [token_id]


def _bad_bias(found: str, wanted: str) -> ApiError:
    return ApiError(400, f"logit_bias {found}; give {wanted}", param="logit_bias")


_SAME = (
    "temperature dynatemp_range dynatemp_exponent top_k top_p min_p top_n_sigma xtc_probability xtc_threshold typical_p"
    " presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length mirostat mirostat_tau mirostat_eta"
).split()
_OTHER = {
    "repeat_last_n": "repetition_last_n",
    "repeat_penalty": "repetition_penalty",
    "dry_penalty_last_n": "dry_last_n",
}


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """The sampler's part of the engine's options. Raises: RequestError."""
    names = SamplingOptions.__annotations__
    return SamplingParams(**{name: value for name, value in options.items() if name in names})


def generation_settings(
    options: Mapping[str, Any], tokenizer: "Tokenizer | None", *, seed: int | None, **more: Any
) -> dict[str, Any]:
    """`generation_settings` of llama-server.

    options: the engine's. tokenizer: whose end tokens `ignore_eos` forbids. seed: the one that was drawn or given, None
    for one that will be drawn. more: of the request, under its own names.
    """
    params = sampling_params(options)
    most = options.get("max_tokens")
    n_predict = -1 if most is None else most
    stop = options.get("stop") or []
    # JSON has no infinity.
    finite = {token_id: None if math.isinf(value) else value for token_id, value in params.logit_bias.items()}
    bias: list[dict[str, Any]] = [{"token": token_id, "bias": value} for token_id, value in finite.items()]
    if options.get("ignore_eos") and tokenizer is not None:
        bias += [{"token": token_id, "bias": None} for token_id in sorted(tokenizer.eog_token_ids)]
    return {
        "seed": params.seed if seed is None else seed,
        **{name: getattr(params, name) for name in _SAME},
        **{name: getattr(params, ours) for name, ours in _OTHER.items()},
        # Neither is a step here, which these values say.
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "stop": [stop] if isinstance(stop, str) else list(stop),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": bool(options.get("ignore_eos")),
        "logit_bias": bias,
        "min_keep": 0,
        "samplers": list(OFF_VALUES),
        "lora": [],
        **more,
    }

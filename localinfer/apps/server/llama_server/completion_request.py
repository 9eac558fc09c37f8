"""What `/completion` and `/infill` read of a request: llama-server's members beside those that all replies share."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from localinfer.apps.server.llama_server.samplers import options_without
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

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer

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

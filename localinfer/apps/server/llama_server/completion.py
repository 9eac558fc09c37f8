"""llama-server's own completions, streamed or whole: `/completion`, and `/infill` between two texts."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.serving import (
    Event,
    PromptProgress,
    ReplyWriter,
    progress_timings,
    serve_reply,
    timings,
)
from localinfer.apps.server.replies.clients import salt_options
from localinfer.apps.server.replies.fields import (
    CacheSalt,
    GenerationFields,
    MediaPieces,
    Pieces,
    ProbabilityCount,
    SlotNumber,
    TextCount,
    TokenLimit,
    check_text_count,
    encode_pieces,
    first_limit,
    given,
    media_pieces,
    read_prompts,
    seeded,
)
from localinfer.apps.server.replies.reply import Reply, TextPlan
from localinfer.apps.server.replies.service import Service, caller_options, prepared, read_body, service_of
from localinfer.apps.server.transport.http import ApiError, unsupported
from localinfer.apps.server.transport.known_fields import COMPLETIONS, KnownFields, Refusal
from localinfer.engine.sampling.filters import keep_candidates, scaled
from localinfer.engine.sampling.params import MAX_LOGPROBS, SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from localinfer.generation.stream import Stats, StreamEvent, TextStream
    from localinfer.generation.text_generation import EncodedPrompt
    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.types import TokenLogprobs

    Encoder = Callable[..., list[int] | EncodedPrompt]


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
        """Number of probabilities returned per token."""
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
        "multimodal_data": Refusal('write it into prompt, as {"prompt_string": ..., "multimodal_data": [...]}'),
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


_LEAST = -3.4028234663852886e38
"""Stand-in for minus infinity, which JSON has not: the least float32."""


class ShownProbabilities:
    """Probabilities of each token of a text.

    count: so many of the likeliest. after_sampling: as they were drawn from, after all filters, instead of as the model
    gave them.
    """

    def __init__(self, tokenizer: "Tokenizer", count: int, params: SamplingParams, *, after_sampling: bool) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._params = params
        self._after_sampling = after_sampling

    def entry(self, token_id: int, found: "TokenLogprobs") -> dict[str, Any]:
        """A member of `completion_probabilities`."""
        if not self._after_sampling:
            top = [self._token(other, "logprob", _finite(logprob)) for other, logprob in found.top[: self._count]]
            return {**self._token(token_id, "logprob", _finite(found.logprob)), "top_logprobs": top}
        drawn = _drawn_from(found.top, self._params)
        likeliest = [self._token(other, "prob", prob) for other, prob in drawn.items()][: self._count]
        return {**self._token(token_id, "prob", drawn.get(token_id, 0.0)), "top_probs": likeliest}

    def _token(self, token_id: int, name: str, value: float) -> dict[str, Any]:
        # A model may have more logits than its vocabulary has tokens.
        spelled = self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""
        return {"id": token_id, "token": spelled.decode("utf-8", "ignore"), "bytes": list(spelled), name: value}


def needed_logprobs(count: int, params: SamplingParams, *, after_sampling: bool, is_constrained: bool) -> int:
    """Number of log probabilities that the engine has to report.

    Raises: ApiError where the probabilities after sampling cannot be computed from those.
    """
    if not after_sampling:
        return count
    if params.temperature > 0.0 and not 0 < params.top_k <= MAX_LOGPROBS:
        raise unsupported(
            f"post_sampling_probs is given with top_k {params.top_k}; send a top_k from 1 to {MAX_LOGPROBS}", "top_k"
        )
    if is_constrained or params.has_penalties or params.has_dry_penalty or params.has_rare_steps or params.logit_bias:
        raise unsupported(
            "post_sampling_probs is given, but is told after temperature, top_k, top_p and min_p only; leave out other "
            "filters, penalties, logit_bias and the form, or ask for n_probs alone",
            "post_sampling_probs",
        )
    return max(count, params.top_k if params.temperature > 0.0 else 1)


def _drawn_from(top: Sequence[tuple[int, float]], params: SamplingParams) -> dict[int, float]:
    """The tokens that the sampler drew from, likeliest first, and their probabilities."""
    if params.temperature == 0.0:
        return {top[0][0]: 1.0}
    logits = np.array([logprob for _, logprob in top], np.float64)
    kept = keep_candidates(logits, params, params.temperature, 1.0)
    weights = np.exp(scaled(logits[kept], params.temperature))
    probabilities = (weights / weights.sum()).tolist()
    return {top[place][0]: prob for place, prob in zip(kept.tolist(), probabilities, strict=True)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


_MOST_PROMPTS = 64
_NOT_TIMINGS = ("cache_miss", "notices")
"""Words among figures, which llama-server's clients add up."""


async def completion(request: Request) -> Response:
    """Continue prompts."""
    body = await read_body(request, LlamaCompletionRequest)
    return await serve_completion(request, body, await prepared(request, _encoders, request, body.prompt))


def _encoders(request: Request, prompt: Any) -> "list[Encoder]":
    """A function for each prompt. Raises: ApiError."""
    if isinstance(prompt, list) and any(isinstance(one, dict) for one in prompt) and len(prompt) <= _MOST_PROMPTS:
        return [encoder for index, one in enumerate(prompt) for encoder in _of_one(request, one, f"prompt[{index}]")]
    return _of_one(request, prompt, "prompt")


def _of_one(request: Request, prompt: Any, path: str) -> "list[Encoder]":
    parts = media_pieces(prompt, path)
    if parts is not None:
        return [partial(_encode_media, parts=parts, salt=salt_options(request))]
    return [partial(_encode, pieces=pieces) for pieces in read_prompts(prompt, path, at_most=_MOST_PROMPTS)]


def _encode(llm: "LLM", pieces: Pieces, max_tokens: int | None) -> list[int]:
    return encode_pieces(llm.tokenizer, pieces, add_special=True, parse_special=True, max_tokens=max_tokens)


def _encode_media(
    llm: "LLM", max_tokens: int | None, *, parts: MediaPieces, salt: Mapping[str, Any]
) -> "EncodedPrompt":
    return llm.encode_prompt(parts, parse_special=True, max_tokens=max_tokens, **salt)


async def serve_completion(request: Request, body: LlamaFields, prompts: "Sequence[Encoder]") -> Response:
    """Continue prompts that are functions of a model and of the most tokens they may have, and give their ids.

    Raises: ApiError.
    """
    options = body.engine_options()
    check_text_count(len(prompts) * body.num_made, service_of(request).settings)
    texts = [
        _Text(body, options, encode, index % body.num_made) for encode in prompts for index in range(body.num_made)
    ]
    caller = caller_options(request)

    def plan(llm: "LLM") -> list[TextPlan]:
        # The later texts of a prompt find it in the cache.
        return [
            TextPlan(partial(text.open, llm, caller), number - text.copy if text.copy else None)
            for number, text in enumerate(texts)
        ]

    return await serve_reply(
        request, body, "cmpl", plan, lambda reply: _Writer(reply, body, texts, service_of(request))
    )


class _Text:
    """One text of a request: its prompt, options and result. copy: index among those of one prompt."""

    def __init__(self, body: LlamaFields, options: Mapping[str, Any], encode: "Encoder", copy: int) -> None:
        self.copy = copy
        self.options: dict[str, Any] = dict(options)
        self.settings: dict[str, Any] = {}
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.probabilities: list[dict[str, Any]] = []
        self.num_told = 0
        self.has_new_line = self.is_out_of_time = False
        self.began: float | None = None
        self.end: Event | None = None
        self._body = body
        self._encode = encode

    def open(self, llm: "LLM", caller: Mapping[str, Any]) -> "TextStream":
        """Check the text's prompt and options, and begin it. caller: options of its client.

        Raises: LocalinferError, ApiError.
        """
        body, options = self._body, self.options
        self.settings = {**llm.defaults, **options}
        if body.logit_bias:
            options["logit_bias"] = self.settings["logit_bias"] = body.biases(llm.tokenizer)
        if body.num_probs:
            options["logprobs"] = needed_logprobs(
                body.num_probs,
                sampling_params(self.settings),
                after_sampling=bool(body.post_sampling_probs),
                is_constrained="constraint" in options,
            )
        prompt = self._encode(llm, max_tokens=None if self.settings.get("context_shift") else llm.context_length)
        return llm.stream(prompt, **seeded({**options, **caller}, self.copy))


class _Writer(ReplyWriter):
    """Objects with the text since the last one, and for each text a last one with everything else."""

    def __init__(self, reply: Reply, body: LlamaFields, texts: Sequence[_Text], service: Service) -> None:
        super().__init__(reply)
        self._body = body
        self._texts = texts
        self._progress = PromptProgress(reply, service.num_ahead) if body.return_progress and body.stream else None
        tokenizer = reply.llm.tokenizer
        self._shown = [
            ShownProbabilities(
                tokenizer,
                body.num_probs,
                sampling_params(text.settings),
                after_sampling=bool(body.post_sampling_probs),
            )
            for text in texts
        ]

    def silence(self) -> Iterable[Event | None]:
        if self._progress is None or self.reply.num_tokens:
            return (None,)
        return list(self._reports(is_read=False)) or (None,)

    def add(self, index: int, token: "StreamEvent") -> Iterator[Event]:
        text = self._texts[index]
        if text.began is None:
            text.began = time.monotonic()
        if index == 0:
            yield from self._reports(is_read=True)
        if token.token_id >= 0:
            text.token_ids.append(token.token_id)
        if token.text:
            text.pieces.append(token.text)
            text.has_new_line = text.has_new_line or "\n" in token.text
        if token.logprobs is not None:
            text.probabilities.append(self._shown[index].entry(token.token_id, token.logprobs))
        if self._is_out_of_time(text):
            text.is_out_of_time = True
            self.reply.cancel_text(index)
        # An end token has nothing to show; the last object says that it came.
        if self._body.stream and (token.text or self._body.num_probs) and token.token_id >= 0:
            yield self._part(index, text)

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterable[Event]:
        text = self._texts[index]
        text.end = self._last(index, text, reason, stats)
        return (text.end,) if self._body.stream else ()

    def whole(self) -> Any:
        ends = [text.end for text in self._texts]
        return ends[0] if len(ends) == 1 else ends

    def _reports(self, *, is_read: bool) -> Iterator[Event]:
        if self._progress is None:
            return
        for report in self._progress.reports(is_read=is_read):
            more = {"timings": progress_timings(report)} if self._body.timings_per_token else {}
            yield {**self._head(0, "", []), "prompt_progress": report, **more}

    def _head(self, index: int, content: str, token_ids: list[int], *, is_last: bool = False) -> Event:
        return {
            "index": index,
            "content": content,
            "tokens": token_ids,
            "stop": is_last,
            "id_slot": self.reply.slot_ids[index],
            "tokens_predicted": len(self._texts[index].token_ids),
            "tokens_evaluated": self.reply.prompt_tokens[index],
        }

    def _part(self, index: int, text: _Text) -> Event:
        """Text since the last object."""
        part = self._head(index, "".join(text.pieces), text.token_ids[text.num_told :])
        text.num_told = len(text.token_ids)
        text.pieces.clear()
        if text.probabilities:
            part["completion_probabilities"] = list(text.probabilities)
            text.probabilities.clear()
        stats = self.reply.stats_so_far(index) if self._body.timings_per_token else None
        return part if stats is None else {**part, "timings": figures(stats)}

    def _last(self, index: int, text: _Text, reason: str, stats: "Stats | None") -> Event:
        body, reply = self._body, self.reply
        tokenizer = reply.llm.tokenizer
        told = text.token_ids if body.return_tokens and not body.stream else []
        made = {
            **self._head(index, "".join(text.pieces), told, is_last=True),
            "model": reply.model_id,
            "generation_settings": generation_settings(
                text.settings,
                tokenizer,
                seed=None if stats is None else stats.seed,
                stream=bool(body.stream),
                n_probs=body.num_probs,
                timings_per_token=bool(body.timings_per_token),
                post_sampling_probs=bool(body.post_sampling_probs),
            ),
            "prompt": reply.prompt_text(index),
            "has_new_line": text.has_new_line,
            "truncated": self._is_truncated(text, reason, stats),
            "stop_type": "none" if reply.is_cancelled else _stop_type(reason, stats, text),
            "stopping_word": "" if stats is None else stats.stop_text or "",
            "tokens_cached": reply.prompt_tokens[index] + max(0, len(text.token_ids) - 1),
            "timings": None if stats is None else figures(stats),
            **({} if stats is None else words(stats)),
        }
        if text.probabilities and not body.stream:
            made["completion_probabilities"] = text.probabilities
        return _chosen(made, body.response_fields) if body.response_fields else made

    def _is_out_of_time(self, text: _Text) -> bool:
        limit = self._body.t_max_predict_ms or 0
        return (
            limit > 0
            and text.began is not None
            and text.has_new_line
            and 1e3 * (time.monotonic() - text.began) >= limit
        )

    def _is_truncated(self, text: _Text, reason: str, stats: "Stats | None") -> bool:
        """Return whether the text would have continued in a longer context."""
        if stats is not None and stats.dropped_tokens:
            return True
        most = text.settings.get("max_tokens")
        return reason == "length" and (most is None or len(text.token_ids) < most)


def figures(stats: "Stats") -> dict[str, Any]:
    """`timings` as llama-server has them: numbers alone."""
    return {name: value for name, value in timings(stats).items() if name not in _NOT_TIMINGS}


def words(stats: "Stats") -> dict[str, Any]:
    """Members of `timings` that are words."""
    return {name: value for name, value in timings(stats).items() if name in _NOT_TIMINGS}


def _stop_type(reason: str, stats: "Stats | None", text: _Text) -> str:
    if stats is not None and stats.stop_text is not None:
        return "word"
    return "eos" if reason == "stop" and not text.is_out_of_time else "limit"


def _chosen(made: Event, paths: Sequence[str]) -> Event:
    """The members of an object that are named, `a/b` for member b of member a; others do not exist."""
    found: Event = {}
    for path in paths:
        value: Any = made
        for name in path.split("/"):
            value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            found[path] = value
    return found


_ABSENT = object()


_PROJECT = "myproject\n"
_FILE = "filename\n"
_SNIPPET = "\n\n--- snippet ---\n\n"
"""The names that llama-server gives to what has none, and what it puts before a snippet: models are used to them."""
_MOST_SNIPPETS = 1024


class Snippet(msgspec.Struct, forbid_unknown_fields=True):
    """Another file that helps to know what is missing, or a part of one."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaFields, kw_only=True):
    """A text with a hole.

    input_prefix, input_suffix: what stands before and after it. prompt: continues the prefix, where the cursor is.
    input_extra: texts of other files; those that do not fit the context are left out, the last ones first.
    """

    known_fields: ClassVar = KnownFields(
        KNOWN.ignored,
        {name: refusal for name, refusal in KNOWN.refused.items() if name not in ("input_prefix", "input_extra")},
    )

    input_prefix: str | list[Any]
    input_suffix: str | list[Any]
    prompt: str | list[Any] | None = None
    input_extra: Annotated[list[Snippet], Meta(max_length=_MOST_SNIPPETS)] | None = None


async def infill(request: Request) -> Response:
    """Fill in the hole of a text."""
    body = await read_body(request, InfillRequest)
    before = {"input_prefix": _one(body.input_prefix, "input_prefix")}
    before |= {"prompt": _one(body.prompt, "prompt")} if body.prompt else {}
    after = _one(body.input_suffix, "input_suffix")
    limit = body.n_predict if body.n_predict is not None and body.n_predict > 0 else 0
    prompt = partial(_prompt, before=before, after=after, snippets=body.input_extra or (), reserved=limit)
    return await serve_completion(request, body, [prompt])


def _one(prompt: str | list[Any], path: str) -> Pieces:
    (pieces,) = read_prompts(prompt, path, at_most=1)
    return pieces


def _prompt(
    llm: "LLM",
    *,
    before: Mapping[str, Pieces],
    after: Pieces,
    snippets: Sequence[Snippet],
    reserved: int,
    max_tokens: int | None,
) -> list[int]:
    """The ids of a prompt that the text in the hole continues.

    before: by the members of the request that have it. reserved: tokens that the context must have beside it and the
    snippets. Raises: ApiError for a model without such tokens; ContextLengthError, TokenIdError. Source: Bavarian et
    al., arXiv 2207.14255 (PSM); the order of files is Qwen's, arXiv 2409.12186.
    """
    tokenizer = llm.tokenizer
    tokens = tokenizer.fill_in_tokens
    if tokens is None:
        raise unsupported(
            "this model has no tokens for filling in; use a model for code, or ask /completion with the prefix", "model"
        )
    encode = partial(encode_pieces, tokenizer, max_tokens=max_tokens)
    first = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
    start = [token_id for field, pieces in before.items() for token_id in encode(pieces, field=field)]
    hole = tokens.around(start, encode(after, field="input_suffix"))
    own_name = [] if tokens.separator is None else [tokens.separator, *tokenizer.encode(_FILE, add_special=False)]
    project = [] if tokens.repository is None else [tokens.repository, *tokenizer.encode(_PROJECT, add_special=False)]
    room = llm.context_length - len(first) - len(hole) - len(own_name) - len(project) - max(1, reserved)
    extra: list[int] = []
    for ids in _snippet_ids(tokenizer, snippets, tokens.separator):
        if len(extra) + len(ids) > room:
            break
        extra += ids
    if not extra and not snippets:
        return [*first, *hole]
    return [*first, *project, *extra, *own_name, *hole]


def _snippet_ids(tokenizer: "Tokenizer", snippets: Sequence[Snippet], separator: int | None) -> Iterator[list[int]]:
    for snippet in snippets:
        text = tokenizer.encode(snippet.text, add_special=False)
        if separator is None:
            yield [*tokenizer.encode(_SNIPPET, add_special=False), *text]
        else:
            yield [separator, *tokenizer.encode(f"{snippet.filename}\n", add_special=False), *text]

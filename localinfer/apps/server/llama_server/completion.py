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
from localinfer.apps.server.llama_server.completion_request import (
    KNOWN,
    LlamaCompletionRequest,
    LlamaFields,
    generation_settings,
    sampling_params,
)
from localinfer.apps.server.replies.fields import check_text_count, seeded
from localinfer.apps.server.replies.mixed_prompts import Pieces, encode_pieces, read_prompts
from localinfer.apps.server.replies.reply import Reply, TextPlan
from localinfer.apps.server.replies.service import Service, caller_options, read_body, service_of
from localinfer.apps.server.transport.http import unsupported
from localinfer.apps.server.transport.known_fields import KnownFields
from localinfer.engine.sampling.filters import keep_candidates, scaled
from localinfer.engine.sampling.params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from localinfer.generation.completion import Stats, StreamEvent
    from localinfer.generation.stream import TextStream
    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.types import TokenLogprobs


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

    Raises: ApiError where the probabilities after sampling cannot be told from those.
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
    prompts = read_prompts(body.prompt, "prompt", at_most=_MOST_PROMPTS)

    def encode(llm: "LLM", pieces: Pieces, max_tokens: int | None) -> list[int]:
        return encode_pieces(llm.tokenizer, pieces, add_special=True, parse_special=True, max_tokens=max_tokens)

    return await serve_completion(request, body, [partial(encode, pieces=pieces) for pieces in prompts])


async def serve_completion(
    request: Request, body: LlamaFields, prompts: "Sequence[Callable[..., list[int]]]"
) -> Response:
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
    """One text of a request: what it is made of, and what came of it. copy: which of several of one prompt."""

    def __init__(
        self, body: LlamaFields, options: Mapping[str, Any], encode: "Callable[..., list[int]]", copy: int
    ) -> None:
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
        """Check the text's prompt and options, and begin it. caller: options that say for whom.

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
        prompt_ids = self._encode(llm, max_tokens=None if self.settings.get("context_shift") else llm.context_length)
        return llm.stream(prompt_ids, **seeded({**options, **caller}, self.copy))


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
        """Return whether the text would have gone on in a longer context."""
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

    input_prefix, input_suffix: what stands before and after it. prompt: goes on with the prefix, where the cursor is.
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
    """The ids of a prompt that the text in the hole goes on from.

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

"""`/completion`: llama-server's own completions, streamed or whole."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.progress import PromptProgress, progress_timings
from localinfer.apps.server.api.serving import serve_reply
from localinfer.apps.server.api.usage import timings
from localinfer.apps.server.api.writer import Event, ReplyWriter
from localinfer.apps.server.llama_server.completion_request import LlamaCompletionRequest, LlamaFields
from localinfer.apps.server.llama_server.generation_settings import generation_settings, sampling_params
from localinfer.apps.server.llama_server.probabilities import ShownProbabilities, needed_logprobs
from localinfer.apps.server.replies.fields import check_text_count, seeded
from localinfer.apps.server.replies.mixed_prompts import Pieces, encode_pieces, read_prompts
from localinfer.apps.server.replies.reply import Reply, TextPlan
from localinfer.apps.server.replies.service import Service, caller_options, read_body, service_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from localinfer.generation.completion import Stats, StreamEvent
    from localinfer.generation.stream import TextStream
    from localinfer.llm import LLM

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
        """What came since the last object."""
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
        """Whether the text would have gone on in a longer context."""
        if stats is not None and stats.dropped_tokens:
            return True
        most = text.settings.get("max_tokens")
        return reason == "length" and (most is None or len(text.token_ids) < most)


def figures(stats: "Stats") -> dict[str, Any]:
    """`timings` as llama-server has them: numbers alone."""
    return {name: value for name, value in timings(stats).items() if name not in _NOT_TIMINGS}


def words(stats: "Stats") -> dict[str, Any]:
    """What `timings` say in words."""
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

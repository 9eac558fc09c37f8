"""`/v1/completions`: prompts continued as they are, filled in, and scored."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.api.serving import ChoicesWriter, Event, LegacyLogprobs, PromptProgress, serve_reply
from localinfer.apps.server.replies.fields import (
    CacheSalt,
    GenerationFields,
    Prediction,
    ProbabilityCount,
    Prompts,
    SlotNumber,
    StreamOptions,
    TextCount,
    TokenLimit,
    check_text_count,
    first_limit,
    given,
    seeded,
    split_prompts,
)
from localinfer.apps.server.replies.reply import Reply, TextPlan
from localinfer.apps.server.replies.service import Service, caller_options, read_body, service_of
from localinfer.apps.server.transport.http import ApiError, unsupported
from localinfer.apps.server.transport.known_fields import COMPLETIONS

if TYPE_CHECKING:
    from localinfer.generation.stream import Stats, StreamEvent, TextStream
    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.types import TokenLogprobs

_MOST_PROMPTS = 64
_DEFAULT_TOKENS = 16
"""OpenAI's own default on this route, where the server has no other."""


class CompletionRequest(GenerationFields, kw_only=True):
    """The members of a completion request that are read.

    best_of: make so many texts and return the `n` of the largest mean log probability per token, best first.
    prompt_cache_key: names a cursor in an editor, say; a newer request with the same key ends the older one.
    timings_per_token, return_progress, n_probs, n_predict, id_slot: as on chats.
    return_token_ids: with the ids of each choice, and those of its prompt beside the first and in whole answers.
    add_special_tokens: begin a text with the model's first token, which one that begins with its name does not get
        twice. parse_special: read the names of special tokens in a text as those tokens; not in a prompt with a suffix,
        which is a file and no template, unless this is true.
    """

    known_fields: ClassVar = COMPLETIONS

    prompt: Prompts
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: TextCount | None = None
    best_of: TextCount | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None | UnsetType = UNSET
    echo: bool | None = None
    suffix: str | None = None
    prediction: Prediction | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_cache_key: str | None = None
    cache_salt: CacheSalt | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    n_probs: ProbabilityCount | None = None
    n_predict: TokenLimit | None = None
    id_slot: SlotNumber | None = None
    return_token_ids: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens returned beside each, None for no log probabilities."""
        return self.n_probs or None if self.logprobs is None else self.logprobs

    @property
    def parses_special(self) -> bool:
        """True if names of special tokens in a text are those tokens."""
        return self.suffix is None if self.parse_special is None else self.parse_special

    @property
    def num_made(self) -> int:
        """Texts made per prompt."""
        return self.best_of or self.n or 1

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request. Raises: ApiError."""
        if self.best_of is not None and (self.best_of < (self.n or 1) or self.stream):
            raise ApiError(
                400,
                "best_of is smaller than n, or the reply is to be streamed; make at least n, and not as a stream",
                param="best_of",
            )
        more = given(
            logprobs=0 if self.best_of is not None and self.num_logprobs is None else self.num_logprobs,
            constraint=self.constraint(),
            prediction=None if self.prediction is None else self.prediction.text(),
        )
        sent = self.n_predict if self.max_tokens is UNSET else self.max_tokens
        limit = {} if self.max_tokens is UNSET and self.n_predict is None else {"max_tokens": first_limit(sent)}
        return {**self.sampling_options(), **limit, **more}


async def completions(request: Request) -> Response:
    """Continue prompts, streamed or whole."""
    body = await read_body(request, CompletionRequest)
    options = {**body.generation_options(), **caller_options(request)}
    prompts = split_prompts(body.prompt, "prompt", at_most=_MOST_PROMPTS)
    check_text_count(len(prompts) * body.num_made, service_of(request).settings)

    def plan(llm: "LLM") -> list[TextPlan]:
        # The later texts of a prompt find it in the cache.
        return [
            TextPlan(
                partial(_open, llm, prompt, body, seeded(options, index, llm.defaults)),
                number * body.num_made if index else None,
            )
            for number, prompt in enumerate(prompts)
            for index in range(body.num_made)
        ]

    return await serve_reply(
        request,
        body,
        "cmpl",
        plan,
        lambda reply: _CompletionWriter(reply, body, prompts, service_of(request)),
        session=body.prompt_cache_key,
    )


def _open(llm: "LLM", prompt: str | Sequence[int], body: CompletionRequest, options: dict[str, Any]) -> "TextStream":
    options.setdefault("max_tokens", llm.defaults.get("max_tokens", _DEFAULT_TOKENS))
    most = None if options.get("context_shift") else llm.context_length
    if body.suffix is not None:
        return llm.stream(fill_in_prompt(llm.tokenizer, prompt, body, most), **options)
    if isinstance(prompt, str) and body.add_special_tokens is False:
        return llm.stream(_encoded(llm.tokenizer, prompt, body, max_tokens=most), **options)
    if isinstance(prompt, str):
        prompt = _without_first_token(llm.tokenizer, prompt, body)
    return llm.stream(prompt, parse_special=body.parses_special, **options)


def _without_first_token(tokenizer: "Tokenizer", prompt: str, body: CompletionRequest) -> str:
    """A text without the name of the token that it gets anyway: templates of clients write it."""
    if not (tokenizer.adds_bos and body.parses_special) or tokenizer.bos_token_id is None:
        return prompt
    return prompt.removeprefix(tokenizer.token_text(tokenizer.bos_token_id))


def _encoded(
    tokenizer: "Tokenizer", text: str, body: CompletionRequest, *, max_tokens: int | None, add_special: bool = False
) -> list[int]:
    return tokenizer.encode(text, add_special, body.parses_special, max_tokens=max_tokens)


def fill_in_prompt(
    tokenizer: "Tokenizer", prompt: str | Sequence[int], body: CompletionRequest, max_tokens: int | None
) -> list[int]:
    """The ids of a prompt whose completion stands before `suffix`: first what is before, then what is after.

    Raises: ApiError 400 if the vocabulary has no tokens for that; ContextLengthError for a long text of more than
    `max_tokens`. Source: Bavarian et al., arXiv 2207.14255 (PSM).
    """
    tokens = tokenizer.fill_in_tokens
    if tokens is None:
        raise unsupported(
            "suffix was given, but this model has no tokens for filling in; leave it out, or use a model for code",
            "suffix",
        )
    encode = partial(_encoded, tokenizer, body=body, max_tokens=max_tokens)
    has_first = tokenizer.adds_bos and body.add_special_tokens is not False
    first = [tokenizer.bos_token_id] if has_first and tokenizer.bos_token_id is not None else []
    before = encode(prompt) if isinstance(prompt, str) else prompt
    return [*first, *tokens.around(before, encode(body.suffix or ""))]


class _CompletionWriter(ChoicesWriter):
    """Chunks: a prompt that is echoed at once, text as it comes, each choice's end."""

    def __init__(
        self, reply: Reply, body: CompletionRequest, prompts: Sequence[str | Sequence[int]], service: Service
    ) -> None:
        super().__init__(reply, "text_completion", body.stream_options, tells_timings=bool(body.timings_per_token))
        if body.return_progress and body.stream:
            self.progress = PromptProgress(reply, service.num_ahead)
        self._body = body
        self._prompts = prompts
        self._choices = [_Choice(body, reply.llm.tokenizer) for _ in range(reply.num_texts)]
        if body.echo:
            # Every token of a prompt is written out where its log probabilities are asked for.
            self.prepare = self._echo_prompts

    def _echo_prompts(self) -> None:
        llm, top = self.reply.llm, self._body.num_logprobs
        for number, prompt in enumerate(self._prompts):
            text = prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt)
            scored: list[tuple[int, TokenLogprobs | None]] = []
            if top is not None:
                token_ids = prompt if not isinstance(prompt, str) else self._prompt_ids(prompt)
                scored = list(zip(token_ids, llm.score(token_ids, top=top), strict=True))
            for choice in self._choices[number * self._body.num_made :][: self._body.num_made]:
                choice.texts.append(text)
                for token_id, found in scored:
                    choice.logprobs.add(token_id, found)

    def _prompt_ids(self, prompt: str) -> list[int]:
        """The ids that the prompt was computed as."""
        llm, body = self.reply.llm, self._body
        has_first = body.add_special_tokens is not False
        text = _without_first_token(llm.tokenizer, prompt, body) if has_first else prompt
        return _encoded(llm.tokenizer, text, body, max_tokens=llm.context_length, add_special=has_first)

    def begin(self) -> Iterator[Event]:
        if self._body.echo:
            for index, choice in enumerate(self._choices):
                yield self.chunk(choice.part(index))

    def add(self, index: int, token: "StreamEvent") -> Iterator[Event]:
        if index == 0:
            yield from self.progress_chunks(is_read=True)
        choice = self._choices[index]
        choice.add(token)
        if self._body.stream and (token.text or self._body.num_logprobs is not None):
            yield self.token_chunk({**choice.part(index), **self._prompt_ids_of(index)})

    def empty_choice(self) -> dict[str, Any]:
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": None}

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterator[Event]:
        self._choices[index].finish_reason = reason
        if self._body.stream:
            yield self.last_chunk({**self._choices[index].part(index), **self._prompt_ids_of(index)}, stats)

    def _prompt_ids_of(self, index: int) -> dict[str, Any]:
        """The ids of a choice's prompt, once."""
        choice = self._choices[index]
        found = self.reply.prompt_ids(index) if self._body.return_token_ids and not choice.has_told_prompt else None
        choice.has_told_prompt = True
        return {} if found is None else {"prompt_token_ids": found.tolist()}

    def whole(self) -> dict[str, Any]:
        body, kept = self._body, []
        for start in range(0, len(self._choices), body.num_made):
            made = self._choices[start : start + body.num_made]
            for index, choice in enumerate(made, start):
                choice.prompt_ids = self._prompt_ids_of(index)
            if body.best_of is not None:
                made.sort(key=lambda choice: choice.mean_logprob, reverse=True)
            kept += made[: body.n or 1]
        choices = [{**choice.part(index), **choice.prompt_ids} for index, choice in enumerate(kept)]
        return self.completion([{**choice, "finish_reason": choice["finish_reason"] or "length"} for choice in choices])


class _Choice:
    """One choice: its prompt first, where that is echoed, then its tokens as they come."""

    def __init__(self, body: CompletionRequest, tokenizer: "Tokenizer") -> None:
        self.finish_reason: str | None = None
        self.texts: list[str] = []
        self.logprobs = LegacyLogprobs(tokenizer)
        self.has_told_prompt = False
        self.prompt_ids: dict[str, Any] = {}
        self._token_ids: list[int] | None = [] if body.return_token_ids else None
        self._shows_logprobs = body.num_logprobs is not None
        self._sum = 0.0
        self._num_tokens = 0

    @property
    def mean_logprob(self) -> float:
        """Of the tokens that were generated."""
        return self._sum / max(1, self._num_tokens)

    def add(self, event: "StreamEvent") -> None:
        """Take the next token."""
        self.texts.append(event.text)
        if self._token_ids is not None and event.token_id >= 0:
            self._token_ids.append(event.token_id)
        if event.logprobs is not None:
            self._sum += event.logprobs.logprob
            self._num_tokens += 1
            if self._shows_logprobs:
                self.logprobs.add(event.token_id, event.logprobs)

    def part(self, index: int) -> dict[str, Any]:
        """A choice of a chunk with the text since the last call."""
        text = "".join(self.texts)
        self.texts.clear()
        logprobs = self.logprobs.take() if self._shows_logprobs else None
        made = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason}
        if self._token_ids is not None:
            made["token_ids"], self._token_ids = self._token_ids, []
        return made

"""`/v1/completions`: prompts continued as they are, and scored."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.constraint_fields import ConstraintFields
from localinfer.server.event_stream import DONE, PING, EventStream, data_frame
from localinfer.server.fill_in import fill_prompt
from localinfer.server.json_body import read_json
from localinfer.server.prompts import Prompts, split_prompts
from localinfer.server.reply import End, Reply, Silence, TextPlan, Token
from localinfer.server.routing import service_of
from localinfer.server.sampling_fields import MAX_TEXTS, Prediction, StreamOptions, TextCount, seeded
from localinfer.server.service import unless_gone
from localinfer.server.usage import timings, usage
from localinfer.server.wire_errors import json_response, to_api_error

if TYPE_CHECKING:
    from localinfer.llm import LLM

_DEFAULT_TOKENS = 16
"""OpenAI's own default on this route."""
_MOST_PROMPTS = 64


class CompletionRequest(ConstraintFields, kw_only=True):
    """The members of a completion request that are read; all others are ignored."""

    prompt: Prompts
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: TextCount | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_TEXTS)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = _DEFAULT_TOKENS
    echo: bool | None = None
    suffix: str | None = None
    prediction: Prediction | None = None

    def generation_options(self) -> dict[str, Any]:
        """The engine's options for this request."""
        options = {**self.options(), "max_tokens": self.max_tokens}
        if self.prediction is not None:
            options["prediction"] = self.prediction.text()
        constraint = self.constraint()
        if constraint is not None:
            options["constraint"] = constraint
        return options


async def completions(request: Request) -> Response:
    """Continue prompts, streamed or whole."""
    service = service_of(request)
    body = await read_json(request, CompletionRequest, service.settings)
    prompts = split_prompts(body.prompt, "prompt", at_most=_MOST_PROMPTS)
    echoes: list[str] = []

    def plan(llm: "LLM") -> list[TextPlan]:
        if body.echo:
            echoes.extend(_prompt_text(llm, prompt) for prompt in prompts for _ in range(body.n or 1))
        return _plan(llm, prompts, body)

    reply = await service.begin(request, body.model, "cmpl", plan)
    if body.stream:
        return EventStream(_frames(reply, body, echoes, service.settings.ping_seconds), reply.close)
    try:
        return json_response(await unless_gone(request, _completion(reply, echoes)))
    finally:
        reply.close()


def _plan(llm: "LLM", prompts: Sequence[str | Sequence[int]], body: CompletionRequest) -> list[TextPlan]:
    """One text per prompt and choice; later choices of a prompt find it in the cache."""
    options, count = body.generation_options(), body.n or 1
    plans = []
    for number, prompt in enumerate(prompts):
        asked = prompt if body.suffix is None else fill_prompt(llm.tokenizer, prompt, body.suffix)
        for index in range(count):
            open_stream = partial(llm.stream, asked, **seeded(options, index))
            plans.append(TextPlan(open_stream, number * count if index else None))
    return plans


def _prompt_text(llm: "LLM", prompt: str | Sequence[int]) -> str:
    return prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt)


async def _completion(reply: Reply, echoes: Sequence[str]) -> dict[str, Any]:
    texts = [[echo] for echo in echoes] or [[] for _ in range(reply.num_texts)]
    reasons = ["length"] * reply.num_texts
    async for event in reply.events():
        match event:
            case Token(index, token):
                texts[index].append(token.text)
            case End(index, reason, _):
                reasons[index] = reason
    choices = [
        {"index": index, "text": "".join(texts[index]), "logprobs": None, "finish_reason": reasons[index]}
        for index in range(reply.num_texts)
    ]
    first = reply.stats[0]
    costs = {"usage": usage(reply), "timings": None if first is None else timings(first)}
    return {**_envelope(reply), "choices": choices, **costs}


async def _frames(
    reply: Reply, body: CompletionRequest, echoes: Sequence[str], ping_seconds: float
) -> AsyncIterator[bytes]:
    has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    envelope = _envelope(reply)
    nothing = {"usage": None} if has_usage else {}

    def chunk(index: int, text: str, reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        return data_frame({**envelope, "choices": [choice], **nothing, **more})

    for index, echo in enumerate(echoes):
        yield chunk(index, echo)
    try:
        async for event in reply.events(ping_seconds):
            match event:
                case Token(index, token):
                    if token.text:
                        yield chunk(index, token.text)
                case End(index, reason, stats):
                    yield chunk(index, "", reason, **({} if stats is None else {"timings": timings(stats)}))
                case Silence():
                    yield PING
        if has_usage:
            yield data_frame({**envelope, "choices": [], "usage": usage(reply)})
    except Exception as error:
        yield data_frame(to_api_error(error, reply.id).body())
    yield DONE


def _envelope(reply: Reply) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model_id,
        "system_fingerprint": reply.fingerprint,
    }

"""`/v1/completions`: prompts continued as they are, and scored."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from localinfer.server.api.completion_wire import CompletionRequest, LegacyChoice
from localinfer.server.api.routing import owner_of, service_of
from localinfer.server.replies.fill_in import fill_prompt
from localinfer.server.replies.prompts import split_prompts
from localinfer.server.replies.reply import End, Reply, Silence, TextPlan, Token
from localinfer.server.replies.sampling_fields import seeded
from localinfer.server.replies.service import unless_gone
from localinfer.server.replies.usage import stream_usage, timings, usage
from localinfer.server.transport.errors import ApiError, json_response, to_api_error
from localinfer.server.transport.event_stream import DONE, PING, EventStream, data_frame
from localinfer.server.transport.json_body import read_json

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.sampling.filters import TokenLogprobs

_MOST_PROMPTS = 64


@dataclass
class _Prompt:
    """A prompt: as given, and what `echo` tells of it. scores: of `token_ids`, if log probabilities are asked for."""

    given: str | Sequence[int]
    text: str = ""
    token_ids: Sequence[int] = ()
    scores: "Sequence[TokenLogprobs | None]" = ()


async def completions(request: Request) -> Response:
    """Continue prompts, streamed or whole."""
    service = service_of(request)
    body = await read_json(request, CompletionRequest, service.settings)
    options = {**body.generation_options(), "owner": owner_of(request)}
    prompts = [_Prompt(given) for given in split_prompts(body.prompt, "prompt", at_most=_MOST_PROMPTS)]
    if len(prompts) * body.num_made > service.settings.max_generations:
        raise ApiError(400, "prompt times n asks for too many texts; ask for fewer at a time", param="n")

    def plan(llm: "LLM") -> Sequence[TextPlan] | Coroutine[Any, Any, Sequence[TextPlan]]:
        if body.suffix is None:
            return _plan(llm, prompts, body, options)
        # To fill in, texts are encoded before they are planned.
        return asyncio.to_thread(_plan, llm, prompts, body, options)

    reply = await service.begin(request, body.model, "cmpl", plan, session=body.prompt_cache_key)
    try:
        if body.echo:
            # Every token of a prompt is written out where its log probabilities are told.
            choices = await unless_gone(request, asyncio.to_thread(_echoing_choices, reply, body, prompts))
        else:
            choices = [LegacyChoice(body, reply.llm.tokenizer) for _ in range(reply.num_texts)]
        if not body.stream:
            return json_response(await unless_gone(request, _completion(reply, body, choices)))
    except BaseException:
        reply.close()
        raise
    finally:
        if not body.stream:
            reply.close()
    return EventStream(_frames(reply, body, choices, service.settings.ping_seconds), reply.close)


def _plan(
    llm: "LLM", prompts: Sequence[_Prompt], body: CompletionRequest, options: dict[str, Any]
) -> Sequence[TextPlan]:
    """The texts of each prompt; the later ones find it in the cache."""
    plans = []
    for number, prompt in enumerate(prompts):
        asked = prompt.given
        if body.suffix is not None:
            most = None if options.get("context_shift") else llm.context_length
            asked = fill_prompt(llm.tokenizer, prompt.given, body.suffix, most)
        for index in range(body.num_made):
            open_stream = partial(llm.stream, asked, **seeded(options, index))
            plans.append(TextPlan(open_stream, number * body.num_made if index else None))
    return plans


def _look_at(llm: "LLM", prompts: Sequence[_Prompt], logprobs: int | None) -> None:
    """Learn what has to be told of the prompts themselves."""
    tokenizer = llm.tokenizer
    for prompt in prompts:
        prompt.text = prompt.given if isinstance(prompt.given, str) else tokenizer.decode(prompt.given)
        if logprobs is not None:
            given = prompt.given
            prompt.token_ids = (
                tokenizer.encode(given, max_tokens=llm.context_length) if isinstance(given, str) else given
            )
            prompt.scores = llm.score(prompt.token_ids, top=logprobs)


def _echoing_choices(reply: Reply, body: CompletionRequest, prompts: Sequence[_Prompt]) -> list[LegacyChoice]:
    """Choices that begin with their prompts, and with what has to be told of those."""
    _look_at(reply.llm, prompts, body.logprobs)
    made = []
    for index in range(reply.num_texts):
        prompt = prompts[index // body.num_made]
        made.append(LegacyChoice(body, reply.llm.tokenizer, prompt.text, prompt.token_ids, prompt.scores))
    return made


async def _completion(reply: Reply, body: CompletionRequest, choices: list[LegacyChoice]) -> dict[str, Any]:
    async for event in reply.events():
        match event:
            case Token(index, token):
                choices[index].add(token)
            case End(index, reason, _):
                choices[index].finish_reason = reason
    kept: list[LegacyChoice] = []
    for start in range(0, len(choices), body.num_made):
        made = choices[start : start + body.num_made]
        if body.best_of is not None:
            made.sort(key=lambda choice: choice.mean_logprob, reverse=True)
        kept += made[: body.n or 1]
    first = reply.stats[0]
    costs = {"usage": usage(reply), "timings": None if first is None else timings(first)}
    return {**_envelope(reply), "choices": [choice.whole(index) for index, choice in enumerate(kept)], **costs}


async def _frames(
    reply: Reply, body: CompletionRequest, choices: Sequence[LegacyChoice], ping_seconds: float
) -> AsyncIterator[bytes]:
    has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    envelope = _envelope(reply)
    used = stream_usage(reply, body.stream_options)

    def frame(index: int, **more: Any) -> bytes:
        return data_frame({**envelope, "choices": [choices[index].part(index)], **used(), **more})

    if body.echo:
        for index in range(reply.num_texts):
            yield frame(index)
    try:
        async for event in reply.events(ping_seconds):
            match event:
                case Token(index, token):
                    choices[index].add(token)
                    if token.text or body.logprobs is not None:
                        yield frame(index)
                case End(index, reason, stats):
                    choices[index].finish_reason = reason
                    yield frame(index, **({} if stats is None else {"timings": timings(stats)}))
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

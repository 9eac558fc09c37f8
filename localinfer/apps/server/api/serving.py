"""From a request for text to its answer, streamed or whole: writers of events, and the one way of all handlers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localinfer.apps.server.replies.compacted_chats import CompactedChat, CompactedHeads
from localinfer.apps.server.replies.fields import StreamOptions, seeded, without_missing_thinking
from localinfer.apps.server.replies.relay import RELAY, ReplyRelay
from localinfer.apps.server.replies.reply import End, Reply, Silence, TextPlan, Token
from localinfer.apps.server.replies.service import Plan, service_of
from localinfer.apps.server.transport.bodies import unless_gone
from localinfer.apps.server.transport.http import DONE, ApiError, EventStream, event_frame, json_response, to_api_error

if TYPE_CHECKING:
    from localinfer.generation.stream import Stats, StreamEvent, TextStream
    from localinfer.llm import LLM
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.types import TokenLogprobs


_LEAST = -9999.0
"""Log probability of a token that is ruled out in OpenAI's formats: JSON has no infinity."""


def chat_logprobs(tokenizer: "Tokenizer", token_id: int, found: "TokenLogprobs") -> dict[str, Any]:
    """A token of a chat completion's `logprobs.content`."""
    return {
        **_token(tokenizer, token_id, found.logprob),
        "top_logprobs": [_token(tokenizer, other, logprob) for other, logprob in found.top],
    }


class LegacyLogprobs:
    """A completion's `logprobs`: tokens, their log probabilities, the likeliest others, and where each begins."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._members: dict[str, list[Any]] = {}
        self.take()

    def add(self, token_id: int, found: "TokenLogprobs | None") -> None:
        """Append a token; found: None for the first of a text, which nothing predicts."""
        text = _text(self._tokenizer, token_id)
        top: dict[str, float] = {}
        for other, logprob in () if found is None else found.top:
            # Several tokens may be written alike; the likeliest comes first.
            top.setdefault(_text(self._tokenizer, other), max(logprob, _LEAST))
        self._members["tokens"].append(text)
        self._members["token_logprobs"].append(None if found is None else max(found.logprob, _LEAST))
        self._members["top_logprobs"].append(None if found is None else top)
        self._members["text_offset"].append(self._offset)
        self._offset += len(text)

    def take(self) -> dict[str, Any]:
        """Entries since the last call, in the wire's shape."""
        taken = self._members
        self._members = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        return taken


def _token(tokenizer: "Tokenizer", token_id: int, logprob: float) -> dict[str, Any]:
    spelled = list(_bytes(tokenizer, token_id))
    return {"token": _text(tokenizer, token_id), "logprob": max(logprob, _LEAST), "bytes": spelled}


def _text(tokenizer: "Tokenizer", token_id: int) -> str:
    return _bytes(tokenizer, token_id).decode("utf-8", "replace")


def _bytes(tokenizer: "Tokenizer", token_id: int) -> bytes:
    # A model may have more logits than its vocabulary has tokens.
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""


def usage(reply: Reply) -> dict[str, Any]:
    """OpenAI's `usage` of the texts that have ended; a prompt that several share counts once."""
    stats = [one for one in reply.stats if one is not None]
    prompts = [one for index, one in enumerate(reply.stats) if one is not None and not reply.shares_prompt(index)]
    prompt = sum(one.prompt_tokens for one in prompts)
    completion = sum(one.completion_tokens for one in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": reply.num_reasoning_tokens,
            "accepted_prediction_tokens": sum(one.accepted_tokens for one in stats),
            "rejected_prediction_tokens": sum(one.drafted_tokens - one.accepted_tokens for one in stats),
        },
        **compaction(stats),
    }


def compaction(stats: Sequence["Stats"]) -> dict[str, Any]:
    """The member `compaction` of every API's usage: the summary from which the conversation was answered, if any."""
    found = next((one.compaction for one in stats if one.compaction is not None), None)
    return {} if found is None else {"compaction": asdict(found)}


def running_usage(reply: Reply) -> dict[str, Any]:
    """OpenAI's `usage` of a reply so far."""
    prompt, completion = reply.num_used()
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def timings(stats: "Stats") -> dict[str, Any]:
    """Timings of one text: llama.cpp's names, times in milliseconds."""
    computed = stats.prompt_tokens - stats.cached_tokens
    first, rate = stats.time_to_first_token_seconds, stats.decode_tokens_per_second
    decoded = max(0, stats.completion_tokens - 1)
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": 1e3 * first,
        "prompt_per_token_ms": 1e3 * first / computed if computed else 0.0,
        "prompt_per_second": computed / first if first > 0 else 0.0,
        "predicted_n": stats.completion_tokens,
        "predicted_ms": 1e3 * decoded / rate if rate > 0 else 0.0,
        "predicted_per_token_ms": 1e3 / rate if rate > 0 else 0.0,
        "predicted_per_second": rate,
        "draft_n": stats.drafted_tokens,
        "draft_n_accepted": stats.accepted_tokens,
        **({"cache_miss": stats.cache_miss_summary} if stats.cache_miss_summary is not None else {}),
        **({"notices": list(stats.notices)} if stats.notices else {}),
    }


class PromptProgress:
    """Reports under llama-server's names: a first one before anything was read, a last one when all was.

    num_ahead: number of replies before one, where that is reported too.
    """

    def __init__(self, reply: Reply, num_ahead: Callable[[Reply], int] | None = None) -> None:
        self._reply = reply
        self._num_ahead = num_ahead
        self._processed: int | None = None
        self._is_done = False

    def reports(self, *, is_read: bool) -> Iterator[dict[str, Any]]:
        """Report of progress, nothing if that was said. is_read: the first token is there."""
        if self._is_done:
            return
        found = self._reply.progress()
        if self._num_ahead is not None:
            found["position"] = self._num_ahead(self._reply)
        self._is_done = is_read
        if is_read:
            found["processed"] = found["total"]
        if self._processed is None:
            self._processed = found["cache"]
            yield {**found, "processed": found["cache"], "time_ms": 0.0}
        if found["processed"] > self._processed:
            self._processed = found["processed"]
            yield found


def progress_timings(report: dict[str, Any]) -> dict[str, Any]:
    """The `timings` of a reply of which no token was generated yet."""
    computed, milliseconds = report["processed"] - report["cache"], report["time_ms"]
    return {
        "cache_n": report["cache"],
        "prompt_n": computed,
        "prompt_ms": milliseconds,
        "prompt_per_token_ms": milliseconds / computed if computed else 0.0,
        "prompt_per_second": 1e3 * computed / milliseconds if milliseconds else 0.0,
        "predicted_n": 0,
        "predicted_ms": 0.0,
        "predicted_per_token_ms": 0.0,
        "predicted_per_second": 0.0,
    }


Event = dict[str, Any]


class Delta(NamedTuple):
    """Text that an event adds to the reply, to its reasoning, or to a tool call's arguments.

    call: which call of the reply, from 0. call_id, name: with the first delta of a call only, whose text is empty.
    """

    kind: Literal["text", "reasoning", "call"]
    text: str
    call: int = 0
    call_id: str | None = None
    name: str | None = None


def deltas_of(event: "StreamEvent") -> Iterator[Delta]:
    """The deltas of an event, none if it adds nothing."""
    if event.reasoning:
        yield Delta("reasoning", event.reasoning)
    if event.text:
        yield Delta("text", event.text)
    for delta in event.tool_calls:
        yield Delta("call", delta.arguments, delta.index, delta.id, delta.name)


def whole_object(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None of one that was cut short."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return None


class ReplyWriter:
    """One reply in a wire format: the events that its tokens become on a stream, and the object they are together.

    prepare: run in a thread before anything is written. last_frame: written after the last event of a stream.
    stream, frame: how a stream is answered, and an event written on it. respond: how what is not streamed is answered.
    """

    prepare: Callable[[], None] | None = None
    last_frame = b""
    stream: type[EventStream] = EventStream
    frame: Callable[[Event], bytes] = staticmethod(event_frame)
    respond: Callable[[Any], Response] = staticmethod(json_response)

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    def begin(self) -> Iterable[Event]:
        """Events that a stream begins with, before any text is there."""
        return ()

    def add(self, index: int, token: "StreamEvent") -> Iterable[Event]:
        """Take the next token of a text."""
        raise NotImplementedError

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterable[Event]:
        """Take the end of a text."""
        raise NotImplementedError

    def silence(self) -> "Iterable[Event | None]":
        """Event of a stream when nothing came for a while; None for a ping, which is no event."""
        return (None,)

    def finish(self) -> Iterable[Event]:
        """Events that a stream ends with, if nothing failed."""
        return ()

    async def settle(self) -> None:
        """Awaited before the last events, or the whole answer, are sent: until what they report is so."""

    def failure(self, error: ApiError) -> Event:
        """Events that a stream ends with if something failed."""
        return error.body()

    def failures(self, error: ApiError) -> Iterable[Event]:
        """The same, where it is several events."""
        return (self.failure(error),)

    def whole(self) -> Any:
        """The answer that is not streamed, when all texts have ended."""
        raise NotImplementedError


class ChoicesWriter(ReplyWriter):
    """Common parts of OpenAI's completions and chat completions: chunks of choices, usage, and `[DONE]`.

    tells_timings: in each chunk. progress: reports of the prompt's reading, None for none.
    """

    last_frame = DONE

    progress: PromptProgress | None = None

    def __init__(
        self, reply: Reply, kind: str, stream_options: StreamOptions | None, *, tells_timings: bool = False
    ) -> None:
        super().__init__(reply)
        self._tells_timings = tells_timings
        self._envelope = {
            "id": reply.id,
            "object": kind,
            "created": reply.created,
            "model": reply.model_id,
            "system_fingerprint": reply.fingerprint,
        }
        self._has_usage = stream_options is not None and bool(stream_options.include_usage)
        self._counts_on = stream_options is not None and bool(stream_options.continuous_usage_stats)

    def chunk(self, choice: dict[str, Any], **more: Any) -> Event:
        """An event with what came of one choice."""
        made = {**self._envelope, "choices": [choice]}
        if self._has_usage:
            made["usage"] = running_usage(self.reply) if self._counts_on else None
        if more:
            made.update(more)
        return made

    def token_chunk(self, choice: dict[str, Any]) -> Event:
        """The event for a token, with the timings so far where they are wanted."""
        stats = self.reply.stats_so_far(choice["index"]) if self._tells_timings else None
        return self.chunk(choice) if stats is None else self.chunk(choice, timings=timings(stats))

    def empty_choice(self) -> dict[str, Any]:
        """A choice to which nothing is added."""
        raise NotImplementedError

    def progress_chunks(self, *, is_read: bool) -> Iterator[Event]:
        """The events for what is new about the reading of the prompt. is_read: the first token is there."""
        if self.progress is not None:
            for report in self.progress.reports(is_read=is_read):
                yield self.chunk(self.empty_choice(), prompt_progress=report)

    def silence(self) -> Iterable[Event | None]:
        return list(self.progress_chunks(is_read=False)) or (None,)

    def last_chunk(self, choice: dict[str, Any], stats: "Stats | None") -> Event:
        """The event that ends a choice."""
        return self.chunk(choice, **({} if stats is None else {"timings": timings(stats)}))

    def finish(self) -> Iterable[Event]:
        if self._has_usage:
            first = self.reply.stats[0]
            costs = {"usage": usage(self.reply), "timings": None if first is None else timings(first)}
            yield {**self._envelope, "choices": [], **costs}

    def completion(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole answer."""
        first = self.reply.stats[0]
        costs = {"usage": usage(self.reply), "timings": None if first is None else timings(first)}
        return {**self._envelope, "choices": choices, **costs}


class BlockWriter(ReplyWriter):
    """A reply as blocks, of which one is open at a time: text, reasoning, each tool call.

    A block is closed when a delta of another comes, or by `close_block`. blocks: all of them, the open one last.
    """

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.blocks: list[dict[str, Any]] = []
        self._open: tuple[str, int] | None = None
        self._texts: list[str] = []

    def add(self, index: int, token: "StreamEvent") -> Iterator[Event]:
        for delta in deltas_of(token):
            kind = (delta.kind, delta.call)
            if kind != self._open:
                yield from self.close_block()
                self._open = kind
                yield from self.block_opened(delta)
            if delta.text:
                self._texts.append(delta.text)
                yield from self.block_grown(delta)

    @property
    def is_open(self) -> bool:
        """True if the last block may still grow."""
        return self._open is not None

    def close_block(self) -> Iterator[Event]:
        """Close the block that is open, if one is."""
        if self._open is not None:
            kind, text = self._open[0], "".join(self._texts)
            self._open, self._texts = None, []
            yield from self.block_closed(kind, text)

    def block_opened(self, delta: Delta) -> Iterator[Event]:
        """Append an empty block of a delta's kind."""
        raise NotImplementedError

    def block_grown(self, delta: Delta) -> Iterator[Event]:
        """The events for what a delta adds to the open block."""
        raise NotImplementedError

    def block_closed(self, kind: str, text: str) -> Iterator[Event]:
        """Put the whole text into the last block."""
        raise NotImplementedError


async def serve_reply(
    request: Request,
    body: Any,
    kind: str,
    plan: Plan,
    make_writer: Callable[[Reply], ReplyWriter],
    *,
    session: str | None = None,
    ping_seconds: float | None = None,
) -> Response:
    """Generate what a request asks for and answer it, streamed or whole.

    body: the request's record, with its members `model` and `stream`. kind, plan, session: of `Service.begin`.
    ping_seconds: between signs of life in a stream, if not the server's.
    """
    service = service_of(request)
    id_slot = getattr(body, "id_slot", None)
    relay: ReplyRelay | None = request.scope.get("state", {}).get(RELAY)
    reply = await service.begin(request, body.model, kind, plan, session=session, id_slot=id_slot, relay=relay)
    try:
        writer = make_writer(reply)
        if writer.prepare is not None:
            await unless_gone(request.receive, asyncio.to_thread(writer.prepare))
        if not body.stream:
            return writer.respond(await unless_gone(request.receive, _whole(writer)))
    except BaseException:
        reply.close()
        raise
    finally:
        if not body.stream:
            reply.close()
    return writer.stream(reply_frames(writer, ping_seconds or service.settings.ping_seconds), reply.close)


async def _whole(writer: ReplyWriter) -> Any:
    reply = writer.reply
    async for event in reply.events():
        for _ in _written(writer, event):
            pass
        if reply.relay is not None:
            _relayed(reply, reply.relay, event, None)
    whole = writer.whole()
    await writer.settle()
    return whole


async def reply_frames(writer: ReplyWriter, ping_seconds: float) -> AsyncIterator[bytes]:
    """A reply as a stream: frames of events, and pings while nothing comes."""
    reply = writer.reply
    if reply.relay is not None:
        async for relayed in _relayed_frames(writer, reply.relay, ping_seconds):
            yield relayed
        return
    for event in writer.begin():
        yield writer.frame(event)
    try:
        async for item in reply.events(ping_seconds):
            for frame in _frames(writer, item):
                yield frame
        last = list(writer.finish())
        await writer.settle()
        for event in last:
            yield writer.frame(event)
    except Exception as error:
        for event in writer.failures(to_api_error(error, reply.id)):
            yield writer.frame(event)
    if writer.last_frame:
        yield writer.last_frame


async def _relayed_frames(writer: ReplyWriter, relay: ReplyRelay, ping_seconds: float) -> AsyncIterator[bytes]:
    """As `reply_frames`, in pieces of which each is sent whole or not at all, without those that were sent before."""
    reply = writer.reply
    if begun := relay.sent("begin", 0, [writer.frame(event) for event in writer.begin()]):
        yield begun
    try:
        async for item in reply.events(ping_seconds):
            if made := _relayed(reply, relay, item, list(_frames(writer, item))):
                yield made
        last = [writer.frame(event) for event in writer.finish()]
        await writer.settle()
    except Exception as error:
        last = [writer.frame(event) for event in writer.failures(to_api_error(error, reply.id))]
    if tail := relay.sent("tail", 0, [*last, writer.last_frame]):
        yield tail


def _frames(writer: ReplyWriter, item: Token | End | Silence) -> Iterator[bytes]:
    for made in _written(writer, item):
        yield writer.stream.ping if made is None else writer.frame(made)


def _relayed(reply: Reply, relay: ReplyRelay, item: Token | End | Silence, frames: list[bytes] | None) -> bytes:
    """Bytes to be sent of the frames of an event; frames: None for an answer that is sent as a whole."""
    if isinstance(item, Token) and item.event.token_id >= 0:
        stats = reply.stats_so_far(item.index)
        return relay.token(item.index, item.event.token_id, None if stats is None else stats.cached_tokens, frames)
    if isinstance(item, End) and frames is not None:
        return relay.sent("end", item.index, frames)
    return b"".join(frames or ())


def _written(writer: ReplyWriter, item: Token | End | Silence) -> Iterable[Event | None]:
    if isinstance(item, Token):
        return writer.add(item.index, item.event)
    if isinstance(item, End):
        return writer.end(item.index, item.finish_reason, item.stats)
    return writer.silence()


def chat_plan(
    messages: Sequence[Mapping[str, Any]],
    options: dict[str, Any],
    count: int = 1,
    *,
    heads: CompactedHeads | None = None,
) -> Plan:
    """One answer to a chat per choice; the later ones find the prompt in the cache.

    heads: summaries of a server that compacts chats.
    """

    def open_stream(llm: "LLM", index: int) -> "TextStream":
        return llm.stream_chat(messages, **seeded(without_missing_thinking(llm, options), index, llm.defaults))

    def text_plan(llm: "LLM", index: int) -> TextPlan:
        follows = 0 if index else None
        if heads is None:
            return TextPlan(partial(open_stream, llm, index), follows)
        chat = CompactedChat(heads, llm, messages, options, index)
        return TextPlan(chat.open, follows, summaries=chat.summaries)

    def plan(llm: "LLM") -> list[TextPlan]:
        return [text_plan(llm, index) for index in range(count)]

    return plan

"""What a wire format adds to a reply: the events that its tokens become, and the object they are together."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from localinfer.apps.server.api.progress import PromptProgress
from localinfer.apps.server.api.usage import running_usage, timings, usage
from localinfer.apps.server.replies.fields import StreamOptions
from localinfer.apps.server.replies.reply import Reply
from localinfer.apps.server.transport.http import DONE, ApiError, EventStream, event_frame

if TYPE_CHECKING:
    from localinfer.generation.completion import Stats, StreamEvent

Event = dict[str, Any]


class Delta(NamedTuple):
    """What an event adds to the reply's text, to its reasoning, or to a tool call's arguments.

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


class ReplyWriter:
    """One reply in a wire format: the events that its tokens become on a stream, and the object they are together.

    prepare: run in a thread before anything is written. last_frame: written after the last event of a stream.
    stream, frame: how a stream is answered, and an event written on it.
    """

    prepare: Callable[[], None] | None = None
    last_frame = b""
    stream: type[EventStream] = EventStream
    frame: Callable[[Event], bytes] = staticmethod(event_frame)

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    def begin(self) -> Iterable[Event]:
        """What a stream begins with, before any text is there."""
        return ()

    def add(self, index: int, token: "StreamEvent") -> Iterable[Event]:
        """Take the next token of a text."""
        raise NotImplementedError

    def end(self, index: int, reason: str, stats: "Stats | None") -> Iterable[Event]:
        """Take the end of a text."""
        raise NotImplementedError

    def silence(self) -> "Iterable[Event | None]":
        """What a stream says when nothing came for a while; None for a ping, which is no event."""
        return (None,)

    def finish(self) -> Iterable[Event]:
        """What a stream ends with, if nothing failed."""
        return ()

    async def settle(self) -> None:
        """Awaited before the last events, or the whole answer, are sent: until what they report is so."""

    def failure(self, error: ApiError) -> Event:
        """What a stream ends with if something failed."""
        return error.body()

    def failures(self, error: ApiError) -> Iterable[Event]:
        """The same, where it is several events."""
        return (self.failure(error),)

    def whole(self) -> Any:
        """The answer that is not streamed, when all texts have ended."""
        raise NotImplementedError


class ChoicesWriter(ReplyWriter):
    """What OpenAI's completions and chat completions share: chunks of choices, usage, and `[DONE]`.

    tells_timings: in each chunk. progress: what is told of the reading of the prompt, None for nothing.
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
                if (grown := self.block_grown(delta)) is not None:
                    yield grown

    @property
    def is_open(self) -> bool:
        """Whether the last block may still grow."""
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

    def block_grown(self, delta: Delta) -> Event | None:
        """The event for what a delta adds to the open block; None if that shows later."""
        raise NotImplementedError

    def block_closed(self, kind: str, text: str) -> Iterator[Event]:
        """Put the whole text into the last block."""
        raise NotImplementedError

"""The stream of a generation that callers hold: its events, the whole of them with its figures, and its end."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, TypeVar, cast

from localinfer.arguments import check_number, owned
from localinfer.errors import RequestError
from localinfer.generation.options import GenerationOptions
from localinfer.types import Closing, FinishReason, Record, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localinfer.engine.request import Request
    from localinfer.generation.async_reader import AsyncReader
    from localinfer.generation.resumption import ResumedText
    from localinfer.generation.text_generation import TextGeneration

T = TypeVar("T")

CompletionEnd = FinishReason | Literal["tool_calls"]
"""As the engine's, and tool_calls: an end token after at least one whole tool call."""


class ToolCall(Record):
    """One call that the model makes.

    id: the model's where its format has one, else nine random letters and digits. arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


class ToolCallDelta(Record):
    """News of one call.

    index: of the call in its reply, from 0. The first delta of a call has its id and name and no arguments; each
    later one has the next part of the arguments' JSON text and neither.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ReplyDelta(NamedTuple):
    """The next part of a reply that is certain."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class CompactionStats(Record):
    """Figures of the summaries that stand for the beginning of a chat's conversation."""

    messages: int
    """Number of messages that the latest stands for."""
    prompt_tokens: int = 0
    """Tokens of the prompts that asked for those written for this reply; 0 if there was one before."""
    cached_tokens: int = 0
    """Tokens of these prompts whose keys and values were cached."""
    completion_tokens: int = 0
    """Tokens of the summaries written for this reply."""

    def after(self, former: CompactionStats) -> CompactionStats:
        """These figures with those of summaries that were written for the same reply before."""
        return CompactionStats(
            self.messages,
            self.prompt_tokens + former.prompt_tokens,
            self.cached_tokens + former.cached_tokens,
            self.completion_tokens + former.completion_tokens,
        )


class Stats(Record, kw_only=True):
    """Figures of a generation."""

    prompt_tokens: int
    """Tokens of the prompt."""
    cached_tokens: int
    """Tokens of the prompt whose keys and values were cached."""
    cache_miss: str | None
    """The reason why no more were cached, in words, which may quote cached texts; None if nothing stood in the way."""
    dropped_tokens: int
    """Tokens left out by `context_shift`."""
    completion_tokens: int
    """Tokens sampled, an end token included."""
    time_to_first_token_seconds: float
    """Time from the call to the first token, tokenizing included; 0 if there is none."""
    decode_tokens_per_second: float
    """Rate of the tokens after the first, without the time that the caller took between them; 0 if there are none."""
    drafted_tokens: int
    """Tokens that speculation drafted; `accepted_tokens` of them were accepted."""
    accepted_tokens: int
    seed: int
    """The seed that was given, or drawn; with it the same options give the same text."""
    drafted_by_position: tuple[int, ...] = ()
    """Drafted tokens by position in the draft; `accepted_by_position` likewise."""
    accepted_by_position: tuple[int, ...] = ()
    drafted_by: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens drafted and accepted, by the drafter's name: "ngram", "draft" (a draft model), "mtp" or "assistant" (a
    draft model over this model's cache)."""
    tokens_per_pass: float = 1.0
    """Tokens decoded per pass of the model, 1 without speculation."""
    speculation_speedup: float = 1.0
    """Measured speed over that of plain steps."""
    cache_miss_summary: str | None = None
    """`cache_miss` without quotes of cached texts."""
    stop_text: str | None = None
    """The text of the option `stop` that ended it, if one did."""
    waited_seconds: float = 0.0
    """Time before it was admitted."""
    state_snapshots: int = 0
    """Snapshots of recurrent states that the prefix cache held at the end, of any text; 0 for a model without recurrent
    layers."""
    notices: tuple[str, ...] = ()
    """Deviations from the options, in words: a drafter that failed and was switched off, memory that ended before the
    text did."""
    compaction: CompactionStats | None = None
    """Figures of the summary from which the conversation continues, where it was compacted."""


class StreamEvent(NamedTuple):
    """One sampled token, and the text that became certain with it: often a word, "" inside a character or stop text.

    finish_reason is None but for the last event. After `TextStream.cancel` that is "cancelled", its id NO_TOKEN, and
    its text what was held back; so it is where memory ended, with the reason "length". logprobs: where the option asks
    for them. reasoning, tool_calls: of a chat, what became certain of these; their markers are in no text.
    """

    text: str
    token_id: int
    finish_reason: CompletionEnd | None
    logprobs: TokenLogprobs | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Completion(Record):
    """A finished generation."""

    text: str
    """The text without end token and stop text."""
    token_ids: list[int]
    """Every sampled token, end tokens and those of stop texts included."""
    finish_reason: CompletionEnd
    """Why it ended: "stop" for an end token or stop text, "length" for max_tokens or the end of the context, or of
    `kv_memory` (`stats.notices` then says so), "tool_calls" for an end after calls, or "cancelled"."""
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None
    """An entry for each of token_ids, where the option asks for them."""
    reasoning: str = ""
    """Reasoning of a chat. Of `tool_calls`, a call that was cut short is the last one, its arguments no whole JSON."""
    tool_calls: tuple[ToolCall, ...] = ()

    def __repr__(self) -> str:
        """The text and why it ended; of token ids, log probabilities and figures only how many tokens there are."""
        said = {"text": self.text, "reasoning": self.reasoning, "tool_calls": self.tool_calls}
        shown = [f"{name}={value!r}" for name, value in said.items() if value or name == "text"]
        more = f"finish_reason={self.finish_reason!r}, {len(self.token_ids)} tokens"
        return f"{type(self).__name__}({', '.join(shown)}, {more})"


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls that deltas spell out, in order."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(delta.id, delta.name, ""))
        else:
            call = calls[delta.index]
            calls[delta.index] = ToolCall(call.id, call.name, call.arguments + delta.arguments)
    return tuple(calls)


def cut_notices(deltas: Iterable[ToolCallDelta]) -> list[str]:
    """Notice of a last call whose arguments are no whole JSON; none where they are."""
    *_, last = (None, *joined_calls(deltas))
    if last is None:
        return []
    try:
        json.loads(last.arguments)
    except ValueError:
        return [f"the call of {last.name!r} was cut off, and its arguments are incomplete; do not run it"]
    return []


class TextStream(Closing, Iterator[StreamEvent], AsyncIterator[StreamEvent]):
    """A generation in progress: read it with `for` or `async for`, or take the whole of it with `result`.

    It has one reader at a time, a thread or a task: another that wants an event meanwhile gets a RequestError, and so
    does one that iterates in a thread once an event loop has read of it. Any thread may cancel or close it, and ask for
    its figures. Leaving a `with` or `async with` block closes it.

    With `async for` a thread of its own takes the steps, some tens of tokens ahead of the reader at most. The loop is
    woken once per round at most, however many tokens and streams there are, and its executor is not used. Cancelling
    the task that waits for an event cancels the generation; so does a timeout around it. A very long prompt holds the
    loop up while it is encoded, unless it is done by `await asyncio.to_thread(llm.stream, prompt)`. Any loop of asyncio
    does, uvloop's among them, and AnyIO on asyncio. Trio has none: iterate there in a thread, such as
    `await trio.to_thread.run_sync(next, stream, None)`.
    """

    _instead = "hand on what result() or completion() gives"

    def __init__(self, generation: TextGeneration) -> None:
        self._generation = generation
        self._reader: AsyncReader | None = None

    @property
    def stats(self) -> Stats:
        """The numbers so far; final once the stream has ended or was closed. Any thread may ask."""
        return self._generation.stats

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt. Any thread may ask."""
        return self._generation.prompt_tokens

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The ids of prompt and completion so far, int32[N]: what `LLM.save_session` takes. Any thread may ask."""
        return self._generation.token_ids

    @property
    def computed_tokens(self) -> int:
        """Number of tokens of prompt and completion that the model has read so far, those from the cache included.

        Up to `prompt_tokens`, less those dropped by `context_shift`, it is the progress of the prefill. Any thread may
        ask, also after the end.
        """
        return self._generation.computed_tokens

    @property
    def request(self) -> Request:
        """The engine's request, for callers that have the prompt computed elsewhere before the first event."""
        return self._generation.request

    def note_prefilled(self, num_tokens: int, seconds: float) -> None:
        """Note before the first event that another process has computed so much of the prompt, in so many seconds.

        It counts as computed for this stream, not as cached.
        """
        self._generation.note_prefilled(num_tokens, seconds)

    def note_compaction(self, stats: CompactionStats) -> None:
        """Note that the prompt continues from a summary, for `stats`."""
        self._generation.compaction = stats

    def resume(self, text: ResumedText) -> None:
        """Resume this text from the progress of another process, whose tokens come first; before any event is asked
        for.

        Raises: as the generation itself.
        """
        self._generation.resume(text)

    def __next__(self) -> StreamEvent:
        if self._reader is not None:
            raise RequestError(
                "this stream is being read by an event loop; continue with `async for`, `await stream.aresult()`, or "
                "cancel it, after which result() gives what came"
            )
        return next(self._generation)

    async def __anext__(self) -> StreamEvent:
        event = await self._async_reader().next()
        if event is None:
            raise StopAsyncIteration
        return event

    def result(self) -> Completion:
        """Read to the end, and return everything from the first token on, what was read before included.

        After `cancel` or `close`, by any thread, it waits for the step in progress at most, and gives what came until
        then, with the reason "cancelled", unless the generation had ended by itself. May be called again.
        Raises: what ended the generation; RequestError while another thread, or an event loop, reads it.
        """
        generation = self._generation
        if generation.is_cancelled:
            generation.close()
            generation.has_ended.wait()
        elif not generation.has_ended.is_set():
            for _ in self:
                pass
        return generation.completion()

    async def aresult(self) -> Completion:
        """As `result`, awaited; the loop is woken for the end only. Cancelling the task cancels the generation.

        Raises: what ended the generation; RequestError while another task, or a thread, reads it.
        """
        from localinfer.system.event_loop import in_thread

        generation, reader = self._generation, self._reader
        if not generation.has_ended.is_set():
            if not generation.is_cancelled:
                await self._async_reader().result()
            elif reader is None:
                await in_thread(self.result, stop=self.cancel, name="localinfer-stream")
            else:
                await reader.end(discards=not reader.is_awaited)
        return generation.completion()

    def completion(self) -> Completion:
        """Return what came so far, at once; it has the reason "cancelled" until the last event has come. Any thread."""
        return self._generation.completion()

    def cancel(self) -> None:
        """End the stream from any thread, at any time: its reader gets one last event, of reason "cancelled".

        The step in progress is finished, of a long prompt a chunk, and what was computed stays in the cache. Nothing
        happens if the stream has ended by itself. May be called again.
        """
        self._generation.cancel()

    def close(self) -> None:
        """End the stream from any thread, and read no more of it; what it computed stays in the cache.

        A thread that is waiting for an event gets one last event, as after `cancel`. May be called again.
        """
        self._generation.close()

    async def aclose(self) -> None:
        """As `close`, and wait for the step in progress, so that afterwards nothing of the stream runs any more."""
        from localinfer.system.event_loop import LoopCalls

        reader = self._reader
        if reader is None or reader.calls is not LoopCalls.of_running_loop():
            self.close()
        else:
            self.cancel()
            await reader.end(discards=not reader.is_awaited)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._reader is None:
            self._generation.leave()
        else:
            self._reader.abandon()

    def _async_reader(self) -> AsyncReader:
        from localinfer.generation.async_reader import AsyncReader
        from localinfer.generation.text_generation import second_reader_error
        from localinfer.system.event_loop import LoopCalls

        calls = LoopCalls.of_running_loop()
        if self._reader is None:
            if self._generation.is_being_read:
                raise second_reader_error()
            self._reader = AsyncReader(self._generation, calls)
        elif self._reader.calls is not calls:
            raise RequestError("this stream is being read by another event loop; continue reading it there")
        return self._reader


async def complete_in_thread(
    open_stream: Callable[[GenerationOptions], TextStream], options: GenerationOptions
) -> Completion:
    """Open a stream in a thread of its own, and return its completion. Cancelling the task cancels the generation.

    So the loop is held up neither by the encoding of a long prompt, nor by the compilation of a constraint.
    open_stream: begins it with these options, of which the thread gets a copy.
    """
    from localinfer.system.event_loop import in_thread

    given = cast(GenerationOptions, {name: owned(value) for name, value in options.items()})
    opened: list[TextStream] = []
    is_cancelled = threading.Event()

    def complete() -> Completion:
        with open_stream(given) as stream:
            opened.append(stream)
            # In this order, and the other one below: it is cancelled here or there.
            if is_cancelled.is_set():
                stream.cancel()
            return stream.result()

    def cancel() -> None:
        is_cancelled.set()
        for stream in opened:
            stream.cancel()

    return await in_thread(complete, stop=cancel, name="localinfer-complete")


async def call_in_thread(work: Callable[[], T]) -> T:
    """Do work that nothing can end early in a thread of its own, and return what it returns."""
    from localinfer.system.event_loop import in_thread

    return await in_thread(work, stop=lambda: None, name="localinfer-call")


MAX_COMPLETIONS = 128


def complete_many(
    open_stream: Callable[[GenerationOptions], TextStream], options: GenerationOptions, *, n: int, best_of: int | None
) -> list[Completion]:
    """Return `n` completions; of `best_of` made, those of the largest mean log probability per token, best first.

    open_stream: begins one with these options. The i-th that is made, from 0, has the seed of the options, or else the
    one drawn for the first, + i, so that each can be made again alone.
    Raises: RequestError naming n or best_of; else as the streams do, and then all of them are closed.
    """
    check_number("n", n, 1, MAX_COMPLETIONS)
    check_number("best_of", best_of, n, MAX_COMPLETIONS, none="for n")
    is_ranked = best_of is not None and best_of > n
    wanted_logprobs = options.get("logprobs")
    if is_ranked and wanted_logprobs is None:
        options = {**options, "logprobs": 0}
    # The later ones begin after steps of the first, and are to have the same options.
    options = cast(GenerationOptions, {name: owned(value) for name, value in options.items()})
    completions = _read_alternately(open_stream, options, n if best_of is None else best_of)
    if not is_ranked:
        return completions
    best = sorted(completions, key=_mean_logprob, reverse=True)[:n]
    if wanted_logprobs is None:
        return [replace(completion, logprobs=None) for completion in best]
    return best


def _read_alternately(
    open_stream: Callable[[GenerationOptions], TextStream], options: GenerationOptions, count: int
) -> list[Completion]:
    streams: list[TextStream] = []
    running: list[TextStream] = []
    try:
        for index in range(count):
            seed = (streams[0].stats.seed + index) % 2**64 if streams else options.get("seed")
            # What was begun is not given up for what follows.
            objective = None if streams else options.get("ttft_objective")
            stream = open_stream({**options, "seed": seed, "ttft_objective": objective})
            streams.append(stream)
            # The first token of one comes before the next one begins, which so finds the prompt in the cache.
            running += [stream for _ in itertools.islice(stream, 1)]
        while running:
            running = [stream for stream in running if next(stream, None) is not None]
        return [stream.result() for stream in streams]
    finally:
        for stream in streams:
            stream.close()


def _mean_logprob(completion: Completion) -> float:
    logprobs = completion.logprobs or []
    return sum(token.logprob for token in logprobs) / len(logprobs) if logprobs else 0.0

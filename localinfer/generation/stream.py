"""The handle of a generation that callers hold (events, result and end), and several completions of one prompt."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Self, cast

from localinfer.arguments import check_number, owned
from localinfer.errors import RequestError
from localinfer.generation.completion import Completion, Stats, StreamEvent
from localinfer.generation.options import GenerationOptions
from localinfer.types import Closing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localinfer.engine.request import Request
    from localinfer.generation.async_reader import AsyncReader
    from localinfer.generation.resumption import ResumedText
    from localinfer.generation.text_generation import TextGeneration


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

    def resume(self, text: ResumedText) -> None:
        """Resume this text from the progress of another process, whose tokens come first; before any event is asked
        for.

        Raises: as the generation itself.
        """
        self._generation.resume(text)

    def __next__(self) -> StreamEvent:
        if self._reader is not None:
            raise RequestError(
                "this stream is being read by an event loop; go on with `async for`, `await stream.aresult()`, or "
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
            raise RequestError("this stream is being read by another event loop; go on reading it there")
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

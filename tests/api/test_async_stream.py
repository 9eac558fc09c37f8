"""A stream on an event loop: the same events, one wake-up per round, and an end of its thread however it ends."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import ClosedError, ModelFileError, RequestError
from localinfer.generation.async_reader import MOST_UNREAD
from localinfer.generation.stream import StreamEvent, TextStream
from localinfer.llm import LLM
from tests.api.test_loop_calls import CountingLoop
from tests.engine.fakes import fake_model, hashed_logits, text_model
from tests.engine.generations import Gate
from tests.generation.chat.test_tools import TOOLS, SilentTemplate
from tests.support.limits import seconds, wait_until

ENDLESS: dict[str, Any] = {"ignore_eos": True, "temperature": 0, "max_tokens": 10_000}


def endless_llm() -> LLM:
    return LLM(fake_model(lambda history, size: hashed_logits(history[-3:], size), context_length=4096))  # type: ignore[arg-type]


def gated(length: int, **sizes: int) -> tuple[Gate, LLM]:
    gate = Gate(length)
    return gate, LLM(fake_model(gate, **sizes))  # type: ignore[arg-type]


def threads() -> list[threading.Thread]:
    """Those that work for an event loop."""
    names = ("localinfer-stream", "localinfer-complete", "localinfer-load")
    return [thread for thread in threading.enumerate() if thread.name in names]


async def reached(event: threading.Event) -> None:
    """Wait for a thread, while the loop goes on."""
    assert await asyncio.to_thread(event.wait, seconds(10))


async def taken(stream: AsyncIterator[StreamEvent]) -> list[StreamEvent]:
    return [event async for event in stream]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> CountingLoop:
    """Run a coroutine on a loop that counts, and see that no thread stays."""
    loop = CountingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(asyncio.wait_for(main(), seconds(30)))
    assert wait_until(lambda: not threads())
    return loop


def test_events_are_those_that_a_thread_reads() -> None:
    llm = LLM(text_model("hello, all of you", prompt_length=3))  # type: ignore[arg-type]
    options: dict[str, Any] = {"temperature": 0, "logprobs": 1, "stop": "of y"}

    async def main() -> None:
        stream = llm.stream("ab", **options)
        assert await taken(stream) == list(llm.stream("ab", **options))
        assert await taken(stream) == []
        assert stream.result().text == (await stream.aresult()).text == "hello, all "

    run(main)


def test_a_chat_with_reasoning_and_tools_streams_them() -> None:
    text = '<think>\nHm.\n</think>\n\nSee:\n<tool_call>\n{"name": "get", "arguments": {"query": "b"}}\n</tool_call>'
    model = text_model(text, prompt_length=5, context_length=1000)
    model.chat_template = SilentTemplate()
    model.chat_template.source = "<think></think>"
    llm = LLM(model)  # type: ignore[arg-type]
    ask = [{"role": "user", "content": "hi"}]

    async def main() -> None:
        async with llm.stream_chat(ask, tools=TOOLS, temperature=0) as stream:
            events = await taken(stream)
        # The ids of calls are drawn.
        whole, wanted = stream.result(), llm.chat(ask, tools=TOOLS, temperature=0)
        assert (whole.text, whole.reasoning, whole.finish_reason) == (wanted.text, wanted.reasoning, "tool_calls")
        assert [(call.name, call.arguments) for call in whole.tool_calls] == [("get", '{"query": "b"}')]
        assert whole.text == "".join(event.text for event in events) == "See:"
        assert whole.reasoning == "".join(event.reasoning for event in events) == "Hm."
        assert any(event.tool_calls for event in events)

    run(main)


def test_a_busy_loop_is_woken_once_and_memory_is_bounded() -> None:
    llm = endless_llm()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        streams = [llm.stream(text, **ENDLESS) for text in ("ab", "xyz")]
        tasks = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.gather(*tasks)
        # Both threads run into the limit while the loop does not look, and end there.
        assert wait_until(lambda: not threads())
        woken = loop.num_wakes
        counts = [stream.stats.completion_tokens for stream in streams]
        assert max(counts) <= MOST_UNREAD + 2
        await asyncio.sleep(0)
        assert loop.num_wakes == woken
        # What has come is read without waiting, and then other threads go on.
        for stream, count in zip(streams, counts, strict=True):
            for _ in range(2 * MOST_UNREAD):
                assert (await anext(stream)).finish_reason is None
            assert stream.stats.completion_tokens > count
            await stream.aclose()

    loop = run(main)
    assert loop.num_wakes <= loop.num_rounds


def test_two_streams_share_wake_ups_and_get_their_own_tokens() -> None:
    llm = endless_llm()
    texts = ("ab", "xyz")
    options = {**ENDLESS, "max_tokens": 150}
    wanted = [llm.complete(text, **options).token_ids for text in texts]

    async def main() -> None:
        found = await asyncio.gather(*[taken(llm.stream(text, **options)) for text in texts])
        assert [[event.token_id for event in events] for events in found] == wanted

    loop = run(main)
    assert loop.num_wakes <= loop.num_rounds


def test_a_reader_that_never_waits_lets_others_run() -> None:
    llm = endless_llm()
    rounds = 0

    async def main() -> None:
        nonlocal rounds
        done = False

        async def other() -> None:
            nonlocal rounds
            while not done:
                rounds += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        async with llm.stream("ab", **ENDLESS) as stream:
            for _ in range(4 * MOST_UNREAD):
                await anext(stream)
        done = True
        await task

    run(main)
    assert rounds >= 4


def test_the_default_executor_is_not_needed() -> None:
    llm = endless_llm()

    async def main() -> None:
        from concurrent.futures import ThreadPoolExecutor

        executor, may_end = ThreadPoolExecutor(1), threading.Event()
        asyncio.get_running_loop().set_default_executor(executor)
        executor.submit(may_end.wait)
        found = await asyncio.gather(*[llm.acomplete("ab", **{**ENDLESS, "max_tokens": 8}) for _ in range(40)])
        streams = [llm.stream("ab", **{**ENDLESS, "max_tokens": 8}) for _ in range(5)]
        events = await asyncio.gather(*[taken(stream) for stream in streams])
        may_end.set()
        assert {len(one.token_ids) for one in found} == {len(one) for one in events} == {8}

    run(main)


@pytest.mark.parametrize("way", ["task", "timeout", "result"])
def test_cancelling_the_task_that_waits_cancels_the_generation(way: str) -> None:
    gate, llm = gated(7)

    async def main() -> None:
        stream = llm.stream("abcd", **ENDLESS)
        if way == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await taken(stream)
        else:
            task = asyncio.create_task(taken(stream) if way == "task" else stream.aresult())  # type: ignore[arg-type]
            await reached(gate.reached)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert stream._generation.is_cancelled
        gate.may_pass.set()
        result = await stream.aresult()
        assert (result.finish_reason, len(result.token_ids)) == ("cancelled", 2)
        assert stream.result() == result

    run(main)


@pytest.mark.parametrize("reads_first", [0, 3])
def test_closing_waits_for_the_step_and_its_thread(reads_first: int) -> None:
    llm = endless_llm()

    async def main() -> None:
        async with llm.stream("ab", **ENDLESS) as stream:
            for _ in range(reads_first):
                await anext(stream)
        assert not threads()
        assert stream.result().finish_reason == "cancelled" and len(stream.result().token_ids) >= reads_first
        assert await taken(stream) == []
        await stream.aclose()

    run(main)


@pytest.mark.parametrize("end", [TextStream.cancel, TextStream.close])
def test_another_thread_ends_it_and_the_waiting_reader_gets_the_last_event(end: Callable[[TextStream], None]) -> None:
    gate, llm = gated(7)

    async def main() -> None:
        stream = llm.stream("abcd", **ENDLESS)
        task = asyncio.create_task(taken(stream))
        await reached(gate.reached)
        await asyncio.to_thread(end, stream)
        results = [asyncio.create_task(asyncio.to_thread(stream.result)), asyncio.create_task(stream.aresult())]
        await asyncio.sleep(0)
        gate.may_pass.set()
        events = await task
        assert [event.finish_reason for event in events] == [None, None, "cancelled"]
        for result in await asyncio.gather(*results):
            assert (result.finish_reason, len(result.token_ids)) == ("cancelled", 2)

    run(main)


def test_events_that_were_not_read_at_a_cancellation_are_read_afterwards() -> None:
    llm = endless_llm()

    async def main() -> None:
        stream = llm.stream("ab", **ENDLESS)
        first = await anext(stream)
        assert wait_until(lambda: not threads())
        stream.cancel()
        result = await stream.aresult()
        assert result.token_ids == stream.result().token_ids and len(result.token_ids) >= MOST_UNREAD
        assert result.finish_reason == "cancelled" and result.token_ids[0] == first.token_id

    run(main)


@pytest.mark.parametrize("second", ["anext", "aresult", "next", "result", "thread"])
def test_a_second_reader_is_told_and_the_first_one_goes_on(second: str) -> None:
    gate, llm = gated(6)

    async def main() -> None:
        stream = llm.stream("abcd", **{**ENDLESS, "max_tokens": 4})
        task = asyncio.create_task(taken(stream))
        await reached(gate.reached)
        with pytest.raises(RequestError, match="a stream for each reader|continue with `async for`"):
            match second:
                case "anext":
                    await anext(stream)
                case "aresult":
                    await stream.aresult()
                case "next":
                    next(stream)
                case "result":
                    stream.result()
                case "thread":
                    await asyncio.to_thread(next, stream)
        gate.may_pass.set()
        assert len(await task) == 4

    run(main)


def test_a_task_beside_a_thread_that_reads_is_told() -> None:
    gate, llm = gated(6)

    async def main() -> None:
        stream = llm.stream("abcd", **{**ENDLESS, "max_tokens": 4})
        reading = asyncio.create_task(asyncio.to_thread(list, stream))
        await reached(gate.reached)
        for use in (anext(stream), stream.aresult()):
            with pytest.raises(RequestError, match="another thread or task"):
                await use
        gate.may_pass.set()
        assert len(await reading) == 4
        assert len((await stream.aresult()).token_ids) == 4

    run(main)


def test_aresult_waits_for_a_thread_whose_stream_was_cancelled() -> None:
    gate, llm = gated(7)

    async def main() -> None:
        stream = llm.stream("abcd", **ENDLESS)
        reading = asyncio.create_task(asyncio.to_thread(list, stream))
        await reached(gate.reached)
        stream.cancel()
        waiting = asyncio.create_task(stream.aresult())
        await asyncio.sleep(0)
        gate.may_pass.set()
        assert len((await waiting).token_ids) == 2 == len(await reading) - 1

    run(main)


def test_one_task_after_the_other_may_read() -> None:
    llm = LLM(text_model("hello", prompt_length=3))  # type: ignore[arg-type]

    async def main() -> None:
        stream = llm.stream("ab", temperature=0)
        first = next(stream)
        second = await asyncio.wait_for(anext(stream), seconds(10))
        third = await asyncio.create_task(anext(stream))
        rest = await stream.aresult()
        assert first.text + second.text + third.text == "hel" and rest.text == "hello"

    run(main)


def test_another_loop_is_told() -> None:
    llm = endless_llm()
    stream = llm.stream("ab", **ENDLESS)

    async def read() -> None:
        await anext(stream)

    run(read)
    with pytest.raises(RequestError, match="another event loop"):
        asyncio.run(read())
    asyncio.run(stream.aclose())
    assert stream.result().finish_reason == "cancelled"


@pytest.mark.parametrize("way", ["read", "reading", "result"])
def test_a_loop_that_is_closed_in_the_middle_leaves_no_thread(way: str) -> None:
    gate, llm = gated(7, context_length=4096)
    stream = llm.stream("abcd", **ENDLESS)
    loop = asyncio.new_event_loop()
    work: Coroutine[Any, Any, Any] = stream.aresult() if way == "result" else taken(stream)
    task = loop.create_task(work)
    loop.run_until_complete(asyncio.sleep(0))
    assert gate.reached.wait(seconds(10))
    if way == "read":
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    gate.may_pass.set()
    assert wait_until(lambda: not threads())
    stream.cancel()
    assert 2 <= len(stream.result().token_ids) <= 3
    # A task of a closed loop can only be dropped, of which asyncio complains.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    with suppress(RuntimeError):
        work.close()


def test_a_result_does_not_wait_for_a_reader_that_stops() -> None:
    llm = endless_llm()

    async def main() -> None:
        stream = llm.stream("ab", **ENDLESS)
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        # The loop does not look until the thread has filled what it may.
        assert wait_until(lambda: not threads())
        stream.cancel()
        result = await stream.aresult()
        assert (await task).token_id == result.token_ids[0] and len(result.token_ids) >= MOST_UNREAD

    run(main)


@pytest.mark.parametrize("pauses", [False, True])
def test_a_stream_that_is_dropped_leaves_no_thread_and_no_request(pauses: bool) -> None:
    llm = endless_llm()

    async def main() -> None:
        async for _ in llm.stream("ab", **ENDLESS):
            if pauses:
                assert wait_until(lambda: not threads())
            break
        assert wait_until(lambda: not threads())
        gc.collect()
        assert not llm._engine.scheduler.running

    run(main)


def test_errors_reach_the_reader_and_the_result() -> None:
    def fails_later(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        if history.size == 6:
            raise ModelFileError("scripted")
        return hashed_logits(history, vocab_size)

    llm = LLM(fake_model(fails_later))  # type: ignore[arg-type]

    async def main() -> None:
        stream = llm.stream("abcd", **ENDLESS)
        await anext(stream)
        for use in (anext(stream), stream.aresult(), llm.acomplete("abcd", **ENDLESS)):
            with pytest.raises(ModelFileError, match="scripted"):
                await use
        assert await taken(stream) == []
        await stream.aclose()
        llm.close()
        with pytest.raises(ClosedError):
            await llm.acomplete("abcd")

    run(main)

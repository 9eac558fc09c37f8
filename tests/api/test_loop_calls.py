"""Threads that tell an event loop something wake it once for all that has come, and end with it."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from localinfer.errors import RequestError
from localinfer.system.event_loop import LoopCalls, in_thread
from tests.support.limits import seconds


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often threads wake it, and its rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.num_wakes = self.num_rounds = 0

    def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        self.num_wakes += 1
        return super().call_soon_threadsafe(*arguments, **options)

    def _run_once(self) -> None:
        self.num_rounds += 1
        super()._run_once()  # type: ignore[misc]


@pytest.mark.parametrize("num_threads", [1, 5])
def test_items_of_many_threads_arrive_whole_and_in_order(num_threads: int) -> None:
    async def take_all() -> list[list[int]]:
        calls = LoopCalls.of_running_loop()
        queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(num_threads)]
        turns = threading.Semaphore(0)

        def put(queue: asyncio.Queue[int]) -> None:
            for item in range(200):
                assert calls.add(partial(queue.put_nowait, item))
                if item % 17 == 0:
                    turns.release()
                    turns.acquire()

        senders = [threading.Thread(target=put, args=(queue,)) for queue in queues]
        for sender in senders:
            sender.start()
        taken = await asyncio.gather(*[take(queue) for queue in queues])
        for sender in senders:
            sender.join()
        return list(taken)

    async def take(queue: asyncio.Queue[int]) -> list[int]:
        return [await queue.get() for _ in range(200)]

    assert asyncio.run(take_all()) == [list(range(200))] * num_threads


def test_a_loop_that_did_not_look_yet_is_woken_once_for_all_threads() -> None:
    made: list[int] = []

    async def main() -> None:
        calls = LoopCalls.of_running_loop()
        assert LoopCalls.of_running_loop() is calls
        for begin in (0, 40):
            woken = loop.num_wakes
            threads = [
                threading.Thread(target=calls.add, args=(partial(made.append, begin + number),)) for number in range(40)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert loop.num_wakes == woken + 1 and len(made) == begin
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(made) == begin + 40

    loop = CountingLoop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert sorted(made) == list(range(80))


@pytest.mark.parametrize("was_woken", [False, True])
def test_calls_for_a_closed_loop_are_dropped_and_the_loop_is_let_go(was_woken: bool) -> None:
    async def find() -> LoopCalls:
        return LoopCalls.of_running_loop()

    loop = asyncio.new_event_loop()
    calls = loop.run_until_complete(find())
    if was_woken:
        assert calls.add(pytest.fail)
    loop.close()
    for _ in range(2):
        assert not calls.add(pytest.fail)
    gone = weakref.ref(loop)
    del loop, calls
    gc.collect()
    assert gone() is None


def test_work_in_a_thread_is_awaited_and_its_error_raised() -> None:
    def fail() -> None:
        raise KeyError("x")

    async def main() -> None:
        stop: Callable[[], None] = lambda: pytest.fail("it was not cancelled")  # noqa: E731
        assert await in_thread(threading.current_thread, stop=stop, name="its-name") is not threading.current_thread()
        assert (await in_thread(threading.current_thread, stop=stop, name="its-name")).name == "its-name"
        with pytest.raises(KeyError, match="x"):
            await in_thread(fail, stop=lambda: None, name="fails")

    asyncio.run(main())


@pytest.mark.parametrize("closes_loop", [False, True])
def test_what_cancelled_work_returns_nevertheless_is_discarded(closes_loop: bool) -> None:
    may_return, stopped, discarded = threading.Event(), threading.Event(), threading.Event()
    found: list[str] = []

    def work() -> str:
        assert may_return.wait(seconds(10))
        return "late"

    def discard(late: str) -> None:
        found.append(late)
        discarded.set()

    async def main() -> None:
        task = asyncio.create_task(in_thread(work, stop=stopped.set, discard=discard, name="late"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stopped.is_set() and not found
        if not closes_loop:
            may_return.set()
            await asyncio.get_running_loop().run_in_executor(None, discarded.wait, seconds(10))

    asyncio.run(main())
    may_return.set()
    assert discarded.wait(seconds(10)) and found == ["late"]


def test_without_a_loop_the_error_says_what_to_use() -> None:
    with pytest.raises(RequestError, match=r"no asyncio event loop runs .* asyncio\.run"):
        LoopCalls.of_running_loop()

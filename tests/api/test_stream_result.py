"""A stream gives the whole of it whenever it is asked, to its one reader; any thread ends it and sees how far it is."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from localinfer.errors import ModelFileError, RequestError
from localinfer.generation.stream import TextStream
from localinfer.llm import LLM
from tests.api.test_llm import answering, pages_in_use
from tests.engine.fakes import fake_model
from tests.engine.generations import Gate
from tests.support.limits import seconds


def gated(length: int, **sizes: Any) -> tuple[Gate, LLM]:
    gate = Gate(length)
    return gate, LLM(fake_model(gate, **sizes))  # type: ignore[arg-type]


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("num_read", [0, 2, 6])
def test_result_has_everything_from_the_first_token(num_read: int) -> None:
    llm = answering("hello")
    wanted = llm.complete("ab", temperature=0, logprobs=1)
    stream = llm.stream("ab", temperature=0, logprobs=1)
    for _ in range(num_read):
        next(stream)
    for found in (stream.result(), stream.result()):
        assert (found.text, found.token_ids, found.finish_reason, found.logprobs) == (
            "hello",
            wanted.token_ids,
            "stop",
            wanted.logprobs,
        )
        assert found.stats.completion_tokens == 6
    assert list(stream) == []


@pytest.mark.parametrize("end", [TextStream.cancel, TextStream.close])
@pytest.mark.parametrize("num_read", [0, 9])
def test_result_after_an_early_end_has_what_came_and_what_was_held_back(
    end: Callable[[TextStream], None], num_read: int
) -> None:
    llm = answering("so far so good", prompt="a")
    stream = llm.stream("a", temperature=0, stop="so good then")
    shown = "".join(next(stream).text for _ in range(num_read))
    end(stream)
    assert pages_in_use(llm) == 0
    found = stream.result()
    assert (shown, found.text) == (("so far ", "so far so") if num_read else ("", ""))
    assert (found.finish_reason, len(found.token_ids)) == ("cancelled", num_read)
    assert stream.result() == found and list(stream) == []


def test_an_end_by_itself_is_no_cancellation() -> None:
    stream = answering("hi").stream("ab", temperature=0)
    list(stream)
    stream.cancel()
    stream.close()
    assert (stream.result().text, stream.result().finish_reason) == ("hi", "stop")
    nothing = answering("hi").stream("ab", max_tokens=0)
    nothing.close()
    assert nothing.result().finish_reason == "length"


def test_what_came_so_far_can_be_had_while_it_runs() -> None:
    stream = answering("hello").stream("ab", temperature=0)
    assert (stream.completion().text, stream.completion().finish_reason) == ("", "cancelled")
    next(stream), next(stream)
    assert (stream.completion().text, stream.completion().finish_reason) == ("he", "cancelled")
    assert stream.result().text == "hello"


def test_an_error_is_raised_by_the_result_too() -> None:
    def fails(history: Any, vocab_size: int) -> Any:
        raise ModelFileError("scripted")

    for read in (lambda stream: next(stream), lambda stream: stream.result()):
        stream = LLM(fake_model(fails)).stream("ab")  # type: ignore[arg-type]
        for use in (read, lambda stream: stream.result()):
            with pytest.raises(ModelFileError, match="scripted"):
                use(stream)
        stream.close()
        assert list(stream) == []


@pytest.mark.parametrize("use", [next, lambda stream: stream.result()])
def test_a_second_reader_is_told_the_way_out_and_the_first_one_goes_on(use: Callable[[TextStream], Any]) -> None:
    gate, llm = gated(5)
    stream = llm.stream("abcd", max_tokens=4, ignore_eos=True)
    events: list[Any] = []
    reader = in_thread(lambda: events.extend(stream))
    assert gate.reached.wait(seconds(10))
    with pytest.raises(RequestError, match="another thread or task.* a stream for each reader, or cancel it first"):
        use(stream)
    gate.may_pass.set()
    reader.join(seconds(10))
    assert len(events) == 4 and stream.result().token_ids == [event.token_id for event in events]


@pytest.mark.parametrize("end", [TextStream.cancel, TextStream.close])
def test_any_thread_ends_a_stream_and_gets_its_result(end: Callable[[TextStream], None]) -> None:
    gate, llm = gated(7)
    stream = llm.stream("abcd", max_tokens=20, ignore_eos=True)
    events: list[Any] = []
    reader = in_thread(lambda: events.extend(stream))
    assert gate.reached.wait(seconds(10))
    end(stream)
    results: list[Any] = []
    ended = stream._generation.has_ended
    waiter = in_thread(lambda: results.append((stream.result(), ended.is_set())))
    gate.may_pass.set()
    for thread in (waiter, reader):
        thread.join(seconds(10))
    ((result, had_ended),) = results
    assert had_ended and events[-1].finish_reason == result.finish_reason == "cancelled"
    assert result.token_ids == [event.token_id for event in events[:-1]]
    assert len(result.token_ids) == 2


def test_another_thread_may_read_on() -> None:
    stream = answering("hello").stream("ab", temperature=0)
    first = next(stream)
    rest: list[Any] = []
    in_thread(lambda: rest.extend(stream)).join(seconds(10))
    assert "".join(event.text for event in [first, *rest]) == "hello" == stream.result().text


def test_any_thread_sees_the_progress_of_a_prompt_and_its_end_keeps_it() -> None:
    gate, llm = gated(16, max_batch_rows=4)
    stream = llm.stream("x" * 15, max_tokens=3, ignore_eos=True)
    assert (stream.prompt_tokens, stream.computed_tokens) == (16, 0)
    reader = in_thread(stream.result)
    assert gate.reached.wait(seconds(10))
    assert stream.computed_tokens == 12, "the last chunk is not whole yet"
    gate.may_pass.set()
    reader.join(seconds(10))
    assert (stream.prompt_tokens, stream.computed_tokens) == (16, 18)


def test_a_stream_that_is_dropped_frees_its_pages_at_once() -> None:
    llm = answering("hello")
    next(llm.stream("ab", temperature=0))
    assert pages_in_use(llm) == 0

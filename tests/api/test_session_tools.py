"""Sessions whose model calls Python functions: the loop, who may watch and refuse it, and how it ends."""

import asyncio
import threading
from typing import Annotated, Any

import pytest
from msgspec import Meta

import localinfer
from localinfer.errors import AnswerError, RequestError, ToolRoundsError
from localinfer.generation.session.python_tools import REFUSED, CallOutcome, RequestedCall
from tests.api.scripted_chat import called, scripted_chat

BONN = called("weather", '{"city": "Bonn", "days": 2}')
ROME = called("weather", '{"city": "Rome"}')


def weather(city: str, days: int = 1) -> dict[str, Any]:
    """The weather of a city."""
    if city == "Nowhere":
        raise LookupError("there is no such city")
    return {"city": city, "days": days, "sky": "grey"}


async def aweather(city: str) -> str:
    """The weather of a city."""
    await asyncio.sleep(0)
    return f"grey in {city}"


def test_functions_are_called_until_there_is_an_answer() -> None:
    llm = scripted_chat(BONN, f"One more.\n{BONN}\n{ROME}", "Grey everywhere.")
    requested: list[RequestedCall] = []
    outcomes: list[CallOutcome] = []
    session = llm.session(
        "x", tools=[weather], on_tool_call=requested.append, on_tool_result=outcomes.append, temperature=0
    )
    reply = session.ask("Weather?", tool_choice="required")
    assert (reply.text, reply.finish_reason) == ("Grey everywhere.", "stop")
    assert [call.arguments for call in requested] == [{"city": "Bonn", "days": 2}] * 2 + [{"city": "Rome"}]
    assert [outcome.call for outcome in outcomes] == requested and not any(outcome.error for outcome in outcomes)
    messages = session.messages
    assert [m["role"] for m in messages] == "system user assistant tool assistant tool tool assistant".split()
    assert messages[4]["content"] == "One more." and messages[2]["tool_calls"][0]["function"]["name"] == "weather"
    assert messages[3]["content"] == '{"city":"Bonn","days":2,"sky":"grey"}'
    assert messages[3]["tool_call_id"] == messages[2]["tool_calls"][0]["id"] == requested[0].id
    assert messages[6]["content"] == '{"city":"Rome","days":1,"sky":"grey"}'


@pytest.mark.parametrize(
    ("verdict", "result"),
    [(True, '"grey"}'), (None, '"grey"}'), (False, REFUSED), ("Sunny.", "Sunny."), ({"sky": 1}, '{"sky":1}')],
)
def test_a_watcher_may_refuse_a_call_or_answer_it(verdict: Any, result: str) -> None:
    session = scripted_chat(BONN, "Ok.").session(tools=[weather], on_tool_call=lambda _: verdict, temperature=0)
    assert session.ask("Weather?").text == "Ok."
    assert session.messages[2]["content"].endswith(result)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (called("weather", '{"city": "Nowhere"}'), LookupError, "Error: LookupError: there is no such city"),
        (called("strict", '{"tag": "a"}'), ValueError, "Error: the arguments do not fit the function"),
        (called("odd", "{}"), TypeError, "Error: TypeError: a result holds a object"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model_and_to_the_watcher(call: str, error: type[Exception], said: str) -> None:
    # Look-aheads are no part of a grammar, so any string may come.
    def strict(tag: Annotated[str, Meta(pattern="^(?=b)")]) -> str:
        return tag

    def odd() -> object:
        return object()

    outcomes: list[CallOutcome] = []
    session = scripted_chat(call, "I see.").session(
        tools=[weather, strict, odd], on_tool_result=outcomes.append, temperature=0
    )
    assert session.ask("Weather?").text == "I see."
    assert session.messages[2]["content"].startswith(said) and outcomes[0].result == session.messages[2]["content"]
    assert isinstance(outcomes[0].error, error)


def test_what_a_watcher_raises_ends_the_ask_and_leaves_the_session_as_it_was() -> None:
    def refuse(_: RequestedCall) -> bool:
        raise PermissionError("no tools today")

    session = scripted_chat(BONN, "Ok.").session(tools=[weather], on_tool_call=refuse, temperature=0)
    with pytest.raises(PermissionError, match="no tools today"):
        session.ask("Weather?")
    assert session.messages == []


def test_a_model_that_never_stops_calling_is_stopped() -> None:
    counted: list[RequestedCall] = []
    session = scripted_chat(BONN).session(
        tools=[weather], on_tool_call=counted.append, max_tool_rounds=3, temperature=0
    )
    with pytest.raises(ToolRoundsError, match="in 4 replies in a row, and may in 3") as caught:
        session.ask("Weather?")
    assert caught.value.rounds == 4 and len(counted) == 3 and session.messages == []
    for _ in range(3):
        session.stream("Weather?" if not session.messages else None).result()
        assert session.run_tools()
    session.stream().result()
    with pytest.raises(ToolRoundsError):
        session.run_tools()
    with pytest.raises(RequestError, match="max_tool_rounds is 0"):
        scripted_chat("x").session(max_tool_rounds=0)


def test_streams_are_one_reply_each_and_tools_run_between_them() -> None:
    script = [BONN, f"One more.\n{ROME}", "Grey."]
    session = scripted_chat(*script).session(tools=[weather], tool_choice="required", temperature=0)
    texts = ["".join(event.text for event in session.stream("Weather?"))]
    while session.run_tools():
        texts.append("".join(event.text for event in session.stream()))
    assert texts == ["", "One more.", "Grey."]
    assert [message["role"] for message in session.messages] == "user assistant tool assistant tool assistant".split()
    assert not session.run_tools()


def test_calls_of_tools_that_are_no_functions_are_the_callers() -> None:
    tool = {"type": "function", "function": {"name": "ask_user", "parameters": {"type": "object"}}}
    session = scripted_chat(f"{BONN}\n{called('ask_user', '{}')}", "Thanks.").session(
        tools=[weather, tool], temperature=0
    )
    reply = session.ask("Weather?")
    assert reply.finish_reason == "tool_calls" and [call.name for call in reply.tool_calls] == ["weather", "ask_user"]
    assert [message["role"] for message in session.messages] == ["user", "assistant", "tool"]
    with pytest.raises(RequestError, match=r"results of its calls \(ask_user\)"):
        session.ask("Well?")
    session.append({"role": "tool", "content": "Bonn, please"})
    assert session.messages[-1]["tool_call_id"] == reply.tool_calls[1].id
    assert session.ask().text == "Thanks."


def test_a_typed_answer_may_come_after_calls() -> None:
    session = scripted_chat(BONN, "[1, 2]").session(tools=[weather], temperature=0)
    assert session.ask("Weather?", type=list[int]) == [1, 2]
    with pytest.raises(AnswerError, match="was cut") as caught:
        session.ask("Weather?", type=list[int], max_tokens=3)
    assert caught.value.text == "[1," and caught.value.finish_reason == "length"
    assert len(session.messages) == 4


def test_cancelling_while_a_tool_runs_keeps_its_result_and_runs_no_other() -> None:
    ran: list[str] = []

    def first() -> str:
        ran.append("first")
        session.cancel()
        return "done"

    def second() -> None:
        ran.append("second")

    script = f"{called('first', '{}')}\n{called('second', '{}')}"
    session = scripted_chat(script, "Never.").session(tools=[first, second], temperature=0)
    reply = session.ask("Go")
    assert reply.finish_reason == "cancelled" and ran == ["first"]
    contents = [message["content"] for message in session.messages]
    assert contents == ["Go", "", "done", "This call was cancelled before it ran.", ""]
    assert session.ask("And?").text == "Never."


def test_the_event_loop_awaits_asks_and_runs_coroutine_tools() -> None:
    threads: list[int] = []

    async def watch(_: RequestedCall) -> bool:
        threads.append(threading.get_ident())
        return True

    script = [called("aweather", '{"city": "Bonn"}'), "Grey."]
    session = scripted_chat(*script).session(tools=[aweather], on_tool_call=watch, temperature=0)

    async def ask() -> str:
        answer = await session.aask("Weather?")
        return str(answer.text)

    assert asyncio.run(ask()) == "Grey."
    assert session.messages[2]["content"] == "grey in Bonn" and threads == [threading.get_ident()]
    # Without a loop, a coroutine gets one of its own.
    plain = scripted_chat(*script).session(tools=[aweather], temperature=0)
    assert plain.ask("Weather?").text == "Grey." and plain.messages[2]["content"] == "grey in Bonn"

    async def block() -> None:
        blocking = scripted_chat(*script).session(tools=[aweather], on_tool_call=watch, temperature=0)
        with pytest.raises(RequestError, match="use aask"):
            blocking.ask("Weather?")

    asyncio.run(block())


def test_cancelling_the_task_cancels_the_reply() -> None:
    with localinfer.load(threads=1) as llm:
        session = llm.session(ignore_eos=True, seed=1)

        async def cancel() -> None:
            task = asyncio.create_task(session.aask("Hello"))
            while session._running is None or session._running().computed_tokens < 40:  # type: ignore[union-attr]
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # It has ended, and the session is free.
            assert session.messages[-1]["finish_reason"] == "cancelled" and session.messages[-1]["content"]
            assert session.drop() == 2

        asyncio.run(cancel())


def test_async_streams_are_kept_too() -> None:
    with localinfer.load(threads=1) as llm:
        session = llm.session(seed=1, max_tokens=12)

        async def read() -> str:
            return "".join([event.text async for event in session.stream("Hello")])

        text = asyncio.run(read())
        assert [message["content"] for message in session.messages] == ["Hello", text] and text

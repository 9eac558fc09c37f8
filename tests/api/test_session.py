"""A session: what it keeps of every way in which a reply can end, and that what it shares is never computed again."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import localinfer
from localinfer.errors import (
    AnswerError,
    ClosedError,
    ContextLengthError,
    MessageError,
    RequestError,
    SessionFileError,
    TemplateError,
)
from localinfer.generation.session.session import Session
from localinfer.llm import LLM
from tests.api.scripted_chat import scripted_chat
from tests.support.inside import engine_of
from tests.support.limits import seconds, wait_until

OPTIONS: Any = {"seed": 3, "max_tokens": 24}
SYSTEM = "You are a friendly storyteller. Keep to animals and the weather."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localinfer.load(threads=1) as made:
        yield made


def contents(session: Session) -> list[str]:
    return [message["content"] for message in session.messages]


def test_a_session_answers_as_its_messages_alone_would(llm: LLM) -> None:
    session = llm.session(SYSTEM, **OPTIONS)
    first = session.ask("Hello")
    assert first.text == llm.chat([{"role": "system", "content": SYSTEM}, USER], **OPTIONS).text
    second = session.ask("And then?", seed=4)
    sent = [{"role": m["role"], "content": m["content"]} for m in session.messages]
    assert [m["role"] for m in sent] == ["system", "user", "assistant", "user", "assistant"]
    assert second.text == sent[-1]["content"] == llm.chat(sent[:-1], **{**OPTIONS, "seed": 4}).text
    assert second is session.last_completion
    session.messages[0]["content"] = "changed"
    assert session.messages[0]["content"] == SYSTEM


USER = {"role": "user", "content": "Hello"}


def test_measures_are_those_of_the_next_prompt(llm: LLM) -> None:
    session = llm.session(SYSTEM, **OPTIONS)
    for text in ("Hello", "And then? Tell me all of it.", "x"):
        expected = session.context_used + session.measure(text)
        assert session.measure(text) < 30
        assert session.ask(text).stats.prompt_tokens == expected
    assert session.context_length == llm.context_length


@pytest.mark.parametrize("system", [SYSTEM, None])
def test_after_prewarm_only_the_next_message_is_computed(system: str | None) -> None:
    with localinfer.load(threads=1) as llm:
        session = llm.session(system, tools=[weather] if system else None, **OPTIONS)
        assert session.prewarm() == session.context_used > 0
        assert session.prewarm() == 0
        used = session.context_used
        assert session.ask("Hello").stats.cached_tokens == used
        # The end of a reply is sampled, and not computed yet.
        assert 0 < session.prewarm() < 10 and session.prewarm() == 0
        used = session.context_used
        assert session.ask("And then?").stats.cached_tokens == used


def test_forks_compute_nothing_of_what_they_share_and_answer_as_if_alone() -> None:
    with localinfer.load(threads=1) as llm, localinfer.load(threads=1) as cold:
        session = llm.session(SYSTEM, **OPTIONS)
        session.ask("Hello")
        session.prewarm()
        used, held = session.context_used, engine_of(llm).pool.held_bytes
        forks = [session.fork() for _ in range(100)]
        assert sum(fork.prewarm() for fork in forks) == 0
        assert engine_of(llm).pool.held_bytes == held
        for number in range(0, 100, 20):
            question = f"Tell me of {number} badgers."
            reply = forks[number].ask(question)
            assert reply.stats.cached_tokens >= used
            alone = cold.chat([*map(plain, session.messages), {"role": "user", "content": question}], **OPTIONS)
            assert reply.text == alone.text and reply.token_ids == alone.token_ids
            cold.clear_cache()
        assert len(session.messages) == 3 and {len(fork.messages) for fork in forks} == {3, 5}


def test_a_fork_keeps_the_ids_of_replies_that_others_have_pushed_out(llm: LLM) -> None:
    session = llm.session(SYSTEM, temperature=2.0, **OPTIONS)
    session.ask("Hello")
    used = session.context_used
    fork = session.fork()
    for number in range(130):
        llm.chat([{"role": "user", "content": str(number)}], max_tokens=1)
    assert session.context_used == used
    fork.append({"role": "user", "content": "More"})
    assert fork.ask().stats.cached_tokens >= used - 10


def plain(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "content": message["content"]}


def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def test_edit_of_a_question_drops_what_answered_it_and_of_anything_else_does_not(llm: LLM) -> None:
    session = llm.session(SYSTEM, **OPTIONS)
    session.ask("Hello")
    session.ask("And then?")
    session.edit(-1, "It ended well.")
    session.edit(0, "Be brief.")
    assert contents(session)[0] == "Be brief." and contents(session)[4] == "It ended well."
    assert session.messages[4] == {"role": "assistant", "content": "It ended well."}
    session.edit(1, "Good evening")
    assert contents(session) == ["Be brief.", "Good evening"]
    expected = llm.chat([plain(message) for message in session.messages], **OPTIONS)
    assert session.ask().text == expected.text == contents(session)[2]
    for index in (3, -4, True, "x"):
        with pytest.raises(RequestError, match="index is"):
            session.edit(index, "x")  # type: ignore[arg-type]


def test_the_oldest_exchanges_are_dropped_on_demand(llm: LLM) -> None:
    session = llm.session(SYSTEM, messages=[USER, {"role": "assistant", "content": "Yes"}, USER], **OPTIONS)
    with pytest.raises(RequestError, match="exchanges is 3"):
        session.drop(3)
    assert session.drop() == 2
    assert contents(session) == [SYSTEM, "Hello"]
    assert session.drop() == 1 and len(session.messages) == 1


def test_a_full_context_is_an_error_with_both_numbers_and_the_way_out() -> None:
    with localinfer.load(threads=1, context_length=64) as llm:
        session = llm.session(messages=[USER, {"role": "assistant", "content": "Yes. " * 20}], **OPTIONS)
        before = session.messages
        for attempt in (session.ask, session.stream):
            with pytest.raises(ContextLengthError, match=r"drop\(\).*edit\(\)") as caught:
                attempt("word " * 40)
            assert caught.value.context_length == 64
        assert session.messages == before
        session.drop()
        assert session.ask("Hello").text
        session.append({"role": "user", "content": "word " * 80})
        with pytest.raises(ContextLengthError, match="the context holds 64") as caught:
            session.prewarm()
        assert caught.value.num_tokens == session.context_used > 64


def test_messages_are_checked_and_answered_without_a_new_one(llm: LLM) -> None:
    session = llm.session(**OPTIONS)
    with pytest.raises(RequestError, match="no message to answer"):
        session.ask()
    session.append({"role": "user", "content": [{"type": "text", "text": "Hello"}]})
    assert session.ask().text == llm.chat([USER], **OPTIONS).text
    with pytest.raises(RequestError, match="no message to answer"):
        session.ask()
    for wrong, error in (({}, MessageError), ({"role": "x", "content": ""}, RequestError), (3, RequestError)):
        with pytest.raises(error):
            session.append(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="cannot be kept"):
        session.append({"role": "user", "content": "x", "more": {1}})
    with pytest.raises(RequestError, match="no option maxtokens"):
        session.ask("x", maxtokens=3)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="no option continue_final_message"):
        llm.session(continue_final_message=True)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="system was given too"):
        llm.session("x", messages=[{"role": "system", "content": "y"}])
    assert len(session.messages) == 2


def test_a_stream_is_kept_when_it_ends_however_it_does(llm: LLM) -> None:
    session = llm.session(**OPTIONS)
    text = "".join(event.text for event in session.stream("Hello"))
    last = session.last_completion
    assert last is not None and contents(session) == ["Hello", text] == ["Hello", last.text]
    assert session.messages[1]["finish_reason"] == last.finish_reason
    with session.stream("Left") as left:
        said = next(left).text + next(left).text
    assert contents(session)[2:] == ["Left", said] and session.messages[3]["finish_reason"] == "cancelled"
    cancelled = session.stream("Cancelled")
    parts = [next(cancelled).text]
    session.cancel()
    parts += [event.text for event in cancelled]
    assert contents(session)[4:] == ["Cancelled", "".join(parts)] and "".join(parts)
    dropped = session.stream("Dropped")
    said = next(dropped).text
    with pytest.raises(RequestError, match="the session is answering"):
        session.ask("x")
    del dropped
    assert session.ask("And on").text
    assert contents(session)[6:8] == ["Dropped", said]
    assert contents(session)[8] == "And on"


def test_whoever_has_read_the_last_event_may_ask_on(llm: LLM) -> None:
    session = llm.session(**OPTIONS)
    stream = session.stream("Hello")
    while next(stream).finish_reason is None:
        pass
    assert session.ask("And then?").text and len(session.messages) == 4


def test_a_stream_that_is_not_read_changes_nothing(llm: LLM) -> None:
    session = llm.session(**OPTIONS)
    former = session.stream("Hello")
    with session.stream("Unread"):
        pass
    assert session.messages == [] and session.last_completion is None
    session.ask("Hi")
    with pytest.raises(RequestError, match="changed after this stream was made"):
        next(former)
    assert contents(session)[0] == "Hi" and len(session.messages) == 2


def test_a_stream_that_is_cancelled_before_it_is_read_says_nothing(llm: LLM) -> None:
    session = llm.session(**OPTIONS)
    unread = session.stream("Stopped at once")
    session.cancel()
    assert [event.finish_reason for event in unread] == ["cancelled"]
    assert session.messages == []
    assert session.ask("And on").text


def test_an_ask_that_is_cancelled_keeps_what_was_said_and_one_that_fails_nothing(llm: LLM) -> None:
    session = llm.session(**OPTIONS)
    session.ask("Hello")
    before = session.messages
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(session.ask("Go on", ignore_eos=True, max_tokens=100_000)))
    thread.start()
    assert wait_until(lambda: session._running is not None and session._running().computed_tokens > 60)  # type: ignore[union-attr]
    for attempt in (lambda: session.ask("x"), lambda: next(session.stream("x")), lambda: session.edit(0, "x")):
        with pytest.raises(RequestError, match="the session is answering"):
            attempt()
    assert len(session.messages) == 2 and session.fork().ask("Meanwhile").text
    session.cancel()
    thread.join(seconds(10))
    (reply,) = found
    assert reply.finish_reason == "cancelled" and reply.text
    assert contents(session)[2:] == ["Go on", reply.text]
    session.edit(2, "Hello again")
    session.ask()
    kept = session.messages
    for options, error in (({"temperature": -1}, RequestError), ({"type": list[int], "max_tokens": 1}, AnswerError)):
        with pytest.raises(error):
            session.ask("x", **options)
    assert session.messages == kept and before == kept[:2]


def test_two_sessions_answer_at_once(llm: LLM) -> None:
    sessions = [llm.session(seed=number, max_tokens=20) for number in range(3)]
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        texts[number] = sessions[number].ask("Hello").text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds(20))
    assert texts == {number: llm.chat([USER], seed=number, max_tokens=20).text for number in range(3)}


def test_a_session_comes_back_from_its_json(llm: LLM) -> None:
    session = llm.session(SYSTEM, temperature=2.0, **OPTIONS)
    session.ask("Hello")
    text = session.to_json()
    assert text == session.to_json() and json.loads(text)["version"] == 1
    assert "token" not in text and text != session.fork().to_json()
    back = Session.from_json(llm, text, temperature=2.0, **OPTIONS)
    assert back.messages == session.messages and back.context_used == session.context_used
    assert back.ask("And then?").text == session.ask("And then?").text
    assert json.loads(back.to_json())["id"] == json.loads(text)["id"]
    empty = Session.from_json(llm, llm.session().to_json())
    assert empty.messages == [] and empty.ask("Hello", **OPTIONS).text
    newer = json.dumps({**json.loads(text), "version": 9})
    for wrong, message in (("{", "not JSON"), ("{}", "not a saved"), (newer, "version 9")):
        with pytest.raises(SessionFileError, match=message):
            Session.from_json(llm, wrong)


def test_closed_sessions_say_so(llm: LLM) -> None:
    with llm.session(**OPTIONS) as session:
        session.ask("Hello")
    session.close()
    session.cancel()
    text = {"role": "user", "content": "x"}
    calls: list[Any] = [
        *(lambda: session.messages, lambda: session.context_used, lambda: session.measure("x")),
        *(lambda: session.ask("x"), lambda: session.stream("x"), session.run_tools, lambda: session.append(text)),
        *(lambda: session.edit(0, "x"), session.drop, session.fork, session.prewarm, session.to_json),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="session was closed"):
            call()


def test_closing_a_session_ends_its_reply(llm: LLM) -> None:
    session = llm.session(ignore_eos=True)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            session.ask("Hello")
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert wait_until(lambda: session._running is not None)
    session.close()
    thread.join(seconds(10))
    assert len(errors) == 1


def test_a_session_of_a_closed_model_says_so() -> None:
    llm = scripted_chat("Yes")
    session = llm.session()
    assert session.ask("Well?").text == "Yes"
    llm.close()
    with pytest.raises(ClosedError):
        session.ask("Well?")


def test_a_template_that_refuses_a_message_leaves_the_session_as_it_was() -> None:
    strict = "{% for m in messages %}{% if m.content == 'x' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
    with localinfer.load(threads=1, chat_template=strict + "{% endfor %}") as llm:
        session = llm.session(**OPTIONS)
        session.append({"role": "user", "content": "x"})
        for attempt in (lambda: session.ask("Hello"), lambda: session.context_used, session.prewarm):
            with pytest.raises(TemplateError):
                attempt()
        session.edit(0, "y")
        assert len(session.messages) == 1

"""Compaction: a summary is written behind the cached conversation, and stands for what it covers, and for no more."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import ContextLengthError, RequestError
from localinfer.generation.compaction import (
    SUMMARY_PREFIX,
    SUMMARY_REQUEST,
    SUMMARY_TURN,
    PromptMeter,
    compaction_steps,
    plan_summary,
    read_turns_of,
)
from localinfer.generation.session.session import Session
from localinfer.llm import LLM
from tests.engine.fake_recurrent import FakeRecurrentProgram, recurrent_layout
from tests.engine.fakes import FakeConfig, FakeModel, FakeProgram, FakeTemplate

SYSTEM = {"role": "system", "content": "Be exact."}
BOT, END = 259, 257
REQUEST = np.frombuffer(SUMMARY_REQUEST.encode(), np.uint8).astype(np.int32)


def replying(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
    """Answers a request for a summary by one, and all else by a word."""
    start = int(np.flatnonzero(history == BOT)[-1])
    asked = history[max(0, start - REQUEST.size - 8) : start]
    is_summary = (
        asked.size >= REQUEST.size and bytes(asked[asked < 256].astype(np.uint8)).find(b"Write that summary") > 0
    )
    reply = [*(b"All that matters." if is_summary else b"Done."), END]
    row = np.zeros(vocab_size, np.float32)
    row[reply[min(history.size - start - 1, len(reply) - 1)]] = 50.0
    return row


def long_model(context_length: int, *, is_recurrent: bool = False) -> LLM:
    """A model of bytes with a long context; with recurrent states beside its pages, if wanted."""
    made = (FakeRecurrentProgram if is_recurrent else FakeProgram)(260, replying, 512, 8)
    model = FakeModel(made, FakeConfig(260, context_length))
    if is_recurrent:
        model.kv_layout = recurrent_layout()
    model.chat_template = FakeTemplate()
    return LLM(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(("scale", "share", "is_recurrent"), [(10, 0.75, False), (1, 0.69, True)])
def test_thirty_thousand_tokens_are_summed_up_without_reading_them_again(
    scale: int, share: float, is_recurrent: bool
) -> None:
    with long_model(4_000 * scale, is_recurrent=is_recurrent) as llm:
        session = llm.session("Be exact.", compact=share)
        for number in range(10):
            stats = session.ask(f"{number} " + "x" * (300 * scale - 40)).stats
            assert stats.compaction is None
        computed = session.ask("y" * 60 * scale).stats
        made = computed.compaction
        assert made is not None and made.messages == 18 and made.completion_tokens == 18
        assert made.prompt_tokens - made.cached_tokens <= REQUEST.size + 200, "the request, and next to nothing else"
        assert made.prompt_tokens > 2_600 * scale
        # The last exchange stays, and is read behind the summary.
        assert computed.prompt_tokens < 500 * scale
        later = session.ask("And?").stats
        assert later.prompt_tokens - later.cached_tokens < 20
        assert later.compaction is not None and (later.compaction.messages, later.compaction.prompt_tokens) == (18, 0)
        assert session.messages[0] == SYSTEM and len(session.messages) == 27, "all are kept"


def bytes_meter(context_length: int) -> PromptMeter:
    """Counts characters, and refuses what templates refuse: a user's message behind another, or behind a result."""

    def encode(turns: Sequence[dict[str, Any]], _: bool) -> NDArray[np.int32]:
        text = "".join(
            f"<{turn['role']}>{turn['content']}{turn.get('tool_calls', '')}" for turn in read_turns_of(turns)
        )
        return np.frombuffer(text.encode("utf-32-le"), np.int32)

    return PromptMeter(encode, context_length)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, *calls: str) -> dict[str, Any]:
    made = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": name}


def shown(*texts: str, before: str = "") -> dict[str, Any]:
    """A message with a picture before its texts."""
    parts = [{"type": "text", "text": text} for text in (before, *texts) if text]
    parts.insert(bool(before), {"type": "image", "data": "AAAA"})
    return {"role": "user", "content": parts}


HEAD = [SYSTEM, user("a" * 400), said("b" * 400)]


@pytest.mark.parametrize(
    ("turns", "asked", "read"),
    [
        pytest.param(
            [*HEAD, user("c"), said("d"), user("e")],
            [*HEAD, user(SUMMARY_REQUEST)],
            [SYSTEM, user(SUMMARY_TURN["content"]), said("S"), user("c"), said("d"), user("e")],
            id="a question keeps the exchange before it",
        ),
        pytest.param(
            [*HEAD, user("c" * 600), said("d"), user("e")],
            [*HEAD, user("c" * 600), said("d"), user(SUMMARY_REQUEST)],
            [SYSTEM, user(SUMMARY_TURN["content"]), said("S"), user("e")],
            id="but no large one",
        ),
        pytest.param(
            [*HEAD, user("c"), said("", "look"), result("look", "d"), said("", "read"), result("read", "e")],
            [*HEAD, user("c"), said("", "look"), result("look", "d"), user(SUMMARY_REQUEST)],
            [
                SYSTEM,
                user(f"{SUMMARY_PREFIX}\n\nS\n\nThe user's last message, word for word:\n\nc"),
                *(said("", "read"), result("read", "e")),
            ],
            id="results of calls keep these, and the question",
        ),
        pytest.param(
            [*HEAD, user("c" * 600), said("", "look"), result("look", "d")],
            [*HEAD, user(f"{'c' * 600}\n\n{SUMMARY_REQUEST}")],
            [SYSTEM, user(f"{SUMMARY_PREFIX}\n\nS"), said("", "look"), result("look", "d")],
            id="but no long one, to which the request is added",
        ),
        pytest.param(
            [*HEAD, shown("c"), said("", "look"), result("look", "d")],
            [*HEAD, shown("c", SUMMARY_REQUEST)],
            [
                SYSTEM,
                shown("c", before=f"{SUMMARY_PREFIX}\n\nS\n\nThe user's last message, word for word:\n\n"),
                *(said("", "look"), result("look", "d")),
            ],
            id="with its pictures",
        ),
    ],
)
def test_what_stays_is_what_has_no_reply_yet(turns: Any, asked: Any, read: Any) -> None:
    plan = plan_summary(turns, bytes_meter(3000))
    assert plan is not None
    assert plan.prompt == asked and not plan.thinks and plan.max_tokens == 375
    marked = plan.marked("S")
    shown = read_turns_of(marked)
    assert shown == read
    assert [turn for turn in marked if turn in turns] == turns, "nothing is lost"
    # Nothing was said since, so nothing is summed up again.
    assert plan_summary([*marked[: plan.end], *plan.standing("S")], bytes_meter(3000)) is None


def test_more_than_fits_beside_the_request_takes_several_summaries() -> None:
    turns = [SYSTEM, *(turn for n in range(12) for turn in (user(f"{n}" * 200), said("r" * 100))), user("z")]
    steps, prompts = compaction_steps(turns, bytes_meter(1600), 800), []
    plan = next(steps)
    try:
        while True:
            prompts.append(plan.prompt)
            assert bytes_meter(1600).count(plan.prompt) + plan.max_tokens <= 1600
            plan = steps.send(f"S{len(prompts)}")
    except StopIteration as ended:
        made = ended.value
    assert len(prompts) > 2
    assert [turn for turn in made if turn in turns] == turns
    assert bytes_meter(1600).count(made) <= 800
    # An empty summary ends it, and changes nothing.
    steps = compaction_steps(turns, bytes_meter(1600), 800)
    next(steps)
    with pytest.raises(StopIteration) as stopped:
        steps.send("")
    assert stopped.value.value == turns


def test_a_context_too_small_for_a_summary_says_so() -> None:
    meter = bytes_meter(700)
    for turns in ([SYSTEM, user("a" * 600), said("b"), user("c" * 200)], [user("a" * 800), said("b"), user("c")]):
        with pytest.raises(ContextLengthError, match="holds 700 tokens, too few for a summary"):
            next(compaction_steps(turns, meter, 300))
    # What fits is answered as it is, and one message alone is nothing to sum up.
    for turns in ([SYSTEM, user("a" * 500), said("b"), user("c")], [user("a" * 600)]):
        with pytest.raises(StopIteration) as ended:
            next(compaction_steps(turns, meter, 300))
        assert ended.value.value == turns


def test_a_session_compacts_when_it_is_asked_and_saves_both() -> None:
    with long_model(4096) as llm:
        session = llm.session("Be exact.", max_tokens=50)
        with pytest.raises(RequestError, match="nothing to sum up yet"):
            session.compact()
        for text in ("one " * 200, "two " * 200, "three"):
            session.ask(text)
        fork = session.fork()
        assert session.compact(keep="the names").messages == 4
        with pytest.raises(RequestError, match="compact"):
            llm.session("Be exact.", compact=3.0)
        kept = Session.from_json(llm, session.to_json())
        for one in (session, kept):
            assert one.ask("And?").stats.prompt_tokens < 150 < fork.ask("And?").stats.prompt_tokens
        assert kept.messages == session.messages
        streamed = llm.session("Be exact.", compact=0.3, messages=fork.messages[1:])
        with streamed.stream("More. " * 10) as stream:
            assert "".join(event.text for event in stream) == "Done."
        assert stream.stats.compaction is not None and stream.stats.compaction.messages == 8

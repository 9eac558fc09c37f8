"""Loops are ended: lines that come again and again in a reply, and calls with the same result."""

import json

import numpy as np
import pytest

from localinfer.generation.chat.loop_stop import LEAST_BYTES, MOST_CALLS, MOST_ROUNDS, LoopStop, with_notes
from localinfer.types import TokenIds
from tests.engine.fakes import ByteTokenizer

START = 3
SIZE = 260


def guard(**more) -> LoopStop:
    return LoopStop(ByteTokenizer(), None, start=START, vocab_size=SIZE, **more)


def history(text: str) -> TokenIds:
    return np.array([1, 2, 3, *text.encode()], np.int32)


def forbidden(mask: LoopStop, text: str) -> str:
    return bytes(np.flatnonzero(~mask(history(text))[:256]).tolist()).decode()


def test_lines_may_come_eight_times_and_not_begin_again():
    line = "+    return x\\n+    y = 2\\n"
    notices: list[str] = []
    mask = guard(notices=notices)
    assert forbidden(mask, "a\\n" + line * (MOST_ROUNDS - 1)) == ""
    assert not notices
    # At the start of a line, and there only; the round may begin at either line.
    assert forbidden(mask, "a\\n" + line * MOST_ROUNDS) == "+"
    assert forbidden(mask, "a\\n" + line * MOST_ROUNDS + "+  ") == ""
    assert notices and "8 times" in notices[0]
    # It has gone on with something else, and comes back to it: twice is enough then.
    assert forbidden(mask, "a\\n" + line * MOST_ROUNDS + "-b\\n" + line) == ""
    assert forbidden(mask, "a\\n" + line * MOST_ROUNDS + "-b\\n" + line * 2) == "+"
    assert forbidden(guard(), "a\\n" + line * MOST_ROUNDS + "-b\\n" + line * 2) == ""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ha ", "h"),
        ("=", "="),
        ("0, ", "0"),
        ("a b c d e f g h i j k l m n o p q r s t u v w x y z ", "a"),
    ],
)
def test_other_repetitions_are_ended_when_they_are_long(text, wanted):
    rounds = LEAST_BYTES // len(text) + 1
    assert forbidden(guard(), "x" + text * max(rounds, MOST_ROUNDS)) == wanted
    assert forbidden(guard(), "x" + text * (min(rounds, MOST_ROUNDS) - 2)) == ""


def test_what_is_no_loop_goes_on():
    rows = "".join(f"| {number} | {number * number} |\n" for number in range(99))
    table = "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    for text in (rows, table * 2, "}\n" * 40, "\n" * 60, "    " * 60, "x = 1\n" * 7):
        assert forbidden(guard(), text) == "", text[:20]


def test_state_goes_back_with_drafts_that_were_not_taken():
    line = "abcdefghijklmnopqrstuvw\n"
    mask, text = guard(), line * MOST_ROUNDS
    for size in (len(text), len(text) - 5, len(text), 20, len(text), 0, len(text)):
        assert forbidden(mask, text[:size]) == ("a" if size == len(text) else "")
    assert forbidden(mask, text[:-5] + "vx\n") == ""
    draft = list((line * 2).encode())
    assert guard().count_allowed(history(line * (MOST_ROUNDS - 1)), draft) == len(line)
    assert guard().count_allowed(history("b"), draft) == len(draft)


def test_what_has_to_come_comes():
    class Forced:
        def __call__(self, history):
            allowed = np.zeros(SIZE, np.bool_)
            allowed[ord("a")] = True
            return allowed

        def count_allowed(self, history, draft):
            return len(draft)

    mask = LoopStop(ByteTokenizer(), Forced(), start=START, vocab_size=SIZE)
    text = "abcdefghijklmnopqrstuvw\n" * MOST_ROUNDS
    assert mask(history(text))[ord("a")]
    assert mask.count_allowed(history(text), [ord("a")]) == 1


def test_call_that_is_banned_is_not_made_again_but_one_like_it():
    banned = 'look", "arguments": {"path": ["a"]}'
    mask = guard(banned=[banned])
    assert forbidden(mask, '<tool_call>{"name": "look", "arguments": {"path": ["a') == '"'
    for text in ('{"name": "look", "arguments": {"path": ["', 'look", "arguments": {"path": ["ab', '"a'):
        assert forbidden(mask, text) == ""


def call(call_id: str, arguments: object, name: str = "look") -> dict[str, object]:
    calls = [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(call_id: str, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_notes_stand_behind_results_that_come_again_and_depend_on_what_is_before_them():
    messages: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    for number in range(5):
        arguments = {"b": 1, "a": 2} if number % 2 else json.dumps({"a": 2, "b": 1})
        messages += [call(f"c{number}", arguments), result(f"c{number}", "none")]
        messages += [call(f"d{number}", {"number": number}), result(f"d{number}", "none")]
    made, last = with_notes(messages)
    texts = [str(one["content"]) for one in made if one["role"] == "tool"]
    assert [text.count("times with the same") for text in texts] == [0, 0, 0, 0, 1, 0, 1, 0, 1, 0]
    assert "now come 5 times" in texts[8]
    assert last == []
    for size in range(len(messages)):
        assert with_notes(messages[:size])[0] == made[:size]
    _, last = with_notes(messages[:11])
    assert [(one.function["name"], one.times) for one in last] == [("look", MOST_CALLS)]
    again = [*messages[:9], {"role": "user", "content": "again"}, call("e", {"a": 2, "b": 1}), result("e", "none")]
    assert with_notes(again)[0] == again
    other = [*messages[:10], result("c2", "found")]
    assert with_notes(other)[0] == other

"""The public API under load: the words of a request alone are those it gets among others, and any thread ends it."""

import threading
import time
from typing import Any

import pytest

import localinfer
from localinfer.engine.admission import EngineLimits
from localinfer.engine.request import NO_TOKEN
from localinfer.engine.sampling.sampler import MAX_DRAFT_TOKENS
from localinfer.engine.speculation.costs import VerificationCosts, best_draft_length
from localinfer.errors import OverloadedError
from localinfer.llm import LLM
from tests.engine.fakes import fake_model, text_model
from tests.engine.generations import Gate
from tests.support.limits import seconds

PROMPT = "Once upon a time, there was a little dog. Once upon a time, there was"
REQUESTS: list[dict[str, Any]] = [
    {"prompt": PROMPT, "temperature": 0.0},
    {"prompt": PROMPT, "seed": 1, "temperature": 1.2},
    {"prompt": "One day", "seed": 2, "repetition_penalty": 1.3, "min_p": 0.02},
    {"prompt": "Lily and Tom " * 30, "temperature": 0.0, "frequency_penalty": 0.5},
    {"prompt": "Tom", "seed": 4, "dry_multiplier": 0.8},
    {"prompt": PROMPT, "seed": 5, "temperature": 0.9, "stop": "mom"},
]


def complete(llm: LLM, request: dict[str, Any]) -> tuple[str, list[int], str]:
    completion = llm.complete(**{"max_tokens": 40, **request})
    return completion.text, completion.token_ids, completion.finish_reason


@pytest.mark.parametrize("speculation", [None, "auto"])
def test_a_request_gets_the_same_words_alone_and_in_the_midst_of_others(speculation: str | None) -> None:
    with localinfer.load(threads=1, speculation=speculation) as llm:
        alone = [complete(llm, request) for request in REQUESTS]
    with localinfer.load(threads=2, speculation=speculation) as llm:
        found: dict[int, tuple[str, list[int], str]] = {}

        def read(index: int) -> None:
            found[index] = complete(llm, REQUESTS[index % len(REQUESTS)])

        threads = [threading.Thread(target=read, args=(index,)) for index in range(3 * len(REQUESTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds(15))
    assert [found[index] for index in range(len(threads))] == alone * 3


def test_a_cancelled_stream_ends_with_an_event_that_has_the_text_held_back() -> None:
    llm = LLM(text_model("so far so good", prompt_length=2))  # type: ignore[arg-type]
    stream = llm.stream("a", temperature=0, stop="so good then")
    events = [next(stream) for _ in range(9)]
    stream.cancel()
    events += stream
    assert "".join(event.text for event in events) == "so far so"
    assert events[-1].finish_reason == "cancelled" and events[-1].token_id == NO_TOKEN
    completion = stream.result()
    assert (completion.finish_reason, len(completion.token_ids)) == ("cancelled", 9)
    assert stream.stats.completion_tokens == 9


def test_limits_are_those_given() -> None:
    llm = LLM(fake_model(), limits=EngineLimits(max_running=1, max_queued=0))  # type: ignore[arg-type]
    stream = llm.stream("a", max_tokens=3)
    with pytest.raises(OverloadedError):
        llm.stream("b")
    stream.close()
    assert len(llm.complete("b", max_tokens=3, ignore_eos=True).token_ids) == 3


def test_drafts_get_shorter_as_the_batch_grows() -> None:
    # A pass that streams weights, and where each row beyond the fourth takes a fifth of that.
    costs = VerificationCosts([1.0 + 0.2 * max(0, rows - 4) for rows in range(1, MAX_DRAFT_TOKENS + 2)])
    chances = [0.8] * MAX_DRAFT_TOKENS
    depths = [best_draft_length(chances, costs, MAX_DRAFT_TOKENS, other_rows=n, other_tokens=n)[0] for n in range(16)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] >= 3 and depths[8] == depths[15] == 0


def test_the_wait_for_a_place_is_timed() -> None:
    gate = Gate(5)
    llm = LLM(fake_model(gate))  # type: ignore[arg-type]
    first, second = (llm.stream(text, max_tokens=4) for text in ("abcd", "vwxyz"))
    readers = [threading.Thread(target=stream.result) for stream in (first, second)]
    readers[0].start()
    assert gate.reached.wait(seconds(10))
    readers[1].start()
    time.sleep(0.05)
    assert second.computed_tokens == 0
    gate.may_pass.set()
    for reader in readers:
        reader.join(seconds(10))
    assert second.stats.waited_seconds >= 0.05
    assert second.stats.waited_seconds > first.stats.waited_seconds

"""The engine over a scripted model: chunks, positions, ends, cancelling, failures, and what stays usable after them."""

import gc
import os
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.engine import Engine
from localinfer.engine.request import NO_TOKEN, TokenEvent
from localinfer.engine.sampling.sampler import SamplingParams
from localinfer.errors import ClosedError, ContextLengthError, ModelFileError, OutOfMemoryError, RequestError
from tests.engine.fakes import PAGE_BYTES, FakeModel, fake_model, hashed_logits, scripted_logits
from tests.support.limits import seconds

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3)


def greedy_continuation(prompt: list[int], count: int, vocab_size: int = 260) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.argmax(hashed_logits(np.array(ids, np.int32), vocab_size))))
    return ids[len(prompt) :]


def ids_of(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


def all_pages_are_free(engine: Engine) -> bool:
    """Nothing but the prefix tree holds pages, and it gives every one back."""
    with engine.exclusive_cache() as cache:
        held = cache.pool.num_pages - cache.pool.num_free_pages
        is_all_cached = held == cache.tree.num_pages
        cache.clear()
        return is_all_cached and cache.pool.num_free_pages == cache.pool.num_pages


@pytest.mark.parametrize("prompt_length", [1, 4, 5, 6, 10, 11, 23])
def test_generation_continues_every_prompt_as_one_token_at_a_time_would(prompt_length: int):
    prompt = np.random.default_rng(prompt_length).integers(0, 260, prompt_length).tolist()
    engine = Engine(fake_model())
    events = list(engine.generate(prompt, GREEDY, max_tokens=20))
    assert ids_of(events) == greedy_continuation(prompt, 20)
    assert [event.position for event in events] == list(range(prompt_length, prompt_length + 20))
    assert [event.finish_reason for event in events] == [None] * 19 + ["length"]
    assert all_pages_are_free(engine)


def test_prompt_is_prefilled_in_full_batches_and_decoded_singly():
    model = fake_model(max_batch_rows=5)
    list(Engine(model).generate(list(range(12)), GREEDY, max_tokens=3))
    assert model.program.batch_sizes == [5, 5, 2, 1, 1]


@pytest.mark.parametrize("max_batch_rows", [1, 2, 64])
def test_seeded_text_does_not_depend_on_the_batches(max_batch_rows: int):
    expected = ids_of(list(Engine(fake_model()).generate([1, 2, 3, 4, 5, 6, 7], SEEDED, max_tokens=30)))
    model = fake_model(max_batch_rows=max_batch_rows)
    assert ids_of(list(Engine(model).generate([1, 2, 3, 4, 5, 6, 7], SEEDED, max_tokens=30))) == expected
    other_seed = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=4)
    assert ids_of(list(Engine(model).generate([1, 2, 3, 4, 5, 6, 7], other_seed, max_tokens=30))) != expected


def test_interleaved_generations_do_not_disturb_each_other():
    engine = Engine(fake_model())
    streams = [engine.generate([index], SEEDED, max_tokens=10) for index in range(3)]
    rounds = list(zip(*streams, strict=True))
    for index in range(3):
        alone = list(Engine(fake_model()).generate([index], SEEDED, max_tokens=10))
        assert [events[index] for events in rounds] == alone


def test_stop_token_is_the_last_event_and_can_be_ignored():
    model = fake_model(scripted_logits({2: 7, 3: 8, 4: 9}))
    engine = Engine(model)
    events = list(engine.generate([1, 1], GREEDY, stop_token_ids=[8, 100], max_tokens=10))
    assert events == [TokenEvent(7, 2, None), TokenEvent(8, 3, "stop")]
    ignoring = list(engine.generate([1, 1], GREEDY, stop_token_ids=[8], ignore_eos=True, max_tokens=3))
    assert ids_of(ignoring) == [7, 8, 9] and ignoring[-1].finish_reason == "length"


def test_stop_token_at_the_last_place_is_a_stop():
    engine = Engine(fake_model(scripted_logits({1: 7})))
    assert list(engine.generate([1], GREEDY, stop_token_ids=[7], max_tokens=1)) == [TokenEvent(7, 1, "stop")]


def test_generation_ends_with_the_context():
    engine = Engine(fake_model(context_length=10))
    events = list(engine.generate([1, 2, 3, 4], GREEDY))
    assert len(events) == 6 and events[-1] == TokenEvent(events[-1].token_id, 9, "length")
    assert len(list(engine.generate([1, 2, 3, 4], GREEDY, max_tokens=100))) == 6
    assert list(engine.generate([1] * 10, GREEDY)) == []


def test_long_generation_outgrows_its_first_history():
    engine = Engine(fake_model(scripted_logits({}), context_length=1100))
    params = SamplingParams(temperature=0, frequency_penalty=1, repetition_last_n=-1)
    events = list(engine.generate([1], params))
    assert len(events) == 1099
    counts = np.bincount(ids_of(events)[100:], minlength=260)
    assert counts.min() >= 3 and counts.max() <= 60


def test_penalties_see_prompt_and_completion():
    engine = Engine(fake_model(scripted_logits({})))
    params = SamplingParams(temperature=0, presence_penalty=60, repetition_last_n=3)
    assert ids_of(list(engine.generate([1, 2, 0], params, max_tokens=6))) == [3, 1, 2, 0, 3, 1]
    events = ids_of(list(engine.generate([0], params, max_tokens=8)))
    assert all(len(set(events[start : start + 4])) == 4 for start in range(5))


def test_over_long_prompt_is_refused_with_both_lengths():
    engine = Engine(fake_model(context_length=10))
    with pytest.raises(ContextLengthError, match="11 tokens, but the context holds 10"):
        engine.generate([1] * 11, GREEDY)
    with pytest.raises(ContextLengthError, match="11 tokens, but the context holds 10"):
        engine.logits([1] * 11)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 260], "token id 260 at index 1"),
        ([-1], "token id -1 at index 0"),
        ([2**70], "flat list"),
        ([2**63], "token id 9223372036854775808"),
        ([1.5], "flat list"),
        ([True, False], "flat list"),
        (["a"], "flat list"),
        ("abc", "flat list"),
        ([[1, 2]], "flat list"),
        ([[1], [1, 2]], "flat list"),
        (None, "flat list"),
        ([], "no tokens"),
    ],
)
def test_wrong_prompts_are_refused(prompt: object, message: str):
    with pytest.raises(RequestError, match=message):
        Engine(fake_model()).generate(prompt, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens", [-1, 1.5, True, "3"])
def test_wrong_max_tokens_is_refused(max_tokens: object):
    with pytest.raises(RequestError, match="max_tokens"):
        Engine(fake_model()).generate([1], GREEDY, max_tokens=max_tokens)  # type: ignore[arg-type]


def test_no_tokens_are_sampled_for_max_tokens_zero():
    model = fake_model()
    assert list(Engine(model).generate([1], GREEDY, max_tokens=0)) == []
    assert model.program.batch_sizes == []


def test_closing_a_generation_frees_its_pages():
    engine = Engine(fake_model())
    stream = engine.generate([1, 2, 3], GREEDY)
    next(stream)
    assert engine.pool.num_free_pages < engine.pool.num_pages
    stream.close()
    assert all_pages_are_free(engine)
    stream = engine.generate([1, 2, 3], GREEDY)
    next(stream)
    del stream
    gc.collect()
    assert all_pages_are_free(engine)


@pytest.mark.parametrize("position", [3, 8])
def test_failure_in_a_step_leaves_the_engine_usable(position: int):
    model = fake_model()
    engine = Engine(model)
    model.program.fails_at = {position}
    with pytest.raises(MemoryError, match="scripted failure"):
        list(engine.generate([1] * 7, GREEDY, max_tokens=5))
    assert all_pages_are_free(engine)
    model.program.fails_at = set()
    assert ids_of(list(engine.generate([5], GREEDY, max_tokens=4))) == greedy_continuation([5], 4)


def test_logits_that_are_not_finite_are_one_error_and_leave_the_engine_usable():
    def sometimes_broken(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        row = hashed_logits(history, vocab_size)
        if history.size == 6 and history[0] == 9:
            row[100] = np.nan
        return row

    engine = Engine(fake_model(sometimes_broken))
    with pytest.raises(ModelFileError, match="not finite for position 6"):
        list(engine.generate([9, 1], SEEDED, max_tokens=20))
    with pytest.raises(ModelFileError, match="not finite for position 6"):
        engine.logits([9, 1, 2, 3, 4, 5, 6])
    assert all_pages_are_free(engine)
    assert len(list(engine.generate([1], GREEDY, max_tokens=8))) == 8


def test_memory_that_ends_inside_a_generation_ends_it_with_what_it_has():
    engine = Engine(fake_model(), kv_memory=3 * PAGE_BYTES)
    generation = engine.generate([1], GREEDY)
    seen = list(generation)
    assert [event.token_id for event in seen[:-1]] == [
        event.token_id for event in Engine(fake_model()).generate([1], GREEDY, max_tokens=12)
    ]
    assert seen[-1] == TokenEvent(NO_TOKEN, 13, "length")
    (notice,) = generation.record.notices
    assert "after 12 tokens for lack of memory" in notice and "kv_memory" in notice
    assert all_pages_are_free(engine)
    assert len(list(engine.generate([1], GREEDY, max_tokens=12))) == 12


def test_a_prompt_that_leaves_no_memory_for_a_token_is_an_error():
    engine = Engine(fake_model(), kv_memory=3 * PAGE_BYTES)
    with pytest.raises(OutOfMemoryError, match="kv_memory"):
        list(engine.generate([1] * 13, GREEDY))
    assert all_pages_are_free(engine)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 17])
def test_logits_of_every_position_equal_those_of_its_prefix(length: int):
    token_ids = np.random.default_rng(length).integers(0, 260, length)
    engine = Engine(fake_model())
    logits = engine.logits(token_ids)
    assert logits.dtype == np.float32 and logits.shape == (length, 260)
    for row in range(length):
        assert (logits[row] == hashed_logits(token_ids[: row + 1].astype(np.int32), 260)).all()
    assert all_pages_are_free(engine)


def test_closed_engine_refuses_everything_and_closes_its_model_once():
    model = fake_model()
    engine = Engine(model)
    stream = engine.generate([1], GREEDY)
    next(stream)
    engine.close()
    engine.close()
    assert model.times_closed == 1 and engine.pool.allocated_bytes == 0
    for use in (lambda: next(stream), lambda: engine.generate([1], GREEDY), lambda: engine.logits([1])):
        with pytest.raises(ClosedError, match="closed"):
            use()
    stream.close()


def test_close_waits_for_the_step_in_progress():
    entered, leave = threading.Event(), threading.Event()

    def slow(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        entered.set()
        assert leave.wait(seconds(10))
        return hashed_logits(history, vocab_size)

    model = fake_model(slow)
    engine = Engine(model)
    caught: list[BaseException] = []

    def generate() -> None:
        try:
            list(engine.generate([1], GREEDY))
        except ClosedError as error:
            caught.append(error)

    worker = threading.Thread(target=generate)
    closer = threading.Thread(target=engine.close)
    worker.start()
    assert entered.wait(seconds(10))
    closer.start()
    assert model.times_closed == 0
    leave.set()
    worker.join(seconds(10))
    closer.join(seconds(10))
    assert len(caught) == 1 and model.times_closed == 1


def test_threads_take_turns_and_get_what_they_would_alone():
    engine = Engine(fake_model())
    results: dict[int, list[int]] = {}

    def generate(first: int) -> None:
        results[first] = ids_of(list(engine.generate([first], SEEDED, max_tokens=15)))

    threads = [threading.Thread(target=generate, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds(15))
    for first in range(4):
        assert results[first] == ids_of(list(Engine(fake_model()).generate([first], SEEDED, max_tokens=15)))
    assert all_pages_are_free(engine)


def test_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch):
    model: FakeModel = fake_model()
    engine = Engine(model)
    stream = engine.generate([1], GREEDY)
    next(stream)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    for use in (lambda: next(stream), lambda: engine.generate([1], GREEDY), lambda: engine.logits([1])):
        with pytest.raises(ClosedError, match="forked"):
            use()
    engine.close()
    assert model.times_closed == 0

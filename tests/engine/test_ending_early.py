"""Generations that are cancelled, closed or interrupted, at whatever place; what they have computed stays usable."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.admission import EngineLimits
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.engine import Engine
from localinfer.engine.request import NO_TOKEN, TokenEvent
from localinfer.errors import ClosedError
from localinfer.kernels.program import Batch
from tests.engine.fakes import PAGE_TOKENS, FakeModel, FakeProgram, hashed_logits
from tests.engine.generations import GREEDY, SEEDED, Gate, alone, numbers, wide_model
from tests.engine.speculation.test_speculation import Oracle, speculation
from tests.engine.test_engine import all_pages_are_free
from tests.support.limits import seconds, wait_until


def test_cancel_before_the_first_token_is_asked_for() -> None:
    model = wide_model()
    engine = Engine(model)
    generation = engine.generate(numbers(5), GREEDY)
    generation.cancel()
    assert list(generation) == [TokenEvent(NO_TOKEN, 5, "cancelled")]
    assert list(generation) == []
    assert model.program.batch_sizes == []


def test_cancel_drops_what_was_not_read() -> None:
    engine = Engine(wide_model())
    paused = engine.generate(numbers(4), GREEDY, max_tokens=60)
    next(paused)
    list(engine.generate(numbers(4, 1), GREEDY, max_tokens=30))
    paused.cancel()
    paused.cancel()
    assert list(paused) == [TokenEvent(NO_TOKEN, 5, "cancelled")]
    assert all_pages_are_free(engine)


def test_cancel_after_the_end_changes_nothing() -> None:
    engine = Engine(wide_model())
    generation = engine.generate(numbers(4), GREEDY, max_tokens=2)
    events = [next(generation), next(generation)]
    generation.cancel()
    assert events[-1].finish_reason == "length" and list(generation) == []


def test_cancel_in_the_midst_of_a_prompt_ends_it_with_the_chunk_and_keeps_what_was_computed() -> None:
    gate = Gate(1)
    model = wide_model(context_length=600)
    program = model.program
    engine = Engine(model)
    prompt = numbers(500)
    reached, may_pass = threading.Event(), threading.Event()
    run_batch = program.run

    def slow_run(batch: Batch) -> NDArray[np.float32]:
        if batch.segments[0].start_position >= 96:
            reached.set()
            assert may_pass.wait(seconds(10))
        return run_batch(batch)

    program.run = slow_run  # type: ignore[method-assign]
    generation = engine.generate(prompt, GREEDY)
    events: list[TokenEvent] = []
    reader = threading.Thread(target=lambda: events.extend(generation))
    reader.start()
    assert reached.wait(seconds(10))
    generation.cancel()
    may_pass.set()
    reader.join(seconds(10))
    assert events == [TokenEvent(NO_TOKEN, 500, "cancelled")]
    computed = sum(program.batch_sizes)
    assert computed <= 96 + 24
    program.run = run_batch  # type: ignore[method-assign]
    again = engine.generate(prompt, GREEDY, max_tokens=5)
    assert [event.token_id for event in again] == [
        event.token_id for event in Engine(wide_model(context_length=600)).generate(prompt, GREEDY, max_tokens=5)
    ]
    assert again.record.cached_tokens >= 96
    assert not gate.reached.is_set() and all_pages_are_free(engine)


@pytest.mark.parametrize("verb", ["cancel", "close"])
def test_a_waiting_reader_is_told_at_once(verb: str) -> None:
    gate = Gate(10)
    engine = Engine(wide_model(logits_of=gate))
    busy = engine.generate(numbers(10), GREEDY, max_tokens=3)
    waiting = engine.generate(numbers(7), GREEDY, max_tokens=3)
    kept: list[TokenEvent] = []
    told: list[TokenEvent] = []
    driver = threading.Thread(target=lambda: kept.extend(busy))
    driver.start()
    assert gate.reached.wait(seconds(10))
    reader = threading.Thread(target=lambda: told.extend(waiting))
    reader.start()
    assert wait_until(lambda: waiting.request.waiter is not None)
    getattr(waiting, verb)()
    reader.join(seconds(10))
    assert not reader.is_alive() and driver.is_alive()
    assert [event.finish_reason for event in told] == (["cancelled"] if verb == "cancel" else [])
    gate.may_pass.set()
    driver.join(seconds(10))
    assert len(kept) == 3 and all_pages_are_free(engine)


def test_interrupt_ends_the_generation_of_the_interrupted_thread_only() -> None:
    for place in range(1, 40):
        calls = 0

        def logits(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
            nonlocal calls
            calls += 1
            if calls == place:  # noqa: B023
                raise KeyboardInterrupt
            return hashed_logits(history, vocab_size)

        engine = Engine(wide_model(logits_of=logits))
        streams = [engine.generate(numbers(4, seed), SEEDED, max_tokens=12) for seed in range(3)]
        texts: list[list[TokenEvent]] = [[], [], []]
        ended: set[int] = set()
        while len(ended) < 3:
            for index, stream in enumerate(streams):
                try:
                    event = next(stream, None)
                except KeyboardInterrupt:
                    event = None
                    texts[index].clear()
                if event is None:
                    ended.add(index)
                else:
                    texts[index].append(event)
        wrong = [seed for seed in range(3) if texts[seed] != alone(numbers(4, seed), SEEDED, max_tokens=12)]
        assert len(wrong) == (calls >= place)
        assert all_pages_are_free(engine)


class InterruptibleFake(FakeProgram):
    """Asks after the first and the second half of the rows of a chunk; `while_asked` is called before the second."""

    while_asked: Callable[[], None] = staticmethod(lambda: None)
    answers: list[bool]

    def run_abortable(self, batch: Batch, should_abort: Callable[[float], bool]) -> NDArray[np.float32] | None:
        assert not should_abort(0.01), "it has only begun"
        self.while_asked()
        self.answers.append(should_abort(0.02))
        return None if self.answers[-1] else self.run(batch)


def interruptible_model() -> FakeModel:
    model = wide_model(context_length=600)
    program = model.program = InterruptibleFake(260, max_batch_rows=100, max_output_rows=12)
    program.answers = []
    return model


@pytest.mark.parametrize("verb", ["cancel", "close"])
def test_a_chunk_is_left_undone_when_nobody_wants_it_any_more(verb: str) -> None:
    model = interruptible_model()
    program = model.program
    assert isinstance(program, InterruptibleFake)
    engine = Engine(model)
    prompt = numbers(500)
    generation = engine.generate(prompt, GREEDY)
    calls = 0

    def end_in_third_chunk() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            getattr(generation, verb)()

    program.while_asked = end_in_third_chunk
    events = list(generation)
    assert [event.finish_reason for event in events] == (["cancelled"] if verb == "cancel" else [])
    assert program.answers == [False, False, True] and program.batch_sizes == [100, 100]
    again = engine.generate(prompt, GREEDY, max_tokens=5)
    whole = Engine(wide_model(context_length=600)).generate(prompt, GREEDY, max_tokens=5)
    assert list(again) == list(whole)
    assert again.record.cached_tokens == 200
    assert all_pages_are_free(engine)


@pytest.mark.parametrize("max_running", [1, 4])
def test_a_long_chunk_of_a_lone_prompt_gives_way_to_who_comes(max_running: int) -> None:
    model = interruptible_model()
    program = model.program
    assert isinstance(program, InterruptibleFake)
    engine = Engine(model, limits=EngineLimits(max_running=max_running))
    has_come = False
    joined: list[TokenEvent] = []
    joining = engine.generate(numbers(7, 1), SEEDED, max_tokens=20)
    reader = threading.Thread(target=lambda: joined.extend(joining))

    def come() -> None:
        nonlocal has_come
        if not has_come:
            has_come = True
            reader.start()
            assert wait_until(lambda: joining.request.waiter is not None)
            # So that what is left of the chunk looks long.
            time.sleep(0.01)

    program.while_asked = come
    events = list(engine.generate(numbers(300), SEEDED, max_tokens=20))
    reader.join(seconds(10))
    # Who comes has no place where only one may run, and somebody who waits ends no second chunk.
    assert program.answers.count(True) == (max_running > 1)
    expected = Engine(wide_model(context_length=600)).generate(numbers(300), SEEDED, max_tokens=20)
    assert events == list(expected) and joined == alone(numbers(7, 1), SEEDED, max_tokens=20)
    assert all_pages_are_free(engine)


def test_closing_the_engine_does_not_wait_for_a_chunk() -> None:
    model = interruptible_model()
    program = model.program
    assert isinstance(program, InterruptibleFake)
    engine = Engine(model)
    closing = threading.Thread(target=engine.close)

    def close() -> None:
        closing.start()
        assert wait_until(lambda: not engine.scheduler.is_usable)

    program.while_asked = close
    with pytest.raises(ClosedError):
        next(engine.generate(numbers(300), GREEDY))
    closing.join(seconds(10))
    assert program.answers == [True] and not closing.is_alive()


def test_ctrl_c_before_a_draft_is_rolled_back_leaves_no_wrong_token_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = numbers(6)
    text = prompt + [event.token_id for event in alone(prompt, GREEDY, max_tokens=30)]
    engine = Engine(wide_model(), speculation=speculation(Oracle(text, wrong_every=4)))
    generation = engine.generate(prompt, GREEDY, max_tokens=30)
    next(generation)

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(SequenceCache, "truncate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    with engine.exclusive_cache() as cache:
        (path,) = cache.tree.paths()
        held = [cache.pool.view(page)[: 4 * PAGE_TOKENS].view(np.int32) for page in path.pages.tolist()]
        assert np.concatenate(held)[: path.token_ids.size].tolist() == path.token_ids.tolist()
        assert path.token_ids.tolist() == text[: path.token_ids.size]


def test_text_is_ended_once_it_is_forgotten_though_it_met_the_error_of_another() -> None:
    def logits(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        if history[0] == 255 and history.size == 6:
            raise MemoryError("scripted failure")
        return hashed_logits(history, vocab_size)

    engine = Engine(wide_model(logits_of=logits))
    broken = engine.generate([255, 1, 2], GREEDY, max_tokens=40)
    next(broken)
    forgotten = engine.generate(numbers(5), GREEDY, max_tokens=40)
    for _ in range(10):
        next(forgotten)
    del forgotten
    assert not engine.scheduler.running
    told = []
    with pytest.raises(MemoryError, match="scripted failure") as failure:
        told.extend(broken)
    assert len(told) == 2
    # Where it happened is still said.
    assert any("in logits" in note and "scripted failure" in note for note in failure.value.__notes__)

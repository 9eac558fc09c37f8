"""Generations that run at once share steps, and none can tell: tokens, errors and cache are those of one alone."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.admission import EngineLimits
from localinfer.engine.engine import Engine
from localinfer.engine.request import NO_TOKEN, TokenEvent
from localinfer.engine.scheduler import Generation
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.errors import ClosedError, OverloadedError, RequestError
from localinfer.kernels.program import Batch
from tests.engine.fakes import PAGE_BYTES, FakeProgram, hashed_logits
from tests.engine.generations import GREEDY, PARAMS, SEEDED, Gate, alone, in_threads, numbers, wide_model
from tests.engine.speculation.test_speculation import speculation
from tests.engine.test_engine import all_pages_are_free
from tests.support.limits import seconds, wait_until


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"max_batch_rows": 3, "max_output_rows": 2}, {"max_batch_rows": 1}])
def test_threads_get_what_they_would_alone(drafts: bool, sizes: dict[str, int]) -> None:
    model = wide_model(**sizes)
    drafting = speculation(NgramDrafter()) if drafts and not sizes else None
    engine = Engine(model, speculation=drafting)
    requests = [(numbers(3 + 7 * index, index % 4), PARAMS[index % 3]) for index in range(9)]
    texts: dict[int, list[TokenEvent]] = {}

    def generate(index: int) -> None:
        prompt, params = requests[index]
        texts[index] = list(engine.generate(prompt, params, max_tokens=25))

    in_threads([lambda index=index: generate(index) for index in range(len(requests))])  # type: ignore[misc]
    for index, (prompt, params) in enumerate(requests):
        assert texts[index] == alone(prompt, params, max_tokens=25)
    assert all_pages_are_free(engine)


def test_readers_in_turns_share_steps() -> None:
    model = wide_model()
    engine = Engine(model)
    streams = [engine.generate(numbers(5, seed), GREEDY, max_tokens=30) for seed in range(6)]
    rounds = list(zip(*streams, strict=True))
    for seed in range(6):
        assert [events[seed] for events in rounds] == alone(numbers(5, seed), GREEDY, max_tokens=30)
    assert max(model.program.batch_sizes) >= 6
    assert len(model.program.batch_sizes) < 6 * 12


def test_a_paused_reader_is_computed_little_ahead_and_holds_nobody_up() -> None:
    model = wide_model()
    engine = Engine(model)
    paused = engine.generate(numbers(4), GREEDY, max_tokens=60)
    first = next(paused)
    other = list(engine.generate(numbers(4, 1), GREEDY, max_tokens=60))
    assert len(other) == 60
    assert sum(model.program.batch_sizes) < (4 + 59) + (4 + 8)
    assert [first, *paused] == alone(numbers(4), GREEDY, max_tokens=60)


class RecordingProgram(FakeProgram):
    """Notes the first id of every segment's sequence and how many rows it had."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.segments = getattr(self, "segments", [])
        self.segments.append([(segment.start_position, segment.num_rows) for segment in batch.segments])
        return super().run(batch)


def test_a_prompt_is_computed_in_chunks_beside_a_stream() -> None:
    model = wide_model(context_length=4000)
    model.program = RecordingProgram(260, max_batch_rows=24, max_output_rows=12)
    engine = Engine(model)
    stream = engine.generate(numbers(4), GREEDY)
    arriving = engine.generate(numbers(300, 1), GREEDY, max_tokens=2)
    has_arrived = threading.Event()

    def read() -> None:
        for _ in stream:
            if has_arrived.is_set():
                stream.close()

    def arrive() -> None:
        assert len(list(arriving)) == 2
        has_arrived.set()

    next(stream)
    in_threads([read, arrive])
    shared = [rows for rows in model.program.segments if len(rows) == 2 and rows[0][1] == 1 and rows[1][1] > 1]
    assert len(shared) > 1, "chunks share their steps with tokens of the stream"
    assert all_pages_are_free(engine)


def test_prompts_of_several_owners_take_turns() -> None:
    model = wide_model(context_length=600)
    model.program = RecordingProgram(260, max_batch_rows=10, max_output_rows=4)
    engine = Engine(model)
    gate = Gate(3)
    model.program.logits_of = gate
    ends: dict[str, float] = {}

    def read(name: str, prompt: list[int], owner: str) -> None:
        generation = engine.generate(prompt, GREEDY, max_tokens=1, owner=owner)
        assert len(list(generation)) == 1
        ends[name] = generation.request.token_seconds

    first = threading.Thread(target=read, args=("first", numbers(3), "other"))
    first.start()
    assert gate.reached.wait(seconds(10))
    greedy = [
        threading.Thread(target=read, args=(f"greedy {seed}", numbers(200, seed), "greedy")) for seed in range(1, 4)
    ]
    for thread in greedy:
        thread.start()
    assert wait_until(lambda: len(engine.scheduler.running) >= 4)
    modest = threading.Thread(target=read, args=("modest", numbers(150, 9), "modest"))
    modest.start()
    assert wait_until(lambda: len(engine.scheduler.running) >= 5)
    gate.may_pass.set()
    for thread in [first, *greedy, modest]:
        thread.join(seconds(15))
    assert sorted(ends, key=ends.__getitem__).index("modest") <= 2, "it did not wait for all prompts of who came first"


def test_one_prompt_asked_for_at_once_is_computed_once() -> None:
    model = wide_model(context_length=600)
    engine = Engine(model)
    gate = Gate(2)
    model.program.logits_of = gate
    blocker = threading.Thread(target=lambda: list(engine.generate([1, 2], GREEDY, max_tokens=1)))
    blocker.start()
    assert gate.reached.wait(seconds(10))
    prompt = numbers(201)
    readers = [threading.Thread(target=lambda: list(engine.generate(prompt, GREEDY, max_tokens=2))) for _ in range(4)]
    for thread in readers:
        thread.start()
    assert wait_until(lambda: len(engine.scheduler.running) >= 5)
    gate.may_pass.set()
    for thread in [blocker, *readers]:
        thread.join(seconds(15))
    # The last page is begun by each for itself.
    assert sum(model.program.batch_sizes) <= 2 + 201 + 3 * 2 + 4


@pytest.mark.parametrize("broken", ["logits", "mask", "program"])
def test_an_error_of_one_is_not_the_others(broken: str) -> None:
    def logits(history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        row = hashed_logits(history, vocab_size)
        if broken == "logits" and history[0] == 255 and history.size == 20:
            row[3] = np.nan
        if broken == "program" and history[0] == 255 and history.size == 20:
            raise MemoryError("scripted failure")
        return row

    def mask(token_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.full(260, token_ids.size < 20)

    engine = Engine(wide_model(logits_of=logits))
    plan = engine.plan(GREEDY, mask if broken == "mask" else None)
    streams = [engine.generate(numbers(5, seed), SEEDED, max_tokens=40) for seed in range(3)]
    texts: dict[int, list[TokenEvent]] = {}
    failures: list[Exception] = []
    told: list[TokenEvent] = []

    def read_broken() -> None:
        try:
            told.extend(engine.generate([255, 1, 2], plan, max_tokens=40))
        except Exception as error:
            failures.append(error)

    def read(index: int) -> None:
        texts[index] = list(streams[index])

    in_threads([read_broken, *(lambda index=index: read(index) for index in range(3))])  # type: ignore[misc]
    assert len(failures) == 1
    for seed in range(3):
        assert texts[seed] == alone(numbers(5, seed), SEEDED, max_tokens=40)
    assert all_pages_are_free(engine)


def test_who_runs_out_of_memory_waits_and_goes_on_with_the_same_tokens() -> None:
    engine = Engine(wide_model(), kv_memory=20 * PAGE_BYTES)
    texts: dict[int, list[TokenEvent]] = {}

    def read(seed: int) -> None:
        texts[seed] = list(engine.generate(numbers(20, seed), SEEDED, max_tokens=40))

    in_threads([lambda seed=seed: read(seed) for seed in range(4)])  # type: ignore[misc]
    for seed in range(4):
        assert texts[seed] == alone(numbers(20, seed), SEEDED, max_tokens=40)
    assert all_pages_are_free(engine)


def test_who_is_alone_with_too_little_memory_ends_with_what_it_has() -> None:
    engine = Engine(wide_model(), kv_memory=4 * PAGE_BYTES)
    generation = engine.generate(numbers(10), GREEDY)
    *tokens, last = list(generation)
    assert tokens == alone(numbers(10), GREEDY, max_tokens=40)[: len(tokens)] and len(tokens) == 7
    assert (last.token_id, last.finish_reason) == (NO_TOKEN, "length")
    assert "kv_memory" in generation.record.notices[0]
    assert all_pages_are_free(engine)


def test_several_that_run_out_of_memory_together_all_end_with_what_they_have() -> None:
    engine = Engine(wide_model(), kv_memory=6 * PAGE_BYTES)
    texts: dict[int, list[TokenEvent]] = {}

    def read(seed: int) -> None:
        texts[seed] = list(engine.generate(numbers(8, seed), SEEDED))

    in_threads([lambda seed=seed: read(seed) for seed in range(3)])  # type: ignore[misc]
    for seed in range(3):
        *tokens, last = texts[seed]
        assert tokens == alone(numbers(8, seed), SEEDED, max_tokens=80)[: len(tokens)] and tokens
        assert (last.token_id, last.finish_reason) == (NO_TOKEN, "length")
    assert all_pages_are_free(engine)


def test_guests_come_between_two_steps_of_a_stream() -> None:
    engine = Engine(wide_model(context_length=4000))
    stop = threading.Event()
    counts = [0, 0]

    def read() -> None:
        for _ in engine.generate(numbers(4), GREEDY):
            counts[0] += 1
            if stop.is_set():
                return

    def visit() -> None:
        assert wait_until(lambda: counts[0] > 0)
        before = counts[0]
        for _ in range(5):
            with engine.exclusive_cache() as cache:
                cache.clear()
            counts[1] += 1
        assert counts[0] - before < 60
        stop.set()

    in_threads([read, visit])
    assert counts[1] == 5 and stop.is_set()


def test_logits_of_a_text_are_computed_beside_streams() -> None:
    engine = Engine(wide_model())
    text = numbers(90)
    expected = Engine(wide_model()).logits(text)
    found: list[NDArray[np.float32]] = []
    events: list[TokenEvent] = []
    in_threads(
        [
            lambda: found.append(engine.logits(text)),
            lambda: events.extend(engine.generate(numbers(9), SEEDED, max_tokens=50)),
        ]
    )
    assert (found[0] == expected).all() and events == alone(numbers(9), SEEDED, max_tokens=50)


@pytest.mark.parametrize("is_counted", [True, False])
def test_requests_where_most_of_the_memory_is_held_do_not_preempt_each_other_for_ever(
    monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    engine = Engine(wide_model(max_batch_rows=4), kv_memory=14 * PAGE_BYTES)
    scored = engine.outputs(engine.program, np.array(numbers(30, 9), np.int32))
    lost = engine.pool.acquire(0 if is_counted else 7)
    for _ in range(6 if is_counted else 0):
        next(scored)
    step, steps = engine.scheduler._step, 0

    def counted() -> None:
        nonlocal steps
        steps += 1
        assert steps < 500, "nothing goes on"
        step()

    monkeypatch.setattr(engine.scheduler, "_step", counted)
    prompts = [numbers(size, seed) for seed, size in enumerate((12, 21, 23))]
    streams = [engine.generate(prompt, GREEDY, max_tokens=6) for prompt in prompts]
    texts = list(zip(*streams, strict=True))
    assert list(zip(*texts, strict=True)) == [tuple(alone(prompt, GREEDY, max_tokens=6)) for prompt in prompts]
    scored.close()  # type: ignore[attr-defined]
    engine.pool.release(lost)
    assert all_pages_are_free(engine)


def test_too_many_are_refused_with_the_time_to_come_back() -> None:
    engine = Engine(wide_model(), limits=EngineLimits(max_running=2, max_queued=1))
    taken = [engine.generate(numbers(3, seed), GREEDY, max_tokens=5) for seed in range(3)]
    with pytest.raises(OverloadedError, match="2 requests are running and 1 are waiting") as refusal:
        engine.generate(numbers(3), GREEDY)
    assert 1 <= refusal.value.retry_after_seconds <= 60
    rounds = list(zip(*taken, strict=True))
    assert [events[2] for events in rounds] == alone(numbers(3, 2), GREEDY, max_tokens=5)
    taken = [engine.generate(numbers(3, seed), GREEDY, max_tokens=5) for seed in range(3)]
    taken.pop().close()
    del taken
    assert len(list(engine.generate(numbers(3), GREEDY, max_tokens=5))) == 5


@pytest.mark.parametrize("limits", [{"max_running": 0}, {"max_running": None}, {"max_queued": -1}, {"max_queued": 1.5}])
def test_wrong_limits_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(limits))):
        EngineLimits(**limits)


def test_more_than_may_run_wait_for_their_places() -> None:
    model = wide_model()
    engine = Engine(model, limits=EngineLimits(max_running=2))
    texts: dict[int, list[TokenEvent]] = {}

    def read(seed: int) -> None:
        texts[seed] = list(engine.generate(numbers(3, seed), GREEDY, max_tokens=20))

    in_threads([lambda seed=seed: read(seed) for seed in range(7)])  # type: ignore[misc]
    assert texts == {seed: alone(numbers(3, seed), GREEDY, max_tokens=20) for seed in range(7)}


def test_closing_the_engine_tells_every_reader() -> None:
    gate = Gate(6)
    engine = Engine(wide_model(logits_of=gate))
    caught: list[Exception] = []

    def read(seed: int) -> None:
        try:
            list(engine.generate(numbers(5, seed), GREEDY))
        except ClosedError as error:
            caught.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    assert gate.reached.wait(seconds(10))
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.may_pass.set()
    for thread in [*threads, closer]:
        thread.join(seconds(10))
    assert len(caught) == 4


class EvenAfterOdd:
    """A guiding mask: even ids at even positions; it forces what a text says, and notes what it was asked."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.asked: list[int] = []
        self.prepared: list[tuple[int, int]] = []

    def __call__(self, history: NDArray[np.int32]) -> NDArray[np.bool_]:
        self.asked.append(history.size)
        return np.arange(260) % 2 == history.size % 2

    def forced(self, history: NDArray[np.int32], most: int) -> list[int]:
        return self.text[history.size : history.size + most] if history.size % 5 == 0 else []

    def prepare(self, history: NDArray[np.int32], position: int) -> None:
        self.prepared.append((position, history.size))
        if position == 50:
            raise RequestError("it costs too much")

    def count_allowed(self, history: NDArray[np.int32], draft: Sequence[int]) -> int:
        fits = [token_id % 2 == (history.size + index) % 2 for index, token_id in enumerate(draft)]
        return fits.index(False) if False in fits else len(fits)


@pytest.mark.parametrize("drafts", [False, True])
def test_grammars_are_prepared_during_the_pass_and_change_no_token(drafts: bool) -> None:
    def texts(guides: list[Any], engine: Engine) -> list[list[TokenEvent]]:
        plans = [engine.plan(SEEDED, guide) for guide in guides]
        streams = [engine.generate(numbers(30, index), plan) for index, plan in enumerate(plans)]
        return [list(events) for events in zip(*zip(*streams, strict=True), strict=True)]

    masks = [lambda history: np.arange(260) % 2 == history.size % 2] * 3
    plain = texts(masks, Engine(wide_model()))
    whole = [numbers(30, index) + [event.token_id for event in events] for index, events in enumerate(plain)]
    model = wide_model()
    engine = Engine(model, speculation=speculation(NgramDrafter()) if drafts else None)
    guides = [EvenAfterOdd(whole[0]), EvenAfterOdd(whole[1]), EvenAfterOdd([1] * 96)]
    assert texts(guides, engine) == plain
    for guide in guides:
        assert guide.asked == list(range(30, 96))
        assert all(position <= end for position, end in guide.prepared)
    assert len(guides[0].prepared) < 45 and len(guides[2].prepared) >= 45
    engine.close()


def test_readers_that_come_leave_and_fail_at_random_never_wait_for_ever() -> None:
    engine = Engine(wide_model(), kv_memory=60 * PAGE_BYTES, limits=EngineLimits(max_running=4))
    expected = {seed: alone(numbers(4 + 5 * seed, seed), SEEDED, max_tokens=18) for seed in range(5)}
    problems: list[str] = []

    def live(thread: int) -> None:
        random = np.random.default_rng(thread)
        for _ in range(25):
            seed = int(random.integers(5))
            generation = engine.generate(numbers(4 + 5 * seed, seed), SEEDED, max_tokens=18, owner=thread % 2)
            most = int(random.integers(25))
            other: list[Generation] = []
            canceller = None
            taken: list[TokenEvent] = []
            if most % 3 == 0:
                canceller = threading.Timer(float(random.random()) * 0.01, generation.cancel)
                canceller.start()
            for event in generation:
                if event.finish_reason == "cancelled":
                    break
                taken.append(event)
                if len(taken) > most:
                    other.append(generation)
                    break
            if canceller is not None:
                canceller.join()
            if taken != expected[seed][: len(taken)] or (not other and most % 3 and taken != expected[seed]):
                problems.append(f"{thread} {seed} {most} {taken}")

    in_threads([lambda thread=thread: live(thread) for thread in range(6)])  # type: ignore[misc]
    assert problems == []
    assert all_pages_are_free(engine)

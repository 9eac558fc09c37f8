"""Texts of a recurrent model go on from snapshots of its state, with the tokens of a cold start."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from localinfer.engine.admission import EngineLimits
from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.engine.cache.prefix_tree import places_of_snapshots
from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.engine.cache.sequence_state import SnapshotPolicy
from localinfer.engine.engine import Engine
from localinfer.engine.request import TokenEvent
from localinfer.engine.speculation.draft_model import DraftModel
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.errors import OutOfMemoryError
from localinfer.generation.beam_search import search_beams
from localinfer.generation.stream import Completion
from localinfer.llm import LLM
from tests.engine.fake_recurrent import LOG_BYTES, STATE_BYTES, FakeRecurrentProgram, recurrent_layout, recurrent_model
from tests.engine.fakes import FakeLayout, FakeModel, FakeTemplate, fake_model
from tests.engine.generations import GREEDY, PARAMS, SEEDED, numbers
from tests.engine.speculation.test_speculation import speculation
from tests.engine.test_scheduler import EvenAfterOdd
from tests.support.inside import engine_of

PAGES = pytest.mark.parametrize("page_bytes", [64, 0])
SIZES = {"max_batch_rows": 24, "max_output_rows": 12, "context_length": 400}
NO_HINTS = CacheHints()


def recurrent(page_bytes: int = 64, **sizes: Any) -> FakeModel:
    return recurrent_model(page_bytes=page_bytes, **{**SIZES, **sizes})


def cold(prompt: list[int], params: Any = GREEDY, count: int = 20, **options: Any) -> list[TokenEvent]:
    """What the plain scripted model says, which has no cache to get wrong."""
    return list(Engine(fake_model(**SIZES)).generate(prompt, params, max_tokens=count, **options))  # type: ignore[arg-type]


@contextmanager
def leak_free(engine: Engine) -> Iterator[Engine]:
    """At the end nothing is held that is not cached, and nothing at all once the cache is cleared."""
    yield engine
    with engine.exclusive_cache() as cache:
        pool = cache.pool
        assert pool.logs.num_held == 0 and pool.states.num_held == cache.tree.num_snapshots
        cache.clear()
        assert pool.held_bytes == 0 and pool.states.num_held == 0 and not pool.grid
        assert (pool.counts == 0).all()
    engine.close()


def warm(engine: Engine, prompt: list[int], params: Any = GREEDY, count: int = 20, **options: Any) -> int:
    """Generate, compare with a cold start, and return how many tokens were cached."""
    generation = engine.generate(prompt, params, max_tokens=count, **options)
    assert list(generation) == cold(prompt, params, count)
    return generation.record.cached_tokens


@PAGES
@pytest.mark.parametrize("params", PARAMS)
def test_chat_computes_only_what_is_new(page_bytes: int, params: Any):
    with leak_free(Engine(recurrent(page_bytes))) as engine:  # type: ignore[arg-type]
        first = numbers(100)
        reply = [event.token_id for event in cold(first, params)]
        assert warm(engine, first, params) == 0
        # Asked again, its last token is computed; continued, nothing of it is but the token that was never read.
        assert warm(engine, first, params) == 99
        second = [*first, *reply, *numbers(30, 1)]
        assert warm(engine, second, params) == 119
        # An edited last message goes on where the turn before ended, another reply to the first prompt at its end.
        assert warm(engine, [*first, *reply, *numbers(30, 2)], params) == 119
        assert warm(engine, [*first, *numbers(20, 3)], params) == 99
        assert warm(engine, second, params) == 149


def test_places_where_texts_part_and_system_prompts_end_are_kept():
    with leak_free(Engine(recurrent())) as engine:  # type: ignore[arg-type]
        system, hints = numbers(50), CacheHints(system_tokens=50, branch_tokens=(70,))
        first = [*system, *numbers(60, 1)]
        assert warm(engine, first, cache_hints=hints) == 0
        # The end of the system prompt in whole pages; where a later prompt is told to branch off.
        assert warm(engine, [*system, *numbers(60, 2)], cache_hints=CacheHints(system_tokens=50)) == 48
        assert warm(engine, [*first[:75], *numbers(30, 3)]) == 70
        missed = engine.generate([*first[:100], 1, 2, 3], GREEDY, max_tokens=1)
        list(missed)
        assert missed.record.cached_tokens == 70 and missed.record.miss is not None
        assert "no snapshot before position 100" in missed.record.miss.describe(None)
        assert "from 70 on" in missed.record.miss.describe(None)
        # Now that texts have parted there, more of them may.
        assert warm(engine, [*first[:100], 7, 7]) == 100
        with engine.exclusive_cache() as cache:
            stats = cache.snapshot_stats
        assert stats is not None and stats.held == stats.taken - stats.evicted and stats.hits == 4
        assert stats.num_bytes == stats.held * STATE_BYTES


@PAGES
def test_texts_that_part_inside_a_page_share_the_snapshot_before(page_bytes: int):
    with leak_free(Engine(recurrent(page_bytes))) as engine:  # type: ignore[arg-type]
        first = numbers(58)
        warm(engine, first)
        # Both go on from position 57, the second of a page, and each has a page of its own for it.
        second = [*first[:57], 1, 2, *numbers(40, 1)]
        assert warm(engine, second) == 57
        assert warm(engine, [*second[:59], 3, 3, 3]) == 57
        assert warm(engine, [*second[:59], 4, 4, 4]) == 57


@PAGES
def test_requests_at_once_compute_what_they_share_once(page_bytes: int):
    model = recurrent(page_bytes)
    with leak_free(Engine(model)) as engine:  # type: ignore[arg-type]
        shared = numbers(200)
        prompts = [[*shared, *numbers(9, seed)] for seed in range(1, 9)]
        streams = [engine.generate(prompt, GREEDY, max_tokens=12) for prompt in prompts]
        for stream in streams:
            # As if all readers had asked before the first step.
            stream.request.is_started = True
            engine.scheduler.running.append(stream.request)
        rounds = list(zip(*streams, strict=True))
        for index, prompt in enumerate(prompts):
            assert [events[index] for events in rounds] == cold(prompt, count=12)
        assert sum(model.program.batch_sizes) < 200 + 8 * (9 + 12 + 8)
        # Several replies to one prompt.
        streams = [engine.generate(shared, SEEDED, max_tokens=9) for _ in range(3)]
        for events in zip(*streams, strict=True):
            assert len(set(events)) == 1


def test_completions_of_one_prompt_share_it():
    model = recurrent()
    with LLM(model) as llm:  # type: ignore[arg-type]
        found = llm.complete_many(numbers(100), n=4, temperature=1.0, seed=3, max_tokens=8)
        assert [one.stats.cached_tokens for one in found] == [0, 99, 99, 99]


@PAGES
def test_grid_bounds_what_an_edit_in_the_middle_costs(page_bytes: int):
    program = FakeRecurrentProgram(260, max_batch_rows=24, has_pages=page_bytes > 0)
    policy = SnapshotPolicy(grid_tokens=32, grid_share=0.15, near_tokens=4)
    cache = PrefixCache(
        recurrent_layout(page_bytes), max_bytes=None, context_length=9000, policy=policy, settle=program.settle
    )
    ids = np.array(numbers(1300), np.int32)

    def run(token_ids: Any) -> int:
        admission = cache.admit(token_ids, NO_HINTS)
        sequence = admission.sequence
        while sequence.length < token_ids.size:
            rows = token_ids[sequence.length :][:24] if sequence.length < 800 else token_ids[sequence.length :][:1]
            forward(program.run, (sequence,), (rows,), np.zeros(0, np.int32))
            assert len(cache.pool.grid) * STATE_BYTES <= 0.15 * cache.pool.held_bytes
            if sequence.length <= 800:
                cache.publish(sequence, token_ids, NO_HINTS)
        cache.retire(sequence, token_ids, NO_HINTS)
        return admission.cached_tokens

    assert run(ids) == 0
    grid = len(cache.pool.grid)
    if page_bytes:
        # A page of 4 positions takes as much as a state.
        assert grid > 25
        for length in (400, 750, 1100):
            found = cache.tree.match(np.array([*ids[:length], 999], np.int32))
            assert length - found.usable <= 64
    for seed in range(1, 40):
        run(np.array(numbers(40, seed), np.int32))
    assert page_bytes or 1 <= len(cache.pool.grid) <= 15
    while cache.tree.evict(20, 0 if page_bytes else 20 * STATE_BYTES):
        assert page_bytes or cache.tree.num_snapshots >= 0
    cache.clear()
    assert cache.pool.held_bytes == 0


def test_prompts_that_part_near_their_ends_share_the_rest_from_the_second_on():
    sizes = {**SIZES, "context_length": 800}
    shared, params = numbers(500), SEEDED
    with leak_free(Engine(recurrent_model(**sizes))) as engine:  # type: ignore[arg-type]
        for seed, cached in ((1, 0), (2, 188), (3, 500), (4, 500)):
            prompt = [*shared, *numbers(200, seed)]
            generation = engine.generate(prompt, params, max_tokens=5)
            assert list(generation) == list(Engine(fake_model(**sizes)).generate(prompt, params, max_tokens=5))  # type: ignore[arg-type]
            assert generation.record.cached_tokens == cached


def test_few_places_on_the_grid_are_spread_evenly_and_pass_over_ends_of_turns():
    # A state takes as much as the pages of 64 positions, so that only every 427th may have one.
    layout = FakeLayout(page_bytes=64, state_bytes=1024, log_bytes=LOG_BYTES)
    policy = SnapshotPolicy(grid_tokens=16, grid_share=0.15, near_tokens=4)
    ids = np.random.default_rng(0).integers(0, 250, 8000).astype(np.int32)

    def cached(turns: list[int]) -> tuple[PrefixCache, list[int]]:
        """The cache after prompts of these lengths, and where there are snapshots of the longest."""
        cache = PrefixCache(layout, max_bytes=None, context_length=9000, policy=policy)
        for length in turns:
            sequence = cache.admit(ids[:length], NO_HINTS).sequence
            while sequence.length < length:
                rows = min(48, length - sequence.length)
                sequence.reserve(sequence.length + rows)
                sequence.segment(rows)
                sequence.commit(sequence.length + rows)
                assert len(cache.pool.grid) * 1024 <= 0.15 * cache.pool.held_bytes
                cache.publish(sequence, ids, NO_HINTS)
            cache.retire(sequence, ids, NO_HINTS)
        return cache, sorted(cache.tree.match(ids).snapshots)

    for length in (3000, 5000, 8000):
        cache, places = cached([length])
        gaps = np.diff([0, *places])
        best = length / (2 * (len(cache.pool.grid) + 1))
        assert len(cache.pool.grid) >= 2 and (gaps**2).sum() / (2 * length) < 1.5 * best
    # The ends of turns leave one wide gap, and that is where the places of the grid are.
    cache, places = cached([*range(150, 4001, 150), 8000])
    positions = cache.tree.match(ids).snapshots
    grid = [position for position in places if positions[position] in cache.pool.grid]
    assert len(grid) > 20 and min(grid) > 4000


@pytest.mark.parametrize("has_others", [False, True])
def test_long_chat_in_little_memory_keeps_snapshots_that_lie_further_apart_further_back(has_others: bool):
    # Pages of the chat of 40 turns, 10 states more, each of which takes as much as the pages of 640 positions.
    state_bytes, turn, length = 160 * 64, 160, 40 * 160
    layout = FakeLayout(page_bytes=64, state_bytes=state_bytes, log_bytes=LOG_BYTES)
    memory = (length // 4 + 40) * 64 + 10 * state_bytes
    cache = PrefixCache(layout, max_bytes=memory, context_length=length, batch_tokens=64)
    ids = np.random.default_rng(0).integers(0, 250, length).astype(np.int32)

    def compute(text: Any, hints: CacheHints) -> int:
        """Compute a prompt and a reply of 40 tokens; return how many of the prompt's were computed."""
        sequence = cache.admit(text[:-40], hints).sequence
        num_computed = text.size - 40 - sequence.length
        while sequence.length < text.size:
            rows = min(64, text.size - 40 - sequence.length) if sequence.length < text.size - 40 else 1
            sequence.reserve(sequence.length + rows)
            sequence.segment(rows)
            sequence.commit(sequence.length + rows)
            if rows > 1:
                cache.publish(sequence, text, hints)
        cache.retire(sequence, text, hints)
        return num_computed

    compute(ids[:turn], NO_HINTS)
    for end in range(2 * turn, length + 1, turn):
        assert compute(ids[:end], CacheHints(branch_tokens=(end - turn + 2,))) == turn - 40
        if has_others and end % (5 * turn) == 0:
            compute(np.random.default_rng(end).integers(0, 250, 100).astype(np.int32), NO_HINTS)
    edits = np.arange(0, length, turn)
    usable = [cache.tree.match(np.array([*ids[: place + 2], 999], np.int32)).usable for place in edits]
    costs = edits - np.minimum(usable, edits)
    assert costs[-2] <= turn and (costs <= np.maximum(length - edits, 2 * turn)).all()
    assert cache.pool.allocated_bytes <= memory and cache.tree.evicted_snapshots > 20


@PAGES
def test_drafts_and_forced_tokens_change_no_text(page_bytes: int):
    prompt = [5, 6, 7, 8] * 20
    drafting = speculation(NgramDrafter())
    with leak_free(Engine(recurrent(page_bytes), speculation=drafting)) as engine:  # type: ignore[arg-type]
        for params in PARAMS:
            wanted = cold(prompt, params, 60)
            reply = [event.token_id for event in wanted]
            # A prediction with errors: some drafts are accepted, some in part, some not at all.
            wrong = [token if index % 7 else 1 for index, token in enumerate(reply)]
            generation = engine.generate(prompt, params, max_tokens=60, prediction=wrong)
            assert list(generation) == wanted
            record = generation.record.speculation
            assert record is not None and sum(record.accepted) > 10 and sum(record.drafted) > sum(record.accepted)
            again = engine.generate([*prompt, *reply, 3], params, max_tokens=4)
            assert list(again) == cold([*prompt, *reply, 3], params, 4)
            assert again.record.cached_tokens >= 139 - 16
        assert page_bytes or engine.program.num_settled > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_same", [True, False])
def test_recurrent_draft_model_goes_back_too(is_same: bool):
    drafter = recurrent() if is_same else recurrent(0)
    model = DraftModel(drafter, target_vocab_size=260)  # type: ignore[arg-type]
    drafting = speculation(None, model)
    engine = Engine(recurrent(), speculation=drafting)  # type: ignore[arg-type]
    for params in PARAMS:
        prompt = numbers(40)
        generation = engine.generate(prompt, params, max_tokens=60)
        assert list(generation) == cold(prompt, params, 60)
        record = generation.record.speculation
        assert record is not None and sum(record.drafted) > 0 and not record.all_notices
    assert model.cache.pool.logs.num_held == 0
    model.cache.clear()
    assert model.cache.pool.held_bytes == 0
    engine.close()


@PAGES
def test_grammar_beside_streams(page_bytes: int):
    engine = Engine(recurrent(page_bytes))  # type: ignore[arg-type]
    plain = Engine(fake_model(**SIZES))  # type: ignore[arg-type]
    for each in (engine, plain):
        plan = each.plan(GREEDY, EvenAfterOdd(list(range(200))))
        streams = [each.generate(numbers(20, seed), GREEDY, max_tokens=20) for seed in range(3)]
        streams.append(each.generate(numbers(20, 9), plan, max_tokens=20))
        texts = [[event.token_id for event in stream] for stream in streams]
        if each is engine:
            found = texts
    assert found == texts


def test_preempted_and_evicted_texts_go_on_with_the_same_tokens():
    model = recurrent()
    with leak_free(Engine(model, kv_memory=60 * 64, limits=EngineLimits(max_running=3))) as engine:  # type: ignore[arg-type]
        streams = [engine.generate(numbers(30, seed), SEEDED, max_tokens=50) for seed in range(5)]
        texts: list[list[TokenEvent]] = [[] for _ in streams]
        while any(len(text) < 50 for text in texts):
            for text, stream in zip(texts, streams, strict=True):
                text += [event for event in [next(stream, None)] if event is not None]
        assert texts == [cold(numbers(30, seed), SEEDED, 50) for seed in range(5)]
        for seed in range(5):
            warm(engine, numbers(100, seed), count=10)
        with engine.exclusive_cache() as cache:
            assert cache.tree.evicted_snapshots > 5 and cache.pool.allocated_bytes <= 60 * 64


@PAGES
def test_context_shift_goes_on_as_without_a_state(page_bytes: int):
    found = Engine(recurrent(page_bytes, context_length=64)).generate(  # type: ignore[arg-type]
        numbers(20), GREEDY, max_tokens=150, context_shift=True
    )
    model = fake_model(**{**SIZES, "context_length": 64})
    wanted = Engine(model).generate(numbers(20), GREEDY, max_tokens=150, context_shift=True)  # type: ignore[arg-type]
    assert list(found) == list(wanted) and found.record.dropped_tokens == wanted.record.dropped_tokens > 0


@PAGES
def test_step_that_is_interrupted_anywhere_is_taken_again(page_bytes: int, monkeypatch: pytest.MonkeyPatch):
    engine = Engine(recurrent(page_bytes), speculation=speculation(NgramDrafter()))  # type: ignore[arg-type]
    prompt = [5, 6, 7, 8] * 10
    choose = engine._runner.sampler.choose
    left = num_interrupted = 0

    def interrupted(*arguments: Any) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return choose(*arguments)

    monkeypatch.setattr(engine._runner.sampler, "choose", interrupted)
    for params in PARAMS:
        wanted = cold(prompt, params, 40)
        stream = engine.generate(prompt, params, max_tokens=40, prediction=[event.token_id for event in wanted])
        events: list[TokenEvent] = []
        while len(events) < 40:
            # Another reader takes the steps of both, until Ctrl-C ends it.
            other = engine.generate(prompt, GREEDY, max_tokens=30)
            left = 1 + len(events) % 7
            try:
                for _ in range(2):
                    next(other)
            except KeyboardInterrupt:
                num_interrupted += 1
            left = 0
            other.close()
            events.append(next(stream))
        assert events == wanted
    assert num_interrupted > 60


def test_beams_are_those_without_a_state():
    options: dict[str, Any] = {"num_beams": 4, "max_tokens": 6, "stop_token_ids": (7,)}
    engine = Engine(recurrent())  # type: ignore[arg-type]
    prompt = numbers(60)
    assert search_beams(engine, prompt, **options) == search_beams(Engine(fake_model(**SIZES)), prompt, **options)  # type: ignore[arg-type]
    with leak_free(engine):
        assert warm(engine, prompt) == 59


def test_logits_of_every_position_are_those_of_a_plain_model():
    tokens = numbers(50)
    found = Engine(recurrent()).logits(tokens)  # type: ignore[arg-type]
    assert (found == Engine(fake_model(**SIZES)).logits(tokens)).all()  # type: ignore[arg-type]


class ChangingTemplate(FakeTemplate):
    """Writes former replies in capitals, so that a chat parts from the cache where the reply began."""

    def render_segments(self, messages: Any, *arguments: Any, **options: Any) -> list[tuple[str, bool]]:
        changed = [
            {**message, "content": message["content"].upper()} if message["role"] == "assistant" else message
            for message in messages
        ]
        segments = super().render_segments(changed, *arguments)
        return segments if options.get("add_generation_prompt", True) else segments[:-1]


def test_chat_template_that_writes_replies_anew_parts_at_a_snapshot():
    model = recurrent()
    model.chat_template = ChangingTemplate()
    with LLM(model) as llm:  # type: ignore[arg-type]
        assert engine_of(llm).pool.has_states
        question = {"role": "user", "content": "what is the height of the tower, and when was it built?"}
        first: Completion = llm.chat([question], temperature=0, max_tokens=8)
        chat = [
            question,
            {"role": "assistant", "content": "it is three hundred metres tall"},
            {"role": "user", "content": "how tall?"},
        ]
        second = llm.chat(chat, temperature=0, max_tokens=8)
        # All before the mark of the reply.
        assert second.stats.cached_tokens == first.stats.prompt_tokens - 1
        edited = [*chat[:2], {"role": "user", "content": "and how old is it by now?"}]
        third = llm.chat(edited, temperature=0, max_tokens=8)
        assert third.stats.cached_tokens >= first.stats.prompt_tokens + 30


def test_prompt_goes_on_from_no_snapshot_that_was_dropped_while_memory_was_looked_for(monkeypatch):
    layout = FakeLayout(page_tokens=4, page_bytes=64, state_bytes=64, log_bytes=64)
    policy = SnapshotPolicy(grid_tokens=1000, near_tokens=1)
    cache = PrefixCache(layout, max_bytes=None, context_length=100, policy=policy)
    tree, pool = cache.tree, cache.pool
    ids = np.arange(30, dtype=np.int32)
    for length in (8, 12, 18):
        sequence = cache.admit(ids[:length], NO_HINTS).sequence
        rows = length - sequence.length
        sequence.reserve(length)
        sequence.segment(rows)
        sequence.commit(length)
        cache.retire(sequence, ids, NO_HINTS)
    assert {8, 12, 18} <= set(tree.match(ids).snapshots)
    others = []

    def reserve(_sequence: SequenceCache, _length: int) -> None:
        monkeypatch.undo()
        for place in list(places_of_snapshots(tree.roots)):
            if 8 < place.position < 18:
                tree._drop_snapshot(place)
                others.append(pool.take_slot(pool.states))
        raise OutOfMemoryError("no page for the last tokens")

    monkeypatch.setattr(SequenceCache, "reserve", reserve)
    sequence = cache.admit(ids[:25], NO_HINTS).sequence
    assert others and sequence.length == 8
    assert not sequence.state_slots & set(others)
    sequence.close()

"""Pictures and sounds in prompts: whatever is cached, cut, or computed beside them, tokens are those of a cold run."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localinfer.engine.admission import EngineLimits
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.cache.stats import CacheMiss
from localinfer.engine.engine import Engine
from localinfer.engine.media import (
    FEWEST_ROWS,
    Check,
    EmbeddingStore,
    MediaRun,
    PlacedMedia,
    ShortRuns,
    join_pieces,
    media_ids,
)
from localinfer.engine.sampling.filters import log_total
from localinfer.engine.sampling.params import SamplingParams
from localinfer.engine.sampling.sampler import Sampler, SamplingPlan
from localinfer.engine.speculation.costs import VerificationCosts
from localinfer.engine.speculation.draft_model import DraftModel
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.engine.speculation.verify import Speculation
from localinfer.errors import ContextLengthError, RequestError, TokenIdError
from localinfer.generation.beam_search import search_beams
from localinfer.generation.pooling import score_tokens
from localinfer.generation.resumption import ResumedText
from localinfer.generation.text_generation import EncodedPrompt
from localinfer.llm import LLM
from tests.engine.fakes import ByteTokenizer
from tests.engine.generations import GREEDY, PARAMS, REPEATING, SEEDED, in_threads, wide_model
from tests.engine.media_texts import WIDTH, Encoder, Pieces, cold, ids_of, media_model, random_pieces, tokens, unstopped
from tests.engine.simulated_machine import LINEAR_ROWS

SIGHTS = [(False, True), (False, False), (True, False)]
"""Whether rows of a picture see each other, and whether it has rows and columns for rotation."""


def placed(pieces: Pieces) -> PlacedMedia:
    ids, runs = join_pieces(pieces)
    media = PlacedMedia.locate(ids, runs, EmbeddingStore())
    assert media is not None
    return media


def told(media: PlacedMedia, first: int, count: int) -> list[tuple[Any, ...]]:
    """What a batch is told of each row: embedding, positions, the end of what it sees, and what no window bounds."""
    rows, ends, windows = media.rows(first, count), media.key_ends(first, count), media.window_starts(first, count)
    found = []
    for row in range(count):
        given = () if rows is None else rows.embeddings
        embedding = [part[row - start].tobytes() for start, part in given if 0 <= row - start < len(part)]
        own = first + row
        axes = (own,) * 3 if rows is None or rows.positions is None else tuple(rows.positions[row].tolist())
        end, unbounded = own + 1 if ends is None else int(ends[row]), own if windows is None else int(windows[row])
        found.append((embedding, axes, end, unbounded))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_what_is_told_of_a_row_does_not_depend_on_where_a_batch_begins(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sees_itself, has_grid = SIGHTS[seed % 3]
    pieces = [*random_pieces(Encoder(), rng, sees_itself=sees_itself, has_grid=has_grid), Encoder().sound("end", 6)]
    pieces.append(Encoder().picture("all", 3, 3, sees_itself=True, has_grid=False, passes_windows=True))
    media, size = placed(pieces), ids_of(pieces).size + 5
    wanted: list[tuple[Any, ...]] = []
    position = 0
    for piece in [*pieces, [0] * 5]:
        start = len(wanted)
        if isinstance(piece, MediaRun):
            for row, embedding in enumerate(piece.embed(unstopped)):
                across = (0, 0) if piece.grid is None else divmod(row, piece.grid[1])
                axes = (position + row,) * 3
                axes = axes if piece.grid is None else (position, position + across[0], position + across[1])
                end = start + piece.ids.size if piece.sees_itself else start + row + 1
                unbounded = start if piece.passes_windows else start + row
                wanted.append(([embedding.tobytes()], axes, end, unbounded))
            position += piece.num_positions
        else:
            for _ in piece:
                wanted.append(([], (position,) * 3, len(wanted) + 1, len(wanted)))
                position += 1
    assert told(media, 0, size) == wanted
    for first in range(size):
        for count in (1, 3, size - first):
            assert told(media, first, min(count, size - first)) == wanted[first : first + count]


@pytest.mark.parametrize("seed", range(18))
def test_tokens_are_those_of_a_cold_run_in_any_chunks_and_whatever_is_cached(seed: int) -> None:
    rng, encoder = np.random.default_rng(seed), Encoder()
    sees_itself, has_grid = SIGHTS[seed % 3]
    engine = Engine(media_model(max_batch_rows=(13, 24)[seed % 2]))
    for index in range(6):
        pieces, params = random_pieces(encoder, rng, sees_itself=sees_itself, has_grid=has_grid), PARAMS[index % 3]
        wanted = cold(pieces, params)
        assert tokens(engine, pieces, params) == wanted
        # Again, and with what was answered and a further question behind it.
        assert tokens(engine, pieces, params) == wanted
        longer = [*pieces, [event.token_id for event in wanted], [1, 2]]
        assert tokens(engine, longer, params) == cold(longer, params)
    engine.close()


@pytest.mark.parametrize("sees_itself", [False, True])
def test_only_what_is_not_cached_is_computed_and_encoded(sees_itself: bool) -> None:
    encoder = Encoder()
    engine = Engine(media_model(), embedding_bytes=0)
    first = encoder.picture("one", 3, 3, sees_itself=sees_itself)
    second = encoder.picture("two", 2, 4, sees_itself=sees_itself)
    pieces: Pieces = [[1, 2, 3], first, [4, 5], second, [6, 7]]
    tokens(engine, pieces, GREEDY)
    assert encoder.asked == ["one", "two"]
    encoder.asked.clear()
    ids, runs = join_pieces(pieces)
    generation = engine.generate(ids, GREEDY, max_tokens=2, media=runs)
    list(generation)
    assert encoder.asked == [] and generation.record.cached_tokens == ids.size - 1
    # An edit between the pictures costs the second; one behind them none.
    edited: Pieces = [[1, 2, 3], first, [4, 9], second, [6, 7]]
    assert tokens(engine, edited, GREEDY) == cold(edited, GREEDY)
    assert encoder.asked.count("two") == 2 and encoder.asked.count("one") == 1
    encoder.asked.clear()
    behind: Pieces = [*pieces[:-1], [6, 8, 8]]
    assert tokens(engine, behind, GREEDY) == cold(behind, GREEDY)
    assert encoder.asked == ["one", "two"], "by the cold run alone"


def test_embeddings_are_kept_within_bytes_and_computed_once_by_threads_that_want_the_same() -> None:
    size = 6 * WIDTH * 4
    store, encoder = EmbeddingStore(2 * size), Encoder()
    runs = [encoder.picture(f"{index}", 2, 3) for index in range(3)]
    begun, may_end = threading.Event(), threading.Event()

    def slow(check: Check) -> Any:
        begun.set()
        assert may_end.wait(10)
        encoder.asked.append("slow")
        return np.zeros((6, WIDTH), np.float32)

    run = encoder.picture("slow", 2, 3, embed=slow)
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(store.find(run)))
    first.start()
    assert begun.wait(10)
    second = threading.Thread(target=lambda: found.append(store.find(run)))
    second.start()
    may_end.set()
    first.join(10)
    second.join(10)
    assert len(found) == 2 and encoder.asked == ["slow"]
    for one in (runs[0], runs[1], runs[0], runs[2], runs[0], runs[1]):
        store.find(one)
    assert store.num_bytes == 2 * size
    assert encoder.asked == ["slow", "0", "1", "2", "1"], "the least recently used goes"
    short = encoder.picture("short", 2, 2)
    unknown = replace(short, content=b"")
    for one in (short, short, unknown, unknown):
        store.find(one)
    assert encoder.asked[-3:] == ["short"] * 3, "of what nothing is known its ids do not tell it from others"


def test_a_long_picture_is_encoded_once_for_all_its_chunks_however_little_is_kept() -> None:
    for num_bytes in (0, 1 << 20):
        encoder = Encoder()
        engine = Engine(media_model(max_batch_rows=9), embedding_bytes=num_bytes)
        pieces: Pieces = [[1], encoder.picture("long", 5, 6), [2], encoder.picture("short", 2, 2), [3]]
        found = tokens(engine, pieces, GREEDY)
        assert encoder.asked == ["long", "short"]
        assert found == cold(pieces, GREEDY)
        assert engine.embeddings.held_bytes == 0
        assert engine.embeddings.num_bytes == (34 * WIDTH * 4 if num_bytes else 0)


def test_texts_that_wait_hold_half_of_the_bytes_at_most() -> None:
    encoder = Encoder()
    size = 9 * WIDTH * 4
    engine = Engine(media_model(), embedding_bytes=4 * size, limits=EngineLimits(max_running=1))
    first = engine.generate([1, 2], SEEDED, max_tokens=4)
    next(first)
    streams = []
    for index in range(5):
        ids, runs = join_pieces([[index], encoder.picture(f"{index}", 3, 3), [1]])
        streams.append(engine.generate(ids, GREEDY, max_tokens=2, media=runs))
        request = streams[-1].request
        assert request.media is not None
        engine.scheduler._hold_embeddings(request, request.media)
        assert engine.embeddings.held_bytes <= 2 * size
        assert engine.embeddings.num_bytes + engine.embeddings.held_bytes <= 4 * size
    assert encoder.asked == ["0", "1"]
    list(first)
    for stream in streams:
        assert len(list(stream)) == 2
    assert engine.embeddings.held_bytes == 0 and encoder.asked == ["0", "1", "2", "3", "4"]


def test_a_text_beside_seven_others_has_its_own_tokens() -> None:
    rng, encoder = np.random.default_rng(5), Encoder()
    texts = [
        random_pieces(encoder, rng, sees_itself=SIGHTS[index % 3][0], has_grid=SIGHTS[index % 3][1])
        for index in range(8)
    ]
    wanted = [cold(pieces, PARAMS[index % 3], max_tokens=12) for index, pieces in enumerate(texts)]
    engine = Engine(media_model(max_batch_rows=17), limits=EngineLimits(max_running=8))
    found: dict[int, Any] = {}

    def read(index: int) -> None:
        found[index] = tokens(engine, texts[index], PARAMS[index % 3], max_tokens=12)

    in_threads([lambda index=index: read(index) for index in range(8)])
    assert [found[index] for index in range(8)] == wanted


def test_a_picture_that_is_computed_at_once_waits_for_no_end_of_streams() -> None:
    encoder = Encoder()
    engine = Engine(media_model(max_batch_rows=10))
    streams = [engine.generate([7, index], SEEDED, max_tokens=60) for index in range(4)]
    for stream in streams:
        next(stream)
    pieces: Pieces = [[1], encoder.picture("large", 2, 5, sees_itself=True, has_grid=False), [2]]
    ids, runs = join_pieces(pieces)
    generation = engine.generate(ids, GREEDY, max_tokens=3, media=runs)
    assert list(generation) == cold(pieces, GREEDY, max_tokens=3)
    assert all(not stream.request.is_over for stream in streams)
    for stream, index in zip(streams, range(4), strict=True):
        rest = list(stream)
        assert len(rest) == 59
        alone = list(Engine(media_model()).generate([7, index], SEEDED, max_tokens=60))
        assert rest == alone[1:]


@pytest.mark.parametrize("seed", range(6))
def test_drafts_change_no_token(seed: int) -> None:
    rng, encoder = np.random.default_rng(seed), Encoder()
    sees_itself, has_grid = SIGHTS[seed % 3]
    pieces = random_pieces(encoder, rng, sees_itself=sees_itself, has_grid=has_grid)
    wanted = cold(pieces, REPEATING, max_tokens=20)
    speculation = Speculation(VerificationCosts(LINEAR_ROWS), ngram=NgramDrafter(), model=None)
    engine = Engine(media_model(), speculation=speculation)
    for _ in range(3):
        prediction = [event.token_id for event in wanted]
        assert tokens(engine, pieces, REPEATING, max_tokens=20, prediction=prediction) == wanted


@pytest.mark.parametrize("seed", range(12))
def test_a_shifted_context_drops_whole_pictures(seed: int) -> None:
    rng, encoder = np.random.default_rng(seed), Encoder()
    sees_itself, has_grid = SIGHTS[seed % 3]
    pieces = [[9, 9], *random_pieces(encoder, rng, sees_itself=sees_itself, has_grid=has_grid)]
    hints = CacheHints(system_tokens=2)
    options: dict[str, Any] = {"max_tokens": 70, "context_shift": True, "cache_hints": hints}
    wanted = tokens(Engine(media_model(context_length=40)), pieces, SEEDED, **options)
    engine = Engine(media_model(context_length=40, max_batch_rows=15))
    assert tokens(engine, pieces, SEEDED, **options) == wanted
    assert tokens(engine, pieces, SEEDED, **options) == wanted
    assert len(wanted) == 70
    # What had been generated elsewhere is shifted where it would have been.
    ids, runs = join_pieces([*pieces, [event.token_id for event in wanted[:50]]])
    rest = {**options, "max_tokens": 20, "completion_tokens": 50}
    assert list(Engine(media_model(context_length=40)).generate(ids, SEEDED, media=runs, **rest)) == wanted[50:]


def test_a_context_that_a_last_picture_fills_is_refused_in_words() -> None:
    pieces: Pieces = [[1] * 30, Encoder().picture("huge", 7, 8)]
    engine = Engine(media_model(context_length=50, max_batch_rows=64))
    with pytest.raises(ContextLengthError, match="huge, which the text ends in, takes 56 tokens"):
        tokens(engine, pieces, GREEDY, context_shift=True)


def test_a_preempted_text_comes_back_with_its_pictures() -> None:
    encoder = Encoder()
    pages = 64 * 14
    engine = Engine(media_model(max_batch_rows=12), kv_memory=pages, limits=EngineLimits(max_running=2))
    first: Pieces = [[1, 2], encoder.picture("one", 3, 3), [3]]
    second: Pieces = [[4], encoder.picture("two", 3, 3, sees_itself=True, has_grid=False), [5]]
    wanted = [cold(pieces, SEEDED, max_tokens=30) for pieces in (first, second)]
    streams = []
    for pieces, priority in ((first, 1), (second, 0)):
        ids, runs = join_pieces(pieces)
        streams.append(engine.generate(ids, SEEDED, max_tokens=30, media=runs, priority=priority))
    found: list[list[Any]] = [[], []]
    for _ in range(30):
        for events, stream in zip(found, streams, strict=True):
            events.append(next(stream))
    assert found == wanted
    assert engine.stats.preemptions > 0


def test_texts_of_other_salts_share_no_picture() -> None:
    encoder = Encoder()
    engine = Engine(media_model())
    ids, runs = join_pieces([[1], encoder.picture("one", 3, 3), [2, 3]])

    def cached(salt: bytes) -> int:
        generation = engine.generate(ids, GREEDY, max_tokens=1, media=runs, cache_hints=CacheHints(salt=salt))
        list(generation)
        return generation.record.cached_tokens

    assert [cached(b"a"), cached(b"b"), cached(b"a"), cached(b"b")] == [0, 0, ids.size - 1, ids.size - 1]


def miss_of(engine: Engine, pieces: Pieces) -> CacheMiss | None:
    ids, runs = join_pieces(pieces)
    generation = engine.generate(ids, GREEDY, max_tokens=1, media=runs)
    list(generation)
    return generation.record.miss


def test_a_miss_names_the_picture() -> None:
    encoder = Encoder()
    one, two, other = (encoder.picture(name, 3, 3) for name in ("picture 1", "picture 2", "picture 2 (edited)"))
    engine = Engine(media_model())
    tokens(engine, [[1], one, [2], two, [3, 4]], GREEDY)
    changed = miss_of(engine, [[1], one, [2], other, [3, 4]])
    assert changed is not None and changed.cause == "media" and changed.position == 11
    assert changed.summary == changed.describe(None) == "picture 2 (edited) has changed, at token 11"
    left_out = miss_of(engine, [[1], one, [2], [3, 4]])
    assert left_out is not None and left_out.summary == "a picture or sound was left out, at token 11"
    added = miss_of(engine, [[1], other, one, [2], two, [3, 4]])
    assert added is not None and added.summary == "picture 2 (edited) has changed, at token 1"
    new = miss_of(engine, [[1], one, one, [2]])
    assert new is not None and new.summary == "picture 1 is new there, at token 10"
    before = miss_of(engine, [[1], one, [9], two, [3, 4]])
    assert before is not None and before.cause == "different" and before.position == 10
    words = miss_of(engine, [[1], one, [2], two, [3, 5], [6]])
    assert words is not None and words.cause == "different"
    tokenizer: Any = ByteTokenizer()
    assert words.describe(tokenizer).startswith("the text differs at token 21, after '[picture or sound]\\x03': cached")


@pytest.mark.parametrize("sees_itself", [False, True])
def test_pictures_of_few_rows_are_cached_and_told_from_others_of_their_ids(sees_itself: bool) -> None:
    for count in range(1, 7):
        encoder, engine, start, end = Encoder(), Engine(media_model()), [1] * 9, [2] * 9
        small = encoder.picture("small", 1, count, sees_itself=sees_itself, has_grid=not sees_itself)
        pieces: Pieces = [start, small, small, end]
        wanted, size = cold(pieces, GREEDY), ids_of(pieces).size
        encoder.asked.clear()
        assert tokens(engine, pieces, GREEDY) == wanted == tokens(engine, pieces, GREEDY)

        def cached(pieces: Pieces, engine: Engine = engine, **options: Any) -> int:
            ids, runs = join_pieces(pieces)
            generation = engine.generate(ids, GREEDY, max_tokens=1, media=runs, **options)
            list(generation)
            return generation.record.cached_tokens

        # Once encoded for both places, and not again.
        assert cached(pieces) == size - 1 and encoder.asked == ["small"]
        # Other words behind it, and other pictures beside it.
        assert cached([start, small, small, [3] * 9]) == 9 + 2 * count
        assert cached([start, small, encoder.picture("other", 1, count), end]) == 9 + count
        # Another owner's text is a text of its own.
        assert cached(pieces, cache_hints=CacheHints(salt=b"another")) == 0
        assert cached(pieces, cache_hints=CacheHints(salt=b"another")) == size - 1
        if count >= FEWEST_ROWS:
            continue
        # Another picture of the same ids, as chance or an attacker may make one, and one that nothing is known of.
        embeddings = np.ones((count, WIDTH), np.float32)
        for content in (b"forged", b""):
            forged = replace(small, embed=lambda check, rows=embeddings: rows, content=content)
            other: Pieces = [start, forged, end]
            assert tokens(engine, other, GREEDY) == cold(other, GREEDY) == tokens(engine, other, GREEDY) != wanted
            assert cached(other) == 9
            miss = miss_of(engine, other)
            assert miss is not None and miss.summary == "small has too few rows to be told apart, at token 9"
        assert tokens(engine, pieces, GREEDY) == wanted
        assert cached(pieces) == size - 1


def test_ids_of_short_runs_begin_no_other_run_and_stand_for_one_row() -> None:
    last_short, shorts, salt = -(1 << 31) + (1 << 24), ShortRuns(), b"salt"
    for number in range(300):
        digest = bytes([number // 256, number % 256])
        for count in (1, 4, 5, 40):
            ids = media_ids(b"encoder", digest, count)
            assert ids[0] < last_short if count < FEWEST_ROWS else ids[0] >= last_short
            assert (ids < -1).all() and (count >= FEWEST_ROWS or (ids < last_short).all())
    first, other = media_ids(b"encoder", b"one", 3), media_ids(b"encoder", b"two", 4)
    assert shorts.bind(first, b"one", salt) and shorts.bind(first, b"one", salt)
    assert not shorts.bind(first, b"two", salt) and shorts.bind(first, b"two", b"other salt")
    assert not shorts.bind(first[[1, 0]], b"one", salt), "rows of it in another order"
    assert not shorts.bind(first[[0, 0]], b"three", b"third salt")
    # What another process says of them.
    text = np.concatenate([[1, 2], first, [3], other, [4]]).astype(np.int32)
    assert shorts.named(text, salt) == {int(token): (b"one", row) for row, token in enumerate(first)}
    parts = [shorts.contents(part, one) for part in (text[3:], text[2:]) for one in (salt, b"other salt")]
    assert len({*parts}) == 4 and shorts.contents(text[5:], salt) == b""
    elsewhere = ShortRuns()
    assert elsewhere.learn(text, shorts.named(text, salt), salt) == text.size
    assert elsewhere.bind(first, b"one", salt)
    assert not elsewhere.bind(other, b"two", salt), "nobody said what these stand for"
    assert ShortRuns().bind(other, b"two", salt)
    assert shorts.learn(text, {int(first[1]): (b"two", 1)}, b"other salt") == 2


def test_a_run_of_rows_that_see_each_other_is_found_whole_or_not_at_all() -> None:
    encoder = Encoder()
    engine = Engine(media_model())
    picture = encoder.picture("one", 3, 3, sees_itself=True, has_grid=False)
    pieces: Pieces = [[1, 2, 3], picture]
    # The picture is last: its last row is computed, and so all of it.
    assert tokens(engine, pieces, GREEDY) == cold(pieces, GREEDY) == tokens(engine, pieces, GREEDY)
    ids, runs = join_pieces(pieces)
    generation = engine.generate(ids, GREEDY, max_tokens=1, media=runs)
    list(generation)
    assert generation.record.cached_tokens == 3


@pytest.mark.parametrize("sees_itself", [False, True])
def test_beams_and_scores_of_a_prompt_with_pictures_are_those_of_whole_batches(sees_itself: bool) -> None:
    encoder = Encoder()
    picture = encoder.picture("one", 3, 4, sees_itself=sees_itself, has_grid=not sees_itself)
    ids, runs = join_pieces([[1, 2, 3], picture, [4, 5], encoder.sound("two", 5), [6]])
    whole = Engine(media_model(max_batch_rows=96, max_output_rows=96))
    parts = Engine(media_model(max_batch_rows=13, max_output_rows=3))
    assert (parts.logits(ids, runs) == whole.logits(ids, runs)).all()
    options: dict[str, Any] = {"num_beams": 3, "max_tokens": 4, "media": runs}
    wanted = search_beams(whole, ids, **options)
    assert search_beams(parts, ids, **options) == wanted == search_beams(parts, ids, **options)
    for beam in wanted:
        text = np.concatenate((ids, np.array(beam.token_ids, np.int32)))
        rows = whole.logits(text, runs)[ids.size - 1 : -1]
        chosen = [float(row[token]) - log_total(row) for row, token in zip(rows, beam.token_ids, strict=True)]
        assert sum(chosen) == pytest.approx(beam.logprob, abs=1e-6)
    scores = score_tokens(parts, parts.program, ids, 1, runs)
    assert [score is None for score in scores] == [index == 0 or token_id < 0 for index, token_id in enumerate(ids)]


def test_penalties_are_for_words() -> None:
    sampler = Sampler(16)
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.5, dry_multiplier=2.0
    )
    rows = media_ids(b"encoder", b"picture", 6)
    words = np.array([3, 4, 5, 3, 4], np.int32)
    logits = np.random.default_rng(1).normal(size=16).astype(np.float32)

    def adjusted(history: Any) -> Any:
        plan = SamplingPlan(params, 16)
        return sampler._adjust(logits, plan, history.size, history).copy()

    # A repetition does not go across a picture.
    assert (adjusted(np.concatenate((rows, words))) == adjusted(words)).all()
    alike = np.concatenate((rows, words[:1], rows))
    assert (adjusted(alike) == adjusted(words[:1])).all()


def test_drafts_from_history_are_words_alone() -> None:
    drafter = NgramDrafter()
    rows = media_ids(b"encoder", b"picture", 6)
    text = np.concatenate((np.array([1, 2, 3], np.int32), rows, np.array([4, 5, 6, 1, 2, 3], np.int32)))
    out = np.zeros(4, np.int32)
    count = drafter.begin().draft(text, out)
    assert out[:count].tolist() == [4, 5, 6, 1]


WRONG: dict[str, tuple[Any, Any, str]] = {
    "ids of no run": ([1, -5, 2], [], "token id -5 at index 1"),
    "ids beside the run's": (np.array([-5, *media_ids(b"encoder", b"one 1 5", 5)]), None, "not the next ones"),
    "a run that is not there": ([1, 2], None, "5 rows whose ids are not the next ones"),
    "more ids than runs": (np.array([*media_ids(b"encoder", b"one 1 5", 5), 1, -5]), None, "token id -5 at index 6"),
}


@pytest.mark.parametrize("name", WRONG)
def test_ids_and_runs_that_do_not_fit_are_refused(name: str) -> None:
    ids, runs, words = WRONG[name]
    engine = Engine(media_model())
    with pytest.raises((TokenIdError, RequestError), match=words):
        engine.generate(ids, GREEDY, media=[Encoder().picture("one", 1, 5)] if runs is None else runs)


def test_what_a_model_cannot_take_is_refused_in_one_line() -> None:
    ids, runs = join_pieces([[1], Encoder().picture("one", 3, 3, sees_itself=True)])
    with pytest.raises(RequestError, match="loaded to read words only"):
        Engine(wide_model()).generate(ids, GREEDY, media=runs)
    with pytest.raises(RequestError, match="9 rows that are computed at once, and a batch has 8"):
        Engine(media_model(max_batch_rows=8)).generate(ids, GREEDY, media=runs)


@pytest.mark.parametrize("sees_itself", [False, True])
def test_logits_of_the_last_positions_are_those_of_all(sees_itself: bool) -> None:
    encoder = Encoder()
    pieces: Pieces = [
        list(range(1, 30)), encoder.picture("one", 3, 3, sees_itself=sees_itself), [7] * 9,
        encoder.picture("two", 2, 4, sees_itself=sees_itself), [8],
    ]  # fmt: skip
    ids, runs = join_pieces(pieces)
    engine = Engine(media_model(max_batch_rows=10, max_output_rows=4))
    whole = engine.logits(ids, runs)
    for first in range(ids.size + 1):
        np.testing.assert_array_equal(engine.logits(ids, runs, first=first), whole[first:])
    with pytest.raises(RequestError, match="first"):
        engine.logits(ids, runs, first=ids.size + 1)


@pytest.mark.parametrize("ends", [0, 1], ids=["the one that computes", "the one that waits"])
def test_a_request_that_ends_stops_in_its_picture_and_another_that_wants_it_gets_it(ends: int) -> None:
    encoder, engine = Encoder(), Engine(media_model())
    begun, may_end, stopped = threading.Event(), threading.Event(), threading.Event()

    def embed(check: Check) -> Any:
        encoder.asked.append("slow")
        begun.set()
        try:
            while not may_end.wait(0.001):
                check()
        except BaseException:
            stopped.set()
            raise
        return np.ones((9, WIDTH), np.float32)

    pieces: Pieces = [[1], encoder.picture("slow", 3, 3, embed=embed), [2]]
    ids, runs = join_pieces(pieces)
    found: dict[int, list[Any]] = {}
    generations = [engine.generate(ids, GREEDY, max_tokens=3, media=runs) for _ in range(2)]

    def read(index: int) -> None:
        found[index] = list(generations[index])

    readers = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    readers[0].start()
    assert begun.wait(10)
    readers[1].start()
    generations[ends].cancel()
    readers[ends].join(10)
    assert [event.finish_reason for event in found[ends]] == ["cancelled"]
    assert stopped.is_set() == (ends == 0)
    may_end.set()
    readers[1 - ends].join(10)
    assert len(found[1 - ends]) == 3 and len(encoder.asked) == 2 - ends
    assert found[1 - ends] == tokens(engine, pieces, GREEDY, max_tokens=3)


@pytest.mark.parametrize("fails", [False, True])
def test_a_text_that_ends_while_its_step_encodes_holds_up_no_other(fails: bool) -> None:
    """Where nothing may be held before its step, its rows are encoded in it."""
    encoder, engine = Encoder(), Engine(media_model(), embedding_bytes=0)
    wanted = cold([[7, 1]], SEEDED, max_tokens=12)
    beside = engine.generate([7, 1], SEEDED, max_tokens=12)
    found = [next(beside)]

    def embed(check: Check) -> Any:
        encoder.asked.append("tile")
        if fails:
            raise RuntimeError("no such picture")
        ended.cancel()
        check()
        raise AssertionError("it goes on after its request has ended")

    tiles = [encoder.picture("one", 3, 3), encoder.picture("two", 3, 3, embed=embed), encoder.picture("three", 2, 3)]
    ids, runs = join_pieces([[1], *tiles, [2]])
    ended = engine.generate(ids, GREEDY, max_tokens=3, media=runs)
    if fails:
        with pytest.raises(RuntimeError, match="no such picture"):
            list(ended)
    else:
        assert [event.finish_reason for event in ended] == ["cancelled"]
    assert encoder.asked == ["one", "tile"] and not engine.embeddings.held_bytes
    assert [*found, *beside] == wanted
    pieces: Pieces = [[1], encoder.picture("one", 3, 3), [2]]
    assert tokens(engine, pieces, GREEDY) == cold(pieces, GREEDY)


def test_an_interrupt_of_a_reader_stops_its_picture() -> None:
    engine, encoder = Engine(media_model()), Encoder()

    def interrupted(check: Check) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokens(engine, [[1], encoder.picture("one", 3, 3, embed=interrupted), [2]], GREEDY)
    pieces: Pieces = [[1], encoder.picture("one", 3, 3), [2]]
    assert tokens(engine, pieces, GREEDY) == cold(pieces, GREEDY)
    assert not engine.embeddings.held_bytes


def test_an_encoder_that_fails_ends_its_own_text_only() -> None:
    encoder = Encoder()

    def fail(check: Check) -> Any:
        raise RuntimeError("no such picture")

    engine = Engine(media_model())
    stream = engine.generate([7, 1], SEEDED, max_tokens=20)
    next(stream)
    with pytest.raises(RuntimeError, match="no such picture"):
        tokens(engine, [[1], encoder.picture("bad", 3, 3, embed=fail), [2]], GREEDY)
    wrong = encoder.picture("wrong", 3, 3, embed=lambda check: np.zeros((8, WIDTH), np.float32))
    with pytest.raises(RequestError, match="wanted 9 rows"):
        tokens(engine, [[1], wrong, [2]], GREEDY)
    assert len(list(stream)) == 19
    pieces: Pieces = [[1], encoder.picture("good", 3, 3), [2]]
    assert tokens(engine, pieces, GREEDY) == cold(pieces, GREEDY)


def test_a_text_that_another_process_has_begun_is_resumed_with_its_pictures() -> None:
    encoder = Encoder()
    ids, runs = join_pieces([[65, 66], encoder.picture("one", 3, 3), [67]])
    prompt = EncodedPrompt(ids, media=runs)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 12, "ignore_eos": True}
    whole = LLM(media_model()).complete(prompt, **options)  # type: ignore[arg-type]
    for context, logprobs in ((96, None), (96, 1)):
        llm = LLM(media_model(context_length=context))  # type: ignore[arg-type]
        stream = llm.stream(prompt, **options, logprobs=logprobs)  # type: ignore[arg-type]
        stream.resume(ResumedText(ids, 4, whole.token_ids[:5]))
        assert stream.result().token_ids == whole.token_ids


def test_a_model_that_drafts_for_another_ends_at_a_picture() -> None:
    drafting = DraftModel(media_model(), target_vocab_size=260)  # type: ignore[arg-type]
    text = drafting.begin(SamplingPlan(GREEDY, 260))
    ids, _ = join_pieces([[1, 2], Encoder().picture("one", 3, 3), [3]])
    out = np.zeros(4, np.int32)
    assert text.draft(ids[:2], out) == 4
    assert text.draft(ids, out) == 0
    assert text.ending is not None and "pictures or sounds, which the draft model does not see" in text.ending

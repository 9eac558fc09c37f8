"""Rows that stand for no token: embeddings that a batch gives, and positions on several axes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import NUM_AXES, Pairing, RopeTable, Rows
from localinfer.kernels.program import Batch, MediaRows, Segment
from localinfer.types import FloatArray
from tests.kernels.cpu.tape_runs import NO_CACHE, assert_same_bits, random_rows, table

WIDTH, TOKENS, ROWS = 37, 10, 12
PAGE = np.zeros(1, np.int64)
ALL = np.arange(ROWS, dtype=np.int32)
WORDS = random_rows(TOKENS, WIDTH, 1)
PICTURE = random_rows(5, 3 * WIDTH, 2)
"""Five rows of three parts."""


def _embedding(threads: ThreadPool) -> CpuProgram:
    """Twice what is looked up or given, then part 2 added to the rows with output."""
    tape = GraphBuilder()
    x, out = tape.buffer("x", WIDTH), tape.buffer("out", WIDTH, Rows.OUTPUT)
    tape.embed(x, table(WORDS), 3.0)
    tape.embed_media(x)
    tape.scale(x, 2.0)
    tape.select_output(out, x)
    tape.embed_media(out, 2, adds=True)
    return lower_to_cpu(tape.finish(out), threads, NO_CACHE, max_batch_rows=ROWS)


def _batch(ids: list[int], *segments: tuple[int, MediaRows | None], outputs: list[int] | None = None) -> Batch:
    parts = [Segment(0, count, PAGE, media=media) for count, media in segments]
    rows = np.arange(len(ids)) if outputs is None else outputs
    return Batch(np.array(ids, np.int32), parts, np.array(rows, np.int32))


def _wanted(ids: list[int], rows: dict[int, FloatArray]) -> FloatArray:
    looked_up = 2 * (np.float32(3) * WORDS[np.maximum(ids, 0)])
    for row, embedding in rows.items():
        looked_up[row] = embedding[2 * WIDTH :] + 2 * embedding[:WIDTH]
    return looked_up


def test_rows_take_their_embeddings_instead_of_tokens_and_parts_on_top(
    pool: ThreadPool, two_threads: ThreadPool
) -> None:
    media = MediaRows([(1, PICTURE[:2]), (5, PICTURE[2:])])
    ids = [3, -7, -8, 4, 5, -1, -2, -3, 9, 2]
    given = {1: PICTURE[0], 2: PICTURE[1], 5: PICTURE[2], 6: PICTURE[3], 7: PICTURE[4]}
    for threads in (pool, two_threads):
        program = _embedding(threads)
        found = program.run(_batch(ids, (8, media), (2, None))).copy()
        assert_same_bits(found, _wanted(ids, given))
        assert_same_bits(program.run(_batch(ids, (8, media), (2, None), outputs=[9, 6, 1])).copy(), found[[9, 6, 1]])
        # The next batch of words knows nothing of it.
        assert_same_bits(program.run(_batch([3, 1], (2, None))).copy(), _wanted([3, 1], {}))


def test_rows_of_one_segment_do_not_reach_another(pool: ThreadPool) -> None:
    ids = [1, 2, -5, 3]
    found = _embedding(pool).run(_batch(ids, (2, None), (2, MediaRows([(0, PICTURE[:1])])))).copy()
    assert_same_bits(found, _wanted(ids, {2: PICTURE[0]}))


@pytest.mark.parametrize("pairing", Pairing)
def test_every_pair_turns_by_the_position_on_its_axis(
    pairing: Pairing, pool: ThreadPool, two_threads: ThreadPool
) -> None:
    pairs, heads = 8, 3
    axes, frequencies = np.array([0, 1, 2, 0, 1, 2, 0, 1]), 1.0 / 100 ** (np.arange(pairs) / pairs)
    x = random_rows(ROWS, heads * 2 * pairs, 3)
    positions = np.random.default_rng(4).integers(0, 50, (ROWS, NUM_AXES))

    def rotated(
        threads: ThreadPool, given: NDArray[np.int64] | None, media: MediaRows | None, start: int = 0
    ) -> FloatArray:
        tape = GraphBuilder()
        rows, out = tape.buffer("x", x.shape[1]), tape.buffer("out", x.shape[1], Rows.OUTPUT)
        tape.embed(rows, table(x))
        tape.embed_media(rows)
        tape.rope(rows, RopeTable(frequencies, pairing, 1.25, given), 2 * pairs)
        tape.select_output(out, rows)
        program = lower_to_cpu(tape.finish(out), threads, NO_CACHE, max_batch_rows=ROWS)
        return program.run(Batch(ALL, [Segment(start, ROWS, PAGE, media=media)], ALL)).copy()

    wanted = x.astype(np.float64).reshape(ROWS, heads, 2 * pairs).copy()
    first = np.arange(pairs) * 2 if pairing is Pairing.ADJACENT else np.arange(pairs)
    second = first + (1 if pairing is Pairing.ADJACENT else pairs)
    turned = (wanted[:, :, first] + 1j * wanted[:, :, second]) * 1.25
    turned = turned * np.exp(1j * (positions[:, axes] * frequencies)[:, None, :])
    wanted[:, :, first], wanted[:, :, second] = turned.real, turned.imag
    found = rotated(pool, axes, MediaRows(positions=positions))
    np.testing.assert_allclose(found, wanted.reshape(ROWS, -1), rtol=1e-5, atol=1e-5)
    assert_same_bits(rotated(two_threads, axes, MediaRows(positions=positions)), found)
    # Of words all axes have one position: the bits are those of a rotation without axes.
    plain = rotated(pool, None, None, 7)
    assert_same_bits(rotated(pool, axes, None, 7), plain)
    equal = np.repeat(np.arange(7, 7 + ROWS)[:, None], NUM_AXES, axis=1)
    assert_same_bits(rotated(pool, axes, MediaRows(positions=equal), 3), plain)


WRONG = {
    "an id without an embedding": (([3, -7, -8], MediaRows([(1, PICTURE[:1])])), "token id -8"),
    "another width": (([3, -7], MediaRows([(1, PICTURE[:1, :WIDTH].copy())])), r"\[1, 37\]; float32\[rows, 111\]"),
    "another type": (([3, -7], MediaRows([(1, PICTURE[:1].astype(np.float64))])), "float64"),
    "rows beyond the segment": (([3, -7], MediaRows([(1, PICTURE[:2])])), "of others"),
    "too few positions": (([3, 4], MediaRows(positions=np.zeros((1, 3), np.int64))), "not 2 times 3"),
    "a position below 0": (([3, 4], MediaRows(positions=np.full((2, 3), -1))), "from 0 on"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_a_segment_is_refused(name: str, pool: ThreadPool) -> None:
    (ids, media), words = WRONG[name]
    with pytest.raises(RequestError, match=words):
        _embedding(pool).run(_batch(ids, (len(ids), media)))


def test_a_program_of_words_refuses_pictures_in_one_line(pool: ThreadPool) -> None:
    tape = GraphBuilder()
    x, out = tape.buffer("x", WIDTH), tape.buffer("out", WIDTH, Rows.OUTPUT)
    tape.embed(x, table(WORDS))
    tape.select_output(out, x)
    program = lower_to_cpu(tape.finish(out), pool, NO_CACHE, max_batch_rows=ROWS)
    with pytest.raises(RequestError, match="words only, no pictures or sounds; load the model with what"):
        program.run(_batch([3, -7], (2, MediaRows([(1, PICTURE[:1])]))))

"""A batch that is left undone leaves nothing behind: what is computed next has the same bits."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.kernels.cpu.program import INTERRUPTIBLE_ROWS, STRETCHES, ThreadPool, stretches
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import AttentionShape, Buffer, KVLayerShape, Projection, Rows
from localinfer.kernels.program import Batch, OpCost, Segment
from localinfer.types import FloatArray
from tests.kernels.cpu.tape_runs import RowProgram, Write, linear, random_rows
from tests.kernels.random_weights import random_weights

SHAPE = AttentionShape(num_heads=2, num_kv_heads=2, key_size=32, value_size=32, scale=0.2)
WIDTH, LAYERS, ROWS = 64, 3, 150
SIZE = (WIDTH, WIDTH)


def decoder(pool: ThreadPool) -> Write:
    """Layers of attention between products, as a model has them."""

    def write(tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        x = inputs[0]
        for layer in range(LAYERS):
            weights = [
                linear(
                    pool, Layout.Q8_0, random_weights(Layout.Q8_0, (WIDTH, WIDTH), 4 * layer + index), (WIDTH, WIDTH)
                )
                for index in range(4)
            ]
            parts = [tape.buffer(f"{name} {layer}", WIDTH) for name in ("queries", "keys", "values")]
            tape.rms_norm(x, x, None, 1e-5)
            tape.matmul(x, [Projection(weight, part) for weight, part in zip(weights[:3], parts, strict=True)])
            tape.store_kv(layer, parts[1], parts[2])
            out, following = tape.buffer(f"out {layer}", WIDTH), tape.buffer(f"x {layer}", WIDTH)
            tape.attention(out, parts[0], layer, SHAPE)
            tape.matmul(out, [Projection(weights[3], following, residual=x)])
            x = following
        return x

    return write


def row_program(pool: ThreadPool, kv_type: str) -> RowProgram:
    layout = KVLayout(kv_type, [KVLayerShape(2, 32, 32)] * LAYERS)
    return RowProgram(pool, [random_rows(ROWS, WIDTH, 1)], decoder(pool), ROWS, layout, max_summed_tokens=192)


def run_abortable(
    program: RowProgram, rows: range, segment: Segment, should_abort: Callable[[float], bool]
) -> FloatArray | None:
    batch = Batch(np.array(rows, np.int32), [segment], np.arange(len(rows), dtype=np.int32))
    result = program.program.run_abortable(batch, should_abort)
    return None if result is None else result.copy()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_batch_left_undone_anywhere_changes_nothing(kv_type: str, two_threads: ThreadPool) -> None:
    untouched = row_program(two_threads, kv_type)
    pages, mass = untouched.pages(ROWS), np.zeros(5, np.float32)
    expected = [
        untouched.run(range(first, end), [Segment(first, end - first, pages, attention_sums=mass)])
        for first, end in ((0, 40), (40, ROWS))
    ]
    program = row_program(two_threads, kv_type)
    pages, found_mass = program.pages(ROWS), np.zeros(5, np.float32)
    shares: list[float] = []
    first = run_abortable(program, range(40), Segment(0, 40, pages, attention_sums=found_mass), lambda share: False)
    rest = Segment(40, ROWS - 40, pages, attention_sums=found_mass)
    for place in range(5):
        shares.clear()

        def should_abort(share: float, place: int = place) -> bool:
            shares.append(share)
            return len(shares) > place

        assert run_abortable(program, range(40, ROWS), rest, should_abort) is None
        assert len(shares) == place + 1 and shares == sorted(set(shares)) and shares[0] > 0 and shares[-1] < 1
        # Other rows in between, which use the same buffers, in pages of another sequence.
        program.run([3, 4], [Segment(0, 2, program.pages(2))])
    second = run_abortable(program, range(40, ROWS), rest, lambda share: False)
    assert first is not None and second is not None
    np.testing.assert_array_equal(first, expected[0])
    np.testing.assert_array_equal(second, expected[1])
    np.testing.assert_array_equal(found_mass, mass)


def test_a_small_batch_is_never_asked_about(pool: ThreadPool) -> None:
    program = row_program(pool, "f16")
    segment = Segment(0, INTERRUPTIBLE_ROWS - 1, program.pages(INTERRUPTIBLE_ROWS))
    assert run_abortable(program, range(INTERRUPTIBLE_ROWS - 1), segment, lambda share: True) is not None


def test_an_error_of_who_is_asked_leaves_the_program_usable(two_threads: ThreadPool) -> None:
    program = row_program(two_threads, "f16")
    pages: NDArray[np.int64] = program.pages(ROWS)
    segment = Segment(0, ROWS, pages)

    def interrupted(share: float) -> bool:
        raise KeyboardInterrupt

    expected = program.run(range(ROWS), [segment])
    with pytest.raises(KeyboardInterrupt):
        run_abortable(program, range(ROWS), segment, interrupted)
    np.testing.assert_array_equal(program.run(range(ROWS), [segment]), expected)


def test_stretches_cover_a_tape_and_are_about_equal() -> None:
    work = np.random.default_rng(0).integers(0, 5, 400).tolist()
    operations = [OpCost("an op", multiply_adds=amount) for amount in work]
    operations += [OpCost("logits", Rows.OUTPUT, multiply_adds=10**6), OpCost("scale", Rows.OUTPUT)]
    found = stretches(operations)
    assert [stretch.first for stretch in found] == [0, *np.cumsum([stretch.num_ops for stretch in found])[:-1]]
    assert sum(stretch.num_ops for stretch in found) == len(operations)
    assert len(found) <= STRETCHES + 1
    for stretch in found:
        assert stretch.done_before == sum(work[: stretch.first]) / sum(work)
        amount = sum(work[stretch.first : stretch.first + stretch.num_ops])
        assert stretch.share == amount / sum(work) and amount <= sum(work) / STRETCHES + 5
    assert stretches([OpCost("one")]) == [(0, 1, 0.0, 0.0)]

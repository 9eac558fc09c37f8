"""Sequences that lack pages, and how much attention each page gets, on the emulator, against the NumPy oracle."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import PAGE_TOKENS, parse_kv_type
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import AttentionShape, Buffer, EmbeddingTable, Pairing, RopeTable, Rows
from localinfer.kernels.program import Batch, Segment
from localinfer.types import FloatArray
from tests.kernels.cpu.attention_cases import PLAIN, SHAPES, cache_of, inputs_of
from tests.kernels.cpu.tape_runs import RowProgram, random_rows, relative_error
from tests.kernels.cpu.test_attention_sums import shares
from tests.support.oracle_formulas import attend
from tests.support.oracle_kv import kept, kept_query

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.weights import upload
from tests.kernels.cuda.device import EmulatedDevice

ROWS, MEASURED_ROWS = 300, 8


class Attended:
    """Attention over one cache, whose inputs come in through embedding tables."""

    def __init__(
        self,
        pool: ThreadPool,
        inputs: Sequence[FloatArray],
        shape: AttentionShape,
        kv_type: str,
        summed: int,
        *,
        rotates: bool = False,
    ) -> None:
        self.device = EmulatedDevice()
        self.layout = cache_of(shape, kv_type)
        self._pool, self._inputs, self._shape, self._rotates = pool, inputs, shape, rotates
        tape = GraphBuilder(self.layout.layers)
        buffers = []
        for number, values in enumerate(self._inputs):
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            packed = upload(self.device, Layout.F32, data, 1, *values.shape)
            buffers.append(tape.buffer(f"input {number}", values.shape[1]))
            tape.embed(buffers[-1], EmbeddingTable(f"input {number}", *values.shape, packed))
        queries = self._store(tape, buffers)
        out = tape.buffer("out", shape.num_heads * shape.value_size)
        tape.attention(out, queries, 1, shape)
        selected = tape.buffer("selected", out.width, Rows.OUTPUT)
        tape.select_output(selected, out)
        graph, rows = tape.finish(selected), {"max_batch_rows": ROWS, "max_output_rows": ROWS}
        self.program = lower_to_cuda(graph, self.device, self.layout, max_summed_tokens=summed, **rows)

    def _store(self, tape: GraphBuilder, inputs: list[Buffer]) -> Buffer:
        if self._rotates:
            for buffer in inputs[:2]:
                tape.rope(buffer, RopeTable(np.array([1.0, 0.1]), Pairing.ADJACENT), self._shape.key_size, 2)
        tape.store_kv(1, inputs[1], inputs[2])
        return inputs[0]

    def pages(self, num_positions: int) -> NDArray[np.int64]:
        count = -(-num_positions // PAGE_TOKENS)
        first = self.device.allocate(count * self.layout.page_bytes)
        return first + np.arange(count, dtype=np.int64) * self.layout.page_bytes

    def run(self, rows: Sequence[int], segments: Sequence[Segment]) -> FloatArray:
        outputs = np.arange(len(rows), dtype=np.int32)
        return self.program.run(Batch(np.array(rows, np.int32), segments, outputs)).copy()

    def fill(self, end: int, pages: NDArray[np.int64]) -> None:
        """Store positions from the first on, as the CPU does, which `test_cuda_attention.py` compares."""
        program = RowProgram(self._pool, self._inputs, self._store, end, self.layout)
        program.run(range(end), [Segment(0, end, program.pages(end))])
        for place, page in zip(pages, program._pages, strict=False):
            self.device.write(int(place), page)


CASES = {
    "plain": ("f32", SHAPES["plain"]),
    "one query per key, odd sizes": ("f16", AttentionShape(2, 2, 20, 8, 0.2)),
    "window": ("q8_0", SHAPES["window"]),
    "softcap": ("q4_0/f16", SHAPES["softcap"]),
    "sinks": ("q4_0", replace(SHAPES["sinks"], key_size=80, value_size=72)),
    "alibi": ("f16", SHAPES["alibi"]),
    "several scales": ("q8_0/q4_0", AttentionShape(3, 1, 80, 8, 0.1)),
}


# Pages are summed for the same rows whatever attends: chunks to few of them, tiles to many.
@pytest.mark.parametrize(("name", "rows"), [*((name, 3) for name in CASES), ("window", 23), ("sinks", 23)])
def test_sums_of_pages_are_their_share_of_the_softmax_of_the_last_rows(name: str, rows: int, pool: ThreadPool) -> None:
    kv_type, shape = CASES[name]
    end = 140
    inputs = [part[:end] for part in inputs_of(shape, ROWS, seed=3)]
    attended = Attended(pool, inputs, shape, kv_type, 160)
    pages, start = attended.pages(end), end - rows
    attended.fill(start, pages)
    sums, other = np.ones(len(pages), np.float32), np.zeros(1, np.float32)
    segments = [
        Segment(0, 1, attended.pages(1), attention_sums=other),
        Segment(0, 2, attended.pages(2)),
        Segment(start, rows, pages, attention_sums=sums),
    ]
    attended.run([0, 0, 1, *range(start, end)], segments)
    wanted = shares(inputs, shape, kv_type, range(max(start, end - MEASURED_ROWS), end))
    wanted = wanted.sum(axis=0)[: len(pages)]
    assert np.abs(sums - 1 - wanted).max() <= 1e-5 * wanted.sum()
    np.testing.assert_allclose(other, shape.num_heads, rtol=1e-6)
    if name in ("plain", "window") and rows == 3:
        # A captured graph, and sums that go on.
        attended.run([0, 0, 1, *range(start, end)], segments)
        assert np.abs(sums - 1 - 2 * wanted).max() <= 1e-5 * wanted.sum()


@pytest.mark.parametrize("kv_type", ["f16", "q4_0"])
def test_rows_see_what_is_left_when_pages_are_dropped(kv_type: str, pool: ThreadPool) -> None:
    """By chunks and by tiles, and what is stored then lies behind what is left."""
    end, start = 150, 120
    shape = replace(PLAIN, key_size=32, value_size=32) if kv_type == "f16" else PLAIN
    inputs = [part[:end] for part in inputs_of(shape, ROWS, seed=4)]
    attended = Attended(pool, inputs, shape, kv_type, 160)
    pages = attended.pages(end)
    attended.fill(start, pages)
    left, dropped = np.delete(pages, [1, 2]), 2 * PAGE_TOKENS
    sums = np.zeros(len(left), np.float32)
    found = [attended.run(range(start, start + 3), [Segment(start, 3, left, dropped)])]
    found += [attended.run(range(start + 3, end), [Segment(start + 3, end - start - 3, left, dropped, sums)])]
    assert "attention_tiles.attend_tiles" in attended.device.kernels
    positions = np.arange(end)
    is_left = ~np.isin(positions // PAGE_TOKENS, [1, 2])
    key_type, value_type = parse_kv_type(kv_type)
    exact = inputs[0].astype(np.float64)
    rounded = kept_query(exact, shape.key_size, key_type)
    keys, values = (
        kept(part.astype(np.float64), shape.key_size, name)
        for part, name in zip(inputs[1:], (key_type, value_type), strict=True)
    )
    wanted = []
    for row in range(start, end):
        seen: NDArray[np.int64] = positions[is_left & (positions <= row)]
        query = (rounded if row < start + 3 else exact)[row]
        wanted.append(attend(query, keys[seen], values[seen], range(len(seen)), shape))
    assert relative_error(found[0], np.stack(wanted[:3])) <= 2e-6
    assert relative_error(found[1], np.stack(wanted[3:])) <= 8e-4
    assert sums.sum() == pytest.approx(MEASURED_ROWS * shape.num_heads, rel=1e-5) and (sums > 0).all()


def test_positions_are_rotated_by_where_they_were_and_not_by_what_is_left(pool: ThreadPool) -> None:
    shape = AttentionShape(2, 1, 16, 16, 0.3)
    inputs = inputs_of(shape, 80, seed=6)
    attended = Attended(pool, inputs, shape, "f32", 96, rotates=True)
    pages = attended.pages(80)
    attended.fill(79, pages)
    values = inputs[2].astype(np.float64)
    positions = np.array([*range(32), *range(64, 80)])
    rotated = []
    for part in inputs[:2]:
        heads = part.astype(np.float64).reshape(80, -1, 16).copy()
        for pair, frequency in enumerate((1.0, 0.1)):
            angles = np.arange(80)[:, None] * frequency
            first, second = heads[..., 2 + 2 * pair].copy(), heads[..., 3 + 2 * pair].copy()
            heads[..., 2 + 2 * pair] = first * np.cos(angles) - second * np.sin(angles)
            heads[..., 3 + 2 * pair] = first * np.sin(angles) + second * np.cos(angles)
        rotated.append(heads.reshape(80, -1))
    sums = np.zeros(2, np.float32)
    found = attended.run([79], [Segment(79, 1, np.delete(pages, 1), PAGE_TOKENS, sums)])
    wanted = attend(rotated[0][79], rotated[1][positions], values[positions], range(len(positions)), shape)
    assert relative_error(found, wanted[None]) <= 2e-6
    scores = 0.3 * np.einsum("hd,pd->hp", rotated[0][79].reshape(2, 16), rotated[1][positions])
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(sums, [weights[:, :32].sum(), weights[:, 32:].sum()], rtol=1e-5)


def test_more_pages_than_there_is_room_for_and_positions_that_cannot_be_missing_are_refused(
    pool: ThreadPool,
) -> None:
    inputs = [random_rows(100, width, seed) for seed, width in enumerate((96, 48, 48))]
    attended = Attended(pool, inputs, PLAIN, "f16", 64)
    with pytest.raises(RequestError, match="attention is summed for 2"):
        attended.run(range(3), [Segment(62, 3, attended.pages(65))])
    for dropped in (-PAGE_TOKENS, 5, 3 * PAGE_TOKENS):
        with pytest.raises(RequestError, match="not whole pages"):
            attended.run([0], [Segment(64, 1, attended.pages(64), dropped)])

"""CUDA attention to later positions on the emulator: against the oracle, and its bits whatever shares the batch."""

from dataclasses import replace

import numpy as np
import pytest

from localinfer.kernels.cpu.program import ThreadPool
from tests.kernels.cpu.attention_cases import PLAIN, inputs_of
from tests.kernels.cpu.tape_runs import assert_same_bits, relative_error

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from tests.kernels.cuda.test_cuda_attention import Cache

BOTH_WAYS = replace(PLAIN, num_heads=2, key_size=20, value_size=37, bidirectional=True)
SLOPES = np.array([0.5, 0.01], np.float32)
SHAPES = {
    "plain": BOTH_WAYS,
    "shared keys": replace(BOTH_WAYS, num_kv_heads=1),
    "window": replace(BOTH_WAYS, window=40),
    "odd window": replace(BOTH_WAYS, window=41),
    "window of one": replace(BOTH_WAYS, window=1),
    "window beyond a chunk": replace(BOTH_WAYS, window=300),
    "alibi": replace(BOTH_WAYS, alibi_slopes=SLOPES),
    "all masks": replace(BOTH_WAYS, window=70, alibi_slopes=SLOPES, softcap=3.0, sinks=SLOPES),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 9])
def test_rows_by_themselves_are_the_oracles(name: str, rows: int, pool: ThreadPool) -> None:
    cache = Cache(pool, SHAPES[name], "f32", inputs_of(SHAPES[name], rows, seed=rows))
    found, kernels = cache.attend([range(rows)])
    assert relative_error(found, cache.wanted([range(rows)], "f32", exact_queries=True)) <= 2e-6
    assert kernels == ["attention.attend_chunks"]


@pytest.mark.parametrize("name", SHAPES)
def test_later_positions_in_other_chunks_are_the_oracles(name: str, pool: ThreadPool) -> None:
    cache = Cache(pool, SHAPES[name], "f32", inputs_of(SHAPES[name], 270, seed=3))
    whole = cache.wanted([range(270)], "f32", exact_queries=True)
    found, _ = cache.attend([range(267, 270)])
    assert relative_error(found, whole[267:]) <= 2e-6


def test_rows_of_a_prompt_are_computed_32_at_a_time_and_see_each_other(pool: ThreadPool) -> None:
    shape = SHAPES["all masks"]
    cache = Cache(pool, shape, "f32", inputs_of(shape, 140, seed=3))
    found, kernels = cache.attend([range(107, 140)])
    wanted = cache.wanted([range(107, 140)], "f32", exact_queries=True)
    assert relative_error(found, wanted) <= 2e-6
    assert kernels == ["attention.attend_chunks"] * 2


@pytest.mark.parametrize("kv_type", ["q8_0", "q8_0/q4_0", "f16/f32", "q4_0/f16"])
def test_rows_by_themselves_read_any_cache(kv_type: str, pool: ThreadPool) -> None:
    shape = SHAPES["window"]
    cache = Cache(pool, shape, kv_type, inputs_of(shape, 37, seed=5))
    runs = [range(25, 37)]
    found, _ = cache.attend(runs, (7, 5))
    assert relative_error(found, cache.wanted(runs, kv_type, exact_queries=False)) <= 2e-6


@pytest.mark.parametrize(
    ("name", "kv_type"), [*((name, "f16") for name in SHAPES), ("all masks", "q8_0"), ("odd window", "q4_0")]
)
def test_tiles_are_the_oracles(name: str, kv_type: str, pool: ThreadPool) -> None:
    shape = SHAPES[name]
    cache = Cache(pool, shape, kv_type, inputs_of(shape, 71, seed=2))
    found, kernels = cache.attend([range(71)])
    # Queries and weights are rounded to float16, and codes times their scale.
    assert relative_error(found, cache.wanted([range(71)], kv_type, exact_queries=True)) <= 8e-4
    assert "attention.attend_chunks" not in kernels and "attention_tiles.attend_tiles" in kernels
    assert np.isfinite(found).all()


@pytest.mark.parametrize(("kv_type", "rows"), [("f32", 5), ("f16", 24)])
def test_a_row_sees_the_last_of_its_own_segment_only(kv_type: str, rows: int, pool: ThreadPool) -> None:
    """Segments of one length: chunks for few rows, tiles for many."""
    shape = SHAPES["shared keys"]
    inputs = inputs_of(shape, 140 + rows, seed=4)
    runs = [range(rows), range(130, 130 + rows), range(40, 40 + rows)]
    cache = Cache(pool, shape, kv_type, inputs)
    together, _ = cache.attend(runs)
    for number, run in enumerate(runs):
        alone, _ = cache.attend([run])
        assert_same_bits(together[rows * number : rows * (number + 1)], alone)
        until = Cache(pool, shape, kv_type, [part[: run[-1] + 1] for part in inputs])
        wanted = until.wanted([run], kv_type, exact_queries=True)
        assert relative_error(alone, wanted) <= (2e-6 if kv_type == "f32" else 8e-4)

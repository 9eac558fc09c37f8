"""Tokens drawn on a device, on the emulator, against those that the CPU draws."""

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.kernels.cpu.sampling import NOT_FINITE, NOTHING_LEFT, RowSampler
from localinfer.types import FloatArray

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from localinfer.kernels.cuda.sampling import CAPACITY, UNDECIDED, Draw, SampleMode, TokenChoice
from tests.kernels.cuda.device import EmulatedDevice


def drawn(rows: FloatArray, draws: list[Draw]) -> list[int]:
    """What the device draws of each row."""
    device = EmulatedDevice()
    count, size = rows.shape
    padded = np.full((count, -(-size // 4) * 4), np.nan, np.float32)
    padded[:, :size] = rows
    logits = device.allocate(padded.nbytes)
    device.write(logits, padded)
    choice = TokenChoice(device, logits, padded.strides[0], size, count)
    choice.write(draws)
    device.run(list(choice.steps(SampleMode.DRAWN, count)))
    tokens: NDArray[np.int32] = choice.read(count)
    return tokens.tolist()


def on_cpu(row: FloatArray, draw: Draw) -> int:
    sampler = RowSampler(row.size)
    filters = (draw.temperature, draw.top_k, draw.top_p, draw.min_p)
    return sampler.choose(np.ascontiguousarray(row), *filters, np.uint64(draw.seed), draw.position)


def test_the_device_draws_the_tokens_that_the_cpu_draws() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(0, 2, (9, 301)).astype(np.float32)
    rows[:, 7:200:3] = -np.inf
    rows[4] = np.round(rows[4])
    filters = [(0.8, 40, 0.95, 0.05), (1.0, 0, 1.0, 0.0), (2.0, 5, 1.0, 0.0), (1.5, 0, 0.7, 0.0), (3.0, 9, 0.6, 0.0)]
    filters += [(0.0, 40, 0.9, 0.0), (1.0, 0, 1.0, 0.2), (0.9, 300, 0.999, 0.001), (1e-3, 301, 1.0, 0.0)]
    draws = [
        Draw(*chosen, seed=(index * 0x9E3779B97F4A7C15) % 2**64, position=index << 30)
        for index, chosen in enumerate(filters, 3)
    ]
    assert drawn(rows, draws) == [on_cpu(row, draw) for row, draw in zip(rows, draws, strict=True)]


def test_ties_at_the_end_of_a_filter_go_to_the_lowest_ids() -> None:
    rows = np.zeros((6, 20), np.float32)
    rows[:, 11] = -0.0
    draws = [Draw(1.0, 3, 1.0, 0.0, 5, position) for position in range(3)]
    draws += [Draw(1.0, 0, 0.11, 0.0, 5, position) for position in range(3)]
    found = drawn(rows, draws)
    assert found == [on_cpu(row, draw) for row, draw in zip(rows, draws, strict=True)]
    assert max(found) < 3


def test_what_cannot_be_drawn_is_told_apart() -> None:
    rows = np.zeros((5, CAPACITY + 90), np.float32)
    rows[0, 33] = np.nan
    rows[1] = -np.inf
    rows[2, 600] = np.inf
    usual = Draw(1.0, 40, 0.9, 0.0, 1, 1)
    # Ties without end overflow the list; so few tokens have no nucleus.
    nucleus = Draw(1.0, 0, 0.9, 0.0, 1, 1)
    wanted = [NOT_FINITE, NOTHING_LEFT, NOT_FINITE, UNDECIDED, UNDECIDED]
    assert drawn(rows, [usual, nucleus, usual, usual, nucleus]) == wanted

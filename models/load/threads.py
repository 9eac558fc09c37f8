"""The number of threads that decodes fastest: measured on the model, and cached per machine and model size.

It depends on hybrid cores, shared caches and memory channels, so it is measured by decoding one token. A measurement on
a busy machine holds for the load that made it, and is not cached; a cached one is used once two loads agree.
"""

import os
from collections.abc import Callable

import numpy as np

from localinfer.errors import RequestError
from localinfer.kernels.cpu.kernel_abi import MAX_THREADS
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.program import Batch, Segment, StateStep
from localinfer.models.load.measurements import get_measurement, put_measurement, time_in_turns
from localinfer.models.load.stages import Stage, checked_run
from localinfer.system.machine_limits import processor_limits
from localinfer.types import ProgressCallback

STAGE = "measuring how many threads decode fastest"

_ENOUGH_LOADS = 2
"""Loads that must agree before a cached count is used without measuring."""
_LEAST_GAIN = 0.97
"""More threads must take at most this share of the time of fewer."""


def available_threads() -> int:
    """Physical cores available to this process, by affinity and by its control group's share of time."""
    return min(processor_limits().usable_threads, MAX_THREADS - 1)


def checked_threads(threads: int) -> int:
    """Check a requested number of threads. Raises: RequestError."""
    limit = min(os.cpu_count() or 1, MAX_THREADS - 1)
    if not 1 <= threads <= limit:
        raise RequestError(f"threads is {threads}; this machine runs 1 to {limit}, and None chooses")
    return threads


def choose_decode_threads(
    program: CpuProgram,
    kv_layout: KVLayout,
    weight_bytes: int,
    progress: ProgressCallback | None = None,
    *,
    measure_again: bool = False,
    may_measure: bool = True,
) -> None:
    """Set the program's `decode_threads` to the fewest that decode within 3 % of the fastest.

    Where other programs are busy and nothing is known, that is a first guess, and the program goes on to find out.

    measure_again: whatever earlier loads have found. may_measure: else what one of them has found, or all.
    """
    if program.num_threads == 1:
        return
    # Shared by models of about the same size.
    key = f"{program.num_threads} {round(2 * float(np.log2(max(weight_bytes, 1))))}"
    cached, loads = (None, 0) if measure_again else cached_count(key, program.num_threads)
    if cached is not None and (loads >= _ENOUGH_LOADS or not may_measure):
        program.decode_threads = cached
    if cached is not None and loads >= _ENOUGH_LOADS or not may_measure:
        return
    stage = Stage(progress, STAGE)
    program.adapts = False
    try:
        timed = time_in_turns(_token_runs(program, kv_layout, stage), told=stage)
    finally:
        program.adapts = True
    best = min(timed.seconds.values())
    found = min(count for count, value in timed.seconds.items() if value * _LEAST_GAIN <= best)
    if timed.is_calm:
        agreeing = loads + 1 if found == cached else 1
        put_measurement("threads", key, load=timed.load, decode_threads=found, loads=agreeing)
    elif cached is not None:
        found = cached
    program.decode_threads, program.is_measured = found, timed.is_calm or cached is not None


def _candidates(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... and `most`."""
    counts = {1, 3, most}
    count = 2
    while count < most:
        counts |= {count, count * 3 // 2}
        count *= 2
    return sorted(value for value in counts if value <= most)


def _token_runs(program: CpuProgram, kv_layout: KVLayout, stage: Stage) -> dict[int, Callable[[], object]]:
    """For each number of threads a function that decodes one token at the start of a sequence; each was run once."""
    page_bytes = kv_layout.page_bytes + kv_layout.windowed_bytes
    memory = aligned_zeros(page_bytes + 2 * kv_layout.state_bytes)
    page = np.array([address(memory)], np.int64)
    state = None
    if kv_layout.states:
        # The token after another one, so that states are read as well as written.
        source = address(memory) + page_bytes
        state = StateStep(source, [(1, source + kv_layout.state_bytes)])
    segment = Segment(0, 1, page, windowed_addresses=page + kv_layout.page_bytes, state=state)
    batch = Batch(np.zeros(1, np.int32), [segment], np.zeros(1, np.int32))

    def run(count: int) -> None:
        # Referenced here, so that the page is alive during the runs.
        assert memory.size >= kv_layout.page_bytes
        program.decode_threads = count
        run_of[count](batch)

    counts = _candidates(program.num_threads)
    run_of = {count: checked_run(program, stage) for count in counts}
    for count in counts:
        stage(0, 1)
        run(count)
    return {count: lambda count=count: run(count) for count in counts}  # type: ignore[misc]


def cached_count(key: str, most: int) -> tuple[int | None, int]:
    """The cached count, or None, and how many loads in a row agreed on it."""
    record = get_measurement("threads", key) or {}
    try:
        count, loads = int(record["decode_threads"]), int(record["loads"])
    except (KeyError, ValueError, TypeError, ArithmeticError):
        return None, 0
    return (count, max(0, loads)) if 1 <= count <= most else (None, 0)

"""Measure a model on a GPU by given token ids: prompts, decoding, checking of drafts, memory, and the host's part.

What the GPU reads at best is measured beside every decode, as on the CPU: clocks move with heat.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.bench.decode import (
    VERIFIED_ROWS,
    BenchSettings,
    ProgressCallback,
    Record,
    check_context,
    model_record,
    percentile,
    random_token_ids,
    summarize,
)
from localinfer.cache.block_pool import PagePool
from localinfer.cache.sequence import SequenceCache
from localinfer.describe import describe_file
from localinfer.errors import BackendUnavailableError
from localinfer.kernels.cuda.pages import DeviceKVLayout, SplitKVLayout
from localinfer.kernels.cuda.sampling import Draw, DrawingProgram
from localinfer.kernels.program import Batch
from localinfer.models.load.devices import bytes_per_token
from localinfer.models.load.loader import Model, load_model
from localinfer.sampling.params import SamplingParams


def run_gpu_bench(settings: BenchSettings, progress: ProgressCallback) -> Record:
    """Measure prefill, decode, verification and memory; return one record that JSON can hold.

    Keys: model, machine (the GPU, what of the model runs there, its measured read bandwidth), settings, figures.
    Raises: LocalinferError, BackendUnavailableError where there is no GPU.
    """
    description = describe_file(settings.model)
    needed = max(settings.prompt, settings.context + max(settings.decode, *VERIFIED_ROWS))
    check_context(description, needed)
    began = time.perf_counter()
    model = load_model(
        settings.model, threads=settings.threads, context_length=needed, device="cuda", progress=progress
    )
    try:
        return _record(_GpuModel(model), time.perf_counter() - began, settings, progress)
    finally:
        model.close()


class _GpuModel:
    """One sequence of a model on a GPU, computed wherever it is told."""

    def __init__(self, model: Model) -> None:
        layout = model.kv_layout
        if not isinstance(model.program, DrawingProgram) or not isinstance(layout, DeviceKVLayout | SplitKVLayout):
            raise BackendUnavailableError("this model does not run on a GPU; measure it with --device cpu")
        self.model, self.program, self.device = model, model.program, layout.device
        self.num_host_layers = layout.num_host_layers if isinstance(layout, SplitKVLayout) else 0
        self._cache = SequenceCache(PagePool(layout), max_length=model.config.context_length)
        usual = SamplingParams()
        self._draw = Draw(float(usual.temperature), usual.top_k, float(usual.top_p), float(usual.min_p), 1, 0)

    def compute(self, start: int, token_ids: Sequence[int], num_chosen: int = 1, *, draws: bool = False) -> float:
        """Put token ids at position `start` and after, and choose a token after each of the last ones; seconds."""
        began = time.perf_counter()
        tokens = np.array(token_ids, np.int32)
        self._cache.truncate(start)
        most = self.program.max_batch_rows
        for first in range(0, tokens.size, most):
            chunk = tokens[first : first + most]
            is_last = first + chunk.size == tokens.size
            self._run(chunk, num_chosen if is_last else 0, draws)
        return time.perf_counter() - began

    def _run(self, chunk: NDArray[np.int32], num_chosen: int, draws: bool) -> None:
        stop = self._cache.length + chunk.size
        self._cache.reserve(stop)
        outputs = np.arange(chunk.size - num_chosen, chunk.size, dtype=np.int32)
        batch = Batch(chunk, (self._cache.segment(chunk.size),), outputs)
        if draws:
            self.program.run_drawn(batch, [self._draw] * num_chosen)
        else:
            self.program.run_greedy(batch)
        self._cache.commit(stop)


def _record(model: _GpuModel, load_seconds: float, settings: BenchSettings, progress: ProgressCallback) -> Record:
    config, device = model.model.config, model.device
    needed = max(settings.prompt, settings.context + max(settings.decode, *VERIFIED_ROWS))
    token_ids = random_token_ids(config.vocab_size, needed)
    prompt, context = token_ids[: settings.prompt], token_ids[: settings.context]
    continuation = token_ids[settings.context : settings.context + settings.decode]
    rows = token_ids[: max(VERIFIED_ROWS)]
    start = len(context)
    # Kernels are loaded and graphs captured here.
    model.compute(0, prompt)
    model.compute(0, context)
    for size in VERIFIED_ROWS:
        for draws in (False, True):
            model.compute(start, rows[:size], size, draws=draws)
    prefills = []
    for repetition in range(settings.repetitions):
        progress("measuring prefill", repetition, settings.repetitions)
        prefills.append(model.compute(0, prompt))
    model.compute(0, context)
    decodes: dict[bool, list[list[float]]] = {False: [], True: []}
    hosts: list[float] = []
    ceilings: list[float] = []
    for repetition in range(settings.repetitions):
        progress("measuring decode", repetition, settings.repetitions)
        ceilings.append(device.read_bandwidth())
        for draws, intervals in decodes.items():
            waited = device.waited_seconds
            steps = [
                model.compute(position, [token], draws=draws) for position, token in enumerate(continuation, start)
            ]
            intervals.append(steps)
            hosts.append((sum(steps) - (device.waited_seconds - waited)) / len(steps))
    progress("measuring verification", 0, 0)
    verified: dict[int, list[float]] = {size: [] for size in VERIFIED_ROWS}
    for _ in range(settings.repetitions):
        for size, seconds in verified.items():
            seconds.append(model.compute(start, rows[:size], size))
    single = statistics.median(verified[1])
    greedy = sorted(seconds for steps in decodes[False] for seconds in steps)
    figures: Record = {
        "load_seconds": load_seconds,
        "prefill_tokens_per_second": summarize([settings.prompt / seconds for seconds in prefills]),
        "decode_tokens_per_second": summarize([len(steps) / sum(steps) for steps in decodes[False]]),
        "drawn_tokens_per_second": summarize([len(steps) / sum(steps) for steps in decodes[True]]),
        "itl_p50_seconds": percentile(greedy, 0.50),
        "itl_p99_seconds": percentile(greedy, 0.99),
        "host_seconds_per_token": statistics.median(hosts),
        "verification_cost": {
            str(size): statistics.median(seconds) / single for size, seconds in verified.items() if size > 1
        },
        "device_memory_bytes": device.used_bytes(),
        **_shares(model, statistics.median(ceilings), [len(steps) / sum(steps) for steps in decodes[False]], settings),
    }
    return {
        "model": model_record(describe_file(settings.model)),
        "machine": {
            "gpu": getattr(device, "name", "GPU"),
            "capability": list(device.capability),
            "gpu_layers": config.num_layers - model.num_host_layers,
            "num_layers": config.num_layers,
            "read_bytes_per_second": statistics.median(ceilings),
        },
        "settings": {name: getattr(settings, name) for name in ("prompt", "decode", "context", "repetitions")},
        "figures": figures,
    }


def _shares(model: _GpuModel, ceiling: float, rates: Sequence[float], settings: BenchSettings) -> dict[str, Any]:
    """How near decoding comes to what the GPU reads; nothing for a model of which the CPU runs a part."""
    if model.num_host_layers:
        return {}
    layout = model.model.kv_layout
    weight_bytes = bytes_per_token(model.model.file, model.model.config)
    kv_bytes = layout.page_bytes * (settings.context + settings.decode // 2) // layout.page_tokens
    read = (weight_bytes + kv_bytes) * statistics.median(rates)
    return {
        "weight_bytes_per_token": weight_bytes,
        "kv_bytes_per_token": kv_bytes,
        "decode_read_bytes_per_second": read,
        "decode_read_share": read / ceiling,
    }

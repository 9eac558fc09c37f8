"""Measure a model on a GPU on given token ids: prefill, decode, verification, memory, and host time per token.

The GPU's read bandwidth is measured beside every decode, as on the CPU: clocks change with temperature.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from localinfer.apps.bench.decode import VERIFIED_ROWS, BenchSettings, random_token_ids
from localinfer.apps.bench.figures import Record, check_context, model_record, summarize, timing_figures
from localinfer.apps.bench.measured_model import MeasuredModel
from localinfer.apps.show.describe import describe_file
from localinfer.engine.sampling.params import SamplingParams
from localinfer.errors import BackendUnavailableError
from localinfer.kernels.cuda.memory import DeviceKVLayout
from localinfer.kernels.cuda.sharded_pages import ShardedKVLayout
from localinfer.kernels.program import Batch, Draw, DrawingProgram
from localinfer.models.load.placement import bytes_per_token
from localinfer.types import ProgressCallback


def run_gpu_bench(settings: BenchSettings, progress: ProgressCallback) -> Record:
    """Measure prefill, decode, verification and memory; return one JSON-serializable record.

    Keys: model, machine (the GPU, how many layers run on it, its measured read bandwidth), settings, figures.
    Raises: LocalinferError, BackendUnavailableError where there is no GPU.
    """
    description = describe_file(settings.model)
    check_context(description, settings.num_tokens)
    began = time.perf_counter()
    with MeasuredModel(
        settings.model,
        threads=settings.threads,
        context_length=settings.num_tokens,
        device="cuda",
        progress=progress,
    ) as model:
        load_seconds = time.perf_counter() - began
        machine, figures = _measure(model, settings, progress)
    return {
        "model": model_record(description),
        "machine": machine,
        "settings": settings.record("prompt", "decode", "context", "repetitions"),
        "figures": {"load_seconds": load_seconds, **figures},
    }


def _measure(model: MeasuredModel, settings: BenchSettings, progress: ProgressCallback) -> tuple[Record, Record]:
    """The machine, and the figures."""
    program, layout, config = model.model.program, model.model.kv_layout, model.model.config
    if not isinstance(program, DrawingProgram) or not isinstance(layout, DeviceKVLayout | ShardedKVLayout):
        raise BackendUnavailableError("this model does not run on a GPU; measure it with --device cpu")
    device = layout.devices[-1] if isinstance(layout, ShardedKVLayout) else layout.device
    usual = SamplingParams()
    draw = Draw(float(usual.temperature), usual.top_k, float(usual.top_p), float(usual.min_p), 1, 0)

    def sample(batch: Batch) -> NDArray[Any]:
        return program.run_drawn(batch, [draw] * batch.output_rows.size)

    def seconds(
        start: int,
        token_ids: Sequence[int],
        num_outputs: int = 1,
        run: Callable[[Batch], NDArray[Any]] = program.run_greedy,
    ) -> float:
        began = time.perf_counter()
        model.compute(start, token_ids, num_outputs, run)
        return time.perf_counter() - began

    token_ids = random_token_ids(model.vocab_size, settings.num_tokens)
    prompt, context = token_ids[: settings.prompt], token_ids[: settings.context]
    continuation = token_ids[settings.context : settings.context + settings.decode]
    start = len(context)
    # Warm-up: loads kernels and captures graphs.
    seconds(0, prompt)
    seconds(0, context)
    for size in VERIFIED_ROWS:
        seconds(start, token_ids[:size], size)
        seconds(start, token_ids[:size], size, sample)
    prefills = []
    for repetition in range(settings.repetitions):
        progress("measuring prefill", repetition, settings.repetitions)
        prefills.append(seconds(0, prompt))
    seconds(0, context)
    greedy: list[list[float]] = []
    sampled: list[list[float]] = []
    hosts: list[float] = []
    ceilings: list[float] = []
    for repetition in range(settings.repetitions):
        progress("measuring decode", repetition, settings.repetitions)
        ceilings.append(device.read_bandwidth())
        for run, decodes in ((program.run_greedy, greedy), (sample, sampled)):
            waited = device.waited_seconds
            steps = [seconds(position, [token], 1, run) for position, token in enumerate(continuation, start)]
            decodes.append(steps)
            hosts.append((sum(steps) - (device.waited_seconds - waited)) / len(steps))
    progress("measuring verification", 0, 0)
    verified: dict[int, list[float]] = {size: [] for size in VERIFIED_ROWS}
    for _ in range(settings.repetitions):
        for size, samples in verified.items():
            samples.append(seconds(start, token_ids[:size], size))
    medians = {size: statistics.median(samples) for size, samples in verified.items()}
    figures = timing_figures(settings.prompt, prefills, greedy, medians) | {
        "drawn_tokens_per_second": summarize([len(steps) / sum(steps) for steps in sampled]),
        "host_seconds_per_token": statistics.median(hosts),
        "device_memory_bytes": device.used_bytes(),
    }
    ceiling = statistics.median(ceilings)
    parts = layout.parts if isinstance(layout, ShardedKVLayout) else ()
    num_host_layers = sum(part.end - part.first for part in parts if part.device is None)
    # Of a split model other devices read a part, so its bytes are not comparable with the GPU's bandwidth.
    if not parts:
        weight_bytes = bytes_per_token(model.model.file, config)
        kv_bytes = layout.page_bytes * (settings.context + settings.decode // 2) // layout.page_tokens
        read = (weight_bytes + kv_bytes) * figures["decode_tokens_per_second"]["median"]
        figures |= {
            "weight_bytes_per_token": weight_bytes,
            "kv_bytes_per_token": kv_bytes,
            "decode_read_bytes_per_second": read,
            "decode_read_share": read / ceiling,
        }
    machine = {
        "gpu": getattr(device, "name", "GPU"),
        "capability": list(device.capability),
        "gpu_layers": config.num_layers - num_host_layers,
        "num_layers": config.num_layers,
        "read_bytes_per_second": ceiling,
    }
    return machine, figures

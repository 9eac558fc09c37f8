"""Measure a model as its user would meet it, alone or beside a peer: plain records, which `bench_report.py` prints.

Every engine runs in a process of its own, so that memory and start-up are its own; they take turns, repetition by
repetition, on the same token ids. Figures are medians over repetitions.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localinfer.bench.client import OURS, EngineOptions, EngineProcess
from localinfer.describe import FileDescription, describe_file
from localinfer.errors import RequestError

ProgressCallback = Callable[[str, int, int], None]
Record = dict[str, Any]

VERIFIED_ROWS = (1, 4, 8)
"""Tokens checked at once, as speculation does."""
STREAM_PROMPT = "Once upon a time"
_START_TOKENS = 8
"""Length of the prompt whose first token ends the start of a process."""
_READ_BYTES = 8 << 20
_SETTLING_SECONDS = 0.05
"""Between two engines: threads of the one that is done may still spin."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured. context: tokens before those that are decoded. peer: engine to compare with, None for none.

    threads: None lets the library choose, and a peer gets the same number. device: where ours computes.
    """

    model: str
    prompt: int = 512
    decode: int = 128
    context: int = 32
    repetitions: int = 5
    threads: int | None = None
    peer: str | None = None
    peer_python: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("prompt", "decode", "context", "repetitions"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; measure at least 1")


def run_bench(settings: BenchSettings, progress: ProgressCallback) -> Record:
    """Measure prefill, decode, verification, start and memory; return one record that JSON can hold.

    Keys: model, machine, settings, engines (per engine its figures) and, beside a peer, ratios: in each of them above 1
    means that localinfer is the better one. Raises: LocalinferError.
    """
    description = describe_file(settings.model)
    needed = max(settings.prompt, settings.context + max(settings.decode, *VERIFIED_ROWS))
    check_context(description, needed)
    options = EngineOptions(
        engine=OURS, model=settings.model, threads=settings.threads, context_length=needed, streams=False
    )
    with ExitStack() as stack:
        ours, compile_seconds = _start_warm(options)
        stack.enter_context(ours)
        threads = int(ours.ready["num_threads"])
        machine = measure_machine(threads, progress)
        processes = {OURS: ours}
        if settings.peer is not None:
            progress(f"starting {settings.peer}", 0, 0)
            peer = replace(options, engine=settings.peer, threads=threads, python=settings.peer_python)
            processes[settings.peer] = stack.enter_context(EngineProcess(peer))
        token_ids = random_token_ids(int(ours.ready["vocab_size"]), needed)
        results = _measure(processes, token_ids, settings, progress)
    starting = [replace(process.options, threads=threads, streams=True) for process in processes.values()]
    for name, seconds in _measure_starts(starting, token_ids[:_START_TOKENS], settings, progress).items():
        results[name]["process_to_first_token_seconds"] = seconds
    results[OURS]["compile_seconds"] = compile_seconds
    _add_shares(results[OURS], machine, settings)
    record: Record = {
        "model": model_record(description),
        "machine": machine,
        "settings": {name: getattr(settings, name) for name in ("prompt", "decode", "context", "repetitions")},
        "engines": results,
    }
    if settings.peer is not None:
        record["ratios"] = compare(results[OURS], results[settings.peer])
    return record


def run_stream_bench(settings: BenchSettings, progress: ProgressCallback) -> Record:
    """Measure completions from text to text, streamed as a user sees them; `settings.decode` tokens at most each."""
    description = describe_file(settings.model)
    threads = settings.threads or 1
    engines = [(OURS, None)] + ([(settings.peer, settings.peer_python)] if settings.peer is not None else [])
    samples: dict[str, list[Record]] = {name: [] for name, _ in engines}
    results: dict[str, Record] = {}
    with ExitStack() as stack:
        context_length = int(description.sizes.get("context_length", settings.decode + 32))
        processes = {
            name: stack.enter_context(
                EngineProcess(
                    EngineOptions(
                        engine=name,
                        model=settings.model,
                        threads=threads,
                        context_length=min(context_length, max(settings.decode + 32, 128)),
                        streams=True,
                        python=python,
                        device=settings.device,
                    )
                )
            )
            for name, python in engines
        }
        for repetition in range(settings.repetitions + 1):
            progress("streaming", repetition, settings.repetitions)
            for name, process in processes.items():
                time.sleep(_SETTLING_SECONDS)
                reply = process.ask("stream", prompt=STREAM_PROMPT, max_tokens=settings.decode)
                # The first is a warm-up.
                if repetition:
                    samples[name].append(reply)
        for name, process in processes.items():
            results[name] = {
                "version": process.ready["version"],
                "tokens": samples[name][0]["tokens"],
                "stream_tokens_per_second": summarize([one["tokens"] / one["seconds"] for one in samples[name]]),
                "time_to_first_token_seconds": summarize([one["first_token_seconds"] for one in samples[name]]),
                "peak_memory_bytes": process.peak_memory_bytes(),
            }
    record: Record = {
        "model": model_record(description),
        "settings": {
            "decode": settings.decode,
            "repetitions": settings.repetitions,
            "threads": threads,
            "device": settings.device,
        },
        "engines": results,
    }
    if settings.peer is not None:
        record["ratios"] = compare(results[OURS], results[settings.peer])
    return record


def measure_machine(num_threads: int, progress: ProgressCallback) -> Record:
    """The ceilings of this many threads, and what the machine is."""
    from localinfer.bench.machine import cpu_name, instruction_set, measure_multiply_peak, measure_read_bandwidth

    progress("measuring the machine's ceilings", 0, 2)
    read = measure_read_bandwidth(num_threads)
    progress("measuring the machine's ceilings", 1, 2)
    return {
        "cpu": cpu_name(),
        "instruction_set": instruction_set(),
        "threads": num_threads,
        "read_bytes_per_second": read,
        "multiply_adds_per_second": measure_multiply_peak(num_threads),
    }


def compare(ours: Record, peer: Record) -> Record:
    """How many times better the first engine is: by medians, and at least and at most in one pair of repetitions."""
    ratios: Record = {}
    for name, value in ours.items():
        other = peer.get(name)
        if not value or not other or name in ("version", "tokens", "verification_cost"):
            continue
        is_rate = name.endswith("_per_second")
        if isinstance(value, dict):
            pairs = zip(value["values"], other["values"], strict=True)
            each = [a / b if is_rate else b / a for a, b in pairs]
            value, other = value["median"], other["median"]
            ratio = value / other if is_rate else other / value
            ratios[name] = {"ratio": ratio, "lowest": min(each), "highest": max(each)}
        else:
            ratios[name] = {"ratio": other / value}
    return ratios


def _start_warm(options: EngineOptions) -> tuple[EngineProcess, float | None]:
    """Our process with all kernels compiled, and how long compiling them took if it had to be done."""
    from localinfer.bench.machine import num_compiled_kernels

    before = num_compiled_kernels()
    process = EngineProcess(options)
    if num_compiled_kernels() == before:
        return process, None
    cold_seconds = process.ready["load_seconds"]
    process.close()
    process = EngineProcess(options)
    return process, max(0.0, cold_seconds - process.ready["load_seconds"])


def check_context(description: FileDescription, needed: int) -> None:
    """Raise RequestError if the model was not trained for that many tokens."""
    trained = description.sizes.get("context_length")
    if isinstance(trained, int) and needed > trained:
        raise RequestError(
            f"{needed} tokens are to be measured, but the model was trained for {trained}; ask for less with --prompt, "
            "--context and --decode"
        )


def _measure(
    processes: dict[str, EngineProcess], token_ids: list[int], settings: BenchSettings, progress: ProgressCallback
) -> dict[str, Record]:
    from localinfer.bench.machine import measure_read_bandwidth

    ours = processes[OURS]
    prompt, context = token_ids[: settings.prompt], token_ids[: settings.context]
    continuation = token_ids[settings.context : settings.context + settings.decode]
    start = len(context)
    prefills: dict[str, list[float]] = {name: [] for name in processes}
    decodes: dict[str, list[list[float]]] = {name: [] for name in processes}
    for process in processes.values():
        process.ask("compute", start=0, token_ids=prompt[:64])
        process.ask("decode", start=len(prompt[:64]) - 1, token_ids=prompt[:1])
    for repetition in range(settings.repetitions):
        progress("measuring prefill", repetition, settings.repetitions)
        for name, process in processes.items():
            time.sleep(_SETTLING_SECONDS)
            prefills[name].append(process.ask("compute", start=0, token_ids=prompt)["seconds"])
    for process in processes.values():
        process.ask("compute", start=0, token_ids=context)
    ceilings: list[float] = []
    for repetition in range(settings.repetitions):
        progress("measuring decode", repetition, settings.repetitions)
        # Memory is shared with whatever else the machine runs, so its ceiling is measured beside every decode.
        ceilings.append(measure_read_bandwidth(int(ours.ready["num_threads"])))
        for name, process in processes.items():
            time.sleep(_SETTLING_SECONDS)
            decodes[name].append(process.ask("decode", start=start, token_ids=continuation)["seconds"])
    results: dict[str, Record] = {}
    verified = token_ids[: max(VERIFIED_ROWS)]
    for name, process in processes.items():
        progress("measuring verification", len(results), len(processes))
        count = 4 * settings.repetitions
        times = process.ask("verify", start=start, token_ids=verified, sizes=VERIFIED_ROWS, repetitions=count)
        results[name] = _engine_record(process, prefills[name], decodes[name], settings)
        results[name]["verification_cost"] = {
            str(size): seconds / times["seconds"][0]
            for size, seconds in zip(VERIFIED_ROWS, times["seconds"], strict=True)
            if size > 1
        }
    middle = start + settings.decode // 2
    results[OURS]["work_per_token"] = ours.ask("work", start=middle, num_rows=1)["work"]
    results[OURS]["read_ceilings"] = ceilings
    results[OURS]["work_per_prompt"] = ours.ask("work", start=0, num_rows=settings.prompt)["work"]
    return results


def _engine_record(
    process: EngineProcess, prefills: list[float], decodes: list[list[float]], settings: BenchSettings
) -> Record:
    intervals = sorted(seconds for decode in decodes for seconds in decode)
    return {
        "version": process.ready["version"],
        "load_seconds": process.ready["load_seconds"],
        "prefill_tokens_per_second": summarize([settings.prompt / seconds for seconds in prefills]),
        "decode_tokens_per_second": summarize([len(decode) / sum(decode) for decode in decodes]),
        "time_to_first_token_seconds": summarize(prefills),
        "itl_p50_seconds": percentile(intervals, 0.50),
        "itl_p99_seconds": percentile(intervals, 0.99),
        "peak_memory_bytes": process.peak_memory_bytes(),
    }


def _measure_starts(
    engines: Sequence[EngineOptions], token_ids: list[int], settings: BenchSettings, progress: ProgressCallback
) -> dict[str, Record]:
    """Seconds from starting a process to its first token, with compiled kernels and the file in the page cache.

    The system may have dropped the file meanwhile, and who starts first would read it for the other.
    """
    samples: dict[str, list[float]] = {options.engine: [] for options in engines}
    request = {"action": "stream", "prompt": token_ids, "max_tokens": 1}
    for repetition in range(settings.repetitions):
        progress("measuring process starts", repetition, settings.repetitions)
        for options in engines if repetition % 2 == 0 else reversed(engines):
            _read_through(options.model)
            with EngineProcess(options, request) as process:
                process.reply()
                samples[options.engine].append(process.seconds_since_start())
    return {name: summarize(values) for name, values in samples.items()}


def _read_through(model: str) -> None:
    """Read a model's files once and keep nothing."""
    path = Path(model)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(_READ_BYTES):
                    pass


def _add_shares(ours: Record, machine: Record, settings: BenchSettings) -> None:
    """Bytes per token, and how near decode and prefill come to the machine's ceilings."""
    token, prompt = ours.pop("work_per_token"), ours.pop("work_per_prompt")
    num_bytes = token["weight_bytes"] + token["kv_bytes"]
    ours["weight_bytes_per_token"] = token["weight_bytes"]
    ours["kv_bytes_per_token"] = token["kv_bytes"]
    rates, ceilings = ours["decode_tokens_per_second"], ours.pop("read_ceilings")
    ours["decode_read_bytes_per_second"] = num_bytes * rates["median"]
    shares = [num_bytes * rate / ceiling for rate, ceiling in zip(rates["values"], ceilings, strict=True)]
    ours["decode_read_share"] = statistics.median(shares)
    machine["read_bytes_per_second"] = statistics.median(ceilings)
    multiplied = prompt["multiply_adds"] / settings.prompt * ours["prefill_tokens_per_second"]["median"]
    ours["prefill_multiply_adds_per_second"] = multiplied
    ours["prefill_multiply_share"] = multiplied / machine["multiply_adds_per_second"]


def summarize(values: list[float]) -> Record:
    """A median, and the values it is of."""
    return {"median": statistics.median(values), "values": values}


def percentile(ordered: list[float], share: float) -> float:
    """The value below which this share of values in order lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def random_token_ids(vocab_size: int, count: int) -> list[int]:
    """Ordinary tokens: the special ones lie at both ends of a vocabulary."""
    choose = random.Random(1)
    return [choose.randrange(vocab_size // 4, vocab_size - vocab_size // 8) for _ in range(count)]


def model_record(description: FileDescription) -> Record:
    """What a record says of the model."""
    return {
        "path": description.path,
        "architecture": description.architecture,
        "num_bytes": description.num_bytes,
        "num_parameters": description.num_parameters,
        "bits_per_weight": description.bits_per_weight,
        "types": [share.type for share in description.types],
    }

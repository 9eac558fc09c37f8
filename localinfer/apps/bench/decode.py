"""Measure prefill, decode, start and memory of a model, alone or beside another engine; `report.py` prints the records.

Every engine runs in its own process, so that memory and start-up are measured apart; they alternate, repetition by
repetition, on the same token ids. Figures are medians over repetitions.
"""

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from localinfer.apps.bench.figures import (
    Record,
    check_context,
    compare,
    find_walls,
    model_record,
    summarize,
    timing_figures,
)
from localinfer.apps.bench.processes import OURS, EngineOptions, EngineProcess, PeerFailedError, check_interpreter
from localinfer.apps.bench.roofline import measure_machine, measure_read_bandwidth, num_compiled_kernels
from localinfer.apps.show.describe import describe_file
from localinfer.errors import RequestError
from localinfer.models.load.threads import available_threads
from localinfer.types import ProgressCallback

VERIFIED_ROWS = (1, 4, 8)
"""Tokens verified in one pass, as in speculative decoding."""
STREAM_PROMPT = "Once upon a time"
_START_TOKENS = 8
"""Length of the prompt whose first token ends a process start."""
_READ_BYTES = 8 << 20
_SETTLING_SECONDS = 0.05
"""Pause between two engines: threads of the former may still spin."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The settings of a measurement. Raises: RequestError naming the value."""

    model: str
    prompt: int = 512
    """Tokens of a prefill."""
    decode: int = 128
    """Tokens decoded in each repetition."""
    context: int = 32
    """Tokens before the first decoded one."""
    repetitions: int = 5
    threads: int | None = None
    """Of both engines; None: the library's choice."""
    peer: str | None = None
    """The engine to compare with."""
    peer_python: str | None = None
    """The interpreter that has the peer; None: this one."""
    device: str = "cpu"
    """Of localinfer; a peer uses its own default."""

    def __post_init__(self) -> None:
        for name in ("prompt", "decode", "context", "repetitions"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; measure at least 1")

    @property
    def num_tokens(self) -> int:
        """The longest context measured."""
        return max(self.prompt, self.context + max(self.decode, *VERIFIED_ROWS))

    def record(self, *names: str) -> Record:
        """Settings by name."""
        return {name: getattr(self, name) for name in names}


def run_bench(settings: BenchSettings, progress: ProgressCallback) -> Record:
    """Measure prefill, decode, verification, start and memory; return one JSON-serializable record.

    Keys: model, machine, settings, engines (the figures of each; of a peer that cannot load or compute the model, its
    error), walls (`find_walls`) and, beside a peer, ratios: above 1 where localinfer is better.
    Raises: LocalinferError.
    """
    check_interpreter(settings.peer_python)
    description = describe_file(settings.model)
    check_context(description, settings.num_tokens)
    options = EngineOptions(
        engine=OURS, model=settings.model, threads=settings.threads, context_length=settings.num_tokens
    )
    with ExitStack() as stack:
        ours, compile_seconds = _start_warm(options)
        stack.enter_context(ours)
        threads = int(ours.ready["num_threads"])
        machine = measure_machine(threads, progress)
        processes, failed = {OURS: ours}, {}
        token_ids = random_token_ids(int(ours.ready["vocab_size"]), settings.num_tokens)
        _warm(ours, token_ids)
        if settings.peer is not None:
            progress(f"starting {settings.peer}", 0, 0)
            peer = replace(options, engine=settings.peer, threads=threads, python=settings.peer_python)
            try:
                process = stack.enter_context(EngineProcess(peer))
                _warm(process, token_ids)
                processes[settings.peer] = process
            except PeerFailedError as error:
                failed[settings.peer] = {"error": str(error)}
        results = _measure(processes, token_ids, settings, machine, progress)
    starting = [replace(process.options, threads=threads, streams=True) for process in processes.values()]
    for name, seconds in _measure_starts(starting, token_ids[:_START_TOKENS], settings, progress).items():
        results[name]["process_to_first_token_seconds"] = summarize(seconds)
    results[OURS]["compile_seconds"] = compile_seconds
    record: Record = {
        "model": model_record(description),
        "machine": machine,
        "settings": settings.record("prompt", "decode", "context", "repetitions"),
        "engines": results | failed,
        "walls": find_walls(results[OURS], machine, free_threads=available_threads() - threads),
    }
    if settings.peer in results:
        record["ratios"] = compare(results[OURS], results[settings.peer])
    return record


def run_stream_bench(settings: BenchSettings, progress: ProgressCallback) -> Record:
    """Measure streamed completions, text to text, of at most `settings.decode` tokens each."""
    check_interpreter(settings.peer_python)
    description = describe_file(settings.model)
    trained = int(description.sizes.get("context_length", settings.decode + 32))
    options = EngineOptions(
        engine=OURS,
        model=settings.model,
        threads=settings.threads or 1,
        context_length=min(trained, max(settings.decode + 32, 128)),
        streams=True,
        device=settings.device,
    )
    engines = [options]
    if settings.peer is not None:
        engines.append(replace(options, engine=settings.peer, python=settings.peer_python))
    results: dict[str, Record] = {}
    with ExitStack() as stack:
        processes = {one.engine: stack.enter_context(EngineProcess(one)) for one in engines}
        samples: dict[str, list[Record]] = {name: [] for name in processes}
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
        "settings": {**settings.record("decode", "repetitions", "device"), "threads": options.threads},
        "engines": results,
    }
    if settings.peer is not None:
        record["ratios"] = compare(results[OURS], results[settings.peer])
    return record


def random_token_ids(vocab_size: int, count: int) -> list[int]:
    """Random token ids from the middle of the vocabulary: special tokens are at its ends."""
    choose = random.Random(1)
    return [choose.randrange(vocab_size // 4, vocab_size - vocab_size // 8) for _ in range(count)]


def _start_warm(options: EngineOptions) -> tuple[EngineProcess, float | None]:
    """A localinfer process with all kernels compiled, and the seconds that compiling took, None if they were cached."""
    before = num_compiled_kernels()
    process = EngineProcess(options)
    if num_compiled_kernels() == before:
        return process, None
    cold_seconds = process.ready["load_seconds"]
    process.close()
    process = EngineProcess(options)
    return process, max(0.0, cold_seconds - process.ready["load_seconds"])


def _warm(process: EngineProcess, token_ids: list[int]) -> None:
    """Compute a short prompt and a token."""
    prompt = token_ids[:64]
    process.ask("compute", start=0, token_ids=prompt)
    process.ask("decode", start=len(prompt) - 1, token_ids=prompt[:1])


def _measure(
    processes: dict[str, EngineProcess],
    token_ids: list[int],
    settings: BenchSettings,
    machine: Record,
    progress: ProgressCallback,
) -> dict[str, Record]:
    """The figures of each engine; localinfer's also relative to the machine's ceilings."""
    prompt, context = token_ids[: settings.prompt], token_ids[: settings.context]
    continuation = token_ids[settings.context : settings.context + settings.decode]
    start = len(context)
    prefills: dict[str, list[float]] = {name: [] for name in processes}
    decodes: dict[str, list[list[float]]] = {name: [] for name in processes}
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
        # Other programs share the memory bandwidth, so its ceiling is measured beside every decode.
        ceilings.append(measure_read_bandwidth(machine["threads"]))
        for name, process in processes.items():
            time.sleep(_SETTLING_SECONDS)
            decodes[name].append(process.ask("decode", start=start, token_ids=continuation)["seconds"])
    results: dict[str, Record] = {}
    for name, process in processes.items():
        progress("measuring verification", len(results), len(processes))
        times = process.ask(
            "verify",
            start=start,
            token_ids=token_ids[: max(VERIFIED_ROWS)],
            sizes=VERIFIED_ROWS,
            repetitions=4 * settings.repetitions,
        )
        verified = dict(zip(VERIFIED_ROWS, times["seconds"] or (), strict=bool(times["seconds"])))
        results[name] = {
            "version": process.ready["version"],
            "load_seconds": process.ready["load_seconds"],
            "time_to_first_token_seconds": summarize(prefills[name]),
            "peak_memory_bytes": process.peak_memory_bytes(),
            **timing_figures(settings.prompt, prefills[name], decodes[name], verified),
        }
    ours, process = results[OURS], processes[OURS]
    token = process.ask("work", start=start + settings.decode // 2, num_rows=1)["work"]
    prompt_work = process.ask("work", start=0, num_rows=settings.prompt)["work"]
    num_bytes = token["weight_bytes"] + token["kv_bytes"]
    rates = ours["decode_tokens_per_second"]
    shares = [num_bytes * rate / ceiling for rate, ceiling in zip(rates["values"], ceilings, strict=True)]
    machine["read_bytes_per_second"] = statistics.median(ceilings)
    multiplied = prompt_work["multiply_adds"] / settings.prompt * ours["prefill_tokens_per_second"]["median"]
    prompt_bytes = prompt_work["weight_bytes"] + prompt_work["kv_bytes"]
    prompt_seconds = ours["time_to_first_token_seconds"]["median"]
    ours |= {
        "weight_bytes_per_token": token["weight_bytes"],
        "kv_bytes_per_token": token["kv_bytes"],
        "decode_read_bytes_per_second": num_bytes * rates["median"],
        "decode_read_share": statistics.median(shares),
        "decode_multiply_share": token["multiply_adds"] * rates["median"] / machine["multiply_adds_per_second"],
        "prefill_read_share": prompt_bytes / prompt_seconds / machine["read_bytes_per_second"],
        "prefill_attention_share": prompt_work["kv_multiply_adds"]
        / (prompt_work["kv_multiply_adds"] + prompt_work["multiply_adds"]),
        "prefill_multiply_adds_per_second": multiplied,
        "prefill_multiply_share": multiplied / machine["multiply_adds_per_second"],
    }
    return results


def _measure_starts(
    engines: Sequence[EngineOptions], token_ids: list[int], settings: BenchSettings, progress: ProgressCallback
) -> dict[str, list[float]]:
    """Seconds from process start to first token, with compiled kernels and the file in the page cache.

    The file is read first: if it were evicted, only the first process would read it from disk.
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
    return samples


def _read_through(model: str) -> None:
    """Read a model's files into the page cache."""
    path = Path(model)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(_READ_BYTES):
                    pass

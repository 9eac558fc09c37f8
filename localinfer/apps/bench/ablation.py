"""Ablation of optimisations: switched on one after the other from none, then each off from the whole.

The first row is the model in float16 on one thread, without reuse, drafts or company. Each configuration is measured in
a process of its own, so that peak memory is its own, and generates the same texts as long as the weights and the cache
have the same types: nothing else changes results.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localinfer.apps.bench.decode import BenchSettings
from localinfer.apps.bench.figures import Record, check_context, model_record
from localinfer.apps.bench.worker import peak_memory_bytes
from localinfer.apps.evaluate.texts import evaluation_text
from localinfer.apps.show.describe import describe_file
from localinfer.engine.admission import EngineLimits
from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.types import ProgressCallback

if TYPE_CHECKING:
    from localinfer.llm import LLM

NEW_TOKENS = 16
"""Of the second turn's message."""
STREAMS = 4
"""Requests at once, for the throughput."""
_PLAIN_TYPES = {"F16", "BF16", "F32"}
_KLD_CONTEXT = 256
_KLD_CHUNKS = 4


@dataclass(frozen=True)
class AblationConfiguration:
    """Optimisations that are on, in the order in which they are switched on."""

    quantized_weights: bool = False
    """Weights of 4 to 8 bits, in place of float16."""
    quantized_cache: bool = False
    """Keys and values in Q8_0, in place of float16."""
    threads: bool = False
    """As many threads as the library chooses, or the option says, in place of one."""
    prefix_reuse: bool = False
    """Keys and values of former texts stay in memory."""
    disk_cache: bool = False
    """They are on disk too, and outlive a restart."""
    drafts: bool = False
    """Several tokens per pass: n-gram drafts, or the model's own draft layers."""
    batching: bool = False
    """Requests share steps, in place of one after the other."""
    chunked_prefill: bool = False
    """A prompt beside running streams is computed in chunks that let them go on, in place of at once."""


OPTIMISATIONS = tuple(field.name for field in fields(AblationConfiguration))
NONE, WHOLE = AblationConfiguration(), AblationConfiguration(**dict.fromkeys(OPTIMISATIONS, True))


def configurations() -> Iterator[tuple[str, AblationConfiguration]]:
    """Each row's name and configuration: none, each switched on in turn, then each off from the whole."""
    yield "float16, one thread", NONE
    so_far = NONE
    for name in OPTIMISATIONS:
        so_far = replace(so_far, **{name: True})
        yield f"+ {name.replace('_', ' ')}", so_far
    for name in OPTIMISATIONS:
        yield f"all but {name.replace('_', ' ')}", replace(WHOLE, **{name: False})


def run_ablation(settings: BenchSettings, progress: ProgressCallback) -> Record:
    """Measure every configuration; return one JSON-serializable record.

    Keys: model, settings and rows. A row has name, configuration, samples and figures, which are their medians:
    first_token_seconds of a prompt, of the next turn (next_turn_seconds) and of that turn after a restart
    (restart_seconds), decode_tokens_per_second of one stream, throughput_tokens_per_second of several, stall_seconds
    (the longest time between two tokens of a stream while a prompt is computed), peak_memory_bytes and divergence (mean
    KL divergence in nats from float16, computed once for each pair of types). Raises: LocalinferError.
    """
    description = describe_file(settings.model)
    needed = settings.prompt + 2 * settings.decode + NEW_TOKENS
    check_context(description, needed)
    rows = list(configurations())
    with tempfile.TemporaryDirectory(prefix="localinfer-") as folder:
        files = _two_files(settings.model, {share.type for share in description.types}, Path(folder), progress)
        divergences = _divergences(files, progress)
        samples: dict[str, list[Record]] = {name: [] for name, _ in rows}
        for turn in range(settings.repetitions):
            # In turns, so that what else the machine does meets all alike.
            for index, (name, configuration) in enumerate(rows):
                progress(f"measuring {name}", turn * len(rows) + index, settings.repetitions * len(rows))
                samples[name].append(_in_a_process(files[configuration.quantized_weights], configuration, settings))
    found = []
    for name, configuration in rows:
        figures = {key: statistics.median(one[key] for one in samples[name]) for key in samples[name][0]}
        figures["divergence"] = divergences[configuration.quantized_weights, configuration.quantized_cache]
        found.append(
            {"name": name, "configuration": asdict(configuration), "figures": figures, "samples": samples[name]}
        )
    return {
        "model": model_record(description),
        "settings": {**settings.record("prompt", "decode", "repetitions", "threads"), "streams": STREAMS},
        "rows": found,
    }


def _two_files(model: str, types: set[str], folder: Path, progress: ProgressCallback) -> dict[bool, str]:
    """The model by whether its weights are quantized: the file itself, and another made of it in a folder."""
    from localinfer.apps.quantize import quantize
    from localinfer.models import demo

    given, shipped = Path(model).resolve(), Path(demo.__file__).resolve().parent
    if given.parent == shipped:
        return {False: str(shipped / "demo-f16.gguf"), True: str(shipped / "demo-q4_k_m.gguf")}
    is_plain = types <= _PLAIN_TYPES
    made = folder / "made.gguf"
    quantize(model, made, type="Q4_K_M" if is_plain else "F16", method="rtn", progress=progress)
    return {not is_plain: model, is_plain: str(made)}


def _divergences(files: dict[bool, str], progress: ProgressCallback) -> dict[tuple[bool, bool], float]:
    """Mean KL divergence from float16 weights and cache, by whether weights and cache are quantized."""
    from localinfer.apps.evaluate.measure import compare
    from localinfer.loading.load import load

    found = {(False, False): 0.0}
    with load(files[False], context_length=_KLD_CONTEXT, disk_cache=False) as base:
        for pair in ((True, False), (False, True), (True, True)):
            kind = _kv_type(pair[1])
            with load(files[pair[0]], kv_type=kind, context_length=_KLD_CONTEXT, disk_cache=False) as other:
                measured = compare(
                    base,
                    other,
                    evaluation_text(),
                    context_length=_KLD_CONTEXT,
                    max_chunks=_KLD_CHUNKS,
                    progress=progress,
                )
            found[pair] = float(measured.divergences.mean())
    return found


def _kv_type(is_quantized: bool) -> str:
    return "q8_0" if is_quantized else "f16"


def _in_a_process(model: str, configuration: AblationConfiguration, settings: BenchSettings) -> Record:
    """Figures of one configuration, measured in a new process. Raises: BackendUnavailableError."""
    request = {"model": model, "configuration": asdict(configuration)}
    request |= settings.record("prompt", "decode", "threads")
    program = "import sys; from localinfer.apps.bench.ablation import answer; answer(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(request)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise BackendUnavailableError(
            f"measuring {configuration} ended with exit code {done.returncode} ({last:.300}); run it again with "
            "smaller --prompt and --decode"
        )
    figures: Record = json.loads(done.stdout)
    return figures


def answer(request: str) -> None:
    """Measure the configuration of a request, and write its figures to standard output as JSON."""
    given = json.loads(request)
    configuration = AblationConfiguration(**given.pop("configuration"))
    sys.stdout.write(json.dumps(measure(configuration, BenchSettings(**given))))


def measure(configuration: AblationConfiguration, settings: BenchSettings) -> Record:
    """Figures of one configuration in this process, without the divergence; settings.model: the file of its weights."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="localinfer-"))
        llm = stack.enter_context(_loaded(configuration, settings, folder))
        ids = _token_ids(llm, settings.prompt + NEW_TOKENS)
        prompt, message = ids[: settings.prompt], ids[settings.prompt :]
        _stream(llm, prompt[:8], 2)
        llm.clear_cache()
        first, times, reply = _stream(llm, prompt, settings.decode)
        if not configuration.prefix_reuse:
            llm.clear_cache()
        turn = [*prompt, *reply, *message]
        next_turn = _stream(llm, turn, 1)[0]
        llm.clear_cache()
        throughput = _throughput(llm, prompt, settings.decode)
        llm.clear_cache()
        stall = _stall(llm, prompt, settings.decode)
        peak = peak_memory_bytes()
        llm.close()
        with _loaded(configuration, settings, folder) as again:
            _stream(again, prompt[-8:], 2)
            restart = _stream(again, turn, 1)[0]
    return {
        "first_token_seconds": first,
        "next_turn_seconds": next_turn,
        "restart_seconds": restart,
        "decode_tokens_per_second": (len(times) - 1) / (times[-1] - times[0]),
        "throughput_tokens_per_second": throughput,
        "stall_seconds": stall,
        "peak_memory_bytes": peak or 0,
    }


def _loaded(configuration: AblationConfiguration, settings: BenchSettings, folder: str) -> "LLM":
    from localinfer.loading.load import load

    llm = load(
        settings.model,
        device="cpu",
        threads=settings.threads if configuration.threads else 1,
        kv_type=_kv_type(configuration.quantized_cache),
        speculation="auto" if configuration.drafts else None,
        limits=EngineLimits(max_running=16 if configuration.batching else 1),
        disk_cache=configuration.disk_cache,
        disk_cache_folder=folder if configuration.disk_cache else None,
        context_length=settings.prompt + 2 * settings.decode + NEW_TOKENS,
    )
    if not configuration.chunked_prefill:
        engine = llm._engine
        rows = engine.program.max_batch_rows
        engine.scheduler.chunk_rows = lambda num_decoding, *_, **__: max(1, rows - num_decoding)
    return llm


def _token_ids(llm: "LLM", count: int) -> list[int]:
    """That many ids of a text, which is repeated if it is too short."""
    if llm.tokenizer is None:
        raise RequestError("the model has no tokenizer, so no text can be read; take a model with one")
    ids = list(llm.tokenizer.encode(evaluation_text()))
    return (ids * (count // len(ids) + 1))[:count]


def _stream(llm: "LLM", prompt: Sequence[int], max_tokens: int) -> tuple[float, list[float], list[int]]:
    """Seconds to the first token, the moment of each token, and their ids."""
    began, times, ids = time.perf_counter(), [], []
    for event in llm.stream(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True):
        times.append(time.perf_counter())
        ids.append(event.token_id)
    return times[0] - began, times, ids


def _throughput(llm: "LLM", prompt: Sequence[int], max_tokens: int) -> float:
    """Tokens per second of several streams at once, each of a short prompt of its own."""
    length = max(1, len(prompt) // (2 * STREAMS))
    prompts = [prompt[start * length : (start + 1) * length] for start in range(STREAMS)]
    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as threads:
        counts = list(threads.map(lambda one: len(_stream(llm, one, max_tokens)[2]), prompts))
    return sum(counts) / (time.perf_counter() - began)


def _stall(llm: "LLM", prompt: Sequence[int], max_tokens: int) -> float:
    """The longest time between two tokens of a stream, in the middle of which another prompt arrives."""
    with ThreadPoolExecutor(1) as threads:
        times, other = [time.perf_counter()], None
        for count, _ in enumerate(llm.stream(prompt[:8], max_tokens=max_tokens, temperature=0, ignore_eos=True)):
            times.append(time.perf_counter())
            if count == 1:
                other = threads.submit(_stream, llm, prompt, 1)
        if other is not None:
            other.result()
    return max((later - earlier for earlier, later in zip(times[1:], times[2:], strict=False)), default=0.0)

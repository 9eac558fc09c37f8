"""What steps of a model cost on this machine: `python -m tests.bench.bench_step_costs [MODEL] --output COSTS.json`.

Chunks of prompts by their rows and by what stands before them, decode steps by streams and context, and what steps and
tokens take beside the model, in an engine, and with requests through `localinfer serve` and a client on this machine.
`tests.proof.simulation.fleet` reads the file. Contexts are copies of one computed page: what attention reads is as
large as that of a text.

--processes N measures in N processes at the same time and takes the mean: replicas that share a machine share its
memory bandwidth. --cpu-time takes the processor time of the one thread that computes in place of the time on the wall,
where the machine has other work that cannot be stopped.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from localinfer.apps.bench.figures import RequestTimes
from localinfer.apps.bench.processes import ServerProcess
from localinfer.apps.bench.serve import LoadClient, Prompts, chat, chat_body
from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.params import SamplingParams
from localinfer.kernels.jit.host import cpu_name
from localinfer.loading.options import model_path
from localinfer.models.load.loader import Model, load_model
from tests.proof.simulation.fleet_costs import FORMAT

_PAUSE_SECONDS = 0.3

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STREAMS = (1, 2, 4, 8, 16)
_NO_ROWS = np.empty(0, np.int32)


class Sequences:
    """Texts of any length in one pool, all with the keys and values of one page that is computed once."""

    def __init__(self, model: Model, most_context: int, count: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.program, self._length = model.program, model.config.context_length
        self._pool = PagePool(model.kv_layout)
        vocab_size, page_tokens = model.config.vocab_size, model.kv_layout.page_tokens
        self._ids = np.random.default_rng(1).integers(300 % vocab_size, vocab_size - 8, most_context).astype(np.int32)
        page = self._open()
        forward(self.program.run, (page,), (self._ids[:page_tokens],), _NO_ROWS)
        self.texts = [self._filled(int(page.pages[0]), most_context) for _ in range(count)]

    def step(self, streams: int, rows: int, context: int) -> float:
        """Seconds of one step: `rows` more for each of the first `streams` texts, cut to a context before."""
        texts = self.texts[:streams]
        held = [text.length for text in texts]
        for text in texts:
            text.truncate(context)
        ids = [self._ids[context : context + rows] if rows > 1 else self._ids[:1] for _ in texts]
        outputs = np.arange(rows - 1, rows * streams, rows, dtype=np.int32)
        began = self._clock()
        forward(self.program.run, texts, ids, outputs)
        seconds = self._clock() - began
        for text, length in zip(texts, held, strict=True):
            # What was cut off counts as valid again: attention reads as much, whatever it is.
            text.reserve(max(length, text.length))
            text.commit(max(length, text.length))
        return seconds

    def _open(self) -> SequenceCache:
        return SequenceCache(self._pool, max_length=self._length, keeps_unseen=True)

    def _filled(self, page: int, length: int) -> SequenceCache:
        """A text of copies of a page."""
        text = self._open()
        text.reserve(length)
        for target in text.pages.tolist():
            self._pool.copy(page, target)
        text.commit(length)
        return text


def median(measure: Callable[[], float], repetitions: int) -> float:
    """Of repeated measurements."""
    return statistics.median(measure() for _ in range(repetitions))


def measure_steps(
    path: str,
    threads: int,
    contexts: Sequence[int],
    repetitions: int,
    clock: Callable[[], float],
    *,
    rows_of: Sequence[int] = ROWS,
    streams_of: Sequence[int] = STREAMS,
) -> dict[str, Any]:
    """Samples of chunks and decode steps, and what the model's cache takes."""
    model = load_model(path, threads=threads)
    with closing(model):
        config, layout, most_rows = model.config, model.kv_layout, model.program.max_batch_rows
        contexts = [context for context in contexts if context + 1 < config.context_length]
        texts = Sequences(
            model, min(contexts[-1] + max(rows_of, default=1), config.context_length), max(streams_of, default=1), clock
        )
        chunk, decode = [], []
        for rows, context in itertools.product((rows for rows in rows_of if rows <= most_rows), contexts):
            if context + rows > config.context_length or (rows > 1 and context and rows < 16):
                continue
            times = max(min(3, repetitions), repetitions * 16 // max(16, rows))
            seconds = median(lambda rows=rows, context=context: texts.step(1, rows, context), times)  # type: ignore[misc]
            chunk.append({"rows": rows, "context": context, "seconds": seconds})
        for streams, context in itertools.product(streams_of, contexts):
            seconds = median(lambda b=streams, context=context: texts.step(b, 1, context), repetitions)  # type: ignore[misc]
            decode.append({"streams": streams, "context": context, "seconds": seconds})
        return {
            "chunk": chunk,
            "decode": decode,
            "kv_bytes_per_token": layout.page_bytes // layout.page_tokens,
            "page_tokens": layout.page_tokens,
            "max_rows": most_rows,
        }


def measure_engine(path: str, steps: dict[str, Any], clock: Callable[[], float]) -> dict[str, float]:
    """What a step and a token take beside the model's steps: scheduling, sampling."""
    with closing(load_model(path, threads=1)) as model:
        engine = Engine(model)
        medians = {}
        for streams in (1, 8):
            for number in range(streams):
                prompt = np.random.default_rng(number).integers(300 % engine.vocab_size, engine.vocab_size - 8, 8)
                generation = engine.generate(prompt, SamplingParams(seed=number), max_tokens=96, ignore_eos=True)
                generation.request.is_started = True
                engine.scheduler.running.append(generation.request)
            seconds = []
            while running := list(engine.scheduler.running):
                began = clock()
                engine.scheduler._step()
                seconds.append(clock() - began)
                for request in running:
                    request.events.clear()
            medians[streams] = statistics.median(seconds[8:-8])
    return _beside(medians, steps)


def measure_server(path: str, threads: int, steps: dict[str, Any]) -> dict[str, float]:
    """What a request, a step and a token take beside the model's steps, with clients on this machine."""
    words = [f" {word}" for word in ("story little happy friend play went wanted came looked could know some").split()]
    one_row = next(sample["seconds"] for sample in steps["chunk"] if sample["rows"] == 1)
    more = ["--speculation", "off"]
    with ServerProcess(path, device="cpu", threads=threads, max_generations=64, more=more) as server:
        prompts = Prompts(words)
        intervals = {streams: asyncio.run(_interval(server.port, prompts, streams)) for streams in (1, 8)}
        first = asyncio.run(_warm_first_token(server.port, prompts.take(300)))
    beside = _beside(intervals, steps)
    return {**beside, "request_seconds": max(0.0, first - one_row - beside["step_seconds"])}


def _beside(seconds: dict[int, float], steps: dict[str, Any]) -> dict[str, float]:
    """What steps of 1 and of 8 streams take more than the model's, as a part of each step and one of each token."""
    least = min(sample["context"] for sample in steps["decode"])
    decode = {sample["streams"]: sample["seconds"] for sample in steps["decode"] if sample["context"] == least}
    more = {streams: max(0.0, value - decode[streams]) for streams, value in seconds.items()}
    token = max(0.0, (more[8] - more[1]) / 7)
    return {"request_seconds": 0.0, "step_seconds": max(0.0, more[1] - token), "token_seconds": token}


async def _interval(port: int, prompts: Prompts, streams: int) -> float:
    """The median time between two tokens while so many replies run."""

    async def one(number: int) -> list[float]:
        with closing(LoadClient(port)) as client:
            outcome = await chat(client, chat_body(prompts.take(8), 96, number))
            assert isinstance(outcome, RequestTimes), outcome
            return outcome.intervals[8:-8]

    await one(streams)
    intervals = await asyncio.gather(*(one(number) for number in range(streams)))
    return statistics.median(itertools.chain.from_iterable(intervals))


async def _warm_first_token(port: int, message: str) -> float:
    """The time to the first token of a prompt that is cached but its last token.

    Asked for after a pause, as users do: the processor's caches hold other things by then.
    """
    times = []
    with closing(LoadClient(port)) as client:
        for number in range(12):
            await asyncio.sleep(_PAUSE_SECONDS)
            outcome = await chat(client, chat_body(message, 2, number))
            assert isinstance(outcome, RequestTimes), outcome
            times.append(outcome.time_to_first_token_seconds)
    return statistics.median(times[2:])


def in_processes(arguments: list[str], count: int) -> list[dict[str, Any]]:
    """The records of the same measurement in several processes at the same time."""
    command = [sys.executable, "-m", "tests.bench.bench_step_costs", *arguments]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a measuring process failed; see its message above")
    return [json.loads(output) for output in outputs]


def mean_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record with the mean of each sample."""
    first = records[0]
    for kind in ("chunk", "decode"):
        for index, sample in enumerate(first[kind]):
            sample["seconds"] = statistics.fmean(record[kind][index]["seconds"] for record in records)
    return first


def main() -> None:
    """Measure, and print or write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None, help="GGUF file (default: the demo model)")
    parser.add_argument("--threads", type=int, default=1, help="of a replica")
    parser.add_argument("--contexts", default="0,256,896", help="tokens before a step's rows")
    parser.add_argument("--repetitions", type=int, default=24)
    parser.add_argument(
        "--processes", type=int, default=1, help="replicas of the machine that compute at the same time"
    )
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread, on a busy machine")
    parser.add_argument("--steps-only", action="store_true", help="leave out what is beside the model")
    parser.add_argument("--output", help="file to write (default: stdout)")
    options = parser.parse_args()
    if options.cpu_time and options.threads > 1:
        parser.error("--cpu-time wants --threads 1: several threads wait for each other, which is no work")
    path = str(model_path(options.model))
    contexts = sorted({int(word) for word in options.contexts.split(",")})
    clock = time.thread_time if options.cpu_time else time.perf_counter
    if options.processes > 1:
        words = [path, "--threads", str(options.threads), "--contexts", options.contexts, "--steps-only"]
        words += ["--repetitions", str(options.repetitions), *(["--cpu-time"] if options.cpu_time else [])]
        steps = mean_of(in_processes(words, options.processes))
    else:
        steps = measure_steps(path, options.threads, contexts, options.repetitions, clock)
    record = {"format": FORMAT, "model": Path(path).stem, "cpu": cpu_name(), "threads": options.threads}
    record |= {"processes": options.processes, **steps}
    if not options.steps_only:
        record["engine"] = measure_engine(path, steps, clock)
        record["server"] = measure_server(path, options.threads, steps)
    text = json.dumps(record, indent=1)
    if options.output:
        Path(options.output).write_text(text + "\n")
    else:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()

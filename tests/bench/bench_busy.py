"""Speed beside busy processes: `python -m tests.bench.bench_busy MODEL.gguf`; Linux and macOS.

So many processes that never wait run beside one engine at a time, at its own priority or a lower one. The engines take
turns in short windows: ours as it chooses, ours with fixed numbers of threads, another checkout, llama.cpp (by
xllamacpp or llama-cpp-python, in `--peer-python`). Each lives in a process of its own and sleeps out of turn; so all
meet the same minutes of a machine that does other things too. Medians of tokens per second are printed, with the
quartiles, and the best fixed number beside what is chosen.

One more takes turns that computes nothing: a process for each core that never waits. The processor time that the system
grants it is the share of the cores that an engine could have. Tokens per second of that time, beside nothing and beside
busy processes, are what the last figure compares: 1 where the engine turns its share into tokens as it does alone.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

WORKLOADS = ("decode", "prefill", "streams")
_PROMPT_TOKENS = {"decode": 16, "prefill": 192, "streams": 16}
_LOOP = (
    "import os; os.nice({nice}); parent = os.getppid()\nwhile os.getppid() == parent:\n for _ in range(100000): pass"
)
"""Ends with who started it, however that ended."""
_SPIN = """import time
end = time.perf_counter() + {seconds}
began, processor = time.perf_counter(), time.process_time()
while time.perf_counter() < end:
    pass
print((time.process_time() - processor) / (time.perf_counter() - began))
"""
"""Prints the share of a core that it was granted."""
_PEER_TOKENS = {"decode": (4, 64), "streams": (2, 16)}
"""Fewest and most tokens of a window of the peer."""
_LEAST_TOKENS = 5
"""What a window lasts for where its seconds are over sooner."""
_SHARE = "share"
"""Name of the processes that compute nothing."""


@dataclass
class Window:
    """What an engine did in a window."""

    rate: float
    """Tokens per second; of the share, processor seconds per second."""
    granted: float = 0.0
    """Processor seconds per second that its threads had."""
    gap: float = 0.0
    """Longest time between two tokens of a stream, in seconds."""


@contextmanager
def busy(count: int, nice: int) -> Iterator[None]:
    """Processes that never wait."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", _LOOP.format(nice=nice)]) for _ in range(count)]
    try:
        time.sleep(0.3 if count else 0.0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass
class Engine:
    """An engine in a process of its own, which measures when it is told to."""

    name: str
    words: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> "Engine":
        environment = {**os.environ, **self.environment}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self.words, stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self._read() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def measure(self, workload: str, seconds: float) -> Window:
        """Measure a window of about so long."""
        assert self._process.stdin is not None
        print(json.dumps({"workload": workload, "seconds": seconds}), file=self._process.stdin, flush=True)
        return Window(**json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("="):
                return line[1:].strip()
        raise SystemExit(f"{self.name} ended")


class Ours:
    """This package's LLM; threads: 0 as it chooses."""

    def __init__(self, model: str, threads: int, streams: int) -> None:
        import numpy as np

        import localinfer

        self._streams = streams

        self._llm = localinfer.load(
            model,
            threads=threads or None,
            device="cpu",
            speculation=None,
            context_length=2048,
            limits=localinfer.EngineLimits(max_running=streams),
        )
        if threads:
            # Such a number is a most otherwise.
            self._llm._model.program.adapts = False
        self._random = np.random.default_rng(threads)
        self.gap = 0.0

    def _prompt(self, workload: str) -> list[int]:
        ids: list[int] = self._random.integers(300, self._llm.vocab_size - 8, _PROMPT_TOKENS[workload]).tolist()
        return ids

    def prefill(self, seconds: float) -> float:
        """Prompts, each to its first token."""
        count, began = 0, time.perf_counter()
        while not count or time.perf_counter() - began < seconds:
            self._llm.clear_cache()
            self._llm.complete(self._prompt("prefill"), max_tokens=1, temperature=0)
            count += _PROMPT_TOKENS["prefill"]
        return count / (time.perf_counter() - began)

    def decode(self, seconds: float) -> float:
        """One stream, from its first token on."""
        return self._decode(1, seconds, "decode")

    def streams(self, seconds: float) -> float:
        """All of some streams together, from the moment that each has its first token."""
        return self._decode(self._streams, seconds, "streams")

    def _decode(self, count: int, seconds: float, workload: str) -> float:
        self._llm.clear_cache()
        begun, over, times = threading.Barrier(count + 1), threading.Event(), list[float]()

        def read(prompt: list[int]) -> None:
            options: dict[str, Any] = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}
            last = 0.0
            with self._llm.stream(prompt, **options) as stream:
                for index, _ in enumerate(stream):
                    if index == 0:
                        waiting.append(threading.Thread(target=begun.wait))
                        waiting[-1].start()
                    times.append(time.perf_counter())
                    if last > began[0]:
                        self.gap = max(self.gap, times[-1] - last)
                    last = time.perf_counter()
                    if over.is_set():
                        return

        self.gap, began = 0.0, [math.inf]
        waiting: list[threading.Thread] = []
        readers = [threading.Thread(target=read, args=(self._prompt(workload),)) for _ in range(count)]
        for reader in readers:
            reader.start()
        begun.wait()
        began[0] = start = time.perf_counter()
        while time.perf_counter() - start < seconds or sum(one > start for one in list(times)) < _LEAST_TOKENS:
            time.sleep(0.02)
        over.set()
        for reader in [*readers, *waiting]:
            reader.join()
        counted = [one for one in times if one > start]
        return len(counted) / (max(counted) - start)


class XLlamaCpp:
    """llama.cpp by xllamacpp."""

    def __init__(self, model: str, threads: int, streams: int) -> None:
        import xllamacpp  # type: ignore[import-not-found]

        self._streams = streams

        parameters = xllamacpp.CommonParams()
        parameters.model.path = model
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.n_ctx, parameters.n_parallel = max(2048, 256 * streams), streams
        self._server = xllamacpp.Server(parameters)
        self._asked = 0
        self._rates: dict[str, float] = {}

    def prefill(self, seconds: float) -> float:
        """One prompt."""
        return float(self._ask("prefill", 1)["prompt_per_second"])

    def decode(self, seconds: float) -> float:
        """One text."""
        tokens = self._tokens("decode", seconds)
        self._rates["decode"] = rate = float(self._ask("decode", tokens)["predicted_per_second"])
        return rate

    def _tokens(self, workload: str, seconds: float) -> int:
        """Tokens of each text in a window of so long, by the rate of the one before."""
        least, most = _PEER_TOKENS[workload]
        return int(min(max(least, self._rates.get(workload, 0.0) * seconds), most))

    def streams(self, seconds: float) -> float:
        """Texts together; their prompts are counted out."""
        found: list[dict[str, float]] = []
        tokens = self._tokens("streams", seconds)
        threads = [
            threading.Thread(target=lambda: found.append(self._ask("streams", tokens))) for _ in range(self._streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._rates["streams"] = sum(one["predicted_per_second"] for one in found) / self._streams
        return self._streams * self._rates["streams"]

    def _ask(self, workload: str, tokens: int) -> dict[str, float]:
        self._asked += 1
        prompt = [300 + (self._asked * 7919 + 31 * index) % 40000 for index in range(_PROMPT_TOKENS[workload])]
        options = {"n_predict": tokens, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        answer = self._server.handle_completions({"prompt": prompt, **options})
        found: dict[str, float] = (json.loads(answer) if isinstance(answer, str | bytes) else answer)["timings"]
        return found


class LlamaCppPython:
    """llama.cpp by llama-cpp-python's functions: a batch has a token of each sequence, and the likeliest comes next."""

    def __init__(self, model: str, threads: int, streams: int) -> None:
        import llama_cpp  # type: ignore[import-untyped]

        self._library, self._streams = llama_cpp, streams
        llama_cpp.llama_backend_init()
        silent = llama_cpp.llama_log_callback(lambda *_: None)
        self._kept = silent
        llama_cpp.llama_log_set(silent, None)
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = max(2048, 256 * streams), streams
        # Sequences share the cache, as they do here.
        parameters.kv_unified = True
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self._size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(max(streams, *_PROMPT_TOKENS.values()), 0, 1)
        self._asked = 0

    def prefill(self, seconds: float) -> float:
        """Prompts, each to its first token."""
        count, began = 0, time.perf_counter()
        while not count or time.perf_counter() - began < seconds:
            self._clear()
            self._read("prefill", 0)
            count += _PROMPT_TOKENS["prefill"]
        return count / (time.perf_counter() - began)

    def decode(self, seconds: float) -> float:
        """One text, from its first token on."""
        return self._decode(1, seconds, "decode")

    def streams(self, seconds: float) -> float:
        """Some texts together, from the moment that each has its first token."""
        return self._decode(self._streams, seconds, "streams")

    def _decode(self, count: int, seconds: float, workload: str) -> float:
        self._clear()
        tokens = [self._read(workload, sequence) for sequence in range(count)]
        position, decoded, began = _PROMPT_TOKENS[workload], 0, time.perf_counter()
        while decoded < count or time.perf_counter() - began < seconds:
            tokens = self._run([(token, position, index) for index, token in enumerate(tokens)], range(count))
            position += 1
            decoded += count
        return decoded / (time.perf_counter() - began)

    def _clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def _read(self, workload: str, sequence: int) -> int:
        """Read a prompt that no other is like; its first token."""
        self._asked += 1
        count = _PROMPT_TOKENS[workload]
        ids = [300 + (self._asked * 7919 + 31 * index) % (self._size - 400) for index in range(count)]
        return self._run([(token, index, sequence) for index, token in enumerate(ids)], [count - 1])[0]

    def _run(self, rows: Sequence[tuple[int, int, int]], outputs: Sequence[int]) -> list[int]:
        """Decode tokens at positions of sequences; the likeliest token after each row of `outputs`."""
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = sequence, index in outputs
        assert self._library.llama_decode(self._context, batch) == 0
        shape = (self._size,)
        rows_of = [self._library.llama_get_logits_ith(self._context, index) for index in outputs]
        return [int(np.argmax(np.ctypeslib.as_array(one, shape=shape))) for one in rows_of]


class Share:
    """Processes that compute nothing and never wait, one for each core."""

    def decode(self, seconds: float) -> float:
        """Processor seconds per second that they are granted."""
        words = [sys.executable, "-S", "-c", _SPIN.format(seconds=seconds)]
        spinning = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)]
        return sum(float(process.communicate()[0]) for process in spinning)

    prefill = streams = decode


def serve(kind: str, model: str, threads: int, streams: int) -> None:
    """Measure what standard input asks for, one line each."""
    if kind == _SHARE:
        engine: Any = Share()
    elif kind == "ours":
        engine = Ours(model, threads, streams)
    else:
        try:
            engine = XLlamaCpp(model, threads, streams)
        except ImportError:
            engine = LlamaCppPython(model, threads, streams)
    print("=ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began, granted = time.perf_counter(), time.process_time()
        found = {"rate": getattr(engine, asked["workload"])(asked["seconds"])}
        found["granted"] = (time.process_time() - granted) / (time.perf_counter() - began)
        found["gap"] = getattr(engine, "gap", 0.0)
        print(f"={json.dumps(found)}", flush=True)


def engines_of(options: argparse.Namespace) -> list[Engine]:
    """The engines that take turns; names that end in a number have so many threads."""
    told = [options.model, "--streams", str(options.streams)]
    own = [sys.executable, "-m", "tests.bench.bench_busy", *told]
    found = [
        Engine(f"ours {threads or 'chosen'}", [*own, "--serve", "ours", "--with-threads", str(threads)])
        for threads in (0, *options.threads)
    ]
    # A file of its own, so that the package it imports is the one that it is pointed to.
    if options.other:
        path = {"PYTHONPATH": options.other}
        words = [sys.executable, __file__, *told, "--serve", "ours", "--with-threads"]
        found += [Engine(f"other {n or 'chosen'}", [*words, str(n)], path) for n in (0, *options.other_threads)]
    if options.peer_python:
        words = [options.peer_python, __file__, *told, "--serve", "peer", "--with-threads"]
        found += [Engine(f"llama.cpp {n}", [*words, str(n)]) for n in options.peer_threads or options.threads]
    found.append(Engine(_SHARE, [*own, "--serve", _SHARE]))
    return found


def report(found: dict[str, list[Window]], alone: dict[str, float]) -> str:
    """Medians and quartiles of every engine, and what is chosen beside the best fixed number and the best peer.

    alone: tokens per second of granted share of every engine beside nothing; filled by the first call.
    """
    medians = {name: statistics.median(one.rate for one in windows) for name, windows in found.items()}
    share = medians.pop(_SHARE)
    words = [f"share of the cores {share:.2f}"]
    for name, rate in medians.items():
        ordered = sorted(one.rate for one in found[name])
        low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
        granted = statistics.median(one.granted for one in found[name])
        of_share = rate / share / alone.setdefault(name, rate / share)
        gap = 1000 * max(one.gap for one in found[name])
        words.append(f"{name} {rate:.1f} ({low:.1f}-{high:.1f}; granted {granted:.2f}, {of_share:.2f} of its share,")
        words[-1] += f" gap {gap:.0f} ms)"
    chosen = medians["ours chosen"]
    for label, prefix in (("best fixed", "ours "), ("other", "other chosen"), ("llama.cpp", "llama.cpp")):
        rest = [value for name, value in medians.items() if name.startswith(prefix) and name != "ours chosen"]
        if rest:
            words.append(f"{chosen / max(rest):.2f} of {label}")
    best = max(rate for name, rate in alone.items() if name.startswith("ours"))
    words.append(f"{chosen / share / best:.2f} of the fair share")
    return ", ".join(words)


def main() -> None:
    """Print one line per workload, number of busy processes and their priority."""
    numbers = lambda text: [int(one) for one in text.split(",") if one]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--busy", type=numbers, default=[0, 1, 2, 4, 8])
    parser.add_argument("--nice", type=numbers, default=[0, 10])
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="fixed numbers")
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--streams", type=int, default=8, help="texts together, of the workload of that name")
    parser.add_argument("--rounds", type=int, default=5, help="windows of each engine; one more comes before")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a window")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds of the first window of what chooses itself")
    parser.add_argument("--peer-python", help="a Python that has xllamacpp or llama-cpp-python")
    parser.add_argument("--peer-threads", type=numbers, default=[], help="as --threads")
    parser.add_argument("--other", help="a folder with another localinfer (pip install --target)")
    parser.add_argument("--other-threads", type=numbers, default=[])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--with-threads", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        with contextlib.suppress(KeyboardInterrupt):
            serve(options.serve, options.model, options.with_threads, options.streams)
        return
    with ExitStack() as stack:
        engines = [stack.enter_context(engine) for engine in engines_of(options)]
        alone: dict[str, dict[str, float]] = {workload: {} for workload in options.workloads}
        for nice in options.nice:
            for count in options.busy:
                if not count and nice != options.nice[0]:
                    continue
                for workload in options.workloads:
                    found: dict[str, list[Window]] = {engine.name: [] for engine in engines}
                    with busy(count, nice):
                        for turn in range(-1, options.rounds):
                            for engine in engines[:: 1 if turn % 2 else -1]:
                                settles = turn < 0 and engine.name.endswith("chosen")
                                window = engine.measure(workload, options.settle if settles else options.seconds)
                                if turn >= 0:
                                    found[engine.name].append(window)
                    load = os.getloadavg()[0]
                    print(
                        f"{workload}, {count} busy, nice {nice}, load {load:.1f}: {report(found, alone[workload])}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

"""One engine in its own process, measured on request: a line of JSON in, a line of JSON out.

Started by path, with any Python that has the engine (see `processes.py`), so nothing of this package is imported before
the engine needs it. All engines stand here side by side, with the same token ids, so that the fairness of a comparison
can be reviewed. `LocalinferEngine` documents the methods of those that compute given tokens at any position, and choose
the next one by the same line; the others, `GeneratingEngine`, can only be given a prompt and generate what follows.
"""

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any, TextIO

BATCH_TOKENS = 512


class LocalinferEngine:
    """localinfer: `Program` for given token ids, the public API for text."""

    distribution = "localinfer"

    def __init__(self, options: dict[str, Any]) -> None:
        from localinfer.terminal import Progress

        loading = {"threads": options["threads"], "context_length": options["context_length"]}
        with Progress() as progress:
            if options["streams"]:
                from localinfer.loading.load import load

                self._llm = load(options["model"], device=options["device"], progress=progress, **loading)
                self.num_threads, self.vocab_size = options["threads"] or 0, self._llm.vocab_size
            else:
                from localinfer.apps.bench.measured_model import MeasuredModel

                self._model = MeasuredModel(options["model"], progress=progress, **loading)
                self.num_threads, self.vocab_size = self._model.num_threads, self._model.vocab_size

    def compute(self, start: int, token_ids: list[int], num_outputs: int) -> None:
        """Compute token ids at positions from `start` on; choose the token after each of the last ones greedily."""
        self._model.compute(start, token_ids, num_outputs).argmax(axis=1)

    def stream(self, prompt: Any, max_tokens: int) -> tuple[int, float]:
        """Stream a greedy completion of text or token ids; return tokens and seconds to the first of them."""
        # Otherwise the second completion of a prompt would find it cached.
        self._llm.clear_cache()
        began, first, count = time.perf_counter(), 0.0, 0
        for _ in self._llm.stream(prompt, max_tokens=max_tokens, temperature=0):
            count += 1
            first = first or time.perf_counter() - began
        return count, first

    def work(self, start: int, num_rows: int) -> dict[str, int] | None:
        """Bytes and multiplications of computing some tokens, if the engine reports them."""
        return self._model.work(start, num_rows)._asdict()


class LlamaCppEngine:
    """llama-cpp-python with its own defaults: `llama_decode` for given token ids, `create_completion` for text."""

    distribution = "llama-cpp-python"

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp
        import numpy as np

        self._numpy, self._library = np, llama_cpp.llama_cpp
        threads = options["threads"]
        self._llama = llama_cpp.Llama(
            options["model"],
            n_ctx=options["context_length"],
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=BATCH_TOKENS,
            n_ubatch=BATCH_TOKENS,
            verbose=False,
        )
        self.num_threads, self.vocab_size = threads, self._llama.n_vocab()
        self._context = self._llama.ctx
        self._batch = self._library.llama_batch_init(BATCH_TOKENS, 0, 1)

    def compute(self, start: int, token_ids: list[int], num_outputs: int) -> None:
        library, batch = self._library, self._batch
        library.llama_memory_seq_rm(library.llama_get_memory(self._context), 0, start, -1)
        for first in range(0, len(token_ids), BATCH_TOKENS):
            chunk = token_ids[first : first + BATCH_TOKENS]
            batch.n_tokens = len(chunk)
            for index, token_id in enumerate(chunk):
                batch.token[index] = token_id
                batch.pos[index] = start + first + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = first + index >= len(token_ids) - num_outputs
            code = library.llama_decode(self._context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code} for {len(chunk)} tokens at position {start + first}")
        pointer = library.llama_get_logits(self._context)
        logits = (ctypes.c_float * (num_outputs * self.vocab_size)).from_address(ctypes.addressof(pointer.contents))
        self._numpy.frombuffer(logits, self._numpy.float32).reshape(num_outputs, -1).argmax(axis=1)

    def stream(self, prompt: Any, max_tokens: int) -> tuple[int, float]:
        # As above.
        self._llama.reset()
        began, first = time.perf_counter(), 0.0
        for _ in self._llama.create_completion(prompt, max_tokens=max_tokens, temperature=0, stream=True):
            first = first or time.perf_counter() - began
        prompt_tokens = len(self._llama.tokenize(prompt.encode())) if isinstance(prompt, str) else len(prompt)
        # The last sampled token is not computed.
        return min(max_tokens, self._llama.n_tokens - prompt_tokens + 1), first

    def work(self, start: int, num_rows: int) -> dict[str, int] | None:
        return None


class GeneratingEngine(ABC):
    """An engine measured by generating: its prefill is the time to a first token, its decode the time of those after.

    A decode computes its context anew. The tokens are the engine's greedy choice, which take as long as any others.
    Attributes: num_threads, vocab_size (0 if unknown).
    """

    num_threads: int
    vocab_size = 0
    _prompt: list[int]

    @abstractmethod
    def generate(self, token_ids: list[int], max_tokens: int) -> list[float]:
        """Generate greedily after a prompt of token ids, none of it cached; return the seconds to each token."""

    def compute(self, start: int, token_ids: list[int], num_outputs: int) -> None:
        """Compute a prompt, which following decodes begin with; only from position 0."""
        assert start == 0 and num_outputs == 1, "this engine computes prompts only"
        self._prompt = token_ids
        self.generate(token_ids, 1)

    def decode(self, start: int, num_tokens: int) -> list[float]:
        """Seconds of each of some tokens after the first `start` ones of the prompt."""
        times = self.generate(self._prompt[:start], num_tokens + 1)
        if len(times) < 2:
            raise RuntimeError(f"{len(times)} tokens were generated where {num_tokens + 1} were asked for")
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    def stream(self, prompt: Any, max_tokens: int) -> tuple[int, float]:
        if isinstance(prompt, str):
            raise RuntimeError("it is measured by token ids only; leave stream out")
        times = self.generate(prompt, max_tokens)
        return len(times), times[0]

    def work(self, start: int, num_rows: int) -> dict[str, int] | None:
        return None


class OpenVinoEngine(GeneratingEngine):
    """OpenVINO GenAI, which converts a GGUF file when it loads it: `LLMPipeline` for token ids, prefixes not cached.

    Its activations have a scale for each 128 columns, its fastest setting where that was measured (Cascade Lake); its
    default is 32.
    """

    distribution = "openvino-genai"

    def __init__(self, options: dict[str, Any]) -> None:
        import openvino_genai  # isort: skip
        import numpy as np
        import openvino

        self._numpy, self._openvino, self._library = np, openvino, openvino_genai
        self.num_threads = options["threads"]
        self._pipeline = openvino_genai.LLMPipeline(
            options["model"],
            "CPU",
            INFERENCE_NUM_THREADS=self.num_threads,
            DYNAMIC_QUANTIZATION_GROUP_SIZE=128,
            ATTENTION_BACKEND="SDPA",
        )

    def generate(self, token_ids: list[int], max_tokens: int) -> list[float]:
        clock, library = time.perf_counter, self._library
        ids = self._numpy.array([token_ids])
        tensors = [self._openvino.Tensor(array) for array in (ids, self._numpy.ones_like(ids))]
        config = library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        times: list[float] = []

        def note(_: int | list[int]) -> Any:
            times.append(clock() - began)
            return library.StreamingStatus.RUNNING

        methods = {"write": lambda _, token: note(token), "end": lambda _: None}
        streamer = type("Streamer", (library.StreamerBase,), methods)()
        began = clock()
        self._pipeline.generate(library.TokenizedInputs(*tensors), config, streamer)
        return times


class IkLlamaCppEngine(GeneratingEngine):
    """ik_llama.cpp by ik-llama-cpp-python: a token's time is when it is chosen, at the end of its logits."""

    distribution = "ik-llama-cpp-python"

    def __init__(self, options: dict[str, Any]) -> None:
        import ik_llama_cpp

        self.num_threads = options["threads"]
        self._llama = ik_llama_cpp.IkLlama(
            options["model"], n_ctx=options["context_length"] + 1, n_threads=self.num_threads, verbose=False
        )

    def generate(self, token_ids: list[int], max_tokens: int) -> list[float]:
        context, clock = self._llama._context, time.perf_counter
        sample, times = type(context).sample, []

        def note(*arguments: Any, **options: Any) -> int:
            times.append(clock() - began)
            found: int = sample(context, *arguments, **options)
            return found

        context.sample = note
        began = clock()
        self._llama.generate(token_ids, max_tokens=max_tokens)
        return times


class MistralRsEngine(GeneratingEngine):
    """mistralrs, by its own clock. It takes text only, so token ids are decoded, and are other tokens when read.

    The time of its prompt is therefore scaled from the number of its tokens to that of the ids.
    """

    distribution = "mistralrs"

    def __init__(self, options: dict[str, Any]) -> None:
        self.num_threads = options["threads"]
        os.environ["RAYON_NUM_THREADS"] = str(self.num_threads)
        import mistralrs

        folder, name = os.path.split(options["model"])
        which = mistralrs.Which.GGUF(quantized_model_id=folder or ".", quantized_filename=name)
        self._library = mistralrs
        self._runner = mistralrs.Runner(which=which, prefix_cache_n=0, no_paged_attn=True)

    def generate(self, token_ids: list[int], max_tokens: int) -> list[float]:
        text = self._runner.detokenize_text(token_ids, False)
        request = self._library.CompletionRequest(model="default", prompt=text, max_tokens=max_tokens, temperature=0.0)
        usage = self._runner.send_completion_request(request).usage
        first = usage.total_prompt_time_sec * len(token_ids) / usage.prompt_tokens
        count = usage.completion_tokens
        interval = usage.total_completion_time_sec / max(1, count - 1)
        return [first + interval * index for index in range(count)]


Engine = LocalinferEngine | LlamaCppEngine | GeneratingEngine
ENGINES: dict[str, Any] = {
    engine.distribution: engine
    for engine in (LocalinferEngine, LlamaCppEngine, OpenVinoEngine, IkLlamaCppEngine, MistralRsEngine)
}


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; all times in seconds."""
    action, clock = request["action"], time.perf_counter
    if action == "compute":
        began = clock()
        engine.compute(request["start"], request["token_ids"], 1)
        return {"seconds": clock() - began}
    if action == "decode" and isinstance(engine, GeneratingEngine):
        return {"seconds": engine.decode(request["start"], len(request["token_ids"]))}
    if action == "decode":
        intervals = []
        for position, token_id in enumerate(request["token_ids"], request["start"]):
            began = clock()
            engine.compute(position, [token_id], 1)
            intervals.append(clock() - began)
        return {"seconds": intervals}
    if action == "verify" and isinstance(engine, GeneratingEngine):
        return {"seconds": None}
    if action == "verify":
        # Sizes alternate, so that noise drift affects all alike.
        samples: dict[int, list[float]] = {size: [] for size in request["sizes"]}
        for _ in range(request["repetitions"]):
            for size, seconds in samples.items():
                began = clock()
                engine.compute(request["start"], request["token_ids"][:size], size)
                seconds.append(clock() - began)
        return {"seconds": [statistics.median(seconds) for seconds in samples.values()]}
    if action == "stream":
        began = clock()
        count, first = engine.stream(request["prompt"], request["max_tokens"])
        return {"tokens": count, "seconds": clock() - began, "first_token_seconds": first}
    if action == "work":
        return {"work": engine.work(request["start"], request["num_rows"])}
    assert action == "memory", f"{action} is not an action"
    return {"bytes": peak_memory_bytes()}


def peak_memory_bytes() -> int | None:
    """Peak resident memory of this process; None where only another process can measure it (Windows)."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    if sys.platform == "win32":
        return None
    import resource

    # Not on Linux, where the parent's figure is inherited.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def serve(channel: TextIO, name: str, options: dict[str, Any]) -> None:
    """Load, report it, and answer requests until standard input ends."""
    began = time.perf_counter()
    try:
        engine: Engine = ENGINES[name](options)
        reply: dict[str, Any] = {
            "load_seconds": time.perf_counter() - began,
            "version": version(name),
            "num_threads": engine.num_threads,
            "vocab_size": engine.vocab_size,
        }
        _send(channel, reply)
        for line in sys.stdin:
            _send(channel, answer(engine, json.loads(line)))
    except Exception as error:
        # Raised again by the parent.
        is_missing = isinstance(error, ImportError) and error.name == name.removesuffix("-python").replace("-", "_")
        _send(channel, {"error": "missing" if is_missing else type(error).__name__, "message": str(error)})


def _send(channel: TextIO, reply: dict[str, Any]) -> None:
    channel.write(json.dumps(reply) + "\n")
    channel.flush()


def main() -> None:
    """Serve on the real standard output; redirect prints of libraries to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    serve(channel, sys.argv[1], json.loads(sys.argv[2]))


if __name__ == "__main__":
    # The script's folder comes first in sys.path: its modules would be found under bare names.
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != folder]
    main()

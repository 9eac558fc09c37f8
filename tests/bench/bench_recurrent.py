"""Time a model with recurrent layers beside one with attention alone and as many multiplications.

`python -m tests.bench.bench_recurrent [--type Q4_0] [--threads N] [--rows 512] [--peer]`, from the repository's root.
The hybrid has the shape of Qwen3.5 0.8B: eighteen delta nets with sixteen heads of 128, six layers with attention.
Weights are random. Prefill is of `--rows` tokens from the start of a sequence, decode of single tokens after them, each
reading one block of states and writing another; both models take turns, and the median of their ratio counts.
`--peer`: llama-cpp-python on the same files.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from localinfer.apps.bench.roofline import measure_read_bandwidth
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.jit.host import cpu_name
from localinfer.kernels.layouts import Layout
from localinfer.kernels.program import Batch, Segment, StateStep
from localinfer.models.load.loader import Model, load_model
from localinfer.models.load.threads import available_threads
from tests.kernels.random_weights import random_weights

HIDDEN, LAYERS, VOCABULARY, CONTEXT = 1024, 24, 4096, 4096
_RUNS = 5
_DECODED = 12


def write_model(
    path: Path, type_name: str, *, is_hybrid: bool, num_layers: int = LAYERS, context_length: int = CONTEXT
) -> None:
    """Write one of both models with random weights of a type."""
    writer = gguf.GGUFWriter(str(path), "qwen35" if is_hybrid else "qwen3")
    writer.add_block_count(num_layers)
    writer.add_context_length(context_length)
    writer.add_embedding_length(HIDDEN)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    heads, kv_heads, size, inner = (8, 2, 256, 3584) if is_hybrid else (16, 8, 128, 4672)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_feed_forward_length(inner)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(64 if is_hybrid else size)
    if is_hybrid:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(128)
        writer.add_ssm_group_count(16)
        writer.add_ssm_time_step_rank(16)
        writer.add_ssm_inner_size(2048)
        writer.add_uint32("qwen35.full_attention_interval", 4)
        writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{index}" for index in range(VOCABULARY)])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)
    generator = np.random.default_rng(1)

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = gguf.GGMLQuantizationType[type_name]
        data = random_weights(Layout[type_name], (rows, columns), len(name))
        writer.add_tensor(f"{name}.weight", data.reshape(rows, -1), raw_dtype=kind)

    def vector(name: str, values: NDArray[np.float32]) -> None:
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd", VOCABULARY, HIDDEN)
    matrix("output", VOCABULARY, HIDDEN)
    vector("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(num_layers):
        block = f"blk.{layer}"
        vector(f"{block}.attn_norm.weight", np.ones(HIDDEN, np.float32))
        vector(f"{block}.{'post_attention_norm' if is_hybrid else 'ffn_norm'}.weight", np.ones(HIDDEN, np.float32))
        if is_hybrid and layer % 4 < 3:
            matrix(f"{block}.attn_qkv", 6144, HIDDEN)
            matrix(f"{block}.attn_gate", 2048, HIDDEN)
            matrix(f"{block}.ssm_out", HIDDEN, 2048)
            for name in ("ssm_alpha", "ssm_beta"):
                vector(f"{block}.{name}.weight", generator.standard_normal((16, HIDDEN)) / 32)
            vector(f"{block}.ssm_conv1d.weight", generator.standard_normal((6144, 4)))
            vector(f"{block}.ssm_dt.bias", generator.standard_normal(16))
            vector(f"{block}.ssm_a", -generator.random(16))
            vector(f"{block}.ssm_norm.weight", np.ones(128))
        else:
            matrix(f"{block}.attn_q", heads * size * (2 if is_hybrid else 1), HIDDEN)
            matrix(f"{block}.attn_k", kv_heads * size, HIDDEN)
            matrix(f"{block}.attn_v", kv_heads * size, HIDDEN)
            matrix(f"{block}.attn_output", HIDDEN, heads * size)
            for name in ("attn_q_norm", "attn_k_norm"):
                vector(f"{block}.{name}.weight", np.ones(size))
        matrix(f"{block}.ffn_gate", inner, HIDDEN)
        matrix(f"{block}.ffn_up", inner, HIDDEN)
        matrix(f"{block}.ffn_down", HIDDEN, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Runner:
    """A loaded model with memory for one sequence."""

    def __init__(self, model: Model) -> None:
        self.model, layout = model, model.kv_layout
        count = CONTEXT // layout.page_tokens
        self._memory = [
            aligned_zeros(count * layout.page_bytes),
            *(aligned_zeros(layout.state_bytes) for _ in range(2)),
        ]
        self._pages = address(self._memory[0]) + np.arange(count, dtype=np.int64) * layout.page_bytes
        self._ids = np.random.default_rng(1).integers(0, VOCABULARY, CONTEXT).astype(np.int32)
        self._state = 1

    def compute(self, start: int, count: int) -> None:
        """A batch at some position; states are read from one block and written to the other."""
        state, last = None, np.array([count - 1], np.int32)
        if self.model.kv_layout.states:
            source, self._state = self._state, 3 - self._state
            state = StateStep(
                address(self._memory[source]) if start else 0, [(count, address(self._memory[self._state]))]
            )
        segment = Segment(start, count, self._pages, state=state)
        self.model.program.run(Batch(self._ids[start : start + count], [segment], last))

    def prefill(self, rows: int) -> float:
        """Seconds of a prompt."""
        most = self.model.program.max_batch_rows

        def run() -> None:
            for start in range(0, rows, most):
                self.compute(start, min(most, rows - start))

        return _seconds(run)

    def decode(self, rows: int) -> float:
        """Seconds of one token after a prompt of so many."""
        return min(_seconds(lambda start=rows + index: self.compute(start, 1)) for index in range(_DECODED))

    def token_bytes(self) -> int:
        """What a decoded token reads and writes, without keys and values."""
        operations = self.model.program.operations()  # type: ignore[attr-defined]
        return sum(one.row_weight_bytes + one.state_bytes for one in operations)


class Peer:
    """The same of llama-cpp-python."""

    def __init__(self, path: Path, threads: int) -> None:
        from llama_cpp import Llama

        self._llama = Llama(
            str(path),
            n_ctx=CONTEXT,
            n_batch=512,
            n_ubatch=512,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self._ids = np.random.default_rng(1).integers(0, VOCABULARY, CONTEXT).tolist()

    def prefill(self, rows: int) -> float:
        self._llama.reset()
        return _seconds(lambda: self._llama.eval(self._ids[:rows]))

    def decode(self, rows: int) -> float:
        return min(_seconds(lambda index=rows + i: self._llama.eval([self._ids[index]])) for i in range(_DECODED))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runners: dict[str, Runner | Peer] = {}
        for name in ("hybrid", "dense"):
            path = Path(folder) / f"{name}.gguf"
            write_model(path, options.type, is_hybrid=name == "hybrid")
            runners[name] = Runner(load_model(path, threads=options.threads, context_length=CONTEXT))
            if options.peer:
                runners[f"peer's {name}"] = Peer(path, options.threads)
        seconds: dict[tuple[str, str], list[float]] = {}
        bandwidths = []
        for _ in range(_RUNS):
            bandwidths.append(measure_read_bandwidth(options.threads))
            for name, runner in runners.items():
                seconds.setdefault((name, "prefill"), []).append(runner.prefill(options.rows))
                seconds.setdefault((name, "decode"), []).append(runner.decode(options.rows))
        print(f"{cpu_name()}, {options.threads} threads, {max(bandwidths) / 1e9:.1f} GB/s, {options.type}")
        for (name, phase), values in seconds.items():
            ratios = [own / other for own, other in zip(values, seconds["hybrid", phase], strict=True)]
            tokens = options.rows if phase == "prefill" else 1
            speed, ratio = tokens / min(values), statistics.median(ratios)
            line = f"{phase} {name}: {speed:.1f} tokens/s, {ratio:.2f} of the hybrid's time"
            runner = runners[name]
            if phase == "decode" and isinstance(runner, Runner):
                share = [runner.token_bytes() / one / two for one, two in zip(values, bandwidths, strict=True)]
                line += f", {runner.token_bytes() / 1e6:.0f} MB at {statistics.median(share):.2f} of the bandwidth"
            print(line)


if __name__ == "__main__":
    main()

"""What a GPU does, on weights that are random: products alone, decoding, verification, prompts, and torch beside it.

usage: python -m tests.bench.bench_cuda OUT.json [MODEL ...]      models: 8B 3B 1B (default: all)

Every result is written as soon as it is there, so that a run that is cut short keeps what it had.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from localinfer.kernels.cuda.attention import Attention, Rope
from localinfer.kernels.cuda.device import CudaDevice, Launch
from localinfer.kernels.cuda.gemm import (
    TENSOR_CORES,
    Quantized,
    Shape,
    Slot,
    quantize_launch,
    quantized_place,
    scalar_gemm,
    tiled_gemm,
)
from localinfer.kernels.cuda.lower import lower_to_cuda
from localinfer.kernels.cuda.memory import DeviceKVLayout, DeviceMemory
from localinfer.kernels.cuda.program import CudaProgram
from localinfer.kernels.cuda.sampling import Chosen
from localinfer.kernels.cuda.weights import DeviceWeight, array_offsets
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import AttentionShape, EmbeddingTable, KVLayerShape, LinearWeight, Rows
from localinfer.kernels.program import Batch, Segment
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, write_decoder
from localinfer.types import FloatArray

# Layers, hidden, heads, KV heads, head size, feed-forward, vocabulary, whether the output is the embedding.
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "8B": (32, 4096, 32, 8, 128, 14336, 128256, False),
    "3B": (28, 3072, 24, 8, 128, 8192, 128256, True),
    "1B": (16, 2048, 32, 8, 64, 8192, 128256, True),
}
CONTEXT, PROMPT = 512, 2048
PRODUCTS = [
    *((layout, 28672, 4096) for layout in (Layout.Q4_0, Layout.INT4_128, Layout.Q4_K, Layout.Q6_K, Layout.Q8_0)),
    *((Layout.Q4_0, *shape) for shape in ((4096, 4096), (4096, 14336), (6144, 4096), (2048, 2048))),
]
BATCHES = (1, 2, 4, 8, 16)


class RandomWeights:
    """A `WeightSource` of a llama's shape in one layout, made where it is used."""

    def __init__(self, device: CudaDevice, layout: Layout, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
        import torch

        torch.manual_seed(seed)
        self._device, self._layout, self._shapes = device, layout, shapes
        self._made: dict[str, DeviceWeight] = {}
        self.num_bytes = 0

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        assert rows is None, "nothing is fused in these"
        num_rows, num_columns = self._shapes[name]
        if name not in self._made:
            self._made[name] = random_planes(self._device, self._layout, num_rows, num_columns)
            self.num_bytes += array_offsets(self._layout, num_rows, num_columns)[-1]
        return LinearWeight(name, num_rows, num_columns, self._made[name])

    def embedding(self, name: str) -> EmbeddingTable:
        linear = self.linear(name)
        return EmbeddingTable(name, linear.num_rows, linear.num_columns, linear.packed)

    def vector(self, name: str) -> FloatArray:
        return np.ones(self._shapes[name], np.float32)


def random_planes(device: CudaDevice, layout: Layout, num_rows: int, num_columns: int) -> DeviceWeight:
    """Random codes with equal scales, without the host's help."""
    import torch

    offsets = array_offsets(layout, num_rows, num_columns)
    address = device.allocate(offsets[-1])
    tensor = device._tensors[address]
    tensor.random_(0, 256)
    scales = tensor[offsets[1] : offsets[2]].view(torch.int16)
    # float16 0.01, and of layouts with a zero point that is 8.
    scales.fill_(0x211F)
    if layout in (Layout.INT4_32, Layout.INT4_64, Layout.INT4_128):
        scales[1::2] = 8
    torch.cuda.synchronize()
    return DeviceWeight(layout, num_rows, num_columns, 1, address)


def seconds_of(action: Callable[[], None], wait: Callable[[], None], repetitions: int = 5) -> float:
    """The median of some runs, after one that warms up."""
    action()
    wait()
    samples = []
    for _ in range(repetitions):
        began = time.perf_counter()
        action()
        wait()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def read_bandwidth() -> float:
    """Bytes per second of a sum over 4 GB."""
    import torch

    values = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    seconds = seconds_of(lambda: None if values.sum() is None else None, torch.cuda.synchronize)
    return values.numel() * 4 / seconds


def boundary_seconds(device: CudaDevice) -> float:
    """What one more kernel in a graph costs."""
    memory = DeviceMemory(device, {Rows.BATCH: 16, Rows.OUTPUT: 16}, ())
    x = memory.shared("x", 4096)
    tiny = Launch("rows.elementwise", (5,), (1, 1, 1), 128, (x, 4096, x, 4096, x, 4096, 32, 0, 1.0))
    wait = device._synchronize
    few, many = device.capture([tiny] * 100), device.capture([tiny] * 1100)
    return (seconds_of(many, wait) - seconds_of(few, wait)) / 1000


def ways_to_multiply(
    device: CudaDevice, x: tuple[int, int], quantized: Quantized
) -> dict[str, Callable[[Slot, int], Iterator[Launch]]]:
    """The launches of a product of some rows, by lanes and, where the GPU can, by tiles."""
    ways: dict[str, Callable[[Slot, int], Iterator[Launch]]] = {
        "scalar": lambda slot, rows: scalar_gemm(x, quantized, [slot], rows, None)
    }
    if device.capability >= TENSOR_CORES:
        ways["tiled"] = lambda slot, rows: tiled_gemm(quantized, [slot], rows, None)
    return ways


def prepare_products(device: CudaDevice) -> float:
    """Compile what all products take, on several cores; the seconds of it."""
    ways = ways_to_multiply(device, (0, 0), Quantized(0, 0, 0, 0)).values()
    slots = [Slot(DeviceWeight(layout, rows, columns, 1, 0), 0, 4 * rows) for layout, rows, columns in PRODUCTS]
    began = time.perf_counter()
    keys = [launch.key for slot in slots for way in ways for rows in BATCHES for launch in way(slot, rows)]
    device.prepare([], keys, None)
    return time.perf_counter() - began


def product_record(device: CudaDevice, layout: Layout, num_rows: int, num_columns: int) -> dict[str, Any]:
    """Bytes per second of one product for 1 to 16 rows, over weights that no cache holds."""
    memory = DeviceMemory(device, {Rows.BATCH: 16, Rows.OUTPUT: 16}, ())
    num_bytes = array_offsets(layout, num_rows, num_columns)[-1]
    copies = max(2, (512 << 20) // num_bytes)
    weights = [random_planes(device, layout, num_rows, num_columns) for _ in range(copies)]
    x = memory.shared("x", 16 * 4 * num_columns)
    out = memory.shared("out", 16 * 4 * num_rows)
    quantized = quantized_place(memory, "x", num_columns, 16)
    device.run([quantize_launch(x, 4 * num_columns, quantized, num_columns, 16)])
    record: dict[str, Any] = {"layout": layout.name, "rows": num_rows, "columns": num_columns, "bytes": num_bytes}
    for way, launches in ways_to_multiply(device, (x, 4 * num_columns), quantized).items():
        for rows in BATCHES:
            steps = [launch for weight in weights for launch in launches(Slot(weight, out, 4 * num_rows), rows)]
            seconds = seconds_of(device.capture(steps), device._synchronize) / copies
            record[f"{way}_seconds_{rows}"] = seconds
            record[f"{way}_bytes_per_second_{rows}"] = num_bytes / seconds
    for weight in weights:
        device.free(weight.address)
    return record


def torch_int4_record(num_rows: int, num_columns: int, group: int) -> dict[str, Any]:
    """torch's own int4 product of one row, over as many copies."""
    import torch

    codes = torch.randint(0, 256, (num_rows, num_columns // 2), dtype=torch.uint8, device="cuda")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.full((num_columns // group, num_rows, 2), 0.01, dtype=torch.bfloat16, device="cuda")
    num_bytes = packed.numel() * packed.element_size() + scales.numel() * 2
    copies = max(2, (512 << 20) // num_bytes)
    weights = [(packed.clone(), scales.clone()) for _ in range(copies)]
    record: dict[str, Any] = {"group": group, "rows": num_rows, "columns": num_columns, "bytes": num_bytes}
    for rows in (1, 4, 8):
        x = torch.randn(rows, num_columns, dtype=torch.bfloat16, device="cuda")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            torch.ops.aten._weight_int4pack_mm(x, *_pair(weights[0], group))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for weight in weights:
                torch.ops.aten._weight_int4pack_mm(x, *_pair(weight, group))
        seconds = seconds_of(graph.replay, torch.cuda.synchronize) / copies
        record[f"seconds_{rows}"] = seconds
        record[f"bytes_per_second_{rows}"] = num_bytes / seconds
    return record


def _pair(weight: tuple[Any, Any], group: int) -> tuple[Any, int, Any]:
    return weight[0], group, weight[1]


def attention_record(device: CudaDevice, kv_type: str, num_rows: int, context: int) -> dict[str, Any]:
    """Seconds of an 8B model's attention of the last rows of a context, by tiles and by chunks, in one layer."""
    layers, hidden, heads, kv_heads, head, *_ = SHAPES["8B"]
    layout = KVLayout(kv_type, [KVLayerShape(kv_heads, head, head)])
    memory = DeviceMemory(device, {Rows.BATCH: num_rows, Rows.OUTPUT: num_rows}, ())
    count = -(-context // layout.page_tokens)
    pages = memory.array(device.allocate(count * layout.page_bytes) + np.arange(count) * layout.page_bytes)
    positions = memory.array(np.arange(context - num_rows, context))
    tables = memory.array(np.full(num_rows, pages))
    queries, out = (memory.shared(name, num_rows * 4 * hidden) for name in ("queries", "out"))
    shape = AttentionShape(heads, kv_heads, head, head, scale=head**-0.5)
    places = ((queries, 4 * hidden), (out, 4 * hidden))
    attention = Attention(memory, layout, 0, shape, *places, 0, 0, Rope(0, 0, 0, head, 0))
    record: dict[str, Any] = {"kv_type": kv_type, "rows": num_rows, "context": context, "layers_of_8B": layers}
    chunks = 1 << (-(-context // 128) - 1).bit_length()
    for way, segment_rows in (("tiles", (num_rows,)), ("chunks", ())):
        batch = Shape(num_rows, num_rows, chunks, 0, positions, tables, 0, segment_rows)
        steps = list(attention.steps(batch, None)) * 4
        record[f"seconds_by_{way}"] = seconds_of(device.capture(steps), device._synchronize) / 4
    return record


def make_program(
    device: CudaDevice, name: str, layout: Layout, kv_type: str, *, seed: int = 1
) -> tuple[CudaProgram, DeviceKVLayout, int]:
    """A model of this shape, and the bytes of its weights."""
    layers, hidden, heads, kv_heads, head, inner, vocab, is_tied = SHAPES[name]
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": 8192,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": head,
        "llama.attention.value_length": head,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "llama.rope.dimension_count": head,
        "llama.vocab_size": vocab,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not is_tied:
        shapes["output.weight"] = (vocab, hidden)
    for layer in range(layers):
        block = f"blk.{layer}."
        for part, shape in (
            ("attn_norm", (hidden,)),
            ("ffn_norm", (hidden,)),
            ("attn_q", (heads * head, hidden)),
            ("attn_k", (kv_heads * head, hidden)),
            ("attn_v", (kv_heads * head, hidden)),
            ("attn_output", (hidden, heads * head)),
            ("ffn_gate", (inner, hidden)),
            ("ffn_up", (inner, hidden)),
            ("ffn_down", (hidden, inner)),
        ):
            shapes[f"{block}{part}.weight"] = shape
    config = ModelConfig.from_metadata(metadata, shapes)
    kv_layout = DeviceKVLayout(kv_type, kv_layer_shapes(config), device=device)
    weights = RandomWeights(device, layout, shapes, seed)
    graph = write_decoder(config, weights, config.context_length, kv_layers=kv_layout.layers)
    program = lower_to_cuda(graph, device, kv_layout)
    return program, kv_layout, weights.num_bytes


def model_record(name: str, layout: Layout, kv_type: str = "f16", *, overlaps: bool = False) -> dict[str, Any]:
    """Decoding at a context of 512, verifying 4 and 8 tokens, a prompt of 2,048, and the host's part of a token.

    overlaps: kernels are started before the ones before them have ended.
    """
    device = CudaDevice(overlaps=overlaps)
    began = time.perf_counter()
    program, kv_layout, num_bytes = make_program(device, name, layout, kv_type)
    record: dict[str, Any] = {"model": name, "layout": layout.name, "kv_type": kv_type, "overlaps": device.overlaps}
    record["weight_bytes"] = num_bytes
    record["load_and_compile_seconds"] = time.perf_counter() - began
    count = -(-(PROMPT + 512) // kv_layout.page_tokens)
    pages = device.allocate(count * kv_layout.page_bytes) + np.arange(count, dtype=np.int64) * kv_layout.page_bytes
    ids = np.random.default_rng(1).integers(0, 1000, PROMPT).astype(np.int32)
    last = np.array([0], np.int32)

    def prefill(length: int) -> None:
        for start in range(0, length, program.max_batch_rows):
            part = ids[start : min(start + program.max_batch_rows, length)]
            outputs = last[:0] if start + part.size < length else np.array([part.size - 1], np.int32)
            program.run_greedy(Batch(part, [Segment(start, part.size, pages)], outputs))

    def nothing() -> None:
        pass

    record["prefill_tokens_per_second"] = PROMPT / seconds_of(lambda: prefill(PROMPT), nothing, 3)
    prefill(CONTEXT)
    for rows in (1, 4, 8):
        batch = Batch(ids[:rows], [Segment(CONTEXT, rows, pages)], np.arange(rows, dtype=np.int32))
        for _ in range(3):
            program.run_greedy(batch)
        samples = []
        host = []
        for _ in range(100):
            began = time.perf_counter()
            program._start(batch, Chosen.LIKELIEST)
            host.append(time.perf_counter() - began)
            program._choice.read(rows)
            samples.append(time.perf_counter() - began)
        record[f"seconds_{rows}"] = statistics.median(samples)
        record[f"host_seconds_{rows}"] = statistics.median(host)
    record["decode_tokens_per_second"] = 1 / record["seconds_1"]
    record["read_bytes_per_second"] = num_bytes / record["seconds_1"]
    record["verify_4_over_1"] = record["seconds_4"] / record["seconds_1"]
    record["verify_8_over_1"] = record["seconds_8"] / record["seconds_1"]
    program.close()
    return record


def main() -> None:
    path, names = Path(sys.argv[1]), sys.argv[2:] or list(SHAPES)
    results: dict[str, Any] = {}

    def note(key: str, make: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            results[key] = make()
        except Exception as error:  # one measurement that fails must not lose the others
            results[key] = {"failed": f"{type(error).__name__}: {error}"}
        path.write_text(json.dumps(results, indent=1))
        print(f"{key} ({time.perf_counter() - began:.1f} s): {results[key]}", flush=True)

    device = CudaDevice()
    note("device", lambda: {"name": device.name, "capability": device.capability})
    note("read_bytes_per_second", read_bandwidth)
    note("boundary_seconds", lambda: boundary_seconds(device))
    note("seconds to compile products", lambda: prepare_products(device))
    for layout, rows, columns in PRODUCTS:
        note(
            f"product {layout.name} {rows} x {columns}",
            lambda layout=layout, rows=rows, columns=columns: product_record(device, layout, rows, columns),
        )
    for group in (32, 128):
        note(f"torch int4 28672 x 4096 g{group}", lambda group=group: torch_int4_record(28672, 4096, group))
    for kv_type in ("f16", "q8_0"):
        for rows, context in ((1024, 2048), (1024, 1024), (8, 8192), (1, 8192), (1, 512)):
            note(
                f"attention {kv_type} {rows} rows of {context}",
                lambda kv_type=kv_type, rows=rows, context=context: attention_record(device, kv_type, rows, context),
            )
    device.close()
    for name in names:
        note(f"model {name} Q4_0", lambda name=name: model_record(name, Layout.Q4_0))
    for name in names[:1]:
        note(f"model {name} Q4_0, overlapped", lambda name=name: model_record(name, Layout.Q4_0, overlaps=True))
        note(f"model {name} Q4_0, q8_0 cache", lambda name=name: model_record(name, Layout.Q4_0, "q8_0"))


if __name__ == "__main__":
    main()

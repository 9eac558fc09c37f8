"""What a GPU does, on weights that are random: products alone, decoding, verification, prompts, and torch beside it.

usage: python -m tests.bench.bench_cuda OUT.json [--dry-run] PART...
parts: decode ceilings products torch attention models layer

`layer` runs one layer between marks for a profiler. Every result is written at once, beside those that the
file had, so that parts can be run one by one. With --dry-run a device takes part that only records what it is given.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from localinfer.kernels.cuda.attention import AttentionLaunches, HeadRotation
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
from localinfer.kernels.cuda.memory import SMALL_ROWS, DeviceMemory
from localinfer.kernels.cuda.sampling import SampleMode
from localinfer.kernels.cuda.weights import DeviceWeight, array_offsets
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import AttentionShape, KVLayerShape, Rows
from localinfer.kernels.program import Batch, Segment
from tests.bench.random_llama import SHAPES, make_program, random_planes
from tests.kernels.cuda.recording_device import RecordingDevice

CONTEXT, PROMPT = 512, 2048
PRODUCTS = [
    *((layout, 28672, 4096) for layout in (Layout.Q4_0, Layout.INT4_128, Layout.Q4_K, Layout.Q6_K, Layout.Q8_0)),
    *((Layout.Q4_0, *shape) for shape in ((4096, 4096), (4096, 14336), (6144, 4096), (2048, 2048))),
]
BATCHES = (1, 2, 4, 8, 16)
OpenDevice = Callable[..., CudaDevice]


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


def boundary_seconds(device: CudaDevice) -> float:
    """What one more kernel in a graph costs."""
    memory = DeviceMemory(device, {Rows.BATCH: 16, Rows.OUTPUT: 16}, ())
    x = memory.shared("x", 4096)
    tiny = Launch("rows.elementwise", (7,), (1, 1, 1), 128, (x, 4096, x, 4096, x, 4096, 32, 0, 1.0))
    wait = device.synchronize
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
    random = np.random.default_rng(1)
    weights = [random_planes(device, layout, num_rows, num_columns, random) for _ in range(copies)]
    x = memory.shared("x", 16 * 4 * num_columns)
    out = memory.shared("out", 16 * 4 * num_rows)
    quantized = quantized_place(memory, "x", num_columns, 16)
    device.run([quantize_launch(x, 4 * num_columns, quantized, num_columns, 16)])
    record: dict[str, Any] = {"layout": layout.name, "rows": num_rows, "columns": num_columns, "bytes": num_bytes}
    for way, launches in ways_to_multiply(device, (x, 4 * num_columns), quantized).items():
        for rows in BATCHES:
            steps = [launch for weight in weights for launch in launches(Slot(weight, out, 4 * num_rows), rows)]
            seconds = seconds_of(device.capture(steps), device.synchronize) / copies
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
    """Seconds of an 8B model's attention of the last rows of a context, in one layer.

    More rows than those of decoding are computed by tiles and by chunks, others by chunks only.
    """
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
    attention = AttentionLaunches(memory, layout, 0, shape, *places, 0, 0, HeadRotation(0, 0, 0, head, 0))
    record: dict[str, Any] = {"kv_type": kv_type, "rows": num_rows, "context": context, "layers_of_8B": layers}
    chunks = 1 << (-(-context // 128) - 1).bit_length()
    ways: dict[str, tuple[int, ...]] = {"chunks": ()}
    if num_rows > SMALL_ROWS:
        ways["tiles"] = (num_rows,)
    for way, segment_rows in ways.items():
        batch = Shape(num_rows, num_rows, chunks, 0, positions, tables, 0, segment_rows)
        steps = list(attention.steps(batch, None)) * 4
        record[f"seconds_by_{way}"] = seconds_of(device.capture(steps), device.synchronize) / 4
    return record


def model_record(
    open_device: OpenDevice, name: str, layout: Layout, kv_type: str = "f16", *, overlaps: bool = False
) -> dict[str, Any]:
    """Decoding at a context of 512, verifying 4 and 8 tokens, a prompt of 2,048, and the host's part of a token.

    overlaps: kernels are started before the ones before them have ended.
    """
    device = open_device(overlaps=overlaps)
    began = time.perf_counter()
    program, kv_layout, num_bytes = make_program(device, name, layout, kv_type)
    record: dict[str, Any] = {"model": name, "layout": layout.name, "kv_type": kv_type, "overlaps": device.overlaps}
    record["weight_bytes_per_token"] = num_bytes
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
            program._start(batch, SampleMode.LIKELIEST)
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


def run_one_layer(open_device: OpenDevice) -> None:
    """One layer of an 8B model and its output: 1 and 8 rows and a prompt, between marks for a profiler."""
    device = open_device()
    program, kv_layout, _ = make_program(device, "8B", Layout.Q4_0, "f16", num_layers=1)
    count = -(-PROMPT // kv_layout.page_tokens)
    pages = device.allocate(count * kv_layout.page_bytes) + np.arange(count, dtype=np.int64) * kv_layout.page_bytes
    ids = np.random.default_rng(1).integers(0, 1000, PROMPT).astype(np.int32)
    for is_marked in (False, True):
        if is_marked and isinstance(device, CudaDevice):
            device.synchronize()
            _profiler().start()
        for start, rows in ((0, CONTEXT), (CONTEXT, 1), (CONTEXT, 8)):
            last = np.array([rows - 1], np.int32)
            program.run_greedy(Batch(ids[start : start + rows], [Segment(start, rows, pages)], last))
    if isinstance(device, CudaDevice):
        _profiler().stop()
    program.close()


def _profiler() -> Any:
    import torch

    return torch.cuda.profiler


class Results:
    """Figures by name in a file of JSON, which keeps those that it had."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def note(self, key: str, make: Callable[[], Any]) -> None:
        """Add what `make` returns, or why it failed: one measurement that fails must not lose the others."""
        began = time.perf_counter()
        try:
            self._figures[key] = make()
        except Exception as error:
            self._figures[key] = {"failed": f"{type(error).__name__}: {error}"}
        self._path.write_text(json.dumps(self._figures, indent=1))
        print(f"{key} ({time.perf_counter() - began:.1f} s): {self._figures[key]}", flush=True)


def measure(part: str, results: Results, open_device: OpenDevice, *, has_torch: bool) -> None:
    """Measure one part; see the usage."""
    if part in ("decode", "models"):
        _measure_models(part, results, open_device)
        return
    if part == "layer":
        run_one_layer(open_device)
        return
    device = open_device()
    if part == "ceilings":
        results.note("device", lambda: {"name": device.name, "capability": device.capability})
        results.note("read_bytes_per_second", device.read_bandwidth)
        results.note("boundary_seconds", lambda: boundary_seconds(device))
    if part == "products":
        results.note("seconds to compile products", lambda: prepare_products(device))
        for layout, rows, columns in PRODUCTS:
            name = f"product {layout.name} {rows} x {columns}"
            results.note(name, partial(product_record, device, layout, rows, columns))
    if part == "torch" and has_torch:
        for group in (32, 128):
            results.note(f"torch int4 28672 x 4096 g{group}", partial(torch_int4_record, 28672, 4096, group))
    if part == "attention":
        for kv_type in ("f16", "q8_0"):
            for rows, context in ((1024, 2048), (1024, 1024), (8, 8192), (1, 8192), (1, 512)):
                name = f"attention {kv_type} {rows} rows of {context}"
                results.note(name, partial(attention_record, device, kv_type, rows, context))
    device.close()


def _measure_models(part: str, results: Results, open_device: OpenDevice) -> None:
    def note(name: str, *, kv_type: str = "f16", overlaps: bool = False, suffix: str = "") -> None:
        make = partial(model_record, open_device, name, Layout.Q4_0, kv_type, overlaps=overlaps)
        results.note(f"model {name} Q4_0{suffix}", make)

    if part == "decode":
        note("8B")
        note("8B", overlaps=True, suffix=", overlapped")
        return
    note("3B")
    note("1B")
    note("8B", kv_type="q8_0", suffix=", q8_0 cache")


PARTS = ("decode", "ceilings", "products", "torch", "attention", "models", "layer")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a GPU on random weights.")
    parser.add_argument("results", type=Path, help="file of JSON that results are added to")
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--dry-run", action="store_true", help="record launches instead of starting them")
    options = parser.parse_args()
    open_device: OpenDevice = RecordingDevice if options.dry_run else CudaDevice  # type: ignore[assignment]
    for part in options.parts:
        measure(part, Results(options.results), open_device, has_torch=not options.dry_run)


if __name__ == "__main__":
    main()

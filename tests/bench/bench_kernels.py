"""Time the matrix products by layout and rows, as shares of the machine's ceilings measured in the same run.

`python -m tests.bench.bench_kernels [SHAPE ...] [--layouts Q4_0,Q8_0] [--threads N]`, from the repository's root.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np

from localinfer.apps.bench.roofline import instruction_set, measure_multiply_peak, measure_read_bandwidth
from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.memory import Arena
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.cpu.weights import PackedWeight, pack
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.jit.host import cpu_name
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import LinearWeight, Projection, Rows
from localinfer.kernels.program import Batch, Segment
from localinfer.models.load.threads import available_threads
from tests.kernels.cpu.tape_runs import NO_CACHE, random_rows, table
from tests.kernels.random_weights import random_weights

SHAPES = {
    "qwen2.5-0.5b": (4864, 896),
    "tinyllama1.1b": (5632, 2048),
    "llama3.2-1b": (8192, 2048),
    "llama3.1-8b": (14336, 4096),
}
"""Rows and columns of the gate and up matrices of models by their name."""
READ_ROWS = (1, 2, 4, 8, 16)
MULTIPLIED_ROWS = (64, 512)
DRAM_BYTES = 256 << 20
"""Matrices are repeated to this size, so that none comes from a cache."""


def matrices(pool: ThreadPool, layout: Layout, num_rows: int, num_columns: int) -> list[LinearWeight]:
    """As many copies of one random matrix as do not fit in a cache, one after the other as a model's weights are."""
    original = pack(pool, layout, random_weights(layout, (num_rows, num_columns), 1), 1, num_rows, num_columns)
    count = max(2, DRAM_BYTES // original.data.size)
    arena = Arena(count * (original.data.size + 64))
    weights = []
    for index in range(count):
        data = arena.take(original.data.size)
        data[:] = original.data
        packed = PackedWeight(layout, num_rows, num_columns, 1, data)
        weights.append(LinearWeight(f"{layout.name} {index}", num_rows, num_columns, packed))
    return weights


def products(pool: ThreadPool, weights: Sequence[LinearWeight]) -> CpuProgram:
    """A program that multiplies every matrix by the same rows."""
    first = weights[0]
    tape = GraphBuilder()
    x = tape.buffer("x", first.num_columns)
    out, chosen = tape.buffer("out", first.num_rows), tape.buffer("chosen", first.num_rows, Rows.OUTPUT)
    tape.embed(x, table(random_rows(max(MULTIPLIED_ROWS), first.num_columns, 1)))
    for weight in weights:
        tape.matmul(x, [Projection(weight, out)])
    tape.select_output(chosen, out)
    graph = tape.finish(chosen)
    return lower_to_cpu(graph, pool, NO_CACHE, max_batch_rows=max(MULTIPLIED_ROWS), max_output_rows=1)


def seconds_of_products(program: CpuProgram, num_rows: int, repetitions: int) -> float:
    """Median time of all the products, without what comes before and after them."""
    ids = np.arange(num_rows, dtype=np.int32)
    program.run(Batch(ids, [Segment(0, num_rows, np.zeros(num_rows, np.int64))], ids[:1]))
    indices = [index for index, operation in enumerate(program.operations()) if operation.multiply_adds]
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        program.run_operations(indices[0], len(indices))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Print one table per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["tinyllama1.1b"], metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--layouts", default=",".join(layout.name for layout in Layout))
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    read, multiply = measure_read_bandwidth(options.threads), measure_multiply_peak(options.threads)
    print(f"{cpu_name()}, {instruction_set()}, threads: {options.threads}")
    print(f"ceilings: {read / 1e9:.1f} GB/s, {multiply / 1e9:,.0f} G multiplications of bytes per second")
    pool = ThreadPool(options.threads)
    for shape in options.shapes:
        num_rows, num_columns = SHAPES[shape]
        print(f"\n{shape}, {num_rows} x {num_columns}")
        heads = [f"{rows} rows, GB/s" for rows in READ_ROWS] + [f"{rows} rows, G/s" for rows in MULTIPLIED_ROWS]
        print(f"{'':9}" + "".join(f"{head:>17}" for head in heads))
        for name in options.layouts.split(","):
            weights = matrices(pool, Layout[name], num_rows, num_columns)
            program = products(pool, weights)
            num_bytes = sum(weight.packed.data.size for weight in weights)
            cells = []
            for rows in READ_ROWS:
                rate = num_bytes / seconds_of_products(program, rows, options.repetitions)
                cells.append(f"{rate / 1e9:.1f} ({rate / read:.2f})")
            for rows in MULTIPLIED_ROWS:
                count = rows * num_rows * num_columns * len(weights)
                rate = count / seconds_of_products(program, rows, max(1, options.repetitions // 3))
                cells.append(f"{rate / 1e9:.0f} ({rate / multiply:.2f})")
            print(f"{name:9}" + "".join(f"{cell:>17}" for cell in cells), flush=True)
    pool.close()


if __name__ == "__main__":
    main()

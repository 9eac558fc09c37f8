"""Time attention of one decoded token over long contexts, as a share of the read bandwidth measured in the same run.

`python -m tests.bench.bench_attention [SHAPE ...] [--kv-types f16,q8_0] [--positions 4096,8192] [--threads 1,2]`, from
the repository's root.
"""

import argparse
import statistics
import time

import numpy as np

from localinfer.apps.bench.roofline import instruction_set, measure_read_bandwidth
from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.memory import Arena, address
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.jit.host import cpu_name
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import AttentionShape, KVLayerShape, Rows
from localinfer.kernels.program import Batch, Segment
from tests.kernels.cpu.tape_runs import random_rows, table

SHAPES = {
    "qwen2.5-0.5b": (24, 14, 2, 64),
    "tinyllama1.1b": (22, 32, 4, 64),
    "llama3.2-1b": (16, 32, 8, 64),
    "llama3.1-8b": (32, 32, 8, 128),
}
"""Layers, heads, KV heads and head size of models by their name."""
FILL_ROWS = 512


def attention_program(pool: ThreadPool, layout: KVLayout, shape: AttentionShape) -> CpuProgram:
    """A program that stores keys and values in every layer and then attends in every layer."""
    tape = GraphBuilder(layout.layers)
    queries = tape.buffer("queries", shape.num_heads * shape.key_size)
    keys = tape.buffer("keys", shape.num_kv_heads * shape.key_size)
    values = tape.buffer("values", shape.num_kv_heads * shape.value_size)
    out = tape.buffer("out", shape.num_heads * shape.value_size)
    chosen = tape.buffer("chosen", out.width, Rows.OUTPUT)
    for index, buffer in enumerate((queries, keys, values)):
        tape.embed(buffer, table(random_rows(FILL_ROWS, buffer.width, index)))
    for layer in range(len(layout.layers)):
        tape.store_kv(layer, keys, values)
    for layer in range(len(layout.layers)):
        tape.attention(out, queries, layer, shape)
    tape.select_output(chosen, out)
    return lower_to_cpu(tape.finish(chosen), pool, layout, max_batch_rows=FILL_ROWS, max_output_rows=1)


def seconds_of_attention(
    program: CpuProgram, layout: KVLayout, positions: int, rows: int, repetitions: int
) -> tuple[float, int]:
    """Median time of attention in all layers for the last `rows` of `positions`, and the bytes of cache it reads."""
    num_pages = -(-positions // layout.page_tokens)
    memory = Arena(num_pages * layout.page_bytes + 64).take(num_pages * layout.page_bytes)
    pages = address(memory) + np.arange(num_pages, dtype=np.int64) * layout.page_bytes
    operations = program.operations()
    stores = [index for index, operation in enumerate(operations) if ".store_" in operation.kernel]
    reads = [index for index, operation in enumerate(operations) if operation.kv_bytes]
    first = max(stores) + 1
    no_rows = np.zeros(0, np.int32)
    ids = np.arange(FILL_ROWS, dtype=np.int32)
    program.run(Batch(ids[:1], [Segment(0, 1, pages)], no_rows))
    for start in range(0, positions, FILL_ROWS):
        count = min(FILL_ROWS, positions - start)
        program._set_segment(0, Segment(start, count, pages), 0, count)
        program._header[0], program._last_rows = count, count
        program.run_operations(0, first)
    program.run(Batch(ids[:rows], [Segment(positions - rows, rows, pages)], no_rows))
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        program.run_operations(first, max(reads) + 1 - first)
        times.append(time.perf_counter() - began)
    return statistics.median(times), positions * sum(operations[index].kv_bytes for index in reads)


def main() -> None:
    """Print one line per shape, type, context and thread count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES)[:3], metavar="SHAPE", help=", ".join(SHAPES))
    for option, default in {"--kv-types": "f16", "--positions": "4096,8192", "--threads": "1,2"}.items():
        parser.add_argument(option, default=default)
    parser.add_argument("--rows", type=int, default=1, help="tokens computed at once")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    print(f"{cpu_name()}, {instruction_set()}; rows: {options.rows}")
    for threads in map(int, options.threads.split(",")):
        read = measure_read_bandwidth(threads)
        print(f"\nthreads: {threads}, memory {read / 1e9:.1f} GB/s")
        pool = ThreadPool(threads)
        for name in options.shapes:
            layers, heads, kv_heads, size = SHAPES[name]
            shape = AttentionShape(heads, kv_heads, size, size, size**-0.5)
            for kv_type in options.kv_types.split(","):
                layout = KVLayout(kv_type, [KVLayerShape(kv_heads, size, size)] * layers)
                program = attention_program(pool, layout, shape)
                for positions in map(int, options.positions.split(",")):
                    seconds, num_bytes = seconds_of_attention(
                        program, layout, positions, options.rows, options.repetitions
                    )
                    rate = num_bytes / seconds
                    print(
                        f"{name:14} {kv_type:10} {positions:6} positions {1e3 * seconds:8.2f} ms "
                        f"{rate / 1e9:6.1f} GB/s ({rate / read:.2f} of read)",
                        flush=True,
                    )
        pool.close()


if __name__ == "__main__":
    main()

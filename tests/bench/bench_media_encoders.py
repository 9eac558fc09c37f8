"""Processor time of picture encoders of common shapes on one thread, op by op.

python -m tests.bench.bench_media_encoders [--layers 2] [--types F16,F32,Q8_0] [--side 448]: random weights, pictures of
1,024 patches, or of 4,096 with 896 pixels a side. Seconds are the thread's own, so that other programs' turns do not
count; what they leave in caches does.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.models.media.encoder import MediaEncoder, read_mmproj
from localinfer.models.media.records import EncoderInput
from localinfer.quant.gguf.reader import read_gguf
from tests.bench.random_media import ENCODERS, PATCH, write_encoder

ROUNDS = 5


def op_seconds(program: CpuProgram) -> tuple[dict[str, float], dict[str, int]]:
    """The least processor time and the multiply-adds per row of each kernel of the last batch."""
    operations = program.operations()
    least = [float("inf")] * len(operations)
    for _ in range(ROUNDS):
        for index in range(len(operations)):
            begin = time.thread_time()
            program.run_operations(index, 1)
            least[index] = min(least[index], time.thread_time() - begin)
    seconds: dict[str, float] = defaultdict(float)
    products: dict[str, int] = defaultdict(int)
    for operation, taken in zip(operations, least, strict=True):
        seconds[operation.kernel] += taken
        products[operation.kernel] += operation.multiply_adds
    return seconds, products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--types", default="F16,F32,Q8_0")
    parser.add_argument("--side", type=int, default=448)
    options = parser.parse_args()
    pool, side = ThreadPool(1), options.side
    pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3)).astype(np.uint8)
    patches = (side // PATCH) ** 2
    for name, shape in ENCODERS.items():
        for kind in options.types.split(","):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "mmproj.gguf"
                write_encoder(path, name, kind, side=side, output=64, layers=options.layers)
                with read_gguf(path) as file:
                    encoder = MediaEncoder(read_mmproj(file), file, pool)
            rows = patches // (16 if shape["projector"] == "gemma3" else 4)
            piece = EncoderInput(False, pixels, rows, None, rows)
            encoder.encode(piece)
            whole = []
            for _ in range(ROUNDS):
                begin = time.thread_time()
                encoder.encode(piece)
                whole.append(time.thread_time() - begin)
            assert encoder._pictures is not None and encoder._pictures._body is not None, "a file of pictures"
            program = encoder._pictures._body._program
            assert program is not None, "it has run"
            seconds, products = op_seconds(program)
            print(f"{name}, {kind}, {options.layers} blocks, {patches} patches: {min(whole) * 1e3:.0f} ms")
            for kernel, taken in sorted(seconds.items(), key=lambda entry: -entry[1])[:5]:
                rate = f"{products[kernel] * patches / taken / 1e9:8.1f} G products/s" if products[kernel] else ""
                print(f"  {kernel:28} {taken * 1e3:8.1f} ms {rate}")
            encoder.close()
    pool.close()


if __name__ == "__main__":
    main()

"""How fast weights are encoded on one thread, beside ggml's quantizer on the same rows.

python -m tests.bench.bench_encoders [libggml-base.so]: the library is the one inside llama-cpp-python's `lib` folder.
"""

import ctypes
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.encoding import ENCODERS, prepare_encoders
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.quant.formats.encoding import encode
from localinfer.quant.formats.types import TensorType, row_bytes

ROWS, PEER_ROWS, COLUMNS = 512, 32, 2048


def peer_quantizer(path: str) -> Callable[[NDArray[np.float32], TensorType, NDArray[np.float32] | None], object]:
    """ggml's own quantizer, behind the arguments of ours."""
    chunk = ctypes.CDLL(path).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def quantize(values: NDArray[np.float32], type: TensorType, importance: NDArray[np.float32] | None) -> object:
        target = np.empty((len(values), row_bytes(type, COLUMNS)), np.uint8)
        weights = None if importance is None else importance.ctypes.data
        chunk(int(type), values.ctypes.data, target.ctypes.data, 0, *values.shape, weights)
        return target

    return quantize


def rate(run: Callable[[], object], num_weights: int) -> float:
    """Millions of weights per second, the best of three."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return num_weights / min(seconds) / 1e6


def main() -> None:
    generator = np.random.default_rng(0)
    values = (generator.standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32)
    importance = (generator.standard_normal(COLUMNS) ** 2).astype(np.float32)
    peer = peer_quantizer(sys.argv[1]) if len(sys.argv) > 1 else None
    prepare_encoders(ENCODERS)
    pool = ThreadPool(1)
    for name in ENCODERS:
        type, cells = TensorType[name], []
        for given in (None, importance):
            ours = rate(lambda type=type, given=given: encode(pool, values, type, given), values.size)
            cell = f"{ours:8.1f}"
            if peer is not None:
                few = values[:PEER_ROWS]
                cell += f" / {rate(lambda type=type, few=few, given=given: peer(few, type, given), few.size):6.1f}"
            cells.append(cell)
        print(f"{name:7}", *cells)
    pool.close()


if __name__ == "__main__":
    main()

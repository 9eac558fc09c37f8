"""Encode rows of weights as quantized blocks, in parallel, with the bits of `quant.reference.quantize`.

Kernels take sixteen rows side by side, one to a lane, so the number of threads cannot change a bit.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.arrays import address, aligned_zeros
from localinfer.kernels.cpu.feedback import KERNELS as FEEDBACK_KERNELS
from localinfer.kernels.cpu.kernel_abi import (
    ENCODER_MEMORY_BYTES,
    ENCODER_STATUS,
    SOURCE_BF16,
    SOURCE_F16,
    SOURCE_F32,
    STATUS_NOT_FINITE,
)
from localinfer.kernels.cpu.parameters import ENCODE
from localinfer.kernels.cpu.pool import KERNELS as POOL_KERNELS
from localinfer.kernels.cpu.pool import ThreadPool
from localinfer.kernels.jit.compile_ahead import ProgressCallback, compile_ahead
from localinfer.kernels.jit.object_cache import Kernel

ENCODERS = {
    **{name: Kernel(f"encode_short.{name.lower()}") for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")},
    **{name: Kernel(f"encode_k.{name.lower()}") for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")},
}
"""Encoder kernels by the name of the type they write."""

_SOURCES = {np.dtype(np.float32): SOURCE_F32, np.dtype(np.float16): SOURCE_F16, np.dtype(np.uint16): SOURCE_BF16}


class NotFiniteError(ArithmeticError):
    """A weight is infinite or NaN."""


class TooLargeError(ArithmeticError):
    """A scale is larger than float16 can hold."""


def prepare_encoders(
    names: Iterable[str], progress: ProgressCallback | None = None, *, with_feedback: bool = False
) -> None:
    """Compile the kernels of these types, and GPTQ's if wanted, where they are not cached yet, in child processes."""
    further = FEEDBACK_KERNELS if with_feedback else ()
    compile_ahead([*POOL_KERNELS, *(ENCODERS[name] for name in names), *further], progress)


def encode_rows(
    pool: ThreadPool,
    name: str,
    source: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16],
    importance: NDArray[np.float32] | None,
    target: NDArray[np.uint8],
) -> None:
    """Encode a matrix; the caller proves that shapes agree and that importance is finite and not negative.

    Shapes: source [rows, columns] in C order, uint16 being the bits of bfloat16; importance float32[columns];
        target uint8[rows, row bytes of the type] in C order.
    Raises: NotFiniteError, TooLargeError; the target then holds no meaning.
    """
    rows, columns = source.shape
    memory = aligned_zeros(pool.num_threads * ENCODER_MEMORY_BYTES)
    # The checked copies must outlive the run.
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    words = ENCODE.pack(
        control=pool.control_address, source=address(source), kind=_SOURCES[source.dtype],
        stride=columns * source.itemsize, target=address(target), target_stride=target.shape[1], rows=rows,
        columns=columns, importance=0 if weights is None else address(weights), memory=address(memory),
    )  # fmt: skip
    ops = np.array([[ENCODERS[name].address, address(words)]], np.int64)
    pool.run(address(ops), 1, 0)
    found = memory.reshape(pool.num_threads, -1)[:, ENCODER_STATUS : ENCODER_STATUS + 8].copy().view(np.int64)
    if (found == STATUS_NOT_FINITE).any():
        raise NotFiniteError(name)
    if found.any():
        raise TooLargeError(name)

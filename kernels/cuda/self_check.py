"""Checks one GEMM and one attention of a device against NumPy before a model is placed there.

Some thousand numbers are computed as in prompts, several rows at a time, and as in decoding, row by row; where launches
can overlap, again with overlap, which stays if it gives the same bits. With compiled kernels it takes milliseconds.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import BackendUnavailableError
from localinfer.kernels import ops
from localinfer.kernels.cuda.device import OVERLAP_CAPABILITY, CudaDevice, Step
from localinfer.kernels.cuda.kernel_cache import KernelKey
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import AttentionShape, EmbeddingTable, KVLayerShape, LinearWeight, Rows
from localinfer.kernels.program import Batch, Segment
from localinfer.types import FloatArray, ProgressCallback

logger = logging.getLogger(__name__)

_WIDTH, _HEADS, _SIZE = 64, 2, 32
_PROMPT, _POSITIONS = 5, 7
"""Rows of the prompt, which use other kernels than one row, and all rows."""

_OVERLAPPED_RUNS = 2
"""Of the check with launches that overlap: each runs a row, captures its graph and replays that for the next row."""

_TOLERANCE = 0.01
"""Relative to the largest number. Keys and values in sixteen bits use a tenth of it."""


def check_device(device: CudaDevice, progress: ProgressCallback | None = None) -> None:
    """Raise BackendUnavailableError unless the device computes a GEMM and an attention as NumPy.

    Launches overlap afterwards where the GPU can do that and gives the same bits so, in graphs. Errors of drivers and
    compilers are passed on. All memory is freed.
    """
    found, wanted = _borrow(device, progress, captures=False)
    _check_numbers(found, wanted)
    if not device.overlaps and device.capability >= OVERLAP_CAPABILITY:
        _try_overlap(device, found, progress)


def _try_overlap(device: CudaDevice, wanted: FloatArray, progress: ProgressCallback | None) -> None:
    """Let launches overlap if the check then gives the bits of `wanted`, every time; else say why they do not.

    Raises: BackendUnavailableError if the device computes nothing any more, as after an error that CUDA keeps.
    """
    device.overlaps = True
    try:
        for _ in range(_OVERLAPPED_RUNS):
            found, _ = _borrow(device, progress, captures=True)
            if not np.array_equal(found, wanted):
                raise BackendUnavailableError("numbers differ from those without overlap")
    except Exception as error:
        device.overlaps = False
        logger.warning("launches on %s do not overlap: %s", getattr(device, "name", "the GPU"), error)
        try:
            found, _ = _borrow(device, progress, captures=False)
        except Exception as later:
            raise BackendUnavailableError(
                f"it computes nothing since launches that overlap were tried ({error}): {later}"
            ) from later
        if not np.array_equal(found, wanted):
            raise BackendUnavailableError("its numbers changed since launches that overlap were tried") from error


def _borrow(device: CudaDevice, progress: ProgressCallback | None, *, captures: bool) -> tuple[FloatArray, FloatArray]:
    """`_compute` on memory that is freed afterwards."""
    borrowed = _BorrowedDevice(device, captures=captures)
    try:
        return _compute(cast(CudaDevice, borrowed), progress)
    finally:
        borrowed.free_all()


def _check_numbers(found: FloatArray, wanted: FloatArray) -> None:
    """Raise BackendUnavailableError where numbers differ by more than rounding."""
    largest = float(np.abs(wanted).max())
    with np.errstate(invalid="ignore"):
        error = float(np.abs(found - wanted).max()) / largest
    if not error <= _TOLERANCE:
        raise BackendUnavailableError(
            f"the self-check of a GEMM and an attention differs from the CPU by {100 * error:.3g} % of the largest "
            f"number, where up to {100 * _TOLERANCE:.0f} % is rounding"
        )


def _compute(device: CudaDevice, progress: ProgressCallback | None) -> tuple[FloatArray, FloatArray]:
    """The device's rows, float32[positions, heads * size], and the right ones."""
    # Imported here, because a start on the CPU does not need it.
    from localinfer.kernels.cuda.lower import lower_to_cuda
    from localinfer.kernels.cuda.weights import upload

    random = np.random.default_rng(0)
    inputs = _inputs(random)
    layout = KVLayout("f16", [KVLayerShape(1, _SIZE, _SIZE)])
    graph = GraphBuilder(layout.layers)
    x = graph.buffer("inputs", _WIDTH)
    table = upload(device, Layout.F32, inputs.reshape(-1).view(np.uint8), 1, _POSITIONS, _WIDTH)
    graph.embed(x, EmbeddingTable("inputs", _POSITIONS, _WIDTH, table))
    projections: list[ops.Projection] = []
    products: list[FloatArray] = []
    for name, width in (("queries", _HEADS * _SIZE), ("keys", _SIZE), ("values", _SIZE)):
        data, weights = _random_q8_0(random, width, _WIDTH)
        packed = upload(device, Layout.Q8_0, data, 1, width, _WIDTH)
        projections.append(ops.Projection(LinearWeight(name, width, _WIDTH, packed), graph.buffer(name, width)))
        products.append(inputs @ weights.T)
    graph.matmul(x, projections)
    queries, keys, values = (projection.out for projection in projections)
    graph.store_kv(0, keys, values)
    attended, selected = (graph.buffer("attended", _HEADS * _SIZE, rows) for rows in (Rows.BATCH, Rows.OUTPUT))
    scale = _SIZE**-0.5
    graph.attention(attended, queries, 0, AttentionShape(_HEADS, 1, _SIZE, _SIZE, scale))
    graph.select_output(selected, attended)
    program = lower_to_cuda(
        graph.finish(selected), device, layout, max_batch_rows=_PROMPT, max_output_rows=_PROMPT, progress=progress
    )
    pages = np.array([device.allocate(layout.page_bytes)], np.int64)
    found = []
    for start, stop in ((0, _PROMPT), *((row, row + 1) for row in range(_PROMPT, _POSITIONS))):
        ids = np.arange(start, stop, dtype=np.int32)
        found.append(program.run(Batch(ids, [Segment(start, ids.size, pages)], ids - start)).copy())
    return np.concatenate(found), _attention(products[0], products[1], products[2], scale)


def _inputs(random: np.random.Generator) -> FloatArray:
    """Rows whose numbers are exact as int8 codes."""
    codes = random.integers(-127, 128, (_POSITIONS, _WIDTH)).astype(np.float32)
    codes[:, ::32] = 127
    return codes * np.float32(1 / 64)


def _random_q8_0(random: np.random.Generator, rows: int, columns: int) -> tuple[NDArray[np.uint8], FloatArray]:
    """A matrix in Q8_0 of GGUF, and its numbers."""
    codes = random.integers(-127, 128, (rows, columns // 32, 32), np.int8)
    scales = random.uniform(0.5, 1.5, (rows, columns // 32, 1)).astype(np.float16) / np.float16(512)
    data = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=2).reshape(-1)
    return data, (codes * scales.astype(np.float32)).reshape(rows, columns)


def _attention(queries: FloatArray, keys: FloatArray, values: FloatArray, scale: float) -> FloatArray:
    """Causal attention of heads that share their keys, in float32."""
    rows = len(queries)
    scores = scale * np.einsum("qhd,kd->hqk", queries.reshape(rows, _HEADS, _SIZE), keys)
    scores += np.triu(np.full((rows, rows), -np.inf, np.float32), 1)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.asarray(np.einsum("hqk,kd->qhd", weights, values).reshape(rows, _HEADS * _SIZE), np.float32)


class _BorrowedDevice:
    """A device whose memory is freed after the check, with graphs only if asked; a wrapper of the device."""

    def __init__(self, device: CudaDevice, *, captures: bool) -> None:
        self._device = device
        self._captures = captures
        self._addresses: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def allocate(self, num_bytes: int) -> int:
        self._addresses.append(self._device.allocate(num_bytes))
        return self._addresses[-1]

    def free(self, address: int) -> None:
        self._addresses.remove(address)
        self._device.free(address)

    def free_all(self) -> None:
        for address in list(self._addresses):
            self.free(address)

    def prepare(self, first: Sequence[KernelKey], _every: object, progress: ProgressCallback | None) -> None:
        # The check uses two batch sizes only.
        self._device.prepare(first, (), progress)

    def capture(self, steps: Sequence[Step]) -> Callable[[], None]:
        return self._device.capture(steps) if self._captures else lambda: self._device.run(steps)

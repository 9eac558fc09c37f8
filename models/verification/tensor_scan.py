"""Checks of every weight: what samples tell, of all values, and blocks that are far larger than those around them."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import LocalinferError
from localinfer.models.verification.finding import Finding
from localinfer.models.verification.tensor_samples import SAMPLED_TYPES, TensorFigures, judge
from localinfer.quant.checkpoint.model_file import ModelFile, read_stretch
from localinfer.quant.formats.reference import dequantize
from localinfer.quant.formats.types import TensorRecord, block_bytes, block_size
from localinfer.types import FloatArray, ProgressCallback

_PIECE_WEIGHTS = 1 << 21
_GROUP = 32
_MOST_TIMES_MEDIAN = 5000.0
"""Single weights of models are up to some hundred times larger than most; a flipped bit of an exponent makes 65,536."""


def check_tensors(file: ModelFile, progress: ProgressCallback | None = None) -> Iterator[Finding]:
    """Read and decode every weight, piece by piece, and yield what they tell; progress: told of MB done.

    Raises: CorruptFileError if the file was changed since it was opened.
    """
    total = sum(info.num_bytes for info in file.tensors.values()) >> 20
    done = 0
    figures = []
    for name, info in file.tensors.items():
        if info.type in SAMPLED_TYPES:
            scan = _Scan(info)
            try:
                for data in _pieces(file, info):
                    scan.add(data)
                    done += data.size
                    if progress is not None:
                        progress("checking weights (MB)", min(done >> 20, total), total)
            except LocalinferError as error:
                if file.has_changed:
                    raise
                yield Finding("weights", f"{name} cannot be read: {error}", is_error=True)
                continue
            figures.append(scan.figures())
            yield from scan.outliers()
    yield from judge(figures)


def _pieces(file: ModelFile, info: TensorRecord) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor in whole blocks."""
    size = max(1, _PIECE_WEIGHTS // block_size(info.type)) * block_bytes(info.type)
    whole = None if file.stretch(info.name) is not None else file.tensor_bytes(info.name).reshape(-1)
    for first in range(0, info.num_bytes, size):
        end = min(first + size, info.num_bytes)
        yield read_stretch(file, info.name, first, end) if whole is None else whole[first:end]


class _Scan:
    """Figures of one tensor, from its blocks in order."""

    def __init__(self, info: TensorRecord) -> None:
        self._info = info
        self._bad = 0
        self._squares = 0.0
        self._count = 0
        self._largest = 0.0
        self._largest_at = 0
        self._medians: list[float] = []

    def add(self, data: NDArray[np.uint8]) -> None:
        """Take the next bytes, whole blocks."""
        count = data.size // block_bytes(self._info.type) * block_size(self._info.type)
        values = dequantize(data, self._info.type, (count,))
        is_finite = np.isfinite(values)
        if not is_finite.all():
            self._bad += int(count - np.count_nonzero(is_finite))
            values = np.where(is_finite, values, np.float32(0))
        # In float64: an F32 tensor may hold 1e30.
        self._squares += float(np.sum(np.square(values, dtype=np.float64)))
        self._look_for_large(np.abs(values))
        self._count += count

    def _look_for_large(self, sizes: FloatArray) -> None:
        groups = sizes[: sizes.size // _GROUP * _GROUP].reshape(-1, _GROUP).max(axis=1)
        if not groups.size:
            return
        self._medians.append(float(np.median(groups)))
        index = int(groups.argmax())
        if groups[index] > self._largest:
            self._largest, self._largest_at = float(groups[index]), self._count + index * _GROUP

    def figures(self) -> TensorFigures:
        """What was found of all values."""
        rms = float(np.sqrt(self._squares / max(1, self._count - self._bad)))
        return TensorFigures(self._info.name, self._info.shape, self._bad, rms, is_whole=True)

    def outliers(self) -> Iterator[Finding]:
        """A group of weights far beyond the others; of matrices."""
        median = float(np.median(self._medians)) if self._medians else 0.0
        if len(self._info.shape) < 2 or not 0 < median * _MOST_TIMES_MEDIAN < self._largest:
            return
        row = self._largest_at // self._info.shape[-1]
        yield Finding(
            "weights outlier",
            f"{self._info.name} has weights of {self._largest:.3g} in row {row}, {self._largest / median:.0f} times "
            "those of other groups, as a flipped bit makes them; download the model again",
        )

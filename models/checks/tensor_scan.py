"""Checks of every weight: what samples tell, of all values and all bytes, and how rows and blocks differ in size."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as NotReady
from dataclasses import dataclass
from math import prod
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import LocalinferError
from localinfer.models.checks import Finding, shortened
from localinfer.models.checks.damage import (
    MATRIX,
    Reader,
    RunFinder,
    hole,
    is_damage,
    judge_copies,
    judge_halves,
    judge_head_order,
    zero_experts,
)
from localinfer.models.checks.tensor_samples import SAMPLED_TYPES, TensorFigures, judge
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile, read_stretch
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorRecord, row_bytes
from localinfer.types import FloatArray, ProgressCallback

_PIECE_WEIGHTS = 1 << 20
_GROUP = 32
_MOST_THREADS = 8
_MOST_TIMES_MEDIAN = 1500.0
"""The size of a group of weights over that of most. Single weights of models are up to some hundred times larger than
most, which makes their group twenty; a flipped bit of an exponent makes a weight 65,536 and its group 11,000."""
_MOST_TIMES_AROUND, _MOST_TIMES_ALONE = 60.0, 600.0
"""The same over what is usual in a group's row, and in its column, if there are some such, and for a single one."""
_FEW = 3
_MOST_TIMES_ROWS = 200.0
_LEAST_SHARE = 8
_AGAIN = "download the model again"


@dataclass(frozen=True)
class TensorScan:
    """Result of reading every value and byte of a tensor.

    row_rms: float64[rows], of the finite values, the rows of all experts one after the other. findings: about the
    tensor alone.
    """

    figures: TensorFigures
    row_rms: NDArray[np.float64]
    findings: tuple[Finding, ...]


def check_tensors(
    file: ModelFile, progress: ProgressCallback | None = None, config: ModelConfig | None = None
) -> Iterator[Finding]:
    """Read and decode every weight, on all cores, and yield what they tell.

    progress: called with MB done. config: of the model, unless the file is run by none of its own.
    Raises: CorruptFileError if the file was changed since it was opened.
    """
    infos = [info for info in file.tensors.values() if info.type in SAMPLED_TYPES]
    total = sum(info.num_bytes for info in infos) >> 20
    scans: list[TensorScan] = []
    unread: list[Finding] = []
    done = [0]
    stopped = Event()
    waiting: deque[tuple[TensorRecord, Future[TensorScan]]] = deque()
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        try:
            for info in [*infos, None]:
                if info is not None:
                    waiting.append((info, pool.submit(_scan, file, info, done, stopped)))
                # Two for each thread are enough to keep it busy, and bound what is held.
                while waiting and (info is None or len(waiting) >= 2 * threads):
                    first, future = waiting[0]
                    try:
                        scans.append(future.result(timeout=0.1))
                        waiting.popleft()
                    except NotReady:
                        pass
                    except LocalinferError as error:
                        if file.has_changed:
                            raise
                        waiting.popleft()
                        unread.append(Finding("weights", f"{first.name} cannot be read: {error}", is_error=True))
                    if progress is not None:
                        progress("checking weights (MB)", min(done[0] >> 20, total), total)
        finally:
            stopped.set()
    own = [finding for one in scans for finding in one.findings]
    yield from shortened([*unread, *own, *_compare(scans)])
    if config is not None:
        yield from judge_head_order({one.figures.name: one.row_rms for one in scans}, config)


def _compare(scans: Sequence[TensorScan]) -> Iterator[Finding]:
    """Compare tensors with each other."""
    yield from judge([one.figures for one in scans])
    yield from judge_copies((one.figures.name, one.row_rms.tobytes()) for one in scans if one.figures.rms > 0)
    halves: dict[str, list[tuple[str, float]]] = {}
    for one in scans:
        found, half = MATRIX.fullmatch(one.figures.name), len(one.row_rms) // 2
        if found is not None and half and not one.figures.bad_values:
            first, second = np.median(one.row_rms[:half]), np.median(one.row_rms[half:])
            if first > 0 and second > 0:
                halves.setdefault(found[2], []).append((one.figures.name, float(second / first)))
    for members in halves.values():
        yield from judge_halves(members)


def _scan(file: ModelFile, info: TensorRecord, done: list[int], stopped: Event) -> TensorScan:
    """Read one tensor. done: MB of all, which this adds to; stopped: the result is not wanted any more."""
    whole = None if file.stretch(info.name) is not None else file.tensor_bytes(info.name).reshape(-1)

    def read(start: int, end: int) -> NDArray[np.uint8]:
        return read_stretch(file, info.name, start, end) if whole is None else whole[start:end]

    scan = _Scan(info)
    row = row_bytes(info.type, info.shape[-1])
    size = max(1, _PIECE_WEIGHTS // info.shape[-1]) * row
    for first in range(0, info.num_bytes, size):
        if stopped.is_set():
            break
        data = read(first, min(first + size, info.num_bytes))
        scan.add(data)
        done[0] += data.size
    findings: list[Finding] = []
    if not stopped.is_set() and scan.has_values:
        # Of what is damaged the first line that explains it is enough.
        findings = list(scan.experts()) or list(_check_bytes(info, scan.runs, read)) or list(scan.damage())
    return TensorScan(scan.figures(), scan.row_rms(), tuple(findings))


def _check_bytes(info: TensorRecord, runs: RunFinder, read: Reader) -> Iterator[Finding]:
    """The largest stretch of one word, or else the largest that lies there twice."""
    all_rows = MATRIX.fullmatch(info.name) is not None
    for found in (runs.runs(), runs.repeats(read)):
        broken = [run for run in found if is_damage(run, info, all_rows=all_rows)]
        if broken:
            yield hole(info, max(broken, key=lambda run: run.end - run.start))
            return


class _Scan:
    """Figures of one tensor, from its rows in order."""

    def __init__(self, info: TensorRecord) -> None:
        self._info = info
        self._bad = 0
        self._squares: list[NDArray[np.float64]] = []
        self._groups: list[FloatArray] = []
        self._largest, self._largest_row, self._rows = 0.0, 0, 0
        self.runs = RunFinder()

    def add(self, data: NDArray[np.uint8]) -> None:
        """Take the next bytes, whole rows."""
        columns = self._info.shape[-1]
        shape = (data.size // row_bytes(self._info.type, columns), columns)
        values = dequantize(data, self._info.type, shape)
        with np.errstate(over="ignore", invalid="ignore"):
            groups, rest = _squares(values)
        if not (np.isfinite(groups).all() and np.isfinite(rest).all()):
            is_finite = np.isfinite(values)
            self._bad += int(values.size - np.count_nonzero(is_finite))
            # In float64: an F32 tensor may hold 1e30.
            groups, rest = _squares(np.where(is_finite, values, np.float32(0)).astype(np.float64))
        self._squares.append(groups.sum(axis=1, dtype=np.float64) + rest)
        if len(self._info.shape) > 1:
            self._groups.append(np.sqrt(groups / _GROUP).astype(np.float32))
            self.runs.add(data)
            largest = max(float(values.max()), -float(values.min()))
            if largest > self._largest:
                row, _ = np.unravel_index(int(np.abs(values).argmax()), shape)
                self._largest, self._largest_row = largest, self._rows + int(row)
        self._rows += shape[0]

    def row_rms(self) -> NDArray[np.float64]:
        """float64[rows]."""
        found: NDArray[np.float64] = np.sqrt(np.concatenate(self._squares) / self._info.shape[-1])
        return found

    def figures(self) -> TensorFigures:
        """Figures of all values."""
        count = max(1, prod(self._info.shape) - self._bad)
        rms = float(np.sqrt(sum(float(one.sum()) for one in self._squares) / count))
        return TensorFigures(self._info.name, self._info.shape, self._bad, rms, is_whole=True)

    @property
    def has_values(self) -> bool:
        """Return whether there is any weight but zeros."""
        return any(one.any() for one in self._squares)

    def experts(self) -> Iterator[Finding]:
        """Experts without weights, or with those of others."""
        info = self._info
        if len(info.shape) < 3:
            return
        experts = self.row_rms().reshape(info.shape[0], -1)
        empty = np.flatnonzero(~experts.any(axis=1)).tolist()
        if empty:
            yield zero_experts(info, empty)
        firsts: dict[bytes, int] = {}
        alike = [firsts.setdefault(one.tobytes(), number) for number, one in enumerate(experts) if one.any()]
        if len(firsts) < len(alike):
            yield Finding(
                "weights copied",
                f"{info.name} has {len(firsts)} different experts in {len(alike)}, the others are copies; {_AGAIN}, or "
                "get another conversion",
            )

    def damage(self) -> Iterator[Finding]:
        """Weights far beyond those around them, and parts without weights; of matrices."""
        if len(self._info.shape) < 2:
            return
        rows, groups = self.row_rms(), np.concatenate(self._groups)
        if not self._bad:
            yield from self._check_large(rows, groups)
        if MATRIX.fullmatch(self._info.name) is not None and len(self._info.shape) < 3:
            yield from self._check_empty(rows, groups)

    def _check_large(self, rows: NDArray[np.float64], groups: FloatArray) -> Iterator[Finding]:
        name = self._info.name
        median = float(np.median(groups)) if groups.size else 0.0
        usual = float(np.median(rows))
        if 0 < median * _MOST_TIMES_MEDIAN < float(groups.max(initial=0.0)):
            yield Finding(
                "weights outlier",
                f"{name} has weights of {self._largest:.3g} in row {self._largest_row}, {self._largest / median:.0f} "
                f"times those of other groups, as a flipped bit makes them; {_AGAIN}",
            )
        elif 0 < usual * _MOST_TIMES_ROWS < rows.max():
            row = int(rows.argmax())
            yield Finding(
                "weights outlier",
                f"row {row} of {name} is {rows[row] / usual:.0f} times larger than most of its rows; {_AGAIN}, or get "
                "another conversion",
            )
        elif min(groups.shape) > 1 and float(groups.max()) > _MOST_TIMES_AROUND * median:
            around = np.maximum(np.median(groups, axis=1)[:, None], np.median(groups, axis=0))
            with np.errstate(divide="ignore", invalid="ignore"):
                times = np.where(around > 0, groups / around, 0)
            num_far, most = int(np.count_nonzero(times > _MOST_TIMES_AROUND)), float(times.max())
            if num_far >= _FEW or most > _MOST_TIMES_ALONE:
                row = int(times.argmax()) // times.shape[1]
                yield Finding(
                    "weights outlier",
                    f"{name} has {num_far} blocks that are far larger than others of their row and column, the largest "
                    f"{most:.0f} times in row {row}, as flipped bits make them; {_AGAIN}",
                )

    def _check_empty(self, rows: NDArray[np.float64], groups: FloatArray) -> Iterator[Finding]:
        info = self._info
        way_out = f"{_AGAIN}, or get another conversion"
        if np.count_nonzero(rows == 0) * _LEAST_SHARE >= rows.size:
            yield Finding(
                "weights zero",
                f"{np.count_nonzero(rows == 0)} of {rows.size} rows of {info.name} are zero, so part of it does "
                f"nothing; {way_out}",
            )
        columns = groups.max(axis=0, initial=0.0)
        half = columns.size // 2
        if np.count_nonzero(columns == 0) * _LEAST_SHARE >= columns.size > 1:
            yield Finding(
                "weights zero",
                f"{_GROUP * np.count_nonzero(columns == 0)} of {info.shape[-1]} columns of {info.name} are zero, so "
                f"what they are multiplied with is lost; {way_out}",
            )
        elif columns.size > 1 and columns.size % 2 == 0 and (groups[:, :half] == groups[:, half:]).all():
            yield Finding("weights copied", f"one half of the columns of {info.name} is a copy of the other; {way_out}")


def _squares(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Sums of the squares of each 32 columns, [rows, columns / 32], and of the columns that are left over, [rows]."""
    rows, columns = values.shape
    whole = columns // _GROUP * _GROUP
    parts, rest = values[:, :whole].reshape(rows, -1, _GROUP), values[:, whole:]
    return np.einsum("ijk,ijk->ij", parts, parts), np.einsum("ij,ij->i", rest, rest).astype(np.float64)

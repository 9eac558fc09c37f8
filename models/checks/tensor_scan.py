"""Checks of every weight: what samples tell, of all values and all bytes, and how rows and blocks differ in size.

A pair of rows turns with one frequency, and training gives both about the same size, which changes little from one
frequency to the next. So the sizes of rows tell the order that they are in: whole conversions have been published with
the rows of each head in the order of Hugging Face where GGUF has pairs, or permuted twice.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as NotReady
from dataclasses import dataclass
from math import prod
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import LocalinferError
from localinfer.kernels.ops import Pairing
from localinfer.models.checks import Finding, shortened
from localinfer.models.checks.tensor_samples import (
    LEAST_BYTES,
    MATRIX,
    SAMPLED_TYPES,
    WORD,
    ByteRun,
    Reader,
    TensorFigures,
    equal_around,
    hole,
    is_damage,
    judge,
    judge_copies,
    judge_halves,
    zero_experts,
)
from localinfer.models.decoder.architecture import QueryKeyNorm
from localinfer.models.decoder.architectures import find_architecture
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
_SAMPLED = np.uint64(255)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LEAST_ANCHORS = 4
_MOST_ANCHORS = 1 << 21


Taker = Callable[[str, NDArray[np.uint8]], object]


class RunFinder:
    """Finds runs in a tensor's bytes, given piece after piece, at some 300 MB a second."""

    def __init__(self) -> None:
        self._size = 0
        self._tail = np.empty(0, np.uint8)
        self._open: ByteRun | None = None
        self._runs: list[ByteRun] = []
        self._words: list[NDArray[np.uint64]] = []
        self._places: list[NDArray[np.int64]] = []
        self._num_anchors = 0

    def add(self, data: NDArray[np.uint8]) -> None:
        """Take the next bytes."""
        start = self._size - len(self._tail)
        data = np.concatenate([self._tail, data]) if len(self._tail) else np.ascontiguousarray(data)
        whole = len(data) // WORD * WORD
        self._find_words(data[:whole], start)
        if self._num_anchors < _MOST_ANCHORS:
            self._find_anchors(data, start)
        self._tail = data[whole:].copy()
        self._size = start + len(data)

    def _find_words(self, data: NDArray[np.uint8], start: int) -> None:
        """Runs of words that are equal, on a grid of words from the tensor's start."""
        words = data.view(np.uint64)
        if not words.size:
            return
        edges = np.flatnonzero(words[1:] != words[:-1]) + 1
        bounds = np.concatenate([[0], edges, [words.size]])
        long = np.flatnonzero(np.diff(bounds) * WORD >= LEAST_BYTES // 2)
        # The first and the last may continue in other pieces.
        for index in sorted({*long.tolist(), 0, len(bounds) - 2}):
            first, last = int(bounds[index]), int(bounds[index + 1])
            self._extend(ByteRun(start + first * WORD, start + last * WORD, words[first].tobytes()))

    def _extend(self, run: ByteRun) -> None:
        before = self._open
        if before is not None and before.end == run.start and before.word == run.word:
            run = ByteRun(before.start, run.end, run.word)
        elif before is not None and before.end - before.start >= LEAST_BYTES:
            self._runs.append(before)
        self._open = run

    def _find_anchors(self, data: NDArray[np.uint8], start: int) -> None:
        """Remember one word in some hundred, chosen by what it is, so that a copy at any even distance has the same."""
        for phase in range(start % 2, WORD, 2):
            part = data[phase : phase + (len(data) - phase) // WORD * WORD].view(np.uint64)
            with np.errstate(over="ignore"):
                mixed = part * _MIX
            chosen = np.flatnonzero((mixed >> np.uint64(56)) == _SAMPLED)
            self._words.append(part[chosen])
            self._places.append(start + phase + chosen * WORD)
            self._num_anchors += chosen.size

    def runs(self) -> list[ByteRun]:
        """Stretches of one word, all bytes taken."""
        if self._open is not None and self._open.end - self._open.start >= LEAST_BYTES:
            self._runs.append(self._open)
        self._open = None
        return self._runs

    def repeats(self, read: Reader) -> Iterator[ByteRun]:
        """Stretches that are equal to what lies a distance before them, of which some anchors tell.

        read: gives the bytes again, to compare them.
        """
        if not self._words:
            return
        words, positions = np.concatenate(self._words), np.concatenate(self._places)
        order = np.lexsort((positions, words))
        words, positions = words[order], positions[order]
        is_again = words[1:] == words[:-1]
        later, distances = positions[1:][is_again], np.diff(positions)[is_again]
        # A word that fills a stretch is an anchor everywhere in it.
        is_far = distances >= 64
        later, distances = later[is_far], distances[is_far]
        found, counts = np.unique(distances, return_counts=True)
        for distance in found[counts >= _LEAST_ANCHORS][:16].tolist():
            at = np.sort(later[distances == distance])
            end = -1
            for position in at[:: max(1, at.size // 64)].tolist():
                if position < end:
                    continue
                run = equal_around(read, self._size, position, distance)
                end = run.end
                yield run


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
    file: ModelFile,
    progress: ProgressCallback | None = None,
    config: ModelConfig | None = None,
    take: Taker | None = None,
) -> Iterator[Finding]:
    """Read and decode every weight, on all cores, and yield what they tell.

    progress: called with MB done. config: of the model, unless the file is run by none of its own. take: called with
    names of tensors and their bytes, piece after piece, of several tensors at once.
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
                    waiting.append((info, pool.submit(_scan, file, info, done, stopped, take)))
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


def _scan(file: ModelFile, info: TensorRecord, done: list[int], stopped: Event, take: Taker | None) -> TensorScan:
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
        if take is not None:
            take(info.name, data)
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


_LEAST_HEAD_DIM = 32
_LEAST_PAIRS = 350
_PAIRED, _OPPOSED = 0.2, -0.1
"""Correlations of the rows of a pair: 0.3 to 0.8 in trained models, -0.5 to 0 where rows are taken for a pair that are
none, and with so many pairs within 0.15 of 0 where there is no order."""
_LEAST_RATIO = 0.6


def judge_head_order(row_rms: Mapping[str, NDArray[np.float64]], config: ModelConfig) -> Iterator[Finding]:
    """Yield that heads are permuted. row_rms: float64[rows] of each tensor, by its name."""
    wrong: dict[str, list[str]] = {}
    for kind in ("q", "k"):
        sizes = _head_sizes(row_rms, config, kind)
        order = None if sizes is None else _other_order(sizes, find_architecture(config).pairing)
        if order is not None:
            wrong.setdefault(order, []).append(f"attn_{kind}")
    for order, names in wrong.items():
        yield Finding(
            "head order",
            f"the rows of {' and '.join(names)} {order}, so {config.architecture} pairs rows that are none: positions "
            "are lost on it; get a current conversion of the model",
        )


def _other_order(sizes: NDArray[np.float64], pairing: Pairing) -> str | None:
    """The order that rows are in if it is another than a pairing wants."""
    adjacent, halves = _correlation(sizes, 1), _correlation(sizes, sizes.shape[1] // 2)
    if pairing is Pairing.HALVES:
        is_opposed = halves < _OPPOSED and adjacent > _PAIRED
        return "are permuted as Llama's are" if is_opposed else None
    if adjacent < _OPPOSED and _correlation(_unpermuted(sizes), 1) > _PAIRED:
        return "were permuted twice"
    if halves > max(_PAIRED, _LEAST_RATIO * adjacent):
        return "lie in halves of a head, as Hugging Face has them"
    return None


def _head_sizes(
    row_rms: Mapping[str, NDArray[np.float64]], config: ModelConfig, kind: str
) -> NDArray[np.float64] | None:
    """Logarithms of the sizes of the rows of queries ("q") or keys ("k"), float64[heads of all layers, head_dim], less
    the mean of each head; None where the order cannot be told: with other heads, norms of queries, or too few."""
    dim, architecture = config.head_dim, find_architecture(config)
    has_norms = architecture.query_key_norm is not QueryKeyNorm.NONE or architecture.unweighted_query_key_norm
    if has_norms or config.rope.rotary_size != dim or dim < _LEAST_HEAD_DIM or config.windowed_head_dim:
        return None
    found = []
    for layer, count in enumerate(config.num_heads if kind == "q" else config.num_kv_heads):
        rows = row_rms.get(f"blk.{layer}.attn_{kind}.weight")
        has_rope = architecture.has_rope[layer] if architecture.has_rope else True
        if has_rope and rows is not None and len(rows) == count * dim and (rows > 0).all():
            found.append(np.log(rows).reshape(count, dim))
    if sum(one.size for one in found) < 2 * _LEAST_PAIRS:
        return None
    sizes = np.concatenate(found)
    centred: NDArray[np.float64] = sizes - sizes.mean(axis=1, keepdims=True)
    return centred


def _correlation(sizes: NDArray[np.float64], distance: int) -> float:
    """Correlation of a head's rows that lie a distance apart, in pairs."""
    heads, dim = sizes.shape
    pairs = sizes.reshape(heads, dim // (2 * distance), 2, distance)
    spread = float(np.mean(sizes**2))
    return float(np.mean(pairs[:, :, 0] * pairs[:, :, 1])) / spread if spread else 0.0


def _unpermuted(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Undo one permutation from halves to pairs."""
    heads, dim = sizes.shape
    return np.ascontiguousarray(sizes.reshape(heads, dim // 2, 2).swapaxes(1, 2)).reshape(heads, dim)

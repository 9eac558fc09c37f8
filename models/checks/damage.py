"""Damage in weights: holes and repeated stretches of bytes, blocks that other layers' do not resemble, permuted heads.

Trained weights, in whatever type, repeat no word of 8 bytes over kilobytes. Intended repetitions end where
rows end: rows of tokens that are not used, experts that are alike.

As many blocks of every matrix are read, spread over all of it, all of a type decoded at once: some milliseconds for a
few hundred matrices whose bytes are in memory.

A pair of rows turns with one frequency, and training gives both about the same size, which changes little from one
frequency to the next. So the sizes of rows tell the order that they are in: whole conversions have been published with
the rows of each head in the order of Hugging Face where GGUF has pairs, or permuted twice.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import Pairing
from localinfer.models.checks import Finding
from localinfer.models.decoder.architecture import QueryKeyNorm
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorRecord, TensorType, block_bytes, block_size, row_bytes
from localinfer.quant.gguf.mapped_file import FileStretch, MappedFile

_WORD = 8
_LEAST_BYTES = 1024
_LEAST_RUN_SHARE = 8
"""One part in so many of a matrix's rows: fewer of zeros may be neurons that were pruned."""
_SLACK = 8
"""Bytes by which a run may reach into the next row, whose first are like it by chance."""
_LEAST_COLUMNS = 64
"""Narrower tensors are of decays and convolutions, which may begin alike in all rows, and stay so."""
_LOOK = 1 << 16
_SAMPLED = np.uint64(255)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LEAST_ANCHORS = 4
_MOST_ANCHORS = 1 << 21

Reader = Callable[[int, int], NDArray[np.uint8]]
"""Gives the bytes of a tensor from one position to another."""


@dataclass(frozen=True)
class ByteRun:
    """A stretch of a tensor's bytes that holds one word of 8 bytes, or, with a distance, what lies so far before it."""

    start: int
    end: int
    word: bytes = b""
    distance: int = 0


def is_one_word(data: NDArray[np.uint8]) -> bool:
    """Return whether bytes, 16 or more, repeat their first two."""
    return bool((data[2:] == data[:-2]).all())


def run_around(read: Reader, size: int, first: int) -> ByteRun:
    """Extend the word at a position in both directions; size: of the tensor in bytes."""
    found = _equal_around(read, size, first + _WORD, _WORD)
    return ByteRun(found.start - _WORD, found.end, read(first, first + _WORD).tobytes())


def is_damage(run: ByteRun, info: TensorRecord, *, all_rows: bool) -> bool:
    """Return whether a run is none that a model has on purpose: it ends within a row, or is a large share of a matrix.

    all_rows: the model needs all rows of this tensor, as it does not those of tables and of types.
    """
    if len(info.shape) < 2 or info.shape[-1] < _LEAST_COLUMNS:
        return False
    row, length = row_bytes(info.type, info.shape[-1]), run.end - run.start
    if length < max(_LEAST_BYTES, row):
        return False
    if any(min(position % row, -position % row) > _SLACK for position in (run.start, run.end)):
        return True
    return all_rows and run.distance == 0 and length * _LEAST_RUN_SHARE >= info.num_bytes


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
        whole = len(data) // _WORD * _WORD
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
        long = np.flatnonzero(np.diff(bounds) * _WORD >= _LEAST_BYTES // 2)
        # The first and the last may go on in other pieces.
        for index in sorted({*long.tolist(), 0, len(bounds) - 2}):
            first, last = int(bounds[index]), int(bounds[index + 1])
            self._extend(ByteRun(start + first * _WORD, start + last * _WORD, words[first].tobytes()))

    def _extend(self, run: ByteRun) -> None:
        before = self._open
        if before is not None and before.end == run.start and before.word == run.word:
            run = ByteRun(before.start, run.end, run.word)
        elif before is not None and before.end - before.start >= _LEAST_BYTES:
            self._runs.append(before)
        self._open = run

    def _find_anchors(self, data: NDArray[np.uint8], start: int) -> None:
        """Remember one word in some hundred, chosen by what it is, so that a copy at any even distance has the same."""
        for phase in range(start % 2, _WORD, 2):
            part = data[phase : phase + (len(data) - phase) // _WORD * _WORD].view(np.uint64)
            with np.errstate(over="ignore"):
                mixed = part * _MIX
            chosen = np.flatnonzero((mixed >> np.uint64(56)) == _SAMPLED)
            self._words.append(part[chosen])
            self._places.append(start + phase + chosen * _WORD)
            self._num_anchors += chosen.size

    def runs(self) -> list[ByteRun]:
        """Stretches of one word, all bytes taken."""
        if self._open is not None and self._open.end - self._open.start >= _LEAST_BYTES:
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
                run = _equal_around(read, self._size, position, distance)
                end = run.end
                yield run


def _equal_around(read: Reader, size: int, position: int, distance: int) -> ByteRun:
    """Extend a stretch of bytes that equal those a distance before, in both directions."""
    start = end = position
    while start > distance:
        low = max(distance, start - _LOOK)
        differs = np.flatnonzero(read(low, start) != read(low - distance, start - distance))
        start = low + (int(differs[-1]) + 1 if differs.size else 0)
        if differs.size:
            break
    while end < size:
        high = min(size, end + _LOOK)
        differs = np.flatnonzero(read(end, high) != read(end - distance, high - distance))
        end = end + int(differs[0]) if differs.size else high
        if differs.size:
            break
    return ByteRun(start, end, distance=distance)


TABLES = ("token_embd.weight", "output.weight", "position_embd.weight", "per_layer_token_embd.weight")
"""Tensors of which a text reads single rows, so that a model with some broken ones works with others."""
MATRIX = re.compile(r"blk\.(\d+)\.((?:attn_(?:q|k|v|qkv|output)|ffn_(?:gate|up|down))(?:_exps|_shexp)?)\.weight")
"""Matrices that are alike in the layers of a model."""
_AGAIN = "download the model again"
_SPOT_WEIGHTS = 64
_MOST_SPOTS, _MOST_WEIGHTS, _FEWEST, _LARGEST = 3072, 400_000, 8, 32
"""Blocks and weights in all, and blocks of a matrix: 30 ms of one core at most for some hundred matrices."""
_STRIDE = 0.6180339887
"""Stride of the positions within their stretches, so that no two blocks lie in the same column."""
_MOST_TIMES = 1000.0
"""A block's size over that of most blocks of its matrix; trained ones reach some ten."""
_MOST_HALVES = 4.0
"""Ratio of a matrix's halves in size, over that in the other layers."""
_LEAST_LAYERS = 4
_LEAST_SHARE = 8


@dataclass(frozen=True)
class BlockGrid:
    """Blocks of matrices of one type, as many of each."""

    tensors: list[TensorRecord]
    starts: NDArray[np.int64]
    """int64[matrices, spots], positions in their tensor, in bytes."""
    data: NDArray[np.uint8]
    """uint8[matrices, spots, bytes]."""
    rms: NDArray[np.float64]
    """float64[matrices, spots], of the finite values."""
    bad: NDArray[np.int64]
    """int64[matrices], number of values that are not finite."""
    weights: int

    def spread(self, index: int) -> float:
        """The root of the mean square of a matrix's blocks."""
        return float(np.sqrt(np.mean(self.rms[index] ** 2)))


def read_grids(file: ModelFile, infos: Sequence[TensorRecord]) -> list[BlockGrid]:
    """Read and decode blocks of the matrices among tensors that are large enough, and lie in the file as they are.

    Raises: CorruptFileError if the file was changed since it was opened.
    """
    members: dict[TensorType, list[tuple[TensorRecord, FileStretch]]] = {}
    matrices = [info for info in infos if len(info.shape) > 1]
    weights = sum(max(_SPOT_WEIGHTS, block_size(info.type)) for info in matrices)
    count = min(_MOST_SPOTS // max(1, len(matrices)), _MOST_WEIGHTS // max(1, weights))
    count = min(_LARGEST, max(_FEWEST, count))
    for info in matrices:
        stretch = file.stretch(info.name)
        if stretch is not None and prod(info.shape) >= count * max(_SPOT_WEIGHTS, block_size(info.type)):
            members.setdefault(info.type, []).append((info, stretch))
    return [_grid(type, found, count) for type, found in members.items()]


def _grid(type: TensorType, members: list[tuple[TensorRecord, FileStretch]], count: int) -> BlockGrid:
    per_block, size = block_size(type), block_bytes(type)
    length = max(1, _SPOT_WEIGHTS // per_block)
    order = np.arange(count)
    positions = (order + np.modf(order * _STRIDE + 0.37)[0]) / count
    num_blocks = np.array([info.num_bytes // size for info, _ in members])
    starts = (positions * (num_blocks - length)[:, None]).astype(np.int64) * size
    data = np.empty((len(members), count, length * size), np.uint8)
    wanted: dict[MappedFile, list[tuple[int, memoryview]]] = {}
    for index, (_, stretch) in enumerate(members):
        parts = wanted.setdefault(stretch.file, [])
        parts += [(stretch.start + start, data[index, spot].data) for spot, start in enumerate(starts[index].tolist())]
    for source, parts in wanted.items():
        source.read_into(parts)
    shape = (len(members), count, length * per_block)
    values = dequantize(data.reshape(-1), type, (prod(shape),)).reshape(shape)
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, 0).astype(np.float64)
    return BlockGrid(
        [info for info, _ in members],
        starts,
        data,
        np.sqrt(np.mean(finite * finite, axis=2)),
        np.sum(~is_finite, axis=(1, 2)),
        shape[2],
    )


def check_grids(file: ModelFile, grids: Iterable[BlockGrid]) -> Iterator[Finding]:
    """Yield the damage that blocks of matrices show."""
    grids = list(grids)
    for grid in grids:
        middle = np.median(grid.rms, axis=1)
        is_suspect = (grid.rms == 0).any(axis=1) | (grid.data == grid.data[:, :, :1]).all(axis=2).any(axis=1)
        is_suspect |= (grid.data[:, :, 2:] == grid.data[:, :, :-2]).all(axis=2).any(axis=1)
        for index in np.flatnonzero(is_suspect & (grid.rms > 0).any(axis=1)).tolist():
            yield from _check_empty(file, grid, index)
        is_far = (middle > 0) & (grid.rms.max(axis=1) > _MOST_TIMES * middle) & (grid.bad == 0)
        for index in np.flatnonzero(is_far).tolist():
            spot = int(grid.rms[index].argmax())
            info = grid.tensors[index]
            yield Finding(
                "weights outlier",
                f"{info.name} has weights {grid.rms[index, spot] / middle[index]:.0f} times larger in row "
                f"{_row(info, int(grid.starts[index, spot]))} than in most: its bytes are others than they were; "
                f"{_AGAIN}",
            )
    yield from _check_halves(grids)
    yield from _check_copies(grids)


def _row(info: TensorRecord, position: int) -> int:
    return position // row_bytes(info.type, info.shape[-1])


def _check_empty(file: ModelFile, grid: BlockGrid, index: int) -> Iterator[Finding]:
    """Look closer at blocks of zeros, or of one word."""
    info = grid.tensors[index]
    stretch = file.stretch(info.name)
    assert stretch is not None, "blocks were read from it"
    all_rows = MATRIX.fullmatch(info.name) is not None

    def read(start: int, end: int) -> NDArray[np.uint8]:
        data = np.empty(end - start, np.uint8)
        stretch.read_into([(start, data.data)])
        return data

    is_zero = grid.rms[index] == 0
    if len(info.shape) > 2:
        experts = np.unique(grid.starts[index][is_zero] // (info.num_bytes // info.shape[0]))
        empty = [int(one) for one in experts if _is_zero_expert(read, info, int(one))]
        if empty:
            yield zero_experts(info, empty)
            return
    for spot in range(is_zero.size):
        if is_one_word(grid.data[index, spot]):
            run = run_around(read, info.num_bytes, int(grid.starts[index, spot]))
            if is_damage(run, info, all_rows=all_rows):
                yield hole(info, run)
                return
    if all_rows and is_zero.sum() * _LEAST_SHARE > is_zero.size:
        yield Finding(
            "weights zero",
            f"{info.name} is zero in {is_zero.sum()} of {is_zero.size} sampled blocks, so part of it does nothing; "
            f"{_AGAIN}, or get another conversion",
        )


def _is_zero_expert(read: Reader, info: TensorRecord, expert: int) -> bool:
    size, block = info.num_bytes // info.shape[0], block_bytes(info.type)
    for spot in range(16):
        start = expert * size + (size // block * (2 * spot + 1) // 32) * block
        if np.any(dequantize(read(start, start + block), info.type, (block_size(info.type),))):
            return False
    return True


def zero_experts(info: TensorRecord, experts: Sequence[int]) -> Finding:
    """The finding of experts without weights."""
    named = ", ".join(map(str, experts[:4])) + (f" and {len(experts) - 4} more" if experts[4:] else "")
    return Finding(
        "weights zero",
        f"{info.name} is zero in expert {named} of {info.shape[0]}, which then answers nothing; {_AGAIN}, or get "
        "another conversion",
    )


def hole(info: TensorRecord, run: ByteRun) -> Finding:
    """The finding of a stretch of one word, or of one that lies there twice."""
    length, row = run.end - run.start, _row(info, run.start)
    if run.distance:
        what = f"holds the same {_bytes(length)} twice, {_bytes(run.distance)} apart, the second time from row {row} on"
    else:
        word = "zeros" if not any(run.word) else f"the bytes {run.word[:4].hex(' ')}"
        what = f"holds nothing but {word} in {_bytes(length)} from row {row} on"
    return Finding(
        "weights hole", f"{info.name} {what}, as a broken download or disk leaves it; {_AGAIN}, or copy it again"
    )


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 10 << 20 else f"{size >> 10} KiB" if size >= 10 << 10 else f"{size} bytes"


def halves_differ(name: str, ratio: float) -> Finding:
    """The finding of a matrix of which one half has another scale."""
    larger = "second" if ratio > 1 else "first"
    return Finding(
        "weights halves",
        f"the {larger} half of {name} is {max(ratio, 1 / ratio):.0f} times larger than the other, which it is in no "
        f"other layer; {_AGAIN}, or get another conversion",
    )


def _check_halves(grids: Sequence[BlockGrid]) -> Iterator[Finding]:
    ratios: dict[str, list[tuple[str, float]]] = {}
    for grid in grids:
        half = grid.rms.shape[1] // 2
        first, second = np.median(grid.rms[:, :half], axis=1), np.median(grid.rms[:, half:], axis=1)
        for info, one, other in zip(grid.tensors, first.tolist(), second.tolist(), strict=True):
            found = MATRIX.fullmatch(info.name)
            if found is not None and one > 0 and other > 0 and np.isfinite(other / one):
                ratios.setdefault(found[2], []).append((info.name, other / one))
    for members in ratios.values():
        yield from judge_halves(members)


def judge_halves(members: Sequence[tuple[str, float]]) -> Iterator[Finding]:
    """Compare how the halves of one kind's matrices differ. members: name, and second half over first."""
    if len(members) < _LEAST_LAYERS:
        return
    middle = float(np.median([ratio for _, ratio in members]))
    for name, ratio in members:
        if not middle / _MOST_HALVES <= ratio <= middle * _MOST_HALVES:
            yield halves_differ(name, ratio)


def _check_copies(grids: Sequence[BlockGrid]) -> Iterator[Finding]:
    yield from judge_copies(
        (info.name, grid.data[index].tobytes())
        for grid in grids
        for index, info in enumerate(grid.tensors)
        if grid.rms[index].any()
    )


def judge_copies(contents: Iterable[tuple[str, bytes]]) -> Iterator[Finding]:
    """Find matrices that are those of another layer; whole layers more than once are what merges of a model with itself
    have. contents: names, and bytes that equal matrices have in common."""
    firsts: dict[tuple[str, bytes], int] = {}
    copies: dict[tuple[int, int], list[str]] = {}
    kinds: Counter[int] = Counter()
    for name, content in contents:
        found = MATRIX.fullmatch(name)
        if found is not None:
            layer = int(found[1])
            kinds[layer] += 1
            first = firsts.setdefault((found[2], content), layer)
            if first != layer:
                copies.setdefault((first, layer), []).append(name)
    whole = [pair for pair, names in copies.items() if len(names) == kinds[pair[1]]]
    for pair, names in copies.items():
        if pair not in whole:
            yield Finding(
                "weights copied",
                f"{names[0]} is the same as in layer {pair[0]}, of which other weights differ, so one of them is "
                f"wrong; {_AGAIN}, or get another conversion",
            )
        elif len(whole) == 1:
            yield Finding(
                "weights copied",
                f"layer {pair[1]} has the weights of layer {pair[0]}, and no other layer is a copy; {_AGAIN}, or get "
                "another conversion",
            )


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

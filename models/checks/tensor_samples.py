"""Checks of a load's samples: some blocks of each tensor, and a few vectors.

As many blocks of every matrix are read, spread over all of it, all of a type decoded at once: some milliseconds for a
few hundred tensors whose bytes are in memory. They show holes of one word, blocks that others do not resemble, and
matrices that are those of another layer. Trained weights, in whatever type, repeat no word of 8 bytes over kilobytes;
intended repetitions end where rows end: rows of tokens that are not used, experts that are alike.

A rule of conversion (signs, offsets of norms) that was forgotten or applied twice shows in every layer, so the vectors
of a few layers are read. Rules: llama.cpp's converter, which files are made by.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checks import Finding, shortened
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorRecord, TensorType, block_bytes, block_size, row_bytes
from localinfer.quant.gguf.mapped_file import FileStretch, MappedFile
from localinfer.types import FloatArray, Record

SAMPLED_TYPES = frozenset(TensorType) - {
    *(TensorType.Q8_1, TensorType.Q8_K),
    *(TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64),
}
"""Types of weights: the others hold activations, or indices."""
_SPOTS = (0.03, 0.37, 0.71)
_FURTHER_SPOTS = tuple(index / 64 for index in range(64))
_SPOT_WEIGHTS = 64
_NEEDED = re.compile(
    r"blk\.\d+\.(?:ffn_gate_inp|ssm_(?:in|out)|attn_(?:q_a|q_b|kv_a_mqa|kv_b|k_b|v_b)|shortconv\.\w+_proj)\.weight"
)
"""Further matrices without which a part of the model does nothing."""
_MOST_TIMES = 12.0
"""Ratio in size of a kind's matrices from layer to layer: up to 4 times in trained models, 14 times where blocks
were read as those of another type."""
_LEAST_LAYERS = 4
_LEAST_SCALE, _MOST_SCALE = 0.02, 60.0
"""Scale of a matrix times the root of its columns: 1 keeps what goes in as large as it is, and models have some 0.2
to 5."""
WORD = 8
"""Bytes whose repetition is a run."""
LEAST_BYTES = 1024
"""Length of the shortest run that is damage."""
_LEAST_RUN_SHARE = 8
"""One part in so many of a matrix's rows: fewer of zeros may be neurons that were pruned."""
_SLACK = 8
"""Bytes by which a run may reach into the next row, whose first are like it by chance."""
_LEAST_COLUMNS = 64
"""Narrower tensors are of decays and convolutions, which may begin alike in all rows, and stay so."""
_LOOK = 1 << 16

Reader = Callable[[int, int], NDArray[np.uint8]]
"""Gives the bytes of a tensor from one position to another."""


class ByteRun(Record):
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
    found = equal_around(read, size, first + WORD, WORD)
    return ByteRun(found.start - WORD, found.end, read(first, first + WORD).tobytes())


def is_damage(run: ByteRun, info: TensorRecord, *, all_rows: bool) -> bool:
    """Return whether a run is none that a model has on purpose: it ends within a row, or is a large share of a matrix.

    all_rows: the model needs all rows of this tensor, as it does not those of tables and of types.
    """
    if len(info.shape) < 2 or info.shape[-1] < _LEAST_COLUMNS:
        return False
    row, length = row_bytes(info.type, info.shape[-1]), run.end - run.start
    if length < max(LEAST_BYTES, row):
        return False
    if any(min(position % row, -position % row) > _SLACK for position in (run.start, run.end)):
        return True
    return all_rows and run.distance == 0 and length * _LEAST_RUN_SHARE >= info.num_bytes


def equal_around(read: Reader, size: int, position: int, distance: int) -> ByteRun:
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
_DOWNLOAD = "download the model again"
_MOST_SPOTS, _MOST_WEIGHTS, _FEWEST, _LARGEST = 3072, 400_000, 8, 32
"""Blocks and weights in all, and blocks of a matrix: 30 ms of one core at most for some hundred matrices."""
_STRIDE = 0.6180339887
"""Stride of the positions within their stretches, so that no two blocks lie in the same column."""
_MOST_TIMES_OTHERS = 1000.0
"""A block's size over that of most blocks of its matrix; trained ones reach some ten."""
_MOST_HALVES = 4.0
"""Ratio of a matrix's halves in size, over that in the other layers."""
_LEAST_SHARE = 8


class BlockGrid(Record):
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
        middle = _medians(grid.rms)
        is_suspect = (grid.rms == 0).any(axis=1) | (grid.data == grid.data[:, :, :1]).all(axis=2).any(axis=1)
        is_suspect |= (grid.data[:, :, 2:] == grid.data[:, :, :-2]).all(axis=2).any(axis=1)
        for index in np.flatnonzero(is_suspect & (grid.rms > 0).any(axis=1)).tolist():
            yield from _check_empty(file, grid, index)
        is_far = (middle > 0) & (grid.rms.max(axis=1) > _MOST_TIMES_OTHERS * middle) & (grid.bad == 0)
        for index in np.flatnonzero(is_far).tolist():
            spot = int(grid.rms[index].argmax())
            info = grid.tensors[index]
            yield Finding(
                "weights outlier",
                f"{info.name} has weights {grid.rms[index, spot] / middle[index]:.0f} times larger in row "
                f"{_row(info, int(grid.starts[index, spot]))} than in most: its bytes are others than they were; "
                f"{_DOWNLOAD}",
            )
    yield from _check_halves(grids)
    yield from _check_copies(grids)


def _medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Medians along the last axis; NumPy's own import a tenth as much as NumPy, for arrays with masks."""
    ordered = np.sort(values, axis=-1)
    count = ordered.shape[-1]
    return np.asarray((ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2)


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
            f"{_DOWNLOAD}, or get another conversion",
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
        f"{info.name} is zero in expert {named} of {info.shape[0]}, which then answers nothing; {_DOWNLOAD}, or get "
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
        "weights hole", f"{info.name} {what}, as a broken download or disk leaves it; {_DOWNLOAD}, or copy it again"
    )


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 10 << 20 else f"{size >> 10} KiB" if size >= 10 << 10 else f"{size} bytes"


def halves_differ(name: str, ratio: float) -> Finding:
    """The finding of a matrix of which one half has another scale."""
    larger = "second" if ratio > 1 else "first"
    return Finding(
        "weights halves",
        f"the {larger} half of {name} is {max(ratio, 1 / ratio):.0f} times larger than the other, which it is in no "
        f"other layer; {_DOWNLOAD}, or get another conversion",
    )


def _check_halves(grids: Sequence[BlockGrid]) -> Iterator[Finding]:
    ratios: dict[str, list[tuple[str, float]]] = {}
    for grid in grids:
        half = grid.rms.shape[1] // 2
        first, second = _medians(grid.rms[:, :half]), _medians(grid.rms[:, half:])
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
    middle = float(_medians(np.array([ratio for _, ratio in members])))
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
                f"wrong; {_DOWNLOAD}, or get another conversion",
            )
        elif len(whole) == 1:
            yield Finding(
                "weights copied",
                f"layer {pair[1]} has the weights of layer {pair[0]}, and no other layer is a copy; {_DOWNLOAD}, or "
                "get another conversion",
            )


class TensorFigures(Record):
    """Figures of a tensor's values."""

    name: str
    shape: tuple[int, ...]
    bad_values: int
    """Number of those that are not finite."""
    rms: float
    """Root mean square of the finite ones."""
    is_whole: bool
    """They are of all values, not of samples."""


def check_samples(file: ModelFile) -> Iterator[Finding]:
    """Yield what a few blocks of each tensor tell; of a folder's tensors those that lie there as they are used.

    Raises: CorruptFileError if the file was changed since it was opened.
    """
    grids = read_grids(file, [info for info in file.tensors.values() if info.type in SAMPLED_TYPES])
    in_grids = {info.name: (grid, index) for grid in grids for index, info in enumerate(grid.tensors)}
    others = {one.name: one for one in sample(file, [name for name in file.tensors if name not in in_grids], _SPOTS)}
    figures = [
        _figures_of(*in_grids[name]) if name in in_grids else others[name]
        for name in file.tensors
        if name in in_grids or name in others
    ]
    yield from shortened([*judge(_again_where_zero(file, figures)), *check_grids(file, grids)])


def _figures_of(grid: BlockGrid, index: int) -> TensorFigures:
    info = grid.tensors[index]
    return TensorFigures(info.name, info.shape, int(grid.bad[index]), grid.spread(index), is_whole=False)


def sample(file: ModelFile, names: Iterable[str], spots: Sequence[float]) -> list[TensorFigures]:
    """The figures of some blocks of tensors that lie in the file as they are. spots: where, from 0 to below 1."""
    taken: dict[TensorType, list[tuple[str, int]]] = {}
    parts: dict[TensorType, list[tuple[MappedFile, int, int]]] = {}
    for name in names:
        info = file.tensors[name]
        stretch = file.stretch(name) if info.type in SAMPLED_TYPES else None
        if stretch is None:
            continue
        size, per_block = block_bytes(info.type), block_size(info.type)
        num_blocks = stretch.num_bytes // size
        length = min(max(1, _SPOT_WEIGHTS // per_block), num_blocks)
        firsts = sorted({min(int(num_blocks * spot), num_blocks - length) for spot in spots})
        taken.setdefault(info.type, []).append((name, len(firsts) * length * per_block))
        parts.setdefault(info.type, []).extend(
            (stretch.file, stretch.start + first * size, length * size) for first in firsts
        )
    found: dict[str, TensorFigures] = {}
    for type, members in taken.items():
        data = _read(parts[type])
        values = dequantize(data, type, (data.size // block_bytes(type) * block_size(type),))
        starts = np.cumsum([0] + [count for _, count in members])
        found |= _figures(file, [name for name, _ in members], values, starts)
    return [found[name] for name in names if name in found]


def _read(parts: Sequence[tuple[MappedFile, int, int]]) -> NDArray[np.uint8]:
    """Copy bytes of files, given by where they start and how many they are, one after the other."""
    data = np.empty(sum(size for _, _, size in parts), np.uint8)
    view = data.data
    wanted: dict[MappedFile, list[tuple[int, memoryview]]] = {}
    end = 0
    for source, start, size in parts:
        wanted.setdefault(source, []).append((start, view[end : end + size]))
        end += size
    for source, pieces in wanted.items():
        source.read_into(pieces)
    return data


def _figures(
    file: ModelFile, names: list[str], values: FloatArray, starts: NDArray[np.int64]
) -> dict[str, TensorFigures]:
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, 0).astype(np.float64)
    num_finite = np.add.reduceat(is_finite, starts[:-1], dtype=np.int64)
    squares = np.add.reduceat(finite * finite, starts[:-1])
    counts = np.diff(starts)
    return {
        name: TensorFigures(
            name,
            file.tensors[name].shape,
            bad_values=int(count - good),
            rms=float(np.sqrt(square / max(1, good))),
            is_whole=count == np.prod(file.tensors[name].shape),
        )
        for name, count, good, square in zip(names, counts, num_finite, squares, strict=True)
    }


def _again_where_zero(file: ModelFile, figures: list[TensorFigures]) -> list[TensorFigures]:
    """Look at more of a tensor before it is said to be zero: a model may have rows or experts that are not used."""
    empty = [one.name for one in figures if one.rms == 0 and not one.bad_values and not one.is_whole]
    further = {one.name: one for one in sample(file, empty, _FURTHER_SPOTS)} if empty else {}
    return [further.get(one.name, one) for one in figures]


def judge(figures: Iterable[TensorFigures]) -> Iterator[Finding]:
    """Yield what figures of tensors tell, sampled or of all values."""
    figures = list(figures)
    for one in figures:
        some = "" if one.is_whole else "sampled "
        if one.bad_values:
            is_part = one.name in TABLES or "_exps" in one.name
            yield Finding(
                "weights not finite",
                f"{one.name} has {one.bad_values} {some}values that are NaN or infinite, so "
                f"{'some texts' if is_part else 'whatever it computes'} will come out as such; {_DOWNLOAD}",
                is_error=not is_part,
            )
        elif one.rms == 0 and _should_differ_from_zero(one):
            yield Finding(
                "weights zero",
                f"{one.name} is zero in all {some}values, so its part of the model does nothing; {_DOWNLOAD}",
            )
    yield from _judge_scales([one for one in figures if one.rms > 0 and not one.bad_values])


def _should_differ_from_zero(one: TensorFigures) -> bool:
    is_matrix = MATRIX.fullmatch(one.name) is not None or _NEEDED.fullmatch(one.name) is not None
    return is_matrix or one.name in TABLES or one.name.endswith("norm.weight")


def _judge_scales(figures: list[TensorFigures]) -> Iterator[Finding]:
    """Compare a matrix with the same one of other layers, and those of all layers with what any model has."""
    names = {one.name for one in figures}
    kinds: dict[str, list[TensorFigures]] = {}
    for one in figures:
        found = MATRIX.fullmatch(one.name)
        # A matrix with a factor beside it may have any scale.
        if found is not None and one.name.removesuffix("weight") + "scale" not in names:
            kinds.setdefault(found[2], []).append(one)
    for kind, members in kinds.items():
        scales = np.array([one.rms * np.sqrt(one.shape[-1]) for one in members])
        middle = float(np.sort(scales)[scales.size // 2])
        if len(members) >= _LEAST_LAYERS:
            times = scales / middle
            for index in np.flatnonzero((times > _MOST_TIMES) | (times < 1 / _MOST_TIMES)):
                is_larger = times[index] > 1
                ratio = f"{max(times[index], 1 / times[index]):.0f} times {'larger' if is_larger else 'smaller'}"
                yield Finding(
                    "weights scale",
                    f"{members[index].name} is {ratio} than {kind} of the other layers; download the model again, or "
                    "get another conversion",
                )
        if not _LEAST_SCALE <= middle <= _MOST_SCALE:
            wanted = f"{1 / np.sqrt(members[0].shape[-1]):.2g}"
            rms = f"{middle / np.sqrt(members[0].shape[-1]):.2g}"
            yield Finding(
                "weights scale",
                f"the weights of {kind} are {rms} in size in most layers, where models have some {wanted}: their scale "
                "is likely off; get another conversion",
            )


_MOST_LAYERS = 4
_NORM = re.compile(r"(?:attn|ffn|post_attention|post_ffw)_norm")
_STORED_WITH_ONE = ("clef", "gemma", "qwen35", "qwen3next", "nemotron", "step35", "minimax-m3")
"""Parts of names of architectures whose checkpoints have norm weights around 0, to which conversion adds 1."""
_MOST_NEGATIVE = 0.2
"""Share of negative weights in every layer's norm: a multiple of those that trained models have after the first layer
(SmolLM2 has 0.005 there, and 0.47 in the first)."""
_POSITIVE_DECAY = "bailingmoe3"
_BIAS = re.compile(r"blk\.(\d+)\.([a-z_]+(?:\.bias|_sinks\.weight))")
_MOST_BIAS = 300.0
_MOST_KEY_BIAS = 3000.0
"""Root mean square of a bias; those of Qwen 2's keys reach 100."""
_MOST_SINK = 100.0
_AGAIN = "get a current conversion of the model"


def check_conversion(file: ModelFile, config: ModelConfig) -> Iterator[Finding]:
    """Yield what vectors of a few layers tell; takes some milliseconds.

    Raises: CorruptFileError if the file was changed since it was opened.
    """
    layers = sorted({layer * (config.num_main_layers - 1) // (_MOST_LAYERS - 1) for layer in range(_MOST_LAYERS)})
    vectors: dict[str, dict[int, FloatArray]] = {}
    for layer in layers:
        prefix = f"blk.{layer}."
        for name in file.tensors:
            if name.startswith(prefix) and _is_read(file, name):
                vectors.setdefault(name.removeprefix(prefix), {})[layer] = _values(file, name)
    yield from _check_norms(config, vectors)
    yield from _check_decay(config, vectors)
    yield from _check_biases(vectors)


def _is_read(file: ModelFile, name: str) -> bool:
    """Vectors, and the decays of Mamba-1, a row of few columns for each channel."""
    info = file.tensors[name]
    is_vector = sum(size > 1 for size in info.shape) <= 1 or name.endswith(".ssm_a")
    return is_vector and info.type in SAMPLED_TYPES


def _values(file: ModelFile, name: str) -> FloatArray:
    info = file.tensors[name]
    data = np.ascontiguousarray(file.tensor_bytes(name)).reshape(-1).view(np.uint8)
    return dequantize(data, info.type, info.shape).reshape(-1)


def _check_norms(config: ModelConfig, vectors: dict[str, dict[int, FloatArray]]) -> Iterator[Finding]:
    """Weights of norms are positive in trained models, but for some of the first layer's."""
    norms = {
        name: [values for layer, values in found.items() if layer > 0]
        for name, found in vectors.items()
        if name.endswith(".weight") and _NORM.fullmatch(name.removesuffix(".weight"))
    }
    norms = {name: found for name, found in norms.items() if found}
    is_added = any(part in config.architecture for part in _STORED_WITH_ONE)
    for name, found in norms.items():
        shares = [float(np.mean(values < 0)) for values in found]
        if min(shares) > _MOST_NEGATIVE:
            why = "conversion adds 1 to them and did not" if is_added else "as if 1 had been taken off"
            yield Finding(
                "norm offset",
                f"{min(shares):.0%} or more of the weights of {name.removesuffix('.weight')} are negative in every "
                f"layer that was looked at ({_mean(found):.2g} on average), where models have positive ones: {why}, "
                f"so answers will mean nothing; {_AGAIN}",
            )
            return
    everything = [values for found in norms.values() for values in found]
    if len(everything) >= _MOST_LAYERS and not is_added and min(float(one.min()) for one in everything) > 1:
        yield Finding(
            "norm offset",
            f"every weight of the norms is above 1 ({_mean(everything):.2g} on average), as if 1 had been added to "
            f"those of a family whose conversion adds none, so answers will likely mean nothing; {_AGAIN}",
        )


def _mean(vectors: Sequence[FloatArray]) -> float:
    return float(np.mean([one.mean() for one in vectors]))


def _check_decay(config: ModelConfig, vectors: dict[str, dict[int, FloatArray]]) -> Iterator[Finding]:
    """States decay by exp(dt * A): A is stored as -exp(A_log)."""
    wanted = 1 if config.architecture == _POSITIVE_DECAY else -1
    for layer, values in vectors.get("ssm_a", {}).items():
        share = float(np.mean(values * wanted < 0))
        if share > _MOST_NEGATIVE:
            signs = {1: "positive", -1: "negative"}
            yield Finding(
                "decay sign",
                f"{share:.0%} of blk.{layer}.ssm_a are {signs[-wanted]}, where all are {signs[wanted]}, so that states "
                f"grow in place of decaying and answers will mean nothing; {_AGAIN}",
            )
            return


def _check_biases(vectors: dict[str, dict[int, FloatArray]]) -> Iterator[Finding]:
    for name, found in vectors.items():
        if not _BIAS.fullmatch(f"blk.0.{name}"):
            continue
        is_key = name.startswith(("attn_k.", "attn_qkv."))
        limit = _MOST_SINK if "sinks" in name else _MOST_KEY_BIAS if is_key else _MOST_BIAS
        for layer, values in found.items():
            size = float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
            if limit < size < np.inf:
                yield Finding(
                    "bias size",
                    f"the values of blk.{layer}.{name} are {size:.3g} in size, where models have at most some "
                    f"{limit / 10:.0f}: whatever is added to them is lost; download the model again, or {_AGAIN}",
                )
                return

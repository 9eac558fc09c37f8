"""Damage that a few blocks of each matrix show: holes, halves and blocks of another size, experts and layers alike.

As many blocks of every matrix are read, spread over all of it, all of a type decoded at once: some milliseconds for a
few hundred matrices whose bytes are in memory.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checks.byte_runs import Reader, Run, is_damage, is_one_word, run_around
from localinfer.models.checks.finding import Finding
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.reference import dequantize
from localinfer.quant.formats.types import TensorRecord, TensorType, block_bytes, block_size, row_bytes
from localinfer.quant.gguf.mapped_file import FileStretch, MappedFile

TABLES = ("token_embd.weight", "output.weight", "position_embd.weight", "per_layer_token_embd.weight")
"""Tensors of which a text reads single rows, so that a model with some broken ones works with others."""
MATRIX = re.compile(r"blk\.(\d+)\.((?:attn_(?:q|k|v|qkv|output)|ffn_(?:gate|up|down))(?:_exps|_shexp)?)\.weight")
"""Matrices that are alike in the layers of a model."""
_AGAIN = "download the model again"
_SPOT_WEIGHTS = 64
_MOST_SPOTS, _MOST_WEIGHTS, _FEWEST, _LARGEST = 3072, 400_000, 8, 32
"""Blocks and weights in all, and blocks of a matrix: 30 ms of one core at most for some hundred matrices."""
_STRIDE = 0.6180339887
"""Of the places within their stretches, so that no two blocks lie in the same column."""
_MOST_TIMES = 1000.0
"""A block's size over that of most blocks of its matrix; trained ones reach some ten."""
_MOST_HALVES = 4.0
"""How the halves of a matrix differ in size, over how they do in the other layers."""
_LEAST_LAYERS = 4
_LEAST_SHARE = 8


@dataclass(frozen=True)
class BlockGrid:
    """Blocks of matrices of one type, as many of each.

    starts: int64[matrices, spots], where they lie in their tensor, in bytes. data: uint8[matrices, spots, bytes].
    rms: float64[matrices, spots], of the finite values. bad: int64[matrices], values that are not finite.
    """

    tensors: list[TensorRecord]
    starts: NDArray[np.int64]
    data: NDArray[np.uint8]
    rms: NDArray[np.float64]
    bad: NDArray[np.int64]
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
    places = (order + np.modf(order * _STRIDE + 0.37)[0]) / count
    num_blocks = np.array([info.num_bytes // size for info, _ in members])
    starts = (places * (num_blocks - length)[:, None]).astype(np.int64) * size
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


def _row(info: TensorRecord, place: int) -> int:
    return place // row_bytes(info.type, info.shape[-1])


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
    """What is said of experts without weights."""
    named = ", ".join(map(str, experts[:4])) + (f" and {len(experts) - 4} more" if experts[4:] else "")
    return Finding(
        "weights zero",
        f"{info.name} is zero in expert {named} of {info.shape[0]}, which then answers nothing; {_AGAIN}, or get "
        "another conversion",
    )


def hole(info: TensorRecord, run: Run) -> Finding:
    """What is said of a stretch of one word, or of one that lies there twice."""
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
    """What is said of a matrix of which one half has another scale."""
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

"""Damage that shows in a tensor's bytes: stretches of one word, as holes of a disk and of a broken download leave them,
and stretches that lie in a tensor twice.

Trained weights, in whatever type, repeat no word of 8 bytes over kilobytes. What a model has on purpose ends where its
rows end: rows of tokens that are not used, experts that are alike.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.quant.formats.types import TensorRecord, row_bytes

_WORD = 8
_LEAST_BYTES = 1024
_LEAST_SHARE = 8
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
"""Gives the bytes of a tensor from one place to another."""


@dataclass(frozen=True)
class Run:
    """A stretch of a tensor's bytes that holds one word of 8 bytes, or, with a distance, what lies so far before it."""

    start: int
    end: int
    word: bytes = b""
    distance: int = 0


def is_one_word(data: NDArray[np.uint8]) -> bool:
    """Whether bytes, 16 or more, repeat their first two."""
    return bool((data[2:] == data[:-2]).all())


def run_around(read: Reader, size: int, first: int) -> Run:
    """How far the word at a place reaches, in both directions; size: of the tensor in bytes."""
    word = read(first, first + _WORD)
    start, end = first, first + _WORD
    while start > 0:
        data = read(max(0, start - _LOOK), start)
        wanted = np.resize(np.roll(word, len(data) % _WORD), len(data))
        differs = np.flatnonzero(data != wanted)
        start = start - len(data) + (int(differs[-1]) + 1 if differs.size else 0)
        if differs.size:
            break
        word = np.roll(word, len(data) % _WORD)
    word = np.roll(read(first, first + _WORD), -((end - first) % _WORD))
    while end < size:
        data = read(end, min(size, end + _LOOK))
        differs = np.flatnonzero(data != np.resize(word, len(data)))
        end += int(differs[0]) if differs.size else len(data)
        if differs.size:
            break
        word = np.roll(word, -(len(data) % _WORD))
    return Run(start, end, read(first, first + _WORD).tobytes())


def is_damage(run: Run, info: TensorRecord, *, all_rows: bool) -> bool:
    """Whether a run is none that a model has on purpose: it ends within a row, or is a large share of a matrix.

    all_rows: the model needs all rows of this tensor, as it does not those of tables and of types.
    """
    if len(info.shape) < 2 or info.shape[-1] < _LEAST_COLUMNS:
        return False
    row, length = row_bytes(info.type, info.shape[-1]), run.end - run.start
    if length < max(_LEAST_BYTES, row):
        return False
    if any(min(place % row, -place % row) > _SLACK for place in (run.start, run.end)):
        return True
    return all_rows and run.distance == 0 and length * _LEAST_SHARE >= info.num_bytes


class RunFinder:
    """Finds runs in a tensor's bytes, given piece after piece, at some 300 MB a second."""

    def __init__(self) -> None:
        self._size = 0
        self._tail = np.empty(0, np.uint8)
        self._open: Run | None = None
        self._runs: list[Run] = []
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
            self._extend(Run(start + first * _WORD, start + last * _WORD, words[first].tobytes()))

    def _extend(self, run: Run) -> None:
        before = self._open
        if before is not None and before.end == run.start and before.word == run.word:
            run = Run(before.start, run.end, run.word)
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

    def runs(self) -> list[Run]:
        """Stretches of one word, all bytes taken."""
        if self._open is not None and self._open.end - self._open.start >= _LEAST_BYTES:
            self._runs.append(self._open)
        self._open = None
        return self._runs

    def repeats(self, read: Reader) -> Iterator[Run]:
        """Stretches that are equal to what lies a distance before them, of which some anchors tell.

        read: gives the bytes again, to compare them.
        """
        if not self._words:
            return
        words, places = np.concatenate(self._words), np.concatenate(self._places)
        order = np.lexsort((places, words))
        words, places = words[order], places[order]
        is_again = words[1:] == words[:-1]
        later, distances = places[1:][is_again], np.diff(places)[is_again]
        # A word that fills a stretch is an anchor everywhere in it.
        is_far = distances >= 64
        later, distances = later[is_far], distances[is_far]
        found, counts = np.unique(distances, return_counts=True)
        for distance in found[counts >= _LEAST_ANCHORS][:16].tolist():
            at = np.sort(later[distances == distance])
            end = -1
            for place in at[:: max(1, at.size // 64)].tolist():
                if place < end:
                    continue
                run = _equal_around(read, self._size, place, distance)
                end = run.end
                yield run


def _equal_around(read: Reader, size: int, place: int, distance: int) -> Run:
    """How far the bytes around a place are those of a distance before."""
    start = end = place
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
    return Run(start, end, distance=distance)

"""Texts of any length to token ids: the merges of `subword_encoders` on arrays of symbols, in compiled code.

A symbol is a token's id, or a number behind them for a character that is no token. What is asked of each kind is the
same as of its short way in `subword_encoders`, and tests compare the two with `==`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.text_merging import MergeTable
from localinfer.models.text.byte_level import BYTE_CHARACTERS
from localinfer.models.text.word_splitting import STRETCH, LongTextSplitter, code_points

_SPACE = ord(" ")
_SPACE_MARK = ord("▁")
_EVERY_CUT = 64


class SymbolTable:
    """Symbols and merges of one vocabulary.

    tokens: every token by its id. ids: what text may turn into. expand: the ids of a symbol's text where it is not in
    `ids`.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        ids: Mapping[str, int],
        expand: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.ids = ids
        self._expand = expand
        self.symbols = {token: index for index, token in enumerate(tokens)}
        for character in sorted(set("".join(tokens))):
            self.symbols.setdefault(character, len(self.symbols))
        self._texts = list(self.symbols)
        self._is_text = np.zeros(len(self.symbols), np.bool_)
        self._is_text[list(ids.values())] = True
        self._objects = np.empty(len(tokens), object)
        self._objects[:] = range(len(tokens))
        self._character_symbols = np.full(0x110000, -1, np.int32)
        for text, symbol in self.symbols.items():
            if len(text) == 1:
                self._character_symbols[ord(text)] = symbol
        self._merges: MergeTable | None = None

    def of_characters(self, codes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the symbols of code points, int32[T]; -1 for a character that no token has."""
        return self._character_symbols[codes]

    def merge_strings(self, merges: Mapping[str, int], whole: Callable[[str], bool] | None) -> None:
        """Take merges as "left right" by rank; `whole` says which tokens a word becomes without merging."""
        joined = "\0".join(merges)
        if joined.count(" ") == len(merges):
            # All at once, in C.
            parts = joined.replace("\0", " ").split(" ")
            texts = parts[::2], parts[1::2], joined.replace(" ", "").split("\0")
            ranks = np.fromiter(merges.values(), np.int64, len(merges))
        else:
            cut = [(merge[:at], merge[at + 1 :], rank) for merge, rank in merges.items() for at in _spaces(merge)]
            texts = [one[0] for one in cut], [one[1] for one in cut], [one[0] + one[1] for one in cut]
            ranks = np.array([one[2] for one in cut], np.int64)
        left, right, result = (
            np.fromiter(map(self.symbols.get, found, repeat(-1)), np.int64, ranks.size) for found in texts
        )
        # A pair of which one part is no symbol never comes about.
        known = (left >= 0) & (right >= 0) & (result >= 0)
        self._make((left << 32 | right)[known], (ranks << 32 | result)[known], whole)

    def merge_results(self, ranks: Mapping[str, int], whole: Callable[[str], bool] | None = None) -> None:
        """Take merges as their results: any two symbols merge whose texts together have a rank; else as above."""
        pairs: list[int] = []
        values: list[int] = []
        symbols = self.symbols
        lengths = sorted({len(text) for text in ranks} | {1})
        for text, rank in ranks.items():
            size = len(text)
            # A long token is cut only where a part of such a length could be.
            for cut in range(1, size) if size <= _EVERY_CUT else lengths:
                if cut >= size:
                    break
                left = symbols.get(text[:cut])
                right = None if left is None else symbols.get(text[cut:])
                if left is not None and right is not None:
                    pairs.append(left << 32 | right)
                    values.append(rank << 32 | symbols[text])
        self._make(np.array(pairs, np.int64), np.array(values, np.int64), whole)

    def _make(self, pairs: NDArray[np.int64], values: NDArray[np.int64], whole: Callable[[str], bool] | None) -> None:
        self._merges = MergeTable(pairs, values, None if whole is None else self._whole(whole))

    def _whole(self, is_whole: Callable[[str], bool]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        texts = [token if token in self.ids and is_whole(token) else "" for token in self.tokens]
        starts = np.cumsum(np.array([0, *map(len, texts)], np.int64))
        return self.of_characters(code_points("".join(texts))), starts

    def encode(self, codes: NDArray[np.int32], symbols: NDArray[np.int32], ends: NDArray[np.int64]) -> list[int]:
        """Return the ids of words: code points int32[T] of their characters, symbols int32[T], ends int64[words]."""
        assert self._merges is not None, "merges are taken before texts"
        merged, places = self._merges.merge(symbols, ends)
        is_plain = (merged >= 0).all() and self._is_text[merged].all()
        ids = merged if is_plain else self._expanded(merged, codes[places])
        # One object for every id, so that a list of them takes 8 bytes each.
        found: list[int] = self._objects[ids].tolist()
        return found

    def _expanded(self, merged: NDArray[np.int32], codes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Put the ids that stand for a text in the place of each symbol that text may not become."""
        keys, inverse = np.unique(np.where(merged >= 0, merged, -1 - codes), return_inverse=True)
        parts: list[list[int]] = []
        for key in keys.tolist():
            if key >= 0 and self._is_text[key]:
                parts.append([key])
            else:
                parts.append(self._expand(chr(-1 - key) if key < 0 else self._texts[key]))
        sizes = np.array(list(map(len, parts)), np.int64)
        flat = np.array([token_id for part in parts for token_id in part], np.int32)
        starts = np.cumsum(sizes) - sizes
        counts = sizes[inverse]
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return flat[np.repeat(starts[inverse], counts) + offsets]


def encode_marked(table: SymbolTable, text: str, *, splits_words: bool) -> Iterator[list[int]]:
    """Yield the ids of a SentencePiece text, stretch by stretch; spaces count as marks, and marks as unknown.

    splits_words: no token reaches over the beginning of a word.
    """
    start, size = 0, STRETCH
    while start < len(text):
        part = text[start : start + size]
        codes = code_points(part)
        is_space = codes == _SPACE
        begins = np.flatnonzero(is_space[1:] & ~is_space[:-1]).astype(np.int64) + 1
        if start + size >= len(text):
            ends = np.append(begins, codes.size) if splits_words else np.array([codes.size])
        elif begins.size and splits_words:
            ends = begins
        else:
            size *= 2
            continue
        done = int(ends[-1])
        symbols = marked_symbols(table, codes[:done])
        yield table.encode(codes, symbols, ends)
        start, size = start + done, STRETCH


def encode_split(
    table: SymbolTable, splitter: LongTextSplitter, text: str, *, is_raw: bool, escapes_spaces: bool
) -> Iterator[list[int]]:
    """Yield the ids of a text whose words are merged by rank, stretch by stretch; is_raw: symbols are characters, else
    bytes."""
    byte_codes = np.array([ord(character) for character in BYTE_CHARACTERS], np.int32)
    for part, ends in splitter.stretches(text):
        codes = code_points(part)
        if is_raw:
            symbols = marked_symbols(table, codes) if escapes_spaces else table.of_characters(codes)
            yield table.encode(codes, symbols, ends)
            continue
        sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        byte_ends = np.cumsum(sizes)[ends - 1]
        codes = byte_codes[np.frombuffer(part.encode(), np.uint8)]
        yield table.encode(codes, table.of_characters(codes), byte_ends)


def marked_symbols(table: SymbolTable, codes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the symbols of code points in which a mark stands for a space; a literal mark never merges, as it would
    read as a space."""
    symbols = table.of_characters(np.where(codes == _SPACE, np.int32(_SPACE_MARK), codes))
    symbols[codes == _SPACE_MARK] = -1
    return symbols


def _spaces(merge: str) -> list[int]:
    """Where a pair may be parted: at any of its spaces, where tokens hold spaces."""
    return [found.start() for found in re.finditer(" ", merge) if 0 < found.start() < len(merge) - 1]

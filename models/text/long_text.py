"""Texts of any length to token ids: the words and merges of `encoders` on arrays, in compiled code.

Tests compare the two with `==`. Texts are cut into words stretch by stretch, in linear time and bounded memory: the
commonest ways of splitting are compiled, any other goes through the regular expressions of `splitting`, and a word
counts only if what is beyond its stretch cannot change it. A symbol is a token's id, or a number above them for a
character that is no token.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.kernel_abi import (
    CHARACTER_DIGIT,
    CHARACTER_LETTER,
    CHARACTER_NEWLINE,
    CHARACTER_SPACE,
    CHARACTER_SYMBOL,
)
from localinfer.kernels.cpu.text_merging import MergeTable, WordShape, split_words
from localinfer.models.text.encoders import (
    BYTE_CHARACTERS,
    GPT2_PATTERN,
    PRE_TOKENIZERS,
    PreTokenizerRule,
    build_splitter,
)
from localinfer.system.pieces import pieces

STRETCH = 1 << 16
"""Characters that are looked at together, or twice as many as long as no word of them is settled."""

_CL100K = WordShape(leads_with_symbols=True, digits=3, symbol_lines=True, lines=True, any_case=True)
_SHAPES: dict[tuple[object, ...], WordShape] = {
    PRE_TOKENIZERS["llama-bpe"].steps: _CL100K,
    PRE_TOKENIZERS["qwen2"].steps: _CL100K._replace(digits=1),
    PRE_TOKENIZERS["seed-coder"].steps: _CL100K._replace(digits=1, symbol_lines=False),
    (GPT2_PATTERN,): WordShape(),
    (r"\p{N}", GPT2_PATTERN): WordShape(digits_first=True),
}
_RUNS_PER_STEP = 6
"""No pattern looks further beyond a word than so many runs of characters of one kind."""


class LongTextSplitter:
    """Splits texts of any length by one rule; threads may share it."""

    def __init__(self, rule: PreTokenizerRule) -> None:
        self._shape = _SHAPES.get(rule.steps)
        self._kinds = CharacterKinds()
        self._rule = rule
        self._split: Callable[[str], list[str]] | None = None

    def stretches(self, text: str) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Yield pieces of the text in order, and where their words end in them, int64[words].

        Raises: RequestError for a run of white space that the regular expressions give up on.
        """
        return _stretches(text, self._ends)

    def _ends(self, part: str, is_end: bool) -> NDArray[np.int64]:
        if self._shape is not None:
            codes = code_points(part)
            return split_words(codes, self._kinds.of(codes), self._shape, is_end=is_end)
        if self._split is None:
            self._split = build_splitter(self._rule)
        try:
            words = self._split(part)
        except BaseException as error:
            # The library panics, with an exception that is none of Python's, where its regular expressions give up.
            if type(error).__name__ != "PanicException":
                raise
            raise RequestError(
                f"a text of {len(part)} characters without a word's end cannot be split into tokens by this model's "
                "rules; give it in shorter pieces, or as token ids"
            ) from None
        ends = np.cumsum(np.fromiter(map(len, words), np.int64, len(words)))
        return ends if is_end else ends[: _settled(part, ends, _RUNS_PER_STEP * len(self._rule.steps))]


class CharacterKinds:
    """Letter, digit, white space, newline or symbol, for each character, as the regular expressions class it.

    They bring their own version of Unicode, so they are asked once about each character that occurs.
    """

    def __init__(self) -> None:
        self._table: NDArray[np.uint8] | None = None

    def of(self, codes: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return the kinds, uint8[T], of code points, int32[T]."""
        table = np.zeros(0x110000, np.uint8) if self._table is None else self._table
        kinds = table[codes]
        if not kinds.all():
            unknown = np.unique(codes[kinds == 0])
            table[unknown] = _classify("".join(map(chr, unknown.tolist())))
            self._table = table
            kinds = table[codes]
        return kinds


def code_points(text: str) -> NDArray[np.int32]:
    """Return int32[T], the code points of a text."""
    return np.frombuffer(text.encode("utf-32-le"), np.int32)


def _stretches(
    text: str, find_ends: Callable[[str, bool], NDArray[np.int64]]
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield pieces of a text, and the ends in them that `find_ends(piece, is_last)` is certain of."""
    start, size = 0, STRETCH
    while start < len(text):
        part = text[start : start + size]
        ends = find_ends(part, start + size >= len(text))
        if not ends.size:
            size *= 2
            continue
        done = int(ends[-1])
        yield part[:done], ends
        start, size = start + done, STRETCH


def _classify(characters: str) -> NDArray[np.uint8]:
    from tokenizers import Regex, pre_tokenizers

    kinds = {"\r": CHARACTER_NEWLINE, "\n": CHARACTER_NEWLINE}
    for kind, pattern in ((CHARACTER_LETTER, r"\p{L}"), (CHARACTER_DIGIT, r"\p{N}"), (CHARACTER_SPACE, r"\s")):
        found = pre_tokenizers.Split(Regex(pattern), "removed", invert=True).pre_tokenize_str(characters)
        for piece, _ in found:
            for character in piece:
                kinds.setdefault(character, kind)
    return np.fromiter((kinds.get(character, CHARACTER_SYMBOL) for character in characters), np.uint8, len(characters))


def _settled(text: str, ends: NDArray[np.int64], num_runs: int) -> int:
    """Return how many words no text after this one can change: those before so many whole runs of one kind.

    The last of them ends in neither white space nor a digit, so that no pattern looks back over its end.
    """
    position, kind = len(text), ""
    while num_runs and position:
        position -= 1
        category = unicodedata.category(text[position])
        # What this version of Python has no category for may belong to any run.
        found = "L" if category[0] == "M" else "Z" if category == "Cc" else category[0]
        if category != "Cn" and found != kind:
            num_runs -= bool(kind)
            kind = found
    if num_runs:
        return 0
    count = int(np.searchsorted(ends, position, "right"))
    while count:
        before = text[int(ends[count - 1]) - 1]
        if unicodedata.category(before)[0] not in "NZ" and not before.isspace():
            break
        count -= 1
    return count


_WINDOW = 1 << 20
"""Characters that are merged together at most, but for a word that cannot be cut: some 40 bytes each."""
_MARGIN = 64
"""Symbols at a window's end, where what follows it could have made others."""
_SPACE = ord(" ")
_SPACE_MARK = ord("▁")
_EVERY_CUT = 64


class _Window(NamedTuple):
    """A stretch of a word, merged: where it starts, its symbols, where each begins in it, and the code points there."""

    start: int
    merged: NDArray[np.int32]
    positions: NDArray[np.int32]
    codes: NDArray[np.int32]


class SymbolTable:
    """Symbols and merges of one vocabulary.

    tokens: every token by its id. ids: what text may turn into. expand: the ids of a symbol's text where it is not in
    `ids`.
    """

    def __init__(self, tokens: Sequence[str], ids: Mapping[str, int], expand: Callable[[str], list[int]]) -> None:
        self.tokens = tokens
        self.ids = ids
        self._expand = expand
        self.symbols = {token: index for index, token in enumerate(tokens)}
        characters: set[str] = set()
        for piece in pieces(tokens):
            characters.update("".join(piece))
        for character in sorted(characters):
            self.symbols.setdefault(character, len(self.symbols))
        self._texts = list(self.symbols)
        self._is_text = np.zeros(len(self.symbols), np.bool_)
        self._objects = np.empty(len(tokens), object)
        for numbers in pieces(ids.values()):
            self._is_text[numbers] = True
        for numbers in pieces(range(len(tokens))):
            self._objects[numbers[0] : numbers[-1] + 1] = numbers
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
        cut = [self._cut(*both) for both in zip(pieces(merges), pieces(merges.values()), strict=True)]
        left, right, result, ranks = (np.concatenate(column) for column in zip(*cut, strict=True))
        # A pair of which one part is no symbol never comes about.
        known = (left >= 0) & (right >= 0) & (result >= 0)
        self._make((left << 32 | right)[known], (ranks << 32 | result)[known], whole)

    def _cut(self, merges: list[str], given_ranks: list[int]) -> tuple[NDArray[np.int64], ...]:
        """The symbols of the left, the right and both parts of each merge, -1 for none, and its rank: int64[N] each."""
        joined = "\0".join(merges)
        if joined.count(" ") == len(merges):
            # All at once, in C.
            parts = joined.replace("\0", " ").split(" ")
            texts = parts[::2], parts[1::2], joined.replace(" ", "").split("\0")
            ranks = np.array(given_ranks, np.int64)
        else:
            ranked = zip(merges, given_ranks, strict=True)
            cut = [(merge[:at], merge[at + 1 :], rank) for merge, rank in ranked for at in _spaces(merge)]
            texts = [one[0] for one in cut], [one[1] for one in cut], [one[0] + one[1] for one in cut]
            ranks = np.array([one[2] for one in cut], np.int64)
        found = (np.fromiter(map(self.symbols.get, part, repeat(-1)), np.int64, ranks.size) for part in texts)
        return *found, ranks

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
        merged, positions = self._merged(symbols, ends)
        return self._ids(merged, codes[positions])

    def encode_word(
        self, units: NDArray[Any], read: Callable[[NDArray[Any]], tuple[NDArray[np.int32], NDArray[np.int32]]]
    ) -> Iterator[list[int]]:
        """Yield the ids of one word of any length, in the memory that a window of it takes.

        units: its bytes, or code points, [T]. read: the code points and symbols of a stretch of them. Cut between two
        tokens, a word has the ids of both halves if the two tokens beside the cut, alone, stay two: the lowest pair of
        all is the lowest of its half too, so the halves merge as they do apart until a pair over the cut comes first,
        which is a pair of the insides of those two tokens.
        """
        window = _Window(0, *self._merged_window(units[:_WINDOW], read))
        size = _WINDOW
        while window.start + size < units.size:
            back = _MARGIN
            while back < window.positions.size:
                cut = window.positions.size - back
                middle = window.start + int(window.positions[cut])
                after = _Window(middle, *self._merged_window(units[middle : middle + _WINDOW], read))
                left = units[window.start + int(window.positions[cut - 1]) : middle]
                right = units[middle : middle + (int(after.positions[1]) if after.positions.size > 1 else _WINDOW)]
                _, positions, _ = self._merged_window(np.concatenate([left, right]), read)
                if left.size in positions:
                    break
                back *= 2
            else:
                # It cannot be cut in here.
                size *= 2
                window = _Window(window.start, *self._merged_window(units[window.start : window.start + size], read))
                continue
            yield self._ids(window.merged[:cut], window.codes[:cut])
            window, size = after, _WINDOW
        yield self._ids(window.merged, window.codes)

    def _merged_window(
        self, units: NDArray[Any], read: Callable[[NDArray[Any]], tuple[NDArray[np.int32], NDArray[np.int32]]]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """The merged symbols of a stretch inside a word, where each begins, and the code point there."""
        codes, symbols = read(units)
        merged, positions = self._merged(symbols, np.array([units.size], np.int64), takes_whole=False)
        # Copies, so that what they were cut from is given back.
        return merged.copy(), positions.copy(), codes[positions]

    def _merged(
        self, symbols: NDArray[np.int32], ends: NDArray[np.int64], *, takes_whole: bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        assert self._merges is not None, "merges are taken before texts"
        return self._merges.merge(symbols, ends, takes_whole=takes_whole)

    def _ids(self, merged: NDArray[np.int32], codes: NDArray[np.int32]) -> list[int]:
        """The ids of merged symbols; codes: the code point that each begins with."""
        is_plain = (merged >= 0).all() and self._is_text[merged].all()
        ids = merged if is_plain else self._expanded(merged, codes)
        # One object for every id, so that a list of them takes 8 bytes each.
        found: list[int] = self._objects[ids].tolist()
        return found

    def _expanded(self, merged: NDArray[np.int32], codes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Put the ids that stand for a text in place of each symbol that text may not become."""
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

    def find_ends(part: str, is_last: bool) -> NDArray[np.int64]:
        is_space = code_points(part) == _SPACE
        begins = np.flatnonzero(is_space[1:] & ~is_space[:-1]).astype(np.int64) + 1
        return np.append(begins, len(part)) if is_last else begins

    def read(codes: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return codes, marked_symbols(table, codes)

    whole = [(text, np.array([len(text)], np.int64))] if text else []
    for part, ends in _groups(_stretches(text, find_ends) if splits_words else whole):
        codes = code_points(part)
        if _is_long_word(part, ends):
            yield from table.encode_word(codes, read)
        else:
            yield table.encode(*read(codes), ends)


def encode_split(
    table: SymbolTable, splitter: LongTextSplitter, text: str, *, is_raw: bool, escapes_spaces: bool
) -> Iterator[list[int]]:
    """Yield the ids of a text whose words are merged by rank, stretch by stretch; is_raw: symbols are characters, else
    bytes."""
    byte_codes = np.array([ord(character) for character in BYTE_CHARACTERS], np.int32)

    def read(units: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        codes = units if is_raw else byte_codes[units]
        return codes, marked_symbols(table, codes) if is_raw and escapes_spaces else table.of_characters(codes)

    for part, ends in _groups(splitter.stretches(text)):
        units = code_points(part) if is_raw else np.frombuffer(part.encode(), np.uint8)
        if _is_long_word(part, ends):
            yield from table.encode_word(units, read)
        else:
            yield table.encode(*read(units), ends if is_raw or part.isascii() else _byte_ends(part, ends))


def _groups(stretches: Iterable[tuple[str, NDArray[np.int64]]]) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Cut stretches between words into ones of no more than a window, but for words that are longer."""
    for part, ends in stretches:
        first, start = 0, 0
        while first < ends.size:
            last = max(first + 1, int(np.searchsorted(ends, start + _WINDOW, "right")))
            end = int(ends[last - 1])
            yield part[start:end], ends[first:last] - start
            first, start = last, end


def _is_long_word(part: str, ends: NDArray[np.int64]) -> bool:
    return ends.size == 1 and len(part) > _WINDOW


def _byte_ends(part: str, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ends of words in the UTF-8 of a text."""
    codes = code_points(part)
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    return np.cumsum(sizes)[ends - 1]


def marked_symbols(table: SymbolTable, codes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the symbols of code points in which a mark stands for a space; a literal mark never merges, as it would
    read as a space."""
    symbols = table.of_characters(np.where(codes == _SPACE, np.int32(_SPACE_MARK), codes))
    symbols[codes == _SPACE_MARK] = -1
    return symbols


def _spaces(merge: str) -> list[int]:
    """Positions at which a pair may be parted: any of its spaces, as tokens may hold spaces."""
    return [found.start() for found in re.finditer(" ", merge) if 0 < found.start() < len(merge) - 1]

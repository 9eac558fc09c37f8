"""Tokenization of long texts without the GIL: arguments and memory of `compiled/text_merging.py`."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.kernel_abi import SCAN_SYMBOLS
from localinfer.kernels.cpu.memory import address, empty, placed
from localinfer.kernels.cpu.parameters import MERGE, SPLIT
from localinfer.kernels.jit.object_cache import Function

_FILL_PAIRS = Function("text_merging.fill_pairs", "q", "qqqqqq")
_FILL_WHOLE = Function("text_merging.fill_whole", "q", "qqqqq")
_MERGE = Function("text_merging.merge", "q", "q")
_SPLIT = Function("text_merging.split", "q", "q")
KERNELS = (_FILL_PAIRS, _FILL_WHOLE, _MERGE, _SPLIT)
"""Kernels of tokenizing a long text, to be compiled when a model is loaded."""


class WordShape(NamedTuple):
    """The rules of splitting words."""

    leads_with_symbols: bool = False
    """A word may begin with any one symbol or white space, else only with a space."""
    digits: int = 0
    """Maximum digits of a group; 0 for a whole run with a space before it."""
    digits_first: bool = False
    """Digits are split off one by one first."""
    symbol_lines: bool = False
    """Newlines belong to the symbols before them."""
    lines: bool = False
    """White space ends at its last newline."""
    any_case: bool = False
    """Contractions may be in capitals."""


def split_words(
    codes: NDArray[np.int32], kinds: NDArray[np.uint8], shape: WordShape, *, is_end: bool
) -> NDArray[np.int64]:
    """Return the ends of the words of a text, int64[W]; unless `is_end`, only those that more text cannot change.

    codes: int32[T] code points; kinds: uint8[T], one of kernel_abi.CHARACTER_* each.
    """
    assert codes.dtype == np.int32 and kinds.dtype == np.uint8 and codes.shape == kinds.shape, "read in place"
    assert codes.ndim == 1, "a text is one row"
    codes, kinds = placed(codes), placed(kinds)
    ends = empty(codes.size, np.int64)
    block = SPLIT.pack(
        kinds=address(kinds),
        codes=address(codes),
        count=codes.size,
        ends=address(ends),
        is_end=is_end,
        **shape._asdict(),
    )
    return ends[: _SPLIT(address(block))]


class MergeTable:
    """The merges of pairs of symbols, with their ranks and results; thread-safe.

    pairs: int64[P], left << 32 | right, of symbols from 0 to 2^31 - 1; of equal ones the first counts. values:
    int64[P], rank << 32 | result. whole: for words that need no merging, the symbols of all tokens in a row, int32, and
    where each begins, int64[number of tokens + 1]; a token without symbols is no such word.
    """

    def __init__(
        self,
        pairs: NDArray[np.int64],
        values: NDArray[np.int64],
        whole: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None,
    ) -> None:
        assert pairs.dtype == np.int64 and values.dtype == np.int64 and pairs.shape == values.shape, "read in place"
        assert not pairs.size or (pairs.min() >= 0 and values.min() >= 0), "symbols and ranks are not negative"
        size = _table_size(pairs.size)
        self._keys = placed(np.full(size, -1, np.int64))
        self._values = empty(size, np.int64)
        pairs, values = placed(pairs), placed(values)
        _FILL_PAIRS(address(pairs), address(values), pairs.size, address(self._keys), address(self._values), size)
        self._whole: tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]] | None = None
        if whole is not None:
            symbols, starts = whole
            assert symbols.dtype == np.int32 and starts.dtype == np.int64, "read in place"
            assert starts[0] == 0 and starts[-1] == symbols.size and (np.diff(starts) >= 0).all(), "rows in order"
            symbols, starts = placed(symbols), placed(starts)
            table = placed(np.full(_table_size(starts.size - 1), -1, np.int32))
            _FILL_WHOLE(address(symbols), address(starts), starts.size - 1, address(table), table.size)
            self._whole = symbols, starts, table

    def merge(
        self, symbols: NDArray[np.int32], ends: NDArray[np.int64], *, takes_whole: bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the merged symbols of words, and the index of each one's first symbol in `symbols`, both int32.

        symbols: int32[T], -1 for one that never merges; overwritten. ends: int64[W], rising to T. takes_whole: whether
        words may need no merging.
        """
        assert symbols.dtype == np.int32 and ends.dtype == np.int64, "read in place"
        lengths = np.diff(ends, prepend=0)
        assert symbols.size < 2**31 and (ends[-1] if ends.size else 0) == symbols.size and (lengths >= 0).all()
        longest = max(SCAN_SYMBOLS, int(lengths.max()) if ends.size else 0)
        symbols, ends = placed(symbols), placed(ends)
        out, places = empty(symbols.size, np.int32), empty(symbols.size, np.int32)
        # Untouched pages take no memory.
        following, preceding = empty(longest, np.int32), empty(longest, np.int32)
        heap = empty(2 * longest, np.int64)
        tokens, starts, table = (self._whole if takes_whole else None) or (None, None, None)
        block = MERGE.pack(
            symbols=address(symbols), ends=address(ends), num_words=ends.size, keys=address(self._keys),
            values=address(self._values), mask=self._keys.size - 1, following=address(following),
            preceding=address(preceding), heap=address(heap), out=address(out), places=address(places),
            whole_table=0 if table is None else address(table), whole_mask=0 if table is None else table.size - 1,
            whole_starts=0 if starts is None else address(starts),
            whole_symbols=0 if tokens is None else address(tokens),
        )  # fmt: skip
        count = _MERGE(address(block))
        return out[:count], places[:count]


def _table_size(count: int) -> int:
    """A power of two, at most half full."""
    return 1 << max(4, (2 * count).bit_length())

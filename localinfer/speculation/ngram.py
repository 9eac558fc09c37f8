"""N-gram drafts: from prompt, output, recent conversations and the caller's prediction.

The text so far usually ends in something that occurred before; what followed there is the draft, found in
microseconds. The longest match wins, and of equals the most recent (prompt lookup decoding, Saxena 2023; with a suffix
automaton as in SAM Decoding, Hu et al., arXiv 2411.10666).
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.token_history import Cursor, TokenHistory

MAX_TOKENS = 1 << 18
"""Tokens kept, about 40 MB when full; then the older half is evicted."""
_MAX_TEXTS = 64
_NO_TOKENS = np.empty(0, np.int32)


class NgramDrafter:
    """The history of all recent texts; one thread at a time."""

    name = "ngram"

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._history = TokenHistory()
        self._recent: deque[Cursor] = deque(maxlen=_MAX_TEXTS)

    @property
    def num_tokens(self) -> int:
        """Tokens kept, those of a common prefix once."""
        return self._history.num_tokens

    def begin(self, prediction: NDArray[np.int32] = _NO_TOKENS) -> "NgramText":
        """Begin a text; prediction: what its caller expects after the first tokens it reads."""
        return NgramText(self, prediction)

    def _open(self) -> tuple[TokenHistory, Cursor]:
        """A cursor for a new text."""
        cursor = Cursor()
        self._recent.append(cursor)
        return self._history, cursor

    def _evict_for(self, num_tokens: int) -> None:
        """Evict the older half once it is full: insert the newest texts again, some 0.5 us a token."""
        if self._history.num_tokens + num_tokens <= self._max_tokens:
            return
        room = self._max_tokens // 2
        kept: list[NDArray[np.int32]] = []
        for cursor in reversed(self._recent):
            tokens = self._history.tokens(cursor, room)
            room -= tokens.size
            kept.append(tokens)
            if room == 0:
                break
        self._history = TokenHistory()
        self._recent.clear()
        for tokens in reversed(kept):
            history, cursor = self._open()
            history.extend(cursor, tokens)


class NgramText:
    """One text in the drafter's history; made by `NgramDrafter.begin`."""

    def __init__(self, drafter: NgramDrafter, prediction: NDArray[np.int32]) -> None:
        self._drafter = drafter
        self._prediction = np.ascontiguousarray(prediction[: drafter._max_tokens // 4], np.int32)
        self._history: TokenHistory | None = None
        self._cursor = Cursor()
        self._num_read = 0

    @property
    def match_length(self) -> int:
        """Tokens at the end of the text that the last draft continues; 0 without a draft."""
        return self._cursor.match_length

    def draft(self, tokens: NDArray[np.int32], out: NDArray[np.int32]) -> int:
        """Draft what follows the whole text so far, contiguous int32[T], which begins as in the call before.

        Writes at most all of `out`, contiguous int32[K]; returns how many.
        """
        self._read(tokens)
        assert self._history is not None, "a text has been read"
        return self._history.draft(self._cursor, out)

    def _read(self, tokens: NDArray[np.int32]) -> None:
        drafter = self._drafter
        most = drafter._max_tokens // 4
        if self._history is drafter._history:
            drafter._evict_for(tokens.size - self._num_read)
        if self._history is not drafter._history:
            # A new history holds the tokens, but this text's cursor is of the old one.
            drafter._evict_for(min(tokens.size, most) + self._prediction.size)
            is_first = self._history is None
            self._history, self._cursor = drafter._open()
            self._num_read = max(0, tokens.size - most)
            if is_first and self._prediction.size:
                self._history.extend(self._cursor, tokens[self._num_read :])
                self._history.expect(self._cursor, self._prediction)
                self._num_read = tokens.size
        self._history.extend(self._cursor, tokens[self._num_read :])
        self._num_read = tokens.size

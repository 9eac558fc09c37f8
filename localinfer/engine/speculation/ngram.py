"""N-gram drafts: from prompt, output, recent conversations and the caller's prediction.

The text so far usually ends in something that occurred before; what followed there is the draft, found in
microseconds. The longest match wins, and of equals the most recent (prompt lookup decoding, Saxena 2023; with a suffix
automaton as in SAM Decoding, Hu et al., arXiv 2411.10666).
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.kernels.cpu.token_history import Cursor, TokenHistory

MAX_TOKENS = 1 << 18
"""Tokens kept, about 40 MB when full; then the older half is evicted."""
_MAX_TEXTS = 64
_MAX_SALTS = 64
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(eq=False)
class _Recent:
    """Recent texts of one salt, and where each ends."""

    history: TokenHistory = field(default_factory=TokenHistory)
    cursors: deque[Cursor] = field(default_factory=lambda: deque(maxlen=_MAX_TEXTS))


class NgramDrafter:
    """The history of all recent texts, for each salt one of its own; one thread at a time."""

    name = "ngram"

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._of_salt: OrderedDict[bytes, _Recent] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens kept, those of a common prefix once."""
        return sum(recent.history.num_tokens for recent in self._of_salt.values())

    def begin(self, prediction: NDArray[np.int32] = _NO_TOKENS, salt: bytes = NO_SALT) -> "NgramText":
        """Begin a text; prediction: what its caller expects after the first tokens it reads. salt: of the texts that it
        is drafted from."""
        return NgramText(self, prediction, salt)

    def _recent(self, salt: bytes) -> _Recent:
        """The texts of a salt, which are of use now."""
        recent = self._of_salt.get(salt)
        if recent is None:
            recent = self._of_salt[salt] = _Recent()
            if len(self._of_salt) > _MAX_SALTS:
                self._of_salt.popitem(last=False)
        self._of_salt.move_to_end(salt)
        return recent

    def _open(self, salt: bytes) -> tuple[TokenHistory, Cursor]:
        """A cursor for a new text."""
        recent, cursor = self._recent(salt), Cursor()
        recent.cursors.append(cursor)
        return recent.history, cursor

    def _evict_for(self, num_tokens: int, salt: bytes) -> None:
        """Evict once it is full the salts used least recently, and of the last the older half: insert its newest texts
        again, some 0.5 us a token."""
        recent, others = self._recent(salt), self.num_tokens
        while others + num_tokens > self._max_tokens and len(self._of_salt) > 1:
            _, evicted = self._of_salt.popitem(last=False)
            others -= evicted.history.num_tokens
        if recent.history.num_tokens + num_tokens <= self._max_tokens:
            return
        room = self._max_tokens // 2
        kept: list[NDArray[np.int32]] = []
        for cursor in reversed(recent.cursors):
            tokens = recent.history.tokens(cursor, room)
            room -= tokens.size
            kept.append(tokens)
            if room == 0:
                break
        del self._of_salt[salt]
        for tokens in reversed(kept):
            history, cursor = self._open(salt)
            history.extend(cursor, tokens)


class NgramText:
    """One text in the drafter's history; made by `NgramDrafter.begin`."""

    def __init__(self, drafter: NgramDrafter, prediction: NDArray[np.int32], salt: bytes) -> None:
        self._drafter = drafter
        self._salt = salt
        self._prediction = np.ascontiguousarray(prediction[: drafter._max_tokens // 4], np.int32)
        self._history: TokenHistory | None = None
        self._cursor: Cursor | None = None
        self._num_read = 0

    @property
    def match_length(self) -> int:
        """Tokens at the end of the text that the last draft continues; 0 without a draft."""
        return 0 if self._cursor is None else self._cursor.match_length

    def draft(self, tokens: NDArray[np.int32], out: NDArray[np.int32]) -> int:
        """Draft what follows the whole text so far, contiguous int32[T], which begins as in the call before.

        Rows of pictures and sounds, below 0, are left out: words behind them follow those before. Writes at most all of
        `out`, contiguous int32[K]; returns how many.
        """
        history, cursor = self._read(tokens)
        return history.draft(cursor, out)

    def _read(self, tokens: NDArray[np.int32]) -> tuple[TokenHistory, Cursor]:
        drafter, salt = self._drafter, self._salt
        most = drafter._max_tokens // 4
        history, cursor = self._history, self._cursor
        if history is drafter._recent(salt).history:
            drafter._evict_for(tokens.size - self._num_read, salt)
        if history is not drafter._recent(salt).history:
            # A new history holds the tokens, but this text's cursor is of the old one.
            drafter._evict_for(min(tokens.size, most) + self._prediction.size, salt)
            is_first = history is None
            self._history, self._cursor = history, cursor = drafter._open(salt)
            self._num_read = max(0, tokens.size - most)
            if is_first and self._prediction.size:
                history.extend(cursor, _words(tokens[self._num_read :]))
                history.expect(cursor, self._prediction)
                self._num_read = tokens.size
        assert history is not None and cursor is not None, "it was opened"
        history.extend(cursor, _words(tokens[self._num_read :]))
        self._num_read = tokens.size
        return history, cursor


def _words(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """The tokens without rows of pictures and sounds, contiguous."""
    return tokens if not tokens.size or tokens.min() >= 0 else tokens[tokens >= 0]

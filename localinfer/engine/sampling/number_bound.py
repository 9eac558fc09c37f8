"""Numbers of JSON that come to an end: a grammar alone lets small models write digits until the reply is cut off.

A whole number has at most the 20 characters that a 64-bit one has, any other the 25 of the longest double. Where the
grammar itself asks for more, as a constant does, nothing is bounded.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.types import TokenIds

MOST_WHOLE = 20
"""Characters of a whole number: -9223372036854775808, or 18446744073709551615."""
MOST_NUMBER = 25
"""Characters of any other: -1.7976931348623157e+308 has 24."""
_HEAD = re.compile(rb"[-+.eE0-9]*")
_TAIL = re.compile(rb"[-+.eE0-9]*\Z")
_CONTINUES = re.compile(rb"[0-9]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?")
_NEVER_BEHIND = b'"\\' + bytes(set(range(ord("a"), ord("z") + 1)) - {*b"e"})
"""Bytes by which no token begins that may follow a number or go on with it."""


class NumberTokens:
    """What the tokens of one vocabulary are to numbers.

    texts: the bytes of each token, of control tokens what no text has.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts
        heads = np.zeros(len(texts), np.int16)
        costs = np.zeros(len(texts), np.int16)
        tails = np.zeros(len(texts), np.int16)
        fractions, others = [], []
        self._longest = 0
        for token_id, text in enumerate(texts):
            if not text:
                continue
            if text[0] in _NEVER_BEHIND:
                others.append(token_id)
            heads[token_id] = head = len(_found(_HEAD, text))
            tails[token_id] = len(_found(_TAIL, text[-64:]))
            # What ends in a sign or a point needs a digit more.
            costs[token_id] = head + (head == len(text) and text[-1:] not in b"0123456789")
            if text[0] in b".eE" and head:
                fractions.append(token_id)
            if head and len(_found(_CONTINUES, text)) >= head:
                self._longest = max(self._longest, int(costs[token_id]))
        self._heads, self._costs, self._tails = heads, costs, tails
        self._fractions, self._others = np.array(fractions, np.int64), np.array(others, np.int64)
        self._ends = np.setdiff1d(np.flatnonzero(heads == 0), self._others)

    def bound(self, allowed: NDArray[np.bool_], history: TokenIds) -> NDArray[np.bool_]:
        """A grammar's mask for the next token without what would make a number too long; the same where none is.

        allowed: bool[vocab_size]. history: int32[T], what was written under the grammar.
        """
        number = self._number_before(history)
        if len(number) + self._longest <= MOST_WHOLE or allowed[self._others].any():
            return allowed
        is_whole = not {*b".eE"} & {*number} and not allowed[self._fractions].any()
        room = (MOST_WHOLE if is_whole else MOST_NUMBER) - len(number)
        # What has to go on, such as a constant, or a number behind its point, is not bounded.
        if not allowed[self._ends].any():
            return allowed
        fits = np.zeros_like(allowed)
        fits[: self._heads.size] = (self._costs <= room) | (self._heads == 0)
        fits &= allowed
        return fits

    def _number_before(self, history: TokenIds) -> bytes:
        """The characters of numbers that a text ends in, as many as matter."""
        parts: list[bytes] = []
        size = 0
        for token_id in history[::-1].tolist():
            tail = int(self._tails[token_id]) if token_id < self._tails.size else 0
            text = self._texts[token_id] if tail else b""
            parts.append(text[len(text) - tail :])
            size += tail
            if tail < len(text) or not tail or size > 2 * MOST_NUMBER:
                break
        return b"".join(reversed(parts))


def _found(pattern: re.Pattern[bytes], text: bytes) -> bytes:
    match = pattern.search(text)
    return b"" if match is None else match[0]

"""The masks of grammars: the tokens that may come next, and those that a grammar forces.

A mask is called with the history of ids, and moves its matcher there.

Numbers of JSON are bounded: a grammar alone lets small models write digits until the reply is cut off. A whole number
has at most the 20 characters of a 64-bit one, any other the 25 of the longest double. Where the grammar itself asks for
more, as a constant does, nothing is bounded.
"""

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.sampling.mask import Allowed
from localinfer.errors import ConstraintError
from localinfer.types import TokenIds

MOST_WHOLE = 20
"""Characters of a whole number: -9223372036854775808, or 18446744073709551615."""
MOST_NUMBER = 25
"""Characters of any other: -1.7976931348623157e+308 has 24."""
_HEAD = re.compile(rb"[-+.eE0-9]*")
_TAIL = re.compile(rb"[-+.eE0-9]*\Z")
_CONTINUES = re.compile(rb"[0-9]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]*)?")
_NEVER_BEHIND = b'"\\' + bytes(set(range(ord("a"), ord("z") + 1)) - {*b"e"})
"""Bytes that begin no token that may follow or continue a number."""


class NumberTokens:
    """Roles of the tokens of one vocabulary in numbers.

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
        # What has to continue, such as a constant, or a number behind its point, is not bounded.
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


class GrammarMatcher(Protocol):
    """Follows a text through a grammar, token by token. After an error nothing has a meaning but the error."""

    def copy(self) -> "GrammarMatcher":
        """Another matcher in the state of this one."""

    def mask(self) -> NDArray[np.uint8]:
        """Tokens that may come next, at the grammar's end those that end a text: bits, valid until the next call."""

    def consume(self, token_ids: Sequence[int]) -> int:
        """Follow tokens up to the first that may not come; return how many were followed."""

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Number of these tokens that may come, one after the other."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""

    def forced(self) -> list[int]:
        """Tokens that will most likely follow, because the text they spell has to."""

    def error(self) -> str | None:
        """Description of the error: the grammar is not one, or a limit of cost was reached."""


class MatcherMask:
    """The mask of one generation under one grammar.

    start: how long the prompt is. After the grammar's end only `end_ids` are allowed. numbers: bounds the numbers of
    JSON; None lets them be as long as the grammar does.
    Raises: ConstraintError from every method where the grammar reaches a limit of cost.
    """

    def __init__(
        self,
        matcher: GrammarMatcher,
        *,
        start: int,
        vocab_size: int,
        end_ids: Sequence[int],
        numbers: NumberTokens | None = None,
    ) -> None:
        self._matcher = matcher
        self._start = start
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._numbers = numbers
        self._followed = np.empty(0, np.int32)
        self._prepared: dict[int, tuple[TokenIds, Allowed]] = {}

    def __call__(self, history: TokenIds) -> Allowed:
        found = self._prepared.pop(history.size, None)
        if found is not None and np.array_equal(found[0], history[self._start :]):
            return found[1]
        self._follow(history)
        return self._compute(history)

    def forced(self, history: TokenIds, most: int) -> list[int]:
        self._follow(history)
        return self._matcher.forced()[:most]

    def prepare(self, history: TokenIds, position: int) -> None:
        self._prepared.clear()
        for size in range(position, history.size + 1):
            if size > position and int(history[size - 1]) in self._end_ids:
                return
            if not self._try_follow(history[:size]):
                return
            self._prepared[size] = (history[self._start : size].copy(), self._compute(history[:size]))

    def count_allowed(self, history: TokenIds, draft: Sequence[int]) -> int:
        self._follow(history)
        # The end of the text may come where the grammar can end, and nothing may follow it.
        ends = next((index for index, token_id in enumerate(draft) if token_id in self._end_ids), len(draft))
        return self._matcher.count_allowed(draft[:ends])

    def _compute(self, history: TokenIds) -> Allowed:
        bits = self._matcher.mask()
        self._check()
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return allowed if self._numbers is None else self._numbers.bound(allowed, history[self._start :])

    def _follow(self, history: TokenIds) -> None:
        if not self._try_follow(history):
            raise ConstraintError("the text has left its grammar: a token came that the mask did not allow")

    def _try_follow(self, history: TokenIds) -> bool:
        """Move the matcher to a history; return whether the grammar allows all of it."""
        wanted, followed = history[self._start :], self._followed
        shared = min(wanted.size, followed.size)
        differs = np.flatnonzero(wanted[:shared] != followed[:shared])
        if differs.size:
            shared = int(differs[0])
        if followed.size > shared:
            self._matcher.rollback(followed.size - shared)
        rest = wanted[shared:].tolist()
        count = self._matcher.consume(rest) if rest else 0
        self._check()
        self._followed = wanted[: shared + count].copy()
        return count == len(rest)

    def _check(self) -> None:
        error = self._matcher.error()
        if error is None:
            return
        if _first_line(error) == "NoExtensionBias":
            raise ConstraintError("the grammar allows nothing that could follow; change it", field="grammar")
        if error.lstrip().startswith("panic"):
            raise ConstraintError(
                "the grammar cannot be followed: its compiler fails at it; change it", field="grammar"
            )
        raise ConstraintError(
            f"the grammar became too costly to follow: {_first_line(error)}; give a simpler one", field="grammar"
        )


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:200]

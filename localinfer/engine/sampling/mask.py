"""Grammar masks: which tokens may come next, and which the grammar forces.

A mask is a function of the ids so far and nothing else, so it does not matter whether they were sampled one by one or
drafted and partly rolled back: it is called with the history, and moves its matcher there.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.sampling.number_bound import NumberTokens
from localinfer.errors import ConstraintError
from localinfer.types import TokenIds

Allowed = NDArray[np.bool_]


class GrammarMatcher(Protocol):
    """Follows a text through a grammar, token by token. After an error nothing has a meaning but the error."""

    def copy(self) -> "GrammarMatcher":
        """Another matcher in the state of this one."""
        ...

    def mask(self) -> NDArray[np.uint8]:
        """Which tokens may come next, at the grammar's end those that end a text: bits, valid until the next call."""
        ...

    def consume(self, token_ids: Sequence[int]) -> int:
        """Follow tokens up to the first that may not come; return how many were followed."""
        ...

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may come, one after the other."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        ...

    def forced(self) -> list[int]:
        """Tokens that will most likely follow, because the text they spell has to."""
        ...

    def error(self) -> str | None:
        """What went wrong: the grammar is not one, or a limit of cost was reached."""
        ...


@runtime_checkable
class GuidingMask(Protocol):
    """A `sampler.TokenMask` of a grammar matcher, which can also draft, check drafts and be prepared ahead of time.

    Histories are int32[T], prompt included. One thread at a time.
    """

    def __call__(self, history: TokenIds) -> Allowed:
        """Which tokens may follow: bool[vocab_size], valid until the next call but one."""
        ...

    def forced(self, history: TokenIds, most: int) -> list[int]:
        """At most `most` tokens that will most likely follow, because the text they spell has to."""
        ...

    def prepare(self, history: TokenIds, position: int) -> None:
        """Compute the masks of positions `position` to len(history), for calls that come soon.

        May run beside the forward pass over a draft, whose ids `history` ends in.
        """
        ...

    def count_allowed(self, history: TokenIds, draft: Sequence[int]) -> int:
        """How many tokens of a draft may come, one after the other."""
        ...


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

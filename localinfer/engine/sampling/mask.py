"""Token masks: the tokens that may come next.

A mask is a function of the ids so far and nothing else, so it does not matter whether they were sampled one by one or
drafted and partly rolled back: it is called with the history. One of a grammar also says which tokens are forced
(`GuidingMask`). Rules about single tokens are masks, too (`RulesMask`): which may come at all, which only late, and
which not behind others.
"""

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.sampling.params import TokenRules
from localinfer.errors import RequestError
from localinfer.types import TokenIds

Allowed = NDArray[np.bool_]

_MOST_IDS = 1 << 20
_MOST_SEQUENCES = 4096
_LONGEST = 64


@runtime_checkable
class GuidingMask(Protocol):
    """A `sampler.TokenMask` of a grammar matcher, which can also draft, check drafts and be prepared ahead of time.

    Histories are int32[T], prompt included. One thread at a time.
    """

    def __call__(self, history: TokenIds) -> Allowed:
        """Tokens that may follow: bool[vocab_size], valid until the next call but one."""

    def forced(self, history: TokenIds, most: int) -> list[int]:
        """At most `most` tokens that will most likely follow, because the text they spell has to."""

    def prepare(self, history: TokenIds, position: int) -> None:
        """Compute the masks of positions `position` to len(history), for calls that come soon.

        May run beside the forward pass over a draft, whose ids `history` ends in.
        """

    def count_allowed(self, history: TokenIds, draft: Sequence[int]) -> int:
        """Number of tokens of a draft that may come, one after the other."""


def rules_mask(
    rules: TokenRules, mask: GuidingMask | None, *, start: int, vocab_size: int, end_ids: Collection[int]
) -> "RulesMask":
    """The rules over another mask or none. start: how long the prompt is. end_ids: tokens that end the text.

    Raises: RequestError for ids that the vocabulary has not, and for too many.
    """
    return (
        RulesMask(rules, start, vocab_size, end_ids)
        if mask is None
        else GuidedRules(rules, start, vocab_size, end_ids, mask)
    )


class RulesMask:
    """A `sampler.TokenMask` of the rules."""

    def __init__(self, rules: TokenRules, start: int, vocab_size: int, end_ids: Collection[int]) -> None:
        self._start = start
        self._min_tokens = rules.min_tokens
        self._ends = np.array(sorted(one for one in end_ids if one < vocab_size), np.int64)
        self._allowed = np.ones(vocab_size, np.bool_)
        if rules.allowed_ids is not None:
            _check_ids("allowed_token_ids", rules.allowed_ids, vocab_size)
            self._allowed[:] = False
            self._allowed[[*rules.allowed_ids]] = True
            self._allowed[self._ends] = True
        if len(rules.bad_sequences) > _MOST_SEQUENCES or any(len(one) > _LONGEST for one in rules.bad_sequences):
            raise RequestError(
                f"bad_words has {len(rules.bad_sequences)} texts; give at most {_MOST_SEQUENCES // 2}, each of at most "
                f"{_LONGEST} tokens",
                field="bad_words",
            )
        self._sequences: dict[int, list[list[int]]] = {}
        for sequence in rules.bad_sequences:
            if len(sequence) == 1:
                self._allowed[sequence[0]] = False
            elif sequence:
                # By the token before the last, of which few are the one that was written just now.
                self._sequences.setdefault(sequence[-2], []).append([*sequence])

    def __call__(self, history: TokenIds) -> Allowed:
        """Tokens that may follow: bool[vocab_size], which the caller leaves as it is."""
        is_early = history.size - self._start < self._min_tokens
        forbidden = self._forbidden(history)
        if not is_early and not forbidden:
            return self._allowed
        allowed = self._allowed.copy()
        if is_early:
            allowed[self._ends] = False
        allowed[forbidden] = False
        return allowed

    def _forbidden(self, history: TokenIds) -> list[int]:
        """The last tokens of sequences whose others the text ends in."""
        if not self._sequences or not history.size:
            return []
        found = self._sequences.get(int(history[-1]), ())
        return [one[-1] for one in found if history[max(0, history.size - len(one) + 1) :].tolist() == one[:-1]]


class GuidedRules(RulesMask):
    """The rules over a grammar's mask, which still drafts."""

    def __init__(
        self, rules: TokenRules, start: int, vocab_size: int, end_ids: Collection[int], mask: GuidingMask
    ) -> None:
        super().__init__(rules, start, vocab_size, end_ids)
        self._mask = mask

    def __call__(self, history: TokenIds) -> Allowed:
        """Tokens that may follow by both; those of the grammar where it is at its end."""
        guided = self._mask(history)
        both: Allowed = guided & super().__call__(history)
        if both.any():
            return both
        ended = np.zeros_like(guided)
        ended[self._ends] = guided[self._ends]
        return ended

    def forced(self, history: TokenIds, most: int) -> list[int]:
        """Tokens that the grammar forces; a draft, which the rules may refuse."""
        return self._mask.forced(history, most)

    def prepare(self, history: TokenIds, position: int) -> None:
        """Prepare the grammar's mask."""
        self._mask.prepare(history, position)

    def count_allowed(self, history: TokenIds, draft: Sequence[int]) -> int:
        """Number of tokens of a draft that may come by both."""
        count = self._mask.count_allowed(history, draft)
        for index in range(count):
            before = np.concatenate((history, np.array(draft[:index], np.int32)))
            if not RulesMask.__call__(self, before)[draft[index]]:
                return index
        return count


def _check_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if len(token_ids) > _MOST_IDS or not token_ids:
        raise RequestError(f"{name} has {len(token_ids)} ids; give one to {_MOST_IDS}, or leave it out", field=name)
    wrong = next((one for one in token_ids if not 0 <= one < vocab_size), None)
    if wrong is not None:
        raise RequestError(f"{name} has {wrong}, but the vocabulary ends at {vocab_size - 1}; remove it", field=name)

"""An end to reasoning that has cost too many tokens: the marker that closes it is all that may come."""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localinfer.engine.sampling.mask import Allowed, GuidingMask
from localinfer.types import TokenIds

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer


class _Progress(NamedTuple):
    """State after some tokens: the end of the text, and the tokens after which reasoning began and was used up."""

    tail: bytes
    began: int | None
    spent: int | None
    is_closed: bool


class ThinkingBudget:
    """A mask that lets reasoning take so many tokens, over another mask or none.

    begin: the marker that opens reasoning, None where the prompt has opened it. end: the one that closes it.
    closing_ids: what is forced after `budget` tokens of reasoning, as soon as the text is whole characters.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        mask: GuidingMask | None,
        *,
        start: int,
        vocab_size: int,
        begin: str | None,
        end: str,
        closing_ids: Sequence[int],
        budget: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._mask = mask
        self._start = start
        self._begin = None if begin is None else begin.encode()
        self._end = end.encode()
        self._closing_ids = tuple(closing_ids)
        self._budget = budget
        self._followed = np.empty(0, np.int32)
        self._progress = [self._checked(_Progress(b"", 0 if begin is None else None, None, False), 0)]
        self._everything = np.ones(vocab_size, np.bool_)

    def __call__(self, history: TokenIds) -> Allowed:
        forced = self._forced(history)
        if forced:
            allowed = np.zeros_like(self._everything)
            allowed[forced[0]] = True
            return allowed
        return self._everything if self._mask is None else self._mask(history)

    def forced(self, history: TokenIds, most: int) -> list[int]:
        forced = self._forced(history)
        if forced:
            return forced[:most]
        return [] if self._mask is None else self._mask.forced(history, most)

    def prepare(self, history: TokenIds, position: int) -> None:
        if self._mask is not None:
            self._mask.prepare(history, position)

    def count_allowed(self, history: TokenIds, draft: Sequence[int]) -> int:
        count = len(draft) if self._mask is None else self._mask.count_allowed(history, draft)
        for index in range(count):
            forced = self._forced(np.concatenate((history, np.array(draft[:index], np.int32))))
            if forced and forced[0] != draft[index]:
                return index
        return count

    def _forced(self, history: TokenIds) -> list[int]:
        """Rest of the closing marker that is still to come, if it has to."""
        token_ids = history[self._start :]
        self._follow(token_ids)
        spent = self._progress[-1].spent
        return [] if spent is None else list(self._closing_ids[token_ids.size - spent :])

    def _follow(self, token_ids: TokenIds) -> None:
        shared = min(token_ids.size, self._followed.size)
        differs = np.flatnonzero(token_ids[:shared] != self._followed[:shared])
        if differs.size:
            shared = int(differs[0])
        del self._progress[shared + 1 :]
        for token_id in token_ids[shared:].tolist():
            spelled = self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""
            self._progress.append(self._after(self._progress[-1], spelled, len(self._progress)))
        self._followed = token_ids.copy()

    def _after(self, progress: _Progress, spelled: bytes, size: int) -> _Progress:
        """The progress after one more token, the `size`-th."""
        if progress.is_closed or progress.spent is not None:
            return progress
        text = progress.tail + spelled
        if progress.began is None:
            assert self._begin is not None, "else it began with the reply"
            stripped = text.lstrip()
            if stripped.startswith(self._begin):
                return self._checked(_Progress(stripped[len(self._begin) :], size, None, False), size)
            return _Progress(text, None, None, not self._begin.startswith(stripped))
        return self._checked(progress._replace(tail=text), size)

    def _checked(self, progress: _Progress, size: int) -> _Progress:
        """Reasoning ends where its marker stands, or where it has used up its tokens."""
        if progress.began is None:
            return progress
        if self._end in progress.tail:
            return progress._replace(is_closed=True)
        if size >= progress.began + self._budget and _is_whole(progress.tail):
            return progress._replace(spent=size)
        return progress._replace(tail=progress.tail[-len(self._end) - 4 :])


def _is_whole(text: bytes) -> bool:
    """True if a text does not end inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[-4:])
    return not decoder.getstate()[0]

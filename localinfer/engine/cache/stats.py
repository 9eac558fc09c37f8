"""Figures of the prefix cache: hits, snapshots, and the causes of misses, for callers that look for lost time."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from localinfer.engine.cache.block_hashes import common_length
from localinfer.types import Record

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.types import TokenIds

_MOST_EVICTED_TEXTS = 256
_MOST_EVICTED_TOKENS = 1 << 20
"""Evicted texts, and token ids of them, that are kept."""

CacheMissCause = Literal["empty", "different", "template", "evicted", "windowed", "snapshot", "foreign", "media"]
"""empty: nothing is cached. different: the text parts from the cached one. template: the chat template wrote the
messages of an earlier prompt in another way. evicted: it was cached, and memory ended. windowed: it is cached, but the
model's sliding-window layers keep only what comes before the ends of texts and prompts. snapshot: it is cached, but
there is no snapshot of the states of the model's recurrent layers. foreign: it is stored, but by another model, version
or kv_type. media: the text parts from the cached one at a picture or sound."""


class CacheMiss(Record):
    """The first position where a prompt was not found, and the cause."""

    cause: CacheMissCause
    position: int
    """Position of the first token that had to be computed though something like it is, or was, cached."""
    before: tuple[int, ...] = ()
    """Token ids before it that both share."""
    cached: tuple[int, ...] = ()
    """Token ids that are cached next."""
    wanted: tuple[int, ...] = ()
    """Token ids that the prompt has instead."""
    detail: str = ""
    """More words, may be empty."""
    until: int = 0
    """Number of cached tokens, if more than are used."""

    def describe(self, tokenizer: "Tokenizer | None") -> str:
        """In one sentence, with texts if there is a tokenizer, or else token ids."""
        summary = self.summary
        if not self.cached:
            return summary
        after = f", after {_show(self.before, tokenizer)}" if self.before else ""
        return f"{summary}{after}: cached {_show(self.cached, tokenizer)}, now {_show(self.wanted, tokenizer)}"

    @property
    def summary(self) -> str:
        """The same without a word of any text, for callers that may not read others'."""
        if self.cause == "empty":
            return "nothing was cached yet"
        if self.cause == "evicted":
            return f"from token {self.position} on it was cached once and was evicted for lack of memory"
        if self.cause == "windowed":
            return (
                f"of tokens {self.position} to {self.until} the model's sliding-window layers keep nothing, so they "
                "are computed again"
            )
        if self.cause == "snapshot":
            start = f"are computed again from {self.position} on" if self.position else "are computed again"
            return f"no snapshot before position {self.until} of the model's recurrent states, which {start}"
        if self.cause == "foreign":
            return f"what is stored cannot be used: {self.detail}"
        if self.cause == "media":
            return f"{self.detail}, at token {self.position}"
        what = "the chat template wrote an earlier message anew" if self.cause == "template" else "the text differs"
        return f"{what} at token {self.position}" + (f", {self.detail}" if self.detail else "")


def _show(token_ids: Sequence[int], tokenizer: "Tokenizer | None") -> str:
    if tokenizer is None or any(token_id >= tokenizer.vocab_size for token_id in token_ids):
        return str(list(token_ids))
    parts = []
    for is_media, ids in groupby(token_ids, lambda token_id: token_id < 0):
        parts.append("[picture or sound]" if is_media else tokenizer.decode(list(ids), skip_special=False))
    return repr("".join(parts))


class EvictedTexts:
    """Token ids of the texts that were evicted last, to explain later misses."""

    def __init__(self) -> None:
        # Each with its salt and its first id, which tells most of them apart.
        self._texts: deque[tuple[bytes, int, TokenIds]] = deque()
        self._num_tokens = 0

    def add(self, token_ids: "TokenIds", salt: bytes) -> None:
        """Keep an evicted text, unless a longer one that begins so is kept already."""
        if self.shared_length(token_ids, salt) == token_ids.size:
            return
        self._texts.append((salt, int(token_ids[0]), token_ids))
        self._num_tokens += token_ids.size
        while len(self._texts) > _MOST_EVICTED_TEXTS or (
            len(self._texts) > 1 and self._num_tokens > _MOST_EVICTED_TOKENS
        ):
            self._num_tokens -= self._texts.popleft()[2].size

    def shared_length(self, token_ids: "TokenIds", salt: bytes) -> int:
        """Number of ids that a text and an evicted one of the same salt share at their start."""
        if not token_ids.size:
            return 0
        first = int(token_ids[0])
        alike = (ids for own, begin, ids in self._texts if begin == first and own == salt)
        return max((common_length(ids, token_ids) for ids in alike), default=0)

    def clear(self) -> None:
        """Forget them."""
        self._texts.clear()
        self._num_tokens = 0


@dataclass
class CacheCounters:
    """Figures of the cache since the model was loaded."""

    prompts: int = 0
    """Prompts that were looked up."""
    hits: int = 0
    """Prompts of which at least one token was found."""
    prompt_tokens: int = 0
    """Tokens of the prompts."""
    cached_tokens: int = 0
    """Tokens that were found."""
    misses: Counter[CacheMissCause] = field(default_factory=Counter)
    """Prompts that were not found as far as they might have been, by cause."""
    snapshot_hits: int = 0
    """Sequences that resumed from a snapshot of recurrent states."""


class SnapshotStats(Record):
    """Snapshots of recurrent states in memory: how many, those on the grid, and bytes of both; and how many were taken,
    evicted, and resumed from since the model was loaded."""

    held: int
    num_bytes: int
    grid: int
    grid_bytes: int
    taken: int
    evicted: int
    hits: int

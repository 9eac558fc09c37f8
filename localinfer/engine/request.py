"""One generation as the engine keeps it (`Request`), and what its reader gets of it (`TokenEvent`, the record)."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.cache.prefix_cache import CacheHints, CacheMiss
from localinfer.cache.sequence import SequenceCache
from localinfer.engine.step_lock import Waiter
from localinfer.sampling.mask import GuidingMask
from localinfer.sampling.sampler import SamplingPlan
from localinfer.speculation.verify import SpeculationRecord, SpeculativeText

FinishReason = Literal["stop", "length", "cancelled"]
"""stop: an end token or a stop string; length: max_tokens, or the end of the context or of memory; cancelled: by
`cancel`."""

NO_TOKEN = -1
"""`token_id` of the event that ends a generation between two tokens, and stands for none."""

HISTORY_ROOM = 512
"""Tokens a generation has room for before its list of ids first grows."""


class TokenEvent(NamedTuple):
    """One sampled token: its id, its position in the sequence, and why it is the last one, if it is.

    Where the reason is "cancelled", or "length" because memory ended, there is no token: the id is NO_TOKEN.
    """

    token_id: int
    position: int
    finish_reason: FinishReason | None


@dataclass
class GenerationRecord:
    """What a generation has cost so far, updated while it runs.

    cached_tokens: of the prompt, not computed again. miss: why not more of them, None if nothing stood in the way.
    dropped_tokens: left out of the context, by `context_shift`. speculation: what drafts did, None where it is off.
    waited_seconds: from the request to its admission. notices: deviations from what was asked, in words.
    """

    cached_tokens: int = 0
    miss: CacheMiss | None = None
    dropped_tokens: int = 0
    speculation: SpeculationRecord | None = None
    waited_seconds: float = 0.0
    notices: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Request:
    """One generation inside the engine; changed only under the step lock, except where said otherwise.

    head: int32, the ids its sequence began with; history: int32, prompt and completion, with room for more; base: where
    in the history the head ends. position: of the next token, in the history; last: of the last one that is wanted.
    sequence: None before it is admitted, and while it is preempted. events: sampled, not read yet; any thread may
    take them. matcher: its mask, if a grammar matcher. served: the last step that did.
    """

    plan: SamplingPlan
    hints: CacheHints
    head: NDArray[np.int32]
    history: NDArray[np.int32]
    base: int
    last: int
    stops: frozenset[int]
    record: GenerationRecord
    owner: Hashable
    speculative: SpeculativeText | None = None
    is_prompt: bool = True
    sequence: SequenceCache | None = None
    prompt_length: int = field(init=False)
    position: int = field(init=False)
    matcher: GuidingMask | None = field(init=False)
    events: deque[TokenEvent] = field(default_factory=deque)
    waiter: Waiter | None = None
    error: Exception | None = None
    is_started: bool = False
    is_over: bool = False
    is_cancelled: bool = False
    served: int = 0
    began: float = 0.0

    def __post_init__(self) -> None:
        self.prompt_length = self.position = self.base
        self.matcher = self.plan.mask if isinstance(self.plan.mask, GuidingMask) else None

    @property
    def length(self) -> int:
        """Ids of the text in its present sequence, computed or not."""
        return self.head.size + self.position - self.base

    @property
    def cache(self) -> SequenceCache:
        """Its sequence, which it has from admission until it is preempted or over."""
        assert self.sequence is not None, "it was admitted"
        return self.sequence

    def has_news(self) -> bool:
        """Whether its reader need not wait any longer."""
        return bool(self.events) or self.is_over or self.is_cancelled

    def token_ids(self) -> NDArray[np.int32]:
        """The ids of the text in its present sequence, computed or not."""
        return np.concatenate((self.head, self.history[self.base : self.position]))

    def context_ids(self) -> NDArray[np.int32]:
        """The ids whose keys and values the sequence holds."""
        after = max(0, self.cache.length - self.head.size)
        return np.concatenate((self.head, self.history[self.base : self.base + after]))[: self.cache.length]

    def grow_history(self, length: int) -> None:
        """Let the history hold at least so many ids."""
        if length > self.history.size:
            self.history = np.concatenate((self.history, np.empty_like(self.history, shape=length)))

    def restart(self, head: NDArray[np.int32]) -> None:
        """Continue from these ids in another sequence, yet to be admitted."""
        self.head, self.base, self.sequence, self.is_prompt = head, self.position, None, False

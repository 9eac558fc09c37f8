"""One generation: what its reader holds (`Generation`), and what the engine knows of it (`Request`)."""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.cache.miss import CacheMiss
from localinfer.cache.prefix_cache import CacheHints
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
    """What a generation has cost so far, kept up to date while it runs.

    cached_tokens: of the prompt, not computed again. miss: why not more of them, None where nothing stood in the way.
    dropped_tokens: left out of the context, by `context_shift`. speculation: what drafts did, None where it is off.
    waited_seconds: from the request to a place among those that run. notices: what did not go as was asked, in words.
    """

    cached_tokens: int = 0
    miss: CacheMiss | None = None
    dropped_tokens: int = 0
    speculation: SpeculationRecord | None = None
    waited_seconds: float = 0.0
    notices: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Request:
    """One generation inside the engine; whoever has the turn may change it, but for what is said otherwise.

    head: int32, the ids its sequence began with; history: int32, prompt and completion, with room for more; base: where
    in the history the head ends. position: of the next token, in the history; last: of the last one that is wanted.
    sequence: None before it is admitted, and while it waits for memory. events: sampled, not read yet; any thread may
    take them. guide: its mask, if that knows what comes next. served: the step that last computed something of it.
    """

    plan: SamplingPlan
    use: CacheHints
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
    guide: GuidingMask | None = field(init=False)
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
        mask = self.plan.mask
        self.guide = mask if isinstance(mask, GuidingMask) else None

    @property
    def length(self) -> int:
        """Ids of the text in its present sequence, computed or not."""
        return self.head.size + self.position - self.base

    def has_news(self) -> bool:
        """Whether its reader need not wait any longer."""
        return bool(self.events) or self.is_over or self.is_cancelled

    def context_ids(self) -> NDArray[np.int32]:
        """The ids whose keys and values the sequence holds."""
        assert self.sequence is not None, "asked for before it was admitted"
        after = max(0, self.sequence.length - self.head.size)
        return np.concatenate((self.head, self.history[self.base : self.base + after]))[: self.sequence.length]

    def token_ids(self) -> NDArray[np.int32]:
        """The ids of the text in its present sequence, computed or not."""
        return np.concatenate((self.head, self.history[self.base : self.position]))

    def make_room(self, length: int) -> None:
        """Let the history hold at least so many ids."""
        if length > self.history.size:
            self.history = np.concatenate((self.history, np.empty_like(self.history, shape=length)))

    def begin_anew(self, head: NDArray[np.int32]) -> None:
        """Go on from these ids in another sequence, yet to be admitted."""
        self.head, self.base, self.sequence, self.is_prompt = head, self.position, None, False


class GenerationSource(Protocol):
    """What a `Generation` is read from; `scheduler.Scheduler` is one."""

    def next_event(self, run: Request) -> TokenEvent | None:
        """Wait for the next event of a run and take it; None after its last one."""
        ...

    def cancel(self, run: Request) -> None:
        """End a run, whose reader is told so. Any thread, at any time."""
        ...

    def leave(self, run: Request) -> None:
        """End a run that nobody reads any more. Any thread, at any time, even the garbage collector; never waits."""
        ...


class Generation(Iterator[TokenEvent]):
    """The tokens of one generation as they are sampled, and what they cost; one reader at a time.

    `cancel` and `close` may be called by any thread at any time. What was computed stays in the cache.
    """

    def __init__(self, source: GenerationSource, run: Request) -> None:
        self.record = run.record
        self._source = source
        self._run = run

    @property
    def computed_tokens(self) -> int:
        """How many ids were read, computed or from the cache; 0 without a place among those that run."""
        sequence = self._run.sequence
        return 0 if sequence is None else sequence.length

    def __next__(self) -> TokenEvent:
        event = self._source.next_event(self._run)
        if event is None:
            raise StopIteration
        return event

    def cancel(self) -> None:
        """End the generation within the step in progress: its reader gets one last event, of reason "cancelled".

        Tokens that were not read yet are dropped. Nothing happens if it has ended by itself. May be called again.
        """
        self._source.cancel(self._run)

    def close(self) -> None:
        """End the generation without a word to its reader. May be called again."""
        self._source.leave(self._run)

    def __del__(self) -> None:
        self._source.leave(self._run)

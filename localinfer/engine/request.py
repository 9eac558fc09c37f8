"""One generation as the engine keeps it (`Request`), what its reader gets of it (`TokenEvent`, the record), and the
step lock, on which readers wait.

One thread at a time takes a step for all requests, and no thread exists only to do so. A thread that wants a token
takes the lock if it is free; the others wait, each on a lock of its own. A thread that releases the lock wakes those
whose requests have news, and hands the lock to the first that still has none: one that wants the model exclusively
between two steps, or the reader of a request, which then continues with the steps of all. So a lone thread switches to
no other, and none waits for a thread that is busy elsewhere.

Nothing of the lock blocks but `exclusive` and `acquire_or_wait`, and the garbage collector may acquire and release it
in the middle of any line: what happens at once rests on single operations of deques and on locks that are only tried.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.cache.stats import CacheMiss
from localinfer.engine.media import PlacedMedia
from localinfer.engine.sampling.mask import GuidingMask
from localinfer.engine.sampling.sampler import SamplingPlan
from localinfer.types import FinishReason

if TYPE_CHECKING:
    from localinfer.engine.speculation.verify import SpeculationRecord, SpeculativeText


class Waiter:
    """A thread that waits for news, or for the lock; it gets one of them, and the first thread to claim it decides.

    reader: what it waits for; None for one that wants the model exclusively.
    """

    __slots__ = ("_claim", "_wake", "has_lock", "reader")

    def __init__(self, reader: "Request | None") -> None:
        self.reader = reader
        self.has_lock = False
        self._claim = threading.Lock()
        self._wake = threading.Lock()
        self._wake.acquire()

    def claim(self) -> bool:
        """Claim the decision; return True for the first caller only."""
        return self._claim.acquire(blocking=False)

    def wake(self) -> None:
        """End the wait; after `claim`."""
        self._wake.release()

    def wait(self) -> None:
        """Wait to be woken."""
        self._wake.acquire()


class StepLock:
    """The lock, and the threads that wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: deque[Waiter] = deque()
        self.try_acquire: Callable[[], bool] = functools.partial(self._lock.acquire, False)
        """Take the lock if it is free. Every token of a lone request begins with it, so it is no method."""

    def acquire_or_wait(self, reader: "Request | None") -> bool:
        """Take the lock, or wait for it or for news; return whether the caller has the lock now."""
        if self.try_acquire():
            return True
        waiter = Waiter(reader)
        if reader is not None:
            reader.waiter = waiter
        self._waiters.append(waiter)
        # The lock may have become free, or the news come, before this one was in line.
        if self.try_acquire():
            waiter.claim()
            return True
        if reader is not None and reader.has_news() and waiter.claim():
            return False
        try:
            waiter.wait()
        except BaseException:
            if not waiter.claim():
                waiter.wait()
            if waiter.has_lock:
                self.release()
            raise
        return waiter.has_lock

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Hold the lock for a block, before the next step."""
        has_lock = self.acquire_or_wait(None)
        assert has_lock, "it waits for nothing else"
        try:
            yield
        finally:
            self.release()

    def hand_to_exclusive(self) -> bool:
        """Between two steps of one thread: wake readers with news, and hand the lock to one that wants it exclusively.

        Returns whether the caller still has the lock.
        """
        return not (self._waiters and self._hand_off(only_exclusive=True))

    def release(self) -> None:
        """Wake readers with news, and hand the lock to the first thread that still waits."""
        while True:
            if self._waiters and self._hand_off(only_exclusive=False):
                return
            self._lock.release()
            # A thread may have come between the look and the release.
            if not self._waiters or not self.try_acquire():
                return

    def _hand_off(self, *, only_exclusive: bool) -> bool:
        """Wake all readers with news, and hand the lock to the first of the others; return whether there was one."""
        successor = None
        for waiter in self._waiters.copy():
            reader = waiter.reader
            if reader is not None and reader.has_news():
                if waiter.claim():
                    waiter.wake()
            elif successor is None and (reader is None or not only_exclusive):
                successor = waiter if waiter.claim() else None
            else:
                continue
            self._waiters.remove(waiter)
        if successor is not None:
            successor.has_lock = True
            successor.wake()
        return successor is not None


NO_TOKEN = -1
"""`token_id` of the event that ends a generation between two tokens, and stands for none."""

_READ_AHEAD = 4
"""Tokens a request may be ahead of its reader; with more, it waits until they are read."""

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
    """Costs of a generation so far, updated while it runs."""

    cached_tokens: int = 0
    """Tokens of the prompt that were not computed again."""
    prefilled_tokens: int = 0
    """Cached tokens that another process has computed for this very generation."""
    miss: CacheMiss | None = None
    """The reason why no more were cached; None if nothing stood in the way."""
    dropped_tokens: int = 0
    """Tokens left out of the context, by `context_shift`."""
    speculation: "SpeculationRecord | None" = None
    """Results of drafting; None where it is off."""
    waited_seconds: float = 0.0
    """Time from the request to its admission."""
    state_snapshots: int = 0
    """Snapshots of recurrent states that the cache held at the end."""
    notices: list[str] = field(default_factory=list)
    """Deviations from the options, in words."""


@dataclass(eq=False, slots=True)
class Request:
    """One generation inside the engine; changed only under the step lock, except where said otherwise."""

    plan: SamplingPlan
    hints: CacheHints
    head: NDArray[np.int32]
    """int32, the ids that its sequence began with."""
    history: NDArray[np.int32]
    """int32, prompt and completion, with room for more."""
    base: int
    """Position in the history where the head ends."""
    prompt_length: int
    last: int
    """Position of the last wanted token, in the history."""
    stops: frozenset[int]
    record: GenerationRecord
    owner: Hashable
    media: PlacedMedia | None = None
    """Pictures and sounds of the head; None if it has none."""
    priority: int = 0
    """Lower numbers come earlier."""
    speculative: "SpeculativeText | None" = None
    is_prompt: bool = True
    sequence: SequenceCache | None = None
    """None before it is admitted, and while it is preempted."""
    position: int = field(init=False)
    """Position of the next token, in the history."""
    matcher: GuidingMask | None = field(init=False)
    """The mask of the plan, if it is a grammar matcher."""
    events: deque[TokenEvent] = field(default_factory=deque)
    """Sampled tokens that were not read yet; any thread may take them."""
    waiter: Waiter | None = None
    error: Exception | None = None
    is_started: bool = False
    is_over: bool = False
    is_cancelled: bool = False
    served: int = 0
    """Number of the last step that computed rows of it."""
    gave_way_to: frozenset[SequenceCache] = frozenset()
    """Sequences that were open when it was preempted; they hold the memory that it lacked."""
    began: float = 0.0
    token_seconds: float = 0.0
    """Time of its last token, or of its arrival."""
    expected_rows: int | None = None
    """Rows of its prompt that were neither computed nor cached at its arrival."""
    predicted_seconds: float | None = None
    """Predicted time to its first token, counted from `began`; None without an objective."""
    final_length: int = 0
    """Length of its sequence, once it is over."""

    def __post_init__(self) -> None:
        self.position = self.base
        self.matcher = self.plan.mask if isinstance(self.plan.mask, GuidingMask) else None

    @property
    def can_proceed(self) -> bool:
        """True if a step may work for it: its reader keeps up, and it has not ended."""
        return len(self.events) < _READ_AHEAD and not self.is_over and not self.is_cancelled

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
        """True if its reader need not wait any longer."""
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

    def restart(self, head: NDArray[np.int32], media: PlacedMedia | None) -> None:
        """Continue from these ids, with these pictures and sounds, in another sequence, yet to be admitted."""
        self.head, self.media = head, media
        self.base, self.sequence, self.is_prompt = self.position, None, False

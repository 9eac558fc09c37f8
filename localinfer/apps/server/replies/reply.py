"""The texts of one request: a thread iterates each, and the event loop takes their events.

Between the two: the threads (`ReplyThreads`), their events (`LoopCalls`), and the admission barrier before the first
byte. A `ReplyRelay` lets another process resume a reply, so that its client receives every byte once."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from localinfer.apps.server.operation.observation import LatencyTracker, Metrics
from localinfer.apps.server.replies.relay import ReplyRelay
from localinfer.apps.server.router.models import Lease
from localinfer.system.event_loop import LoopCalls

if TYPE_CHECKING:
    from localinfer.generation.stream import Stats, StreamEvent, TextStream
    from localinfer.types import TokenIds


logger = logging.getLogger("localinfer.server")

_Job = Callable[[], None]
_BARRIER_SECONDS = 0.015
"""Time that a prompt waits for other requests at most, such as one that takes long to be checked."""


class ReplyThreads:
    """As many threads as ever worked at one time, kept for the next job: starting one would hold the event loop up.

    None keeps the interpreter from ending.
    """

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[_Job | None]] = deque()
        self._is_closed = False

    @property
    def num_idle(self) -> int:
        """Number of threads that wait for a job."""
        return len(self._idle)

    def run(self, job: _Job) -> None:
        """Have a job done at once; it must not raise."""
        try:
            self._idle.pop().put(job)
        except IndexError:
            threading.Thread(target=self._work, args=(job,), name="localinfer-reply", daemon=True).start()

    def close(self) -> None:
        """End idle threads now, and the others after their job."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _work(self, job: _Job | None) -> None:
        jobs: SimpleQueue[_Job | None] = SimpleQueue()
        while job is not None:
            job()
            # An idle thread must not keep what the job held.
            job = None
            self._idle.append(jobs)
            if self._is_closed:
                self.close()
            job = jobs.get()


class AdmissionBarrier:
    """Requests without an answer yet: a thread about to compute a prompt lets their first bytes out before.

    A step takes every core. Requests that come at one time would be read, checked and answered between its threads,
    each in slices of some milliseconds; so they share their first step instead, and it begins when all have their first
    bytes. Any thread may call.
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._changed = threading.Condition()

    def begin(self) -> None:
        """A request has come."""
        with self._changed:
            self._num_open += 1

    def end(self) -> None:
        """Its first bytes are out, or never will be."""
        with self._changed:
            self._num_open -= 1
            if not self._num_open:
                self._changed.notify_all()

    def wait(self) -> bool:
        """Return when no request is being opened, or after a while; whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_open, _BARRIER_SECONDS)


@dataclass(frozen=True)
class ServerState:
    """State that the replies of a server share. Made on its event loop."""

    metrics: Metrics
    calls: LoopCalls = field(default_factory=LoopCalls.of_running_loop)
    threads: ReplyThreads = field(default_factory=ReplyThreads)
    barrier: AdmissionBarrier = field(default_factory=AdmissionBarrier)


class TextStage(Protocol):
    """A stage of a text between its opened stream and its first event; called in the text's thread, one by one."""

    def __call__(self, stream: "TextStream", is_cancelled: Callable[[], bool], /) -> object: ...


@dataclass(frozen=True)
class TextPlan:
    """A text to be generated: opened, checked, announced to its client, prepared, and iterated."""

    open: Callable[[], "TextStream"]
    """Checks the request and returns the stream; may raise."""
    follows: int | None = None
    """Index of a text with the same prompt, whose first token this one awaits, to take its prompt from the cache."""
    checks: Sequence[TextStage] = ()
    """Stages before the text is announced; they may raise, and refuse it."""
    preparations: Sequence[TextStage] = ()
    """Stages between that and the first event; they must not raise."""
    summaries: Callable[[], Iterable["TextStream"]] | None = None
    """Gives streams to be read before the text's, of which the client gets nothing: summaries of its conversation."""


@dataclass(frozen=True, slots=True)
class Token:
    """The next event of the text with this index."""

    index: int
    event: "StreamEvent"


@dataclass(frozen=True, slots=True)
class End:
    """The end of the text with this index: why, and what it cost, None if it was stopped before it began."""

    index: int
    finish_reason: str
    stats: "Stats | None"


class Silence:
    """Nothing came for a while."""


@dataclass(frozen=True)
class _Started:
    index: int
    prompt_tokens: int


@dataclass(frozen=True)
class _Failure:
    error: BaseException


ReplyEvent = Token | End | Silence
_Item = ReplyEvent | _Started | _Failure


class ReplyOwner(Protocol):
    """Holder of what a reply uses; called on the event loop."""

    def end(self, reply: "Reply") -> None:
        """Count a reply: once, before its last event is given to be sent, or else when it is closed."""

    def close(self, reply: "Reply") -> None:
        """Release what a reply has used; once."""


class Reply:
    """The texts of one request, from admission to the last event. Made, iterated and closed on the event loop.

    id: names the request to clients. tenant: its owner, where clients are kept apart. slot_ids: one per text,
    where it shows among the slots. relay: passes it on, if it is relayed. notices: of the request.
    stats, finish_reasons: one per text, None until its end was taken. failure: what `events` raised. prompt_tokens: one
    per text, known after `start`. token: its client's, by name. owner: notified of its end.
    """

    def __init__(
        self,
        reply_id: str,
        lease: Lease,
        plans: Sequence[TextPlan],
        state: ServerState,
        owner: ReplyOwner,
        relay: ReplyRelay | None = None,
    ) -> None:
        self.id = reply_id
        self.llm = lease.llm
        self.model_id = lease.model_id
        self.fingerprint = lease.fingerprint
        self.created = int(time.time())
        self.relay = relay
        self.opened_seconds = time.monotonic()
        self.is_cancelled = False
        self.slot_ids: list[int] = []
        self.tenant = self.token = ""
        self.notices: tuple[str, ...] = ()
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.stats: list[Stats | None] = [None] * len(plans)
        self.finish_reasons: list[str | None] = [None] * len(plans)
        self.failure: BaseException | None = None
        self.prompt_tokens = [0] * len(plans)
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._texts: list[_Text] = []
        for index, plan in enumerate(plans):
            leader = None if plan.follows is None else self._texts[plan.follows]
            self._texts.append(_Text(index, plan, leader, self._queue, state, lease.model_id))
        self._threads = state.threads
        self._barrier: AdmissionBarrier | None = state.barrier
        state.barrier.begin()
        self._early: deque[_Item] = deque()
        self._owner = owner
        self._has_told_end = False
        self._is_closed = False
        self._last_item_seconds = 0.0
        self._ping_timer: asyncio.TimerHandle | None = None

    @property
    def num_texts(self) -> int:
        """Number of texts that are generated."""
        return len(self._texts)

    def shares_prompt(self, index: int) -> bool:
        """Return whether an earlier text has the same prompt, which was computed and is counted there."""
        return self._texts[index].leader is not None

    def num_used(self) -> tuple[int, int]:
        """Tokens of the prompts so far, each counted once, and tokens generated; those of summaries with them."""
        prompt = sum(count for index, count in enumerate(self.prompt_tokens) if not self.shares_prompt(index))
        written = [one.compaction for one in self.stats if one is not None and one.compaction is not None]
        prompt += sum(one.prompt_tokens for one in written)
        return prompt, self.num_tokens + sum(one.completion_tokens for one in written)

    def progress(self) -> dict[str, Any]:
        """Progress of reading the first prompt, under llama.cpp's names, the time in milliseconds."""
        total = self.prompt_tokens[0]
        cached, computed = self._texts[0].progress()
        milliseconds = round(1e3 * (time.monotonic() - self.opened_seconds), 3)
        return {"total": total, "cache": cached, "processed": min(computed, total), "time_ms": milliseconds}

    def stats_so_far(self, index: int) -> "Stats | None":
        """Figures of a text up to now; None before it was begun."""
        return self.stats[index] or self._texts[index].stats_so_far()

    def prompt_ids(self, index: int) -> "TokenIds | None":
        """The ids of a text's prompt, int32; None before it was begun."""
        return self._texts[index].prompt_ids

    def prompt_text(self, index: int) -> str:
        """The prompt of a text as the model read it, special tokens as they are spelled; "" before it was begun."""
        tokenizer, found = self.llm.tokenizer, self._texts[index].prompt_ids
        ids = [] if found is None else found[(found >= 0) & (found < tokenizer.vocab_size)].tolist()
        return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")

    async def start(self) -> None:
        """Begin, and return when every prompt has been checked. Raises: what is wrong with one."""
        awaited = {text.index for text in self._texts if text.leader is None}
        for text in self._texts:
            text.start(self._threads)
        while awaited:
            match await self._queue.get():
                case _Started(index, count):
                    self.prompt_tokens[index] = count
                    self._tell_begun(index)
                    awaited.discard(index)
                case _Failure(error):
                    raise error
                case item:
                    # A text that has begun runs on while another is checked.
                    self._early.append(item)
                    if isinstance(item, End):
                        awaited.discard(item.index)

    async def events(self, ping_seconds: float | None = None) -> AsyncIterator[ReplyEvent]:
        """Yield what comes, to the end of all texts, and Silence after `ping_seconds` of it.

        To be iterated when what goes before any text was sent: the first-byte barrier opens then.
        Raises: what stopped a text, or the reason that `fail` was given.
        """
        self._open_barrier()
        if ping_seconds is not None:
            self._watch_silence(ping_seconds)
        left = len(self._texts)
        while left:
            item = self._early.popleft() if self._early else await self._queue.get()
            self._last_item_seconds = time.monotonic()
            match item:
                case _Failure(error):
                    self.failure = error
                    self._tell_ended()
                    raise error
                case _Started(index, count):
                    self.prompt_tokens[index] = count
                    self._tell_begun(index)
                    continue
                case End(index):
                    left -= 1
                    self.finish_reasons[index] = item.finish_reason
                    if self.notices and item.stats is not None:
                        item = End(index, item.finish_reason, self._noted(item.stats))
                    self.stats[index] = item.stats
                    if not left:
                        self._tell_ended()
                case Token(_, token):
                    self.num_tokens += 1
                    self.num_reasoning_tokens += bool(token.reasoning)
            yield item

    def _noted(self, stats: "Stats") -> "Stats":
        """The figures of a text with what was noted of the request."""
        return replace(stats, notices=(*self.notices, *stats.notices))

    def cancel(self) -> None:
        """Stop all texts; `events` then yields their ends."""
        self.is_cancelled = True
        for text in self._texts:
            text.cancel()

    def cancel_text(self, index: int) -> None:
        """Stop one text; `events` then yields its end."""
        self._texts[index].cancel()

    def fail(self, reason: BaseException) -> None:
        """Stop all texts; `events` then raises the reason."""
        # First the reason, or the end of a text that was stopped would be taken for its own.
        self._early.clear()
        self._queue.put_nowait(_Failure(reason))
        self.cancel()

    def close(self) -> None:
        """Stop what still runs and release everything; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._open_barrier()
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        self.cancel()
        self._tell_ended()
        self._owner.close(self)

    def join(self, seconds: float) -> None:
        """Wait for the texts to end. Called off the event loop."""
        for text in self._texts:
            text.has_ended.wait(seconds)

    def _tell_begun(self, index: int) -> None:
        text = self._texts[index]
        if self.relay is not None and text.prompt_ids is not None and (stats := self.stats_so_far(index)) is not None:
            self.relay.text_begun(index, text.prompt_ids, stats.seed)

    def _tell_ended(self) -> None:
        if not self._has_told_end:
            self._has_told_end = True
            self._owner.end(self)

    def _open_barrier(self) -> None:
        if self._barrier is not None:
            self._barrier.end()
            self._barrier = None

    def _watch_silence(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()

        def look() -> None:
            silent = time.monotonic() - self._last_item_seconds
            if silent >= seconds:
                self._queue.put_nowait(Silence())
            self._ping_timer = loop.call_later(seconds if silent >= seconds else seconds - silent, look)

        self._last_item_seconds = time.monotonic()
        self._ping_timer = loop.call_later(seconds, look)


class _Text:
    """One text, iterated by a thread. leader: the text with the same prompt whose first token this one awaits."""

    def __init__(
        self,
        index: int,
        plan: TextPlan,
        leader: "_Text | None",
        queue: asyncio.Queue[_Item],
        state: ServerState,
        model_id: str,
    ) -> None:
        self.index = index
        self.leader = leader
        self.has_token = threading.Event()
        self.has_ended = threading.Event()
        self.has_ended.set()
        self.prompt_ids: TokenIds | None = None
        self._plan = plan
        self._queue = queue
        self._state = state
        self._model_id = model_id
        self._latency = LatencyTracker(state.metrics, model_id)
        self._lock = threading.Lock()
        self._stream: TextStream | None = None
        self._stats: Stats | None = None
        self._is_cancelled = False

    def start(self, threads: ReplyThreads) -> None:
        self.has_ended.clear()
        threads.run(self._run)

    def progress(self) -> tuple[int, int]:
        """Numbers of tokens of the prompt that were cached, and that have been read."""
        with self._lock:
            stream = self._stream
        return (0, 0) if stream is None else (stream.stats.cached_tokens, stream.computed_tokens)

    def stats_so_far(self) -> "Stats | None":
        with self._lock:
            return self._stats if self._stream is None else self._stream.stats

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._stream is not None:
                self._stream.cancel()
        self.has_token.set()

    def _put(self, item: _Item) -> None:
        """Put an item into the reply's queue, unless the loop was closed."""
        self._state.calls.add(partial(self._queue.put_nowait, item))

    def _run(self) -> None:
        error: BaseException | None = None
        ending = "cancelled"
        try:
            if self.leader is not None:
                self.leader.has_token.wait()
            if not self._is_cancelled:
                ending = self._generate()
        except Exception as raised:
            error, ending = raised, "failed"
        finally:
            # Before a gauge or its last event can show that the text has ended.
            if self._stats is not None:
                self._state.metrics.count_reply(self._model_id, self._stats, ending, self._latency)
                _log_cache(self._model_id, self._stats)
            self._latency.end(is_whole=ending not in ("cancelled", "failed"))
            self.has_token.set()
            if error is None or self._is_cancelled:
                self._put(End(self.index, "stop" if ending == "cancelled" else ending, self._stats))
            else:
                self._put(_Failure(error))
            self.has_ended.set()

    def _begin(self, stream: "TextStream", checks: Sequence[TextStage]) -> None:
        """Take a stream as the one that runs, and announce its prompt. Raises: as the checks."""
        with self._lock:
            self._stream = stream
            if self._is_cancelled:
                stream.cancel()
        for check in checks:
            check(stream, lambda: self._is_cancelled)
        self.prompt_ids = stream.token_ids
        self._put(_Started(self.index, stream.prompt_tokens))

    def _generate(self) -> str:
        """Run the stream to its end, or until cancelled; return how it ended."""
        put, tick, index = self._put, self._latency.tick, self.index

        ending = "length"
        is_announced = False
        for stream in () if self._plan.summaries is None else self._plan.summaries():
            self._begin(stream, self._plan.checks if not is_announced else ())
            is_announced = True
            try:
                for _ in stream:
                    pass
            finally:
                self._state.metrics.count_summary(self._model_id, stream.stats)
            _log_cache(self._model_id, stream.stats)
        with closing(self._plan.open()) as stream:
            self._begin(stream, self._plan.checks if not is_announced else self._plan.checks[:1])
            for prepare in self._plan.preparations:
                prepare(stream, lambda: self._is_cancelled)
            self._state.barrier.wait()
            try:
                for event in stream:
                    ending = event.finish_reason or ending
                    if event.finish_reason != "cancelled":
                        # Where memory ended the last event has no token.
                        if event.token_id >= 0:
                            tick()
                        put(Token(index, event))
                    self.has_token.set()
            finally:
                # At one moment: a client that asks meanwhile gets figures.
                with self._lock:
                    self._stats, self._stream = stream.stats, None
        return ending


def _log_cache(model_id: str, stats: "Stats") -> None:
    """Log how much of a prompt was cached and why not more, without a word of any text."""
    reason = "" if stats.cache_miss_summary is None else f": {stats.cache_miss_summary}"
    logger.info("%s: %d of %d prompt tokens were cached%s", model_id, stats.cached_tokens, stats.prompt_tokens, reason)

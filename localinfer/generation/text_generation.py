"""From the ids that an engine generates to events of text. The engine below knows token ids only."""

import inspect
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.cache.stats import CacheMiss
from localinfer.engine.engine import Engine
from localinfer.engine.media import MediaRun
from localinfer.engine.request import NO_TOKEN, Request, TokenEvent
from localinfer.engine.sampling.mask import GuidingMask, rules_mask
from localinfer.engine.sampling.sampler import TokenMask
from localinfer.errors import RequestError
from localinfer.generation.options import CheckedOptions
from localinfer.generation.stream import (
    CompactionStats,
    Completion,
    CompletionEnd,
    ReplyDelta,
    Stats,
    StreamEvent,
    ToolCallDelta,
    cut_notices,
    joined_calls,
)
from localinfer.models.text.tokenizer import StopMatcher, StreamDecoder
from localinfer.types import Record, TokenLogprobs

if TYPE_CHECKING:
    from localinfer.generation.chat.constraints import ConstraintCompiler
    from localinfer.generation.chat.parser import ReplyParser
    from localinfer.generation.chat.reply import ReplyFormat
    from localinfer.generation.chat_model import ChatHistory, SessionHistory
    from localinfer.generation.resumption import ResumedText
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.storage.chats import EncodedChat

_NO_DRAFTS: dict[str, Any] = {"drafted_tokens": 0, "accepted_tokens": 0}
"""Fields of `Stats` about drafts, of a text for which none were made."""


class EncodedPrompt(Record):
    """A prompt as token ids."""

    token_ids: Sequence[int] | NDArray[np.integer]
    system_tokens: int = 0
    """Ids at the start that other prompts share."""
    chat: "EncodedChat | None" = None
    """The conversation that the prompt was made of."""
    reply: "ReplyFormat | None" = None
    """Constraint and format of the reply to a chat."""
    words_at: Callable[[int], str] | None = None
    """Description of the line that the token at a position is part of; None where no line of the prompt varies."""
    branch_tokens: tuple[int, ...] = ()
    """Lengths that others are likely to continue from, where there is no chat."""
    is_handed_over: bool = False
    """True if another process continues at its end."""
    media: Sequence[MediaRun] = ()
    """Its pictures and sounds in order, whose ids are among its ids (`engine.media.join_pieces`)."""
    notices: tuple[str, ...] = ()
    """Parts of it that were left out, in words."""


class TextGeneration(Iterator[StreamEvent]):
    """A generation as text: yields its events to one thread at a time, and keeps what they make together.

    Wrong requests raise when it is made. template_stops: stop texts of the chat template. chats: where a chat and its
    reply are kept at the end. through: what the events go through before they are read.
    prompt_ids: of the whole prompt, int32. has_ended: whether nothing comes any more, and `completion` is final.
    is_cancelled: by `cancel` or `close`, though it may have ended by itself before. compaction: of `Stats`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: "Tokenizer | None",
        prompt: EncodedPrompt,
        options: CheckedOptions,
        template_stops: Sequence[str] = (),
        constraints: "ConstraintCompiler | None" = None,
        chats: "ChatHistory | SessionHistory | None" = None,
        through: Callable[[Generator[StreamEvent]], Generator[StreamEvent]] | None = None,
    ) -> None:
        prompt_ids = engine.check_prompt(prompt.token_ids, media=prompt.media, shifts_context=options.context_shift)
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._options = options
        self._constraints = constraints
        self._decoder: StreamDecoder | None = None
        # A model may have more logits than its vocabulary has tokens; the rows beyond are no text.
        self._vocab_size = 0 if tokenizer is None else tokenizer.vocab_size
        self._resumed: ResumedText | None = None
        hints = CacheHints(
            system_tokens=prompt.system_tokens,
            branch_tokens=prompt.branch_tokens if prompt.chat is None else prompt.chat.branch_tokens,
            is_pinned=options.pin_cache,
            history=None if prompt.chat is None else prompt.chat.history,
            salt=options.salt,
            is_handed_over=prompt.is_handed_over,
        )
        self._begin(prompt_ids, hints)
        self._template_matcher = StopMatcher(template_stops)
        self._matcher = StopMatcher(options.stops)
        self._parses_text = self._parser is not None or bool(template_stops) or bool(options.stops)
        self._stop_text: str | None = None
        self._has_calls = False
        self._chat = prompt.chat
        self._words_at = prompt.words_at
        self._explanation: CacheMiss | None = None
        self._chats = chats
        self.has_ended = threading.Event()
        self.is_cancelled = False
        self.compaction: CompactionStats | None = None
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._call_deltas: list[ToolCallDelta] = []
        self._told_logprobs: list[TokenLogprobs] = []
        self._error: Exception | None = None
        # A completion of no tokens has no event to say so.
        self._finish_reason: CompletionEnd | None = "length" if self._tokens.request.is_over else None
        self._first_token_seconds = 0.0
        self._decode_seconds = 0.0
        self._preparation_seconds = time.perf_counter() - options.began
        self._events = self._run() if through is None else through(self._run())

    def resume(self, text: "ResumedText") -> None:
        """Resume this text from the progress of another process, before anything is generated here.

        Its tokens come as events first. Raises: as the generation itself.
        """
        self._tokens.close()
        self._resumed = text
        hints = self._tokens.request.hints
        if not np.array_equal(text.prompt_ids, self.prompt_ids):
            # Hints count the ids of the prompt that was made here.
            shared = slice(hints.system_tokens)
            is_same = np.array_equal(text.prompt_ids[shared], self.prompt_ids[shared])
            hints = replace(hints, system_tokens=is_same * hints.system_tokens, branch_tokens=(), history=None)
            self._chat = self._words_at = None
        shifts, media = self._options.context_shift, self._prompt.media
        self._begin(self._engine.check_prompt(text.prompt_ids, media=media, shifts_context=shifts), hints)

    def _begin(self, prompt_ids: NDArray[np.int32], hints: CacheHints) -> None:
        """Check the request, and give it to the engine. hints: how the cache is to keep the prompt."""
        engine, tokenizer, prompt, options, resumed = (
            self._engine,
            self._tokenizer,
            self._prompt,
            self._options,
            self._resumed,
        )
        self._notices: list[str] = [*prompt.notices]
        mask = _make_mask(
            self._constraints, tokenizer, options, prompt.reply, prompt_ids.size, engine.vocab_size, self._notices
        )
        sampling = options.sampling if resumed is None else replace(options.sampling, seed=resumed.seed)
        plan = engine.plan(sampling)
        if mask is not None:
            if options.ignore_eos:
                raise RequestError(
                    "ignore_eos was given, but a text that is constrained, or may call tools, has to end",
                    field="ignore_eos",
                )
            plan = engine.plan(replace(plan.params, seed=plan.seed), mask)
        ends = frozenset() if tokenizer is None or options.ignore_eos else tokenizer.eog_token_ids
        ends |= options.stop_ids
        if not options.rules.is_empty:
            guide = mask if isinstance(mask, GuidingMask) else None
            ruled = rules_mask(options.rules, guide, start=prompt_ids.size, vocab_size=engine.vocab_size, end_ids=ends)
            plan = engine.plan(replace(plan.params, seed=plan.seed), ruled)
        wanted: dict[str, Any] = {
            "max_tokens": options.max_tokens,
            "stop_token_ids": ends,
            "context_shift": options.context_shift,
            "cache_hints": hints,
            "prediction": options.prediction_ids,
            "owner": options.owner,
            "priority": options.priority,
            "media": prompt.media,
        }
        if resumed is None:
            self._tokens = engine.generate(prompt_ids, plan, ttft_objective=options.ttft_objective, **wanted)
            self._token_events: Iterator[TokenEvent] = self._tokens
        else:
            from localinfer.generation.resumption import resume

            # What has begun is not refused any more, so there is no objective.
            self._tokens, self._token_events = resume(engine, prompt_ids, plan, resumed.token_ids, **wanted)
        if tokenizer is not None:
            previous = int(prompt_ids[-1])
            self._decoder = StreamDecoder(
                tokenizer,
                previous_token_id=previous if 0 <= previous < tokenizer.vocab_size else None,
                # A constrained text is the bytes that the constraint has seen.
                keeps_first_space=mask is not None,
                shown_ids=() if prompt.reply is None else prompt.reply.shown_ids,
            )
        self.prompt_ids = prompt_ids
        self._seed = plan.seed
        self._logprobs = plan.logprobs
        self._returns_logprobs = plan.params.logprobs is not None
        self._parser: ReplyParser | None = None if prompt.reply is None else prompt.reply.parser(prompt_ids, plan.seed)

    @property
    def stats(self) -> Stats:
        """The numbers so far; final once the stream has ended or was closed."""
        num_tokens, seconds = len(self._token_ids), self._decode_seconds
        record = self._tokens.record
        miss = self._explained(record.miss)
        return Stats(
            prompt_tokens=self.prompt_ids.size,
            cached_tokens=self._cached_tokens(),
            cache_miss=None if miss is None else miss.describe(self._tokenizer),
            cache_miss_summary=None if miss is None else miss.summary,
            dropped_tokens=record.dropped_tokens,
            completion_tokens=num_tokens,
            time_to_first_token_seconds=self._first_token_seconds,
            decode_tokens_per_second=(num_tokens - 1) / seconds if num_tokens > 1 and seconds > 0 else 0.0,
            seed=self._seed,
            stop_text=self._stop_text,
            waited_seconds=record.waited_seconds,
            state_snapshots=record.state_snapshots,
            compaction=self.compaction,
            notices=(
                *self._notices,
                *record.notices,
                *(() if record.speculation is None else record.speculation.all_notices),
            ),
            **(_NO_DRAFTS if record.speculation is None else record.speculation.stats()),
        )

    def _cached_tokens(self) -> int:
        """Number of cached tokens of the prompt; of a resumed text, those at its first start."""
        told = None if self._resumed is None else self._resumed.cached_tokens
        found = max(0, self._tokens.record.cached_tokens - self._tokens.record.prefilled_tokens)
        return min(found, int(self.prompt_ids.size)) if told is None else told

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return int(self.prompt_ids.size)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The ids of prompt and completion so far, int32[N]."""
        return np.concatenate((self.prompt_ids, np.asarray(self._token_ids, np.int32)))

    @property
    def computed_tokens(self) -> int:
        """Number of tokens of prompt and completion that the model has read so far, those from the cache included."""
        return self._tokens.computed_tokens

    @property
    def request(self) -> Request:
        """The engine's request."""
        return self._tokens.request

    def note_prefilled(self, num_tokens: int, seconds: float) -> None:
        """Note what another process has computed of the prompt for this generation, which had to wait for it."""
        self._tokens.record.prefilled_tokens = num_tokens
        self._preparation_seconds += seconds

    @property
    def is_being_read(self) -> bool:
        """True while a thread takes an event."""
        return inspect.getgeneratorstate(self._events) == inspect.GEN_RUNNING

    def completion(self) -> Completion:
        """Put together what was generated so far, "cancelled" before its end. Raises: the error that ended it."""
        if self._error is not None:
            raise self._error
        return Completion(
            "".join(self._texts),
            list(self._token_ids),
            self._finish_reason or "cancelled",
            self.stats,
            list(self._told_logprobs) if self._returns_logprobs else None,
            "".join(self._reasonings),
            joined_calls(self._call_deltas),
        )

    def __next__(self) -> StreamEvent:
        try:
            return next(self._events)
        except BaseException as error:
            if isinstance(error, ValueError) and _is_taken(error):
                raise second_reader_error() from None
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                self._error = error
            self.has_ended.set()
            raise

    def cancel(self) -> None:
        """End it from any thread: its reader gets one last event, of reason "cancelled"."""
        self.is_cancelled = True
        self._tokens.cancel()

    def close(self) -> None:
        """End it from any thread; unless one is taking an event just now, the last ones are lost."""
        self.cancel()
        # What ended it is raised by `completion`, and a thread that takes an event just now gets the last one.
        with suppress(Exception):
            for _ in self:
                pass

    def leave(self) -> None:
        """End it without an event. Never waits: for the garbage collector."""
        self._tokens.close()

    def _run(self) -> Generator[StreamEvent]:
        tokens, clock, token_ids, decoder = self._tokens, time.perf_counter, self._token_ids, self._decoder
        asked = clock()
        try:
            for token_id, position, reason in self._token_events:
                if token_id != NO_TOKEN:
                    seconds = clock() - asked
                    if token_ids:
                        self._decode_seconds += seconds
                    else:
                        self._first_token_seconds = self._preparation_seconds + seconds
                    token_ids.append(token_id)
                text = ""
                if decoder is not None:
                    # An end token adds nothing to the text, the last one all that the decoder still holds.
                    if reason != "stop" and 0 <= token_id < self._vocab_size:
                        text = decoder.push(token_id)
                    if reason is not None:
                        text += decoder.flush()
                finish_reason: CompletionEnd | None = reason
                reasoning, is_stopped = "", False
                calls: tuple[ToolCallDelta, ...] = ()
                if self._parses_text:
                    (text, reasoning, calls), is_stopped = self._parse(text, is_last=reason is not None)
                if is_stopped:
                    finish_reason = "stop"
                if finish_reason is not None:
                    self._notices += cut_notices((*self._call_deltas, *calls))
                    tokens.close()
                    if finish_reason == "stop" and self._has_calls:
                        finish_reason = "tool_calls"
                logprobs = self._logprobs.pop(position, None) if self._logprobs and token_id != NO_TOKEN else None
                if text:
                    self._texts.append(text)
                if reasoning:
                    self._reasonings.append(reasoning)
                if calls:
                    self._call_deltas += calls
                if logprobs is not None:
                    self._told_logprobs.append(logprobs)
                self._finish_reason = finish_reason
                yield StreamEvent(text, token_id, finish_reason, logprobs, reasoning, calls)
                if finish_reason is not None:
                    return
                asked = clock()
        finally:
            tokens.close()
            if self._chats is not None and self._chat is not None:
                self._chats.remember(self._chat, token_ids)

    def _explained(self, miss: CacheMiss | None) -> CacheMiss | None:
        """Cause of a cache miss, with the line of the system message that is the cause, if one is."""
        if self._explanation is None and self._words_at is not None and miss is not None and miss.cause == "different":
            self._explanation = replace(miss, detail=self._words_at(miss.position))
        return miss if self._explanation is None else self._explanation

    def _parse(self, text: str, *, is_last: bool) -> tuple[ReplyDelta, bool]:
        """Find stop texts, reasoning and tool calls in the next text; also say whether a stop text ends it."""
        text, ended = self._template_matcher.push(text)
        is_last = is_last or ended is not None
        if is_last and ended is None:
            text += self._template_matcher.flush()
        content, reasoning, calls = ReplyDelta(text) if self._parser is None else self._parser.push(text)
        if is_last and self._parser is not None:
            rest = self._parser.flush()
            content, reasoning, calls = content + rest.content, reasoning + rest.reasoning, calls + rest.tool_calls
        content, self._stop_text = self._matcher.push(content)
        if self._stop_text is not None:
            calls = ()
            content += self._stop_text if self._options.include_stop else ""
        elif is_last:
            content += self._matcher.flush()
        self._has_calls = self._has_calls or bool(calls)
        return ReplyDelta(content, reasoning, calls), self._stop_text is not None or ended is not None


def second_reader_error() -> RequestError:
    """Error for a second reader of one stream."""
    return RequestError(
        "this stream is being read by another thread or task, and each event goes to one reader only; read it in one "
        "place and hand its events on, make a stream for each reader, or cancel it first, after which result() and "
        "aresult() wait for its end"
    )


def _is_taken(error: ValueError) -> bool:
    """True if a generator refused to run because it runs in another thread; else the error came from inside of it."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def _make_mask(
    constraints: "ConstraintCompiler | None",
    tokenizer: "Tokenizer | None",
    options: CheckedOptions,
    reply: "ReplyFormat | None",
    start: int,
    vocab_size: int,
    notices: list[str],
) -> TokenMask | None:
    constraint, salt = options.constraint, options.salt
    if constraints is None or tokenizer is None:
        if constraint is not None:
            raise RequestError(
                "the model file has no tokenizer, so its text cannot be constrained; leave constraint out"
            )
        return None
    if reply is not None:
        return reply.mask(
            constraints, tokenizer, constraint, start=start, vocab_size=vocab_size, salt=salt, notices=notices
        )
    return None if constraint is None else constraints.mask(constraint, start=start, salt=salt, notices=notices)

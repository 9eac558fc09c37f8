"""One generation as text: options in, events out, with what it cost. Text is above this file, token ids below it."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.cache.prefix_cache import CacheHints
from localinfer.chat.constraints import Constraint
from localinfer.chat.parser import ReplyDelta, ReplyParser, ToolCall, ToolCallDelta, joined_calls
from localinfer.closing import Closing
from localinfer.engine.engine import Engine
from localinfer.engine.request import NO_TOKEN, FinishReason, TokenEvent
from localinfer.errors import RequestError
from localinfer.models.text.stop_matcher import StopMatcher
from localinfer.models.text.stream_decoder import StreamDecoder
from localinfer.options import GenerationOptions, check_options
from localinfer.sampling.sampler import TokenLogprobs, TokenMask
from localinfer.speculation.verify import SpeculationRecord

if TYPE_CHECKING:
    from localinfer.chat.constraints import ConstraintCompiler
    from localinfer.chat.reply import ReplyFormat
    from localinfer.models.text.tokenizer import Tokenizer


CompletionEnd = FinishReason | Literal["tool_calls"]
"""As the engine's, and tool_calls: an end token after at least one whole tool call."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a generation was and cost.

    prompt_tokens: tokens of the prompt; cached_tokens: those whose keys and values were at hand already. cache_miss:
    why not more of them were, in words; None where nothing stood in the way. dropped_tokens: left out by
    `context_shift`.
    completion_tokens: tokens sampled, an end token included. time_to_first_token_seconds: from the call, tokenizing
    included, 0 if there is none. decode_tokens_per_second: of the tokens after the first, without the time the caller
    took between them; 0 if there are none. drafted_tokens, accepted_tokens: guessed by speculation, and right.
    drafted_by_position, accepted_by_position: the same by place in the draft. tokens_per_pass: decoded per pass of the
    model, 1 without speculation. speculation_speedup: over plain steps, as measured.
    seed: the one given, or drawn; with it the same options give the same text. stop_text: the one of the option `stop`
    that ended it, if one did. waited_seconds: for a place among those that run. notices: what did not go as was asked,
    in words: a drafter that failed and was switched off, memory that ended before the text did.
    """

    prompt_tokens: int
    cached_tokens: int
    cache_miss: str | None
    dropped_tokens: int
    completion_tokens: int
    time_to_first_token_seconds: float
    decode_tokens_per_second: float
    drafted_tokens: int
    accepted_tokens: int
    seed: int
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    tokens_per_pass: float = 1.0
    speculation_speedup: float = 1.0
    stop_text: str | None = None
    waited_seconds: float = 0.0
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids, and what is known about it.

    system_tokens: ids at the start that other prompts share. history: int32, the ids of the chat's former turn, which
    this prompt should begin with. remember: is told the ids sampled, at the end. reply: how the reply to a chat is
    constrained and read.
    """

    token_ids: Sequence[int] | NDArray[np.integer]
    system_tokens: int = 0
    history: NDArray[np.int32] | None = None
    remember: Callable[[list[int]], None] | None = None
    reply: "ReplyFormat | None" = None


class StreamEvent(NamedTuple):
    """One sampled token, and the text that became certain with it: often a word, "" inside a character or stop text.

    finish_reason is None but for the last event. After `TextStream.cancel` that is "cancelled", its id NO_TOKEN, and
    its text what was held back; so it is where memory ended, with the reason "length". logprobs: where the option asks
    for them. reasoning, tool_calls: of a chat, what became certain of these; their markers are in no text.
    """

    text: str
    token_id: int
    finish_reason: CompletionEnd | None
    logprobs: TokenLogprobs | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    text: without end token and stop text. token_ids: every token sampled, those included. finish_reason: "stop" for an
    end token or stop text, "length" for max_tokens or the end of the context, or of `kv_memory` (`stats.notices` then
    says so), "tool_calls" for an end after calls, "cancelled" if it was.
    reasoning, tool_calls: of a chat; a call that was cut short is the last one, its arguments no whole JSON.
    logprobs: one for each of token_ids, where the option asks for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: CompletionEnd
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class TextStream(Closing, Iterator[StreamEvent]):
    """A generation in progress: iterate for its events, one thread at a time; wrong requests raise when it is made.

    Its reader ends it with `close`, any thread with `cancel`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: "Tokenizer | None",
        encode: Callable[[], EncodedPrompt],
        options: GenerationOptions,
        template_stops: Sequence[str] = (),
        constraints: "ConstraintCompiler | None" = None,
    ) -> None:
        called = time.perf_counter()
        engine.check_usable()
        checked = check_options(options, tokenizer)
        plan = engine.plan(checked.sampling)
        prompt = encode()
        prompt_ids = engine.check_prompt(prompt.token_ids, shifts_context=checked.context_shift)
        mask = _make_mask(constraints, tokenizer, checked.constraint, prompt.reply, prompt_ids.size, engine.vocab_size)
        if mask is not None and checked.ignore_eos:
            raise RequestError(
                "ignore_eos was given, but a text that is constrained, or may call tools, has to end",
                field="ignore_eos",
            )
        if mask is not None:
            plan = engine.plan(replace(checked.sampling, seed=plan.seed), mask)
        self._tokens = engine.generate(
            prompt_ids,
            plan,
            max_tokens=checked.max_tokens,
            stop_token_ids=() if tokenizer is None else tokenizer.eog_token_ids,
            ignore_eos=checked.ignore_eos,
            context_shift=checked.context_shift,
            cache_hints=CacheHints(
                system_tokens=prompt.system_tokens, is_pinned=checked.pin_cache, history=prompt.history
            ),
            prediction=checked.prediction_ids,
            owner=checked.owner,
        )
        self._tokenizer = tokenizer
        self._decoder: StreamDecoder | None = None
        if tokenizer is not None:
            previous = int(prompt_ids[-1])
            self._decoder = StreamDecoder(
                tokenizer,
                previous_token_id=previous if previous < tokenizer.vocab_size else None,
                # A constrained text is the bytes that the constraint has seen.
                keeps_first_space=mask is not None,
                shown_ids=() if prompt.reply is None else prompt.reply.shown_ids,
            )
        self._parser: ReplyParser | None = None if prompt.reply is None else prompt.reply.parser()
        self._template_matcher = StopMatcher(template_stops)
        self._matcher = StopMatcher(checked.stops)
        self._stop_text: str | None = None
        self._has_calls = False
        self._prompt_tokens = prompt_ids.size
        self._remember = prompt.remember
        self._token_ids: list[int] = []
        self._seed = plan.seed
        self._logprobs = plan.logprobs
        self._tells_logprobs = checked.sampling.logprobs is not None
        self._num_tokens = 0
        self._first_token_seconds = 0.0
        self._decode_seconds = 0.0
        self._preparation_seconds = time.perf_counter() - called
        self._events = self._run()

    @property
    def stats(self) -> Stats:
        """The numbers so far; final once the stream has ended or was closed."""
        decoded = self._num_tokens - 1
        record = self._tokens.record
        return Stats(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=record.cached_tokens,
            cache_miss=None if record.miss is None else record.miss.describe(self._tokenizer),
            dropped_tokens=record.dropped_tokens,
            completion_tokens=self._num_tokens,
            time_to_first_token_seconds=self._first_token_seconds,
            decode_tokens_per_second=decoded / self._decode_seconds
            if decoded > 0 and self._decode_seconds > 0
            else 0.0,
            seed=self._seed,
            stop_text=self._stop_text,
            waited_seconds=record.waited_seconds,
            notices=tuple(record.notices if record.speculation is None else record.notices + record.speculation.told),
            **_speculation_stats(record.speculation),
        )

    @property
    def computed_tokens(self) -> int:
        """How many tokens the model has read so far, those from the cache included; any thread may ask."""
        return self._tokens.computed_tokens

    def finish(self) -> Completion:
        """Run to the end and return what comes from here on as one completion."""
        try:
            events = list(self)
        finally:
            self.close()
        return self.completion(events)

    def completion(self, events: Sequence[StreamEvent]) -> Completion:
        """Put events of this stream, which has ended, together."""
        logprobs = [event.logprobs for event in events if event.logprobs is not None]
        return Completion(
            "".join(event.text for event in events),
            [event.token_id for event in events if event.token_id != NO_TOKEN],
            (events[-1].finish_reason if events else None) or "length",
            self.stats,
            logprobs if self._tells_logprobs else None,
            "".join(event.reasoning for event in events),
            joined_calls(delta for event in events for delta in event.tool_calls),
        )

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def cancel(self) -> None:
        """End the stream from any thread, at any time: its reader gets one last event, of reason "cancelled".

        The step in progress is finished, of a long prompt a chunk, and what was computed stays in the cache. Nothing
        happens if the stream has ended by itself. May be called again.
        """
        self._tokens.cancel()

    def close(self) -> None:
        """End the stream, as its reader; what it computed stays in the cache. May be called again."""
        self._events.close()
        self._tokens.close()

    def _run(self) -> Generator[StreamEvent]:
        tokens, clock = self._tokens, time.perf_counter
        asked = clock()
        try:
            for token in tokens:
                if token.token_id != NO_TOKEN:
                    self._count(token, clock() - asked)
                piece, is_stopped = self._read(self._text_of(token), is_last=token.finish_reason is not None)
                finish_reason: CompletionEnd | None = "stop" if is_stopped else token.finish_reason
                logprobs = None if token.token_id == NO_TOKEN else self._logprobs.pop(token.position, None)
                if finish_reason is not None:
                    tokens.close()
                    if finish_reason == "stop" and self._has_calls:
                        finish_reason = "tool_calls"
                    yield StreamEvent(
                        piece.content, token.token_id, finish_reason, logprobs, piece.reasoning, piece.tool_calls
                    )
                    return
                yield StreamEvent(piece.content, token.token_id, None, logprobs, piece.reasoning, piece.tool_calls)
                asked = clock()
        finally:
            tokens.close()
            if self._remember is not None:
                self._remember(self._token_ids)

    def _count(self, token: TokenEvent, elapsed: float) -> None:
        if self._num_tokens:
            self._decode_seconds += elapsed
        else:
            self._first_token_seconds = self._preparation_seconds + elapsed
        self._num_tokens += 1
        if self._remember is not None:
            self._token_ids.append(token.token_id)

    def _read(self, text: str, *, is_last: bool) -> tuple[ReplyDelta, bool]:
        """Take the next text apart; also say whether a stop text ends the completion."""
        text, ended = self._template_matcher.push(text)
        is_last = is_last or ended is not None
        if is_last and ended is None:
            text += self._template_matcher.flush()
        pieces = [ReplyDelta(text)]
        if self._parser is not None:
            pieces = [self._parser.push(text), *([self._parser.flush()] if is_last else [])]
        content, stop = self._matcher.push("".join(piece.content for piece in pieces))
        self._stop_text = stop
        deltas = tuple(delta for piece in pieces for delta in piece.tool_calls) if stop is None else ()
        if is_last and stop is None:
            content += self._matcher.flush()
        self._has_calls = self._has_calls or bool(deltas)
        reasoning = "".join(piece.reasoning for piece in pieces)
        return ReplyDelta(content, reasoning, deltas), stop is not None or ended is not None

    def _text_of(self, token: TokenEvent) -> str:
        """What a token adds to the text: an end token nothing, the last one all that the decoder still holds."""
        decoder, tokenizer = self._decoder, self._tokenizer
        if decoder is None or tokenizer is None:
            return ""
        # A model may have more logits than its vocabulary has tokens; the rows beyond stand for nothing.
        is_text = token.finish_reason != "stop" and 0 <= token.token_id < tokenizer.vocab_size
        text = decoder.push(token.token_id) if is_text else ""
        return text if token.finish_reason is None else text + decoder.flush()


def _make_mask(
    constraints: "ConstraintCompiler | None",
    tokenizer: "Tokenizer | None",
    constraint: Constraint | None,
    reply: "ReplyFormat | None",
    start: int,
    vocab_size: int,
) -> TokenMask | None:
    if constraints is None or tokenizer is None:
        if constraint is not None:
            raise RequestError(
                "the model file has no tokenizer, so its text cannot be constrained; leave constraint out"
            )
        return None
    if reply is not None:
        return reply.mask(constraints, tokenizer, constraint, start=start, vocab_size=vocab_size)
    return None if constraint is None else constraints.mask(constraint, start=start)


def _speculation_stats(record: SpeculationRecord | None) -> dict[str, Any]:
    if record is None or not record.forward_passes:
        return {"drafted_tokens": 0, "accepted_tokens": 0}
    deepest = max((index + 1 for index, count in enumerate(record.drafted) if count), default=0)
    return {
        "drafted_tokens": sum(record.drafted),
        "accepted_tokens": sum(record.accepted),
        "drafted_by_position": tuple(record.drafted[:deepest]),
        "accepted_by_position": tuple(record.accepted[:deepest]),
        "tokens_per_pass": record.decoded_tokens / record.forward_passes,
        "speculation_speedup": record.speedup,
    }

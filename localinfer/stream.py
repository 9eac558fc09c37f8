"""One generation as text: options in, events out, with what it cost. Text is above this file, token ids below it."""

import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypedDict

import numpy as np
from numpy.typing import NDArray

from localinfer.argument_checks import check_flag, check_hashable
from localinfer.cache.prefix_cache import CacheHints
from localinfer.chat.constraint import Constraint
from localinfer.chat.parser import ReplyDelta, ReplyParser
from localinfer.chat.tool_calls import ToolCall, ToolCallDelta, joined_calls
from localinfer.engine.engine import Engine
from localinfer.engine.request import NO_TOKEN, FinishReason, TokenEvent
from localinfer.errors import RequestError
from localinfer.models.text.stop_matcher import StopMatcher
from localinfer.models.text.stream_decoder import StreamDecoder
from localinfer.sampling.sampler import SamplingParams, TokenLogprobs, TokenMask
from localinfer.speculation.verify import SpeculationRecord

if TYPE_CHECKING:
    from localinfer.chat.constraint_compiler import ConstraintCompiler
    from localinfer.chat.reply import ReplyFormat
    from localinfer.models.text.tokenizer import Tokenizer


class GenerationOptions(TypedDict, total=False):
    """Keyword options of `complete`, `stream`, `chat` and `stream_chat`.

    max_tokens: most tokens to add; None, the default, sets no limit but the end of the context.
    stop: a text or several that end the completion; the stop text itself is left out. In a chat they are looked for in
        the content only, not in reasoning or tool calls.
    ignore_eos: go on past end tokens.
    context_shift: where the context ends, go on with the system message and the recent half of the rest, instead of
        ending (or, for a prompt, refusing); `stats.dropped_tokens` says how much was left out.
    pin_cache: keep this prompt and completion in memory longer than others.
    prediction: text, or token ids, that the completion is likely to have, such as the file to be edited: where it has,
        the completion comes faster. It changes speed only, and nothing where speculation is off.
    constraint: what the completion has to be: a JsonObject, JsonSchema, Regex or Grammar of `localinfer`. It then
        ends with an end token, or incomplete at max_tokens; penalties, seeds and drafts work as ever. In a chat it
        counts for the content, after the reasoning; the model may still call a tool instead.
    dry_sequence_breakers: texts whose tokens no repetition goes across, for dry_multiplier; special tokens are
        breakers always. Without them: a new line, a colon, a quotation mark and an asterisk.
    owner: whom it is for, anything hashable, such as a connection: prompts of several owners are computed in turns.
    The rest is described, with its defaults, at `localinfer.sampling.params.SamplingParams`.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    context_shift: bool
    pin_cache: bool
    prediction: str | Sequence[int]
    constraint: Constraint | None
    dry_sequence_breakers: str | Sequence[str]
    owner: Hashable
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    repetition_penalty: float
    repetition_last_n: int
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_last_n: int
    dry_breaker_ids: Collection[int]
    logit_bias: Mapping[int, float]
    logprobs: int | None
    seed: int | None


CompletionEnd = FinishReason | Literal["tool_calls"]
"""As the engine's, and tool_calls: an end token after at least one whole tool call."""

_DRY_BREAKERS = ("\n", ":", '"', "*")
_SAMPLING_NAMES = frozenset(field.name for field in fields(SamplingParams))


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


class TextStream(Iterator[StreamEvent]):
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
        values: dict[str, Any] = dict(options)
        max_tokens = values.pop("max_tokens", None)
        stops = _check_texts("stop", values.pop("stop", None))
        ignore_eos = check_flag("ignore_eos", values.pop("ignore_eos", False))
        prediction = values.pop("prediction", None)
        context_shift = check_flag("context_shift", values.pop("context_shift", False))
        owner = values.pop("owner", None)
        check_hashable("owner", owner)
        is_pinned = check_flag("pin_cache", values.pop("pin_cache", False))
        constraint: Constraint | None = values.pop("constraint", None)
        breakers = values.pop("dry_sequence_breakers", None)
        unknown = sorted(values.keys() - _SAMPLING_NAMES)
        if unknown:
            known = ", ".join(GenerationOptions.__annotations__)
            raise RequestError(f"there is no option {', '.join(unknown)}; the options are {known}")
        sampling = SamplingParams(**values)
        if sampling.has_dry_penalty:
            breaker_ids = _breaker_ids(breakers, tokenizer) | frozenset(sampling.dry_breaker_ids)
            sampling = replace(sampling, dry_breaker_ids=breaker_ids)
        plan = engine.plan(sampling)
        if stops and tokenizer is None:
            raise RequestError("the model file has no tokenizer, so stop texts cannot be found; leave them out")
        prompt = encode()
        prompt_ids = engine.check_prompt(prompt.token_ids, shifts_context=context_shift)
        mask = _make_mask(constraints, tokenizer, constraint, prompt.reply, prompt_ids.size, engine.vocab_size)
        if mask is not None and ignore_eos:
            raise RequestError(
                "ignore_eos was given, but a text that is constrained, or may call tools, has to end",
                field="ignore_eos",
            )
        if mask is not None:
            plan = engine.plan(replace(sampling, seed=plan.seed), mask)
        self._tokens = engine.generate(
            prompt_ids,
            plan,
            max_tokens=max_tokens,
            stop_token_ids=() if tokenizer is None else tokenizer.eog_token_ids,
            ignore_eos=ignore_eos,
            context_shift=context_shift,
            cache_hints=CacheHints(system_tokens=prompt.system_tokens, is_pinned=is_pinned, history=prompt.history),
            prediction=_prediction_ids(prediction, tokenizer),
            owner=owner,
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
        self._matcher = StopMatcher(stops)
        self._stop_text: str | None = None
        self._has_calls = False
        self._prompt_tokens = prompt_ids.size
        self._remember = prompt.remember
        self._token_ids: list[int] = []
        self._seed = plan.seed
        self._logprobs = plan.logprobs
        self._tells_logprobs = sampling.logprobs is not None
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

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


def _prediction_ids(prediction: Any, tokenizer: "Tokenizer | None") -> Sequence[int] | NDArray[np.integer]:
    if prediction is None:
        return ()
    if not isinstance(prediction, str):
        return prediction  # type: ignore[no-any-return]
    if tokenizer is None:
        raise RequestError("the model file has no tokenizer; give the prediction as token ids, or leave it out")
    try:
        return tokenizer.encode(prediction, add_special=False)
    except RequestError as error:
        raise RequestError(f"prediction: {error}", field="prediction") from None


def _breaker_ids(breakers: Any, tokenizer: "Tokenizer | None") -> frozenset[int]:
    """The ids of the tokens that a repetition ends at."""
    if tokenizer is None:
        if breakers is not None:
            raise RequestError("the model file has no tokenizer; give dry_breaker_ids instead of dry_sequence_breakers")
        return frozenset()
    texts = _check_texts("dry_sequence_breakers", _DRY_BREAKERS if breakers is None else breakers)
    found = {text: tokenizer.ids_containing(text) for text in texts}
    for text, token_ids in found.items():
        if not token_ids and breakers is not None:
            raise RequestError(
                f"dry_sequence_breakers has {text!r}, which no token contains; give shorter texts",
                field="dry_sequence_breakers",
            )
    return frozenset(tokenizer.special_ids.values()).union(*found.values())


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


def _check_texts(name: str, value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} is {value!r}; give one text or a list of texts, none of them empty", field=name)
    for text in texts:
        half = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
        if half is not None:
            raise RequestError(f"{name} holds U+{ord(half):04X}, half of a character; give whole ones", field=name)
    return list(texts)

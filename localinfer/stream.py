"""One generation as text: options in, checked before anything runs, events out, and what it cost.

The engine below knows token ids only.
"""

import time
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.arguments import check_flag, check_hashable, half_character
from localinfer.cache.prefix_cache import CacheHints
from localinfer.chat.constraints import Constraint
from localinfer.chat.parser import ReplyDelta, ReplyParser, ToolCall, ToolCallDelta, joined_calls
from localinfer.closing import Closing
from localinfer.engine.engine import Engine
from localinfer.engine.request import NO_TOKEN, FinishReason
from localinfer.errors import RequestError
from localinfer.models.text.tokenizer import StopMatcher, StreamDecoder
from localinfer.sampling.filters import TokenLogprobs
from localinfer.sampling.params import SamplingOptions, SamplingParams
from localinfer.sampling.sampler import TokenMask
from localinfer.speculation.verify import SpeculationRecord

if TYPE_CHECKING:
    from localinfer.chat.constraints import ConstraintCompiler
    from localinfer.chat.history import ChatHistory, EncodedChat
    from localinfer.chat.reply import ReplyFormat
    from localinfer.models.text.tokenizer import Tokenizer

_DRY_BREAKERS = ("\n", ":", '"', "*")


class GenerationOptions(SamplingOptions, total=False):
    """Keyword options of `complete`, `stream`, `chat` and `stream_chat`.

    max_tokens: most tokens to add; None, the default, sets no limit but the end of the context.
    stop: a text or several that end the completion; the stop text itself is left out. In a chat they are looked for in
        the content only, not in reasoning or tool calls.
    ignore_eos: continue past end tokens.
    context_shift: at the end of the context, continue with the system message and the recent half of the rest, instead
        of ending (or, for a prompt, refusing); `stats.dropped_tokens` says how much was left out.
    pin_cache: keep this prompt and completion in memory longer than others.
    prediction: text, or token ids, that the completion is likely to have, such as the file to be edited: where it has,
        the completion comes faster. It changes speed only, and nothing where speculation is off.
    constraint: what the completion has to be: a JsonObject, JsonSchema, Regex or Grammar of `localinfer`. It then
        ends with an end token, or incomplete at max_tokens; penalties, seeds and drafts work as ever. In a chat it
        counts for the content, after the reasoning; the model may still call a tool instead.
    dry_sequence_breakers: texts whose tokens no repetition goes across, for dry_multiplier; special tokens are
        breakers always. Without them: a new line, a colon, a quotation mark and an asterisk.
    owner: anything hashable, such as a connection: prompts are computed in fair round-robin by owner.
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


@dataclass(frozen=True, kw_only=True)
class CheckedOptions:
    """Options of a generation, each of the kind it must have; texts that the engine wants as token ids are those.

    began: when they were given, on the clock of `time.perf_counter`.
    """

    max_tokens: int | None
    stops: list[str]
    ignore_eos: bool
    context_shift: bool
    pin_cache: bool
    prediction_ids: Sequence[int] | NDArray[np.integer]
    constraint: Constraint | None
    owner: Hashable
    sampling: SamplingParams
    began: float


def check_options(options: Mapping[str, Any], tokenizer: "Tokenizer | None") -> CheckedOptions:
    """Check GenerationOptions. tokenizer: None for a model without one, which takes token ids only.

    Raises: RequestError for a name that is no option, and for a value that it cannot have.
    """
    began = time.perf_counter()
    values = dict(options)
    stops = _check_texts("stop", values.pop("stop", None))
    if stops and tokenizer is None:
        raise RequestError("the model file has no tokenizer, so stop texts cannot be found; leave them out")
    owner = values.pop("owner", None)
    check_hashable("owner", owner)
    flags = {name: check_flag(name, values.pop(name, False)) for name in ("ignore_eos", "context_shift", "pin_cache")}
    max_tokens, constraint = values.pop("max_tokens", None), values.pop("constraint", None)
    prediction, breakers = values.pop("prediction", None), values.pop("dry_sequence_breakers", None)
    unknown = sorted(values.keys() - SamplingOptions.__annotations__.keys())
    if unknown:
        known = sorted(GenerationOptions.__annotations__, key=lambda name: name in SamplingOptions.__annotations__)
        raise RequestError(f"there is no option {', '.join(unknown)}; the options are {', '.join(known)}")
    sampling = SamplingParams(**values)
    if sampling.has_dry_penalty:
        breaker_ids = _breaker_ids(breakers, tokenizer) | frozenset(sampling.dry_breaker_ids)
        sampling = replace(sampling, dry_breaker_ids=breaker_ids)
    return CheckedOptions(
        max_tokens=max_tokens,
        stops=stops,
        prediction_ids=_prediction_ids(prediction, tokenizer),
        constraint=constraint,
        owner=owner,
        sampling=sampling,
        began=began,
        **flags,
    )


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


def _check_texts(name: str, value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} is {value!r}; give one text or a list of texts, none of them empty", field=name)
    for text in texts:
        place = half_character(text)
        if place is not None:
            half = f"U+{ord(text[place]):04X}"
            raise RequestError(f"{name} holds {half}, half of a character; give whole ones", field=name)
    return list(texts)


CompletionEnd = FinishReason | Literal["tool_calls"]
"""As the engine's, and tool_calls: an end token after at least one whole tool call."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a generation was and cost.

    prompt_tokens: tokens of the prompt; cached_tokens: those whose keys and values were cached. cache_miss: why not
    more of them were, in words, which may quote cached texts; None if nothing stood in the way. cache_miss_summary: the
    same without quotes. dropped_tokens: left out by `context_shift`.
    completion_tokens: tokens sampled, an end token included. time_to_first_token_seconds: from the call, tokenizing
    included, 0 if there is none. decode_tokens_per_second: of the tokens after the first, without the time the caller
    took between them; 0 if there are none. drafted_tokens, accepted_tokens: of speculation.
    drafted_by_position, accepted_by_position: the same by place in the draft. tokens_per_pass: decoded per pass of the
    model, 1 without speculation. drafted_by: tokens drafted and accepted, by the drafter's name: "ngram", "draft" (a
    draft model), "mtp" or "assistant" (a draft model over this model's cache). speculation_speedup: over plain steps,
    as measured.
    seed: the one given, or drawn; with it the same options give the same text. stop_text: the one of the option `stop`
    that ended it, if one did. waited_seconds: before it was admitted. state_snapshots: of recurrent states, that the
    prefix cache held at the end, of any text; 0 for a model without recurrent layers. notices: deviations from the
    options, in words: a drafter that failed and was switched off, memory that ended before the text did.
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
    drafted_by: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tokens_per_pass: float = 1.0
    speculation_speedup: float = 1.0
    cache_miss_summary: str | None = None
    stop_text: str | None = None
    waited_seconds: float = 0.0
    state_snapshots: int = 0
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids.

    system_tokens: ids at the start that other prompts share. chat: of a conversation, what the prompt was made of.
    reply: how the reply to a chat is constrained and parsed.
    """

    token_ids: Sequence[int] | NDArray[np.integer]
    system_tokens: int = 0
    chat: "EncodedChat | None" = None
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

    Its reader ends it with `close`, any thread with `cancel`. template_stops: stop texts of the chat template.
    chats: where a chat and its reply are kept at the end.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: "Tokenizer | None",
        prompt: EncodedPrompt,
        options: CheckedOptions,
        template_stops: Sequence[str] = (),
        constraints: "ConstraintCompiler | None" = None,
        chats: "ChatHistory | None" = None,
    ) -> None:
        prompt_ids = engine.check_prompt(prompt.token_ids, shifts_context=options.context_shift)
        mask = _make_mask(constraints, tokenizer, options.constraint, prompt.reply, prompt_ids.size, engine.vocab_size)
        plan = engine.plan(options.sampling)
        if mask is not None:
            if options.ignore_eos:
                raise RequestError(
                    "ignore_eos was given, but a text that is constrained, or may call tools, has to end",
                    field="ignore_eos",
                )
            plan = engine.plan(replace(plan.params, seed=plan.seed), mask)
        self._tokens = engine.generate(
            prompt_ids,
            plan,
            max_tokens=options.max_tokens,
            stop_token_ids=() if tokenizer is None else tokenizer.eog_token_ids,
            ignore_eos=options.ignore_eos,
            context_shift=options.context_shift,
            cache_hints=CacheHints(
                system_tokens=prompt.system_tokens,
                branch_tokens=() if prompt.chat is None else prompt.chat.branch_tokens,
                is_pinned=options.pin_cache,
                history=None if prompt.chat is None else prompt.chat.history,
            ),
            prediction=options.prediction_ids,
            owner=options.owner,
        )
        self._tokenizer = tokenizer
        self._decoder: StreamDecoder | None = None
        # A model may have more logits than its vocabulary has tokens; the rows beyond are no text.
        self._vocab_size = 0 if tokenizer is None else tokenizer.vocab_size
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
        self._matcher = StopMatcher(options.stops)
        self._parses_text = self._parser is not None or bool(template_stops) or bool(options.stops)
        self._stop_text: str | None = None
        self._has_calls = False
        self._prompt_tokens = prompt_ids.size
        self._chat = prompt.chat
        self._chats = chats
        self._token_ids: list[int] = []
        self._seed = plan.seed
        self._logprobs = plan.logprobs
        self._returns_logprobs = plan.params.logprobs is not None
        self._first_token_seconds = 0.0
        self._decode_seconds = 0.0
        self._preparation_seconds = time.perf_counter() - options.began
        self._events = self._run()

    @property
    def stats(self) -> Stats:
        """The numbers so far; final once the stream has ended or was closed."""
        num_tokens, seconds = len(self._token_ids), self._decode_seconds
        record = self._tokens.record
        return Stats(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=record.cached_tokens,
            cache_miss=None if record.miss is None else record.miss.describe(self._tokenizer),
            cache_miss_summary=None if record.miss is None else record.miss.summary,
            dropped_tokens=record.dropped_tokens,
            completion_tokens=num_tokens,
            time_to_first_token_seconds=self._first_token_seconds,
            decode_tokens_per_second=(num_tokens - 1) / seconds if num_tokens > 1 and seconds > 0 else 0.0,
            seed=self._seed,
            stop_text=self._stop_text,
            waited_seconds=record.waited_seconds,
            state_snapshots=record.state_snapshots,
            notices=tuple(
                record.notices if record.speculation is None else record.notices + record.speculation.all_notices
            ),
            **(record.speculation or SpeculationRecord()).stats(),
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
            logprobs if self._returns_logprobs else None,
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
        tokens, clock, token_ids, decoder = self._tokens, time.perf_counter, self._token_ids, self._decoder
        asked = clock()
        try:
            for token_id, position, reason in tokens:
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
                    tokens.close()
                    if finish_reason == "stop" and self._has_calls:
                        finish_reason = "tool_calls"
                logprobs = self._logprobs.pop(position, None) if self._logprobs and token_id != NO_TOKEN else None
                yield StreamEvent(text, token_id, finish_reason, logprobs, reasoning, calls)
                if finish_reason is not None:
                    return
                asked = clock()
        finally:
            tokens.close()
            if self._chats is not None and self._chat is not None:
                self._chats.remember(self._chat, token_ids)

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
        elif is_last:
            content += self._matcher.flush()
        self._has_calls = self._has_calls or bool(calls)
        return ReplyDelta(content, reasoning, calls), self._stop_text is not None or ended is not None


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

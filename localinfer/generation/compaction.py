"""Compaction: a conversation that fills the context continues from a summary of its older messages.

The model writes the summary. It is asked for it behind the very conversation, with the same system message and tools,
so that everything before the request comes from the cache. Then the model reads the system message, the summary and
the latest messages, which stay word for word; the former messages are kept by whoever holds them, and are read again
once the summary is taken back.

A summary stands among the turns, before the messages that it does not cover: a turn marked by `is_summary`, whose reply
is the summary, or which holds it (`continues`) where it stands inside an exchange, before a reply of the model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localinfer.arguments import check_number
from localinfer.errors import ContextLengthError, RequestError, TemplateError
from localinfer.generation.chat.messages import SYSTEM_ROLES, Turn, exchange_starts
from localinfer.generation.stream import CompactionStats

if TYPE_CHECKING:
    from localinfer.generation.stream import TextStream
    from localinfer.types import TokenIds

SUMMARY_REQUEST = (
    "The conversation is about to be shortened: you will continue from a summary of it alone. Write that summary now, "
    "for yourself: the task and the user's wishes in their own words, what was done and decided and why, names, paths, "
    "numbers and commands that matter, what failed, the present state, and what remains to be done next. Do not call "
    "tools. Answer with the summary only."
)
"""The request for a summary."""

SUMMARY_TURN: Turn = {"role": "user", "content": "Summarise our conversation so far.", "is_summary": True}
"""Stands before a summary between two exchanges, in place of the request."""

SUMMARY_PREFIX = "The conversation so far was shortened to this summary, from which you continue:"
"""Begins a message that holds a summary."""

COMPACT_AT = 0.8
"""Share of the context from which on a conversation is compacted."""
MOST_SUMMARY_TOKENS = 4096
_LAST_MESSAGE = "The user's last message, word for word:"
_LEAST_AT, _MOST_AT = 0.1, 0.95
_SHARE = 8
"""Of the context, a summary takes at most one part in so many, and so do the messages that stay word for word."""
_MARKS = ("is_summary", "continues", "finish_reason")
_OF_REPLIES = (
    *("constraint", "stop", "prediction", "logprobs", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop"),
    *("allowed_token_ids", "bad_words", "context_shift", "continue_final_message", "ttft_objective", "max_tokens"),
    *("tool_choice", "thinking_budget"),
)
"""Options of replies that are none of a summary."""
_BEGINNINGS = ("user", "assistant")
"""Roles of messages before which a summary can stand."""
_LEAST_SUMMARY = 16
_TAIL_TOKENS = 64
"""Most tokens that a template writes behind a conversation."""


def compact_at(value: object) -> float | None:
    """Return the share of the context that the option `compact` stands for; None: nothing is compacted.

    Raises: RequestError.
    """
    if value is None or value is False:
        return None
    if value is True:
        return COMPACT_AT
    hint = "the share of the context from which on a conversation is compacted, or True"
    return float(check_number("compact", value, _LEAST_AT, _MOST_AT, kind=float, hint=hint) or COMPACT_AT)


def summary_tokens(context_length: int) -> int:
    """Most tokens of a summary."""
    return min(MOST_SUMMARY_TOKENS, context_length // _SHARE)


def last_summary(turns: Sequence[Turn]) -> int:
    """Index of the last summary, 0 where there is none: the model reads from there on."""
    return next((place for place in reversed(range(len(turns))) if turns[place].get("is_summary")), 0)


def system_count(turns: Sequence[Mapping[str, Any]]) -> int:
    """Number of system messages at the start."""
    return next((i for i, turn in enumerate(turns) if turn["role"] not in SYSTEM_ROLES), len(turns))


def read_turns_of(turns: Sequence[Turn]) -> list[Turn]:
    """Part of turns that the model reads: the system messages at the start, then all from the last summary on."""
    num_system = system_count(turns)
    shown = [*turns[:num_system], *turns[max(num_system, last_summary(turns)) :]]
    return [{name: value for name, value in turn.items() if name not in _MARKS} for turn in shown]


def covered_messages(turns: Sequence[Turn], end: int) -> int:
    """Number of messages that a summary there stands for, those of former summaries included."""
    held = sum(2 - bool(turn.get("continues")) for turn in turns[:end] if turn.get("is_summary"))
    return end - held - system_count(turns)


@dataclass(frozen=True)
class PromptMeter:
    """Measures prompts of a conversation."""

    encode: Callable[[Sequence[Turn], bool], TokenIds]
    """The ids of the prompt of turns, of which the model reads `read_turns_of`; True: without reasoning. Raises:
    TemplateError."""
    context_length: int

    def count(self, turns: Sequence[Turn]) -> int:
        """Number of tokens of a prompt. Raises: TemplateError."""
        return len(self.encode(turns, False))


@dataclass(frozen=True)
class SummaryPlan:
    """A summary that is to be written."""

    prompt: list[Turn]
    """Messages whose reply is the summary."""
    max_tokens: int
    """Of the summary."""
    thinks: bool
    """False if the reply may be asked for without reasoning."""
    end: int
    """Index of the first turn that it does not cover."""
    turns: Sequence[Turn]
    """All turns of the conversation."""
    quoted: int | None
    """Index of a message of the user that stays word for word beside the summary."""

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of the summary, of those of the conversation's replies."""
        made = {name: value for name, value in options.items() if name not in _OF_REPLIES}
        if made.get("tools"):
            made["tool_choice"] = "none"
        if not self.thinks:
            made["thinking"] = False
        elif options.get("thinking_budget") is not None:
            made["thinking_budget"] = min(options["thinking_budget"], self.max_tokens // 2)
        return {**made, "max_tokens": self.max_tokens}

    def marked(self, summary: str) -> list[Turn]:
        """The turns with the summary among them."""
        return [*self.turns[: self.end], *self.standing(summary), *self.turns[self.end :]]

    def standing(self, summary: str) -> list[Turn]:
        """The turns that stand for what is covered."""
        return summary_turns(summary, self.turns, self.end, self.quoted)


def summary_turns(summary: str, turns: Sequence[Turn], end: int, quoted: int | None) -> list[Turn]:
    """The turns that hold a summary of all before `end`; quoted: as in `SummaryPlan`."""
    if not _is_inside(turns, end):
        return [dict(SUMMARY_TURN), {"role": "assistant", "content": summary, "finish_reason": "stop"}]
    text = f"{SUMMARY_PREFIX}\n\n{summary}"
    content: Any = text
    if quoted is not None:
        content = turns[quoted]["content"]
        text += f"\n\n{_LAST_MESSAGE}\n\n"
        content = text + content if isinstance(content, str) else [{"type": "text", "text": text}, *content]
    return [{"role": "user", "content": content, "is_summary": True, "continues": True}]


def compaction_steps(
    turns: Sequence[Turn],
    meter: PromptMeter,
    limit: float,
    *,
    keep: str = "",
    is_asked: bool = False,
    continues: bool = False,
) -> Generator[SummaryPlan, str, list[Turn]]:
    """Yield each summary that is to be written, and take its text; return the turns with the summaries in them.

    More than one is needed where the conversation does not fit beside the request for one. limit: tokens of a prompt
    that needs none. is_asked: write one in any case. keep: as in `plan_summary`. continues: the last message is a reply
    that is continued. An empty summary ends it.
    Raises: ContextLengthError for a conversation that neither fits nor can be compacted; RequestError where one was
        asked for and there is nothing to sum up.
    """
    turns, count = list(turns), meter.count(turns) if turns else 0
    while is_asked or count > limit:
        try:
            plan = plan_summary(turns, meter, keep=keep, continues=continues)
        except ContextLengthError:
            if not is_asked and count < meter.context_length:
                break
            raise
        if plan is None and is_asked:
            has_any = len(turns) > system_count(turns)
            raise RequestError(
                "there is nothing to sum up behind the last summary; go on, or begin anew"
                if has_any
                else "there is nothing to sum up yet; send a message first"
            )
        summary = "" if plan is None else (yield plan)
        if plan is None or not summary:
            break
        turns = plan.marked(summary)
        former, count = count, meter.count(turns)
        if count >= former:
            break
        is_asked = False
    return turns


@dataclass(frozen=True)
class CompactedTurns:
    """Turns of a conversation, with the summaries that were written."""

    turns: list[Turn]
    stats: CompactionStats | None
    """None for turns without a summary."""
    plan: SummaryPlan | None = None
    """The last summary that was written; None if none was."""
    summary: str = ""
    """Its text."""


def summary_streams(
    steps: Generator[SummaryPlan, str, list[Turn]], open_stream: Callable[[SummaryPlan], TextStream]
) -> Generator[TextStream, None, CompactedTurns]:
    """Yield the stream of each summary, to be read to its end. Raises: as the steps and the streams."""
    stats: CompactionStats | None = None
    written: tuple[SummaryPlan | None, str] = None, ""
    try:
        plan = next(steps)
        while True:
            with open_stream(plan) as stream:
                yield stream
            completion = stream.completion()
            cost = stream.stats
            made = CompactionStats(0, cost.prompt_tokens, cost.cached_tokens, cost.completion_tokens)
            stats = made if stats is None else made.after(stats)
            summary = "" if completion.finish_reason == "cancelled" else completion.text.strip()
            if summary:
                written = plan, summary
            plan = steps.send(summary)
    except StopIteration as ended:
        turns: list[Turn] = ended.value
    place = last_summary(turns)
    if not turns or not turns[place].get("is_summary"):
        return CompactedTurns(turns, None)
    stats = replace(CompactionStats(0) if stats is None else stats, messages=covered_messages(turns, place))
    return CompactedTurns(turns, stats, *written)


def plan_summary(
    turns: Sequence[Turn], meter: PromptMeter, *, keep: str = "", continues: bool = False
) -> SummaryPlan | None:
    """Plan a summary of all turns but the latest; None if there is nothing to sum up.

    What has no reply yet stays: a question, or the results of calls with these. Before a question, the exchange before
    it stays too where it takes little of the context; before calls, the user's last message does. keep: what the
    summary is to hold beside the usual, in words. Raises: ContextLengthError where no summary fits.
    """
    from localinfer.engine.cache.block_hashes import common_length

    begin = _first_uncovered(turns)
    last = _first_open(turns, continues=continues)
    if last <= begin:
        return None
    budget = meter.context_length // _SHARE
    end, quoted = last, None
    starts = exchange_starts(turns[:last], begin)
    has_earlier = not _is_inside(turns, last) and bool(starts) and starts[-1] > begin
    if has_earlier and _added_tokens(turns, starts[-1], last, meter) <= budget:
        end = starts[-1]
    wanted = summary_tokens(meter.context_length)
    request = SUMMARY_REQUEST if not keep else f"{SUMMARY_REQUEST} Above all keep: {keep}"

    def room(place: int) -> int:
        return meter.context_length - meter.count(_asking(turns[:place], request, meter))

    if room(end) < max(wanted // 4, _LEAST_SUMMARY):
        # More and more of the latest messages stay, whole exchanges if any, until the others fit beside the request.
        for roles in (("user",), _BEGINNINGS):
            places = [place for place in range(begin + 1, end) if turns[place]["role"] in roles]
            found = bisect_left(places, True, key=lambda place: room(place) < wanted)
            if found:
                end = places[found - 1]
                break
        else:
            raise ContextLengthError(
                f"the context holds {meter.context_length} tokens, too few for a summary beside the request for it and "
                "the oldest message; load the model with a larger context_length, or shorten the messages",
                context_length=meter.context_length,
            )
    if _is_inside(turns, end):
        quoted = next((i for i in reversed(exchange_starts(turns[:end])) if not turns[i].get("is_summary")), None)
        if quoted is not None and _added_tokens(turns, quoted, quoted + 1, meter) > budget:
            quoted = None
    prompt = _asking(turns[:end], request, meter)
    ids = meter.encode(prompt, False)
    # Where a template writes at the start whether it is to reason, all would be read again.
    thinks = common_length(ids, meter.encode(prompt, True)) < len(ids) - _TAIL_TOKENS
    return SummaryPlan(prompt, min(wanted, meter.context_length - len(ids)), thinks, end, turns, quoted)


def _first_uncovered(turns: Sequence[Turn]) -> int:
    """Index of the first turn that no summary covers."""
    place = last_summary(turns)
    if not turns or not turns[place].get("is_summary"):
        return system_count(turns)
    return place + (1 if turns[place].get("continues") else 2)


def _first_open(turns: Sequence[Turn], *, continues: bool) -> int:
    """Index of the first turn that has no reply yet, the calls of results among them; their number if all have."""
    if not turns:
        return 0
    last = len(turns) - 1
    while last > 0 and turns[last]["role"] == "tool":
        last -= 1
    role = turns[last]["role"]
    if role == "assistant" and not turns[last].get("tool_calls") and not continues:
        return len(turns)
    return last if role in _BEGINNINGS else len(turns)


def _is_inside(turns: Sequence[Turn], place: int) -> bool:
    """Return whether a summary there would stand inside an exchange: before a reply."""
    return place < len(turns) and turns[place]["role"] == "assistant"


def _added_tokens(turns: Sequence[Turn], first: int, end: int, meter: PromptMeter) -> int:
    """Number of tokens of some turns, as far as a template shows it alone; all of the context where it does not."""
    system = list(turns[: system_count(turns)])
    question: Turn = {"role": "user", "content": "x"}
    try:
        own = meter.count([*system, *turns[first:end]])
        return own - meter.count([*system, question])
    except TemplateError:
        return meter.context_length


def _asking(turns: Sequence[Turn], request: str, meter: PromptMeter) -> list[Turn]:
    """The messages that ask for a summary of turns.

    Behind a question, which has no reply yet, the request is part of it, since templates may want the roles to
    alternate; behind results of calls where the template wants it so.
    """
    shown = read_turns_of(turns)
    content = shown[-1]["content"]
    joined = f"{content}\n\n{request}" if isinstance(content, str) else [*content, {"type": "text", "text": request}]
    within = [*shown[:-1], {**shown[-1], "content": joined}]
    behind = [*shown, {"role": "user", "content": request}]
    if shown[-1]["role"] == "user":
        return within
    if shown[-1]["role"] == "tool":
        try:
            meter.count(behind)
        except TemplateError:
            return within
    return behind

"""A conversation with a model: its turns, and replies that may be stopped, continued, made again or undone."""

from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localinfer.errors import ContextLengthError, RequestError, SessionFileError, TemplateError
from localinfer.generation.chat.messages import (
    Content,
    Turn,
    checked_content,
    exchange_starts,
    open_calls,
    reply_turn,
    result_turn,
)
from localinfer.generation.compaction import (
    COMPACT_AT,
    CompactedTurns,
    PromptMeter,
    SummaryPlan,
    compaction_steps,
    last_summary,
    read_turns_of,
    summary_streams,
)

if TYPE_CHECKING:
    from localinfer.generation.stream import Stats, StreamEvent, TextStream, ToolCall
    from localinfer.llm import LLM
    from localinfer.storage.conversations import SavedConversation
    from localinfer.types import TokenIds

_FOR_THE_MODEL = ("role", "content", "tool_calls", "tool_call_id", "name")


def message_of(turn: Turn) -> dict[str, Any]:
    """The part of a turn that the model reads."""
    return {name: turn[name] for name in _FOR_THE_MODEL if name in turn}


def sent_messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The part of turns that the model reads, the system message among them."""
    return [message_of(turn) for turn in read_turns_of(turns)]


_REPLY_TOKENS = 1024
"""Reserved for a reply without a limit, at most a quarter of the context."""


@dataclass(frozen=True)
class ContextWindow:
    """Counts tokens of turns, and finds the first turn from which on they fit."""

    llm: "LLM"
    system: str | None
    max_tokens: int | None
    """Of a reply."""
    options: dict[str, Any]
    """Options of the chat that change its prompt, such as tools."""

    @property
    def reply_tokens(self) -> int:
        """Tokens that are kept free for a reply."""
        return min(self.max_tokens or _REPLY_TOKENS, self.llm.context_length // 4)

    def messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """The system message, if any, and what the model reads of turns."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [message_of(turn) for turn in turns]

    def count(self, turns: Sequence[Turn]) -> int:
        """Tokens of the prompt that turns make."""
        return self.llm.count_chat_tokens(self.messages(turns), **self.options)

    def fitting(self, turns: Sequence[Turn], first: int) -> int:
        """From which exchange on the turns leave room for a reply: `first`, or one that leaves half the context."""
        starts = exchange_starts(turns, first)
        if len(starts) < 2 or self.count(turns[first:]) <= self.llm.context_length - self.reply_tokens:
            return first
        return self._within_half(turns, starts)

    def shifted(self, turns: Sequence[Turn], first: int) -> int:
        """From which exchange behind the first on the turns take half the context at most; the last, if none does."""
        starts = exchange_starts(turns, first)
        return self._within_half(turns, starts[1:]) if len(starts) > 1 else first

    def meter(self) -> PromptMeter:
        """Measures the prompts of turns, the system message among them."""

        def encode(turns: Sequence[Turn], is_direct: bool) -> "TokenIds":
            options = {**self.options, "thinking": False} if is_direct else self.options
            return self.llm.encode_chat(sent_messages(turns), **options).token_ids  # type: ignore[return-value]

        return PromptMeter(encode, self.llm.context_length)

    def _within_half(self, turns: Sequence[Turn], starts: Sequence[int]) -> int:
        half = self.llm.context_length // 2
        return starts[bisect_left(starts[:-1], True, key=lambda start: self.count(turns[start:]) <= half)]


_REPLACEMENT = "\ufffd"


class Conversation:
    """User messages, each followed by its reply, whole or cut short.

    `system`, `max_tokens`, `seed`, `sampling`, `tools`, `thinking` and `thinking_budget` may be changed at any time and
    apply from the next reply on. `on_reasoning` is called with deltas of reasoning, which is no part of what the model
    reads later. `on_stream` is called with each reply's stream before its prompt is computed.

    With `compact_at`, a share of the context, a conversation that takes more has its older turns summed up before the
    reply (`generation/compaction.py`). `on_compaction` is called with the tokens of the prompt before, and again with
    those before and after; between the two, `on_reasoning` gets the summary as it comes. Where that cannot be, a
    conversation that exceeds the context leaves out its oldest exchanges: so many that the rest takes half the context,
    so that the prompt is recomputed once in many replies only. `on_messages_dropped` is called with their number. The
    turns are kept: only what the model reads begins later. Neither is done where the engine shifts the context
    (`context_shift` among the sampling options).

    saved, save: the conversation as it is kept, and what keeps it, called after each turn. Where it fails,
    `on_save_error` is called, or the error raised without one.
    """

    def __init__(
        self,
        llm: "LLM",
        *,
        system: str | None,
        max_tokens: int | None,
        seed: int | None,
        saved: "SavedConversation | None" = None,
        save: "Callable[[SavedConversation], None] | None" = None,
        **sampling: Any,
    ) -> None:
        self.system = system
        self.max_tokens = max_tokens
        self.seed = seed
        self.sampling = sampling
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.thinking: bool | None = None
        self.thinking_budget: int | None = None
        self.on_reasoning: Callable[[str], None] | None = None
        self.on_messages_dropped: Callable[[int], None] | None = None
        self.on_compaction: Callable[[int, int | None], None] | None = None
        self.compact_at: float | None = None
        self.on_stream: Callable[[TextStream], None] | None = None
        self.on_save_error: Callable[[SessionFileError], None] | None = None
        self.saved = saved
        self.last_stats: Stats | None = None
        self.finish_reason: str | None = None
        self.is_reply_kept = False
        self._save = save
        self._llm = llm
        self._turns: list[Turn] = []
        self._first = 0
        self._num_replies = 0
        self._used: tuple[tuple[Any, ...], int] | None = None
        self._before_summary: tuple[list[Turn], list[Turn], int] | None = None
        if saved is not None and saved.turns:
            given = system
            self.restore(saved)
            self.system = given if given is not None else self.system

    @property
    def llm(self) -> "LLM":
        """The model that answers."""
        return self._llm

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Options of replies that are not set here: what the model's file recommends."""
        return self._llm.defaults

    @property
    def context_is_full(self) -> bool:
        """True if the last reply was cut by the end of the context."""
        stats = self.last_stats
        if self.finish_reason != "length" or stats is None:
            return False
        return stats.prompt_tokens + stats.completion_tokens >= self._llm.context_length

    @property
    def context_length(self) -> int:
        """Tokens that the model can read and write together."""
        return self._llm.context_length

    @property
    def context_used(self) -> int:
        """Tokens of the context that the messages and the beginning of the next reply take."""
        made_with = (self._first, self.system, id(self.tools), self.thinking, self.thinking_budget)
        if self._used is None or self._used[0] != made_with:
            self._used = made_with, self._count_used() if self._turns else 0
        return self._used[1]

    @property
    def reply_tokens(self) -> int:
        """Tokens that are kept free for the next reply."""
        return self._window.reply_tokens

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages that the model reads: the system message, if any, then user messages and replies in turn."""
        return self._window.messages(self._turns[self._first :])

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every message but the system's, those that the model no longer reads included.

        Replies also have `reasoning` and `finish_reason`, where there are any: "cancelled" where the user stopped them.
        """
        return tuple(self._turns)

    @property
    def can_regenerate(self) -> bool:
        """True if there is a reply that is no summary."""
        return bool(self._turns) and not self._ends_with_summary

    @property
    def can_resume(self) -> bool:
        """True if the last reply was cut or stopped, or the last message has none yet."""
        if not self._turns or self._ends_with_summary:
            return False
        last = self._turns[-1]
        return last["role"] != "assistant" or last.get("finish_reason") not in ("stop", "tool_calls")

    @property
    def open_calls(self) -> "list[ToolCall]":
        """Calls of the last reply that have no result yet."""
        return open_calls(self._turns)

    def clear(self) -> None:
        """Begin anew with the system message only; a saved conversation stays as it was saved."""
        self._turns, self._first, self._used = [], 0, None
        self.finish_reason = None
        if self.saved is not None:
            self.saved = type(self.saved).begin(self.saved.model, system=self.system)

    def reply(self, content: Content) -> Generator[str]:
        """Send a message and yield the deltas of the reply; closing the generator keeps the reply so far.

        Raises: LocalinferError if the message cannot be answered; it is then not in the conversation.
        """
        turn = {"role": "user", "content": checked_content(content)}
        return self._answer([*self._turns, turn], fallback=self._turns)

    def regenerate(self) -> Generator[str]:
        """Answer the last message again; the former reply is kept if the new one is empty."""
        is_answered = bool(self._turns) and self._turns[-1]["role"] == "assistant"
        return self._answer(self._turns[:-1] if is_answered else self._turns, fallback=self._turns)

    def resume(self) -> Generator[str]:
        """Continue the last reply where it was cut, and yield what is new.

        Raises: as `reply`; the reply is then as it was.
        """
        if not self._turns or self._turns[-1]["role"] != "assistant":
            return self.regenerate()
        # Of a character that was cut, the text has a stand-in only.
        begun = {**self._turns[-1], "content": self._turns[-1]["content"].rstrip(_REPLACEMENT)}
        if not begun["content"] and not begun.get("reasoning"):
            return self.regenerate()
        return self._answer(self._turns[:-1], fallback=self._turns, begun=begun)

    def user_message(self, index: int) -> str:
        """The text of a user message, counted from 0, or from -1 backwards. Raises: RequestError."""
        content = self._turns[self._user_place(index)]["content"]
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)

    def edit(self, index: int, text: str) -> Generator[str]:
        """Replace a user message by `text`, counted from 0 or from -1 backwards, and answer from there.

        Its pictures stay. What followed is gone once the reply has begun. Raises: as `reply`; RequestError if there is
        no such message.
        """
        place = self._user_place(index)
        former = self._turns[place]["content"]
        kept = [] if isinstance(former, str) else [part for part in former if "text" not in part]
        turn = {"role": "user", "content": checked_content([*kept, text]) if kept else text}
        return self._answer([*self._turns[:place], turn], fallback=self._turns)

    def undo(self) -> list[Turn]:
        """Remove the last user message and all that followed it; return what was removed."""
        starts = exchange_starts(self._turns)
        if not starts:
            return []
        removed = self._turns[starts[-1] :]
        self._change(self._turns[: starts[-1]])
        return removed

    def fork(self) -> None:
        """Go on in a copy; the former stays as it was saved. Raises: SessionFileError; nothing has then changed."""
        former = self.saved
        if former is None:
            return
        self.saved = type(former).begin(former.model, system=self.system)
        try:
            self._keep(is_asked=True)
        except SessionFileError:
            self.saved = former
            raise

    def keep(self) -> None:
        """Save the conversation as it is. Raises: SessionFileError."""
        self._keep(is_asked=True)

    def restore(self, saved: "SavedConversation") -> None:
        """Go on with a saved conversation, its system message included."""
        self.saved, self.system = saved, saved.system
        self._turns = [dict(turn) for turn in saved.turns]
        self._first, self._used = last_summary(self._turns), None
        self.last_stats = None
        self.finish_reason = self._turns[-1].get("finish_reason") if self._turns else None

    def switch_model(self, llm: "LLM", name: str) -> None:
        """Let another model answer from here on. The caller closes the former."""
        self._llm, self._used = llm, None
        self._first = last_summary(self._turns)
        if self.saved is not None:
            self.saved = replace(self.saved, model=name)

    def add_result(self, content: Content) -> bool:
        """Add the result of the first open call; return whether every call has one now."""
        self._turns = [*self._turns, {**result_turn(self.open_calls[0], ""), "content": checked_content(content)}]
        self._used = None
        return not self.open_calls

    def shift_context(self) -> int:
        """Let the model read the newest exchanges only, of half the context; return how many messages are left out."""
        first = self._window.shifted(self._turns, self._first)
        dropped, self._first, self._used = first - self._first, first, None
        return dropped

    def summarise(self, keep: str = "") -> Generator[str]:
        """Have the model sum up its older messages, and let it read its summary from here on.

        Yields the summary as it comes. Stopped, or without any text, it changes nothing. keep: what it is to hold above
        all. Raises: RequestError if there is nothing to sum up; else as `reply`.
        """
        former = self._turns, self._first
        yield from self._compact(keep=keep, is_asked=True)
        if self._turns is not former[0]:
            self._before_summary = self._turns, *former
            self._keep()

    def undo_summary(self) -> bool:
        """Take back a summary that was asked for, if nothing was said since; return whether there was one."""
        if self._before_summary is None or self._turns is not self._before_summary[0]:
            return False
        _, self._turns, self._first = self._before_summary
        self._used = self._before_summary = None
        self._keep()
        return True

    def _compact(self, *, keep: str = "", is_asked: bool = False, continues: bool = False) -> Generator[str]:
        """Write the summaries that the turns need, and take them among these; yields their text."""
        window, system = self._window, self._window.messages(())
        steps = compaction_steps(
            [*system, *self._turns[self._first :]],
            window.meter(),
            self._compaction_limit,
            keep=keep,
            is_asked=is_asked,
            continues=continues,
        )
        options = self._options()

        def open_summary(plan: SummaryPlan) -> "TextStream":
            return self._llm.stream_chat(sent_messages(plan.prompt), **plan.options(options))

        streams = summary_streams(steps, open_summary)
        while True:
            try:
                stream = next(streams)
            except StopIteration as ended:
                made: CompactedTurns = ended.value
                break
            self._begin_stream(stream)
            try:
                for event in stream:
                    yield event.text
            finally:
                self._end_stream(stream)
        if made.plan is not None:
            self._turns = [*self._turns[: self._first], *made.turns[len(system) :]]
            self._first, self._used = last_summary(self._turns), None

    @property
    def _compaction_limit(self) -> float:
        """Tokens of a prompt from which on it is compacted."""
        share = COMPACT_AT if self.compact_at is None else self.compact_at
        return min(share * self.context_length, self.context_length - self.reply_tokens)

    def _answer(self, question: list[Turn], fallback: list[Turn], *, begun: Turn | None = None) -> Generator[str]:
        self.finish_reason = None
        former_first, self._used = self._first, None
        if self._first >= len(question):
            self._first = last_summary(question)
        self._turns = question if begun is None else [*question, begun]
        events: list[StreamEvent] = []
        num_asked = len(question)
        try:
            if self._fit(continues=begun is not None):
                question = self._turns if begun is None else self._turns[:-1]
                # What is asked for the first time may fail; its summary stays.
                fallback = question[:-1] if len(fallback) < num_asked else fallback
            with self._llm.stream_chat(self._sent(begun), **self._options(begun)) as stream:
                self._begin_stream(stream)
                try:
                    for event in stream:
                        events.append(event)
                        if event.reasoning and self.on_reasoning is not None:
                            self.on_reasoning(event.reasoning)
                        self.finish_reason = event.finish_reason
                        yield event.text
                finally:
                    self._end_stream(stream)
        finally:
            reply = self._reply_turn(events, begun)
            self.is_reply_kept = reply is not None
            if reply is None:
                self._turns, self._first, self._used = fallback, former_first, None
            else:
                self.finish_reason = reply["finish_reason"]
                self._change([*question, reply])

    def _count_used(self) -> int:
        try:
            return self._window.count(self._turns[self._first :])
        except TemplateError:
            # Some templates refuse to begin a reply behind a reply.
            stats = self.last_stats
            return 0 if stats is None else stats.prompt_tokens + stats.completion_tokens

    def _reply_turn(self, events: "list[StreamEvent]", begun: Turn | None) -> Turn | None:
        """The turn of a reply, or None where nothing was said, or nothing more of one that was begun."""
        from localinfer.generation.stream import joined_calls

        has_said = any(event.text or event.reasoning or event.tool_calls for event in events)
        if not has_said and (begun is None or self.finish_reason != "stop"):
            return None
        former = begun or {}
        turn = reply_turn(
            former.get("content", "") + "".join(event.text for event in events),
            self.finish_reason or "cancelled",
            reasoning=former.get("reasoning", "") + "".join(event.reasoning for event in events),
            tool_calls=joined_calls(delta for event in events for delta in event.tool_calls),
        )
        # Stopped while it thought, it has said nothing yet; cut, it may continue.
        goes_on = bool(turn.get("reasoning")) and (begun is not None or self.finish_reason is not None)
        return turn if turn["content"] or turn.get("tool_calls") or goes_on else None

    def _begin_stream(self, stream: "TextStream") -> None:
        if self.on_stream is not None:
            self.on_stream(stream)

    def _end_stream(self, stream: "TextStream") -> None:
        self.last_stats = stream.stats
        self._num_replies += 1

    def _fit(self, *, continues: bool) -> bool:
        """Sum older turns up where a reply would not fit, or leave the oldest out; return whether they were summed up.

        continues: the last turn is a reply that is continued.
        """
        if self.sampling.get("context_shift"):
            return False
        former, before = self._turns, self.context_used
        if self.compact_at is not None and before > self._compaction_limit:
            with suppress(ContextLengthError, TemplateError):
                self._tell_compaction(before, continues=continues)
        first = self._window.fitting(self._turns, self._first)
        dropped, self._first = first - self._first, first
        # A message that is too long by itself is refused, and nothing is dropped.
        if dropped and self.on_messages_dropped is not None and self.context_used <= self.context_length:
            self.on_messages_dropped(dropped)
        return self._turns is not former

    def _tell_compaction(self, before: int, *, continues: bool) -> None:
        """Compact the turns, and tell of it."""
        former = self._turns
        with closing(self._compact(continues=continues)) as summary:
            for number, delta in enumerate(summary):
                if number == 0 and self.on_compaction is not None:
                    self.on_compaction(before, None)
                if self.on_reasoning is not None:
                    self.on_reasoning(delta)
        if self._turns is not former and self.on_compaction is not None:
            self.on_compaction(before, self.context_used)

    def _sent(self, begun: Turn | None) -> list[dict[str, Any]]:
        """The messages to send; of a reply that is continued, its reasoning too."""
        messages = self.messages
        if begun is not None and begun.get("reasoning"):
            messages[-1] = {**messages[-1], "reasoning": begun["reasoning"]}
        return messages

    def _change(self, turns: list[Turn]) -> None:
        """Take over changed turns, and save them."""
        self._turns, self._used = turns, None
        if self._first >= len(turns):
            self._first = last_summary(turns)
        self._keep()

    def _keep(self, *, is_asked: bool = False) -> None:
        if self.saved is None or self._save is None:
            return
        self.saved = self.saved.with_turns(self._turns, system=self.system)
        try:
            self._save(self.saved)
        except SessionFileError as error:
            if is_asked or self.on_save_error is None:
                raise
            self.on_save_error(error)

    def _user_place(self, index: int) -> int:
        starts = [place for place in exchange_starts(self._turns) if not self._turns[place].get("is_summary")]
        if not -len(starts) <= index < len(starts):
            raise RequestError(
                f"there is no message {index + 1 if index >= 0 else index} of yours; there are {len(starts)}, counted "
                "from 1"
            )
        return starts[index]

    @property
    def _ends_with_summary(self) -> bool:
        marks = self._turns[-2] if len(self._turns) > 1 else {}
        return bool(marks.get("is_summary")) and not marks.get("continues")

    @property
    def _window(self) -> ContextWindow:
        return ContextWindow(self._llm, self.system, self.max_tokens, self._prompt_options())

    def _prompt_options(self) -> dict[str, Any]:
        """Options that change the prompt, where they are set."""
        given = {"tools": self.tools or None, "thinking": self.thinking, "thinking_budget": self.thinking_budget}
        return {name: value for name, value in given.items() if value is not None}

    def _options(self, begun: Turn | None = None) -> dict[str, Any]:
        """Options of the next reply; a fixed seed is incremented, or regenerating would repeat a reply."""
        seed = None if self.seed is None else self.seed + self._num_replies
        continued = {} if begun is None else {"continue_final_message": True}
        return {"max_tokens": self.max_tokens, "seed": seed, **self.sampling, **self._prompt_options(), **continued}

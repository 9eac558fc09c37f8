"""A conversation that an app holds: its messages, typed answers, tools that run by themselves, forks.

A session owns no keys and values: those of its messages are in the model's prefix cache, under the ids that they were
generated with, and whatever begins alike shares them. So a fork costs a few hundred bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload
from weakref import ref

from localinfer.arguments import check_number, owned
from localinfer.errors import ClosedError, RequestError, SessionFileError, ToolRoundsError
from localinfer.generation.chat.messages import (
    Content,
    Turn,
    checked_content,
    checked_text,
    exchange_starts,
    open_calls,
    read_turns,
    reply_turn,
    result_turn,
    tool_rounds,
)
from localinfer.generation.compaction import COMPACT_AT, CompactedTurns, compact_at, compaction_steps, summary_streams
from localinfer.generation.session.prompts import SessionOptions, SessionPrompts, checked_names
from localinfer.generation.stream import CompactionStats, Completion, StreamEvent, TextStream, ToolCall, joined_calls
from localinfer.storage.conversations import SavedConversation
from localinfer.types import Closing

if TYPE_CHECKING:
    import asyncio

    # For type checkers alone: PEP 747, by which `int | None` is a type of values too.
    from typing_extensions import TypeForm

    from localinfer.generation.session.python_tools import CallOutcome, RequestedCall, Tool

Answer = TypeVar("Answer")

_CANCELLED_CALL = "This call was cancelled before it ran."


class SessionModel(Protocol):
    """Model of sessions: an `LLM`."""

    def session(
        self,
        system: str | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        on_tool_call: Callable[[RequestedCall], Any] | None = None,
        on_tool_result: Callable[[CallOutcome], Any] | None = None,
        max_tool_rounds: int = 8,
        **options: Unpack[SessionOptions],
    ) -> Session: ...


class Session(Closing):
    """A conversation with a model; made by `LLM.session`, `fork` and `from_json`.

    Any thread may use it. It gives one reply at a time: while it does, what would change it raises RequestError; a
    fork, or another session, is free. After `close` every method but `close` and `cancel` raises ClosedError.

    What an ask leaves: an answer, the question and all between. One that raises leaves the session as it was before.
    One that is cancelled leaves the question and the reply so far, with `finish_reason` "cancelled", as the user saw
    it; without any text yet it leaves nothing.
    """

    _instead = "take fork() for a copy, and to_json() and Session.from_json() for another process"

    def __init__(
        self,
        prompts: SessionPrompts,
        turns: Sequence[Turn],
        *,
        max_tool_rounds: int = 8,
        name: str = "",
    ) -> None:
        """turns: checked messages. name: of the model, for what is saved."""
        check_number("max_tool_rounds", max_tool_rounds, 1)
        self._prompts = prompts
        self._turns = tuple(turns)
        self._max_tool_rounds = max_tool_rounds
        self._saved = SavedConversation.begin(name)
        self._saved_turns: tuple[Turn, ...] | None = None
        self._last: Completion | None = None
        self._busy = threading.Lock()
        self._cancelled = threading.Event()
        self._running: ref[TextStream] | None = None
        self._unread: ref[TextStream] | None = None
        self._reading: Generator[StreamEvent] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._turns)} messages"
        return f"<{type(self).__name__} of {self._saved.model or 'a model'}: {state}>"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the messages, the system message first, if there is one.

        Replies also have `finish_reason`, and `reasoning` and `tool_calls` where there are any.
        """
        self._check_open()
        return [owned(turn) for turn in self._turns]

    @property
    def last_completion(self) -> Completion | None:
        """The last reply with its numbers, of a typed answer too; None before the first."""
        return self._last

    @property
    def context_length(self) -> int:
        """Most tokens that messages and reply may have together."""
        return self._prompts.model.context_length

    @property
    def context_used(self) -> int:
        """Number of tokens of the messages, the system message and the tools included."""
        self._check_open()
        return int(self._prompts.prefix(self._turns)[0].size)

    def measure(self, text: Content) -> int:
        """Return by how many tokens a user message would make the prompt longer than `context_used`.

        What the template puts around it, and before the reply, is counted. Raises: TemplateError if it cannot follow.
        """
        used = self.context_used
        return self._prompts.count([*self._turns, {"role": "user", "content": checked_content(text)}]) - used

    @overload
    def ask(
        self, text: Content | None = None, *, type: None = None, **options: Unpack[SessionOptions]
    ) -> Completion: ...
    @overload
    def ask(
        self, text: Content | None = None, *, type: TypeForm[Answer], **options: Unpack[SessionOptions]
    ) -> Answer: ...
    @overload
    def ask(self, text: Content | None = None, *, type: Any, **options: Unpack[SessionOptions]) -> Any: ...
    def ask(self, text: Content | None = None, *, type: Any = None, **options: Unpack[SessionOptions]) -> Any:
        """Send a user message and return the answer, of which tools that are functions have been called.

        text: the message, or a list of its parts, texts and pictures such as {"type": "image", "image": "photo.jpg"};
        None answers the messages as they are, such as after `append`. type: return a value of it instead of a
        Completion: a dataclass, TypedDict, msgspec Struct, pydantic model, or a plain type such as list[str] or
        Literal["yes", "no"]. options: in place of the session's, for this answer.
        A reply that calls a tool which is no function is returned with its calls; `append` their results, and ask on.
        Raises: ContextLengthError if the messages do not fit, with both numbers; AnswerError for a typed answer that
            was cut short, with its text; ConstraintError naming the field of a type that cannot be enforced;
            ToolRoundsError; RequestError while another thread asks; else as `LLM.chat`.
        """
        return self._ask(text, type, options, threading.Event())

    @overload
    async def aask(
        self, text: Content | None = None, *, type: None = None, **options: Unpack[SessionOptions]
    ) -> Completion: ...
    @overload
    async def aask(
        self, text: Content | None = None, *, type: TypeForm[Answer], **options: Unpack[SessionOptions]
    ) -> Answer: ...
    @overload
    async def aask(self, text: Content | None = None, *, type: Any, **options: Unpack[SessionOptions]) -> Any: ...
    async def aask(self, text: Content | None = None, *, type: Any = None, **options: Unpack[SessionOptions]) -> Any:
        """As `ask`, in a thread of its own; cancelling the task cancels the reply.

        Tools and watchers that are coroutine functions run in the task's loop, ordinary ones in the thread.
        """
        import asyncio

        from localinfer.system.event_loop import in_thread

        loop, cancelled = asyncio.get_running_loop(), threading.Event()
        ask = partial(self._ask, text, type, options, cancelled, loop)
        work = asyncio.ensure_future(in_thread(ask, stop=cancelled.set, name="localinfer-session"))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            cancelled.set()
            if self._cancelled is cancelled:
                self.cancel()
            await asyncio.wait([work])
            if not work.cancelled():
                work.exception()
            raise

    def stream(self, text: Content | None = None, **options: Unpack[SessionOptions]) -> TextStream:
        """Send a user message and return the stream of one reply, which is kept when the stream ends, however it does.

        Nothing happens to the session before its first event is read, but for `compact`, whose summary is written
        before this returns. A reply that ends with "tool_calls" is one of
        several: `while session.run_tools():` read the next, `session.stream()`.
        Raises: as `ask`; while it is read RequestError if the session was changed since, or is answering.
        """
        self._check_open()
        merged = {**self._prompts.options, **checked_names(options)}
        before, asked, compaction = self._turns, self._asked(text), None
        if merged.get("compact"):
            with self._claimed(threading.Event()):
                asked, compaction = self._compacted(asked, merged)
                before = self._turns = asked if text is None else asked[:-1]
        # A stream that is dropped while it is read has no reader any more: the next caller sees that.
        made: list[ref[TextStream]] = []
        kept: list[Generator[StreamEvent]] = []

        def keep(events: Generator[StreamEvent]) -> Generator[StreamEvent]:
            said: list[StreamEvent] = []
            has_failed = False
            with self._claimed(threading.Event()), closing(events):
                if self._turns is not before:
                    raise RequestError("the session was changed after this stream was made; make a new one")
                self._running, self._reading = made[0], kept[0]
                try:
                    for event in events:
                        said.append(event)
                        if event.finish_reason is not None:
                            break
                        yield event
                except GeneratorExit:
                    raise
                except BaseException:
                    has_failed = True
                    raise
                finally:
                    self._running = self._reading = None
                    # Its last work is to remember the ids of the reply.
                    events.close()
                    turns = before if has_failed else _with_reply(before, asked, _reply(said))
                    if turns is not before:
                        stream = made[0]()
                        self._keep(turns, self._last if stream is None else stream.completion())
            # The reader of the last event may ask again.
            if said and said[-1].finish_reason is not None:
                yield said[-1]

        def through(events: Generator[StreamEvent]) -> Generator[StreamEvent]:
            kept.append(keep(events))
            return kept[0]

        stream = self._prompts.stream(asked, merged, through)
        if compaction is not None:
            stream.note_compaction(compaction)
        made.append(ref(stream))
        self._unread = made[0]
        return stream

    def run_tools(self) -> bool:
        """Run the calls of the last reply, and return whether there are results for the model to answer.

        Not if there was no call, or one of a tool that is no function, whose result is the caller's to append.
        Raises: ToolRoundsError after as many rounds as the session allows.
        """
        with self._claimed(threading.Event()):
            calls = open_calls(self._turns)
            if not calls:
                return False
            turns = self._with_results(self._turns)
            self._keep(turns, self._last)
            return not open_calls(turns)

    def append(self, message: Mapping[str, Any]) -> None:
        """Add a message, such as the result of a tool or an example reply, without asking for an answer.

        A result without a `tool_call_id` is that of the first call without one. Raises: MessageError, RequestError.
        """
        with self._claimed(threading.Event()):
            (turn,) = read_turns([message])
            waiting = open_calls(self._turns)
            if turn["role"] == "tool" and waiting:
                turn.setdefault("tool_call_id", waiting[0].id)
            self._turns = (*self._turns, turn)

    def edit(self, index: int, text: Content) -> None:
        """Replace the text of a message, counted as in `messages`.

        After a user message, what followed it is gone, as it answered another; after any other it stays. Earlier ones
        are not computed again. Raises: RequestError if there is no such message.
        """
        content = checked_content(text)
        with self._claimed(threading.Event()):
            turns = self._turns
            if not turns:
                raise RequestError("the session has no messages, so none can be edited; ask or append one before")
            place = check_number("index", index, -len(turns), len(turns) - 1, hint="counted as in messages")
            place %= len(turns)
            kept = {name: value for name, value in turns[place].items() if name not in ("reasoning", "finish_reason")}
            after = () if kept["role"] == "user" else turns[place + 1 :]
            self._turns = (*turns[:place], {**kept, "content": content}, *after)

    def drop(self, exchanges: int = 1) -> int:
        """Remove the oldest user messages, each with all that follows it up to the next; return how many messages.

        System messages at the start stay. Raises: RequestError for more than there are.
        """
        with self._claimed(threading.Event()):
            starts = [*exchange_starts(self._turns), len(self._turns)]
            if len(starts) == 1:
                raise RequestError("the session has no user messages, so none can be dropped")
            check_number("exchanges", exchanges, 1, len(starts) - 1, hint="as many as there are")
            first, end = starts[0], starts[exchanges]
            self._turns = self._turns[:first] + self._turns[end:]
            return end - first

    def compact(self, keep: str = "") -> CompactionStats:
        """Have the model sum up the older messages, and go on from its summary; return what that cost.

        The last exchange stays word for word where it takes at most an eighth of the context, and so do the system
        message and calls without a reply. The summary takes at most an eighth too, and no more than 4,096 tokens. It
        stands in `messages` before those that stay; the ones before it are kept there, and the model reads them no
        more. A fork made before has them all. keep: what the summary is to hold above all.
        A summary that is cancelled, or has no text, changes nothing. Raises: RequestError if there is nothing to sum
        up, or nothing came; ContextLengthError for a context that is too small for a summary.
        """
        with self._claimed(threading.Event()):
            turns, stats = self._compacted(self._turns, self._prompts.options, keep=checked_text(keep), is_asked=True)
            if stats is None or stats.completion_tokens == 0 or len(turns) == len(self._turns):
                raise RequestError("no summary was written, and the session is as it was; ask again")
            self._turns = turns
            return stats

    def fork(self) -> Session:
        """Return a session with the same messages, tools and options, which goes its own way from here.

        They share the cached pages of their common text; nothing is computed or copied. Of a reply that is being
        given, the fork has nothing.
        """
        self._check_open()
        return Session(self._prompts.copy(), self._turns, max_tool_rounds=self._max_tool_rounds, name=self._saved.model)

    def prewarm(self) -> int:
        """Compute system message, tools and messages ahead, so that the next ask computes only its own message.

        Returns how many tokens had to be computed. May run in another thread while an ask begins, which then
        continues from there. Raises: as `ask`.
        """
        self._check_open()
        return self._prompts.compute_prefix(self._turns)

    def cancel(self) -> None:
        """End the reply in progress, from any thread; its caller gets the partial reply. May be called again.

        The stream that was made last counts as one, also before its first event is read.
        """
        self._cancelled.set()
        for made in (self._running, self._unread):
            stream = None if made is None else made()
            if stream is not None:
                stream.cancel()

    def close(self) -> None:
        """Cancel a reply in progress and forget the messages; may be called again."""
        self._is_closed = True
        self.cancel()
        self._turns = ()

    def to_json(self) -> str:
        """Return the messages as a JSON text with its version, in the form in which the terminal's chats are saved.

        Tools and options are not in it. Raises: ClosedError.
        """
        self._check_open()
        turns = self._turns
        if self._saved_turns is not turns:
            has_system = bool(turns) and turns[0]["role"] == "system"
            system = str(turns[0]["content"]) if has_system else None
            self._saved, self._saved_turns = self._saved.with_turns(turns[has_system:], system=system), turns
        return self._saved.to_json()

    @classmethod
    def from_json(cls, llm: SessionModel, text: str | bytes, **arguments: Any) -> Session:
        """Return the session that `to_json` wrote, with any model.

        arguments: of `LLM.session` but for system and messages, as tools and options are the program's. Replies that
        the model, or its disk cache, remembers keep the token ids they were generated with.
        Raises: SessionFileError for a text that is no session, or one of a newer version.
        """
        try:
            saved = SavedConversation.from_json(text)
        except SessionFileError as error:
            raise SessionFileError(
                f"the text cannot be read as a session: {error}; give what to_json returned"
            ) from None
        session = llm.session(saved.system, messages=saved.turns, **arguments)
        session._saved, session._saved_turns = saved, session._turns
        return session

    def _ask(
        self,
        text: Content | None,
        answer_type: Any,
        options: SessionOptions,
        cancelled: threading.Event,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Any:
        with self._claimed(cancelled):
            merged, answer = {**self._prompts.options, **checked_names(options)}, None
            if answer_type is not None:
                if merged.get("constraint") is not None:
                    raise RequestError("a type and a constraint were given; leave one of them out", field="constraint")
                from localinfer.generation.session.typed_answers import AnswerType

                answer = AnswerType(answer_type)
                answer.check(self._prompts.model.check_constraint)
                merged["constraint"] = answer.constraint()
            before, turns = self._turns, self._asked(text)
            while True:
                turns, compaction = self._compacted(turns, merged)
                if text is not None and turns[-1]["role"] == "user":
                    before = turns[:-1]
                completion = self._completion(turns, merged, compaction)
                reply = reply_turn(
                    completion.text,
                    completion.finish_reason,
                    reasoning=completion.reasoning,
                    tool_calls=completion.tool_calls,
                )
                turns = _with_reply(before, turns, reply)
                if completion.finish_reason != "tool_calls" or not any(map(self._is_function, open_calls(turns))):
                    break
                turns = self._with_results(turns, loop)
                if open_calls(turns):
                    break
                before = (*turns, reply_turn("", "cancelled"))
                if cancelled.is_set():
                    turns, completion = before, replace(completion, finish_reason="cancelled", tool_calls=())
                    break
            self._check_open()
            value = completion
            if answer is not None:
                value = answer.read_answer(completion.text, completion.finish_reason)
            self._keep(turns, completion)
            return value

    def _compacted(
        self, turns: Sequence[Turn], options: Mapping[str, Any], *, keep: str = "", is_asked: bool = False
    ) -> tuple[tuple[Turn, ...], CompactionStats | None]:
        """Turns with a summary where they need one, and its figures, None for turns without."""
        share = compact_at(options.get("compact"))
        if not is_asked and (share is None or options.get("context_shift")):
            return tuple(turns), None
        meter = self._prompts.meter(options)
        limit = (COMPACT_AT if share is None else share) * meter.context_length
        steps = compaction_steps(turns, meter, limit, keep=keep, is_asked=is_asked)
        asked = {**options, "tools": self._prompts.tools.descriptions}
        streams = summary_streams(steps, lambda plan: self._prompts.stream(plan.prompt, plan.options(asked)))
        while True:
            try:
                self._read(next(streams))
            except StopIteration as ended:
                made: CompactedTurns = ended.value
                return tuple(made.turns), made.stats

    def _completion(
        self, turns: Sequence[Turn], options: Mapping[str, Any], compaction: CompactionStats | None
    ) -> Completion:
        with self._prompts.stream(turns, options) as stream:
            if compaction is not None:
                stream.note_compaction(compaction)
            return self._read(stream)

    def _read(self, stream: TextStream) -> Completion:
        """Read a stream to its end; `cancel` ends it."""
        self._running = ref(stream)
        try:
            if self._cancelled.is_set():
                stream.cancel()
            return stream.result()
        finally:
            self._running = None

    def _with_results(self, turns: tuple[Turn, ...], loop: asyncio.AbstractEventLoop | None = None) -> tuple[Turn, ...]:
        """Messages with the results of the last reply's calls of functions, which are run."""
        rounds = tool_rounds(turns)
        if rounds > self._max_tool_rounds:
            raise ToolRoundsError(
                f"the model called tools in {rounds} replies in a row, and may in {self._max_tool_rounds}; allow more "
                "with max_tool_rounds, or say in the system message when to stop",
                rounds=rounds,
            )
        for call in filter(self._is_function, open_calls(turns)):
            result = _CANCELLED_CALL if self._cancelled.is_set() else self._prompts.tools.run(call, loop)
            turns = (*turns, result_turn(call, result))
        return turns

    def _is_function(self, call: ToolCall) -> bool:
        return self._prompts.tools.has(call.name)

    def _asked(self, text: Content | None) -> tuple[Turn, ...]:
        """The messages to be answered. Raises: RequestError where calls wait for their results, or for none."""
        waiting = open_calls(self._turns)
        if waiting:
            names = ", ".join(call.name for call in waiting)
            raise RequestError(
                f"the model waits for the results of its calls ({names}); append a message of role 'tool' for each"
            )
        if text is not None:
            return (*self._turns, {"role": "user", "content": checked_content(text)})
        if not self._turns or self._turns[-1]["role"] not in ("user", "tool"):
            raise RequestError("there is no message to answer; give a text, or append a user message before")
        return self._turns

    def _keep(self, turns: tuple[Turn, ...], completion: Completion | None) -> None:
        if not self._is_closed:
            self._turns, self._last = turns, completion

    @contextmanager
    def _claimed(self, cancelled: threading.Event) -> Generator[None]:
        """Hold the right to change the session; `cancelled` is set by `cancel` meanwhile."""
        self._check_open()
        if not self._busy.acquire(blocking=False) and not (
            self._end_dropped_stream() and self._busy.acquire(blocking=False)
        ):
            raise RequestError("the session is answering; wait for that, cancel it, or ask a fork of the session")
        try:
            self._cancelled = cancelled
            yield
        finally:
            self._busy.release()

    def _end_dropped_stream(self) -> bool:
        """End a stream that was dropped without being closed, keeping its text; True if there was one."""
        running, reading = self._running, self._reading
        if running is None or reading is None or running() is not None:
            return False
        with suppress(ValueError):
            reading.close()
        return True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the session was closed; make another with llm.session()")
        self._prompts.model.check_usable()


def _reply(events: Sequence[StreamEvent]) -> Turn:
    """The message of a reply whose events are these."""
    return reply_turn(
        "".join(event.text for event in events),
        (events[-1].finish_reason if events else None) or "cancelled",
        reasoning="".join(event.reasoning for event in events),
        tool_calls=joined_calls(delta for event in events for delta in event.tool_calls),
    )


def _with_reply(before: tuple[Turn, ...], asked: tuple[Turn, ...], reply: Turn) -> tuple[Turn, ...]:
    """Messages with a reply behind them, or those before they were asked, where it was cancelled and says nothing."""
    return before if reply["finish_reason"] == "cancelled" and not reply["content"] else (*asked, reply)

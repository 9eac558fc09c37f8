"""A reply taken apart while it arrives: reasoning, content and tool calls, however its text is split."""

import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from localinfer.chat.xml_arguments import ParameterReader, match_length
from localinfer.models.text.reply_format import HERMES, CallFormat, ReasoningFormat

_NOT_NAME = re.compile(r"[^A-Za-z0-9_.:-]")
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolCall:
    """One call that the model makes.

    id: nine random letters and digits. arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """What became known of one call.

    index: which call of the reply, counted from 0. The first delta of a call has its id and name and no arguments; each
    later one has the next part of the arguments' JSON text and neither.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ReplyDelta(NamedTuple):
    """What became certain of a reply."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ReplyParser:
    """Takes the text of one reply as it arrives; what it returns, joined, does not depend on where the text is split.

    starts_reasoning: the prompt has opened the reasoning. types: by tool and parameter, the JSON types that it may
    have, for formats that write strings without quotation marks; there, arguments become JSON here. White space around
    reasoning and before calls belongs to the format and is left out. What looks like a call but is none is content.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat | None,
        *,
        starts_reasoning: bool = False,
        types: Mapping[str, Mapping[str, frozenset[str]]] | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        # Without one, its states are never reached.
        self._format = reasoning or ReasoningFormat("", "", "")
        self._has_calls, self._calls = calls is not None, calls or HERMES
        self._types = types or {}
        self._parameters: ParameterReader | None = None
        self._new_id = new_id or _random_id
        self._held = ""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._index = -1
        self._name = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._state: Callable[[], bool] = self._start
        if reasoning is not None:
            self._state = self._reopened if starts_reasoning else self._opening

    def push(self, text: str) -> ReplyDelta:
        """Take the next text."""
        self._held += text
        while self._held and self._state():
            pass
        return self._take()

    def flush(self) -> ReplyDelta:
        """Take the end of the reply: what was held back for a marker that did not come.

        What is left of the frame of a call that was cut short is left out.
        """
        if self._state in (self._reopened, self._thought):
            self._reasoning.append(self._held.rstrip())
        elif self._state == self._named and self._parameters is not None:
            if fragment := self._parameters.flush(self._held):
                self._deltas.append(ToolCallDelta(self._index, fragment))
        elif self._state not in (self._gap, self._call, self._after, self._between, self._done):
            self._content.append(self._held)
        self._held = ""
        return self._take()

    def _take(self) -> ReplyDelta:
        delta = ReplyDelta("".join(self._content), "".join(self._reasoning), tuple(self._deltas))
        self._content.clear()
        self._reasoning.clear()
        self._deltas.clear()
        return delta

    # Each state below consumes the buffered text, and returns whether to go on with what is left.

    def _opening(self) -> bool:
        """At the start of a reply that may begin with reasoning."""
        begin, text = self._format.begin, self._held.lstrip()
        if text.startswith(begin):
            self._held = text[len(begin) :]
            return self._go(self._reopened)
        return False if begin.startswith(text) else self._go(self._start)

    def _reopened(self) -> bool:
        """Inside the reasoning before its first letter, where some models open it again."""
        begin, self._held = self._format.begin, self._held.lstrip()
        if self._held.startswith(begin):
            self._held = self._held[len(begin) :]
            return True
        return False if begin.startswith(self._held) else self._go(self._thought)

    def _thought(self) -> bool:
        end = self._format.end
        before, found, after = self._held.partition(end)
        if found:
            self._reasoning.append(before.rstrip())
            self._held = after
            return self._go(self._gap)
        self._held = self._release(self._reasoning, end)
        return False

    def _gap(self) -> bool:
        """Behind the reasoning."""
        self._held = self._held.lstrip()
        return self._go(self._start) if self._held else False

    def _start(self) -> bool:
        """Where content begins, and in some formats a call, if there is one."""
        if not self._has_calls:
            return self._go(self._plain)
        if self._calls.trigger:
            return self._go(self._text)
        length = match_length(self._held, self._calls.opening + self._calls.begin)
        if length is None:
            return False
        if length < 0:
            return self._go(self._plain)
        self._held = self._held[length:]
        return self._go(self._call)

    def _plain(self) -> bool:
        self._content.append(self._held)
        self._held = ""
        return False

    def _text(self) -> bool:
        """Content in which a marker may begin a call."""
        trigger = self._calls.trigger
        place = self._held.find(trigger)
        if place < 0:
            self._held = self._release(self._content, trigger)
            return False
        before = self._held[:place].rstrip()
        length = match_length(self._held[len(before) :], self._calls.opening + self._calls.begin)
        if length is None:
            self._content.append(before)
            self._held = self._held[len(before) :]
            return False
        if length < 0:
            self._content.append(self._held[: place + len(trigger)])
            self._held = self._held[place + len(trigger) :]
            return True
        self._content.append(before)
        self._held = self._held[len(before) + length :]
        return self._go(self._call)

    def _call(self) -> bool:
        """At the name of a call."""
        found = _NOT_NAME.search(self._held)
        if found is None:
            return False
        name, rest = self._held[: found.start()], self._held[found.start() :]
        form = self._calls.parameters
        length = match_length(rest, self._calls.middle)
        empty = -1 if form is None else match_length(rest, form.empty)
        if length is None or empty is None:
            return False
        if max(length, empty) < 0 or not name:
            return self._go(self._plain)
        self._index += 1
        self._deltas.append(ToolCallDelta(self._index, id=self._new_id(), name=name))
        self._held = rest[max(length, empty) :]
        if form is None:
            self._depth, self._in_string, self._escaped = 0, False, False
            return self._go(self._arguments)
        if empty > length:
            self._deltas.append(ToolCallDelta(self._index, "{}"))
            return self._go(self._between)
        self._parameters = ParameterReader(form, self._types.get(name, {}))
        return self._go(self._named)

    def _named(self) -> bool:
        """Inside arguments that stand one by one."""
        assert self._parameters is not None, "made at the name of the call"
        fragment, self._held, is_whole = self._parameters.read(self._held)
        if fragment:
            self._deltas.append(ToolCallDelta(self._index, fragment))
        return self._go(self._after) if is_whole else False

    def _arguments(self) -> bool:
        """Inside the JSON object of a call's arguments."""
        if self._depth == 0:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            if self._held[0] != "{":
                return self._go(self._plain)
        end = self._object_end()
        fragment, self._held = self._held[:end], self._held[end:]
        self._deltas.append(ToolCallDelta(self._index, fragment))
        return self._go(self._after) if self._depth == 0 else False

    def _object_end(self) -> int:
        """Read on in a JSON object; return how far it goes."""
        for index, letter in enumerate(self._held):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return len(self._held)

    def _after(self) -> bool:
        """Behind the arguments of a call."""
        length = match_length(self._held, self._calls.end)
        if length is None:
            return False
        self._held = self._held[max(0, length) :]
        return self._go(self._between)

    def _between(self) -> bool:
        """Behind a call: at the next one, at the end of all, or at text."""
        if not self._held.strip():
            return False
        separator = self._calls.separator
        for text, state in (
            (None if separator is None else separator + self._calls.begin, self._call),
            (self._calls.closing or None, self._done),
        ):
            length = -1 if text is None else match_length(self._held, text)
            if length is None:
                return False
            if length >= 0:
                self._held = self._held[length:]
                return self._go(state)
        return self._go(self._done)

    def _done(self) -> bool:
        """Behind all calls, where only text may follow."""
        self._held = self._held.lstrip()
        return self._go(self._plain) if self._held else False

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _release(self, texts: list[str], marker: str) -> str:
        """Pass on what is held but an end that may belong to a marker, and white space before it; return the rest."""
        text = self._held
        overlap = next(
            (size for size in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-size:])), 0
        )
        kept = text[: len(text) - overlap].rstrip()
        texts.append(kept)
        return text[len(kept) :]


def _random_id() -> str:
    """Nine letters and digits, as Mistral's templates demand."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls that deltas spell out, in order."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(delta.id, delta.name, ""))
        else:
            call = calls[delta.index]
            calls[delta.index] = ToolCall(call.id, call.name, call.arguments + delta.arguments)
    return tuple(calls)

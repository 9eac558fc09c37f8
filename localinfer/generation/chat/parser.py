"""A reply taken apart while it arrives: reasoning, content and tool calls, however its text is split."""

import re
import string
from collections.abc import Callable, Mapping
from hashlib import blake2b
from itertools import count
from typing import Literal, NamedTuple

import numpy as np

from localinfer.generation.chat.argument_reader import (
    NotationReader,
    ParameterReader,
    id_in,
    match_length,
    name_length,
)
from localinfer.generation.stream import ReplyDelta, ToolCallDelta
from localinfer.models.text.reply_format import CALL_NAME, HERMES, CallFormat, ReasoningFormat, first_marker
from localinfer.types import TokenIds

_NOT_NAME = re.compile(r"[^A-Za-z0-9_.:-]")
_MEMBER = re.compile(r',\s*"\w{1,32}"\s*:\s*("[^"\\]{0,64}"|\d{1,9}(?=\D))\s*')
"""Such as an id, which models write beside the arguments where their templates do."""
_PART_OF_MEMBER = re.compile(r',?\s*("\w{0,32}("\s*(:\s*(("[^"\\]{0,64}"?|\d{1,9})\s*)?)?)?)?')
_MOST_BEFORE_ARGUMENTS = 200
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""As Mistral's templates demand."""


class Mark(NamedTuple):
    """Literal that changes a parser's state: its first marker, the whole, and the state it begins."""

    first: str
    literal: str
    state: Literal["call", "frame", "reasoning"]


def marks_of(reasoning: ReasoningFormat, calls: CallFormat | None) -> list[Mark]:
    """Marks in the text of a reply: of calls, around answers, and of reasoning that begins again."""
    begins = [] if calls is None or not calls.trigger else [calls.opening + calls.begin, *calls.other_begins]
    if calls is not None and not reasoning.answer_begin:
        begins += calls.late_begins
    literals: list[tuple[str, Literal["call", "frame", "reasoning"]]] = []
    literals += [(begin, "call") for begin in begins[:1] if first_marker(begin)]
    literals += [(begin, "call") for begin in begins[1:]]
    if reasoning.answer_begin:
        literals += [(text, "frame") for text in reasoning.frame]
        literals.append((reasoning.begin, "reasoning"))
    if following := reasoning.following:
        frames = (reasoning.answer_begin, *reasoning.other_answers)
        for before in (reasoning.end + following, following):
            literals += [(before + begin, "call") for begin in begins]
            literals += [(before + text, "frame") for text in frames]
            literals.append((before + reasoning.begin, "reasoning"))
    return [Mark(first_marker(text) or text, text, state) for text, state in literals]


class ReplyParser:
    """Takes the text of one reply as it arrives; what it returns, joined, does not depend on where the text is split.

    starts_reasoning: the prompt has opened the reasoning. types: by tool and parameter, the JSON types that it may
    have, for formats that write strings without quotation marks; there, arguments become JSON here. calls_in_reasoning:
    a call inside the reasoning is one too. White space around reasoning and before calls belongs to the format and is
    left out. Text that looks like a call but is none is content, or reasoning inside of that.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat | None,
        *,
        starts_reasoning: bool = False,
        calls_in_reasoning: bool = False,
        types: Mapping[str, Mapping[str, frozenset[str]]] | None = None,
        new_id: Callable[[], str],
    ) -> None:
        # Without one, its states are never reached.
        self._format = reasoning or ReasoningFormat("", "", "")
        self._has_calls, self._calls = calls is not None, calls or HERMES
        self._types = types or {}
        self._parameters: ParameterReader | NotationReader | None = None
        self._new_id = new_id
        self._held = ""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._index = -1
        self._begun = ""
        self._call_id: str | None = None
        self._ids: set[str] = set()
        self._depth = 0
        self._in_string = self._escaped = False
        # By what may stand in a text: the state behind it.
        self._marks = marks_of(self._format, calls)
        may_call = calls_in_reasoning and calls is not None and not self._format.answer_begin
        self._thought_marks = [mark for mark in self._marks if mark.state == "call" and may_call]
        self._is_thinking = False
        self._has_content = self._has_reasoning = False
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

        A call that was cut short before its arguments is text; the rest of the frame behind them is left out.
        """
        if self._state in (self._reopened, self._thought):
            self._reasoning.append(self._held.rstrip())
        elif self._state == self._named and self._parameters is not None:
            if fragment := self._parameters.flush(self._held):
                self._deltas.append(ToolCallDelta(self._index, fragment))
        elif self._state == self._call:
            # Behind other calls, what stands between them comes first.
            self._texts.append(self._begun.lstrip() + self._held if self._index >= 0 else self._begun + self._held)
        elif self._state == self._text and self._is_cut_frame(self._held.strip()):
            pass
        elif self._state not in (self._gap, self._after, self._between, self._done):
            self._content.append(self._held)
        self._held = ""
        return self._take()

    @property
    def _texts(self) -> list[str]:
        """Output of the text in which a call began."""
        return self._reasoning if self._is_thinking else self._content

    def _is_cut_frame(self, text: str) -> bool:
        """True if a text is only the beginning of a mark around content."""
        return len(text) > 2 and any(mark.state == "frame" and mark.literal.startswith(text) for mark in self._marks)

    def _take(self) -> ReplyDelta:
        delta = ReplyDelta("".join(self._content), "".join(self._reasoning), tuple(self._deltas))
        self._has_content = self._has_content or bool(delta.content)
        self._has_reasoning = self._has_reasoning or bool(delta.reasoning)
        self._content.clear()
        self._reasoning.clear()
        self._deltas.clear()
        return delta

    # Each state below consumes the buffered text, and returns True to parse the rest.

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
        end, marks = self._format.end, self._thought_marks
        place = self._held.find(end)
        last = place if place >= 0 else len(self._held)
        begins = [(found.start(), mark) for mark in marks for found in re.finditer(re.escape(mark.first), self._held)]
        for call, mark in sorted(begins):
            if call < last and (found := self._call_in_thought(call, mark)) is not None:
                return found
        if place >= 0:
            self._reasoning.append(self._held[:place].rstrip())
            self._held = self._held[place + len(end) :]
            self._is_thinking = False
            return self._go(self._gap)
        self._held = self._release(self._reasoning, end, *(mark.first for mark in marks))
        return False

    def _call_in_thought(self, place: int, mark: Mark) -> bool | None:
        """At a possible call inside the reasoning: True to parse the rest, None if it begins none."""
        length = match_length(self._held[place:], mark.literal)
        if length == -1:
            return None
        before = self._held[:place].rstrip()
        self._reasoning.append(before)
        self._held = self._held[len(before) :]
        if length is None:
            return False
        self._is_thinking = True
        return self._begin_call(place - len(before) + length, mark.literal)

    def _gap(self) -> bool:
        """Behind the reasoning."""
        self._held = self._held.lstrip()
        return self._go(self._start) if self._held else False

    def _start(self) -> bool:
        """At the start of content and, in some formats, of a call, if there is one."""
        if self._has_calls and not self._calls.trigger:
            frames = [match_length(self._held, mark.literal) for mark in self._marks if mark.state != "call"]
            begins = (self._calls.opening + self._calls.begin, *self._calls.other_begins)
            lengths = {begin: match_length(self._held, begin) for begin in begins}
            for begin, length in lengths.items():
                if length is not None and length >= 0 and all(size == -1 for size in frames):
                    return self._begin_call(length, begin)
            if None in lengths.values() or None in frames:
                return False
        return self._go(self._text if self._marks else self._plain)

    def _plain(self) -> bool:
        self._content.append(self._held)
        self._held = ""
        return False

    def _text(self) -> bool:
        """Content in which a marker may begin a call, or stand around the content."""
        places = [(place, mark.first) for mark in self._marks if (place := self._held.find(mark.first)) >= 0]
        if not places:
            self._held = self._release(self._content, *(mark.first for mark in self._marks))
            return False
        place, first = min(places)
        before = self._held[:place].rstrip()
        best, mark = -1, self._marks[0]
        for one in self._marks:
            length = match_length(self._held[place:], one.literal)
            if length is None:
                self._content.append(before)
                self._held = self._held[len(before) :]
                return False
            if length > best:
                best, mark = length, one
        if best < 0:
            self._content.append(self._held[: place + len(first)])
            self._held = self._held[place + len(first) :]
            return True
        self._content.append(before)
        if mark.state == "call":
            self._held = self._held[len(before) :]
            return self._begin_call(place - len(before) + best, mark.literal)
        self._held = self._held[place + best :]
        return self._go(self._reopened if mark.state == "reasoning" else self._framed)

    def _framed(self) -> bool:
        """Behind a marker that stands around content, which takes white space with it."""
        self._held = self._held.lstrip()
        return self._go(self._text) if self._held else False

    def _begin_call(self, length: int, literal: str) -> bool:
        self._begun, self._held = self._held[:length], self._held[length:]
        self._call_id = id_in(self._begun, literal)
        return self._go(self._call)

    def _call(self) -> bool:
        """At the name of a call, and behind it where its arguments begin."""
        # What is no call after all keeps its white space.
        held = self._held.lstrip()
        found = _NOT_NAME.search(held)
        if found is None:
            return False
        calls, form = self._calls, self._calls.parameters
        ends = [calls.middle, "" if form is None else form.empty]
        run = held[: found.start()]
        size = name_length(held, len(run), [text.replace(CALL_NAME, run) for text in ends])
        if size is None:
            return False
        name, rest = held[:size], held[size:]
        middle = calls.middle.replace(CALL_NAME, name)
        length = match_length(rest, middle)
        empty = -1 if form is None else match_length(rest, form.empty.replace(CALL_NAME, name))
        if calls.name_end and (length is None or length < 0):
            place = rest.find(calls.name_end, 0, _MOST_BEFORE_ARGUMENTS)
            length = place + len(calls.name_end) if place >= 0 else None if len(rest) < _MOST_BEFORE_ARGUMENTS else -1
        if length is None or empty is None:
            return False
        if form is None and length >= 0:
            arguments = rest[length:].lstrip()
            if not arguments:
                return False
            length = length if arguments[0] == "{" else -1
        if max(length, empty) < 0 or not name:
            # It only began like a call.
            self._texts.append(self._begun)
            return self._go(self._behind_calls())
        self._index += 1
        self._deltas.append(ToolCallDelta(self._index, id=self._id(rest[:length], middle), name=name))
        self._held = rest[max(length, empty) :]
        if form is None:
            self._depth, self._in_string, self._escaped = 0, False, False
            self._held = self._held.lstrip()
            return self._go(self._arguments)
        if empty > length:
            self._deltas.append(ToolCallDelta(self._index, "{}"))
            return self._go(self._between)
        types = self._types.get(name, {})
        if form.notation is None:
            self._parameters = ParameterReader(form, calls.end, types)
        else:
            self._parameters = NotationReader(form, types)
        return self._go(self._named)

    def _id(self, written: str, middle: str) -> str:
        """The id of the next call: the model's own, if it wrote one that no other call of the reply has."""
        own = self._call_id or id_in(written, middle)
        call_id = self._new_id() if own is None or own in self._ids else own
        self._ids.add(call_id)
        return call_id

    def _named(self) -> bool:
        """Inside arguments that stand one by one."""
        assert self._parameters is not None, "made at the name of the call"
        fragment, self._held, is_whole = self._parameters.read(self._held)
        if fragment:
            self._deltas.append(ToolCallDelta(self._index, fragment))
        return self._go(self._after) if is_whole else False

    def _arguments(self) -> bool:
        """Inside the JSON object of a call's arguments."""
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
        if self._calls.parameters is None and self._calls.end.startswith("}") and self._held.lstrip().startswith(","):
            # Another member of the object that the arguments are in.
            found = _MEMBER.match(self._held.lstrip())
            if found is None and _PART_OF_MEMBER.fullmatch(self._held.strip()):
                return False
            self._held = self._held if found is None else self._held.lstrip()[found.end() :]
        length = match_length(self._held, self._calls.end)
        if length is None:
            return False
        self._held = self._held[max(0, length) :]
        return self._go(self._between)

    def _between(self) -> bool:
        """Behind a call: at the next one, at the end of all, or at text."""
        if not self._held.strip():
            return False
        calls = self._calls
        next_call = None if calls.separator is None else calls.separator + calls.begin
        for text in (next_call, calls.closing or None):
            length = -1 if text is None else match_length(self._held, text)
            if length is None:
                return False
            if length < 0 or text is None:
                continue
            if text == next_call:
                return self._begin_call(length, text)
            self._held = self._held[length:]
            break
        return self._go(self._done)

    def _done(self) -> bool:
        """Behind all calls, where text may follow, and others behind that."""
        rest = self._held.lstrip()
        if not rest:
            return False
        is_first = not (self._has_reasoning if self._is_thinking else self._has_content)
        if is_first and not any(self._texts):
            self._held = rest
        return self._go(self._behind_calls())

    def _behind_calls(self) -> Callable[[], bool]:
        """The state behind a call or what only began like one."""
        if self._is_thinking:
            return self._thought
        return self._text if self._marks else self._plain

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _release(self, texts: list[str], *markers: str) -> str:
        """Pass on what is held but an end that may belong to a marker, and white space before it; return the rest."""
        text = self._held
        overlap = 0
        for marker in markers:
            sizes = range(min(len(text), len(marker) - 1), overlap, -1)
            overlap = next((size for size in sizes if marker.startswith(text[-size:])), overlap)
        kept = text[: len(text) - overlap].rstrip()
        texts.append(kept)
        return text[len(kept) :]


def call_ids(prompt_ids: TokenIds, seed: int) -> Callable[[], str]:
    """Names for the tool calls of one reply: the same where the same reply is generated again, and else other ones."""
    numbers = count()

    def next_id() -> str:
        text = blake2b(np.ascontiguousarray(prompt_ids, np.int32).tobytes(), digest_size=16)
        text.update(seed.to_bytes(16, "little"))
        text.update(next(numbers).to_bytes(8, "little"))
        number = int.from_bytes(text.digest(), "little")
        letters = []
        for _ in range(_ID_LENGTH):
            number, index = divmod(number, len(_ID_LETTERS))
            letters.append(_ID_LETTERS[index])
        return "".join(letters)

    return next_id

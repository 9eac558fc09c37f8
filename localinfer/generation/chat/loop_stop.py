r"""A stop for loops: the same lines again and again inside of a reply, and the same call with the same result.

Small models, and large ones in long conversations, repeat themselves until the reply is cut off. What is ended is the
loop and not the turn: where the text would go into one more round, the tokens that continue it exactly are not allowed,
and the model goes on with the next likely one, under a grammar with what that allows.

A call that has come several times in a turn with the same arguments and the same result is followed by a note behind
that result, which depends on the messages before it alone, so that a conversation that continues is still cached; and
the next reply cannot make exactly that call.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.sampling.mask import Allowed, GuidingMask
from localinfer.types import TokenIds

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer

MOST_ROUNDS = 8
"""Rounds of one loop in a reply, without another text between them."""
LEAST_LINES_BYTES, LEAST_BYTES = 160, 400
"""Of all rounds together, of whole lines and of others: shorter repetitions are rulers, tables and data."""
MOST_CALLS = 3
"""Equal calls with equal results in one turn."""
_LONGEST = 1_024
"""Bytes of one round."""
_MOST_HELD = _LONGEST * (MOST_ROUNDS + 1)
_KEPT_STATES = 64
_CLOSERS = b'"]} \n'
_LINE_ENDS = (b"\n", b"\\n")
_NOTE = (
    "[This call has now come {} times with the same arguments and the same result. Another one will not help: do "
    "something else, or say what is missing.]"
)


class _State(NamedTuple):
    """A text so far."""

    tail: bytes
    equal: NDArray[np.int32]
    """By period less one: so many bytes at the end are those one period before."""


class LoopStop:
    """A mask that lets a reply repeat itself so often, over another mask or none.

    banned: calls that may not be made again, each as text up to the end of its arguments. notices: gets a line when a
    loop is ended.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        mask: GuidingMask | None,
        *,
        start: int,
        vocab_size: int,
        banned: Sequence[str] = (),
        notices: list[str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._mask = mask
        self._start = start
        self._banned = [text.encode() for text in banned]
        self._notices = notices if notices is not None else []
        self._everything = np.ones(vocab_size, np.bool_)
        self._followed = np.empty(0, np.int32)
        self._states = {0: _State(b"", np.zeros(_LONGEST, np.int32))}
        self._ended: list[bytes] = []
        self._ids: dict[bytes, list[int]] | None = None
        self._longest_token = 0

    def __call__(self, history: TokenIds) -> Allowed:
        allowed = self._everything if self._mask is None else self._mask(history)
        forbidden = self._forbidden(history)
        if not forbidden:
            return allowed
        rest = allowed.copy()
        rest[forbidden] = False
        # What has to come, comes.
        return rest if rest.any() else allowed

    def forced(self, history: TokenIds, most: int) -> list[int]:
        return [] if self._mask is None else self._mask.forced(history, most)

    def prepare(self, history: TokenIds, position: int) -> None:
        if self._mask is not None:
            self._mask.prepare(history, position)

    def count_allowed(self, history: TokenIds, draft: Sequence[int]) -> int:
        count = len(draft) if self._mask is None else self._mask.count_allowed(history, draft)
        for index in range(count):
            before = np.concatenate((history, np.array(draft[:index], np.int32)))
            if draft[index] in self._forbidden(before) and not self(before)[draft[index]]:
                return index
        return count

    def _forbidden(self, history: TokenIds) -> list[int]:
        """Tokens by which the text would go into one more round, or make a call again."""
        state = self._follow(history[self._start :])
        found = []
        if (coming := self._round(state)) is not None:
            found += self._beginnings(coming)
        for text in self._banned:
            found += self._last_tokens(state.tail, text)
        return found

    def _round(self, state: _State) -> bytes | None:
        """The round that would come next, None where the text is in no loop, or amid a line of one."""
        tail, equal = state
        periods = np.arange(1, _LONGEST + 1)
        enough = (equal >= (MOST_ROUNDS - 1) * periods) & (equal + periods >= LEAST_LINES_BYTES)
        found = np.flatnonzero(enough)
        period = int(found[0]) + 1 if found.size else self._period_again(state)
        if period is None:
            return None
        coming = tail[-period:]
        if any(end in coming for end in _LINE_ENDS):
            if not tail.endswith(_LINE_ENDS):
                return None
        elif found.size and equal[period - 1] + period < LEAST_BYTES:
            return None
        doubled = coming + coming
        if not any(coming in one and len(one) == 2 * period for one in self._ended):
            self._ended.append(doubled)
            line = f"a loop was ended: {period} bytes had come {MOST_ROUNDS} times (loop_stop: false lets it go on)"
            if line not in self._notices:
                self._notices.append(line)
        return coming

    def _period_again(self, state: _State) -> int | None:
        """The period of a loop that was ended before and has begun again, twice so far."""
        for doubled in self._ended:
            period = len(doubled) // 2
            if state.equal[period - 1] >= period and state.tail[-period:] in doubled:
                return period
        return None

    def _beginnings(self, coming: bytes) -> list[int]:
        """Tokens whose texts a text begins with that repeats without end."""
        ids = self._by_text()
        text = coming * (self._longest_token // len(coming) + 1)
        return [one for size in range(1, self._longest_token + 1) for one in ids.get(text[:size], ())]

    def _last_tokens(self, tail: bytes, text: bytes) -> list[int]:
        """Tokens that would make the text of a call whole, or leave of it nothing but what closes it."""
        closing = len(text) - len(text.rstrip(_CLOSERS))
        found = []
        for left in range(1, closing + 1):
            if tail.endswith(text[: len(text) - left]):
                rest = text[len(text) - left :]
                found += [one for spelled, ids in self._by_text().items() if _completes(spelled, rest) for one in ids]
        return found

    def _by_text(self) -> dict[bytes, list[int]]:
        if self._ids is None:
            self._ids = {}
            for token_id, spelled in enumerate(self._tokenizer.vocabulary_bytes()[: self._everything.size]):
                if spelled and not self._tokenizer.is_special(token_id):
                    self._ids.setdefault(bytes(spelled), []).append(token_id)
            self._longest_token = max(map(len, self._ids), default=1)
        return self._ids

    def _follow(self, token_ids: TokenIds) -> _State:
        """The state behind some tokens."""
        shared = min(token_ids.size, self._followed.size)
        differs = np.flatnonzero(token_ids[:shared] != self._followed[:shared])
        if differs.size:
            shared = int(differs[0])
        known = max((size for size in self._states if size <= shared), default=-1)
        self._states = {size: state for size, state in self._states.items() if size <= shared}
        if known < 0:
            # Far back: all of it anew.
            known, self._states = 0, {0: _State(b"", np.zeros(_LONGEST, np.int32))}
        state = self._states[known]
        for size in range(known + 1, token_ids.size + 1):
            token_id = int(token_ids[size - 1])
            spelled = self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""
            state = _after(state, spelled)
            self._states[size] = state
            if len(self._states) > _KEPT_STATES:
                del self._states[min(self._states)]
        self._followed = token_ids.copy()
        return state


def _after(state: _State, spelled: bytes) -> _State:
    tail, equal = state
    for code in spelled:
        before = np.frombuffer(tail[-_LONGEST:], np.uint8)[::-1]
        grown = np.zeros(_LONGEST, np.int32)
        grown[: before.size] = np.where(before == code, equal[: before.size] + 1, 0)
        tail, equal = tail + bytes((code,)), grown
    return _State(tail[-_MOST_HELD:], equal)


def _completes(spelled: bytes, rest: bytes) -> bool:
    return spelled.startswith(rest) or (rest.startswith(spelled) and not rest[len(spelled) :].strip(_CLOSERS))


class RepeatedCall(NamedTuple):
    """A call that has come again and again in a turn."""

    function: Mapping[str, Any]
    """Its name and arguments, as it stands in a message."""
    times: int


def with_notes(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[RepeatedCall]]:
    """Messages, as `read_messages` reads them, with a note behind each result of a call that has come too often.

    Also the calls of which the last results are that.
    """
    made: list[Mapping[str, Any]] = []
    counts: dict[tuple[str, str], int] = {}
    calls: dict[str, Mapping[str, Any]] = {}
    order: list[str] = []
    last: list[RepeatedCall] = []
    for message in messages:
        role = message["role"]
        if role == "tool":
            given = message.get("tool_call_id")
            call_id = given if isinstance(given, str) else order[0] if order else ""
            function = calls.get(call_id)
            order = [one for one in order if one != call_id]
            if function is not None:
                key = _written(function), str(message["content"])
                counts[key] = count = counts.get(key, 0) + 1
                if count >= MOST_CALLS and isinstance(message["content"], str):
                    message = {**message, "content": f"{message['content']}\n\n{_NOTE.format(count)}"}
                    last.append(RepeatedCall(function, count))
        else:
            last = []
            if role == "user":
                counts.clear()
            for number, call in enumerate(message.get("tool_calls") or ()):
                call_id = str(call.get("id") or f"#{number}")
                calls[call_id] = call["function"]
                order.append(call_id)
        made.append(message)
    return made, last


def _written(function: Mapping[str, Any]) -> str:
    """A call as text that is the same for the same arguments."""
    return json.dumps([function.get("name"), arguments_of(function)], sort_keys=True)


def arguments_of(function: Mapping[str, Any]) -> Any:
    """The arguments of a call; text that is no JSON as it is."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
